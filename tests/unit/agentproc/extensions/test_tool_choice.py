"""Which tools a model has to call: the agent's word for the first step of a turn, middleware's for any."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.agentproc.extensions.points.contexts import StepContext
from goondan.schemas.bundle.launch import ForcedTool
from goondan.schemas.wire.errors import GoondanError
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (None, [None, None]),
        ("required", ["required", None]),
        (ForcedTool("x__y"), [ForcedTool("x__y"), None]),
        ("none", ["none", "none"]),
        ("auto", ["auto", "auto"]),
    ],
)
async def test_a_forced_tool_is_forced_in_the_first_step(make: Make, own: Any, expected: list[Any]) -> None:
    link, model = FakeLink(), FakeModel(wants(("c1", "no__such", {})), says("done"))
    await make(link, model, tool_choice=own).run(event_frame("e1", "go"))
    assert [request.tool_choice for request in model.requests] == expected


async def test_step_middleware_chooses_for_its_step(make: Make) -> None:
    link, model = FakeLink(), FakeModel(wants(("c1", "no__such", {})), wants(("c2", "no__such", {})), says("done"))
    runner = make(link, model, tool_choice="required")
    chosen: list[Any] = ["none", {"tool": "x__y"}, None]
    refused: list[str] = []

    async def layer(ctx: StepContext) -> Any:
        for wrong in ("always", {"tool": ""}, {"name": "x"}, 3):
            with pytest.raises(GoondanError) as raised:
                ctx.tool_choice = wrong  # type: ignore[assignment]
            refused.append(raised.value.info.code)
        ctx.tool_choice = chosen[ctx.step_index]
        assert ctx.tool_choice == chosen[ctx.step_index]
        return await ctx.next()

    runner.instance.pipeline.register("step", layer, extension="chooser")
    await runner.run(event_frame("e1", "go"))
    assert [request.tool_choice for request in model.requests] == ["none", ForcedTool("x__y"), None]
    assert set(refused) == {"E_USAGE"}
