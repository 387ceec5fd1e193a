"""What a tool host is given that starts before the plan is there."""

from __future__ import annotations

import os
import select
from typing import cast

import msgspec
import pytest

from goondan.kernel.premises import Premises
from goondan.kernel.supervisor.options import Options
from goondan.kernel.supervisor.services import Launches
from goondan.schemas.bundle.launch import KernelPlan, SandboxSpec, ToolHostSpec, ToolSpec
from goondan.schemas.system.startup import read_token
from goondan.schemas.wire.tokens import SECRET_BYTES, Claims, verify

SECRET = b"s" * SECRET_BYTES


class Place:
    """A runtime directory by name only."""

    run_dir = "/r"
    alive_fd = 0


def plan() -> KernelPlan:
    tool = ToolSpec(name="t", entry="/e", root="/r", exports=[], sandbox=SandboxSpec(env=["GRANTED", "UNSET"]))
    host = ToolHostSpec(tools=[tool], state_dir="/s", revision="r7")
    return KernelPlan(revision="r7", bundle="/b", state_dir="/s", entry_agent="a", agents={}, toolhost=host)


@pytest.fixture
def launches() -> Launches:
    options = Options(bundle="/b", state_dir="/s")
    return Launches(options, cast("Premises", Place()), SECRET, os.close)


def given(launches: Launches, run: int) -> tuple[int, int]:
    """The descriptors of token and values of a tool host that starts now."""
    launch = launches.prepare("toolhost", run)
    token_fd, status_fd, values_fd = launch.pass_fds
    os.close(status_fd)
    return token_fd, values_fd


def values_of(fd: int) -> dict[str, str]:
    with open(fd, "rb") as source:
        return msgspec.msgpack.decode(source.read(), type=dict[str, str])


def test_its_token_comes_with_the_plan_and_its_values_are_there_then(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRANTED", "v")
    monkeypatch.setenv("OTHER", "not granted")
    monkeypatch.delenv("UNSET", raising=False)
    token_fd, values_fd = given(launches, 1)
    assert select.select([token_fd], [], [], 0)[0] == []
    launches.know(plan())
    claims = verify(SECRET, read_token(token_fd, None))
    assert claims == Claims("toolhost", "1", launch=1, revision="r7")
    assert values_of(values_fd) == {"GRANTED": "v"}


def test_one_that_starts_later_has_them_at_once(launches: Launches) -> None:
    launches.know(plan())
    token_fd, values_fd = given(launches, 3)
    assert verify(SECRET, read_token(token_fd, None)).launch == 3
    assert "GRANTED" not in values_of(values_fd)


@pytest.mark.parametrize("again", [False, True])
def test_one_that_gets_no_plan_reads_the_end(launches: Launches, again: bool) -> None:
    token_fd, values_fd = given(launches, 1)
    if again:  # it has ended, and another one takes its place
        for fd in given(launches, 2):
            os.close(fd)
    else:
        launches.close()
    assert os.read(token_fd, 100) == b""
    os.close(token_fd)
    os.close(values_fd)
    launches.know(plan())


def test_one_that_has_ended_before_the_plan_is_there_changes_nothing(launches: Launches) -> None:
    for fd in given(launches, 1):
        os.close(fd)
    launches.know(plan())
    token_fd, values_fd = given(launches, 2)
    assert verify(SECRET, read_token(token_fd, None)).launch == 2
    os.close(values_fd)
