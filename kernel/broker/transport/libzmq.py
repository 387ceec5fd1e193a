"""The broker's sockets on libzmq: a ROUTER for each class of peers.

Rules (docs/design/wire.md section 6).
- The descriptors of libzmq are waited on here, because `zmq_poll` asks each socket twice in a wake-up. libzmq signals
  on a descriptor only once, and any call on the socket may use the signal up. So a socket that was sent on is asked
  before the loop waits.
- Sends never block (ROUTER_MANDATORY, NOBLOCK). What a peer cannot take waits here, in order. A peer with more than
  MAX_WAITING_PEER bytes, or the one that makes it more than MAX_WAITING_ALL for all, is given up. Live news are dropped
  instead.
- libzmq asks the system for the user of a connection (IPC_FILTER_UID) before it reads a byte.
- A routing id that a living connection has is not handed over: the second connection is closed.
- A message has exactly two parts, routing id and frame. A peer that sends more parts could make one of them look like
  somebody else's routing id, so the parts are counted (RCVMORE). This costs as much as a receive. It is not done for
  known peers with a random routing id of 16 bytes: a further part of a longer message never equals such an id, so it
  is handled as a stranger's. There the parts are counted, and the next message is read correctly.
"""

from __future__ import annotations

import errno
import os
import select
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Sequence
from contextlib import suppress
from typing import Final

import zmq
import zmq.backend

from goondan.kernel.broker.state.bus import Lossy
from goondan.kernel.broker.transport import MAX_WAITING_ALL, MAX_WAITING_PEER
from goondan.schemas.transport import ROUTING_ID_BYTES
from goondan.schemas.wire import codec, errors

#: How soon a send to a peer that could take no more is tried again (seconds), and how late, when no such peer takes
#: anything: one that was stopped shall not keep the broker busy.
BLOCKED_RETRY_S: Final = 0.002
STUCK_RETRY_S: Final = 0.1
#: How long greeting and READY may take (milliseconds).
HANDSHAKE_MS: Final = 10_000
#: Connections that wait to be accepted, for each class.
BACKLOG: Final = 4096

_Receive = Callable[[int], bytes]
_Option = Callable[[int], int]
# Plain integers: pyzmq's enums cost a look-up on every call.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_RCVMORE: Final = int(zmq.RCVMORE)


