"""Pending work that has ended: the model hears of it before its next call, or by a turn of its own, and only once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from goondan.agentproc.machine.messages import Message, UserData, is_presentable
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError, tool_error
from goondan.schemas.wire.frames import TOOL_COMPLETED, AgentEvent, Completion, Frame, Source, ToolResult
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, until

HOST = Source("tool", "tool:1")


def completion(call: str = "t1/a", *, kind: str = "event", source: Source | None = HOST, result: Any = None) -> Frame:
    told = Completion(
        handle="job-1", tool_name="slow__start", tool_call_id="a", turn_id="t1", result=to_raw(result or ok({"n": 7}))
    )
    event = AgentEvent(id=f"{call}~completed", type=TOOL_COMPLETED, created_at="2026-01-01T00:00:00Z", input=told)
    return Frame(kind, id="b.1", event_id=event.id, epoch=1, source=source, payload=to_raw(event))


def said(messages: list[Message]) -> list[str]:
    return [m.data.content for m in messages if isinstance(m.data, UserData)]


@pytest.mark.requirement("RESULT-04")
async def test_an_idle_agent_gets_a_turn_about_it(make: Make) -> None:
    link, model = FakeLink(), FakeModel(says("noted"))
    runner = make(link, model)
    await runner.run(completion())
    (request,) = model.requests
    (text,) = said(request.messages)
    assert "job-1" in text
    assert "slow__start" in text
    assert '{"status":"ok","output":{"n":7}}' in text
    assert (request.messages[0].source.type, request.messages[0].source.name) == ("tool", "slow__start")
    assert link.answers()[-1].response == "noted"


@pytest.mark.requirement("RESULT-04")
async def test_a_running_turn_hears_of_it_before_its_next_step_and_the_event_adds_nothing(make: Make) -> None:
    link = FakeLink(lambda *_: None)
    model = FakeModel(wants(("a", "notes__add", {})), says("done"))
    runner = make(link, model)
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await until(link.open_calls)
    runner.completed(completion(kind="tool.completed"))
    runner.completed(completion(kind="tool.completed"))
    link.finish(link.open_calls()[0], ok(1))
    await running
    assert len(said(model.requests[1].messages)) == 2
    assert is_presentable(model.requests[1].messages)
    await runner.run(completion())
    assert len(model.requests) == 2, "the model knows it already"
    assert [frame.stage for frame in link.posted if frame.stage != "renew"] == ["done", "done"]


async def test_what_comes_during_the_last_step_is_left_to_the_event(make: Make, link: FakeLink) -> None:
    runner = make(link)

    class Listening(FakeModel):
        async def complete(self, request: Any, on_delta: Any = None, on_news: Any = None) -> Any:
            if len(self.requests) == 0:
                runner.completed(completion(kind="tool.completed"))
            return await super().complete(request, on_delta)

    model = Listening(says("done"), says("noted"))
    runner.instance._provider = model
    await runner.run(event_frame("e1", "go"))
    assert said(model.requests[0].messages) == ["go"]
    await runner.run(completion())
    assert len(said(model.requests[1].messages)) == 2


async def test_a_failure_is_told_like_a_success(make: Make) -> None:
    model = FakeModel(says("noted"))
    failed = ToolResult(status="error", error=tool_error("E_TOOL_OUTCOME_UNKNOWN", "lost", name="ToolHostLost"))
    await make(FakeLink(), model).run(completion(result=failed))
    assert "E_TOOL_OUTCOME_UNKNOWN" in said(model.requests[0].messages)[0]


@pytest.mark.parametrize("source", [None, Source("client", "operator"), Source("agent", "coder", "k")])
async def test_nobody_but_a_tool_host_may_say_so(make: Make, source: Source | None) -> None:
    link, model = FakeLink(), FakeModel(says("never"))
    runner = make(link, model)
    await runner.run(completion(source=source))
    answer = link.answers()[-1]
    assert answer.error is not None
    assert (answer.error.code, model.requests) == ("E_FORBIDDEN", [])


async def test_a_frame_outside_of_a_turn_or_of_another_form_changes_nothing(make: Make) -> None:
    runner = make(FakeLink(lambda *_: None), FakeModel(wants(("a", "notes__add", {}))))
    runner.completed(completion(kind="tool.completed"))
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await asyncio.sleep(0)
    event = AgentEvent(id="x", type=TOOL_COMPLETED, created_at="", input={"handle": 5})
    with pytest.raises(GoondanError):
        runner.completed(Frame("tool.completed", event_id="x", source=HOST, payload=to_raw(event)))
    runner.abandon()
    await running
