"""How much extensions add to a step and to a tool call: an agent with ten of them, with two middlewares each, beside an
agent with none.

Whole turns of an agent without a bus: the model is a script, tool calls are answered in the same process. The figure is
the processor time of all the agent's work in a step and for a call, the conversation file included. The difference
between turns with one call and with eleven calls in each step gives the cost of a call. The sides alternate after each
turn.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Final

from bench.compare import Benchmark, Goal, Metric, Together
from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from goondan.agentproc.start.app import new_loop
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.runner import TurnRunner
from goondan.features.try_out.program import NoBus
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.bundle.launch import AgentSpec, CatalogItem, ModelSpec
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame

#: The number of extensions, and of tools in the catalog of each step.
EXTENSIONS: Final = 10
TOOLS: Final = 40
#: The steps of a turn, and the calls of a step in each of the two turns that are compared.
STEPS: Final = 20
FEW: Final = 1
MANY: Final = 11
SIDES: Final = ("ten extensions", "ten at points", "none")


class Script:
    """A model that makes `calls` calls in each step but the last."""

    needs_history = True
    calls = FEW

    async def complete(self, request: ModelRequest, *more: Any) -> ModelAnswer:
        """See Provider."""
        if request.step > STEPS:
            return ModelAnswer(text="done", finish_reason="stop")
        calls = [AskedCall(f"c{request.step}.{number}", "tool__0", {"number": number}) for number in range(self.calls)]
        return ModelAnswer(calls=calls, finish_reason="tool-calls")

    async def window(self, request: ModelRequest) -> None:
        """It has no context."""

    def forget(self) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is open."""


class Side:
    """One agent. Its conversation begins again with each turn, so that all turns are equally long."""

    def __init__(self, name: str, folder: str) -> None:
        items = [CatalogItem(name=f"tool__{number}", description="One of many.") for number in range(TOOLS)]
        spec = AgentSpec(
            name=name.replace(" ", "-"),
            model=ModelSpec(provider="embedded"),
            registry=items,
            catalog=[item.name for item in items],
            state_dir=folder,
            revision="bench",
            max_steps_per_turn=STEPS + 1,
            durability="process",
        )
        self.link = NoBus()
        self.model = Script()
        store = ConversationStore(instance_dir(folder, spec.name, "k"), durability="process")
        self.runner = TurnRunner(Instance(spec, "k", self.link, store, provider=self.model))
        self._turns = 0
        for number in range(EXTENSIONS if name != "none" else 0):
            self._extend(f"extension-{number}", points=name == "ten at points")

    def _extend(self, name: str, *, points: bool) -> None:
        """One extension, with middleware around each step and each call."""
        pipeline = self.runner.instance.pipeline

        async def layer(ctx: Any) -> Any:
            return await ctx.next()

        if points:
            pipeline.add_to_point("mutate", "step.tools", lambda ctx: ctx, extension=name)
            pipeline.add_to_point("mutate", "toolCall.post", lambda ctx: ctx, extension=name)
        else:
            pipeline.register("step", layer, extension=name)
            pipeline.register("toolCall", layer, extension=name)

    async def turn(self, calls: int) -> float:
        """Processor time of one turn (microseconds)."""
        self.model.calls = calls
        self._turns += 1
        event = AgentEvent(id=f"e{self._turns}", type="user", created_at="2026-01-01T00:00:00.000Z", input="go")
        frame = Frame("event", id=event.id, event_id=event.id, epoch=1, payload=to_raw(event))
        began = time.process_time_ns()
        await self.runner.run(frame)
        took = (time.process_time_ns() - began) / 1000
        if self.link.answers[-1].response != "done":
            raise SystemExit(f"the turn failed: {self.link.answers[-1]}")
        return took


async def measure_all(folder: str, seconds: float) -> Mapping[str, Mapping[str, float]]:
    """Figures of every side: microseconds of processor time for a step without its call, and for a call."""
    times: dict[tuple[str, int], list[float]] = {(name, calls): [] for name in SIDES for calls in (FEW, MANY)}
    until, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < until or rounds < 3:
        for name in SIDES:
            side = Side(name, f"{folder}/{rounds}")  # a conversation that has grown costs each turn more
            for calls in (FEW, MANY):
                times[name, calls].append(await side.turn(calls))
            await side.runner.close()
        shutil.rmtree(f"{folder}/{rounds}")
        rounds += 1
    figures = {}
    for name in SIDES:
        few, many = (statistics.median(times[name, calls]) / STEPS for calls in (FEW, MANY))
        call = (many - few) / (MANY - FEW)
        figures[name] = {"step": few - FEW * call, "tool call": call}
    return figures


def measure(seconds: float) -> Mapping[str, Mapping[str, float]]:
    """See Together."""
    gc.collect()
    gc.freeze()  # as the fork server does for its agents
    with tempfile.TemporaryDirectory(prefix="gb", dir="/tmp") as folder:
        with asyncio.Runner(loop_factory=new_loop) as runner:  # the loop that agents have
            return runner.run(measure_all(folder, seconds))


BENCHMARK = Benchmark(
    name="extensions",
    what=f"what an agent does in a step and for a call, with {EXTENSIONS} extensions of two middlewares each",
    sides=Together(SIDES, measure),
    metrics=[
        Metric("step", "µs", "lower", Goal(300, of="none", plus=True)),
        Metric("tool call", "µs", "lower", Goal(100, of="none", plus=True)),
    ],
)
