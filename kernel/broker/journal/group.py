"""Writes groups of batches, with the rules of a full disk.

When the disk is full, only ends of old work are written, and the reserve is freed as far as they need it. New work is
refused, item by item, until the reserve could be made again. Ends without room even then wait. They are acknowledged
only when they are written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from goondan.kernel.broker.journal.interface import DiskFull, Item, Settled, Store, Write
from goondan.kernel.broker.journal.reserve import Reserve

#: How often a full disk is tried again (seconds).
FULL_RETRY_S: Final = 1.0

#: Batches with their numbers.
Group = list[tuple[int, Sequence[Item]]]


class GroupWriter:
    """Writes to one store. For one thread."""

    def __init__(self, store: Store, reserve: Reserve, wall_ms: Callable[[], int]) -> None:
        self._store = store
        self._reserve = reserve
        self._wall_ms = wall_ms
        #: True while new work is refused because the disk is full.
        self.full = not reserve.make()
        self._next_try = 0.0  # when a full disk is tried again (time.monotonic)

    def write(self, group: Group) -> list[Settled]:
        """Write a group as one transaction. Raises DiskFull when there is no room for ends of old work either: nothing
        was written then, and the group is to be written again. Raises JournalFailed.
        """
        if self.full and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + FULL_RETRY_S
            self.full = not self._reserve.make()
        if not self.full:
            try:
                self._commit(_writes(group, refusable=True), self._wall_ms())
                return [Settled(number) for number, _ in group]
            except DiskFull:
                self.full = True
                self._next_try = time.monotonic() + FULL_RETRY_S
        ends = _writes(group, refusable=False)
        try:
            if ends:
                self._commit(ends, self._wall_ms())
        except DiskFull:
            self._commit_ends(ends)
        return [Settled(number, frozenset(_refusable(batch))) for number, batch in group]

    def _commit(self, writes: list[Write], now_ms: int) -> None:
        """Write as durably as promised."""
        if self._store.durability == "process":
            self._store.promise(writes, now_ms)
        else:
            self._store.commit(writes, now_ms)

    def _commit_ends(self, ends: list[Write]) -> None:
        """Write ends of old work, with as much of the reserve as they need. Raises DiskFull when it is used up."""
        while True:
            # Pages that were copied into the file free room in the WAL. A copy that finds too little room still makes
            # the file longer, so the next copy needs less.
            self._store.checkpoint()
            with suppress(DiskFull):  # nor need it stay in the redo file
                self._store.fold()
            try:
                self._commit(ends, self._wall_ms())
                return
            except DiskFull:
                if not self._reserve.release():
                    raise

    def fold(self) -> None:
        """Bring what was promised into the tables. On a full disk as much of the reserve is used as that needs. What
        finds no room is tried again later: it is promised all the same. Raises JournalFailed.
        """
        if self.full and time.monotonic() < self._next_try:
            return
        try:
            self._store.fold()
            return
        except DiskFull:
            self.full = True
            self._next_try = time.monotonic() + FULL_RETRY_S
        while self._reserve.release():
            self._store.checkpoint()
            with suppress(DiskFull):
                self._store.fold()
                return

    def tidy(self) -> bool:
        """Remove some old rows; True when there is more to do. Raises JournalFailed."""
        if self.full:
            return False
        try:
            return self._store.tidy(self._wall_ms())
        except DiskFull:
            return False  # the next write finds out


def _writes(group: Group, *, refusable: bool) -> list[Write]:
    """All writes of the group in order; without those that may be refused unless `refusable`."""
    return [write for _, batch in group for item in batch if refusable or not item.refusable for write in item.writes]


def _refusable(batch: Sequence[Item]) -> list[int]:
    return [at for at, item in enumerate(batch) if item.refusable]
