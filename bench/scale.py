"""A thousand live agents, before and after one message each, beside a hundred.

They are started by `agents__spawn`, so that each is there before it has had a message. Processor time is that of all
processes of the kernel. With `--rounds 1` this takes a minute, and 7 GiB of memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial

import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.swarm import Swarm, all_said, said, swarm

#: What one agent may spawn.
EACH = 250


async def measure(made: Swarm, agents: int) -> Mapping[str, float]:
    """Spawn so many, then send each a message."""
    with made.session() as opened:
        async with opened as session:
            names = [f"c{number}" for number in range(agents)]
            parents = -(-agents // EACH)
            await all_said(session, [f"p{number}" for number in range(parents)], "hello")
            used, begun = made.cpu(), time.perf_counter()
            spawns = [f'/agents__spawn {{"target": "main", "instanceKey": "{name}"}}' for name in names]
            orders = ["\n".join(spawns[at : at + EACH]) for at in range(0, agents, EACH)]
            await asyncio.gather(*(said(session, f"p{number}", order) for number, order in enumerate(orders)))
            found = {"ready": time.perf_counter() - begun, "ready, cpu each": (made.cpu() - used) / agents * 1e3}
            found["memory"] = made.pss()
            used, begun = made.cpu(), time.perf_counter()
            await all_said(session, names, "hello")
            found |= {"answered": time.perf_counter() - begun, "answered, cpu each": (made.cpu() - used) / agents * 1e3}
            found["memory after"] = made.pss()
            return found


def side(agents: int, seconds: float) -> Mapping[str, float]:
    """One kernel with so many agents."""
    with swarm(live=agents + 50) as made:
        made.start()
        return uvloop.run(measure(made, agents))


BENCHMARK = Benchmark(
    name="scale",
    what="live agents: spawned, and after one message each",
    sides={"1,000": partial(side, 1000), "100": partial(side, 100)},
    metrics=[
        Metric("ready", "s", "lower", Goal(10)),
        Metric("ready, cpu each", "ms", "lower", Goal(8)),
        Metric("memory", "GiB", "lower", Goal(6)),
        Metric("answered", "s", "lower"),
        Metric("answered, cpu each", "ms", "lower"),
        Metric("memory after", "GiB", "lower", Goal(9)),
    ],
    rounds=3,
)
