"""Standard input and output as the two streams of a protocol: one message a line, each of bounded size.

What is printed meanwhile goes to stderr, and nobody else reads the input: descriptors 0 and 1 are given other files. No
line is read while many answers are unread, or many lines are worked on, so a client that only sends takes constant
memory. A thread writes, so a client that does not read keeps nobody from ending.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from goondan.kernel.cli.console.lines import Line, LineReader

#: The most lines that may be unwritten before the next one is read.
MAX_UNWRITTEN: Final = 64
#: The most lines that may be worked on before the next one is read (`LineStreams.working`). What waits for a person and
#: what that person sends meanwhile has room.
MAX_AT_WORK: Final = 512
#: How long the last lines have at the end (seconds).
FLUSH_S: Final = 1.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


class LineStreams:
    """The streams of this process. Make it inside the running loop. `limit`: the longest line that is read (bytes)."""

    def __init__(self, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines = aiter(LineReader(os.dup(0), limit))
        self._out = os.dup(1)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        self._queue: SimpleQueue[tuple[bytes, asyncio.Future[None]]] = SimpleQueue()
        self._unwritten: set[asyncio.Future[None]] = set()
        self._at_work: set[asyncio.Task[Any]] = set()
        #: Done when nobody reads what is written.
        self.broken: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._write, name="written lines", daemon=True).start()

    async def read(self) -> Line | None:
        """The next line. None at the end of the input."""
        if len(self._unwritten) >= MAX_UNWRITTEN:
            await asyncio.wait(self._unwritten)
        await asyncio.sleep(0)  # the task of the line before begins
        while len(self._at_work) >= MAX_AT_WORK:
            await asyncio.wait(self._at_work, return_when=asyncio.FIRST_COMPLETED)
        return await anext(self._lines, None)

    def working(self, handle: Callable[_P, Awaitable[_T]]) -> Callable[_P, Awaitable[_T]]:
        """What handles a line in a task of its own: the task counts as one that is worked on."""

        async def handled(*given: _P.args, **named: _P.kwargs) -> _T:
            if (task := asyncio.current_task()) is not None:
                self._at_work.add(task)
                task.add_done_callback(self._at_work.discard)
            return await handle(*given, **named)

        return handled

    def write(self, line: bytes) -> asyncio.Future[None]:
        """Write a line. Done when it is written, or nobody reads any more."""
        written = self._loop.create_future()
        self._unwritten.add(written)
        written.add_done_callback(self._unwritten.discard)
        self._queue.put((line + b"\n", written))
        return written

    async def close(self) -> None:
        """Wait for the last lines, for some time."""
        if self._unwritten:
            await asyncio.wait(self._unwritten, timeout=FLUSH_S)

    def _write(self) -> None:
        lost = False
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            while True:
                data, written = self._queue.get()
                left = memoryview(data)
                try:
                    while left and not lost:
                        with suppress(BlockingIOError):  # who has started us may have made it so
                            select.select([], [self._out], [])
                            left = left[os.write(self._out, left) :]
                except OSError:
                    lost = True
                    self._loop.call_soon_threadsafe(self.broken.set_result, None)
                self._loop.call_soon_threadsafe(_settle, written)


def _settle(written: asyncio.Future[None]) -> None:
    if not written.done():  # else whoever waited was cancelled
        written.set_result(None)
