"""What the supervisor computes before it starts anything."""

from __future__ import annotations

from goondan.kernel.supervisor.options import with_network
from goondan.schemas.bundle.launch import AgentSpec, KernelPlan, ModelSpec, SandboxSpec, ToolHostSpec, ToolSpec


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
