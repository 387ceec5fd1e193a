"""The broker's sockets without libzmq: a listening one for each class of peers, and the connections made to it.

A connection is a ZeroMQ one (schemas/wire/zmtp.py): a peer is a DEALER of libzmq, or of
any other implementation of ZMTP 3.

Rules (docs/design/wire.md sections 6 and 10).
- Who connects is asked of the system (SO_PEERCRED) at once. A process of another user gets no byte.
- Each connection gets a routing id of ours, which never comes again. What a peer calls itself in its READY is
  ignored: an id that others can choose could be taken over when its connection is lost.
- Greeting and READY must be there in GREETING_S. At most MAX_GREETING connections may be that far at a time.
- Reads never block and take at most READ_BYTES. What was read and not yet taken is taken first, so a peer that sends
  much waits in its own socket buffer.
- Writes never block. What a peer does not take waits here, in order. A peer with more than MAX_WAITING_PEER bytes, or
  the one that makes it more than MAX_WAITING_ALL for all, is closed. Live news are dropped earlier.
- After a failed write the connection is still read: its last frames may be there. Its end is noticed where it is read.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Final

from goondan.kernel.broker.state.bus import Lossy
from goondan.kernel.broker.transport import MAX_WAITING_ALL, MAX_WAITING_PEER
from goondan.schemas.wire.codec import MAX_FRAME_BYTES
from goondan.schemas.wire.zmtp import GREETING, Handshake, Messages, ZmtpError, head, ready

#: The most bytes that are read of one connection at once.
READ_BYTES: Final = 64 << 10
#: Live news are dropped for a peer for which more bytes than this wait.
MAX_WAITING_NEWS: Final = 128 << 10
#: How long greeting and READY may take (seconds), and how many connections may be that far.
GREETING_S: Final = 10.0
MAX_GREETING: Final = 1024
#: Connections that wait to be accepted, for each class, and how many are accepted in one round.
BACKLOG: Final = 4096
ACCEPTED: Final = 64
#: Descriptors that stay free for the journal, files and pipes.
SPARE_DESCRIPTORS: Final = 128
#: Descriptors that are looked at in one wake-up. The others come with the next one.
LOOKED_AT: Final = 256

#: The socket types that may be a peer. A REQ puts an empty part before each message, and would wait for ever for the
#: answer to a message that nobody takes.
_OTHERS: Final = frozenset({b"DEALER", b"ROUTER"})
_HELLO: Final = GREETING + ready(b"ROUTER")
#: What SO_PEERCRED gives: pid, uid, gid.
_PEER: Final = struct.Struct("3i")
#: No connection can be accepted, and trying again at once would fail again.
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_READ: Final = select.EPOLLIN
_READ_AND_WRITE: Final = select.EPOLLIN | select.EPOLLOUT
_WRITE: Final = select.EPOLLOUT


class PeerSocket:
    """One connection."""

    __slots__ = (
        "batch",
        "closed",
        "cls",
        "connected_at",
        "due",
        "fd",
        "handshake",
        "ident",
        "messages",
        "queue",
        "receive",
        "send",
        "socket",
        "waiting",
    )

    def __init__(self, cls: int, connection: socket.socket, now: float) -> None:
        self.cls = cls
        self.socket = connection
        self.fd = connection.fileno()
        self.receive = connection.recv
        self.send = connection.send
        self.connected_at = now
        #: The routing id that it was given; empty before its READY.
        self.ident = b""
        #: What reads its greeting; None after READY.
        self.handshake: Handshake | None = Handshake(_OTHERS)
        self.messages = Messages(MAX_FRAME_BYTES)
        #: It is in the queue of those that may have something to say.
        self.due = False
        #: What leaves with the next `send`.
        self.batch: list[bytes] = []
        #: What it did not take, in order, and the bytes of it.
        self.queue: deque[bytes] = deque()
        self.waiting = 0
        self.closed = False


class NativeTransport:
    """All connections of a broker. Use it only in the thread that made it."""

    def __init__(self, epoll: select.epoll, counters: Counter[str]) -> None:
        self._epoll = epoll
        self._counters = counters
        self._listeners: dict[int, tuple[int, socket.socket, Collection[int]]] = {}
        self._resting: list[int] = []
        self._by_fd: dict[int, PeerSocket] = {}
        #: For each class: by routing id, its connections after READY.
        self._peers: list[dict[bytes, PeerSocket]] = []
        #: For each class: the connections that may have something to say, in the order in which they are served.
        self.due: list[deque[PeerSocket]] = []
        #: The connections before READY, the oldest first.
        self._greeting: dict[PeerSocket, None] = {}
        self._touched: list[PeerSocket] = []
        self._waiting = 0
        self._last_id = 0
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = sys.maxsize if limit == resource.RLIM_INFINITY else max(64, limit - SPARE_DESCRIPTORS)

    def listen(self, path: str, users: Collection[int], high_water: int) -> None:
        """Listen for the next class at `path`. Messages are not counted here, bytes are."""
        with suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
        self._listeners[listener.fileno()] = (len(self._peers), listener, users)
        self._peers.append({})
        self.due.append(deque())
        self._epoll.register(listener.fileno(), _READ)

    # --- waiting

    def wait(self, seconds: float, now: float) -> bool:
        """Sleep until there is something to do. Whether there was. `now`: the broker's clock before it slept."""
        ready_ones = self._epoll.poll(seconds, LOOKED_AT)
        by_fd = self._by_fd
        for fd, events in ready_ones:
            peer = by_fd.get(fd)
            if peer is None:
                if fd in self._listeners:
                    self._accept(fd, now)
                continue
            if events & _WRITE:
                self._write_on(peer)
            if events != _WRITE and not peer.due:
                peer.due = True
                self.due[peer.cls].append(peer)
        return bool(ready_ones)

    # --- reading

    def receive(self, cls: int, quota: int) -> Sequence[tuple[bytes, bytes]]:
        """At most `quota` messages of a class. Within it, whoever was served goes to the end."""
        due = self.due[cls]
        found: list[tuple[bytes, bytes]] = []
        while due and quota > 0:
            peer = due.popleft()
            peer.due = False
            if peer.closed:
                continue
            if not self._read(peer):
                quota -= 1
                continue
            ident, messages = peer.ident, peer.messages
            try:
                while messages.more and quota > 0:
                    taken = messages.take(quota)
                    quota -= len(taken)
                    for data in taken:
                        found.append((ident, data))  # noqa: PERF401 - usually there is one
            except ZmtpError:
                self._fault(peer)
            if messages.more or messages.answers or messages.multipart:
                self._served(peer)
        return found

    def _read(self, peer: PeerSocket) -> bool:
        """Read what a peer has said. Whether there may be a message."""
        if peer.messages.more:
            return True
        try:
            data = peer.receive(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close_peer(peer)
            return False
        if peer.handshake is not None:
            return self._greeted(peer, peer.handshake, data)
        peer.messages.feed(data)
        return True

    def _served(self, peer: PeerSocket) -> None:
        """Enough was taken of a peer in this round, and that was not all."""
        messages = peer.messages
        if messages.multipart:
            self._counters["frames_multipart"] += messages.multipart
            messages.multipart = 0
        if peer.closed:
            return
        if messages.answers:
            if not peer.batch:
                self._touched.append(peer)
            peer.batch += messages.answers
            messages.answers.clear()
        if messages.more and not peer.due:
            peer.due = True
            self.due[peer.cls].append(peer)

    def _greeted(self, peer: PeerSocket, handshake: Handshake, data: bytes) -> bool:
        try:
            if not handshake.feed(data):
                return False
        except ZmtpError:
            self._fault(peer)
            return False
        self._greeting.pop(peer, None)
        self._last_id += 1
        peer.ident = self._last_id.to_bytes(8, "big")
        self._peers[peer.cls][peer.ident] = peer
        peer.handshake = None
        peer.messages.feed(handshake.rest)
        return True

    # --- writing

    def send(self, frames: Sequence[tuple[int, bytes, bytes]]) -> Sequence[tuple[int, bytes]]:
        """Send frames, together what is for one peer, and answers to PING. See Transport."""
        touched, gone = self._touched, []
        for cls, ident, data in frames:
            peer = self._peers[cls].get(ident)
            if peer is None:
                self._counters["peers_unreachable"] += 1
                gone.append((cls, ident))
                continue
            if peer.waiting > MAX_WAITING_NEWS and isinstance(data, Lossy):
                self._counters["live_dropped"] += 1
                continue
            batch = peer.batch
            if not batch:
                touched.append(peer)
            batch.append(head(len(data)))
            batch.append(data)
        for peer in touched:
            if peer.closed:
                continue
            data = b"".join(peer.batch)
            peer.batch.clear()
            if not peer.queue:
                try:
                    sent = peer.send(data)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    continue  # whoever reads it notices the end
                if sent == len(data):
                    continue
                data = data[sent:]
                self._epoll.modify(peer.fd, _READ_AND_WRITE)
            peer.queue.append(data)
            peer.waiting += len(data)
            self._waiting += len(data)
            if peer.waiting > MAX_WAITING_PEER or self._waiting > MAX_WAITING_ALL:
                self._counters["peers_dropped_full"] += 1
                self.close_peer(peer)
                gone.append((peer.cls, peer.ident))
        touched.clear()
        return gone

    def _write_on(self, peer: PeerSocket) -> None:
        """Send what waits for a peer, as far as it takes it."""
        queue = peer.queue
        try:
            while queue:
                data = queue[0]
                sent = peer.send(data)
                peer.waiting -= sent
                self._waiting -= sent
                if sent < len(data):
                    queue[0] = data[sent:]
                    return
                queue.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._waiting -= peer.waiting
            peer.waiting = 0
            queue.clear()
        self._epoll.modify(peer.fd, _READ)

    # --- connections

    def _accept(self, fd: int, now: float) -> None:
        cls, listener, users = self._listeners[fd]
        for _ in range(ACCEPTED):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._epoll.unregister(fd)
                    self._resting.append(fd)
                return
            self._admit(cls, connection, users, now)

    def _admit(self, cls: int, connection: socket.socket, users: Collection[int], now: float) -> None:
        try:
            _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            # An uid above 2**31 comes as a negative number.
            if uid & 0xFFFFFFFF not in users or len(self._by_fd) >= self._most:
                self._counters["connections_refused"] += 1
                connection.close()
                return
            connection.setblocking(False)
            connection.send(_HELLO)
        except OSError:  # it has gone already
            connection.close()
            return
        if len(self._greeting) >= MAX_GREETING:
            self._fault(next(iter(self._greeting)))
        peer = PeerSocket(cls, connection, now)
        self._greeting[peer] = None
        self._by_fd[peer.fd] = peer
        self._epoll.register(peer.fd, _READ)

    def _fault(self, peer: PeerSocket) -> None:
        self._counters["connections_faulty"] += 1
        self.close_peer(peer)

    def close_peer(self, peer: PeerSocket) -> None:
        """End a connection. What waits for it is gone. Its peer may make another one."""
        if peer.closed:
            return
        peer.closed = True
        del self._by_fd[peer.fd]
        self._greeting.pop(peer, None)
        if peer.ident:
            del self._peers[peer.cls][peer.ident]
        self._waiting -= peer.waiting
        peer.waiting = 0
        peer.queue.clear()
        peer.batch.clear()
        self._epoll.unregister(peer.fd)
        peer.socket.close()

    def tick(self, now: float) -> None:
        """Close the connections that have not greeted in time, and accept again after a lack of descriptors."""
        while self._greeting:
            peer = next(iter(self._greeting))
            if now - peer.connected_at < GREETING_S:
                break
            self._fault(peer)
        resting, self._resting = self._resting, []
        for fd in resting:
            self._epoll.register(fd, _READ)

    def close(self, linger_s: float) -> None:
        """Accept nobody any more. What waits for peers gets `linger_s` to leave. Then every connection ends."""
        for fd, (_, listener, _) in self._listeners.items():
            if fd not in self._resting:
                self._epoll.unregister(fd)
            listener.close()
        self._listeners.clear()
        until = time.monotonic() + linger_s
        with select.epoll() as epoll:
            for peer in self._by_fd.values():
                if peer.queue:
                    epoll.register(peer.fd, _WRITE)
            while self._waiting and (left := until - time.monotonic()) > 0:
                for fd, _ in epoll.poll(left):
                    peer = self._by_fd[fd]
                    self._write_on(peer)
                    if not peer.queue:
                        epoll.unregister(fd)
        for peer in list(self._by_fd.values()):
            self.close_peer(peer)
