"""Instances that rest on the disk: the start of a kernel beside a hundred thousand of them, and waking one.

Each has a conversation; those that nobody wakes share one file, so that they take no disk. They are made once, which
takes half a minute.
"""

from __future__ import annotations

import atexit
import os
import shutil
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.swarm import Swarm, all_said, said, swarm

DORMANT = 100_000
FEW = 10
#: Those that are woken.
NAMES = [f"woken-{at}" for at in range(40)]
#: File systems have a limit of links to one file.
LINKS = 30_000


async def used(made: Swarm, names: list[str]) -> None:
    """So that these have a history."""
    with made.session() as opened:
        async with opened as session:
            await all_said(session, names, "hello")


async def woken(made: Swarm, names: list[str]) -> tuple[float, float]:
    """One after the other: how long one takes to answer, and the processor time of the kernel for it (milliseconds)."""
    with made.session() as opened:
        async with opened as session:
            used = made.cpu()
            times = [await said(session, name, "hello") * 1e3 for name in names]
            return statistics.median(times), (made.cpu() - used) / len(names) * 1e3


def fill(folder: Path, source: Path, number: int) -> None:
    """Dormant instances with a history like that of `source`."""
    for at in range(number):
        own = folder / f"dormant-{at}"
        (own / "workspace").mkdir(parents=True, mode=0o700)
        if at % LINKS:
            os.link(source, own / source.name)
        else:
            source = Path(shutil.copy(source, own / source.name))


@cache
def rested(number: int) -> Swarm:
    """A swarm with so many dormant instances beside those that are woken; made once, removed at the end."""
    kept = ExitStack()
    atexit.register(kept.close)
    made = kept.enter_context(swarm())
    made.start()
    uvloop.run(used(made, NAMES))
    folder = made.state_dir / "instances" / "main"
    made.stop()
    fill(folder, folder / NAMES[0] / "conversation.db", number)
    return made


def side(number: int, seconds: float) -> Mapping[str, float]:
    """One start, and one by one those that are woken."""
    made = rested(number)
    made.use()
    took = made.start()
    waking, cpu = uvloop.run(woken(made, NAMES))
    made.stop()
    return {"start": took, "waking": waking, "waking, cpu": cpu}


BENCHMARK = Benchmark(
    name="dormant",
    what="the start of a kernel beside instances that rest, and waking one of them",
    sides={"a hundred thousand": partial(side, DORMANT), "ten": partial(side, FEW)},
    metrics=[
        Metric("start", "s", "lower", Goal(1.5, of="ten")),
        Metric("waking", "ms", "lower", Goal(25)),
        Metric("waking, cpu", "ms", "lower"),
    ],
    rounds=3,
)
