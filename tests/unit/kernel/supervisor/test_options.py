"""What the supervisor computes before it starts anything."""

from __future__ import annotations

import os

import pytest

from goondan.kernel.spawn import memory_file, read_environment
from goondan.kernel.supervisor.options import parse, with_network
from goondan.schemas.bundle.launch import AgentSpec, KernelPlan, ModelSpec, SandboxSpec, ToolHostSpec, ToolSpec
from goondan.schemas.wire.errors import GoondanError


def plan(*networks: object) -> KernelPlan:
    tools = [
        ToolSpec(name=f"t{n}", entry="/e", root="/r", exports=[], sandbox=SandboxSpec(network=network))
        for n, network in enumerate(networks)
    ]
    agent = AgentSpec(
        name="a", model=ModelSpec(provider="embedded"), registry=[], catalog=[], state_dir="/s", revision="r"
    )
    host = ToolHostSpec(tools=tools, state_dir="/s", revision="r")
    return KernelPlan(revision="r", bundle="/b", state_dir="/s", entry_agent="a", agents={"a": agent}, toolhost=host)


def test_a_grant_comes_on_top_of_what_each_tool_asked_for() -> None:
    before = plan("none", {"allow": ["api.example.com:443", "localhost:80"]}, "public")
    after = with_network(before, ["localhost:80", "db:5432"])
    assert [tool.sandbox.network for tool in after.toolhost.tools] == [
        {"allow": ["db:5432", "localhost:80"]},
        {"allow": ["api.example.com:443", "db:5432", "localhost:80"]},
        {"allow": ["db:5432", "localhost:80"], "public": True},
    ]
    assert before.toolhost.tools[0].sandbox.network == "none"
    assert after.agents == before.agents


@pytest.mark.parametrize("number", ["-1", "x", str(1 << 31)])
@pytest.mark.parametrize("name", ["ready", "parent", "agreed", "environment", "resume"])
def test_what_no_descriptor_has_is_bad_usage(name: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--bundle", "/b", f"--{name}-fd", number])
    assert end.value.code == 2
    assert f"argument --{name}-fd: invalid descriptor value" in capsys.readouterr().err


def test_the_environment_of_a_descriptor_takes_the_place_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(os, "environb", {})
    read_environment(memory_file("e", b"A=1\0=no name\0B=\0C=a=b\0D=\xff\0NONE\0\0"))
    assert os.environb == {b"A": b"1", b"B": b"", b"C": b"a=b", b"D": b"\xff", b"NONE": b""}
    assert not os.environ


def test_a_descriptor_of_no_environment_is_told() -> None:
    folder = os.open("/", os.O_RDONLY)
    with pytest.raises(GoondanError, match="the environment cannot be read: ") as told:
        read_environment(folder)
    assert told.value.info.code == "E_USAGE"
    os.close(folder)
