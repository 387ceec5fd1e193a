"""`ctx.agents` of middleware: whole turns over a fake link, a scripted model and a real conversation file."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from goondan.agentproc.extensions.points.pipeline import MiddlewareError
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, Answer, ErrorPayload, Frame
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, code_of, settle, the_answer, until


def put(runner: TurnRunner, kind: str, handler: Any, extension: str = "ext") -> None:
    runner.instance.pipeline.register(kind, handler, extension=extension)


def answer(link: FakeLink, number: int, **fields: Any) -> None:
    """Answer a question as the agent that was asked."""
    told = Answer(turn_id="t2", **{"status": "completed", **fields})
    event = AgentEvent(id="a", type="agent.response", created_at="2026-01-01T00:00:00.000Z", answer=told)
    link.asked[number][1].set_result(Frame("event", payload=to_raw(event)))


def events(link: FakeLink) -> list[Frame]:
    """What was sent without waiting for an answer."""
    return [frame for frame in link.posted if frame.type == "event"]


async def test_turn_and_step_middleware_ask_and_get_answers(make: Make, link: FakeLink) -> None:
    runner = make(link, FakeModel(says("done")))
    got: list[dict[str, Any]] = []

    async def turn(ctx: Any) -> Any:
        got.append(await ctx.agents.request("critic", "is it good", metadata={"why": "test"}))
        return await ctx.next()

    async def step(ctx: Any) -> Any:
        result = await ctx.next()
        got.append(await ctx.agents.request("critic", "and now", instance_key="other", timeout_ms=500))
        return result

    put(runner, "turn", turn)
    put(runner, "step", step)
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await until(lambda: link.asked)
    answer(link, 0, response="it is")
    await until(lambda: len(link.asked) == 2)
    answer(link, 1, response="still")
    await running
    first, second = (frame for frame, _ in link.asked)
    event = from_raw(first.payload, AgentEvent)
    assert (first.to, first.instance_key, event.type, event.input) == ("critic", "k", "agent.request", "is it good")
    assert (event.metadata, first.deadline_ms) == ({"why": "test"}, 60_000)
    assert (second.instance_key, second.deadline_ms) == ("other", 500)
    assert got[0] == {
        "target": "critic",
        "eventId": first.event_id,
        "correlationId": f"corr:{first.event_id}",
        "accepted": True,
        "async": False,
        "response": "it is",
    }
    assert got[1]["response"] == "still"
    assert the_answer(link).response == "done"


async def test_middleware_sends_and_asks_without_waiting(make: Make, link: FakeLink) -> None:
    runner = make(link, FakeModel(says("done")))
    got: list[dict[str, Any]] = []

    async def turn(ctx: Any) -> Any:
        got.append(await ctx.agents.send("logger", "noted"))
        got.append(await ctx.agents.request("critic", "later", async_=True))
        return await ctx.next()

    put(runner, "turn", turn)
    await runner.run(event_frame("e1", "go"))
    sent, asked = events(link)
    assert got[0] == {"target": "logger", "eventId": sent.event_id, "accepted": True, "sent": True}
    assert (sent.reply_to, sent.asynchronous, sent.deadline_ms) == (None, False, None)
    assert (got[1]["async"], got[1]["response"], got[1]["eventId"]) == (True, None, asked.event_id)
    assert (asked.asynchronous, asked.deadline_ms, asked.reply_to is not None) == (True, None, True)
    assert the_answer(link).response == "done"


async def test_a_turn_that_another_process_resumes_asks_under_the_same_ids(make: Make) -> None:
    async def turn(ctx: Any) -> Any:
        both = [ctx.agents.request("critic", text) for text in order]
        await asyncio.gather(*both, ctx.agents.request("critic", "one"))
        return await ctx.next()

    async def step(ctx: Any) -> Any:
        await ctx.agents.send("critic", "one")
        return await ctx.next()

    ids: list[set[str | None]] = []
    order = ["one", "two"]
    for epoch in (1, 2):
        link = FakeLink(lambda *_: None)
        runner = make(link, FakeModel(wants(("a", "bash__exec", {"command": "ls"}))))
        put(runner, "turn", turn)
        put(runner, "step", step)
        running = asyncio.ensure_future(runner.run(event_frame("e1", "go", epoch=epoch)))
        await until(lambda link=link: len(link.asked) == 3)  # type: ignore[misc]
        for number in range(3):
            answer(link, number, response="yes")
        await until(lambda link=link: link.open_calls())  # type: ignore[misc]
        ids.append({frame.event_id for frame, _ in link.asked} | {frame.event_id for frame in events(link)})
        runner.abandon()
        await running
        await runner.close()
        order = ["two", "one"]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 4, "what is asked twice is asked twice"


async def test_two_extensions_and_two_steps_ask_for_themselves(make: Make, link: FakeLink) -> None:
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("done")))

    async def step(ctx: Any) -> Any:
        await ctx.agents.send("critic", "same")
        return await ctx.next()

    put(runner, "step", step, "one")
    put(runner, "step", step, "two")
    await runner.run(event_frame("e1", "go"))
    assert len({frame.event_id for frame in events(link)}) == 4


async def test_tool_call_middleware_asks_nobody(make: Make, link: FakeLink) -> None:
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("done")))
    seen: list[bool] = []

    async def call(ctx: Any) -> Any:
        seen.append(hasattr(ctx, "agents"))
        return await ctx.next()

    put(runner, "toolCall", call)
    await runner.run(event_frame("e1", "go"))
    assert seen == [False]


async def test_a_failure_is_raised_with_its_code_and_fails_the_turn_if_nobody_catches_it(make: Make) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("done")))
    caught: list[str] = []

    async def turn(ctx: Any) -> Any:
        for given in ({"target": "coder"}, {"target": "x", "instance_key": "a\x07"}, {"target": "x", "input": {1}}):
            try:
                await ctx.agents.request(**given)
            except GoondanError as error:
                caught.append(error.code)
        await ctx.agents.request("critic")
        return await ctx.next()

    put(runner, "turn", turn)
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await until(lambda: link.asked)
    answer(link, 0, status="failed", error=ErrorPayload("E_AGENT_SPAWN_FAILED", "it does not start"))
    await running
    assert caught == ["E_AGENT_CYCLE", "E_TOOL_INVALID_ARGS", "E_TOOL_INVALID_ARGS"]
    assert code_of(the_answer(link)) == "E_AGENT_SPAWN_FAILED"


async def test_what_is_open_at_the_end_of_the_turn_is_given_up_and_nothing_is_asked_after_it(make: Make) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("done")))
    kept: list[Any] = []

    async def turn(ctx: Any) -> Any:
        kept.append(ctx.agents)
        kept.append(asyncio.ensure_future(ctx.agents.request("critic", "never awaited")))
        return await ctx.next()

    put(runner, "turn", turn)
    await runner.run(event_frame("e1", "go"))
    await settle()
    ((frame, _),) = link.asked
    assert frame.id in link.forgotten
    assert kept[1].cancelled()
    with pytest.raises(MiddlewareError, match="the turn has ended"):
        await kept[0].request("critic", "too late")
