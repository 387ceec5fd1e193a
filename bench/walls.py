"""The cost of the walls for a warm call, and the private memory of an idle jail.

Both sides are the tool host's own code in this process, with the real worker; on one side bubblewrap is replaced by a
program that puts up no wall: no namespaces, no system call filter, no Landlock, no limits. No broker and no agent, so
that the walls are not hidden behind the way to them.

A wall costs some microseconds, and other work on the machine costs hundreds. So the two sides alternate every few
calls, both stay on one processor, and the figure of each side is the lower quartile of its times. The processor time of
each call is reported as well, because other work does not add to it. It does not include the program.
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
from goondan.schemas.bundle.launch import ExportSpec, ToolSpec
from goondan.toolhost.policy.subject import HostFacts
from tests.toolhost_fixture import Bench, bench

TOOLS = Path(__file__).parent / "tools"
EXPORTS = ("nothing", "files", "program")
PROCESSOR = "processor"
JAILED, NO_WALLS = "jailed", "no walls"
#: Calls before anything is measured.
WARM_UP = 50
#: How many calls of one side count before it is the other side's turn.
TURN = 3
#: How long a jail may take until it is idle (seconds).
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
    # One for both: how long ext4 looks for a free inode depends on what was deleted of late near a folder.
    work = place / "work"
    work.mkdir()
    async with AsyncExitStack() as open_hosts:
        hosts = {side: await open_hosts.enter_async_context(bench(_tool(), facts=sides[side])) for side in sides}
        for name in EXPORTS:
            for made in hosts.values():
                for _ in range(WARM_UP):
                    await _call(made, name, work)
            allowed = os.sched_getaffinity(0)
            # Where the worker wakes up says more than any wall. A program is another process, and may run beside it.
            _stay_on(allowed if name == "program" else {max(allowed)}, hosts)
            samples = await _in_turns(hosts, name, work, seconds / len(EXPORTS))
            _stay_on(allowed, hosts)
            for side, (walls, processors) in samples.items():
                figures[side][name] = _quartile(walls)
                figures[side][f"{name}: {PROCESSOR}"] = _quartile(processors)
    for side, facts in sides.items():
        async with bench(_tool(), facts=facts) as made:
            await _call(made, EXPORTS[0], work)
            await asyncio.sleep(SETTLE_S)
            (slot,) = made.host.sessions.pool.sessions()
            figures[side]["idle memory"] = sum(map(private_mib, made.live_of(slot).jail.processes()))
    return figures


def _stay_on(processors: set[int], hosts: Mapping[str, Bench]) -> None:
    """From now on this process and all jails run on these processors."""
    jails = [made.live_of(slot).jail for made in hosts.values() for slot in made.host.sessions.pool.sessions()]
    for pid in [os.getpid(), *(pid for jail in jails for pid in jail.processes())]:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), processors)


def _quartile(nanoseconds: list[int]) -> float:
    """The lower quartile (microseconds)."""
    return statistics.quantiles(nanoseconds, n=4)[0] / 1000


async def _in_turns(
    hosts: Mapping[str, Bench], name: str, work: Path, seconds: float
) -> Mapping[str, tuple[list[int], list[int]]]:
    """The nanoseconds of each call, and the processor time of this process and the worker in it.

    The first call of each alternation does not count, because it pays for the data that the other side has left in the
    processor's caches.
    """
    samples: dict[str, tuple[list[int], list[int]]] = {side: ([], []) for side in hosts}
    order = list(hosts)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for side in order:
            (slot,) = hosts[side].host.sessions.pool.sessions()
            clock = _clock_of(hosts[side].live_of(slot).jail.processes()[-1])
            for number in range(TURN + 1):
                before, used = time.perf_counter_ns(), _processor(clock)
                await _call(hosts[side], name, work)
                after, used_then = time.perf_counter_ns(), _processor(clock)
                if number > 0:
                    samples[side][0].append(after - before)
                    samples[side][1].append(used_then - used)
        order.reverse()
    return samples


def _clock_of(pid: int) -> int:
    """The clock of a process's processor time: clock_getcpuclockid(3), which Python has for threads only."""
    return ~pid << 3 | 2


def _processor(clock: int) -> int:
    return time.process_time_ns() + time.clock_gettime_ns(clock)


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
        Metric("nothing: processor", "µs", "lower", Goal(1.1, of="no walls")),
        Metric("files", "µs", "lower", Goal(1.1, of="no walls")),
        Metric("files: processor", "µs", "lower", Goal(1.1, of="no walls")),
        Metric("program", "µs", "lower"),
        Metric("idle memory", "MiB", "lower", Goal(8)),
    ],
)
