"""Work that could hold the loop up, on two threads beside it: finding out about folders for a launch and keeping the
record of who may write to them, and removing what a jail has left.

While a jail is being started, every other agent's calls go through the loop. A folder with ten thousand names, a record
that must be on disk first, a control group whose lock somebody's fork bomb holds, or a tree of files that has to go
take milliseconds to seconds; here that is nobody's loss. Removing has a thread of its own, so that no launch waits
behind it.

No jail may be forked here: bubblewrap dies with the thread whose child it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


class Offload:
    """The two threads of a tool host. Each starts with its first work, and does one piece after the other."""

    def __init__(self) -> None:
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._removing = ThreadPoolExecutor(1, thread_name_prefix="remove")

    async def prepared(self, work: Callable[[], _T]) -> _T:
        """What `work` returns or raises. It runs after what was given here, or to `submit`, before."""
        return await asyncio.wrap_future(self._preparing.submit(work))

    def submit(self, work: Callable[[], object]) -> None:
        """Do this between two launches. It must not raise."""
        self._preparing.submit(work)

    def remove(self, work: Callable[[], object]) -> None:
        """Do this at leisure. It must not raise."""
        self._removing.submit(work)

    async def settled(self) -> None:
        """Wait until everything that was given here before is done."""
        for thread in (self._preparing, self._removing):
            await asyncio.wrap_future(thread.submit(lambda: None))
