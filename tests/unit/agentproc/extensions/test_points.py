"""The points of the v0.9 spelling in whole turns: over a fake link, a scripted model and a real conversation file."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from goondan.agentproc.extensions.api import PipelinesApi
from goondan.agentproc.extensions.points.contexts import FIELDS
from goondan.agentproc.extensions.points.pipeline import POINTS, Pipeline
from goondan.agentproc.extensions.points.results import LlmResult, ToolCall, ToolCallResult
from goondan.agentproc.machine.messages import AssistantData, ToolData
from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers.base import ModelAnswer
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import ToolResult
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, ok, says, wants
from tests.unit.agentproc.turns import Make, code_of, settle, the_answer

MUTATORS = [
    "turn.pre", "turn.post", "step.pre", "step.config", "step.tools", "step.blocks", "step.post",
    "toolCall.pre", "toolCall.post", "workspace.repoAvailable", "workspace.worktreeMounted",
]  # fmt: skip
WRAPS = ["step.llmCall", "step.llmError", "toolCall.exec"]

DOCUMENT = {
    "kind": "Agent",
    "metadata": {"name": "coder"},
    "spec": {"modelConfig": {"modelRef": "Model/fast"}},
}
SWARM = {"kind": "Swarm", "metadata": {"name": "team"}, "spec": {"entryAgent": "Agent/coder"}}


def pipelines(runner: TurnRunner, extension: str = "ext") -> PipelinesApi:
    return PipelinesApi(runner.instance.pipeline, extension)


def result_of(runner: TurnRunner, call_id: str) -> ToolResult:
    """What the conversation holds as the result of a call."""
    for message in runner.instance.store.load_messages():
        if isinstance(message.data, ToolData):
            for part in message.data.content:
                if part.tool_call_id == call_id:
                    return part.result
    raise AssertionError(f"no result of {call_id}")


# --- registering ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("PIPELINE-05", "PIPELINE-06", "PIPELINE-07")
def test_there_are_fourteen_points_eleven_for_mutators_and_three_for_wraps() -> None:
    assert sorted(POINTS) == sorted([*MUTATORS, *WRAPS])
    api = PipelinesApi(Pipeline(), "ext")
    for point in MUTATORS:
        assert api.mutate(point, lambda ctx: ctx) is None  # type: ignore[func-returns-value]
    for point in WRAPS:
        assert api.wrap(point, lambda ctx, proceed: ctx) is None  # type: ignore[func-returns-value]


@pytest.mark.requirement("PIPELINE-05", "PIPELINE-06")
@pytest.mark.parametrize("point", [*WRAPS, "turn.middle", "step", "TURN.PRE", "", None, ["turn.pre"], {}])
def test_a_mutator_takes_only_its_points(point: Any) -> None:
    with pytest.raises(GoondanError) as caught:
        PipelinesApi(Pipeline(), "ext").mutate(point, lambda ctx: ctx)
    assert caught.value.info.code == "E_USAGE"
    assert "turn.pre" in (caught.value.info.suggestion or "")


@pytest.mark.requirement("PIPELINE-06")
@pytest.mark.parametrize("point", [*MUTATORS, "step.llm", "", 7])
def test_a_wrap_takes_only_its_points(point: Any) -> None:
    with pytest.raises(GoondanError) as caught:
        PipelinesApi(Pipeline(), "ext").wrap(point, lambda ctx, proceed: ctx)
    assert caught.value.info.code == "E_USAGE"
    assert "step.llmCall" in (caught.value.info.suggestion or "")


def test_what_an_extension_registered_can_be_taken_out() -> None:
    pipeline = Pipeline()
    for name in ("one", "two"):
        api = PipelinesApi(pipeline, name)
        api.mutate("turn.pre", lambda ctx: ctx)
        api.mutate("step.tools", lambda ctx: ctx)
        pipeline.register("toolCall", lambda ctx: ctx.next(), extension=name)
    pipeline.unregister("one")
    assert [layer.extension for layer in (*pipeline.at("turn"), *pipeline.at("step.tools"))] == ["two", "two"]
    pipeline.unregister("two")
    assert pipeline.empty
    assert not pipeline.uses_points
    assert not pipeline.has("step")


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("PIPELINE-13", "PIPELINE-14", "PIPELINE-15", "PIPELINE-25")
async def test_the_points_of_a_turn_come_in_order_and_each_in_the_order_of_registration(make: Make) -> None:
    seen: list[str] = []

    def note(point: str, name: str) -> Any:
        def mutator(ctx: Any) -> Any:
            seen.append(f"{point} {name}")
            return ctx

        return mutator

    def wrap(point: str, name: str) -> Any:
        async def layer(ctx: Any, proceed: Any) -> Any:
            seen.append(f"+{point} {name}")
            result = await proceed(ctx)
            seen.append(f"-{point} {name}")
            return result

        return layer

    runner = make(FakeLink(), FakeModel(wants(("a", "notes__add", {})), says("done")))
    for name in ("1", "2"):
        for point in reversed(list(POINTS)):  # the order of the points is not that of their registration
            if point.startswith("workspace"):
                continue
            if point in WRAPS:
                pipelines(runner, name).wrap(point, wrap(point, name))
            else:
                pipelines(runner, name).mutate(point, note(point, name))
    await runner.run(event_frame("e1", "go"))
    asked = [
        "step.pre 1", "step.pre 2", "step.config 1", "step.config 2", "step.tools 1", "step.tools 2",
        "step.blocks 1", "step.blocks 2",
        "+step.llmCall 1", "+step.llmCall 2", "-step.llmCall 2", "-step.llmCall 1",
    ]  # fmt: skip
    called = [
        "toolCall.pre 1", "toolCall.pre 2",
        "+toolCall.exec 1", "+toolCall.exec 2", "-toolCall.exec 2", "-toolCall.exec 1",
        "toolCall.post 1", "toolCall.post 2",
    ]  # fmt: skip
    after = ["step.post 1", "step.post 2"]
    assert seen == [
        "turn.pre 1", "turn.pre 2", *asked, *called, *after, *asked, *after, "turn.post 1", "turn.post 2",
    ]  # fmt: skip


# --- contexts ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("PIPELINE-08", "PIPELINE-10", "PIPELINE-11", "PIPELINE-19", "PIPELINE-26")
async def test_what_the_contexts_hold(make: Make) -> None:
    seen: dict[str, Any] = {}

    async def turn_pre(ctx: Any) -> Any:
        ctx.turn.metadata = {**ctx.turn.metadata, "startTime": time.monotonic()}
        seen["turn"] = (ctx.turn.id, ctx.swarm.metadata.name, ctx.agent.metadata.name, ctx.turn.auth.actor.isAdmin)
        return ctx

    def turn_post(ctx: Any) -> Any:
        seen["duration"] = time.monotonic() - ctx.turn.metadata["startTime"]
        seen["result"] = ctx.turn.result.response
        return ctx

    async def blocks(ctx: Any) -> Any:
        seen["step"] = (ctx.step.index, ctx.blocks, [item.name for item in ctx.tool_catalog], set(ctx.keys()))
        seen["config"] = ctx.effective_config
        return ctx

    def call_post(ctx: Any) -> Any:
        seen["call"] = (
            ctx.tool_call.id,
            ctx.tool_call.name,
            ctx.tool_call.args,
            ctx.tool_result.output,
            ctx.step.index,
        )
        return ctx

    link = FakeLink(lambda tool, args: ok({"ran": args}))
    spec = {"resource": DOCUMENT, "swarm": SWARM, "system": "Be kind."}
    runner = make(link, FakeModel(wants(("a", "notes__add", {"n": 1})), says("done")), **spec)
    api = pipelines(runner)
    api.mutate("turn.pre", turn_pre)
    api.mutate("turn.post", turn_post)
    api.mutate("step.blocks", blocks)
    api.mutate("toolCall.post", call_post)
    frame = event_frame("e1", "go")
    frame.auth = to_raw({"actor": {"isAdmin": True}})
    await runner.run(frame)
    assert seen["turn"] == (the_answer(link).turn_id, "team", "coder", True)
    assert 0 <= seen["duration"] < 60
    assert seen["result"] == "done"
    assert seen["call"] == ("a", "notes__add", {"n": 1}, {"ran": {"n": 1}}, 0)
    assert seen["step"][1:3] == ([], ["bash__exec", "notes__add"])
    assert {"turn", "swarm", "agent", "effective_config", "step", "blocks", "tool_catalog"} <= seen["step"][3]
    assert seen["config"]["prompt"] == {"system": "Be kind."}
    assert set(FIELDS["turn"]) < set(FIELDS["step"]) < set(FIELDS["toolCall"])


# --- tool calls -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("PIPELINE-09")
async def test_a_wrap_may_put_another_result_in_the_place_of_the_calls(make: Make) -> None:
    async def cached(ctx: Any, proceed: Any) -> Any:
        result = await proceed(ctx)
        return result.replace(tool_result=ToolCallResult(ctx.tool_call.id, ctx.tool_call.name, output="cached"))

    runner = make(FakeLink(), FakeModel(wants(("a", "notes__add", {})), says("ok")))
    pipelines(runner).wrap("toolCall.exec", cached)
    await runner.run(event_frame("e1", "go"))
    assert from_raw(result_of(runner, "a").output, str) == "cached"  # type: ignore[arg-type]


# --- the model call ---------------------------------------------------------------------------------------------------


async def test_what_a_wrap_makes_of_the_answer_is_stored(make: Make, link: FakeLink) -> None:
    async def censor(ctx: Any, proceed: Any) -> Any:
        result = await proceed(ctx)
        result.llm_result.text = result.llm_result.text.replace("secret", "***")
        result.llm_result.tool_calls = [ToolCall("b", "notes__add", {"n": 2})] if ctx.step.index == 0 else []
        return result

    model = FakeModel(ModelAnswer(text="a secret", metadata={"vendor": 1}), says("the secret end"))
    runner = make(link, model)
    pipelines(runner).wrap("step.llmCall", censor)
    await runner.run(event_frame("e1", "go"))
    said = [message for message in runner.instance.store.load_messages() if isinstance(message.data, AssistantData)]
    assert [message.data.text for message in said] == ["a ***", "the *** end"]  # type: ignore[union-attr]
    assert [call.tool for call in link.calls] == ["notes__add"]
    assert said[0].metadata == {}  # what the vendor wanted to see again belongs to another answer


async def test_an_answer_that_nobody_changed_stays_whole(make: Make) -> None:
    async def looks(ctx: Any, proceed: Any) -> Any:
        return await proceed(ctx)

    broken = AskedCall("a", "notes__add", {}, "they are no JSON")
    runner = make(FakeLink(), FakeModel(ModelAnswer(calls=[broken], metadata={"kept": 1}), says("done")))
    pipelines(runner).wrap("step.llmCall", looks)
    await runner.run(event_frame("e1", "go"))
    said = runner.instance.store.load_messages()[1]
    assert said.metadata["kept"] == 1
    assert code_of(result_of(runner, "a")) == "E_TOOL_INVALID_ARGS"


async def test_a_failed_call_can_be_answered_without_asking_again(make: Make, link: FakeLink) -> None:
    async def answers(ctx: Any, proceed: Any) -> Any:
        return ctx.replace(llm_result=LlmResult("The model is away."))

    runner = make(link, FakeModel(fail("E_MODEL_FAILED", "one")))
    pipelines(runner).wrap("step.llmError", answers)
    await runner.run(event_frame("e1", "go"))
    assert (the_answer(link).status, the_answer(link).response) == ("completed", "The model is away.")


async def test_cancelling_reaches_a_wrap_that_waits(make: Make, link: FakeLink) -> None:
    ended = asyncio.Event()

    async def waits(ctx: Any, proceed: Any) -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return await proceed(ctx)

    runner = make(link, FakeModel(says("never")))
    pipelines(runner).wrap("step.llmCall", waits)
    running = asyncio.create_task(runner.run(event_frame("e1", "go")))
    await settle()
    runner._run.cancel()  # type: ignore[union-attr]  # as a tool.cancel frame does
    await asyncio.wait_for(running, 5)
    await asyncio.wait_for(ended.wait(), 5)
    assert code_of(the_answer(link)) == "E_CANCELLED"


async def test_an_agent_without_handlers_pays_nothing(make: Make) -> None:
    runner = make(FakeLink(), FakeModel(says("done")))
    frame = event_frame("e1", "go")
    started = asyncio.create_task(runner.run(frame))
    await asyncio.sleep(0)
    assert runner._run is not None
    assert runner._run._stages is None
    await started
