"""Places that turns lend to those whom they ask and wait for. Pure.

A turn that waits for an answer does nothing else. So one of the agents that it asks may use its place: otherwise turns
that wait could hold every place, and nobody could answer. Each loan is one more process. Loans are bounded by root and
in all.

Both bounds grow with the depth of the asked one (how many wait for it in a row), and the deepest goes first. So what
waits at depth d can be kept waiting only by loans of depth d or more: if nobody at all went on, the deepest that waits
would get a place, since all loans are less deep than it and so fewer than its bound. Nothing can come to a standstill
for want of places.

Source: docs/decisions/047.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")

#: Places that one root may have lent beside one for each step of its longest chain.
LENT_BY_ROOT: Final = 8
#: Places that all may have lent, beside as many as there are: four chains of the greatest length (events.MAX_CHAIN).
LENT_SPARE: Final = 128


class _Lender(Generic[Key]):
    """A turn that waits, and those whom it waits for. `to` has its place now; `entered`: it stands in a heap."""

    __slots__ = ("depth", "entered", "root", "to", "waiting")

    def __init__(self, root: str, depth: int) -> None:
        self.root = root
        self.depth = depth
        self.waiting: dict[Key, None] = {}
        self.to: Key | None = None
        self.entered = False


class Loans(Generic[Key]):
    """All lenders. A lender is named by the id of the event that its turn is about; `places` is how many there are."""

    def __init__(self, places: int) -> None:
        self.lent = 0
        self._most = places + LENT_SPARE
        self._of_root: dict[str, int] = {}
        self._lenders: dict[str, _Lender[Key]] = {}
        self._where: dict[Key, list[str]] = {}
        self._borrowed: dict[Key, tuple[str, str]] = {}  # key -> lender, root
        #: (-depth, turn, lender, root); those whose root has lent too much are parked under its name.
        self._heap: list[tuple[int, int, str, str]] = []
        self._parked: dict[str, list[tuple[int, int, str, str]]] = {}
        self._turns = count()

    def of_root(self, root: str) -> int:
        """Places that a root has lent."""
        return self._of_root.get(root, 0)

    def may_lend(self, lender: str, root: str, depth: int) -> bool:
        """Whether this turn may lend its place to one at `depth`."""
        known = self._lenders.get(lender)
        return (known is None or known.to is None) and self._within(root, depth) and self._in_all(depth)

    def wait(self, key: Key, lender: str, root: str, depth: int) -> None:
        """`key` would take the place of this turn."""
        found = self._lenders.get(lender)
        if found is None:
            found = self._lenders[lender] = _Lender(root, depth)
        if key not in found.waiting:
            found.waiting[key] = None
            self._where.setdefault(key, []).append(lender)
            self._enter(lender, found)

    def discard(self, key: Key) -> None:
        """It does not wait any more."""
        for lender in self._where.pop(key, ()):
            found = self._lenders.get(lender)
            if found is not None:
                found.waiting.pop(key, None)
                self._forget(lender, found)

    def first(self) -> tuple[Key, str, str, int] | None:
        """Who is next to get a place lent: the key, its lender, their root, and the depth."""
        heap = self._heap
        while heap:
            _, _, lender, root = heap[0]
            found = self._lenders.get(lender)
            if found is None or found.to is not None or not found.waiting:
                heappop(heap)
                if found is not None:
                    found.entered = False
                self._unpark(root)  # it may have been unparked in the place of another
                continue
            if not self._within(found.root, found.depth):
                heappush(self._parked.setdefault(found.root, []), heappop(heap))
                continue
            if not self._in_all(found.depth):
                return None
            return next(iter(found.waiting)), lender, found.root, found.depth
        return None

    def lend(self, key: Key, lender: str, root: str, depth: int) -> None:
        """It gets the place."""
        found = self._lenders.get(lender)
        if found is None:
            found = self._lenders[lender] = _Lender(root, depth)
        found.to = key
        self._borrowed[key] = lender, root
        self._of_root[root] = self._of_root.get(root, 0) + 1
        self.lent += 1

    def give_back(self, key: Key) -> None:
        """It has done its work, or is gone."""
        lender, root = self._borrowed.pop(key)
        self.lent -= 1
        left = self._of_root.pop(root) - 1
        if left:
            self._of_root[root] = left
        found = self._lenders.get(lender)
        if found is not None and found.to is key:
            found.to = None
            if found.waiting:
                self._enter(lender, found)
            else:
                self._forget(lender, found)
        self._unpark(root)

    def over(self, lender: str) -> None:
        """The turn has ended: it waits for nobody any more."""
        found = self._lenders.pop(lender, None)
        if found is not None:
            for key in found.waiting:
                lenders = self._where[key]
                lenders.remove(lender)
                if not lenders:
                    del self._where[key]

    def _within(self, root: str, depth: int) -> bool:
        return self._of_root.get(root, 0) < LENT_BY_ROOT + depth

    def _in_all(self, depth: int) -> bool:
        return self.lent < self._most + depth

    def _enter(self, lender: str, found: _Lender[Key]) -> None:
        if not found.entered and found.to is None:
            found.entered = True
            heappush(self._heap, (-found.depth, next(self._turns), lender, found.root))

    def _unpark(self, root: str) -> None:
        """One loan less: the deepest of those that waited for that."""
        parked = self._parked.get(root)
        if parked:
            heappush(self._heap, heappop(parked))
            if not parked:
                del self._parked[root]

    def _forget(self, lender: str, found: _Lender[Key]) -> None:
        if not found.waiting and found.to is None:
            self._lenders.pop(lender, None)
