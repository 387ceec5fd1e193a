"""What a command reads from a descriptor: lines as they come, or all of standard input.

Lines are read in a thread of their own, and are an asynchronous iterator with bounds. A terminal, a pipe and a file all
work the same way. No descriptor is made non-blocking, because a shell may share it. The thread waits while too many
lines are unread, so a file of any size takes constant memory. A line that is too long is reported without its content.
The thread is a daemon, so a silent terminal does not delay the end of the process.

An argument that is too large for a command line is read whole (docs/design/commands.md section 5).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from goondan.schemas.wire import blobs, errors

#: The argument that means: read it from standard input.
FROM_STDIN: Final = "-"
#: Bytes read at once.
CHUNK: Final = 65536
#: The most lines that wait for their consumer, and the most bytes in them. One chunk may come on top.
MAX_WAITING_LINES: Final = 1024
MAX_WAITING_BYTES: Final = 4 << 20
#: The longest line that is a message (bytes): what an event may hold, less its other fields.
MAX_LINE_BYTES: Final = (16 << 20) - (64 << 10)
#: The most bytes of the lines that are worked on at once. A longer line is worked on alone.
MAX_LINES_BYTES: Final = 16 << 20


def read_all(limit: int, fd: int = 0) -> bytes:
    """Read all of standard input. Raises GoondanError E_FRAME_TOO_LARGE for more than `limit` bytes, and E_USAGE when
    it is closed.
    """
    parts, size = [], 0
    try:
        while chunk := os.read(fd, CHUNK):
            size += len(chunk)
            if size > limit:
                raise blobs.too_large(size, limit)
            parts.append(chunk)
    except OSError as error:
        raise errors.fail("E_USAGE", f"standard input cannot be read: {error.strerror}") from None
    return b"".join(parts)


class Line(msgspec.Struct, frozen=True):
    """One line."""

    #: Its number, from 1.
    number: int
    #: Its bytes without its end. None: it was longer than the limit.
    data: bytes | None
    #: How many bytes it has.
    size: int


class LineSplitter:
    """Takes chunks and returns lines. Pure. `limit` is the longest line that is kept (bytes)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._number = 0

    def feed(self, chunk: bytes) -> list[Line]:
        """The lines that end in this chunk."""
        pieces = chunk.split(b"\n")
        lines = []
        for piece in pieces[:-1]:
            self._keep(piece)
            lines.append(self._end())
        self._keep(pieces[-1])
        return lines

    def finish(self) -> list[Line]:
        """The last line, when the input does not end with a line end."""
        return [self._end()] if self._size else []

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size <= self._limit:
            if piece:
                self._parts.append(piece)
        else:
            self._parts.clear()

    def _end(self) -> Line:
        self._number += 1
        size, data = self._size, b"".join(self._parts).removesuffix(b"\r")
        self._parts.clear()
        self._size = 0
        return Line(self._number, data if size <= self._limit else None, size)


class Room:
    """Limits the lines that are worked on at once: their number, and MAX_LINES_BYTES for their bytes. One task takes
    room, several give it back.
    """

    def __init__(self, lines: int) -> None:
        self._lines = lines
        self._share = MAX_LINES_BYTES // lines
        self._free = asyncio.Semaphore(lines)

    async def take(self, line: Line) -> int:
        """Wait until there is room for this line. Returns the amount to give back."""
        taken = min(self._lines, 1 + line.size // self._share)
        for _ in range(taken):
            await self._free.acquire()
        return taken

    def give(self, taken: int) -> None:
        """Give back the room of a line that is done."""
        for _ in range(taken):
            self._free.release()


class LineReader:
    """Iterate over the lines of `fd`, at most `limit` bytes each. Make it inside the running loop."""

    def __init__(self, fd: int, limit: int) -> None:
        self._fd = fd
        self._splitter = LineSplitter(limit)
        self._loop = asyncio.get_running_loop()
        self._lines: deque[Line] = deque()
        self._bytes = 0
        self._ended = False
        self._arrived = asyncio.Event()
        self._room = threading.Event()
        self._room.set()
        self.error: OSError | None = None
        threading.Thread(target=self._read, name="lines", daemon=True).start()

    async def __aiter__(self) -> AsyncIterator[Line]:
        while True:
            while self._lines:
                line = self._lines.popleft()
                self._bytes -= len(line.data or b"")
                if not self._full():
                    self._room.set()
                yield line
            if self._ended:
                return
            self._arrived.clear()
            await self._arrived.wait()

    async def next_new(self) -> Line | None:
        """The next line that comes from now on. None at the end. Earlier lines wait for their reader."""
        before = list(self._lines)
        self._lines.clear()
        try:
            while not self._lines and not self._ended:
                self._arrived.clear()
                await self._arrived.wait()
            line = self._lines.popleft() if self._lines else None
        finally:
            self._lines.extendleft(reversed(before))
        if line is not None:
            self._bytes -= len(line.data or b"")
            if not self._full():
                self._room.set()
        return line

    def _full(self) -> bool:
        return len(self._lines) >= MAX_WAITING_LINES or self._bytes >= MAX_WAITING_BYTES

    def _read(self) -> None:
        while True:
            self._room.wait()
            try:
                chunk = os.read(self._fd, CHUNK)
            except OSError as error:
                self.error = error
                chunk = b""
            # The loop has to take this chunk first. Then it is known whether there is room for the next one.
            self._room.clear()
            try:
                self._loop.call_soon_threadsafe(self._take, chunk)
            except RuntimeError:
                return  # the loop is closed: nobody reads any more
            if not chunk:
                return

    def _take(self, chunk: bytes) -> None:
        lines = self._splitter.feed(chunk) if chunk else self._splitter.finish()
        self._ended = not chunk
        self._lines.extend(lines)
        self._bytes += sum(len(line.data or b"") for line in lines)
        if not self._full():
            self._room.set()
        if lines or self._ended:
            self._arrived.set()
