"""Instances that rest on the disk: the start of a kernel beside a hundred thousand of them, and waking one.

Each has a conversation; those that nobody wakes share one file, so that they take no disk. Both sides have one kernel
each, whose starts take turns.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path

import uvloop

from bench.compare import Benchmark, Goal, Metric, Together
from bench.swarm import Swarm, all_said, said, swarm

DORMANT = 100_000
FEW = 10
WOKEN = 40
STARTS = 5
#: File systems have a limit of links to one file.
LINKS = 30_000


async def used(made: Swarm, names: list[str]) -> None:
    """So that these have a history."""
    with made.session() as opened:
        async with opened as session:
            await all_said(session, names, "hello")


async def woken(made: Swarm, names: list[str]) -> list[float]:
    """One after the other; how long each takes to answer (milliseconds)."""
    with made.session() as opened:
        async with opened as session:
            return [await said(session, name, "hello") * 1e3 for name in names]


def fill(folder: Path, source: Path, number: int) -> None:
    """Dormant instances with a history like that of `source`."""
    for at in range(number):
        own = folder / f"dormant-{at}"
        (own / "workspace").mkdir(parents=True, mode=0o700)
        if at % LINKS:
            os.link(source, own / source.name)
        else:
            source = Path(shutil.copy(source, own / source.name))


def measure(seconds: float) -> Mapping[str, Mapping[str, float]]:
    """Both sides, start by start."""
    found: dict[str, Mapping[str, float]] = {}
    for name, number in (("a hundred thousand", DORMANT), ("ten", FEW)):
        with swarm() as made:
            made.start()
            names = [f"woken-{at}" for at in range(WOKEN)]
            uvloop.run(used(made, names))
            folder = made.state_dir / "instances" / "main"
            made.stop()
            fill(folder, folder / names[0] / "conversation.db", number)
            starts = []
            for _ in range(STARTS):
                starts.append(made.start())
                made.stop()
            made.start()
            waking = uvloop.run(woken(made, names))
            found[name] = {"start": statistics.median(starts), "waking": statistics.median(waking)}
    return found


BENCHMARK = Benchmark(
    name="dormant",
    what="the start of a kernel beside instances that rest, and waking one of them",
    sides=Together(["a hundred thousand", "ten"], measure),
    metrics=[Metric("start", "s", "lower", Goal(1.5, of="ten")), Metric("waking", "ms", "lower", Goal(25))],
)
