"""What a question costs through the client for Python, beside the kernel's own link: a broker, 64 agents that answer at
once, and one program that asks. Nothing is a turn, and the journal does not wait for the disk.

Both ask from an event loop of asyncio. Each asker is a program of its own, as a user's is.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping

from bench.asker import TEXT, measure
from bench.compare import Benchmark, Goal, Metric
from bench.durable import AT, key
from bench.programs import AGENT, Bus, broker, line
from bench.round_trip import peer
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame, ReplyTo
from goondan_client import connect


async def by_client(run_dir: str, seconds: float) -> Mapping[str, float]:
    """With goondan_client."""
    async with connect(run_dir=run_dir) as gdn:
        return await measure(lambda number: gdn.ask(AGENT, TEXT, instance=key(number)), seconds)


async def by_link(run_dir: str, seconds: float) -> Mapping[str, float]:
    """With the kernel's link."""
    with open(f"{run_dir}/client.token", encoding="ascii") as file:
        link = Link(f"ipc://{run_dir}/clients.sock", file.read(), on_frame=lambda frame: None)
    await link.start()
    count = 0

    async def ask(number: int) -> object:
        nonlocal count
        count += 1
        event = AgentEvent(id=f"e-{count}", type="user.message", created_at=AT, input=TEXT)
        frame = Frame("event", to=AGENT, instance_key=key(number), event_id=event.id, payload=to_raw(event))
        frame.reply_to, frame.deadline_ms = ReplyTo("client", event.id), 600_000
        return from_raw((await link.ask(frame)).payload, AgentEvent).answer

    try:
        return await measure(ask, seconds)
    finally:
        await link.close(0)


def side(which: str) -> Callable[[float], Mapping[str, float]]:
    """A broker, the agents, and one asker of this module."""

    def asker(bus: Bus, seconds: float) -> Mapping[str, float]:
        with peer(which, str(bus.run_dir), str(seconds), module="bench.python_client") as process:
            return {name: float(value) for name, value in json.loads(line(process)).items()}

    return beside(asker)


def beside(asker: Callable[[Bus, float], Mapping[str, float]]) -> Callable[[float], Mapping[str, float]]:
    """A broker, the agents, and one asker: it runs until it has its figures."""

    def measured(seconds: float) -> Mapping[str, float]:
        with broker([], durability="process") as bus:
            token = bus.run_dir / "client.token"
            token.touch(0o600)
            token.write_text(bus.token("client"))
            with peer("respond", bus.endpoint("agent"), token=bus.secret.hex(), module="bench.durable") as agents:
                assert line(agents) == "ready\n"
                return asker(bus, seconds)

    return measured


BENCHMARK = Benchmark(
    name="python_client",
    what="a question and its answer through the client for Python; 64 under way for the rate, one for the times",
    sides={"goondan_client": side("client"), "kernel's link": side("link")},
    metrics=[
        Metric("rate", "/s", "higher", Goal(0.85, of="kernel's link")),
        Metric("p50", "µs", "lower", Goal(1.15, of="kernel's link")),
        Metric("p99", "µs", "lower"),
        Metric("asker's cpu", "µs", "lower"),
    ],
    durability="process",
)


if __name__ == "__main__":
    asker = by_client if sys.argv[1] == "client" else by_link
    print(json.dumps(asyncio.run(asker(sys.argv[2], float(sys.argv[3])))), flush=True)
