"""Three threads for work that could hold the loop up.

One prepares launches: it looks folders up, and records who may write to them. Another removes what jails have left, so
that no launch waits for that. The third looks at folders that callers name, which may hold 64 MiB. Such work takes
milliseconds to seconds: a folder may have ten thousand names, a fork bomb may hold the lock of a control group. All
other calls go through the loop meanwhile.

No jail may be started on these threads: bubblewrap ends with the thread whose child it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


class Offload:
    """The threads of a tool host. Each starts with its first work, and does one piece after the other."""

    def __init__(self) -> None:
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._removing = ThreadPoolExecutor(1, thread_name_prefix="remove")
        self._looking = ThreadPoolExecutor(1, thread_name_prefix="look")

    async def prepared(self, work: Callable[[], _T]) -> _T:
        """Run `work` after all work that was given before, and return or raise what it does."""
        return await asyncio.wrap_future(self._preparing.submit(work))

    async def looked_up(self, work: Callable[[], _T]) -> _T:
        """Run `work`, which looks at a folder that a caller named, after other such work. No launch waits for it."""
        return await asyncio.wrap_future(self._looking.submit(work))

    def submit(self, work: Callable[[], object]) -> None:
        """Run this between two launches. It must not raise."""
        self._preparing.submit(work)

    def remove(self, work: Callable[[], object]) -> None:
        """Run this when there is time. It must not raise."""
        self._removing.submit(work)

    async def settled(self) -> None:
        """Wait until everything that was given here before is done."""
        for thread in (self._preparing, self._removing):
            await asyncio.wrap_future(thread.submit(lambda: None))
