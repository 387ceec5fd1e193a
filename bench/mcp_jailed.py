"""A call of a jailed MCP server, whole path, beside the same server at the end of two pipes of the plain SDK client.

The server is the same program (bench/mcp_server.py). Ours goes from the agent through broker, tool host and MCP worker
to the server in its jail and back, with validation, receipt and limits. Also measured: the memory of the template of
the workers, and what one worker has for itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.programs import broker, tool_host
from bench.tool_call import SCHEMA, SDK, measure, sdk
from goondan.schemas.bundle.launch import CatalogItem, Filesystem, Limits, SandboxSpec, ServerSpec, ToolSpec

_PROGRAM = "features/mcp/jail/start.py"


def server() -> tuple[CatalogItem, ToolSpec]:
    """The server of the other side, in a jail that may read the environment and the benchmarks."""
    program = Path(__file__).with_name("mcp_server.py")
    spec = ServerSpec(
        extension="bench",
        transport="stdio",
        worker="mcp",
        command=[sys.executable, "-I", str(program)],
        tools=True,
        digest="bench",
    )
    sandbox = SandboxSpec(filesystem=Filesystem(read=[sys.prefix, str(program.parent)]), limits=Limits(cpu_seconds=600))
    tool = ToolSpec(name="server", entry="", root="", exports=[], sandbox=sandbox, server=spec)
    return CatalogItem(name="server__same", parameters=SCHEMA), tool


def jailed(seconds: float) -> Mapping[str, float]:
    """The whole path, then the memory of the processes that speak with servers (MiB)."""
    item, tool = server()
    with broker([item], [tool]) as bus, tool_host(bus) as host:
        found = dict(uvloop.run(measure(bus, item.name, seconds)))
        template = next(pid for pid in _children(host.pid) if _PROGRAM in _arguments(pid))
        found["template"] = _memory(template, "Anonymous", "Private_Clean")  # also what its workers see of it
        found["worker"] = max(_memory(pid, "Private_Clean", "Private_Dirty") for pid in _children(template))
        return found


def _children(pid: int) -> list[int]:
    return [int(name) for task in os.listdir(f"/proc/{pid}/task")
            for name in Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="ascii").split()]  # fmt: skip


def _arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")


def _memory(pid: int, *fields: str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(tuple(f"{field}:" for field in fields))) / 1024


BENCHMARK = Benchmark(
    name="mcp_jailed",
    what="one call of an MCP server: ours through bus, worker and jail, the SDK's to a process without a sandbox",
    sides={"jailed server": jailed, SDK: sdk},
    metrics=[
        Metric("p50", "µs", "lower", Goal(600, of=SDK, plus=True)),
        Metric("rate", "/s", "higher"),
        Metric("template", "MiB", "lower", Goal(60)),
        Metric("worker", "MiB", "lower", Goal(15)),
    ],
)
