"""What a token is shown and decides about: only what is of its agents. And which turns a filter finds."""

from __future__ import annotations

import os
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from goondan.features.serve.api import Caller
from goondan.features.serve.api.routing import Asked
from goondan.features.serve.api.swarm import Swarm
from goondan.features.serve.door import OPERATIONS, looking
from goondan.features.serve.door.looking import Traces, is_wanted
from goondan.features.serve.door.operations import Decision
from goondan.kernel.cli.state import BundleTarget
from goondan.kernel.supervisor_client import ProcessInfo, Reply
from goondan.kernel.traces.rules.turn import ModelCall, Step, ToolCall, Trace
from goondan.schemas.wire.frames import ErrorPayload
from tests.checks import refuses

AT = "2026-01-01T00:00:00.000Z"


class Broker:
    """Answers questions by their names, and keeps them."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[dict[str, Any]] = []

    async def admin(self, request: dict[str, Any]) -> Any:
        self.asked.append(request)
        return self.answers[request["op"].replace(".", "_")]


async def ask(name: str, broker: Broker, *agents: str, body: Any = None, **path: str) -> Any:
    """The answer of an operation to a token with these agents."""
    handler = next(row.handler for row in OPERATIONS if row.name == name)
    answer = handler(Asked(Caller("phone", "operate", agents), cast(Any, broker), path, None, body))
    return await answer if isawaitable(answer) else answer


async def test_a_decision_is_about_a_call_of_an_agent_of_the_token_and_says_whose_it_is() -> None:
    broker = Broker(approve_show={"agent": "main"}, approve_answer={"done": True})
    said = Decision("yes", "it is fine", always={"path": "docs/"})
    assert await ask("decideApproval", broker, "main", body=said, id="c1") == {"done": True}
    assert broker.asked[0] == {"op": "approve.show", "id": "c1"}
    assert broker.asked[1] == {
        "op": "approve.answer",
        "id": "c1",
        "decision": "yes",
        "reason": "it is fine (token phone)",
        "always": {"path": "docs/"},
    }
    broker.asked.clear()
    with refuses("E_FORBIDDEN"):
        await ask("decideApproval", broker, "other", body=said, id="c1")
    assert [each["op"] for each in broker.asked] == ["approve.show"], "it was not decided"


async def test_lasting_yeses_of_other_agents_are_neither_shown_nor_revoked() -> None:
    broker = Broker(
        approve_show={"agent": "main", "code": "a1"}, approve_list={"always": [{"agent": "main"}], "more": 0}
    )
    assert await ask("listApprovals", broker, "other") == {"always": [], "more": 0}
    with refuses("E_FORBIDDEN"):
        await ask("decideApproval", broker, "other", body=Decision("revoke"), id="a1")


@pytest.mark.parametrize("what", ["requeue", "drop"])
async def test_a_dead_letter_is_sent_again_or_dropped_by_who_may_speak_to_its_agent(what: str) -> None:
    broker = Broker(dead_show={"agent": "main"}, dead_requeue={"eventId": "e2"}, dead_drop={"eventId": "e1"})
    name = f"{what}DeadLetter"
    with refuses("E_FORBIDDEN"):
        await ask(name, broker, "other", id="e1")
    assert [each["op"] for each in broker.asked] == ["dead.show"]
    assert (await ask(name, broker, "main", id="e1"))["eventId"]
    assert broker.asked[-1] == {"op": f"dead.{what}", "eventId": "e1"}


async def test_rows_that_name_another_agent_are_left_out() -> None:
    mine = {"agent": "main", "by": {"main": 1}}
    others: list[dict[str, Any]] = [
        {"agent": "secret"},
        {"agent": "main", "target": "secret"},
        {"agent": "main", "by": {"secret": 2}},
        {"agent": "main", "path": [{"agent": "main"}, {"agent": "secret"}]},
    ]
    told = {"waits": [mine, *others], "stuck": others, "unknown": [mine], "count": 3}
    assert await ask("listWaits", Broker(why=told), "main") == {"waits": [mine], "stuck": [], "count": 3}
    assert await ask("listWaits", Broker(why=told), "*") == told


async def test_processes_that_do_not_say_whose_they_are_are_for_who_may_see_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row(role: str, name: str, key: str | None = None) -> ProcessInfo:
        return ProcessInfo(role=role, name=name, instance_key=key, pid=1, status="running", since=AT)

    rows = [
        row("broker", "broker"),
        row("agent", "main", "a"),
        row("agent", "secret", "private"),
        row("worker", "main", "private"),  # its name is the tool's
        row("mcp", "files", "private"),
    ]
    monkeypatch.setattr(looking, "_processes", lambda swarm: rows)
    assert await ask("listProcesses", Broker(), "main") == rows[:2]
    assert await ask("listProcesses", Broker(), "*") == rows


def test_a_process_is_told_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ProcessInfo(role="agent", name="main", pid=pid, status="running", since=AT) for pid in (os.getpid(), None)]
    monkeypatch.setattr(looking, "ask_supervisor", lambda *_: Reply(processes=rows))
    here, none = looking._processes(Swarm(BundleTarget("/no/bundle", "/no/state")))
    assert isinstance(here.memory, int) and here.memory > 1 << 20 and none.memory is None


async def test_of_a_trace_turns_of_other_agents_are_left_out_wherever_they_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def turn(name: str, agent: str, *below: Trace, script: Trace | None = None) -> Trace:
        scripts = [] if script is None else [call(f"{name}s", script)]
        step = Step(step=1, started_at=AT, tools=[call(name, *below, calls=scripts)])
        return Trace(
            turn_id=name,
            event_id=name,
            agent=agent,
            instance_key="i",
            attempt=1,
            status="completed",
            started_at=AT,
            steps=[step],
        )

    def call(name: str, *turns: Trace, calls: list[ToolCall] | None = None) -> ToolCall:
        return ToolCall(
            tool_call_id=name,
            tool_name="agents__request",
            status="ok",
            started_at=AT,
            turns=[*turns],
            calls=calls or [],
        )

    def found(*_: Any) -> Trace:
        hidden = turn("t2", "secret", turn("t3", "main"))
        root = turn("t1", "main", hidden, turn("t4", "main"), script=turn("t5", "secret"))
        root.turns = [turn("t6", "secret")]
        return root

    monkeypatch.setattr(looking, "find_trace", found)
    swarm = cast(Any, SimpleNamespace(state_dir="/no/state"))
    for agents, names in ((["main"], {"t1", "t4"}), (["*"], {"t1", "t2", "t3", "t4", "t5", "t6"})):
        told = msgspec.json.encode(await ask("getTrace", swarm, *agents, id="t1")).decode()
        assert {name for name in ("t1", "t2", "t3", "t4", "t5", "t6") if f'"turnId":"{name}"' in told} == names
        assert ("secret" in told) is (agents == ["*"])
    with refuses("E_TURN_NOT_FOUND"):
        await ask("getTrace", swarm, "other", id="t1")


def test_turns_are_found_by_what_they_were() -> None:
    model = ModelCall(status="answered", started_at=AT, costs={"USD": 0.5}, code="E_MODEL_LIMIT")
    call = ToolCall(tool_call_id="c", tool_name="bash__exec", status="error", started_at=AT, code="E_TOOL", output="Öl")
    step = Step(step=1, started_at=AT, model=model, tools=[call])
    turn = Trace(
        turn_id="t",
        event_id="e",
        agent="main",
        instance_key="i",
        attempt=1,
        status="failed",
        started_at=AT,
        steps=[step],
        error=ErrorPayload("E_TURN", "it failed"),
        message="Hello there",
    )
    found: list[dict[str, Any]] = [
        {},
        {"state": "failed"},
        {"tool": "bash__*"},
        {"min_cost": 0.5},
        {"text": "HELLO"},
        {"text": "öL"},
        *({"error": code} for code in ("E_TURN", "E_TOOL", "E_MODEL_LIMIT")),
    ]
    for wanted in found:
        assert is_wanted(turn, Traces(**wanted)), wanted
    for other in ({"state": "completed"}, {"tool": "exec"}, {"min_cost": 0.51}, {"text": "bye"}, {"error": "E_NO"}):
        assert not is_wanted(turn, Traces(**cast(Any, other))), other
    free = msgspec.structs.replace(turn, steps=[])
    assert not is_wanted(free, Traces(min_cost=0.0001))
