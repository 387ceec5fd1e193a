"""The broker's sockets against peers that come in crowds, do not greet, do not read, or send what nobody should."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from goondan.kernel.broker.state.bus import Lossy
from goondan.kernel.broker.transport import MAX_WAITING_PEER, native
from goondan.kernel.broker.transport.native import GREETING_S, MAX_GREETING, MAX_WAITING_NEWS, NativeTransport
from goondan.schemas.wire.codec import MAX_FRAME_BYTES
from goondan.schemas.wire.zmtp import GREETING, Handshake, Messages, head, ready

CLS = 0
#: The routing id of the first connection that greets.
FIRST = (1).to_bytes(8, "big")
OURS = frozenset({os.geteuid()})


class Broker:
    """One class of peers, and what they said."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.counters: Counter[str] = Counter()
        self.epoll = select.epoll()
        self.sockets = NativeTransport(self.epoll, self.counters)
        self.sockets.listen(path, OURS, 1)
        self.got: list[tuple[bytes, bytes]] = []
        self.clients: list[socket.socket] = []
        self.now = 100.0

    def turn(self, most: int = 64) -> None:
        """One round: at most `most` messages."""
        self.sockets.wait(0, self.now)
        self.got += self.sockets.receive(CLS, most)
        self.sockets.send([])

    def send(self, data: bytes) -> Sequence[tuple[int, bytes]]:
        """Send a frame to FIRST. The peers that are gone."""
        return self.sockets.send([(CLS, FIRST, data)])

    def connect(self, said: bytes = b"") -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(10)
        client.connect(self.path)
        self.clients.append(client)
        client.sendall(said)
        self.turn()
        return client

    def peer(self) -> socket.socket:
        """A greeted client that has read our greeting. Its routing id is `newest`."""
        client = self.connect(GREETING + ready(b"DEALER"))
        self.turn()
        said = Handshake({b"ROUTER"})
        while not said.feed(client.recv(1)):
            pass
        return client

    @property
    def newest(self) -> bytes:
        """The routing id of the last connection that has greeted."""
        return next(reversed(self.sockets._peers[CLS]))

    def close(self) -> None:
        self.sockets.close(0)
        for client in self.clients:
            client.close()
        self.epoll.close()


@pytest.fixture
def broker(short_tmp: Path) -> Iterator[Broker]:
    made = Broker(str(short_tmp / "b.sock"))
    yield made
    made.close()


def is_closed(client: socket.socket) -> bool:
    """The other side has ended the connection: after what it has said comes an end, and no time-out."""
    client.settimeout(0)
    try:
        while client.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_who_is_gone_is_told_of_at_the_next_frame_and_its_last_words_are_heard(broker: Broker) -> None:
    client = broker.peer()
    client.sendall(head(3) + b"bye")
    client.close()
    broker.send(b"too late")  # fails, and takes nothing of what was said
    broker.turn()
    broker.turn()
    assert broker.got == [(FIRST, b"bye")]
    assert broker.send(b"too late") == [(CLS, FIRST)]


def test_a_routing_id_never_comes_again_whatever_a_peer_calls_itself(broker: Broker) -> None:
    called = GREETING + b"\4\x2b\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\2ab"
    clients = [broker.connect(called + head(1) + b"a") for _ in range(2)]
    broker.turn()
    clients.pop().close()
    broker.turn()
    broker.connect(called + head(1) + b"a")
    broker.turn()
    assert len({ident for ident, _ in broker.got}) == len(broker.got) == 3


def test_processes_of_other_users_get_no_byte(broker: Broker) -> None:
    ((fd, (cls, listener, _)),) = broker.sockets._listeners.items()
    broker.sockets._listeners[fd] = (cls, listener, frozenset({4242}))
    client = broker.connect(GREETING + ready(b"DEALER"))
    broker.turn()
    with pytest.raises(ConnectionResetError):  # it had something to say, which nobody has read
        client.recv(1)
    assert broker.counters["connections_refused"] == 1


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        GREETING + ready(b"PUB"),
        GREETING + ready(b"REQ"),
        GREETING + ready(b"DEALER") + b"\2" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"),
        GREETING + ready(b"DEALER") + b"\xff\xff",
    ],
)
def test_who_speaks_otherwise_is_cut_off_and_nobody_else(broker: Broker, said: bytes) -> None:
    good = broker.peer()
    bad = broker.connect(said)
    broker.turn()
    assert is_closed(bad) and broker.counters["connections_faulty"] == 1
    good.sendall(head(1) + b"a")
    broker.turn()
    assert broker.got == [(FIRST, b"a")]


def test_a_greeting_byte_by_byte_has_its_time_and_no_more(broker: Broker) -> None:
    slow, good = broker.connect(), broker.peer()
    for byte in GREETING[:40]:
        slow.sendall(bytes((byte,)))
        broker.turn()
    broker.sockets.tick(broker.now + GREETING_S - 0.1)
    assert not is_closed(slow)
    broker.sockets.tick(broker.now + GREETING_S)
    assert is_closed(slow) and not is_closed(good)


