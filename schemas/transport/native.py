"""A DEALER socket of its own on a Unix socket: what a link needs of ZeroMQ, in its event loop and without a thread.

A connection starts with the look at who listens (`admits`). Then our greeting and READY go out at once. After the
other side's READY an empty message follows: the probe that makes a broker ask for hello. libzmq takes a message before
its own READY for a fault. A connection that cannot be made, or that is lost, is tried again every RECONNECT_S, and
after EAGER_TRIES every PATIENT_RECONNECT_S: a thousand agents that wait for a broker must leave it a processor to start
on.

Source: docs/design/wire.md section 10; schemas/wire/zmtp.py has the bytes.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from contextlib import suppress
from typing import Any, Final

from goondan.schemas.transport import Transport
from goondan.schemas.wire.zmtp import GREETING, Handshake, Messages, ZmtpError, head, ready

#: How soon a connection that failed is tried again (seconds).
RECONNECT_S: Final = 0.02
#: The same after so many tries in a row.
EAGER_TRIES: Final = 50
PATIENT_RECONNECT_S: Final = 0.1
#: The most bytes that are read at once. What is read together is handled together, so it is also a bound on that.
READ_BYTES: Final = 64 << 10
#: The most messages that are cut out of them together.
BATCH: Final = 128
#: The least bytes that are sent together, when there are as many.
WRITE_BYTES: Final = 256 << 10
#: The socket types that the broker may have. A REP waits for an empty part before each message.
_OTHERS: Final = frozenset({b"ROUTER", b"DEALER"})
_HELLO: Final = GREETING + ready(b"DEALER")
_PROBE: Final = head(0)


class NativeTransport(Transport):
    """A socket of a link. `admits` is asked before a byte is sent; `Transport` has the other callbacks."""

    def __init__(self, *args: Any, **callbacks: Any) -> None:
        """The arguments are those of Transport."""
        super().__init__(*args, **callbacks)
        self._socket: socket.socket | None = None
        #: A socket that could not be connected yet: the next try takes it.
        self._unconnected: socket.socket | None = None
        self._tries = 0
        self._retry: asyncio.TimerHandle | None = None
        self._handshake: Handshake | None = None
        self._messages = Messages(self._max_bytes)
        #: Messages that `take` has not given yet.
        self._batch: deque[bytes] = deque()
        self._unsent = b""
        self._closed = False

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connect, now or as soon as there is somebody who listens."""
        self._loop = loop
        self._connect(loop)

    def take(self) -> bytes | None:
        """The next message; it may be empty. None: there is none now."""
        batch, messages = self._batch, self._messages
        if messages.more and not batch:
            try:
                batch.extend(messages.take(BATCH))
            except ZmtpError:
                self._lose()
                return None
            if messages.answers:
                answers = b"".join(messages.answers)
                messages.answers.clear()
                self._send(answers)
        return batch.popleft() if batch else None

    def send(self, messages: deque[bytes]) -> None:
        """Send as many of the messages as go out now, and take those out of the queue. `on_writable` is called when
        further ones may be sent. Without a connection, none goes out.
        """
        while messages and self._socket is not None and self._handshake is None and not self._unsent:
            parts: list[bytes] = []
            size = 0
            while messages and size < WRITE_BYTES:
                data = messages.popleft()
                parts += (head(len(data)), data)
                size += len(data)
            self._send(b"".join(parts))

    def pause(self) -> None:
        """Read nothing until `resume`."""
        self._paused = True
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        if self._socket is not None and self._loop is not None:
            self._loop.add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        """End the connection, and make no other one. What was not sent is gone. A second call does nothing."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        if self._unconnected is not None:
            self._unconnected.close()
            self._unconnected = None
        self._drop()

    async def drain(self, messages: deque[bytes]) -> None:
        """Send these messages, and what is left from before. It waits as long as the other side does not read."""
        sock, loop = self._socket, self._loop
        if sock is None or loop is None or self._handshake is not None:
            return
        parts = [self._unsent]
        for data in messages:
            parts += (head(len(data)), data)
        self.pause()
        loop.remove_writer(sock.fileno())
        with suppress(OSError):
            await loop.sock_sendall(sock, b"".join(parts))

    # --- the connection

    def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        self._retry = None
        sock, self._unconnected = self._unconnected, None
        try:
            if sock is None:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            sock.connect(self._path)
        except OSError:
            self._unconnected = sock
            self._connect_later(loop)
            return
        self._tries = 0
        if not self._admits(sock.fileno()) or self._closed:
            sock.close()
            self._connect_later(loop)
            return
        self._socket = sock
        self._handshake = Handshake(_OTHERS)
        self._messages = Messages(self._max_bytes)
        if not self._paused:
            loop.add_reader(sock.fileno(), self._read)
        self._send(_HELLO)

    def _connect_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._closed and self._retry is None:
            self._tries += 1
            pause = RECONNECT_S if self._tries <= EAGER_TRIES else PATIENT_RECONNECT_S
            self._retry = loop.call_later(pause, self._connect, loop)

    def _drop(self) -> None:
        sock, self._socket = self._socket, None
        if sock is None or self._loop is None:
            return
        self._loop.remove_reader(sock.fileno())
        self._loop.remove_writer(sock.fileno())
        sock.close()
        self._unsent = b""
        self._handshake = None
        self._batch.clear()
        self._messages = Messages(self._max_bytes)

    def _lose(self) -> None:
        if self._socket is None or self._loop is None:
            return
        self._drop()
        self._connect_later(self._loop)
        self._on_lost()

    # --- bytes

    def _read(self) -> None:
        sock = self._socket
        if sock is None:
            return
        if self._batch or self._messages.more:  # first what was read before
            self._on_messages()
            return
        try:
            data = sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        if self._handshake is None:
            self._messages.feed(data)
        elif not self._greeted(self._handshake, data):
            return
        self._on_messages()

    def _greeted(self, handshake: Handshake, data: bytes) -> bool:
        try:
            if not handshake.feed(data):
                return False
        except ZmtpError:
            self._lose()
            return False
        self._handshake = None
        self._messages.feed(handshake.rest)
        self._send(_PROBE)
        return True

    def _send(self, data: bytes) -> None:
        """Send bytes, or keep those that do not fit. After an error the bytes are gone: what the other side has sent is
        still read, and its end is noticed there.
        """
        sock, loop = self._socket, self._loop
        if sock is None or loop is None:
            return
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return
        if sent < len(data):
            self._unsent = data[sent:]
            loop.add_writer(sock.fileno(), self._write_on)

    def _write_on(self) -> None:
        sock, loop = self._socket, self._loop
        if sock is None or loop is None:
            return
        try:
            self._unsent = self._unsent[sock.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._unsent = b""
        if not self._unsent:
            loop.remove_writer(sock.fileno())
            self._on_writable()
