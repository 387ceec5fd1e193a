"""Who is next: what finishes a changeset comes before what begins one. Pure.

One worker does one task after another. When all openings came first, the worktree that was made first would wait for
all others to be made before it is committed. Then everything that is under way is lost, all at once, whenever the
kernel is killed. With commits first, a changeset is through soon after it was opened, however many wait. No opening
waits for ever: there are no more commits than were opened.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

#: Commits and reverts, what a broker has to know, openings, and worktrees that may go. A smaller number comes first.
FINISHING: Final = 0
ASKING: Final = 1
OPENING: Final = 2
REMOVING: Final = 3


class WorkerLine:
    """Those who wait for the worker. Of one kind, who came first is first."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._busy = False

    @asynccontextmanager
    async def turn(self, kind: int) -> AsyncIterator[None]:
        """Alone with the worker."""
        if self._busy:
            came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (kind, next(self._numbers), came))
            try:
                await came
            except asyncio.CancelledError:
                if came.done() and not came.cancelled():
                    self._next()  # it was its turn already
                raise
        self._busy = True
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            _, _, came = heapq.heappop(self._waiting)
            if not came.done():
                came.set_result(None)
                return
        self._busy = False
