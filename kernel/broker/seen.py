"""Ids that were seen lately, in memory that does not grow: what keeps a late repeat from becoming a second event. Pure.

Two tables of digests; when the newer one is full, the older one is forgotten and starts anew. So the last CAPACITY ids
are always known, and up to as many more. A digest of 64 bits stands for an id: Python's own hash of a string, whose key
is another in every process, so that nobody can find two ids of one digest.

Source: delivery.md sections 2 and 3.
"""

from __future__ import annotations

from array import array
from typing import Final

#: Ids that are known at least: minutes of a busy kernel.
CAPACITY: Final = 16_384
#: Places of a table (a power of 2): half full at most, so that a look takes a step or two.
_PLACES: Final = 2 * CAPACITY


class Seen:
    """A set of ids of several parts. Takes 512 KiB from its first moment on."""

    def __init__(self) -> None:
        self._newer = _empty()
        self._older = _empty()
        self._count = 0

    def add(self, *parts: str) -> None:
        """Remember an id."""
        digest = _digest(parts)
        place = _place(self._newer, digest)
        if self._newer[place] == digest:
            return
        if self._count == CAPACITY:
            self._older, self._newer, self._count = self._newer, _empty(), 0
            place = _place(self._newer, digest)
        self._newer[place] = digest
        self._count += 1

    def __contains__(self, parts: tuple[str, ...]) -> bool:
        digest = _digest(parts)
        return any(table[_place(table, digest)] == digest for table in (self._newer, self._older))


def _digest(parts: tuple[str, ...]) -> int:
    return hash("\0".join(parts)) % (1 << 64) or 1  # 0 is an empty place


def _empty() -> array[int]:
    return array("Q", bytes(8 * _PLACES))


def _place(table: array[int], digest: int) -> int:
    """Where the digest stands, or the empty place that it would go to."""
    at = digest & (_PLACES - 1)
    while table[at] not in (0, digest):
        at = (at + 1) & (_PLACES - 1)
    return at
