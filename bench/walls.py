"""What the walls cost a warm call, and what an idle jail keeps to itself.

Both sides are the tool host's own code in this process, with the real worker; on one side bubblewrap is replaced by a
program that puts up no wall: no namespaces, no system call filter, no Landlock, no limits. No broker and no agent, so
that the walls are not hidden behind the way to them. The two take turns every few calls: what a wall costs is some
microseconds, and one side after the other would say more about the machine's other work.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import uvloop

from bench.agent import private_mib
from bench.compare import Benchmark, Goal, Metric, Together
from schemas.launch import ExportSpec, ToolSpec
from tests.toolhost_fixture import Bench, bench
from toolhost.policy import HostFacts

TOOLS = Path(__file__).parent / "tools"
EXPORTS = ("nothing", "files", "program")
JAILED, NO_WALLS = "jailed", "no walls"
#: Calls before anything is measured.
WARM_UP = 50
#: Calls of one side that count before the other's turn.
TURN = 3
#: What a jail may take to settle into waiting (seconds).
SETTLE_S = 0.2

#: Metric name -> figure, of one side.
Figures = dict[str, float]


def _tool() -> ToolSpec:
    root = TOOLS / "work"
    exports = [ExportSpec(name=name) for name in EXPORTS]
    return ToolSpec(name="work", entry=str(root / "work.py"), root=str(root), exports=exports)


async def _measure(no_walls: Callable[[HostFacts], HostFacts], place: Path, seconds: float) -> dict[str, Figures]:
    sides: dict[str, Callable[[HostFacts], HostFacts]] = {JAILED: lambda facts: facts, NO_WALLS: no_walls}
    figures: dict[str, Figures] = {side: {} for side in sides}
    async with AsyncExitStack() as open_hosts:
        hosts = {side: await open_hosts.enter_async_context(bench(_tool(), facts=sides[side])) for side in sides}
        for name in EXPORTS:
            for side, made in hosts.items():
                (place / side).mkdir(exist_ok=True)
                for _ in range(WARM_UP):
                    await _call(made, name, place / side)
            times = await _in_turns(hosts, name, place, seconds / len(EXPORTS))
            for side in hosts:
                figures[side][name] = statistics.median(times[side]) * 1e6
    for side, facts in sides.items():
        async with bench(_tool(), facts=facts) as made:
            await _call(made, EXPORTS[0], place / side)
            await asyncio.sleep(SETTLE_S)
            (slot,) = made.host.jails.pool.slots()
            figures[side]["idle memory"] = sum(map(private_mib, slot.jail.jail.processes()))
    return figures


async def _in_turns(hosts: Mapping[str, Bench], name: str, place: Path, seconds: float) -> Mapping[str, list[float]]:
    """Seconds of each call. The machine's noise changes within milliseconds, so turns are short, and who begins changes.

    What another side has left in the processor's caches is paid by the first call of a turn, which does not count.
    """
    times: dict[str, list[float]] = {side: [] for side in hosts}
    order = list(hosts)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for side in order:
            await _call(hosts[side], name, place / side)
            for _ in range(TURN):
                before = time.perf_counter()
                await _call(hosts[side], name, place / side)
                times[side].append(time.perf_counter() - before)
        order.reverse()
    return times


async def _call(made: Bench, name: str, work: Path) -> None:
    call_id, waiter = made.start(f"work__{name}", {"text": "x" * 100}, workdir=work)
    result = await waiter
    if result["status"] != "ok":
        raise SystemExit(f"{name}: {result}")
    made.acknowledge(call_id)
    made.results.clear()
    made.receipts.clear()


def measure(seconds: float) -> Mapping[str, Figures]:
    """All walls of this host, and none."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        place = Path(folder)

        def no_walls(facts: HostFacts) -> HostFacts:
            program = place / "no-walls"
            command = [facts.python, "-I", "-S", str(TOOLS / "no_walls.py"), facts.inside]
            program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
            program.chmod(0o755)
            groups = facts.groups  # without any, its processor time would be counted in a way that costs more
            if groups is not None:
                groups = msgspec.structs.replace(groups, memory=None, pids=None, cpu=None)
            return msgspec.structs.replace(facts, bwrap=str(program), bwrap_root=None, stage=None, groups=groups)

        return uvloop.run(_measure(no_walls, place, seconds))


BENCHMARK = Benchmark(
    name="walls",
    what="a warm call in the tool host, with all walls and with none; private memory of an idle jail's processes",
    sides=Together((JAILED, NO_WALLS), measure),
    metrics=[
        Metric("nothing", "µs", "lower", Goal(1.1, of="no walls")),
        Metric("files", "µs", "lower", Goal(1.1, of="no walls")),
        Metric("program", "µs", "lower"),
        Metric("idle memory", "MiB", "lower", Goal(8)),
    ],
)
