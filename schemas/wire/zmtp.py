"""ZMTP, the bytes of a ZeroMQ connection, without a socket: greeting, READY, frames, PING.

It is version 3.1 with the mechanism NULL, as far as a DEALER and a ROUTER need it. The other side may be libzmq or any
other implementation of version 3. Whatever it sends is bounded:

- `Handshake` reads the greeting and READY: 64 bytes and a command of at most MAX_READY bytes.
- `Messages` reads what follows. A message has one part. A message of several parts is dropped and counted. A part over
  the limit ends the connection before its body is read. PING is answered, other commands are skipped.

Source: docs/design/wire.md section 10; ZMTP 3.1 (rfc.zeromq.org/spec/37).
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Final

#: The longest READY (bytes). libzmq's own has about 50; a peer may add properties of its own.
MAX_READY: Final = 4096
#: The longest command after READY (bytes). A PING has at most 23.
MAX_COMMAND: Final = 512
#: The most commands in the bytes that were read together.
MAX_COMMANDS: Final = 256

_GREETING_BYTES: Final = 64
_MAJOR_AT, _MECHANISM_AT, _MECHANISM_END = 10, 12, 32
_MECHANISM: Final = b"NULL".ljust(_MECHANISM_END - _MECHANISM_AT, b"\0")
#: The first ten bytes: libzmq puts the length of a routing id of version 1 into the padding, and nobody reads it.
_SIGNATURE: Final = b"\xff\0\0\0\0\0\0\0\1\x7f"
#: Version 3.1, NULL, no server in the sense of other mechanisms.
GREETING: Final = (_SIGNATURE + b"\3\1" + _MECHANISM).ljust(_GREETING_BYTES, b"\0")

# The flags of a frame. Every other bit is zero.
_MORE, _LONG, _COMMAND = 1, 2, 4
_FLAGS: Final = frozenset({0, _MORE, _LONG, _MORE | _LONG, _COMMAND, _COMMAND | _LONG})
_SHORT_HEAD, _LONG_HEAD = 2, 9
_SHORT_MOST: Final = 255
#: Flags and size of a long frame.
_LONG_FORM: Final = struct.Struct(">BQ")
_PING: Final = b"\4PING"
_PONG: Final = b"\4PONG"
_READY: Final = b"\5READY"
_ERROR: Final = b"\5ERROR"
#: A PING has a time to live of two bytes after its name, and a context of at most sixteen, which its PONG repeats.
_CONTEXT_AT, _CONTEXT_MOST = len(_PING) + 2, 16


class ZmtpError(Exception):
    """The bytes are no ZMTP that we speak. The connection ends; nothing is answered."""


def head(size: int) -> bytes:
    """What stands before a message of `size` bytes."""
    return bytes((0, size)) if size <= _SHORT_MOST else _LONG_FORM.pack(_LONG, size)


def ready(socket_type: bytes) -> bytes:
    """The command READY of a socket. It gives itself no routing id."""
    return _command(_READY + b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type)


def _command(body: bytes) -> bytes:
    if len(body) <= _SHORT_MOST:
        return bytes((_COMMAND, len(body))) + body
    return bytes((_COMMAND | _LONG,)) + len(body).to_bytes(8, "big") + body


class Handshake:
    """The other side's greeting and READY. After `done` the rest of the bytes is for `Messages`."""

    def __init__(self, types: Collection[bytes]) -> None:
        """`types` are the socket types of the other side that we talk to."""
        self._types = types
        self._data = bytearray()
        self.done = False
        #: What came after READY.
        self.rest = b""

    def feed(self, data: bytes) -> bool:
        """Take bytes. True when the handshake is over. Raises ZmtpError."""
        known = self._data
        known += data
        _check_greeting(known)
        if len(known) < _GREETING_BYTES + _SHORT_HEAD:
            return False
        flags = known[_GREETING_BYTES]
        if flags == _COMMAND:
            start, size = _GREETING_BYTES + _SHORT_HEAD, known[_GREETING_BYTES + 1]
        elif flags == _COMMAND | _LONG:
            start = _GREETING_BYTES + _LONG_HEAD
            if len(known) < start:
                return False
            size = int.from_bytes(known[_GREETING_BYTES + 1 : start], "big")
        else:
            raise ZmtpError("the greeting is followed by something else than a command")
        if size > MAX_READY:
            raise ZmtpError(f"a READY of {size} bytes, limit {MAX_READY}")
        if len(known) < start + size:
            return False
        self._check_ready(bytes(known[start : start + size]))
        self.rest = bytes(known[start + size :])
        self._data = bytearray()
        self.done = True
        return True

    def _check_ready(self, body: bytes) -> None:
        if body.startswith(_ERROR):
            raise ZmtpError("the other side refuses the connection")
        if not body.startswith(_READY):
            raise ZmtpError("the first command is no READY")
        if _properties(body, len(_READY)).get(b"socket-type") not in self._types:
            raise ZmtpError("a socket of a type that does not fit")


