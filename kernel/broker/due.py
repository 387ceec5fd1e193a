"""Things by the moment at which they are due. While nothing is due, a look costs nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

#: When the heap has so many more entries than things that wait, it is made again.
_STALE: Final = 1024


class Due(Generic[Item]):
    """Things that have one moment each (seconds on the broker's clock). `waits(item)` is False for a thing that no
    longer matters.
    """

    def __init__(self, waits: Callable[[Item], bool]) -> None:
        self._waits = waits
        self._heap: list[tuple[float, int, Item]] = []
        self._order = count()  # things with one moment are not compared
        self._limit = _STALE

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, moment: float, item: Item) -> None:
        """Add a thing that is due at `moment`."""
        heappush(self._heap, (moment, next(self._order), item))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if self._waits(entry[2])]
            heapify(self._heap)
            self._limit = 2 * len(self._heap) + _STALE

    def take(self, now: float) -> Iterator[Item]:
        """Remove and yield the things that are due, the earliest first. Things that no longer matter are left out."""
        while self._heap and self._heap[0][0] <= now:
            item = heappop(self._heap)[2]
            if self._waits(item):
                yield item
