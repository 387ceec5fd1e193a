"""One agent that asks another, over the whole path: client, broker, agent, broker, agent, and all the way back.

The baselines are a client that asks the second agent itself, and bare links without agents (`durable`). They show the
cost of a real agent's turn, and how much asking from a turn adds. Both agents are instances that run already, with the
console for a model. Everything is journaled, and conversations are stored, as in any kernel.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

import uvloop

from bench.compare import Benchmark, Metric
from bench.durable import side as bare_links
from bench.swarm import Swarm, all_said, said, swarm
from goondan.kernel.cli.session import Session

#: Askers at a time for the rate, each with an instance of its own to ask.
LANES: Final = 8
ASKS: Final = '/agents__request {"target": "main", "instanceKey": "asked%d", "input": "hello"}'


async def measure(made: Swarm, seconds: float, *, asks: bool) -> Mapping[str, float]:
    """One request after the other for the times, then LANES at a time for the rate and the processor time."""
    with made.session() as opened:
        async with opened as session:
            lanes = range(LANES)
            await all_said(session, [f"asked{lane}" for lane in lanes], "hello")
            await asyncio.gather(*(one(session, lane, asks=asks) for lane in lanes))
            times: list[float] = []
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                times.append(await one(session, 0, asks=asks))
            used, begun = made.cpu(), time.perf_counter()
            until = begun + seconds

            async def keep_asking(lane: int) -> int:
                done = 0
                while time.perf_counter() < until:
                    await one(session, lane, asks=asks)
                    done += 1
                return done

            done = sum(await asyncio.gather(*(keep_asking(lane) for lane in lanes)))
            took = time.perf_counter() - begun
            return {
                "p50": statistics.median(times) * 1e3,
                "p99": statistics.quantiles(times, n=100)[98] * 1e3,
                "rate": done / took,
                "cpu": (made.cpu() - used) / done * 1e3,
            }


async def one(session: Session, lane: int, *, asks: bool) -> float:
    """One request that ends in `asked<lane>`. Returns its time (seconds)."""
    return await (said(session, f"asker{lane}", ASKS % lane) if asks else said(session, f"asked{lane}", "hello"))


def side(asks: bool, seconds: float) -> Mapping[str, float]:
    """Measure one side in a kernel of its own."""
    with swarm() as made:
        made.start()
        return uvloop.run(measure(made, seconds, asks=asks))


def links(seconds: float) -> Mapping[str, float]:
    """The figures of `durable`, in the units of this benchmark."""
    found = bare_links("power")(seconds)
    return {"rate": found["rate"], "p50": found["p50"] / 1e3, "p99": found["p99"] / 1e3}


BENCHMARK = Benchmark(
    name="asking",
    what="a request that one agent makes of another and its answer, whole turns, synced to the disk",
    sides={"agent asks agent": partial(side, True), "client asks agent": partial(side, False), "bare links": links},
    metrics=[
        Metric("p50", "ms", "lower"),
        Metric("p99", "ms", "lower"),
        Metric("rate", "/s", "higher"),
        Metric("cpu", "ms", "lower"),
    ],
    durability="power",
)