def _check_greeting(known: bytearray) -> None:
    """Raise ZmtpError as soon as the first bytes cannot become a greeting that we speak."""
    if not known:
        return
    if not known.startswith(b"\xff") or known[9:10] not in (bytearray(), bytearray(b"\x7f")):
        raise ZmtpError("no greeting")
    if len(known) > _MAJOR_AT and known[_MAJOR_AT] < 3:
        raise ZmtpError(f"version {known[_MAJOR_AT]} is older than 3")
    if len(known) >= _MECHANISM_END and known[_MECHANISM_AT:_MECHANISM_END] != _MECHANISM:
        raise ZmtpError("another mechanism than NULL")


def _properties(body: bytes, at: int) -> dict[bytes, bytes]:
    """The properties of READY from `at` on, by name in small letters. Of two equal names the last one counts."""
    found = {}
    while at < len(body):
        value_at = at + 1 + body[at] + 4
        size = int.from_bytes(body[value_at - 4 : value_at], "big")
        if body[at] == 0 or value_at + size > len(body):
            raise ZmtpError("a READY with a broken property")
        found[body[at + 1 : value_at - 4].lower()] = body[value_at : value_at + size]
        at = value_at + size
    return found


class Messages:
    """The bytes after READY as messages.

    `feed` what was read, then `take` until it gives none, or until enough is taken; as long as there is `more`, take on
    before you feed again.
    """

    __slots__ = ("_at", "_commands", "_max", "_needed", "_partial", "_several", "answers", "more", "multipart")

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: the largest message."""
        self._max = max_bytes
        #: What `take` has not looked at to its end; empty when there is no such thing.
        self.more = b""
        self._at = 0
        #: The beginning of a frame, and how many bytes must be there before it is looked at again.
        self._partial = bytearray()
        self._needed = 0
        self._several = False
        self._commands = 0
        #: What must be sent back, in order. The shell sends it and empties the list.
        self.answers: list[bytes] = []
        #: Messages of several parts that were dropped.
        self.multipart = 0

    def feed(self, data: bytes) -> None:
        """Take bytes."""
        self._commands = 0
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            data = bytes(self._partial)
            self._partial = bytearray()
        self.more = self.more[self._at :] + data if self.more else data
        self._at = 0

    def take(self, most: int) -> list[bytes]:
        """The next messages, at most `most`; some may be empty. None of them: the rest is not there yet. Raises
        ZmtpError, after what came before the fault was taken.
        """
        data, at = self.more, self._at
        found: list[bytes] = []
        end = len(data)
        try:
            while at < end and len(found) < most:
                flags = data[at]
                if flags > _LONG and flags not in _FLAGS:
                    raise ZmtpError(f"a frame with the flags {flags}")
                start = at + (_LONG_HEAD if flags & _LONG else _SHORT_HEAD)
                if start > end:
                    return self._keep(found, at, start)
                size = _LONG_FORM.unpack_from(data, at)[1] if flags & _LONG else data[at + 1]
                if size > (self._max if flags < _COMMAND else MAX_COMMAND):
                    raise ZmtpError(f"a frame of {size} bytes is too large")
                stop = start + size
                if stop > end:
                    return self._keep(found, at, stop)
                if flags & ~_LONG or self._several:
                    self._put_aside(flags, data[start:stop])
                else:
                    found.append(data[start:stop])
                at = stop
        except ZmtpError:
            if not found:
                raise
        self._at = at
        if at == end:
            self.more = b""
        return found

    def _keep(self, found: list[bytes], at: int, stop: int) -> list[bytes]:
        """Wait for the rest of the frame at `at`, up to `stop`."""
        self._partial = bytearray(self.more[at:])
        self._needed = stop - at
        self.more = b""
        return found

    def _put_aside(self, flags: int, body: bytes) -> None:
        """Handle a frame that is no message: a command, or a part of a message of several."""
        if not flags & _COMMAND:
            self.multipart += not flags & _MORE
            self._several = bool(flags & _MORE)
            return
        self._commands += 1
        if self._commands > MAX_COMMANDS:
            raise ZmtpError(f"more than {MAX_COMMANDS} commands at once")
        if body.startswith(_PING):
            self.answers.append(_command(_PONG + body[_CONTEXT_AT : _CONTEXT_AT + _CONTEXT_MOST]))
