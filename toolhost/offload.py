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
from typing import Final, TypeVar

_T = TypeVar("_T")

_PREPARING: Final = ThreadPoolExecutor(1, thread_name_prefix="prepare")
_REMOVING: Final = ThreadPoolExecutor(1, thread_name_prefix="remove")


async def prepared(work: Callable[[], _T]) -> _T:
    """What `work` returns or raises; it runs after what was given here, or to `soon`, before."""
    return await asyncio.wrap_future(_PREPARING.submit(work))


def soon(work: Callable[[], object]) -> None:
    """Do this between two launches. It must not raise."""
    _PREPARING.submit(work)


def remove(work: Callable[[], object]) -> None:
    """Do this at leisure. It must not raise."""
    _REMOVING.submit(work)


async def settled() -> None:
    """Wait until everything that was given here before is done."""
    for thread in (_PREPARING, _REMOVING):
        await asyncio.wrap_future(thread.submit(lambda: None))
