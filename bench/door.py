"""What a message costs that comes by HTTP, beside one by the bus; and the memory of a door with 1,000 open streams.

One kernel, whose agent has the console for a model, and one `gdn serve`. Both sides are one program with one connection
each, and they take turns message by message.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.compare import Benchmark, Goal, Metric, Together
from bench.swarm import Swarm, said, swarm
from goondan.kernel.cli.one_message import Message

SIDES: Final = ("API", "bus")
#: Streams that are open at once.
STREAMS: Final = 1000
#: What a message of a side says: the console answers at once.
TEXT: Final = "/help"
#: A turn that the messages of all streams wait for.
LONG: Final = '/bash__exec {"command":"sleep 600"}'


class Door:
    """A door, and requests to it."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self.pid = int(told["pid"])
        self._port = int(str(told["url"]).rpartition(":")[2])
        self._token = Path(told["tokenFile"]).read_text(encoding="ascii").split()[0]

    @property
    def memory(self) -> float:
        """What it has in memory (MiB)."""
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """A connection of its own."""
        with socket.create_connection(("127.0.0.1", self._port)) as connected:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Connection(connected, self._token)


def _is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = head.partition(b"content-length:")[2].split(None, 1)
    return bool(length) and len(body) == int(length[0])


class Connection:
    """One connection, for one request after another. It waits for its answer in the system, as `curl` and most clients
    do: what an event loop of the client takes (0.1 ms of a message) is no cost of the door.
    """

    def __init__(self, connected: socket.socket, token: str) -> None:
        self._socket = connected
        self._head = (
            f"POST /api/v1/messages HTTP/1.1\r\nhost: 127.0.0.1:{connected.getpeername()[1]}\r\n"
            f"authorization: Bearer {token}\r\ncontent-type: application/json\r\n"
        )

    def _send(self, body: Mapping[str, Any], is_there: Callable[[bytes], bool], more: str = "") -> None:
        """Send a message, and wait until its answer is there."""
        data = json.dumps(body).encode()
        self._socket.sendall(f"{self._head}{more}content-length: {len(data)}\r\n\r\n".encode() + data)
        came = b""
        while not is_there(came):
            chunk = self._socket.recv(1 << 16)
            came += chunk
            if not chunk or not came.startswith(b"HTTP/1.1 200"):
                raise SystemExit(repr(came))

    def ask(self, instance: str) -> float:
        """One message with its answer. Returns how long it took (seconds)."""
        begun = time.perf_counter()
        self._send({"text": TEXT, "agent": "main", "instance": instance}, _is_whole)
        return time.perf_counter() - begun

    def stream(self, instance: str) -> None:
        """Open a stream, and read its first event."""
        sent = {"text": TEXT, "instance": instance}
        self._send(sent, lambda came: b"event: accepted" in came, "accept: text/event-stream\r\n")


@contextmanager
def door(made: Swarm) -> Iterator[Door]:
    """`gdn serve` on a swarm that runs."""
    command = [*made.gdn(), "serve", "--port", "0", "--json", "--bundle", str(made.bundle)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield Door(json.loads(process.stdout.readline()))
    finally:
        process.terminate()
        process.wait()


async def costs(made: Swarm, served: Door, seconds: float) -> dict[str, float]:
    """The median of each side (milliseconds)."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    with made.session() as session, served.connected() as connection:
        async with session:
            for _ in range(20):
                connection.ask("one")
                await said(session, "one", TEXT)
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                found["API"].append(connection.ask("one"))
                found["bus"].append(await said(session, "one", TEXT))
    return {side: median(times) * 1000 for side, times in found.items()}


async def held(made: Swarm, served: Door) -> float:
    """The memory of the door while all streams are open (MiB)."""
    with made.session() as session:
        async with session:
            await session.tell(Message("main", "streams", LONG), 30.0)
            with ExitStack() as stack:
                for _ in range(STREAMS):
                    stack.enter_context(served.connected()).stream("streams")
                return served.memory


def measure(seconds: float) -> dict[str, dict[str, float]]:
    """See Together."""
    with swarm() as made:
        made.start()
        with door(made) as served:
            found = {side: {"p50": figure} for side, figure in asyncio.run(costs(made, served, seconds)).items()}
            found["API"]["streams"] = asyncio.run(held(made, served))
    return found


BENCHMARK = Benchmark(
    name="door",
    what=f"a message through /api/v1 beside one through the bus; the door's memory with {STREAMS:,} open streams",
    sides=Together(SIDES, measure),
    metrics=[
        Metric("p50", "ms", "lower", Goal(0.6, of="bus", plus=True)),
        Metric("streams", "MiB", "lower", Goal(110.0)),
    ],
    durability="power",
)
