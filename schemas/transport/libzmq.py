"""A link's connection on libzmq: a DEALER, in the event loop of its process. libzmq has a thread that reads and writes.

The descriptor. libzmq signals on it only once, and each send or receive may use the signal up. So whoever was woken
takes until nothing is left, and the socket is asked after what was sent together. When its answer is no, the next
message signals again, and nothing is asked before. One missed signal hangs a link.

The connection. libzmq makes it, and makes it again, without a word. So nothing is believed of the listener before
`admits` has seen the descriptor that a message came from. From then on the connection is known by its descriptor and
inode: while both are the same after messages were received, the messages came over that connection; when they are not,
it is lost, and what was received goes nowhere. Sends look before, so what is sent in the moment of a reconnect can
reach a listener that was not looked at yet. It holds no token: those are sent in a hello, and only on a connection that
has asked for one and was looked at.

Source: docs/design/wire.md section 5.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq
import zmq.backend

from goondan.schemas.transport import ROUTING_ID_BYTES, Transport

#: How soon a lost connection is made again (milliseconds).
RECONNECT_MS: Final = 20
#: How soon a send is tried again when libzmq took no more (seconds).
RETRY_SEND_S: Final = 0.002
#: The most messages that libzmq keeps, in each direction. Credit keeps us far below.
HIGH_WATER: Final = 8192
#: The most messages that are received together.
BATCH: Final = 128
#: How long what was handed over may take to leave at the end (milliseconds).
LINGER_MS: Final = 1000
#: The sockets of a context: one, and some that libzmq uses itself.
MAX_SOCKETS: Final = 8

# Plain integers: pyzmq's enums cost a look-up on every call.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_EVENTS: Final = int(zmq.EVENTS)
_RCVMORE: Final = int(zmq.RCVMORE)
_POLLIN: Final = int(zmq.POLLIN)
#: No connection that was admitted.
_NONE: Final = (-1, 0)


class LibzmqTransport(Transport):
    """A socket of a link. `Transport` has the callbacks."""

    def __init__(self, *args: Any, **callbacks: Any) -> None:
        """The arguments are those of Transport."""
        super().__init__(*args, **callbacks)
        self._context: zmq.backend.Context | None = None
        self._socket: zmq.backend.Socket | None = None
        self._fd = -1
        self._batch: deque[bytes] = deque()
        #: The descriptor and the inode of the connection that was admitted; (-1, 0) without one.
        self._connection = _NONE
        #: Whether the socket may have messages: the descriptor has signalled, or the socket said so.
        self._due = False
        self._looking: asyncio.Handle | None = None
        self._retry: asyncio.TimerHandle | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connect, now or as soon as there is somebody who listens."""
        self._loop = loop
        # The classes of pyzmq below its Python layer, which adds what we do not use: a third of the cost of a message.
        context = self._context = zmq.backend.Context(1)
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        socket = self._socket = zmq.backend.Socket(context, zmq.DEALER)
        # Random, so that nobody can guess it. Not with a leading zero, which libzmq keeps for itself.
        socket.set(zmq.ROUTING_ID, b"g" + os.urandom(ROUTING_ID_BYTES - 1))
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.PROBE_ROUTER, 1),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.RCVHWM, HIGH_WATER),
            (zmq.MAXMSGSIZE, self._max_bytes),
        ):
            socket.set(option, value)
        socket.connect(f"ipc://{self._path}")
        self._send_part, self._receive = socket.send, socket.recv
        self._option: Callable[[int], Any] = socket.get
        self._fd = int(self._option(zmq.FD))
        if not self._paused:
            loop.add_reader(self._fd, self._wake)
        self._due = True
        self._look_soon()

    # --- receiving

    def take(self) -> bytes | None:
        """The next message; it may be empty. None: there is none now."""
        if self._batch:
            return self._batch.popleft()
        if not self._due or self._socket is None:
            return None
        if self._connection is _NONE:
            return self._receive_first(self._socket)
        self._receive_batch()
        return self._batch.popleft() if self._batch else None

    def _receive_batch(self) -> None:
        """Receive what is there, of a connection that was admitted."""
        receive, option, batch = self._receive, self._option, self._batch
        try:
            for count in range(BATCH):
                batch.append(receive(_NOBLOCK))
                # An empty receive costs twice as much as this question, and usually there is one message.
                if count == 0 and not option(_EVENTS) & _POLLIN:
                    self._due = False
                    break  # the other parts of a message come with its first one, so this had one
                if option(_RCVMORE):
                    batch.pop()
                    self._drop_parts()
        except zmq.Again:
            self._due = False
        if not self._is_same():
            batch.clear()
            self._lose()
            self._ask_again()

    def _receive_first(self, socket: zmq.backend.Socket) -> bytes | None:
        """A message of a connection that was not looked at yet; None when it may not be used."""
        if not self._ask():
            return None
        try:
            part = socket.recv(_NOBLOCK, copy=False)
            if part.more:
                self._drop_parts()
                self._look_soon()
                return None
            fd = int(part.get(zmq.SRCFD))
        except zmq.ZMQError:
            self._look_soon()
            return None
        if not self._admits(fd) or self._socket is None:
            return None
        try:
            self._connection = fd, os.fstat(fd).st_ino
        except OSError:
            return None
        return part.bytes

    def _drop_parts(self) -> None:
        """Receive the other parts of a message of several: it is no frame."""
        while self._option(_RCVMORE):
            self._receive(_NOBLOCK)

    def _is_same(self) -> bool:
        """Whether the connection is the one that was admitted."""
        fd, inode = self._connection
        try:
            return os.fstat(fd).st_ino == inode
        except OSError:
            return False

    def _lose(self) -> None:
        self._connection = _NONE
        if self._retry is not None:  # what waited to be sent was for the connection that is gone
            self._retry.cancel()
            self._retry = None
        self._on_lost()

    def _ask_again(self) -> None:
        """Probe: the broker's question for a hello may be among the messages that went nowhere."""
        if self._socket is not None:
            self.send(deque((b"",)))

    # --- sending

    def send(self, messages: deque[bytes]) -> None:
        """Hand messages to libzmq, as many as it takes now."""
        loop = self._loop
        if self._socket is None or loop is None or self._retry is not None:
            return
        if self._connection is not _NONE and not self._is_same():
            self._lose()
            return
        send = self._send_part
        try:
            while messages:
                send(messages[0], _NOBLOCK)
                messages.popleft()
        except zmq.Again:
            self._retry = loop.call_later(RETRY_SEND_S, self._send_on)
        if self._due or self._ask():
            self._look_soon()

    def _send_on(self) -> None:
        self._retry = None
        if self._socket is not None:
            self._on_writable()

    # --- waking up

    def _ask(self) -> bool:
        """Ask the socket whether it has messages."""
        self._due = bool(self._option(_EVENTS) & _POLLIN)
        return self._due

    def _look_soon(self) -> None:
        """Take what is there in the next turn of the loop, unless somebody does so before."""
        if self._looking is None and self._loop is not None:
            self._looking = self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = None
        if self._due or self._batch:
            self._wake()

    def _wake(self) -> None:
        """The descriptor has signalled, or there is something to take."""
        if self._socket is None or self._paused:
            return
        self._due = True
        self._on_messages()

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self._paused = True
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        if self._socket is not None and self._loop is not None:
            self._loop.add_reader(self._fd, self._wake)
            self._due = True
            self._look_soon()

    # --- the end

    async def drain(self, messages: deque[bytes]) -> None:
        """Send these messages, and what libzmq has not sent yet. It waits as long as the other side does not read."""
        while messages and self._connection is not _NONE:
            if self._retry is not None:
                self._retry.cancel()
                self._retry = None
            self.send(messages)
            if messages:
                await asyncio.sleep(RETRY_SEND_S)
        context, loop = self._context, self._loop
        if context is not None and loop is not None:
            self._end(LINGER_MS)
            # `term` waits in libzmq until everything has left, and the loop must not wait.
            await loop.run_in_executor(None, context.term)

    def close(self) -> None:
        """End the connection. What was not sent is gone. A second call does nothing."""
        context = self._context
        if context is not None and self._socket is not None:
            self._end(0)
            context.term()

    def _end(self, linger_ms: int) -> None:
        socket, self._socket = self._socket, None
        if socket is None or self._loop is None:
            return
        self._loop.remove_reader(self._fd)
        for handle in (self._looking, self._retry):
            if handle is not None:
                handle.cancel()
        self._batch.clear()
        self._connection = _NONE
        socket.close(linger=linger_ms)
