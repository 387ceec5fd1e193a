"""The two ends of the round-trip benchmark, and libzmq's own proxy to put between them.

    python -m bench.peers echo ENDPOINT [--bind]        answers every tool.call with a tool.result python -m bench.peers
    caller ENDPOINT SECONDS       keeps calls in flight, prints its figures as JSON python -m bench.peers proxy FRONTEND
    BACKEND        zmq.proxy between a ROUTER and a DEALER

The ends are always the same programs, so that only the middle differs. They do as little as possible: frames are
patched, not encoded, and searched, not decoded. With a token on stdin they say hello first; the caller then waits for
an event, whose lease its calls run under.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import zmq

from goondan.schemas.wire.codec import decode, encode, from_raw, to_raw
from goondan.schemas.wire.frames import Frame, Hello, ToolCallPayload, ToolResult, Welcome

#: Size of a call as the caller sends it (bytes).
FRAME_BYTES = 256
#: Calls in flight while throughput is measured.
WINDOW = 64
#: Calls before anything is measured.
WARM_UP = 2000
#: Call ids are this and eight digits, so that both ends find them without decoding.
MARK = b"bench/"
DIGITS = 8
#: Numbers repeat after so many calls, as many as a long turn makes. The broker keeps the ids of a running turn.
NUMBERS = 4096
TOOL = "bench__echo"

Socket = zmq.Socket[bytes]


def hello(socket: Socket, token: str) -> Welcome:
    """Say hello until the broker answers with welcome."""
    greeting = encode(Frame("hello", id="h.1", payload=to_raw(Hello(token=token, incarnation="bench"))))
    socket.send(greeting)
    while True:
        frame = decode(socket.recv())
        if frame.type == "welcome":
            return from_raw(frame.payload, Welcome)
        if frame.type == "error":
            raise SystemExit(f"refused: {bytes(frame.payload)!r}")


def call_parts(lease: Frame) -> list[bytes]:
    """A tool.call of FRAME_BYTES bytes under `lease`, cut where the call's number stands."""
    number = "0" * DIGITS
    pad = 0
    while True:
        payload = ToolCallPayload(args=to_raw({"data": "x" * pad}), turn_id="bench", tool_call_id=number)
        data = encode(
            Frame(
                "tool.call",
                id=f"i.{number}",
                event_id=lease.event_id,
                epoch=lease.epoch,
                tool=TOOL,
                call_id=f"bench/{number}",
                deadline_ms=60_000,
                payload=to_raw(payload),
            )
        )
        if len(data) >= FRAME_BYTES:
            return data.split(number.encode())
        pad += FRAME_BYTES - len(data)


def result_parts() -> list[bytes]:
    """A tool.result, cut where the call's number stands."""
    number = "0" * DIGITS
    payload = to_raw(ToolResult(status="ok", output=to_raw({"data": "x" * 128})))
    return encode(Frame("tool.result", id=f"r.{number}", call_id=f"bench/{number}", payload=payload)).split(
        number.encode()
    )


def echo(endpoint: str, bind: bool, token: str | None) -> None:
    """Answer until killed. Parts before the last (a proxy's routing id) go back as they came."""
    socket = open_socket(endpoint, bind)
    if token:
        hello(socket, token)
    print("ready", flush=True)
    parts = result_parts()
    while True:
        data = socket.recv()
        while socket.getsockopt(zmq.RCVMORE):
            socket.send(data, zmq.SNDMORE)
            data = socket.recv()
        at = data.find(MARK)
        if at >= 0:
            at += len(MARK)
            socket.send(data[at : at + DIGITS].join(parts))
        else:
            answer_ping(socket, data)


def caller(endpoint: str, seconds: float, token: str | None) -> None:
    """Measure: first the rate with WINDOW calls in flight, then the time of single calls."""
    socket = open_socket(endpoint, bind=False)
    lease = Frame("event", event_id="event-1", epoch=1)
    if token:
        hello(socket, token)
        while (lease := decode(socket.recv())).type != "event":
            answer_ping(socket, encode(lease))
    parts = call_parts(lease)
    sent = exchange(socket, parts, 0, count=WARM_UP)

    start, busy = time.perf_counter(), time.process_time()
    end = start + seconds * 2 / 3
    first = sent
    while time.perf_counter() < end:
        sent = exchange(socket, parts, sent, count=WARM_UP)
    rate = (sent - first) / (time.perf_counter() - start)
    busy = (time.process_time() - busy) / (sent - first)

    times = []
    end = time.perf_counter() + seconds / 3
    while (before := time.perf_counter()) < end:
        sent = exchange(socket, parts, sent, count=1)
        times.append(time.perf_counter() - before)
    centiles = statistics.quantiles(times, n=100)
    found = {"rate": rate, "p50": centiles[49] * 1e6, "p99": centiles[98] * 1e6, "caller's cpu": busy * 1e6}
    print(json.dumps({**found, "calls": sent}), flush=True)


def exchange(socket: Socket, parts: list[bytes], sent: int, count: int) -> int:
    """Send `count` calls, at most WINDOW unanswered, and wait for all answers; the number of calls sent so far."""
    ahead = min(WINDOW, count)
    for number in range(sent, sent + ahead):
        socket.send((b"%08d" % (number % NUMBERS)).join(parts))
    unanswered, left = ahead, count - ahead
    sent += ahead
    while unanswered:
        data = socket.recv()
        if MARK not in data:
            answer_ping(socket, data)
            continue
        if left:
            socket.send((b"%08d" % (sent % NUMBERS)).join(parts))
            sent += 1
            left -= 1
        else:
            unanswered -= 1
    return sent


def answer_ping(socket: Socket, data: bytes) -> None:
    """Answer as a live peer does to a frame that is no call and no result. An error frame ends the measurement."""
    frame = decode(data)
    if frame.type == "ping":
        socket.send(encode(Frame("pong", id="p", in_reply_to=frame.id)))
    elif frame.type == "error":
        raise SystemExit(f"refused: {bytes(frame.payload)!r}")


def open_socket(endpoint: str, bind: bool) -> Socket:
    """A DEALER with libzmq's usual options and no message limit in the way."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTING_ID, b"b" + os.urandom(15))  # as links choose theirs
    if bind:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)
    return socket


def proxy(frontend: str, backend: str) -> None:
    """libzmq's C proxy, which does not read the frames."""
    context: zmq.Context[Socket] = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    front.bind(frontend)
    back.bind(backend)
    print("ready", flush=True)
    zmq.proxy(front, back)


def main(arguments: list[str]) -> None:
    """Dispatch. One line on stdin: the peer's token, or nothing."""
    role, endpoint, *rest = arguments
    token = sys.stdin.readline().strip() or None
    if role == "echo":
        echo(endpoint, "--bind" in rest, token)
    elif role == "caller":
        caller(endpoint, float(rest[0]), token)
    else:
        proxy(endpoint, rest[0])


if __name__ == "__main__":
    main(sys.argv[1:])
