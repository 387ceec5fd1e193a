"""Both transports keep the same promises: of a link towards a ROUTER of libzmq, of a broker towards libzmq's peers."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from goondan.kernel.broker.loop import _transport as make_broker
from goondan.kernel.broker.state.bus import Lossy
from goondan.schemas.transport import TRANSPORTS, VARIABLE, chosen, path_of
from goondan.schemas.transport.libzmq import LibzmqTransport
from goondan.schemas.transport.link import transport_class
from goondan.schemas.wire.errors import GoondanError

LIMIT = 1 << 20
#: The sizes around the borders of the short and the long head, of a read, and the largest.
SIZES = (1, 254, 255, 256, 257, 65_526, 65_536, 200_000, LIMIT)
PATIENCE_S = 30.0
#: A random routing id as links choose them.
IDENT = b"c" * 16


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The transport that is tried."""
    monkeypatch.setenv(VARIABLE, request.param)
    return str(request.param)


def test_the_default_is_libzmq_and_another_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen() == "libzmq"
    monkeypatch.setenv(VARIABLE, "tcp")
    with pytest.raises(GoondanError, match="libzmq and native"):
        chosen()


# --- the transport of a link, and a ROUTER of libzmq


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
    """The transport of a link, and what came."""

    def __init__(self, endpoint: str) -> None:
        self.got: list[bytes] = []
        self.lost = 0
        self.admitted = True
        self.queue: deque[bytes] = deque()
        self.transport = transport_class()(
            path_of(endpoint),
            LIMIT,
            admits=lambda fd: self.admitted and bool(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")),
            on_messages=self.take,
            on_writable=self.send,
            on_lost=self.is_lost,
        )
        self.transport.open(asyncio.get_running_loop())

    def take(self) -> None:
        while (message := self.transport.take()) is not None:
            self.got.append(message)

    def send(self) -> None:
        self.transport.send(self.queue)

    def is_lost(self) -> None:
        self.lost += 1

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await asyncio.sleep(0.001)

    async def was_lost(self, times: int) -> None:
        await self.until(lambda: self.lost >= times)


async def received(socket: zmq.Socket[bytes]) -> list[bytes]:
    return await asyncio.get_running_loop().run_in_executor(None, socket.recv_multipart)


async def test_a_link_and_a_router_of_libzmq(short_tmp: Path, transport: str) -> None:
    endpoint = f"ipc://{short_tmp}/r.sock"
    with router(endpoint) as socket:
        ours = Collected(endpoint)
        ident, probe = await received(socket)
        assert probe == b""
        socket.send_multipart([ident, b"hello?"])
        await ours.until(lambda: ours.got == [b"hello?"])
        sent = [bytes([size % 251]) * size for size in SIZES]
        ours.queue.extend([*sent, b"", b"end"])
        ours.send()
        for data in (*sent, b"", b"end"):
            assert await received(socket) == [ident, data]
        for data in (*sent, b"end"):
            socket.send_multipart([ident, data])
        await ours.until(lambda: ours.got[-1:] == [b"end"])
        assert ours.got == [b"hello?", *sent, b"end"] and ours.lost == 0
        ours.transport.close()
        ours.transport.close()


async def test_a_link_is_asked_again_after_each_reconnect_and_says_that_it_was_lost(
    short_tmp: Path, transport: str
) -> None:
    """Whoever listens anew hears nothing but the probe before it was looked at, and what follows its own question."""
    endpoint = f"ipc://{short_tmp}/r.sock"
    ours = Collected(endpoint)
    for number in range(3):
        with router(endpoint) as socket:
            ident, probe = await received(socket)
            assert probe == b""
            socket.send_multipart([ident, b"question %d" % number])
            await ours.was_lost(number)
            while f"question {number}".encode() not in ours.got:  # it may have gone nowhere, with the old connection
                await asyncio.sleep(0.001)
                socket.setsockopt(zmq.RCVTIMEO, 0)
                try:
                    again = socket.recv_multipart()
                except zmq.Again:
                    continue
                assert again == [ident, b""]
                socket.send_multipart([ident, b"question %d" % number])
            ours.queue.append(b"answer %d" % number)
            ours.send()
            socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
            assert await received(socket) == [ident, b"answer %d" % number]
    ours.transport.close()
    assert ours.lost == 2


async def test_a_link_that_waits_to_send_probes_too_when_its_connection_is_another(short_tmp: Path) -> None:
    endpoint = f"ipc://{short_tmp}/r.sock"
    with router(endpoint) as socket:
        ours = Collected(endpoint)
        ident, _ = await received(socket)
        socket.send_multipart([ident, b"hello?"])
        await ours.until(lambda: ours.got == [b"hello?"])
        transport = ours.transport
        assert isinstance(transport, LibzmqTransport)
        transport._retry = asyncio.get_running_loop().call_later(60, list)
        transport._connection = (transport._connection[0], 0)
        socket.send_multipart([ident, b"hello again?"])
        assert await received(socket) == [ident, b""] and ours.lost == 1
        transport.close()


async def test_nothing_is_given_of_who_is_not_admitted(short_tmp: Path, transport: str) -> None:
    endpoint = f"ipc://{short_tmp}/r.sock"
    with router(endpoint) as socket:
        ours = Collected(endpoint)
        ours.admitted = False
        if transport == "native":  # it gets no byte at all
            await asyncio.sleep(0.05)
        else:
            ident, _ = await received(socket)
            socket.send_multipart([ident, b"believe me"])
            await asyncio.sleep(0.05)
        assert ours.got == []
        ours.transport.close()


async def test_a_paused_link_gives_nothing_and_goes_on_where_it_was(short_tmp: Path, transport: str) -> None:
    endpoint = f"ipc://{short_tmp}/r.sock"
    with router(endpoint) as socket:
        ours = Collected(endpoint)
        ident, _ = await received(socket)
        socket.send_multipart([ident, b"first"])
        await ours.until(lambda: ours.got == [b"first"])
        ours.transport.pause()
        for number in range(300):
            socket.send_multipart([ident, b"%d" % number])
        await asyncio.sleep(0.05)
        assert ours.got == [b"first"]
        ours.transport.resume()
        await ours.until(lambda: len(ours.got) == 301)
        assert ours.got[1:] == [b"%d" % number for number in range(300)]
        ours.transport.close()


async def test_what_is_left_at_the_end_leaves_with_drain(short_tmp: Path, transport: str) -> None:
    endpoint = f"ipc://{short_tmp}/r.sock"
    with router(endpoint) as socket:
        ours = Collected(endpoint)
        ident, _ = await received(socket)
        socket.send_multipart([ident, b"hello?"])
        await ours.until(lambda: ours.got == [b"hello?"])
        ours.queue.extend(bytes([number]) * 300_000 for number in range(10))
        ending = asyncio.ensure_future(ours.transport.drain(ours.queue))
        for number in range(10):
            assert await received(socket) == [ident, bytes([number]) * 300_000]
        await asyncio.wait_for(ending, PATIENCE_S)
        ours.transport.close()


async def test_heartbeats_of_libzmq_are_answered(short_tmp: Path, transport: str) -> None:
    """A link that did not answer them would be cut off."""
    endpoint = f"ipc://{short_tmp}/r.sock"
    with router(endpoint, HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=100) as socket:
        ours = Collected(endpoint)
        ident, _ = await received(socket)
        await asyncio.sleep(0.4)
        socket.send_multipart([ident, b"still there"])
        await ours.until(lambda: ours.got == [b"still there"])
        assert ours.lost == 0
        ours.transport.close()


# --- the transport of a broker, and peers of libzmq


class Served:
    """The sockets of a broker with one class, and what came."""

    def __init__(self, path: str, transport: str) -> None:
        self.counters: Counter[str] = Counter()
        self._epoll = select.epoll()
        #: Those that have said hello, as far as the transport is told.
        self.known: set[bytes] = set()
        self.sockets = make_broker(transport, self._epoll, self.counters, [self.known])
        self.sockets.listen(path, {os.geteuid()}, 64)
        self.got: list[tuple[bytes, bytes]] = []
        self.given_up: list[tuple[int, bytes]] = []
        #: The other side. libzmq probes in the thread that uses its socket.
        self.other: zmq.Socket[bytes] | None = None

    def turn(self, quota: int = 64, seconds: float = 0.01) -> None:
        if self.other is not None:
            self.other.getsockopt(zmq.EVENTS)
        self.sockets.wait(0 if any(self.sockets.due) else seconds, time.monotonic())
        self.got += self.sockets.receive(0, quota)
        self.given_up += self.sockets.send([])

    def send(self, ident: bytes, data: bytes) -> bool:
        """Send a frame. Whether its peer is there, and takes enough."""
        gone = self.sockets.send([(0, ident, data)])
        self.given_up += gone
        return not gone

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end
            self.turn()

    def close(self) -> None:
        self.sockets.close(1)
        self._epoll.close()


@pytest.fixture
def served(short_tmp: Path, transport: str) -> Iterator[Served]:
    made = Served(str(short_tmp / "b.sock"), transport)
    yield made
    made.close()


@contextmanager
def peer(path: Path, kind: int = zmq.DEALER, **options: int | bytes) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(f"ipc://{path}/b.sock")
        yield socket


LINK: dict[str, Any] = {"ROUTING_ID": IDENT, "PROBE_ROUTER": 1, "IMMEDIATE": 1, "RECONNECT_IVL": 20}


def test_a_dealer_of_libzmq_and_the_broker(served: Served, short_tmp: Path) -> None:
    sent = [bytes([size % 251]) * size for size in SIZES]
    with peer(short_tmp, **LINK) as socket:
        served.other = socket
        served.until(lambda: len(served.got) == 1)
        ((ident, probe),) = served.got
        assert probe == b""
        served.known.add(ident)
        for data in sent:
            socket.send(data)
        served.until(lambda: len(served.got) == 1 + len(sent))
        assert served.got[1:] == [(ident, data) for data in sent]
        for data in sent:
            assert served.send(ident, data)
        for data in sent:
            served.turn()
            assert socket.recv() == data


@pytest.mark.parametrize("known", [True, False])
def test_messages_of_several_parts_are_counted_and_the_good_one_behind_them_comes(
    served: Served, short_tmp: Path, known: bool
) -> None:
    with peer(short_tmp, **LINK) as socket:
        served.other = socket
        served.until(lambda: len(served.got) == 1)
        ident = served.got[0][0]
        if known:
            served.known.add(ident)
        for number in range(400):
            socket.send_multipart([b"of", b"d" * 16, b"parts"] if number % 2 else [b"of", b"d" * 16])
            served.turn(seconds=0)
        socket.send(b"good")
        served.until(lambda: served.got[-1] == (ident, b"good"))
        # What follows the first part of a known peer is at most a stranger's message.
        assert {data for sender, data in served.got[1:-1] if sender == ident} <= {b"of"}
        assert served.counters["frames_multipart"] >= 200


def test_who_is_gone_is_told_of_at_the_next_frame(served: Served, short_tmp: Path) -> None:
    with peer(short_tmp, **LINK) as socket:
        served.other = socket
        served.until(lambda: len(served.got) == 1)
        ident = served.got[0][0]
        socket.send(b"last words")
    served.other = None
    served.until(lambda: len(served.got) == 2)
    assert served.got[1] == (ident, b"last words")
    served.until(lambda: not served.send(ident, b"too late"))
    assert not served.send(b"nobody", b"")


def test_no_class_gives_more_than_its_quota_in_a_round(served: Served, short_tmp: Path) -> None:
    with peer(short_tmp, **LINK) as socket:
        served.other = socket
        served.until(lambda: len(served.got) == 1)
        for number in range(40):
            socket.send(b"%d" % number)
        time.sleep(0.05)
        served.got.clear()
        while not served.got:
            served.turn(quota=16)
        assert len(served.got) <= 16
        for _ in range(20):
            before = len(served.got)
            served.turn(quota=16)
            assert len(served.got) - before <= 16
        assert [data for _, data in served.got] == [b"%d" % number for number in range(40)]


def test_a_second_peer_of_the_same_routing_id_takes_nothing_over(served: Served, short_tmp: Path) -> None:
    with peer(short_tmp, **LINK) as first, ExitStack() as later:
        served.other = first
        served.until(lambda: len(served.got) == 1)
        ident = served.got[0][0]
        served.known.add(ident)
        second = later.enter_context(peer(short_tmp, **LINK))
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            second.getsockopt(zmq.EVENTS)
            served.turn()
        served.send(ident, b"for the first")
        assert first.recv() == b"for the first"
        second.setsockopt(zmq.RCVTIMEO, 100)
        with pytest.raises(zmq.Again):
            second.recv()


def test_who_reads_nothing_is_given_up_over_its_limit_and_others_go_on(
    served: Served, short_tmp: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"goondan.kernel.broker.transport.{transport}.MAX_WAITING_PEER", 4 << 20)
    with peer(short_tmp, RCVHWM=4, **LINK) as silent, ExitStack() as later:
        served.other = silent
        served.until(lambda: len(served.got) == 1)
        ident = served.got[0][0]
        served.other = good = later.enter_context(peer(short_tmp, PROBE_ROUTER=1))
        served.until(lambda: len(served.got) == 2)
        for _ in range(400):
            if served.given_up or not served.send(ident, bytes(LIMIT // 4)):
                break
            served.send(ident, Lossy(b"news"))
            served.turn(seconds=0)
        served.turn()
        assert served.given_up == [(0, ident)] and served.counters["peers_dropped_full"] == 1
        assert served.counters["live_dropped"] > 0
        assert served.send(served.got[1][0], b"for you")
        served.turn()
        assert good.recv() == b"for you"


def test_what_a_slow_peer_did_not_take_comes_in_order(served: Served, short_tmp: Path) -> None:
    with peer(short_tmp, RCVHWM=4, **LINK) as slow:
        served.other = slow
        served.until(lambda: len(served.got) == 1)
        ident = served.got[0][0]
        sent = [bytes([number]) * 100_000 for number in range(120)]
        for data in sent:
            assert served.send(ident, data)
            served.turn(seconds=0)
        got: list[bytes] = []
        slow.setsockopt(zmq.RCVTIMEO, 0)
        end = time.monotonic() + PATIENCE_S
        while len(got) < len(sent) and time.monotonic() < end:
            served.turn()
            try:
                got.append(slow.recv())
            except zmq.Again:
                continue
        assert got == sent and not served.given_up


def test_a_peer_that_was_stuck_and_takes_something_again_gets_it_at_once(served: Served, short_tmp: Path) -> None:
    """Not when it is tried next: the clock stands still."""
    with peer(short_tmp, RCVHWM=4, **LINK) as stuck:
        served.other = stuck
        served.until(lambda: len(served.got) == 1)
        ident, now = served.got[0][0], time.monotonic()
        sent = [bytes([number]) * 100_000 for number in range(120)]
        for data in sent:
            assert served.send(ident, data)
        for _ in range(50):  # until its turn is far away
            served.sockets.wait(0.002, now)
            served.sockets.receive(0, 64)
        got: list[bytes] = []
        stuck.setsockopt(zmq.RCVTIMEO, 0)
        end = time.monotonic() + PATIENCE_S
        while len(got) < len(sent) and time.monotonic() < end:
            served.sockets.wait(0.002, now)
            served.sockets.receive(0, 64)
            served.sockets.send([])
            try:
                got.append(stuck.recv())
            except zmq.Again:
                continue
        assert got == sent and not served.given_up


def test_a_dealer_without_a_routing_id_and_one_that_asks_for_heartbeats(served: Served, short_tmp: Path) -> None:
    with peer(short_tmp, HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=1000, HEARTBEAT_TTL=1000) as socket:
        socket.send(b"one")
        served.until(lambda: len(served.got) == 1)
        ident = served.got[0][0]
        end = time.monotonic() + 1.3  # longer than a peer waits whose heartbeats nobody answers
        served.until(lambda: time.monotonic() > end)
        assert served.send(ident, b"still there")
        assert socket.recv() == b"still there"


def test_a_message_over_the_limit_ends_the_connection_and_libzmq_comes_back(served: Served, short_tmp: Path) -> None:
    with peer(short_tmp, **LINK) as socket:
        served.other = socket
        served.until(lambda: len(served.got) == 1)
        socket.send(bytes(LIMIT + 1))
        served.until(lambda: len(served.got) == 2)
        assert [data for _, data in served.got] == [b"", b""]


def test_a_socket_of_another_type_or_mechanism_gets_nothing(served: Served, short_tmp: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as wrong, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.PLAIN_USERNAME, b"somebody")
        for socket in (wrong, plain):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{short_tmp}/b.sock")
        plain.send(b"x")
        end = time.monotonic() + 0.2
        served.until(lambda: time.monotonic() > end)
        assert served.got == []


def test_a_process_of_another_user_gets_no_byte(short_tmp: Path, transport: str) -> None:
    sockets = make_broker(transport, select.epoll(), Counter(), [set()])
    sockets.listen(str(short_tmp / "b.sock"), {4242}, 64)
    with peer(short_tmp, **LINK) as socket:
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            socket.getsockopt(zmq.EVENTS)
            sockets.wait(0.01, time.monotonic())
            assert list(sockets.receive(0, 64)) == []
    sockets.close(0)
