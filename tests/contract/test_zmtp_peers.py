"""Our ZMTP and libzmq's understand each other: every size of message, heartbeats, messages of several parts."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kernel.broker.peer_sockets import PeerSockets
from schemas.system.dealer import Dealer

LIMIT = 1 << 20
#: The sizes around the borders of the short and the long head, of a read, and the largest.
SIZES = (1, 254, 255, 256, 257, 65_526, 65_536, 200_000, LIMIT)
PATIENCE_S = 10.0


@contextmanager
def router(endpoint: str, **options: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.bind(endpoint)
        yield socket


class Collected:
    """A dealer and what came."""

    def __init__(self, endpoint: str) -> None:
        self.got: list[bytes] = []
        self.lost = 0
        self.queue: deque[bytes] = deque()
        self.dealer = Dealer(
            endpoint,
            LIMIT,
            admits=lambda fd: True,
            on_messages=self.take,
            on_writable=self.send,
            on_lost=self.is_lost,
        )
        self.dealer.open(asyncio.get_running_loop())

    def take(self) -> None:
        while (message := self.dealer.take()) is not None:
            self.got.append(message)

    def send(self) -> None:
        self.dealer.send(self.queue)

    def is_lost(self) -> None:
        self.lost += 1

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.001)


async def received(socket: zmq.Socket[bytes]) -> list[bytes]:
    return await asyncio.get_running_loop().run_in_executor(None, socket.recv_multipart)


async def test_a_dealer_of_ours_and_a_router_of_libzmq(short_tmp: Path) -> None:
    endpoint = f"ipc://{short_tmp}/r.sock"
    with router(endpoint) as socket:
        ours = Collected(endpoint)
        ident, probe = await received(socket)
        assert probe == b""
        sent = [bytes([size % 251]) * size for size in SIZES]
        ours.queue.extend([*sent, b"", b"end"])
        ours.send()
        for data in (*sent, b"", b"end"):
            assert await received(socket) == [ident, data]
        for data in sent:
            socket.send_multipart([ident, data])
        socket.send_multipart([ident, b"of", b"several", b"parts"])
        socket.send_multipart([ident, b"end"])
        await ours.until(lambda: ours.got[-1:] == [b"end"])
        assert ours.got == [*sent, b"end"] and ours.lost == 0
        ours.dealer.close()


async def test_heartbeats_of_libzmq_are_answered(short_tmp: Path) -> None:
    """A dealer that did not answer them would be cut off."""
    endpoint = f"ipc://{short_tmp}/r.sock"
    with router(endpoint, HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=100) as socket:
        ours = Collected(endpoint)
        ident, _ = await received(socket)
        await asyncio.sleep(0.4)
        socket.send_multipart([ident, b"still there"])
        await ours.until(lambda: ours.got == [b"still there"])
        assert ours.lost == 0
        ours.dealer.close()


# --- a dealer of libzmq and the broker's sockets


class Served:
    """The broker's sockets with one class, and what came."""

    def __init__(self, path: str) -> None:
        self.counters: Counter[str] = Counter()
        self._epoll = select.epoll()
        self.sockets = PeerSockets(self._epoll, self.counters)
        self.sockets.listen(path, {os.geteuid()})
        self.got: list[tuple[bytes, bytes]] = []
        #: The other side. libzmq probes in the thread that uses its socket.
        self.other: zmq.Socket[bytes] | None = None

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end
            if self.other is not None:
                self.other.getsockopt(zmq.EVENTS)
            self.sockets.wait(0.01, time.monotonic())
            while (peer := self.sockets.next_due(0)) is not None:
                if self.sockets.read(peer):
                    while (data := self.sockets.take(peer)) is not None:
                        self.got.append((peer.ident, data))
                    self.sockets.served(peer)
            self.sockets.write()

    def close(self) -> None:
        self.sockets.close(1)
        self._epoll.close()


@pytest.fixture
def served(short_tmp: Path) -> Iterator[Served]:
    made = Served(str(short_tmp / "b.sock"))
    yield made
    made.close()


@contextmanager
def dealer(path: Path, **options: int | bytes) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(f"ipc://{path}/b.sock")
        yield socket


def test_a_dealer_of_libzmq_and_the_broker(served: Served, short_tmp: Path) -> None:
    sent = [bytes([size % 251]) * size for size in SIZES]
    with dealer(short_tmp, ROUTING_ID=b"c" * 16, PROBE_ROUTER=1, IMMEDIATE=1) as socket:
        served.other = socket
        served.until(lambda: len(served.got) == 1)
        ((ident, probe),) = served.got
        assert probe == b"" and ident != b"c" * 16
        for data in sent:
            socket.send(data)
        served.until(lambda: len(served.got) == 1 + len(sent))
        assert served.got[1:] == [(ident, data) for data in sent]
        for data in sent:
            served.sockets.put(0, ident, data)
            served.sockets.write()
        served.until(lambda: not served.sockets._waiting)
        assert [socket.recv() for _ in sent] == sent
        socket.send_multipart([b"of", b"several", b"parts"])
        socket.send(b"end")
        served.until(lambda: served.got[-1] == (ident, b"end"))
        assert served.counters["frames_multipart"] == 1 and len(served.got) == 2 + len(sent)


def test_a_dealer_without_a_routing_id_and_one_that_asks_for_heartbeats(served: Served, short_tmp: Path) -> None:
    with dealer(short_tmp, HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=100, HEARTBEAT_TTL=100) as socket:
        socket.send(b"one")
        served.until(lambda: len(served.got) == 1)
        ident = served.got[0][0]
        end = time.monotonic() + 0.4
        served.until(lambda: time.monotonic() > end)
        assert served.sockets.put(0, ident, b"still there")
        served.sockets.write()
        assert socket.recv() == b"still there"


def test_a_message_over_the_limit_ends_the_connection_and_libzmq_comes_back(served: Served, short_tmp: Path) -> None:
    with dealer(short_tmp, ROUTING_ID=b"c" * 16, PROBE_ROUTER=1, IMMEDIATE=1, RECONNECT_IVL=20) as socket:
        served.other = socket
        served.until(lambda: len(served.got) == 1)
        socket.send(bytes(LIMIT + 1))
        served.until(lambda: len(served.got) == 2)
        assert [data for _, data in served.got] == [b"", b""] and served.got[0] != served.got[1]
        assert served.counters["connections_faulty"] == 1


def test_a_socket_of_another_type_or_mechanism_gets_nothing(served: Served, short_tmp: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as wrong, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.PLAIN_USERNAME, b"somebody")
        for socket in (wrong, plain):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{short_tmp}/b.sock")
        plain.send(b"x")
        end = time.monotonic() + 0.2
        served.until(lambda: time.monotonic() > end)
        assert served.got == [] and served.sockets._peers == [{}]
