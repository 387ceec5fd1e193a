"""Handlers at points that fail, or do not keep to the rules: what ends with them, and whose name is told."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from goondan.agentproc.extensions import stages
from goondan.agentproc.extensions.engine import run
from goondan.agentproc.extensions.points.pipeline import POINTS, Layer
from tests.unit.agentproc.extensions.test_points import pipelines, result_of
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, code_of, failed, the_answer

#: Mutators whose failure ends the turn.
OF_TURNS = [name for name, point in POINTS.items() if point.form == "mutate" and point.kind in ("turn", "step")]


def raises(ctx: Any) -> Any:
    raise ValueError("nope")


def nothing(ctx: Any) -> Any:
    return None


def rubbish(ctx: Any) -> Any:
    return ["ctx"]


def another_agent(ctx: Any) -> Any:
    return ctx.replace(agent=ctx.swarm)


def unknown_field(ctx: Any) -> Any:
    return {**ctx, "sandbox": "off"}


@pytest.mark.parametrize("handler", [raises, nothing, rubbish, another_agent, unknown_field])
@pytest.mark.parametrize(
    "point", ["turn.pre", "step.pre", "step.config", "step.tools", "step.blocks", "step.post", "turn.post"]
)
async def test_a_mutator_that_fails_ends_the_turn_with_its_name(make: Make, point: str, handler: Any) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("done"), says("again")))
    pipelines(runner, "culprit").mutate(point, handler)
    await runner.run(event_frame("e1", "go"))
    failed(the_answer(link), "E_MIDDLEWARE", f"the {point} handler of extension culprit failed")
    runner.instance.pipeline.unregister("culprit")
    await runner.run(event_frame("e2", "again"))
    assert link.answers()[-1].status == "completed"  # the agent goes on


def without_result(ctx: Any) -> Any:
    return ctx.replace(tool_result=None)


@pytest.mark.parametrize(
    ("point", "handler"),
    [
        *itertools.product(("toolCall.pre", "toolCall.post"), (raises, nothing, rubbish, another_agent, unknown_field)),
        ("toolCall.post", without_result),
    ],
)
async def test_a_mutator_of_a_call_that_fails_is_the_calls_error(make: Make, point: str, handler: Any) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("done")))
    pipelines(runner, "culprit").mutate(point, handler)
    await runner.run(event_frame("e1", "go"))
    result = result_of(runner, "a")
    assert (result.status, the_answer(link).status) == ("error", "completed")
    assert result.error is not None
    assert f"the {point} handler of extension culprit" in (result.error.suggestion or "")
    assert len(link.calls) == (point == "toolCall.post")


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": "many"},
        {"blocks": [{"kind": "no type"}]},
        {"blocks": [{"type": "x", "data": object()}]},
        {"blocks": [{"type": "x"}] * 300},
        {"tool_catalog": {}},
        {"tool_catalog": [{"description": "no name"}]},
    ],
)
async def test_what_cannot_be_shown_to_a_model_fails_the_step(make: Make, change: dict[str, Any]) -> None:
    link, model = FakeLink(), FakeModel(says("done"))
    runner = make(link, model)
    pipelines(runner, "culprit").mutate("step.blocks", lambda ctx: ctx.replace(**change))
    await runner.run(event_frame("e1", "go"))
    assert code_of(the_answer(link)) == "E_MIDDLEWARE"
    assert "culprit" in str(the_answer(link).error)
    assert model.requests == []


async def never(ctx: Any, proceed: Any) -> Any:
    return ctx


async def twice(ctx: Any, proceed: Any) -> Any:
    await proceed(ctx)
    return await proceed(ctx)


async def not_awaited(ctx: Any, proceed: Any) -> Any:
    proceed(ctx).close()
    return ctx


async def no_context(ctx: Any, proceed: Any) -> Any:
    await proceed(ctx)
    return "done"


async def given_nothing(ctx: Any, proceed: Any) -> Any:
    return await proceed()


async def swallows(ctx: Any, proceed: Any) -> Any:
    await proceed(ctx)
    return ctx


@pytest.mark.parametrize("handler", [never, twice, not_awaited, no_context, given_nothing, swallows])
async def test_a_wrap_that_breaks_the_rules_is_named(make: Make, handler: Any) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("done"), says("more")))
    pipelines(runner, "culprit").wrap("step.llmCall", handler)
    await runner.run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert (answer.status, code_of(answer)) == ("failed", "E_MIDDLEWARE")
    assert "the step.llmCall handler of extension culprit failed" in str(answer.error)


@pytest.mark.parametrize("handler", [never, twice, not_awaited, no_context, given_nothing, swallows])
async def test_a_wrap_of_a_call_that_breaks_the_rules_is_the_calls_error(make: Make, handler: Any) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("done")))
    pipelines(runner, "culprit").wrap("toolCall.exec", handler)
    await runner.run(event_frame("e1", "go"))
    assert (result_of(runner, "a").status, the_answer(link).status) == ("error", "completed")


async def test_the_layer_that_failed_is_named_not_the_one_around_it(make: Make) -> None:
    async def passes(ctx: Any, proceed: Any) -> Any:
        return await proceed(ctx)

    async def fails(ctx: Any, proceed: Any) -> Any:
        raise ValueError("nope")

    link = FakeLink()
    runner = make(link, FakeModel(says("done")))
    pipelines(runner, "outer").wrap("step.llmCall", passes)
    pipelines(runner, "inner").wrap("step.llmCall", fails)
    await runner.run(event_frame("e1", "go"))
    assert "the step.llmCall handler of extension inner failed: ValueError: nope" in str(the_answer(link).error)


@pytest.mark.parametrize("point", ["turn.pre", "step.pre", "toolCall.pre", "step.llmCall"])
async def test_a_fault_of_the_engine_itself_hangs_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def broken(layers: Sequence[Layer], *rest: Any, **more: Any) -> Any:
        if layers[0].point == point:
            raise RuntimeError("a fault of ours")
        return run(layers, *rest, **more)

    async def breaks(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    link = FakeLink()
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("done")))
    api = pipelines(runner)
    if point == "step.llmCall":
        api.wrap(point, lambda ctx, proceed: proceed(ctx))
        monkeypatch.setattr(stages.Stages, "_ask_in_wraps", breaks)
    else:
        for name in ("turn.pre", "step.pre", "toolCall.pre"):
            api.mutate(name, lambda ctx: ctx)
        monkeypatch.setattr(stages, "run", broken)
    await asyncio.wait_for(runner.run(event_frame("e1", "go")), 10)
    answer = the_answer(link)
    if point == "toolCall.pre":
        assert (answer.status, code_of(result_of(runner, "a"))) == ("completed", "E_INTERNAL")
    else:
        assert (answer.status, code_of(answer)) == ("failed", "E_INTERNAL")
