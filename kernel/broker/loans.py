"""Loans: a turn lends its place to an agent that it asks and waits for. Pure.

A turn that waits for an answer does nothing else, so one of the agents that it asks may use its place. Otherwise
waiting turns could hold every place, and nobody could answer. Each loan means one more process. The number of loans is
bounded, for each root and in all.

Both bounds grow with the depth of the borrower (how many turns wait for it in a row), and the deepest one is first.
So only loans of depth d or more can keep a borrower of depth d waiting. Suppose that nobody could go on: then all loans
are less deep than the deepest waiting borrower, so they are fewer than its bound, and it gets a place. Therefore a
lack of places never stops all work.

Source: docs/decisions/047.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")

#: Places that one root may have lent, in addition to one for each step of its longest chain.
LENT_BY_ROOT: Final = 8
#: Places that all roots may have lent, in addition to the number of places: four longest chains (events.MAX_CHAIN).
LENT_SPARE: Final = 128


class _Lender(Generic[Key]):
    """A turn that waits, and those that it waits for."""

    __slots__ = ("depth", "entered", "root", "to", "waiting")

    def __init__(self, root: str, depth: int) -> None:
        self.root = root
        self.depth = depth
        #: Those that want its place.
        self.waiting: dict[Key, None] = {}
        #: The one that has its place now.
        self.to: Key | None = None
        #: True when it is in a heap.
        self.entered = False


class Loans(Generic[Key]):
    """All lenders. The name of a lender is the id of the event of its turn. `places` is the number of places."""

    def __init__(self, places: int) -> None:
        self.lent = 0
        self._most = places + LENT_SPARE
        self._of_root: dict[str, int] = {}
        self._lenders: dict[str, _Lender[Key]] = {}
        self._where: dict[Key, list[str]] = {}
        self._borrowed: dict[Key, tuple[str, str]] = {}  # key -> lender, root
        #: Lenders as (-depth, turn, lender, root).
        self._heap: list[tuple[int, int, str, str]] = []
        #: Root -> lenders that wait until the root has lent less.
        self._parked: dict[str, list[tuple[int, int, str, str]]] = {}
        self._turns = count()

    def of_root(self, root: str) -> int:
        """How many places a root has lent."""
        return self._of_root.get(root, 0)

    def may_lend(self, lender: str, root: str, depth: int) -> bool:
        """Whether this turn may lend its place to a borrower at `depth`."""
        known = self._lenders.get(lender)
        return (known is None or known.to is None) and self._within(root, depth) and self._in_all(depth)

    def wait(self, key: Key, lender: str, root: str, depth: int) -> None:
        """`key` wants the place of this turn."""
        found = self._lenders.get(lender)
        if found is None:
            found = self._lenders[lender] = _Lender(root, depth)
        if key not in found.waiting:
            found.waiting[key] = None
            self._where.setdefault(key, []).append(lender)
            self._enter(lender, found)

    def discard(self, key: Key) -> None:
        """`key` does not wait any more."""
        for lender in self._where.pop(key, ()):
            found = self._lenders.get(lender)
            if found is not None:
                found.waiting.pop(key, None)
                self._forget(lender, found)

    def first(self) -> tuple[Key, str, str, int] | None:
        """The next borrower: its key, its lender, their root, and the depth. None when nobody may borrow now."""
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
        """`key` borrows the place."""
        found = self._lenders.get(lender)
        if found is None:
            found = self._lenders[lender] = _Lender(root, depth)
        found.to = key
        self._borrowed[key] = lender, root
        self._of_root[root] = self._of_root.get(root, 0) + 1
        self.lent += 1

    def give_back(self, key: Key) -> None:
        """`key` gives the place back: it has done its work, or is gone."""
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
        """The lender's turn has ended, so it waits for nobody any more."""
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
        """The root has one loan less: put its deepest parked lender back into the heap."""
        parked = self._parked.get(root)
        if parked:
            heappush(self._heap, heappop(parked))
            if not parked:
                del self._parked[root]

    def _forget(self, lender: str, found: _Lender[Key]) -> None:
        if not found.waiting and found.to is None:
            self._lenders.pop(lender, None)