class LibzmqTransport:
    """The ROUTER sockets of a broker."""

    def __init__(self, epoll: select.epoll, counters: Counter[str], known: Sequence[Container[bytes]]) -> None:
        """`known`: for each class the routing ids of the connections that have said hello."""
        self._known = known
        self._epoll = epoll
        self._counters = counters
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, 16)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._classes: dict[int, int] = {}
        self._senders: list[Callable[[bytes, int], object]] = []
        self._receivers: list[tuple[_Receive, _Option]] = []
        #: For each class: whether its descriptor has signalled, or its quota was used up.
        self.due: list[bool] = []
        #: The classes on whose sockets was sent since the last wait: a send may have used the signal up.
        self._sent_on: set[int] = set()
        #: What peers did not take, by class and routing id, and the bytes of it: in all, and for each peer.
        self._blocked: dict[tuple[int, bytes], deque[bytes]] = {}
        self._waiting = 0
        self._waiting_for: Counter[tuple[int, bytes]] = Counter()
        #: When it is tried again (the broker's clock), and how long that is after the last try.
        self._retry_at, self._retry_s = 0.0, BLOCKED_RETRY_S
        #: The peers that `send` tells of next.
        self._gone: list[tuple[int, bytes]] = []

    def listen(self, path: str, users: Collection[int], high_water: int) -> None:
        """Bind the next class's socket. Raises GoondanError E_INTERNAL when libzmq cannot tell who connects."""
        socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES),
            (zmq.SNDHWM, high_water),
            (zmq.RCVHWM, high_water),
            (zmq.BACKLOG, BACKLOG),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        ):
            socket.setsockopt(option, value)
        for uid in users:
            try:
                # The option takes four bytes. In pyzmq they are a signed number.
                socket.setsockopt(zmq.IPC_FILTER_UID, uid if uid < 1 << 31 else uid - (1 << 32))
            except zmq.ZMQError as error:
                message = f"this libzmq cannot tell who connects ({error})"
                fix = "Install the pyzmq wheel that `make setup` takes."
                raise errors.fail("E_INTERNAL", message, suggestion=fix) from None
        with suppress(FileNotFoundError):
            os.unlink(path)
        socket.bind(f"ipc://{path}")
        os.chmod(path, 0o600)
        fd = int(socket.getsockopt(zmq.FD))
        self._classes[fd] = len(self._sockets)
        self._epoll.register(fd, select.EPOLLIN)
        self._sockets.append(socket)
        # pyzmq's own classes below the Python layer: the layer adds options we do not use, at a third of the cost.
        self._senders.append(zmq.backend.Socket.send.__get__(socket))
        self._receivers.append((zmq.backend.Socket.recv.__get__(socket), zmq.backend.Socket.get.__get__(socket)))
        self.due.append(True)

    # --- waiting and receiving

    def wait(self, seconds: float, now: float) -> bool:
        """Sleep until there is something to do. Whether there was."""
        due = self.due
        if self._blocked:
            if now >= self._retry_at:
                self._retry_s = BLOCKED_RETRY_S if self._retry() else min(2 * self._retry_s, STUCK_RETRY_S)
                self._retry_at = now + self._retry_s
            seconds = min(seconds, self._retry_at - now)
        for cls in self._sent_on:
            if not due[cls] and self._receivers[cls][1](_EVENTS) & _POLLIN:
                due[cls], seconds = True, 0.0
        self._sent_on.clear()
        ready = self._epoll.poll(seconds)
        classes = self._classes
        for fd, _ in ready:
            signalled = classes.get(fd)
            if signalled is not None:
                due[signalled] = True
        return bool(ready) or any(due)

    def receive(self, cls: int, quota: int) -> Sequence[tuple[bytes, bytes]]:
        """At most `quota` messages of a class."""
        if not self.due[cls]:
            return ()
        self.due[cls] = False
        receive, option = self._receivers[cls]
        known = self._known[cls]
        messages: list[tuple[bytes, bytes]] = []
        try:
            for count in range(quota):
                # An empty receive costs twice as much as this question, and usually there is one message.
                if count == 1 and not option(_EVENTS) & _POLLIN:
                    break
                ident = receive(_NOBLOCK)
                if ident in known and len(ident) == ROUTING_ID_BYTES:
                    messages.append((ident, receive(_NOBLOCK)))
                elif option(_RCVMORE):
                    data = receive(_NOBLOCK)
                    if option(_RCVMORE):
                        self._discard(receive, option)
                    else:
                        messages.append((ident, data))
                else:
                    self._counters["frames_multipart"] += 1
            else:
                self.due[cls] = True  # its quota is used; there may be more
        except zmq.Again:
            pass
        # A signal without a message may be a peer that takes something again; who says something may as well.
        if (blocked := self._blocked) and (not messages or any((cls, ident) in blocked for ident, _ in messages)):
            self._retry_at = 0.0
        return messages

    def _discard(self, receive: _Receive, option: _Option) -> None:
        self._counters["frames_multipart"] += 1
        while option(_RCVMORE):
            receive(_NOBLOCK)

    # --- sending

    def send(self, frames: Sequence[tuple[int, bytes, bytes]]) -> Sequence[tuple[int, bytes]]:
        """Hand frames to libzmq, or keep those of a peer that can take no more. See Transport."""
        blocked = self._blocked
        for cls, ident, data in frames:
            if blocked and (cls, ident) in blocked:
                self._block(cls, ident, data)
                continue
            send = self._senders[cls]
            self._sent_on.add(cls)
            try:
                send(ident, _MORE)
                send(data, _NOBLOCK)
            except zmq.Again:
                self._block(cls, ident, data)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._counters["peers_unreachable"] += 1
                self._gone.append((cls, ident))
        gone = self._gone
        if gone:
            self._gone = []
        return gone

    def tick(self, now: float) -> None:
        """Nothing: libzmq has clocks of its own."""

    def _retry(self) -> bool:
        """Try again to send what peers did not take. Whether one took something."""
        before = self._waiting
        for (cls, ident), queue in list(self._blocked.items()):
            send = self._senders[cls]
            self._sent_on.add(cls)
            try:
                while queue:
                    send(ident, _MORE)
                    send(queue[0], _NOBLOCK)
                    self._waiting -= len(queue[0])
                    self._waiting_for[cls, ident] -= len(queue.popleft())
                self._unblock(cls, ident)
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._give_up(cls, ident)
        return self._waiting < before

    def _block(self, cls: int, ident: bytes, data: bytes) -> None:
        """A peer takes no more: keep its frames in order, or give a peer up that has too many."""
        if isinstance(data, Lossy):
            self._counters["live_dropped"] += 1
            return
        if (cls, ident) not in self._blocked:
            self._blocked[cls, ident], self._retry_s, self._retry_at = deque(), BLOCKED_RETRY_S, 0.0
        self._blocked[cls, ident].append(data)
        self._waiting += len(data)
        self._waiting_for[cls, ident] += len(data)
        if self._waiting_for[cls, ident] > MAX_WAITING_PEER or self._waiting > MAX_WAITING_ALL:
            self._counters["peers_dropped_full"] += 1
            self._give_up(cls, ident)

    def _give_up(self, cls: int, ident: bytes) -> None:
        self._unblock(cls, ident)
        self._gone.append((cls, ident))

    def _unblock(self, cls: int, ident: bytes) -> None:
        self._blocked.pop((cls, ident), None)
        self._waiting -= self._waiting_for.pop((cls, ident), 0)

    def close(self, linger_s: float) -> None:
        """End the sockets. What waits for peers gets `linger_s` to leave."""
        for fd in self._classes:
            self._epoll.unregister(fd)
        for socket in self._sockets:
            socket.close(linger=round(linger_s * 1000))
        self._context.term()
