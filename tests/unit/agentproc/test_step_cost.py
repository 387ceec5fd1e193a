"""What a plain step costs in the agent, in calls of Python functions: they can be counted, and tell what time tells."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import goondan
from bench.model_server import Server
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, ModelSpec
from tests.python_calls import python_calls
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, make_spec, says, wants
from tests.unit.agentproc.turns import runner_of

#: The most calls of a step with one tool call, of an agent without extensions. It was 420 and more.
MOST = 162
#: The same with a model on this machine, asked over HTTP, whose answer is eight events. It was 410 with the first.
OVER_HTTP = {"anthropic": 280, "openai": 305}
FEW, MANY = 2, 42
OURS = tuple(f"{path}/{package}/" for path in goondan.__path__ for package in ("agentproc", "features", "schemas"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes by time would count a slow machine."""
    for delay in ("calls.caller.ACK_DELAY_S", "turn.run.NOTES_S"):
        monkeypatch.setattr(f"goondan.agentproc.{delay}", 60.0)


def spec_of(folder: Path, **changes: Any) -> AgentSpec:
    tools = [CatalogItem(name=f"tool__{number}", description="One of many.") for number in range(40)]
    names = [tool.name for tool in tools]
    return make_spec(str(folder), registry=tools, catalog=names, max_steps_per_turn=MANY + 1, **changes)


async def calls_of_a_turn(runner: TurnRunner, text: str) -> int:
    """The calls of our functions in a turn behind an equal one."""
    await runner.run(event_frame("e1", text))
    with python_calls(lambda code: code.co_filename.startswith(OURS)) as called:
        await runner.run(event_frame("e2", text))
    await runner.close()
    return len(called)


async def test_a_step_with_one_call_is_so_many_calls_of_python_functions(tmp_path: Path) -> None:
    counts = []
    for steps in (FEW, MANY):
        answers = [wants((f"c{step}", "tool__0", {"n": step})) for step in range(steps)]
        model = FakeModel(*answers, says("one"), *answers, says("two"))
        counts.append(await calls_of_a_turn(runner_of(spec_of(tmp_path / str(steps)), FakeLink(), model), "go"))
    each = (counts[1] - counts[0]) / (MANY - FEW)
    assert round(each) <= MOST, f"{each:.1f} calls of a step; what was added is needed in each step?"


@pytest.mark.parametrize("provider", OVER_HTTP)
async def test_a_step_over_http_is_so_many_calls_of_python_functions(tmp_path: Path, provider: str) -> None:
    counts = []
    async with await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0) as server:
        origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        endpoint = f"{origin}/v1" if provider == "openai" else origin
        model = ModelSpec(provider=provider, model="m", endpoint=endpoint, api_key="bench-key", key_origin=origin)
        for steps in (FEW, MANY):
            link = FakeLink()
            runner = runner_of(spec_of(tmp_path / str(steps), model=model), link, None)
            counts.append(await calls_of_a_turn(runner, f'steps {steps} tool__0 {{"text": "{"x" * 100}"}}'))
            assert [answer.response for answer in link.answers()] == [f"done after {steps} results"] * 2
    each = (counts[1] - counts[0]) / (MANY - FEW)
    assert round(each) <= OVER_HTTP[provider], f"{each:.1f} calls of a step over HTTP"
