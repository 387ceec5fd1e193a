"""Chooses who gets the next place: whoever's session and root hold the least. Pure.

For each root, instances wait in the order in which they came. Roots that hold equally much take turns, and so do
sessions. One instance may wait in several lines, one for each root that waits for it: its place may be counted with any
of them.

Two heaps, of sessions and of a session's roots, make one choice cost O(log n), however many wait. The held amounts
change during the wait. An entry that has become heavier is put back when it reaches the top. An entry that has become
lighter is entered again (`lighter`).

Source: docs/decisions/047.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, TypeVar

from goondan.kernel.broker.shares import Pool

Key = TypeVar("Key")

#: When a heap has so many more entries than things that wait, it is made again.
_STALE: Final = 64


class _Root(Generic[Key]):
    """Those that wait for one root of one session. `turn` orders equal ones: the one that was served last is last."""

    __slots__ = ("keys", "turn")

    def __init__(self, turn: int) -> None:
        self.keys: dict[Key, None] = {}
        self.turn = turn


class _Session(Generic[Key]):
    """The waiting roots of one session. `heap` has (amount that the root holds, its turn, its name)."""

    __slots__ = ("heap", "roots", "turn")

    def __init__(self, turn: int) -> None:
        self.roots: dict[str, _Root[Key]] = {}
        self.heap: list[tuple[int, int, str]] = []
        self.turn = turn


class First(Generic[Key]):
    """The one that is next."""

    __slots__ = ("key", "root", "session", "turn", "weight")

    def __init__(self, weight: int, turn: int, key: Key, session: str, root: str) -> None:
        #: The sum of what its session and its root hold.
        self.weight = weight
        #: Orders equal weights: the lower one is first.
        self.turn = turn
        self.key = key
        self.session = session
        self.root = root


class WaitingLine(Generic[Key]):
    """Everybody that waits for a piece of one pool. Lines that are compared share one counter of `turns`."""

    def __init__(self, pool: Pool, turns: Iterator[int]) -> None:
        self._pool = pool
        self._turns = turns
        self._sessions: dict[str, _Session[Key]] = {}
        #: Sessions as (sum of what the session and its lightest root hold, turn, name).
        self._heap: list[tuple[int, int, str]] = []
        self._where: dict[Key, list[tuple[str, str]]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def add(self, key: Key, session: str, root: str) -> None:
        """Wait in the line of a root, behind the others. A second call changes nothing."""
        found = self._sessions.get(session)
        if found is None:
            found = self._sessions[session] = _Session(next(self._turns))
        line = found.roots.get(root)
        new = line is None
        if line is None:
            line = found.roots[root] = _Root(next(self._turns))
        if key in line.keys:
            return
        line.keys[key] = None
        self._where.setdefault(key, []).append((session, root))
        if new:
            self._enter_root(found, root)
            self._enter(session, found)

    def discard(self, key: Key) -> None:
        """Leave every line."""
        for session, root in self._where.pop(key, ()):
            found = self._sessions[session]
            line = found.roots[root]
            del line.keys[key]
            if not line.keys:
                del found.roots[root]
                if not found.roots:
                    del self._sessions[session]

    def served(self, session: str, root: str) -> None:
        """An instance of this root got a place: roots with an equal weight are first now."""
        found = self._sessions.get(session)
        if found is None:
            return
        found.turn = next(self._turns)
        line = found.roots.get(root)
        if line is not None:
            line.turn = next(self._turns)
            self._enter_root(found, root)
        self._enter(session, found)

    def lighter(self, session: str, root: str) -> None:
        """A session and a root hold less than before."""
        found = self._sessions.get(session)
        if found is not None:
            if root in found.roots:
                self._enter_root(found, root)
            self._enter(session, found)

    def first(self) -> First[Key] | None:
        """The one that is next; None when nobody waits."""
        heap = self._heap
        while heap:
            entry = heap[0]
            name = entry[2]
            found = self._sessions.get(name)
            if found is None:
                heappop(heap)
                continue
            held, root = self._lightest(found)
            now = (self._pool.of_session(name) + held, found.turn, name)
            if entry == now:
                return First(now[0], found.turn, next(iter(found.roots[root].keys)), name, root)
            heapreplace(heap, now)
        return None

    def _lightest(self, found: _Session[Key]) -> tuple[int, str]:
        """The next root of a waiting session: what it holds, and its name."""
        heap = found.heap
        while True:
            name = heap[0][2]
            line = found.roots.get(name)
            if line is None:
                heappop(heap)
                continue
            now = (self._pool.of_root(name), line.turn, name)
            if heap[0] == now:
                return now[0], name
            heapreplace(heap, now)

    def _enter_root(self, found: _Session[Key], root: str) -> None:
        heap = found.heap
        heappush(heap, (self._pool.of_root(root), found.roots[root].turn, root))
        if len(heap) > 2 * len(found.roots) + _STALE:
            heap[:] = [(self._pool.of_root(name), line.turn, name) for name, line in found.roots.items()]
            heapify(heap)

    def _enter(self, session: str, found: _Session[Key]) -> None:
        heap = self._heap
        held, _ = self._lightest(found)
        heappush(heap, (self._pool.of_session(session) + held, found.turn, session))
        if len(heap) > 2 * len(self._sessions) + _STALE:
            heap[:] = [
                (self._pool.of_session(name) + self._lightest(one)[0], one.turn, name)
                for name, one in self._sessions.items()
            ]
            heapify(heap)
