"""What a plain step costs in the agent, in calls of Python functions: they can be counted, and tell what time tells."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import goondan
from goondan.schemas.bundle.launch import CatalogItem
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, make_spec, says, wants
from tests.unit.agentproc.turns import runner_of

#: The most calls of a step with one tool call, of an agent without extensions. It was 420 and more.
MOST = 186
FEW, MANY = 2, 42
OURS = tuple(f"{path}/{package}/" for path in goondan.__path__ for package in ("agentproc", "features", "schemas"))


async def calls_of_a_turn(folder: Path, steps: int) -> int:
    """The calls of our functions in a turn of so many steps with one call each, behind an equal one."""
    tools = [CatalogItem(name=f"tool__{number}", description="One of many.") for number in range(40)]
    spec = make_spec(str(folder), registry=tools, catalog=[tool.name for tool in tools], max_steps_per_turn=MANY + 1)
    answers = [wants((f"c{step}", "tool__0", {"n": step})) for step in range(steps)]
    runner = runner_of(spec, FakeLink(), FakeModel(*answers, says("one"), *answers, says("two")))
    await runner.run(event_frame("e1", "go"))
    count = 0

    def look(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        await runner.run(event_frame("e2", "go"))
    finally:
        sys.setprofile(before)
    await runner.close()
    return count


async def test_a_step_with_one_call_is_so_many_calls_of_python_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for delay in ("calls.caller.ACK_DELAY_S", "turn.run.NOTES_S"):  # what comes by time would count a slow machine
        monkeypatch.setattr(f"goondan.agentproc.{delay}", 60.0)
    few, many = [await calls_of_a_turn(tmp_path / str(steps), steps) for steps in (FEW, MANY)]
    each = (many - few) / (MANY - FEW)
    assert round(each) <= MOST, f"{each:.1f} calls of a step; what was added is needed in each step?"
