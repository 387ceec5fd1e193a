"""Recovery after a kill: the time until the turn of a killed agent goes on, and until a killed broker serves again.

The agent is killed while its turn waits for a tool, and the time runs until its next process begins the turn again. The
broker is killed while many clients ask, and the figure is the longest time without an answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from itertools import pairwise

import uvloop

from bench.compare import Benchmark, Goal, Metric
from bench.swarm import PATIENCE_S, Swarm, said, swarm
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.session import Session
from goondan.schemas.wire.runtime_events import RuntimeEvent

#: How many instances ask all the time while the broker is killed.
ASKERS = 16
#: How long they ask before, and after (seconds).
BEFORE_S, AFTER_S = 1.0, 2.0
#: How often the holder of the event is checked (seconds).
LOOK_S = 0.005


async def resumed(made: Swarm, session: Session) -> float:
    """Kill an agent in the middle of a turn (milliseconds)."""
    await said(session, "killed", "/bash__exec command=true")
    called, again = asyncio.Event(), asyncio.Event()

    def hear(event: RuntimeEvent) -> None:
        if event.kind == "tool.called":
            called.set()
        elif event.kind == "turn.started" and event.again:
            again.set()

    text = '/bash__exec command="sleep 1"'
    turn = asyncio.ensure_future(session.ask(Message("main", "killed", text), listener=hear))
    await asyncio.wait_for(called.wait(), PATIENCE_S)
    begun = time.perf_counter()
    os.kill(made.pid("gdn-agent"), signal.SIGKILL)
    await asyncio.wait_for(again.wait(), PATIENCE_S)
    took = (time.perf_counter() - begun) * 1e3
    await turn
    return took


async def served(made: Swarm, session: Session) -> float:
    """Kill the broker under load: the longest time without an answer (milliseconds)."""
    names = [f"asker-{number}" for number in range(ASKERS)]
    answered: list[float] = []
    over = False

    async def ask(name: str) -> None:
        while not over:
            await said(session, name, "hello")
            answered.append(time.perf_counter())

    asking = [asyncio.ensure_future(ask(name)) for name in names]
    await asyncio.sleep(BEFORE_S)
    os.kill(made.pid("gdn-broker"), signal.SIGKILL)
    killed = time.perf_counter()
    await asyncio.sleep(AFTER_S)
    while not any(at > killed + 0.5 for at in answered):
        await asyncio.sleep(LOOK_S)
    over = True
    await asyncio.gather(*asking)
    times = sorted(answered)
    return max(after - before for before, after in pairwise(times)) * 1e3


async def measure(made: Swarm) -> Mapping[str, float]:
    """Both, one after the other."""
    with made.session() as opened:
        async with opened as session:
            return {"agent killed": await resumed(made, session), "broker killed": await served(made, session)}


def side(seconds: float) -> Mapping[str, float]:
    """One kernel."""
    with swarm() as made:
        made.start()
        return uvloop.run(measure(made))


BENCHMARK = Benchmark(
    name="recovery",
    what="kills: until the turn of a killed agent goes on, until a killed broker serves again",
    sides={"kernel": side},
    metrics=[Metric("agent killed", "ms", "lower", Goal(500)), Metric("broker killed", "ms", "lower", Goal(1000))],
)
