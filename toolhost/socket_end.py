"""One end of a stream socket that does not block: it reads once for each wake-up, and what it writes waits for room.

So a peer that sends much does not starve others, and one that does not read keeps nobody waiting. What the bytes mean
is the user's business: frames of a jail's worker, frames of the tool host, lines of an MCP server.

Source: docs/design/sandbox.md section 5; docs/design/tools.md section 11.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

#: Bytes of one read: a socketpair holds about 200 KiB.
READ_BYTES: Final = 65536


class SocketEnd:
    """Use from the loop's thread only. It is inherited from where a frame is sent and read for each call of a tool."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        on_data: Callable[[bytes], None],
        on_left: Callable[[], None],
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        """`end` becomes ours. `on_left` is called when the other side has closed its end, `on_broken` when it reads no
        more: what waited is dropped then, and what it wrote before is still read.
        """
        end.setblocking(False)
        self._socket = end
        self._fd = end.fileno()
        self._loop = loop
        self._on_data = on_data
        self._on_left = on_left
        self._on_broken = on_broken
        self._waiting: list[bytes | memoryview] = []
        self._watching = False  # for room
        self._scheduled = False
        self._held = False
        self._reads = False
        self._is_deaf = False
        #: Bytes that are not written yet.
        self.unwritten = 0

    @property
    def closed(self) -> bool:
        """Whether our end is closed."""
        return self._fd < 0

    # --- reading

    def read(self) -> None:
        """Read from now on."""
        self._reads = True
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._on_data(data)
        else:
            self._on_left()

    # --- writing

    def put(self, data: bytes) -> None:
        """Queue data. The next flush writes it."""
        if self._fd >= 0 and not self._is_deaf:
            self._waiting.append(data)
            self.unwritten += len(data)

    def flush_soon(self) -> None:
        """Write what is queued in this turn of the loop, all together."""
        if not self._scheduled and not self._watching:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    @property
    def is_blocked(self) -> bool:
        """Whether the socket had no room. The rest is written by itself when it has."""
        return self._watching

    def flush(self) -> None:
        """Write everything that there is room for."""
        self._scheduled = False
        if self._fd < 0 or not self._waiting or self._held:
            return
        data = self._waiting[0] if len(self._waiting) == 1 else b"".join(self._waiting)
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._is_deaf = True
            self._drop()
            self._on_broken()
            return
        # A view and no copy: of large arguments a socket takes about a fortieth at a time.
        self._waiting = [memoryview(data)[sent:]] if sent < len(data) else []
        self.unwritten = len(data) - sent
        if bool(self._waiting) != self._watching:
            self._watch(not self._watching)

    def hold(self) -> None:
        """Keep what is sent from now on until `release`: the other side must not begin yet."""
        self._held = True

    def release(self) -> None:
        """The other side may begin: write what was kept."""
        self._held = False
        self.flush()

    def close(self) -> None:
        """Close our end, and report nothing more. What waits is dropped. Safe to call again."""
        if self._fd >= 0:
            if self._reads:
                self._loop.remove_reader(self._fd)
            self._drop()
            self._fd = -1
            self._socket.close()
            del self._on_data, self._on_left, self._on_broken  # else it and its user would keep each other in memory

    def _drop(self) -> None:
        if self._watching:
            self._watch(False)
        self._waiting.clear()
        self.unwritten = 0

    def _watch(self, wanted: bool) -> None:
        self._watching = wanted
        if wanted:
            self._loop.add_writer(self._fd, self.flush)
        else:
            self._loop.remove_writer(self._fd)
