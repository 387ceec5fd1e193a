"""What the walls cost a warm call, and what an idle jail keeps to itself.

Both sides are the tool host's own code in this process, with the real worker; on one side bubblewrap is replaced by a
program that puts up no wall: no namespaces, no system call filter, no Landlock, no limits. No broker and no agent, so
that the walls are not hidden behind the way to them.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import uvloop

from bench.agent import private_mib
from bench.compare import Benchmark, Goal, Metric
from schemas.launch import ExportSpec, ToolSpec
from tests.toolhost_fixture import Bench, bench
from toolhost.policy import HostFacts

TOOLS = Path(__file__).parent / "tools"
EXPORTS = ("nothing", "files", "program")
#: Calls before anything is measured.
WARM_UP = 50
#: What a jail may take to settle into waiting (seconds).
SETTLE_S = 0.2


def _tool() -> ToolSpec:
    root = TOOLS / "work"
    exports = [ExportSpec(name=name) for name in EXPORTS]
    return ToolSpec(name="work", entry=str(root / "work.py"), root=str(root), exports=exports)


async def _measure(facts: Callable[[HostFacts], HostFacts], place: Path, seconds: float) -> Mapping[str, float]:
    work = place / "work"
    work.mkdir()
    figures: dict[str, float] = {}
    async with bench(_tool(), facts=facts) as made:
        for name in EXPORTS:
            for _ in range(WARM_UP):
                await _call(made, name, work)
            times = []
            end = time.perf_counter() + seconds / len(EXPORTS)
            while (before := time.perf_counter()) < end:
                await _call(made, name, work)
                times.append(time.perf_counter() - before)
            figures[name] = statistics.median(times) * 1e6
    async with bench(_tool(), facts=facts) as made:
        await _call(made, EXPORTS[0], work)
        await asyncio.sleep(SETTLE_S)
        (slot,) = made.host.jails.pool.slots()
        figures["idle memory"] = sum(map(private_mib, slot.jail.jail.processes()))
    return figures


async def _call(made: Bench, name: str, work: Path) -> None:
    call_id, waiter = made.start(f"work__{name}", {"text": "x" * 100}, workdir=work)
    result = await waiter
    if result["status"] != "ok":
        raise SystemExit(f"{name}: {result}")
    made.acknowledge(call_id)
    made.results.clear()
    made.receipts.clear()


def _side(change: Callable[[HostFacts, Path], HostFacts], seconds: float) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        place = Path(folder)
        return uvloop.run(_measure(lambda facts: change(facts, place), place, seconds))


def jailed(seconds: float) -> Mapping[str, float]:
    """All walls of this host."""
    return _side(lambda facts, place: facts, seconds)


def bare(seconds: float) -> Mapping[str, float]:
    """None."""

    def change(facts: HostFacts, place: Path) -> HostFacts:
        program = place / "no-walls"
        command = [sys.executable, "-I", "-S", str(TOOLS / "no_walls.py"), facts.inside]
        program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
        return msgspec.structs.replace(facts, bwrap=str(program), bwrap_root=None, stage=None, groups=None)

    return _side(change, seconds)


BENCHMARK = Benchmark(
    name="walls",
    what="a warm call in the tool host, with all walls and with none; private memory of an idle jail's processes",
    sides={"jailed": jailed, "no walls": bare},
    metrics=[
        Metric("nothing", "µs", "lower", Goal(1.1, of="no walls")),
        Metric("files", "µs", "lower", Goal(1.1, of="no walls")),
        Metric("program", "µs", "lower"),
        Metric("idle memory", "MiB", "lower", Goal(8)),
    ],
)
