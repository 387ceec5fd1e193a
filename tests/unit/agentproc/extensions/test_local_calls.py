"""Calls of registered tools when the agent's process ends while they run, and what their handlers ask of others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from goondan.agentproc.machine.questions import asking_span, call_place
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.wire.frames import ToolResult
from goondan.schemas.wire.spans import call_span
from tests.unit.agentproc import turns
from tests.unit.agentproc.extensions.test_asking import answer
from tests.unit.agentproc.extensions.test_points import result_of
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, code_of, the_answer, until

PARAMETERS = {"type": "object"}


class Handler:
    """A handler that counts, and returns when it may."""

    def __init__(self) -> None:
        self.started = 0
        self.may_end = asyncio.Event()

    async def run(self, ctx: Any, given: Any) -> Any:
        self.started += 1
        await self.may_end.wait()
        return self.started


def offer(runner: TurnRunner, handler: Any, **more: Any) -> None:
    item = {"name": "mail__send", "description": "Sends.", "parameters": PARAMETERS, **more}
    turns.api_of(runner).tools.register(item, handler)


def crash(runner: TurnRunner) -> None:
    """Nothing of this process counts any more."""
    runner.abandon()
    runner.instance.store.close()


async def begun(make: Make, link: FakeLink, handler: Handler, **more: Any) -> TurnRunner:
    """A runner whose turn stands in the call."""
    runner = make(link, FakeModel(wants(("a", "mail__send", {})), says("done")))
    offer(runner, handler.run, **more)
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await until(lambda: handler.started)
    crash(runner)
    await running
    return runner


async def resumed(make: Make, handler: Handler, **more: Any) -> ToolResult:
    """What the call comes to in the next process."""
    link = FakeLink()
    runner = make(link, FakeModel(says("done")))
    offer(runner, handler.run, **more)
    await runner.run(event_frame("e1", "go", epoch=2))
    assert the_answer(link).status == "completed"
    return result_of(runner, "a")


async def test_a_call_that_had_begun_is_not_run_again_and_says_so(make: Make) -> None:
    handler = Handler()
    await begun(make, FakeLink(), handler)
    handler.may_end.set()
    result = await resumed(make, handler)
    assert (handler.started, result.status, code_of(result)) == (1, "error", "E_TOOL_OUTCOME_UNKNOWN")
    assert "mail__send" in (result.error.message if result.error else "")


async def test_an_idempotent_call_is_run_again(make: Make) -> None:
    handler = Handler()
    await begun(make, FakeLink(), handler, idempotent=True)
    handler.may_end.set()
    result = await resumed(make, handler, idempotent=True)
    assert (handler.started, result.status) == (2, "ok")


async def test_a_call_that_had_not_begun_is_run(make: Make) -> None:
    """The process ends while middleware stands before the call."""
    handler, entered = Handler(), asyncio.Event()
    runner = make(FakeLink(), FakeModel(wants(("a", "mail__send", {})), says("done")))
    offer(runner, handler.run)

    async def before(ctx: Any) -> Any:
        entered.set()
        await asyncio.Event().wait()

    turns.api_of(runner).pipeline.register("toolCall", before)
    running = asyncio.ensure_future(runner.run(event_frame("e1", "go")))
    await entered.wait()
    crash(runner)
    await running
    handler.may_end.set()
    result = await resumed(make, handler)
    assert (handler.started, result.status) == (1, "ok")


async def test_the_end_of_a_turn_forgets_its_calls(make: Make) -> None:
    handler = Handler()
    handler.may_end.set()
    runner = make(FakeLink(), FakeModel(wants(("a", "mail__send", {})), says("done")))
    offer(runner, handler.run)
    turn_ids: list[str] = []

    def turn(ctx: Any) -> Any:
        turn_ids.append(ctx.turn_id)
        return ctx.next()

    turns.api_of(runner).pipeline.register("turn", turn)
    await runner.run(event_frame("e1", "go"))
    assert handler.started == 1
    assert not runner.instance.store.was_started(turn_ids[0], "a")


async def test_a_handler_asks_other_agents_under_ids_that_a_repeat_finds_again(make: Make) -> None:
    asked: list[str] = []
    results: list[str] = []
    for epoch in (1, 2):
        link = FakeLink()
        runner = make(link, FakeModel(*([wants(("a.b", "mail__send", {}))] if epoch == 1 else []), says("done")))

        async def ask(ctx: Any, given: Any) -> Any:
            told = await ctx.runtime.request("critic", "look")
            return told["response"]

        offer(runner, ask, idempotent=True)
        running = asyncio.ensure_future(runner.run(event_frame("e1", "go", epoch=epoch)))
        await until(lambda link=link: link.asked)  # type: ignore[misc]
        asked.append(link.asked[0][0].event_id or "")
        if epoch == 1:
            crash(runner)
        else:
            answer(link, 0, response="fine")
        await running
        if epoch == 2:
            results.append(result_of(runner, "a.b").status)
    assert asked[0] == asked[1]
    assert results == ["ok"]


async def test_a_handler_in_a_thread_has_nobody_to_ask(make: Make) -> None:
    seen: list[Any] = []
    runner = make(FakeLink(), FakeModel(wants(("a", "mail__send", {})), says("done")))
    offer(runner, lambda ctx, given: seen.append(ctx.runtime))
    await runner.run(event_frame("e1", "go"))
    assert seen == [None]


@pytest.mark.parametrize("tool_call_id", ["a", "a.b", "@turn.x", "12.3", "한글"])
def test_what_a_handler_asks_stands_below_its_call(tool_call_id: str) -> None:
    assert asking_span("t", f"{call_place(tool_call_id)}.1") == call_span(f"t/{tool_call_id}")
