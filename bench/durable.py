"""Requests that are accepted durably and answered: a client, the broker, and 64 agents that answer at once.

The ends are bare sockets that do as little as they can. Only the broker's journal differs: on disk with `process`, in
memory, and with `power`, which syncs before every acknowledgement. `fsync` is one sync of the disk. Every request is
two writes: its acceptance, and its end with the answer.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

import zmq

from bench.compare import Benchmark, Goal, Metric
from bench.peers import Socket, answer_ping, hello, open_socket
from bench.programs import AGENT, Bus, broker, line
from bench.round_trip import cpu_seconds, peer
from goondan.schemas.wire.codec import decode, encode, to_raw
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame, ReplyTo
from goondan.schemas.wire.tokens import Claims, mint

RESPONDERS: Final = 64
WARM_UP: Final = 500
AT: Final = "2026-01-01T00:00:00Z"
#: Bytes of a request's input.
INPUT_BYTES: Final = 200
#: Writes whose sync is timed.
SYNCS: Final = 100


def key(number: int) -> str:
    """The instance key of a responder."""
    return f"r{number}"


def respond(endpoint: str, secret: bytes) -> None:
    """64 agents in one process, each with a connection: every event ends at once."""
    poller = zmq.Poller()
    for number in range(RESPONDERS):
        socket = open_socket(endpoint, bind=False)
        hello(socket, mint(secret, Claims("agent", agent=AGENT, instance_key=key(number))))
        poller.register(socket, zmq.POLLIN)
    print("ready", flush=True)
    answer = AgentEvent(id="a", type="agent.response", created_at=AT)
    answer.answer = Answer(turn_id="t", status="completed", response="x" * INPUT_BYTES)
    payload = to_raw(answer)
    while True:
        for ready, _ in poller.poll():
            frame = decode(ready.recv())
            if frame.type == "event":
                done = Frame("ack", id=f"d.{frame.event_id}", stage="done", event_id=frame.event_id, epoch=frame.epoch)
                done.payload = payload
                ready.send(encode(done))
            elif frame.type == "ping":
                ready.send(encode(Frame("pong", id="p", in_reply_to=frame.id)))


def ask(endpoint: str, seconds: float, token: str) -> None:
    """Measure: first the rate with a request for each responder under way, then the time of single requests."""
    socket = open_socket(endpoint, bind=False)
    hello(socket, token)
    sent = exchange(socket, 0, WARM_UP, RESPONDERS)
    begun, first = time.perf_counter(), sent
    while time.perf_counter() - begun < seconds * 2 / 3:
        sent = exchange(socket, sent, WARM_UP, RESPONDERS)
    rate = (sent - first) / (time.perf_counter() - begun)
    times = []
    end = time.perf_counter() + seconds / 3
    while (before := time.perf_counter()) < end:
        sent = exchange(socket, sent, 1, 1)
        times.append(time.perf_counter() - before)
    centiles = statistics.quantiles(times, n=100)
    print(json.dumps({"rate": rate, "p50": centiles[49] * 1e6, "p99": centiles[98] * 1e6, "calls": sent}), flush=True)


def exchange(socket: Socket, sent: int, count: int, window: int) -> int:
    """Send `count` requests, at most `window` unanswered, and wait for all answers; returns how many were ever sent."""
    last = sent + count
    under_way = 0
    while sent < last or under_way:
        while sent < last and under_way < window:
            event = AgentEvent(id=f"e{sent}", type="user", created_at=AT, input="x" * INPUT_BYTES)
            frame = Frame("event", id=f"f{sent}", to=AGENT, instance_key=key(sent % RESPONDERS), event_id=event.id)
            frame.reply_to, frame.payload = ReplyTo("client", f"c{sent}"), to_raw(event)
            socket.send(encode(frame))
            sent += 1
            under_way += 1
        data = socket.recv()
        frame = decode(data)
        if frame.type == "event":
            under_way -= 1
        elif frame.type != "ack":
            answer_ping(socket, data)
    return sent


def side(durability: Literal["power", "process"] | None) -> Callable[[float], Mapping[str, float]]:
    """A broker with that durability; None: its journal is in memory."""

    def measure(seconds: float) -> Mapping[str, float]:
        made = broker([], module="bench.memory_broker") if durability is None else broker([], durability=durability)
        with made as bus, ends(bus, seconds) as process:
            before = cpu_seconds(bus.pid)
            measured = {name: float(value) for name, value in json.loads(line(process)).items()}
            measured["broker's cpu"] = (cpu_seconds(bus.pid) - before) / measured.pop("calls") * 1e6
        return {**measured, "fsync": sync_time()}

    return measure


@contextmanager
def ends(bus: Bus, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """The agents, ready, and the client that asks them."""
    endpoint = bus.endpoint("agent")
    with peer("respond", endpoint, token=bus.secret.hex(), module="bench.durable") as agents:
        assert line(agents) == "ready\n"
        arguments = ("ask", bus.endpoint("client"), str(seconds))
        with peer(*arguments, token=bus.token("client"), module="bench.durable") as process:
            yield process


def sync_time() -> float:
    """What a small write and its sync take on the disk that the broker writes to: the median (µs)."""
    times = []
    with tempfile.TemporaryFile(dir="/tmp") as file:
        for _ in range(SYNCS):
            before = time.perf_counter()
            os.pwrite(file.fileno(), b"x" * 4096, 0)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - before)
    return statistics.median(times) * 1e6


BENCHMARK = Benchmark(
    name="durable",
    what="a request to one of 64 agents and its answer, both journaled; 64 under way for the rate, one for the times",
    sides={"process": side("process"), "memory": side(None), "power": side("power")},
    metrics=[
        Metric("rate", "/s", "higher", Goal(0.75, of="memory")),
        Metric("p50", "µs", "lower", Goal(150, of="memory", plus=True)),
        Metric("p99", "µs", "lower"),
        Metric("broker's cpu", "µs", "lower"),
        Metric("fsync", "µs", "lower"),
    ],
    native=True,
    durability="process",
)


if __name__ == "__main__":
    word = sys.stdin.readline().strip()
    if sys.argv[1] == "respond":
        respond(sys.argv[2], bytes.fromhex(word))
    else:
        ask(sys.argv[2], float(sys.argv[3]), word)
