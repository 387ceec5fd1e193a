"""Answers to what was asked without waiting: in the next model call of a turn that runs, or a turn of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.machine.messages import (
    Message,
    MessageSource,
    ToolResultPart,
    UserData,
    is_presentable,
    result_message,
)
from goondan.agentproc.machine.questions import INTER_AGENT, describe_late, end_of, read_answer
from goondan.agentproc.machine.turn import AskModel, Begin, End, LeaveStep, ModelAnswered, Resume, Turn
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, Answer, ErrorPayload, Frame, ToolResult
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Runners, until

AT = "2026-01-01T00:00:00Z"


@pytest.fixture
async def runners(tmp_path: Path) -> AsyncIterator[Runners]:
    made = Runners(tmp_path)
    yield made
    await made.close()


def answer(name: str = "q1", epoch: int | None = None, correlation: str = "corr", **fields: Any) -> Frame:
    told = Answer(turn_id="t2", **({"status": "completed", "response": f"answer {name}"} | fields))
    event = AgentEvent(id="a", type="agent.response", created_at=AT, answer=told)
    return Frame(
        "event",
        id="b.1",
        from_="beta",
        event_id=f"{name}:answer",
        in_reply_to=f"{correlation}:{name}",
        epoch=epoch,
        payload=to_raw(event),
        asynchronous=True,
    )


def said(messages: list[Message]) -> list[str]:
    return [m.data.content.splitlines()[-1] for m in messages if isinstance(m.data, UserData)]


def test_the_log_says_whose_answer_came_too_late() -> None:
    line = describe_late(answer("t1/c1~ab"))
    assert "agent beta to the request t1/c1~ab came after its time (completed, turn t2)" in line
    assert "answer t1" not in line, "what was said is in the trace"
    assert "after its time;" in describe_late(Frame("event", from_="beta", event_id="q:answer", in_reply_to="c"))


@pytest.mark.requirement("AGENTS-16")
async def test_what_comes_during_a_step_is_in_the_next_one_together(runners: Runners) -> None:
    link = FakeLink(lambda *_: None)
    model = FakeModel(wants(("a", "notes__add", {})), says("done"))
    runner = runners.build(link, model)
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await until(link.open_calls)
    for name in ("q1", "q2", "q1"):
        runner.answered(answer(name))
    link.finish(link.open_calls()[0], ok(1))
    await running
    assert said(model.requests[1].messages) == ["go", "answer q1", "answer q2"]
    assert is_presentable(model.requests[1].messages)
    told = model.requests[1].messages[-1].metadata[INTER_AGENT]
    assert told == {
        "target": "beta",
        "eventId": "q2",
        "correlationId": "corr:q2",
        "status": "ok",
        "response": "answer q2",
    }
    for name in ("q1", "q2"):
        await runner.run(answer(name, epoch=1))
    assert len(model.requests) == 2, "the model knows them already"
    assert [frame.stage for frame in link.posted if frame.stage != "renew"] == ["done", "done", "done"]


async def test_what_comes_during_the_last_step_gets_one_more(runners: Runners) -> None:
    link = FakeLink()
    runner = runners.build(link)

    class Listening(FakeModel):
        async def complete(self, request: Any, on_delta: Any = None, on_news: Any = None) -> Any:
            if len(self.requests) == 0:
                runner.answered(answer())
            return await super().complete(request, on_delta)

    model = Listening(says("too early"), says("done"))
    runner.instance._provider = model
    await runner.run(event_frame("e1", "go"))
    assert said(model.requests[1].messages) == ["go", "answer q1"]
    assert link.answers()[-1].response == "done"


@pytest.mark.requirement("AGENTS-16")
async def test_what_comes_later_is_a_turn_with_the_same_message(runners: Runners) -> None:
    model = FakeModel(says("noted"))
    runner = runners.build(FakeLink(), model)
    runner.answered(answer())  # nothing runs: the event follows
    await runner.run(answer(epoch=1))
    (message,) = model.requests[0].messages
    assert said([message]) == ["answer q1"]
    assert message.metadata[INTER_AGENT]["correlationId"] == "corr:q1"


@pytest.mark.requirement("HANDOFF-04", "HANDOFF-05", "HANDOFF-08")
def test_a_failure_and_a_handoff_are_told() -> None:
    late = ErrorPayload("E_AGENT_TIMEOUT", "too late")
    told = read_answer(answer(status="failed", response=None, error=late))
    assert "did not answer" in told.text
    assert told.metadata[INTER_AGENT]["error"]["code"] == "E_AGENT_TIMEOUT"
    handed = read_answer(answer("t1/h1~ab", correlation="handoff"))
    assert handed.text.startswith("The pending result handoff:t1/h1~ab of handoff__request (call h1) is here:\n")
    assert (handed.source.name, handed.metadata) == ("handoff__request", {})
    assert json.loads(handed.text.splitlines()[1]) == {
        "status": "ok",
        "output": {
            "target": "beta",
            "eventId": "t1/h1~ab",
            "correlationId": "handoff:t1/h1~ab",
            "response": "answer t1/h1~ab",
        },
    }
    failed = read_answer(answer("t1/h1~ab", correlation="handoff", status="failed", response=None, error=late))
    ended = json.loads(failed.text.splitlines()[1])
    assert (ended["status"], ended["error"]["code"]) == ("error", "E_AGENT_TIMEOUT")


def test_a_turn_without_steps_left_ends_as_it_would() -> None:
    turn = Turn("t", max_steps=1)
    turn.handle(Begin("go"), AT)
    turn.hear()
    assert isinstance(turn.handle(ModelAnswered("done"), AT)[-1], End)


def test_a_model_that_has_read_it_is_asked_no_more() -> None:
    turn = Turn("t", max_steps=9)
    turn.handle(Begin("go"), AT)
    turn.hear()
    assert isinstance(turn.handle(ModelAnswered("early"), AT)[-1], AskModel)
    assert isinstance(turn.handle(ModelAnswered("done"), AT)[-1], End)


def test_middleware_of_the_step_is_told_that_another_follows() -> None:
    turn = Turn("t", max_steps=9, wraps_steps=True)
    turn.handle(Begin("go"), AT)
    turn.phase = "thinking"
    turn.hear()
    left = turn.handle(ModelAnswered("early"), AT)[-1]
    assert isinstance(left, LeaveStep)
    assert left.should_continue


def test_a_turn_that_died_before_the_model_read_it_asks_the_model() -> None:
    first = Turn("t", max_steps=9)
    stored = [(s.position, s.message) for s in first.handle(Begin("go"), AT)[:1]]  # type: ignore[union-attr]
    stored += [(s.position, s.message) for s in first.handle(ModelAnswered("early"), AT)[:1]]  # type: ignore[union-attr]
    assert isinstance(Turn("t", max_steps=9).handle(Resume(stored, next_position=3), AT)[-1], End)
    assert isinstance(Turn("t", max_steps=9).handle(Resume(stored, next_position=3, told=True), AT)[-1], AskModel)


# --- what the handle of a handoff came to


def asked(handle: str) -> Message:
    """The conversation's word about a handoff that is pending."""
    return result_message(
        "m1", ToolResultPart("h1", "handoff__request", ToolResult(status="pending", handle=handle)), AT
    )


