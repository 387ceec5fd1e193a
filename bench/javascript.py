"""A tool in TypeScript: its first call, when its jail is built, and later ones, beside the same in Python.

The baseline of the first is bubblewrap around the same runtime and the same file, without a bus and without a host.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from typing import Literal

import uvloop
from msgspec.structs import replace

from bench.cold_jail import JAILS, bundled, first_calls
from bench.compare import Benchmark, Goal, Metric
from bench.programs import broker, tool_host
from bench.tool_call import TOOLS, measure, tool
from goondan.kernel.bundle.javascript import choose, look
from goondan.schemas.bundle.launch import CatalogItem, JavaScriptRuntime, ToolSpec

ENTRY = TOOLS / "echo" / "echo.ts"


def runtime(name: Literal["node", "bun"]) -> JavaScriptRuntime:
    """The runtime of this machine with that name."""
    found = choose(name, look("/", os.environ))
    if isinstance(found, str):
        raise SystemExit(found)
    return found


def typescript(name: str, loads: JavaScriptRuntime | None) -> tuple[CatalogItem, ToolSpec]:
    """The echo tool with its entry in TypeScript; None: in Python."""
    item, spec = tool(name)
    return item, spec if loads is None else replace(spec, entry=str(ENTRY), javascript=loads)


def jailed(loads: JavaScriptRuntime | None, seconds: float) -> Mapping[str, float]:
    """Cold and warm, through agent, broker and tool host."""
    items, specs = zip(*(typescript(f"cold-{number}", loads) for number in range(JAILS + 1)), strict=True)
    with broker(list(items), list(specs)) as bus, tool_host(bus):
        cold = uvloop.run(first_calls(bus, [item.name for item in items]))
    item, spec = typescript("echo", loads)
    with broker([item], [spec]) as bus, tool_host(bus):
        return {**cold, **uvloop.run(measure(bus, item.name, seconds))}


def bare(loads: JavaScriptRuntime, seconds: float) -> Mapping[str, float]:
    """bubblewrap with all namespaces around the runtime and the module of the tool."""
    command = [bundled(), "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc"]
    command += ["--dev", "/dev"]
    times = []
    for _ in range(JAILS):
        before = time.perf_counter()
        subprocess.run([*command, loads.program, str(ENTRY)], check=True)
        times.append(time.perf_counter() - before)
    return {"first result": statistics.median(times) * 1000}


NODE = runtime("node")
BENCHMARK = Benchmark(
    name="javascript",
    what="a tool in TypeScript under Node: its first call, single calls, then 64 in flight",
    sides={"node": partial(jailed, NODE), "bwrap and node": partial(bare, NODE), "python": partial(jailed, None)},
    metrics=[
        Metric("first result", "ms", "lower", Goal(1.5, of="bwrap and node")),
        Metric("p50", "µs", "lower", Goal(1.3, of="python")),
        Metric("p99", "µs", "lower"),
        Metric("rate", "/s", "higher"),
    ],
)
