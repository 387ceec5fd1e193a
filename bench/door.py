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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
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

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Connection]:
        """A connection of its own."""
        with socket.create_connection(("127.0.0.1", self._port)) as connected:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setblocking(False)
            made = Connection(connected, self._token)
            loop = asyncio.get_running_loop()
            loop.add_reader(connected, made.read)
            try:
                yield made
            finally:
                loop.remove_reader(connected)


def _is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = head.partition(b"content-length:")[2].split(None, 1)
    return bool(length) and len(body) == int(length[0])


class Connection:
    """One connection, for one request after another. It reads its socket itself, as the link to the bus does: through
    asyncio's streams an answer would come 0.08 ms later than through what is beside it.
    """

    def __init__(self, connected: socket.socket, token: str) -> None:
        self._socket = connected
        self._head = (
            f"POST /api/v1/messages HTTP/1.1\r\nhost: 127.0.0.1:{connected.getpeername()[1]}\r\n"
            f"authorization: Bearer {token}\r\ncontent-type: application/json\r\n"
        )
        self._came = b""
        self._is_there: Callable[[bytes], bool] = _is_whole
        self._waiting: asyncio.Future[None] | None = None

    def read(self) -> None:
        """Take what has come."""
        self._came += self._socket.recv(1 << 16)
        if self._waiting is None or self._waiting.done():
            self._came = b""
        elif not self._came.startswith(b"HTTP/1.1 200"):
            self._waiting.set_exception(SystemExit(repr(self._came)))
        elif self._is_there(self._came):
            self._waiting.set_result(None)

    async def send(self, body: Mapping[str, Any], is_there: Callable[[bytes], bool], more: str = "") -> None:
        """Send a message, and wait until its answer is there."""
        data = json.dumps(body).encode()
        self._came, self._is_there = b"", is_there
        self._waiting = asyncio.get_running_loop().create_future()
        self._socket.sendall(f"{self._head}{more}content-length: {len(data)}\r\n\r\n".encode() + data)
        await self._waiting

    async def ask(self, instance: str) -> float:
        """One message with its answer. Returns how long it took (seconds)."""
        begun = time.perf_counter()
        await self.send({"text": TEXT, "agent": "main", "instance": instance}, _is_whole)
        return time.perf_counter() - begun

    async def stream(self, instance: str) -> None:
        """Open a stream, and read its first event."""
        sent = {"text": TEXT, "instance": instance}
        await self.send(sent, lambda came: b"event: accepted" in came, "accept: text/event-stream\r\n")


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
    with made.session() as session:
        async with session, served.connected() as connection:
            for _ in range(20):
                await connection.ask("one")
                await said(session, "one", TEXT)
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                found["API"].append(await connection.ask("one"))
                found["bus"].append(await said(session, "one", TEXT))
    return {side: median(times) * 1000 for side, times in found.items()}


async def held(made: Swarm, served: Door) -> float:
    """The memory of the door while all streams are open (MiB)."""
    with made.session() as session:
        async with session, AsyncExitStack() as stack:
            await session.tell(Message("main", "streams", LONG), 30.0)
            for _ in range(STREAMS):
                connection = await stack.enter_async_context(served.connected())
                await connection.stream("streams")
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
