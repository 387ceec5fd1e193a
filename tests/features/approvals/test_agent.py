"""Calls of one turn that wait for a person, in the agent: when the turn is given back, and how a call goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from goondan.agentproc.calls.caller import CallContext
from goondan.agentproc.machine.catalog import Catalog
from goondan.agentproc.machine.messages import ToolCallPart
from goondan.agentproc.turn.parts import Call
from goondan.features.approvals.agent import WaitingCalls, who_refused
from goondan.features.approvals.wire import (
    MAX_ARGS_BYTES,
    ApprovalAsk,
    ApprovalState,
    Condition,
    Policy,
    Rule,
    read_policy,
)
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail, tool_error
from goondan.schemas.wire.frames import Frame, ToolResult
from tests.unit.agentproc.fakes import make_spec

RULES = {"rules": [{"tools": ["deploy"], "action": "ask", "when": {"args.where": {"equals": "production"}}}]}


class Turn:
    """As much of a turn as calls that wait need."""

    def __init__(self) -> None:
        items = [CatalogItem(name="deploy"), CatalogItem(name="look")]
        policy, problems = read_policy("approval", RULES)
        assert not problems
        self.spec = make_spec("/s", registry=items, catalog=["deploy", "look"], parts={"approvals": to_raw([policy])})
        self.link = self.store = self.instance = self.notes = self.live = self.calls = self
        self.context, self.turn_id = CallContext("t1", "e1", 7), "t1"
        self.asked: list[tuple[Frame, asyncio.Future[Frame]]] = []
        self.noted: list[str] = []
        self.ran: list[str] = []
        self.results: list[ToolResult] = []
        self.woken = self.lost = 0
        self.refusals: list[tuple[str, str]] = []
        self.catalog = Catalog(self.spec).for_step()
        self.approvals = WaitingCalls(self)  # type: ignore[arg-type]

    def rouse(self) -> None:
        self.woken += 1

    def abandon(self) -> None:
        self.lost += 1

    def refused(self, tool_call_id: str, by: str, allow: str) -> None:
        self.refusals.append((tool_call_id, by))

    def clock(self) -> str:
        return "now"

    @contextmanager
    def write(self) -> Any:
        yield

    def waits(self, tool_call_id: str, at: str = "", within: str | None = None) -> None:
        if at:
            self.noted.append(tool_call_id)

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self.asked.append((frame, future))
        return future

    def forget(self, frame_id: str) -> None:
        self.asked[-1][1].cancel()

    def call(self, name: str, where: str, tool_call_id: str = "c1", *, here: bool = True) -> None:
        action: Any = SimpleNamespace(part=ToolCallPart(tool_call_id, name, {"where": where}), within=None)
        call = Call(action, {"where": where}, 1, lambda: here)
        self.approvals.call(call, self.results.append, self.start)

    def start(self, call: Call, done: Callable[[ToolResult], None]) -> None:
        self.ran.append(call.id)
        self.done = done

    async def reply(self, state: ApprovalState | GoondanError) -> None:
        _, future = self.asked.pop(0)
        if isinstance(state, GoondanError):
            future.set_exception(state)
        else:
            future.set_result(Frame("reply", payload=to_raw(state)))
        await asyncio.sleep(0)


async def test_a_call_that_no_rule_concerns_runs_at_once() -> None:
    turn = Turn()
    turn.call("look", "production")
    turn.call("deploy", "test", "c2")
    assert turn.ran == ["c1", "c2"]
    assert not turn.asked


async def test_a_call_that_waits_parks_the_turn_and_is_made_anew() -> None:
    turn = Turn()
    turn.call("deploy", "production")
    frame = turn.asked[0][0]
    assert (frame.type, frame.tool, frame.call_id, frame.event_id, frame.epoch) == (
        "approval.ask", "deploy", "t1/c1", "e1", 7
    )  # fmt: skip
    assert from_raw(from_raw(frame.payload, ApprovalAsk).args, dict) == {"where": "production"}
    assert not turn.approvals.parks(["c1"]), "nobody has said that it waits"
    await turn.reply(ApprovalState(state="waits"))
    assert (turn.noted, turn.woken) == (["c1"], 1)
    assert turn.approvals.parks(["c1"])
    assert not turn.approvals.parks(["c1", "c2"]), "another call of the step still runs"
    turn.approvals.news(Frame("approval.news", calls=["t1/c10", "t2/c1"]))
    assert turn.approvals.parks(["c1"]), "news of others"
    turn.approvals.news(Frame("approval.news", calls=["t1/c1"]))
    assert not turn.approvals.parks(["c1"])
    await turn.reply(ApprovalState(state="run"))
    assert turn.ran == ["c1"]


async def test_a_denied_call_is_a_result() -> None:
    turn = Turn()
    turn.call("deploy", "production")
    await turn.reply(ApprovalState(state="denied", reason="not today"))
    (result,) = turn.results
    assert result.error is not None
    assert (result.error.code, turn.ran) == ("E_APPROVAL_DENIED", [])
    assert "not today" in result.error.message


@pytest.mark.parametrize(("code", "lost"), [("E_LEASE_LOST", 1), ("E_TOOL_LIMIT", 0)])
async def test_what_cannot_be_asked_does_not_run(code: str, lost: int) -> None:
    turn = Turn()
    turn.call("deploy", "production")
    await turn.reply(fail(code, "no"))
    assert (turn.ran, turn.lost, len(turn.results)) == ([], lost, 1 - lost)


async def test_a_call_that_is_dropped_waits_for_nobody() -> None:
    turn = Turn()
    turn.call("deploy", "production")
    turn.approvals.drop("c1")
    await asyncio.sleep(0)
    assert turn.results == []
    turn.call("deploy", "production", "c2")
    turn.asked.pop(0)
    await turn.reply(ApprovalState(state="waits"))
    turn.approvals.close()
    turn.approvals.news(Frame("approval.news", calls=["t1/c2"]))
    assert not turn.asked


async def test_a_rule_that_comes_in_the_middle_of_a_turn_holds_from_then_on() -> None:
    turn = Turn()
    turn.call("look", "anywhere")
    policy, _ = read_policy("approval", {"default": "ask"})
    turn.spec = structs.replace(turn.spec, parts={"approvals": to_raw([policy])})
    turn.call("look", "anywhere", "c2")
    assert (turn.ran, len(turn.asked)) == (["c1"], 1)


async def test_who_has_refused_a_call_is_noted_also_of_calls_at_a_tool_host() -> None:
    turn = Turn()
    turn.call("deploy", "production")
    await turn.reply(ApprovalState(state="denied", reason="no"))
    turn.call("deploy", "production", "c2", here=False)
    assert turn.ran == ["c2"], "the broker asks about it"
    turn.done(ToolResult(status="error", error=tool_error("E_APPROVAL_DENIED", "no", name="BusError")))
    assert turn.refusals == [("c1", "person"), ("c2", "person")]


def test_a_rule_is_named_with_the_line_that_goes_before_it_and_a_person_is_told_from_a_rule() -> None:
    rules = [
        Rule(["bash__*"], "deny", [Condition(["command"], "startsWith", "rm")]),
        Rule(["bash__*"], "ask", [Condition(["command"], "startsWith", "mv")]),
    ]
    policies = [Policy("careful", rules), Policy("last", default="deny")]
    line = '{tools: ["bash__exec"], action: allow}'
    first = who_refused(policies, "bash__exec", {"command": "rm x"})
    assert first == ("rule", f"Extension/careful: a rule before number 0: {line}")
    last = who_refused(policies, "bash__exec", {"command": "ls"})
    assert last == ("rule", f"Extension/last: a rule as the last one: {line}")
    by, allow = who_refused(policies[:1], "bash__exec", {"command": "mv x"})
    assert by == "person"
    assert allow.startswith("answer yes when it is asked again (gdn approve), or Extension/careful: ")
    shown_to_nobody = who_refused(policies[:1], "bash__exec", {"command": f"mv {'x' * MAX_ARGS_BYTES}"})
    assert shown_to_nobody == ("rule", f"Extension/careful: a rule before number 1: {line}")