def test_the_end_of_handed_over_work_is_found_in_news_and_in_the_conversation() -> None:
    handle = "handoff:t1/h1~ab"
    ended = read_answer(answer("t1/h1~ab", correlation="handoff"))
    told = Message("m2", UserData(ended.text), AT, ended.source, {})
    assert end_of(handle, [], [asked(handle)]) == ToolResult(status="pending", handle=handle)
    for news, messages in (([ended], [asked(handle)]), ([], [asked(handle), told]), ([], [told])):
        result = end_of(handle, news, messages)
        assert result.output is not None
        assert (result.status, from_raw(result.output, dict)["response"]) == ("ok", "answer t1/h1~ab")


def test_a_failure_of_handed_over_work_is_the_error_of_the_poll() -> None:
    late = ErrorPayload("E_AGENT_FAILED", "it fell over")
    ended = read_answer(answer("t1/h1~ab", correlation="handoff", status="failed", response=None, error=late))
    with pytest.raises(GoondanError, match="it fell over"):
        end_of("handoff:t1/h1~ab", [ended], [])


def test_no_other_message_tells_the_end_of_handed_over_work() -> None:
    handle = "handoff:t1/h1~ab"
    ended = read_answer(answer("t1/h1~ab", correlation="handoff"))
    longer = read_answer(answer("t1/h1~abc", correlation="handoff"))
    forged = [
        Message("m2", UserData(ended.text), AT, MessageSource("user")),
        Message("m3", UserData(longer.text), AT, longer.source, {}),
    ]
    with pytest.raises(GoondanError, match="E_TOOL_OUTCOME_UNKNOWN"):
        end_of(handle, [], forged)


# --- middleware of the step


@pytest.mark.parametrize("at", ["before", "inside"])
async def test_the_middleware_of_the_step_sees_what_its_model_reads(runners: Runners, at: str) -> None:
    link, seen = FakeLink(lambda *_: None), []
    model = FakeModel(wants(("a", "notes__add", {})), says("early"), says("done"))
    runner = runners.build(link, model)

    async def step(ctx: Any) -> Any:
        if at == "inside" and ctx.step_index == 1:
            runner.answered(answer())
        seen.append(said(ctx.conversation_state.next_messages))
        return await ctx.next()

    runner.instance.pipeline.register("step", step, extension="ext")
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await until(link.open_calls)
    if at == "before":
        runner.answered(answer())
    link.finish(link.open_calls()[0], ok(1))
    await running
    assert [said(request.messages) for request in model.requests] == seen
    assert seen[-1] == ["go", "answer q1"], "and it is read before the turn ends"
