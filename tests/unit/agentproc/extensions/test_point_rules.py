"""Handlers at points that fail, or do not keep to the rules: what ends with them, and whose name is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from goondan.agentproc.extensions import stages
from goondan.agentproc.extensions.engine import run
from goondan.agentproc.extensions.points.pipeline import Layer
from tests.unit.agentproc.extensions.test_points import pipelines, result_of
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, code_of, the_answer


async def test_the_layer_that_failed_is_named_not_the_one_around_it(make: Make, link: FakeLink) -> None:
    async def passes(ctx: Any, proceed: Any) -> Any:
        return await proceed(ctx)

    async def fails(ctx: Any, proceed: Any) -> Any:
        raise ValueError("nope")

    runner = make(link, FakeModel(says("done")))
    pipelines(runner, "outer").wrap("step.llmCall", passes)
    pipelines(runner, "inner").wrap("step.llmCall", fails)
    await runner.run(event_frame("e1", "go"))
    assert "the step.llmCall handler of extension inner failed: ValueError: nope" in str(the_answer(link).error)


@pytest.mark.parametrize("point", ["turn.pre", "step.pre", "toolCall.pre", "step.llmCall"])
async def test_a_fault_of_the_engine_itself_hangs_nobody(
    make: Make, link: FakeLink, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def broken(layers: Sequence[Layer], *rest: Any, **more: Any) -> Any:
        if layers[0].point == point:
            raise RuntimeError("a fault of ours")
        return run(layers, *rest, **more)

    async def breaks(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

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
