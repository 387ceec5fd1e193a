"""`python -m bench.observers [--seconds N] [--rounds N]`: what observers get, and what they cost.

1. A broker, one observer, and agents that tell RATE events a second together. Nothing may be missed. The processor time
   of the broker for an event is printed, beside that for one which nobody hears.
2. A whole kernel whose turns are asked by a client: in rounds, nobody observes, an observer reads, and one does not
   read. Each round has the same turns in another order. What is printed is the processor time of the kernel's
   processes for a turn, and that of the broker alone: nobody else does anything for an observer that does not read, and
   what others use differs more between two rounds than what is looked for. It may be SLOW of a turn at most.

The exit status is 1 when a bound is not kept. Not part of `make bench`: nothing else should run meanwhile.

Source: decision 171.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final

import uvloop

from bench.swarm import PATIENCE_S, Swarm, processor_time
from bench.turn import kernel, model_server, turns
from goondan.kernel.cli.observing import Missed, Observation, Seen
from goondan.kernel.cli.session import Session
from goondan.schemas.transport import chosen
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame
from goondan.schemas.wire.runtime_events import Observe, RuntimeEvent
from tests.process.bare_broker import Broker, bare_broker

#: Events a second that one observer must get, with something to spare.
RATE: Final = 2200
#: How many agents tell them, and how often each does (seconds).
AGENTS: Final = 8
PAUSE_S: Final = 0.03
#: The window of the observer.
WINDOW: Final = Observe(events=1024, bytes=1 << 20)
#: What a slow observer may cost of a turn's processor time.
SLOW: Final = 0.02
#: Turns of one measurement, and rounds in one instance: a conversation makes its turns slower as it grows.
TURNS: Final = 10
PER_INSTANCE: Final = 3

#: A piece of text as models say it in PAUSE_S.
PIECE: Final = RuntimeEvent(kind="text", step=1, text="a few words of an answer ")


class Reader:
    """An observer that reads at once. It counts."""

    def __init__(self) -> None:
        self.seen = self.missed = 0
        self.observation: Observation | None = None

    def __call__(self, heard: Seen | Missed) -> None:
        if isinstance(heard, Missed):
            self.missed += (heard.last or heard.first) - heard.first + 1
        else:
            self.seen += 1
        if self.observation is not None:
            self.observation.read(heard.number if isinstance(heard, Seen) else heard.last or 0)


# --- the rate


async def held(broker: Broker, key: str, stack: AsyncExitStack) -> tuple[Link, Frame]:
    """An agent with a lease."""
    got: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
    token = broker.token("agent", agent="coder", instance_key=key, launch=int(key))
    agent = Link(broker.endpoint("agent"), token, on_frame=lambda frame: None if got.done() else got.set_result(frame))
    await agent.start()
    stack.push_async_callback(agent.close, 0)
    client = Link(broker.endpoint("client"), broker.token("client", operator=True), on_frame=lambda frame: None)
    await client.start()
    stack.push_async_callback(client.close, 0)
    event = AgentEvent(id=f"e{key}", type="user.message", created_at="2026-11-24T09:30:00Z", input="hi")
    await client.post(Frame("event", to="coder", instance_key=key, event_id=f"e{key}", payload=to_raw(event)))
    return agent, await got


async def flow(agents: list[tuple[Link, Frame]], seconds: float) -> int:
    """All agents tell for so long. Returns how many events that were."""
    loop = asyncio.get_running_loop()
    begun, sent = loop.time(), 0
    while (now := loop.time()) - begun < seconds:
        due = int((now - begun) * RATE) - sent
        for number in range(due):
            agent, lease = agents[(sent + number) % len(agents)]
            agent.send(Frame("runtime.event", event_id=lease.event_id, epoch=lease.epoch, payload=to_raw(PIECE)))
        sent += due
        await asyncio.sleep(PAUSE_S / len(agents))
    return sent


async def rate(broker: Broker, seconds: float) -> tuple[float, float, int, int]:
    """Processor time of the broker for an event (microseconds), unheard and heard; how many were told, and missed."""
    async with AsyncExitStack() as stack:
        agents = [await held(broker, str(number + 1), stack) for number in range(AGENTS)]
        before = processor_time(broker.process.pid)
        unheard = await flow(agents, seconds)
        between = processor_time(broker.process.pid)
        observation: list[Observation] = []
        client = Link(
            broker.endpoint("client"),
            broker.token("client", operator=True),
            on_frame=lambda frame: observation[0].hear(frame) if frame.type == "observed" else None,
        )
        await client.start()
        stack.push_async_callback(client.close, 0)
        reader = Reader()
        reader.observation = Observation(WINDOW, reader, {})
        observation.append(reader.observation)
        await reader.observation.begin(client)[0]
        again = processor_time(broker.process.pid)
        told = await flow(agents, seconds)
        async with asyncio.timeout(PATIENCE_S):
            while reader.seen + reader.missed < told:
                await asyncio.sleep(0.01)
        after = processor_time(broker.process.pid)
        return (between - before) / unheard * 1e6, (after - again) / told * 1e6, told, reader.missed


# --- the cost of a turn

NOBODY, READS, SLEEPS = "nobody observes", "one reads", "one does not read"


@contextmanager
def attached(made: Swarm) -> Iterator[Any]:
    """What a session needs of a kernel."""
    pidfd = os.pidfd_open(made.supervisor)
    try:
        yield SimpleNamespace(place=SimpleNamespace(state_dir=str(made.state_dir)), pidfd=pidfd)
    finally:
        os.close(pidfd)


async def cost(made: Swarm, rounds: int) -> dict[tuple[str, str], list[float]]:
    """The processor time of each kind of process for a turn (milliseconds), for each side, round by round."""
    sides = [NOBODY, READS, SLEEPS]
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with attached(made) as place:
        async with made.client() as client, Session(place) as session:
            for number in range(rounds):
                instance = f"round-{number // PER_INSTANCE}"
                if number % PER_INSTANCE == 0:
                    await turns(client, 3, instance)  # its agent and its jail start
                for side in sides[number % 3 :] + sides[: number % 3]:
                    reader, observation = Reader(), None
                    if side != NOBODY:
                        wish = WINDOW if side == READS else Observe(events=1, bytes=1 << 20)
                        observation = await session.observe(wish, reader)
                        reader.observation = observation if side == READS else None
                    await turns(client, 2, instance)  # who does not read is behind then
                    before = made.cpu_by_name()
                    await turns(client, TURNS, instance)
                    for name, seconds in made.cpu_by_name().items():
                        found[side, name].append((seconds - before.get(name, 0.0)) / TURNS * 1000)
                    if observation is not None:
                        observation.close()
    return found


def main(arguments: list[str]) -> int:
    """Print what was measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.observers", description="What observers get and cost.")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the flow (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=120, help="of the turns (default: %(default)s)")
    options = parser.parse_args(arguments)
    with bare_broker() as broker:
        unheard, heard, told, missed = uvloop.run(rate(broker, options.seconds))
    speed = told / options.seconds
    print(f"{chosen()}: {told:,} events, {speed:,.0f} a second, to one observer: {missed} missed")
    print(f"the broker for an event that nobody hears {unheard:.0f} µs, for one that is observed {heard:.0f} µs")
    with model_server() as base, kernel("anthropic", "process", base) as made:
        found = uvloop.run(cost(made, options.rounds))
    base_ms = more = 0.0
    for side in (NOBODY, READS, SLEEPS):
        spent = {name: statistics.mean(figures) for (of, name), figures in found.items() if of == side}
        base_ms = base_ms or sum(spent.values())
        more = (spent["gdn-broker"] - statistics.mean(found[NOBODY, "gdn-broker"])) / base_ms
        print(f"{side}: {sum(spent.values()):.2f} ms of a turn, of the broker {spent['gdn-broker']:.3f} ({more:+.1%})")
    return int(missed > 0 or more > SLOW)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
