"""Our tool call beside the same call through the official Python MCP SDK over stdio.

Both tools return their arguments. The SDK's is one process behind two pipes, without a sandbox and without a bus; its
client and its server are the SDK's own high-level ones, with their defaults. Ours is the whole path of tool_call.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Mapping

import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.tool_call import ARGUMENTS, WARM_UP, WINDOW, warm

SDK = "MCP SDK over stdio"


async def measure(seconds: float) -> Mapping[str, float]:
    """Times of single calls, then the rate with WINDOW in flight: as in tool_call.measure."""
    from mcp import Client, StdioServerParameters

    parameters = StdioServerParameters(
        command=sys.executable, args=["-I", "-m", "bench.mcp_server"], env=dict(os.environ), cwd=os.getcwd()
    )
    async with Client(parameters) as client:

        async def call() -> None:
            result = await client.call_tool("same", ARGUMENTS)
            if result.is_error or result.structured_content != ARGUMENTS:
                raise SystemExit(f"the MCP server: {result}")

        async def caller(until: float) -> int:
            made = 0
            while time.perf_counter() < until:
                await call()
                made += 1
            return made

        for _ in range(WARM_UP):
            await call()
        times = []
        end = time.perf_counter() + seconds / 2
        while (before := time.perf_counter()) < end:
            await call()
            times.append(time.perf_counter() - before)
        before = time.perf_counter()
        made = await asyncio.gather(*(caller(before + seconds / 2) for _ in range(WINDOW)))
        rate = sum(made) / (time.perf_counter() - before)
        return {"p50": statistics.median(times) * 1e6, "rate": rate}


BENCHMARK = Benchmark(
    name="mcp_sdk",
    what="one tool call: ours through bus and jail, the MCP SDK's to a process without a sandbox",
    sides={"warm jail": warm, SDK: lambda seconds: uvloop.run(measure(seconds))},
    metrics=[
        Metric("p50", "µs", "lower", Goal(1 / 3, of=SDK)),
        Metric("rate", "/s", "higher", Goal(3, of=SDK)),
    ],
)
