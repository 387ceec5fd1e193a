"""A link's socket against another side that comes and goes, does not read, or is nobody's broker."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from goondan.schemas.transport.link import Link
from goondan.schemas.transport.native import NativeTransport
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.zmtp import GREETING, Handshake, Messages, head, ready

LIMIT = 1 << 20
PATIENCE_S = 10.0


class Listener:
    """The other side, by hand."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.setblocking(False)
        self.socket.bind(path)
        self.socket.listen()
        self.connections: list[socket.socket] = []

    async def accept(self, greeting: bytes = GREETING + ready(b"ROUTER")) -> socket.socket:
        """A connection, greeted."""
        loop = asyncio.get_running_loop()
        connection, _ = await asyncio.wait_for(loop.sock_accept(self.socket), PATIENCE_S)
        self.connections.append(connection)
        if greeting:
            await loop.sock_sendall(connection, greeting)
        return connection

    def close(self) -> None:
        for one in (self.socket, *self.connections):
            one.close()


async def read(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        more = await asyncio.wait_for(loop.sock_recv(connection, size - len(data)), PATIENCE_S)
        if not more:
            return data
        data += more
    return data


async def handshake(connection: socket.socket) -> None:
    """Read what the transport says first, with the probe behind it."""
    said = Handshake({b"DEALER"})
    while not said.feed(await read(connection, 1)):
        pass
    assert await read(connection, 2) == head(0)


class Owner:
    """What a link does with a transport."""

    def __init__(self, path: str) -> None:
        self.got: list[bytes] = []
        self.lost = 0
        self.writable = 0
        self.admitted = True
        self.queue: deque[bytes] = deque()
        self.news = asyncio.Event()
        self.transport = NativeTransport(
            path,
            LIMIT,
            admits=lambda fd: self.admitted,
            on_messages=self.take,
            on_writable=self.write_on,
            on_lost=self.is_lost,
        )
        self.transport.open(asyncio.get_running_loop())

    def take(self) -> None:
        while (message := self.transport.take()) is not None:
            self.got.append(message)
        self.news.set()

    def write_on(self) -> None:
        self.writable += 1
        self.transport.send(self.queue)
        self.news.set()

    def is_lost(self) -> None:
        self.lost += 1
        self.news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self.news.clear()
                await self.news.wait()


Open = Callable[[], Owner]
Listen = Callable[[], Listener]


@pytest.fixture
def path(short_tmp: Path) -> str:
    return str(short_tmp / "s.sock")


@pytest.fixture
async def listen(path: str) -> AsyncIterator[Listen]:
    made: list[Listener] = []

    def listening() -> Listener:
        made.append(Listener(path))
        return made[-1]

    yield listening
    for listener in made:
        listener.close()


@pytest.fixture
async def open_owner(path: str) -> AsyncIterator[Open]:
    made: list[Owner] = []

    def opened() -> Owner:
        made.append(Owner(path))
        return made[-1]

    yield opened
    for owner in made:
        owner.transport.close()


async def test_it_waits_for_who_listens_and_comes_back(listen: Listen, open_owner: Open) -> None:
    owner = open_owner()
    listener = listen()
    first = await listener.accept()
    await handshake(first)
    await asyncio.get_running_loop().sock_sendall(first, head(3) + b"one" + head(300) + bytes(300))
    await owner.until(lambda: owner.got == [b"one", bytes(300)])
    owner.queue.append(b"lost")
    first.close()
    await owner.until(lambda: owner.lost == 1)
    second = await listener.accept()
    await handshake(second)
    assert owner.got == [b"one", bytes(300)]


async def test_nothing_is_sent_before_the_other_side_is_ready(listen: Listen, open_owner: Open) -> None:
    listener = listen()
    owner = open_owner()
    connection = await listener.accept(GREETING)
    owner.queue.append(b"early")
    owner.transport.send(owner.queue)
    assert list(owner.queue) == [b"early"]
    said = Handshake({b"DEALER"})
    while not said.feed(await read(connection, 1)):
        pass
    connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        connection.recv(1)  # not even the probe: libzmq takes a message before its own READY for a fault


async def test_who_is_not_admitted_gets_no_byte(listen: Listen, open_owner: Open) -> None:
    listener = listen()
    owner = open_owner()
    connection = await listener.accept()
    owner.admitted = False
    connection.close()
    await owner.until(lambda: owner.lost == 1)
    refused = await listener.accept(b"")
    assert await read(refused, 1) == b""


async def test_what_the_other_side_does_not_read_waits_in_order(listen: Listen, open_owner: Open) -> None:
    listener = listen()
    owner = open_owner()
    connection = await listener.accept()
    await handshake(connection)
    sent = [bytes([number % 256]) * 100_000 for number in range(40)]
    owner.queue.extend(sent)
    owner.transport.send(owner.queue)
    assert owner.queue, "a Unix socket takes less than four megabytes"
    messages = Messages(LIMIT)
    got: list[bytes] = []
    while len(got) < len(sent):
        messages.feed(await read(connection, 1 << 16 if len(got) < len(sent) - 1 else 1))
        while more := messages.take(1):
            got += more
    assert got == sent and owner.writable and not owner.queue


async def test_what_is_left_at_the_end_leaves_with_drain(listen: Listen, open_owner: Open) -> None:
    listener = listen()
    owner = open_owner()
    connection = await listener.accept()
    await handshake(connection)
    owner.queue.extend([b"x" * 300_000, b"y" * 300_000, b"z" * 300_000])
    owner.transport.send(owner.queue)
    ending = asyncio.ensure_future(owner.transport.drain(owner.queue))
    data = await read(connection, 3 * 300_009)
    await asyncio.wait_for(ending, PATIENCE_S)
    assert [data.count(letter) for letter in (b"x", b"y", b"z")] == [300_000] * 3


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        GREETING + ready(b"PUB"),
        GREETING + ready(b"REP"),
        GREETING + ready(b"ROUTER") + b"\xff\0",
    ],
)
async def test_who_speaks_otherwise_is_left_and_tried_again(listen: Listen, open_owner: Open, said: bytes) -> None:
    listener = listen()
    owner = open_owner()
    await listener.accept(said)
    await owner.until(lambda: owner.lost == 1)
    good = await listener.accept()
    await handshake(good)
    assert owner.got == []


def test_another_transport_is_refused() -> None:
    with pytest.raises(GoondanError, match="ipc://"):
        Link("tcp://127.0.0.1:1", "", on_frame=lambda frame: None)
