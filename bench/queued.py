"""A broker that holds 100,000 events for 100 instances: its memory, and the effect on requests to other instances.

The instances have no process, so nothing is handed over. Meanwhile agents answer a client as in `durable`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

from bench.agent import private_mib
from bench.compare import Benchmark, Goal, Metric
from bench.durable import AT, INPUT_BYTES, ends
from bench.peers import Socket, answer_ping, hello, open_socket
from bench.programs import AGENT, Bus, broker, line
from goondan.schemas.wire.codec import decode, encode, to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame, ReplyTo

EVENTS: Final = 100_000
INSTANCES: Final = 100
#: How many events may be sent and not acknowledged yet: the credit of a connection.
WINDOW: Final = 200
#: Room for all events of one sender, which gets two thirds of the whole.
OPEN_EVENTS: Final = 200_000
MAILBOX_MB: Final = 1024


def fill(bus: Bus, events: int) -> None:
    """Have the broker accept so many events that wait."""
    socket = open_socket(bus.endpoint("client"), bind=False)
    hello(socket, bus.token("client"))
    acknowledged = 0
    for number in range(events):
        if number >= acknowledged + WINDOW:
            acknowledged += heard(socket)
        event = AgentEvent(id=f"evt-{number:032x}", type="user", created_at=AT, input="x" * INPUT_BYTES)
        frame = Frame("event", id=f"f{number}", to=AGENT, instance_key=f"q{number % INSTANCES}", event_id=event.id)
        frame.reply_to, frame.trace_id = ReplyTo("client", f"corr-{number:032x}"), f"{number + 1:032x}"
        frame.digest, frame.payload = f"{number:064x}", to_raw(event)
        socket.send(encode(frame))
    while acknowledged < events:
        acknowledged += heard(socket)
    socket.close()


def heard(socket: Socket) -> int:
    """The next frame: 1 when it acknowledges an event."""
    data = socket.recv()
    if decode(data).type == "ack":
        return 1
    answer_ping(socket, data)
    return 0


def side(events: int) -> Callable[[float], Mapping[str, float]]:
    """A broker with so many events that wait."""

    def measure(seconds: float) -> Mapping[str, float]:
        with broker([], durability="process", max_open_events=OPEN_EVENTS, mailbox_mb=MAILBOX_MB) as bus:
            idle = private_mib(bus.pid)
            fill(bus, events)
            taken = private_mib(bus.pid) - idle
            with ends(bus, seconds) as process:
                measured = json.loads(line(process))
        return {"memory": taken, **{name: float(measured[name]) for name in ("rate", "p50", "p99")}}

    return measure


BENCHMARK = Benchmark(
    name="queued",
    what="100,000 events that wait for 100 instances: memory above idle, and requests to 64 other agents meanwhile",
    sides={"100,000": side(EVENTS), "none": side(0)},
    metrics=[
        Metric("memory", "MiB", "lower", Goal(64)),
        Metric("rate", "/s", "higher"),
        Metric("p50", "µs", "lower", Goal(1.1, of="none")),
        Metric("p99", "µs", "lower", Goal(1.25, of="none")),
    ],
    rounds=3,
    durability="process",
)
