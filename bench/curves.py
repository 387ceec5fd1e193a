"""How costs grow with size: instances, calls in flight, bytes of a payload, tools, steps of a turn.

Each figure is processor time of all processes of the kernel for one piece of the work, so a flat curve has the same
figure on each side. The history of a conversation is another benchmark's (history.py).

Each step of a turn waits equally long for its model. The longer programs wait, the less of them is in the processors'
caches: beside other programs a step behind a wait of 6 ms cost 3.3 ms, and one behind 1 ms 1.3 ms, with a history of 10
messages as with 3,000. The server's own time with a long request must not count as the kernel's.

Where a curve bends, and why. One call or one instance alone pays for the whole turn or kernel that many share. A
request names all tools, so that a turn with 1,000 writes them. 1,000 instances take 7 GiB: a page that a virtual
machine never had before takes its first user twice as long, and each touches 2,100 pages. The first instances pay for
the warm-up of the fork server (0.15 s) when they come right after the start.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.swarm import Swarm, all_said, said, swarm
from bench.turn import BUNDLE, CALL, TOOLS, model_server


class Point(NamedTuple):
    """A place on every curve."""

    #: Live instances that get a message each.
    instances: int
    #: Calls of one step.
    in_flight: int
    #: Bytes of a call's arguments, which come back as its result.
    payload: int
    #: Tools of the agent.
    tools: int
    #: Steps of one turn.
    steps: int


POINTS: Final = {
    "largest": Point(1_000, 256, 1 << 20, 1_000, 1_000),
    "middle": Point(100, 16, 16 << 10, 100, 100),
    "smallest": Point(10, 1, 256, 10, 10),
    "one": Point(1, 1, 256, 1, 1),
}
#: How much of each is measured, so that a small piece is measured often enough.
MESSAGES, CALLS, PAYLOADS, TURNS, STEPS = 200, 256, 8, 10, 200
KIB: Final = 1 << 10
_CONSOLE: Final = 'spec: {provider: PROVIDER, model: bench, endpoint: "ENDPOINT", apiKey: {value: bench-key}}'
_EXPORT: Final = """\
    - name: same
      description: Give the arguments back.
      parameters: {type: object, properties: {text: {type: string}}, required: [text]}
"""

#: One turn in an instance.
Turn = Callable[[str, str], Awaitable[object]]


def bundle_of(base: str | None, tools: int = 1) -> str:
    """The bundle of bench/turn.py for longer turns, with the model at `base` or the console, and with so many tools."""
    text = BUNDLE.replace("maxStepsPerTurn: 64", "maxStepsPerTurn: 1000, maxLiveAgents: 1050")
    text = text.replace(_CONSOLE, "spec: {provider: embedded}") if base is None else text.replace("ENDPOINT", base)
    exports = "".join([_EXPORT.replace("same", name) for name in names_of(tools)])
    text = text.replace(_EXPORT, exports).replace("Tool/echo, Tool/bash, Tool/file-system", "Tool/echo")
    return text.replace("PROVIDER", "anthropic").replace("DURABILITY", "process")


def names_of(tools: int) -> list[str]:
    """The exports of the tool."""
    return ["same", *(f"same{number}" for number in range(1, tools))]


def run(
    bundle: str, measure: Callable[[Swarm, Turn], Awaitable[Mapping[str, float]]], tools: int = 1
) -> Mapping[str, float]:
    """The figures of one kernel with that bundle, whose tool has so many exports."""

    async def inside(made: Swarm) -> Mapping[str, float]:
        with made.session() as opened:
            async with opened as session:
                return await measure(made, partial(said, session))

    with swarm(bundle=bundle) as made:
        shutil.copytree(TOOLS, made.bundle.parent / "tools")
        echo = made.bundle.parent / "tools" / "echo" / "echo.py"
        handlers = ", ".join([f'"{name}": same' for name in names_of(tools)])
        echo.write_text(echo.read_text().replace('"same": same', handlers))
        made.start()
        return uvloop.run(inside(made))


async def spent(made: Swarm, turn: Turn, instance: str, text: str, times: int) -> float:
    """The processor time of such a turn (ms), when one like it came before."""
    await turn(instance, text)
    used = made.cpu()
    for _ in range(times):
        await turn(instance, text)
    return (made.cpu() - used) * 1e3 / times


async def on_console(point: Point, made: Swarm, turn: Turn) -> Mapping[str, float]:
    """Instances, calls and payloads, without a model."""
    with made.session() as opened:
        async with opened as session:
            names = [f"i{number}" for number in range(point.instances)]
            used = made.cpu()
            await all_said(session, names, "hello")
            started = (made.cpu() - used) * 1e3 / len(names)
            used, rounds = made.cpu(), max(1, MESSAGES // len(names))
            for _ in range(rounds):
                await all_said(session, names, "hello")
            message = (made.cpu() - used) * 1e3 / len(names) / rounds
    calls = "\n".join(['/echo__same {"text": "x"}'] * point.in_flight)
    wide = await spent(made, turn, "calls", calls, max(2, CALLS // point.in_flight))
    plain = await spent(made, turn, "calls", "hello", TURNS)  # after what takes long: no warm-up goes on any more
    payload = f'/echo__same {{"text": "{"x" * point.payload}"}}'
    large = await spent(made, turn, "payloads", payload, PAYLOADS)
    found = {"an instance, started": started, "a message": message, "a call": (wide - plain) / point.in_flight}
    if point.payload >= KIB:
        small = await spent(made, turn, "payloads", '/echo__same {"text": "x"}', PAYLOADS)
        found["a KiB of a payload"] = (large - small) / (point.payload / KIB)
    return found


async def with_tools(made: Swarm, turn: Turn) -> Mapping[str, float]:
    """A turn of an agent with that many tools."""
    return {"a turn, tools": await spent(made, turn, "tools", f"call {CALL}", TURNS)}


async def with_steps(point: Point, made: Swarm, turn: Turn) -> Mapping[str, float]:
    """A step of a turn with that many: all but the last make a call."""
    deep = await spent(made, turn, "steps", f"steps {point.steps - 1} {CALL}", max(1, STEPS // point.steps))
    return {"a step": deep / point.steps}


def side(point: Point, seconds: float) -> Mapping[str, float]:
    """All curves at one point, each with a kernel of its own."""
    found = dict(run(bundle_of(None), partial(on_console, point)))
    with model_server() as base:
        found |= run(bundle_of(base, point.tools), with_tools, point.tools)
    with model_server("--pause") as base:
        found |= run(bundle_of(base), partial(with_steps, point))
    return found


BENCHMARK = Benchmark(
    name="curves",
    what="processor time of one piece among 1,000, 100, 10 and 1 instances; 256, 16 and 1 calls in flight; with 1 MiB, "
    "16 KiB and 256 bytes; among 1,000, 100, 10 and 1 tools; of a turn of 1,000, 100, 10 and 1 steps",
    sides={name: partial(side, point) for name, point in POINTS.items()},
    metrics=[
        Metric("an instance, started", "ms", "lower", Goal(1.5, of="smallest")),
        Metric("a message", "ms", "lower", Goal(1.5, of="smallest")),
        Metric("a call", "ms", "lower", Goal(1.3, of="smallest")),
        Metric("a KiB of a payload", "ms", "lower", Goal(1.5, of="middle")),
        Metric("a turn, tools", "ms", "lower", Goal(1.5, of="smallest")),
        Metric("a step", "ms", "lower", Goal(1.3, of="smallest")),
    ],
    rounds=3,
    durability="process",
)
