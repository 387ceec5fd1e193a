"""What is written to a socket that may have no room for it: the rest waits, in order, until there is room.

Source: docs/design/tools.md section 11.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable


class Outlet:
    """The writing half of a socket that does not block. Use from the loop's thread only."""

    def __init__(self, to: socket.socket, loop: asyncio.AbstractEventLoop, *, on_broken: Callable[[], None]) -> None:
        """`to` stays the caller's, who calls `close` before it closes the socket. `on_broken` is called when nobody can
        be written to any more. What waited is dropped before.
        """
        self._socket = to
        self._fd = to.fileno()
        self._loop = loop
        self._on_broken = on_broken
        self._waiting: list[bytes | memoryview] = []
        self._watching = False
        #: Bytes that are not written yet.
        self.unwritten = 0

    def put(self, data: bytes) -> None:
        """Queue data. The next `flush` writes it."""
        if self._fd >= 0:
            self._waiting.append(data)
            self.unwritten += len(data)

    @property
    def is_blocked(self) -> bool:
        """Whether the socket had no room. The rest is written by itself when it has."""
        return self._watching

    def flush(self) -> None:
        """Write everything that there is room for."""
        if self._fd < 0 or not self._waiting:
            return
        data = self._waiting[0] if len(self._waiting) == 1 else b"".join(self._waiting)
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            self._on_broken()
            return
        self._waiting = [memoryview(data)[sent:]] if sent < len(data) else []
        self.unwritten = len(data) - sent
        self._watch(bool(self._waiting))

    def close(self) -> None:
        """Drop what waits, and write nothing more. Safe to call again."""
        if self._fd >= 0:
            self._watch(False)
            self._fd = -1
            self._waiting.clear()
            self.unwritten = 0

    def _watch(self, wanted: bool) -> None:
        if wanted != self._watching:
            self._watching = wanted
            if wanted:
                self._loop.add_writer(self._fd, self.flush)
            else:
                self._loop.remove_writer(self._fd)
