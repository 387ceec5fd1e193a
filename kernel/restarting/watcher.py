"""`gdn run --watch`: looks at a bundle's files again and again, and says when a change has come to rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from goondan.kernel.restarting.marks import Watched, marks_of
from goondan.kernel.restarting.rest import Rest

#: How often the files are looked at (seconds): a change shows within the time that files have to rest.
LOOK_S: Final = 0.1
#: A look that takes long comes seldom: looking takes a fiftieth of the time at most.
SHARE: Final = 50


class Watcher:
    """`watched` may be set again at any time; `follow` is awaited for each change."""

    def __init__(self, watched: Watched, follow: Callable[[], Awaitable[None]]) -> None:
        self.watched = watched
        self._follow = follow

    async def run(self) -> None:
        """Until it is cancelled. The first look counts as a change: files may have changed since they were read."""
        loop = asyncio.get_running_loop()
        rest = Rest({})
        while True:
            began = loop.time()
            marks = await loop.run_in_executor(None, marks_of, self.watched)
            now = loop.time()
            if rest.see(marks, now):
                await self._follow()
            await asyncio.sleep(max(LOOK_S, SHARE * (now - began)))
