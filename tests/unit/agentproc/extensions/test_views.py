"""What middleware of a step has the model shown of the conversation, and what it asks the model itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from goondan.agentproc.machine.messages import UserData
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, code_of, failed, settle, the_answer


def user_texts(request: ModelRequest) -> list[str]:
    return [m.data.content for m in request.messages if isinstance(m.data, UserData)]


async def test_views_are_applied_in_order_for_one_step_and_nothing_is_stored(make: Make) -> None:
    model = FakeModel(wants(("a", "notes__add", {})), says("done"))
    runner = make(FakeLink(), model)

    async def first(ctx: Any) -> Any:
        if ctx.step_index == 0:
            ctx.view_messages(lambda messages: [*messages, {"data": {"role": "user", "content": "one"}}])
        return await ctx.next()

    async def second(ctx: Any) -> Any:
        if ctx.step_index == 0:
            ctx.view_messages(lambda messages: [*messages, {"data": {"role": "user", "content": "two"}}])
        return await ctx.next()

    runner.instance.pipeline.register("step", first, extension="first")
    runner.instance.pipeline.register("step", second, extension="second")
    await runner.run(event_frame("e1", "go"))
    assert [user_texts(request) for request in model.requests] == [["go", "one", "two"], ["go"]]
    assert len(runner.instance.store.load_messages()) == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda messages: None, "it returned NoneType, not a list of messages"),
        (lambda messages: [3], "no message event"),
        (lambda messages: messages[5], "IndexError"),
    ],
)
async def test_a_view_that_fails_fails_its_turn_by_name(make: Make, change: Any, told: str) -> None:
    link, model = FakeLink(), FakeModel(says("never"))
    runner = make(link, model)

    async def layer(ctx: Any) -> Any:
        ctx.view_messages(change)
        return await ctx.next()

    runner.instance.pipeline.register("step", layer, extension="viewer")
    await runner.run(event_frame("e1", "go"))
    failed(the_answer(link), "E_MIDDLEWARE", "extension viewer", told)
    assert model.requests == []


async def test_a_view_must_keep_no_call_without_its_result(make: Make) -> None:
    model = FakeModel(wants(("a", "notes__add", {})), says("done"))
    runner = make(FakeLink(), model)

    async def layer(ctx: Any) -> Any:
        ctx.view_messages(lambda messages: messages[:2])  # without the result
        return await ctx.next()

    runner.instance.pipeline.register("step", layer, extension="viewer")
    await runner.run(event_frame("e1", "go"))
    last = model.requests[-1].messages
    assert [m.data.__class__.__name__ for m in last] == ["UserData", "AssistantData", "ToolData"]


async def test_middleware_asks_the_agents_own_model_without_tools_and_one_question_at_a_time(make: Make) -> None:
    open_now: list[int] = []

    class Slow(FakeModel):
        async def complete(self, request: ModelRequest, *more: Any) -> ModelAnswer:
            open_now.append(1)
            assert len(open_now) == 1
            answer = await super().complete(request)
            await settle(3)
            open_now.pop()
            return answer

    model = Slow(says("A"), says("B"), says("done"))
    runner = make(FakeLink(), model, system="You help.")
    heard: list[str] = []

    async def layer(ctx: Any) -> Any:
        heard.extend(await asyncio.gather(ctx.ask_model("one?"), ctx.ask_model("two?", system="Be brief.")))
        return await ctx.next()

    runner.instance.pipeline.register("step", layer, extension="asker")
    await runner.run(event_frame("e1", "go"))
    assert heard == ["A", "B"]
    asked = [(user_texts(request), request.system, len(request.tools)) for request in model.requests]
    assert asked == [(["one?"], None, 0), (["two?"], "Be brief.", 0), (["go"], "You help.", 2)]
    assert len(runner.instance.store.load_messages()) == 2


async def test_a_model_that_says_nothing_ends_the_question_and_not_the_agent(make: Make, link: FakeLink) -> None:
    class Silent(FakeModel):
        async def complete(self, request: ModelRequest, *more: Any) -> ModelAnswer:
            if user_texts(request) == ["hello?"]:
                await asyncio.sleep(3600)
            return await super().complete(request)

    runner = make(link, Silent(says("done")), stall_timeout_s=0.05)
    failures: list[Any] = []

    async def layer(ctx: Any) -> Any:
        try:
            await ctx.ask_model("hello?")
        except Exception as error:
            failures.append(error)
        return await ctx.next()

    runner.instance.pipeline.register("step", layer, extension="asker")
    await runner.run(event_frame("e1", "go"))
    assert the_answer(link).response == "done"
    assert [error.info.code for error in failures] == ["E_MODEL_FAILED"]


@pytest.mark.parametrize("text", ["", 3, None])
async def test_a_question_is_a_text(make: Make, link: FakeLink, text: Any) -> None:
    runner = make(link, FakeModel(says("never")))

    async def layer(ctx: Any) -> Any:
        await ctx.ask_model(text)

    runner.instance.pipeline.register("step", layer, extension="asker")
    await runner.run(event_frame("e1", "go"))
    assert code_of(the_answer(link)) == "E_USAGE"
