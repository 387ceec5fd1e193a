"""Ids that were seen lately, in memory that does not grow: what keeps a late repeat from becoming a second event. Pure.

Two tables of digests; when the newer one is full, the older one is forgotten and starts anew. So the last CAPACITY ids
are always known, and up to as many more. A digest of 64 bits stands for an id: one of another id would have to be the
same, which nobody who does not know the key can bring about.

Source: delivery.md sections 2 and 3.
"""

from __future__ import annotations

import os
from array import array
from hashlib import blake2b
from typing import Final

#: Ids that are known at least: minutes of a busy kernel.
CAPACITY: Final = 16_384
#: Places of a table (a power of 2): half full at most, so that a look takes a step or two.
_PLACES: Final = 2 * CAPACITY


class Seen:
    """A set of ids of several parts. Takes 512 KiB from its first moment on."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(16) if key is None else key
        self._newer = _empty()
        self._older = _empty()
        self._count = 0

    def add(self, *parts: str) -> None:
        """Remember an id."""
        digest = self._digest(parts)
        place = _place(self._newer, digest)
        if self._newer[place] == digest:
            return
        if self._count == CAPACITY:
            self._older, self._newer, self._count = self._newer, _empty(), 0
            place = _place(self._newer, digest)
        self._newer[place] = digest
        self._count += 1

    def __contains__(self, parts: tuple[str, ...]) -> bool:
        digest = self._digest(parts)
        return any(table[_place(table, digest)] == digest for table in (self._newer, self._older))

    def _digest(self, parts: tuple[str, ...]) -> int:
        made = blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=8, key=self._key)
        return int.from_bytes(made.digest(), "little") or 1  # 0 is an empty place


def _empty() -> array[int]:
    return array("Q", bytes(8 * _PLACES))


def _place(table: array[int], digest: int) -> int:
    """Where the digest stands, or the empty place that it would go to."""
    at = digest & (_PLACES - 1)
    while table[at] not in (0, digest):
        at = (at + 1) & (_PLACES - 1)
    return at