def test_a_crowd_that_does_not_greet_displaces_its_own_oldest(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_GREETING >= 1000, "all agents of a kernel may come at once"
    monkeypatch.setattr(native, "MAX_GREETING", 3)
    good = broker.peer()
    crowd = [broker.connect() for _ in range(5)]
    assert [is_closed(one) for one in crowd] == [True, True, False, False, False]
    assert not is_closed(good)


def test_without_descriptors_the_listener_rests_until_the_next_tick(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((fd, (cls, listener, users)),) = broker.sockets._listeners.items()

    class Full:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "too many open files")

        def close(self) -> None:
            listener.close()

    broker.sockets._listeners[fd] = (cls, Full(), users)  # type: ignore[assignment]
    client = broker.connect(GREETING + ready(b"DEALER") + head(1) + b"a")
    assert not broker.sockets.wait(0, broker.now), "it would turn in circles"
    broker.sockets._listeners[fd] = (cls, listener, users)
    broker.sockets.tick(broker.now)
    for _ in range(3):
        broker.turn()
    assert [data for _, data in broker.got] == [b"a"] and not is_closed(client)


def test_more_connections_than_descriptors_are_closed_at_once(broker: Broker) -> None:
    broker.sockets._most = 1
    good = broker.peer()
    assert is_closed(broker.connect()) and not is_closed(good)


def test_who_says_much_is_served_in_turns_with_the_others(broker: Broker) -> None:
    loud, loud_id = broker.peer(), broker.newest
    quiet, quiet_id = broker.peer(), broker.newest
    loud.sendall((head(1) + b"x") * 300)
    quiet.sendall(head(1) + b"y")
    broker.turn(64)
    assert len(broker.got) == 64 and any(broker.sockets.due)
    broker.turn(64)
    assert len(broker.got) == 128 and Counter(broker.got)[quiet_id, b"y"] == 1, "it waits for one round at most"
    for _ in range(4):
        broker.turn(64)
    assert Counter(broker.got) == {(loud_id, b"x"): 300, (quiet_id, b"y"): 1} and not any(broker.sockets.due)


def test_what_a_peer_does_not_read_waits_in_order_and_leaves_when_it_reads(broker: Broker) -> None:
    client = broker.peer()
    sent = [bytes((number,)) * 50_000 for number in range(30)]
    for data in sent:
        assert broker.send(data) == []
    messages = Messages(MAX_FRAME_BYTES)
    got: list[bytes] = []
    while len(got) < len(sent):
        messages.feed(client.recv(1 << 16))
        while more := messages.take(9):
            got += more
        broker.turn()
    assert got == sent and broker.sockets._waiting == 0
    assert not broker.sockets.wait(0, broker.now), "nothing waits, so it need not wake up to write"


def test_news_are_dropped_for_who_does_not_read_and_nothing_else(broker: Broker) -> None:
    client = broker.peer()
    while broker.sockets._waiting <= MAX_WAITING_NEWS:
        broker.send(bytes(10_000))
    broker.send(Lossy(b"news"))
    broker.send(b"kept")
    assert broker.counters["live_dropped"] == 1
    data = b""
    while not data.endswith(b"kept"):
        data += client.recv(1 << 16)
        broker.turn()
    assert b"news" not in data


@pytest.mark.parametrize("limit", ["MAX_WAITING_PEER", "MAX_WAITING_ALL"])
def test_who_reads_nothing_is_dropped_over_its_limit(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(native, limit, 1 << 20)
    client = broker.peer()
    dropped: list[tuple[int, bytes]] = []
    for _ in range(40):
        dropped += broker.send(bytes(100_000))
        if dropped:
            break
    assert dropped == [(CLS, FIRST)] and broker.counters["peers_dropped_full"] == 1
    assert broker.send(b"more") == [(CLS, FIRST)] and broker.sockets._waiting == 0
    assert is_closed(client) and MAX_WAITING_PEER == 32 << 20


def test_pings_are_answered_and_their_answers_are_bounded_too(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "MAX_WAITING_PEER", 1 << 16)
    client = broker.peer()
    client.sendall(b"\4\x0a\4PING\0\0abc")
    broker.turn()
    assert client.recv(100) == b"\4\x08\4PONGabc"
    client.settimeout(0)
    try:
        for _ in range(100_000):
            client.send((b"\4\x17\4PING\0\0" + bytes(16)) * 200)
            broker.turn()
    except OSError:
        pass
    broker.turn()
    assert broker.send(b"more") == [(CLS, FIRST)], "who pings and reads nothing is closed"


def test_at_the_end_what_waits_may_leave(broker: Broker) -> None:
    client = broker.peer()
    broker.send(bytes(200_000) + b"end")
    got: list[bytes] = []

    def reading() -> None:
        while data := client.recv(1 << 16):
            got.append(data)

    thread = threading.Thread(target=reading)
    thread.start()
    broker.sockets.close(10)
    thread.join(10)
    assert b"".join(got).endswith(b"end")


def test_a_stale_socket_in_the_way_is_replaced(short_tmp: Path) -> None:
    path = str(short_tmp / "b.sock")
    for _ in range(2):
        broker = Broker(path)
        assert os.stat(path).st_mode & 0o777 == 0o600
        broker.close()
