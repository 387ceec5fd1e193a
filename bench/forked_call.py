"""A call with memory and files of its own: forked in a running jail, compared with a jail of its own.

Two figures: from the call until the first line of the tool's module runs, which is a little after its import begins,
and the whole call. Calls come one at a time with a pause, as from a model, and the next worker is made during the
pause. Without a pause, or when several calls come at once, a call waits until its worker is made.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping

import msgspec
import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.programs import Bus, broker, tool_host
from bench.tool_call import TOOLS, BareAgent, bare_agent, tool
from goondan.schemas.bundle.launch import CatalogItem, SandboxSpec, ToolSpec

#: The pause between two calls (seconds). A model takes longer.
PAUSE_S = 0.05
#: Calls of one run, and calls at once.
CALLS = 40
AT_ONCE = 8


def loaded(name: str, isolation: str) -> tuple[CatalogItem, ToolSpec]:
    """The tool that reports when it began to load."""
    item, spec = tool(name)
    root = TOOLS / "loaded"
    sandbox = msgspec.convert({"isolation": isolation}, SandboxSpec)
    return item, msgspec.structs.replace(spec, entry=str(root / "loaded.py"), root=str(root), sandbox=sandbox)


async def timed(agent: BareAgent, name: str) -> tuple[float, float]:
    """Milliseconds until the tool's module runs, and until the result has arrived."""
    before = time.monotonic()
    result = await agent.call(name)
    after = time.monotonic()
    began = msgspec.msgpack.decode(result.output or b"", type=float)
    return (began - before) * 1000, (after - before) * 1000


async def paced(bus: Bus, name: str) -> Mapping[str, float]:
    """The medians of single calls, and of calls that came together."""
    async with bare_agent(bus) as agent:
        for _ in range(5):
            await agent.call(name)
            await asyncio.sleep(PAUSE_S)
        single = []
        for _ in range(CALLS):
            single.append(await timed(agent, name))
            await asyncio.sleep(PAUSE_S)
        crowd = []
        for _ in range(CALLS // AT_ONCE):
            crowd += await asyncio.gather(*(timed(agent, name) for _ in range(AT_ONCE)))
            await asyncio.sleep(PAUSE_S)
    imports, wholes = zip(*single, strict=True)
    return {
        "module's first line": statistics.median(imports),
        "whole call": statistics.median(wholes),
        f"{AT_ONCE} at once": statistics.median(whole for _, whole in crowd),
    }


async def cold(bus: Bus, names: list[str]) -> Mapping[str, float]:
    """The medians of first calls, for which a jail must be made."""
    async with bare_agent(bus) as agent:
        await agent.call(names[0])  # the host's own first time
        times = [await timed(agent, name) for name in names[1:]]
    imports, wholes = zip(*times, strict=True)
    return {"module's first line": statistics.median(imports), "whole call": statistics.median(wholes)}


def forked(seconds: float) -> Mapping[str, float]:
    """`isolation: call`."""
    item, spec = loaded("alone", "call")
    with broker([item], [spec]) as bus, tool_host(bus):
        return uvloop.run(paced(bus, item.name))


def own_jail(seconds: float) -> Mapping[str, float]:
    """The way it was before: a jail for each call."""
    items, specs = zip(*(loaded(f"cold-{number}", "instance") for number in range(9)), strict=True)
    with broker(list(items), list(specs)) as bus, tool_host(bus):
        return uvloop.run(cold(bus, [item.name for item in items]))


BENCHMARK = Benchmark(
    name="forked_call",
    what="a call with memory and files of its own, until its tool's module runs and until its result",
    sides={"forked in a jail": forked, "a jail of its own": own_jail},
    metrics=[
        Metric("module's first line", "ms", "lower", Goal(2.5)),
        Metric("whole call", "ms", "lower"),
        Metric(f"{AT_ONCE} at once", "ms", "lower"),
    ],
)
