"""Queued events by their deadline, so that a look at the clock costs nothing while nothing is due. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

#: Entries of things that have ended, beyond those that still wait, at which the heap is made anew.
_STALE: Final = 1024


class Due(Generic[Item]):
    """Things with a moment each (seconds on the broker's clock). `waits` says whether one still matters."""

    def __init__(self, waits: Callable[[Item], bool]) -> None:
        self._waits = waits
        self._heap: list[tuple[float, int, Item]] = []
        self._order = count()  # things with one moment are not compared
        self._limit = _STALE

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, moment: float, item: Item) -> None:
        """This one is due then."""
        heappush(self._heap, (moment, next(self._order), item))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if self._waits(entry[2])]
            heapify(self._heap)
            self._limit = 2 * len(self._heap) + _STALE

    def take(self, now: float) -> Iterator[Item]:
        """Take out what is due, the earliest first, without what does not matter any more."""
        while self._heap and self._heap[0][0] <= now:
            item = heappop(self._heap)[2]
            if self._waits(item):
                yield item
