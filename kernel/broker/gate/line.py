"""The line before a gate: in the order of asking, with one turn for each tree of agents. Pure.

A tree that waits gets a turn when its first ask began to wait. After each turn it goes behind all trees that wait now.
So a tree with one ask at a time is served in the order of asking, and one with a thousand holds nobody up.

Source: docs/design/turns.md section 13.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heappop, heappush

from msgspec import Struct

#: Names an ask or a permit: the address of the connection, and the id that it gave.
Key = tuple[str, str]


class Ask(Struct, eq=False):
    """A request that waits to go out."""

    #: Its name.
    key: Key
    #: The event that its work began with.
    tree: str
    #: When it began to wait (seconds). A request that was refused keeps its place.
    since: float
    #: The tokens that it will read, as far as is known.
    tokens: int = 0
    #: How long it waits for a server that refuses everybody (seconds).
    patience_s: float = 60.0
    #: It does not go out before this time (seconds).
    not_before: float = 0.0
    #: Whether requests of others waited or were out when it came.
    others: bool = False

    def __lt__(self, other: Ask) -> bool:
        return (self.since, self.key) < (other.since, other.key)


class _Tree:
    """The asks of one tree, and when its turn is: the earlier, the sooner."""

    __slots__ = ("asks", "turn")

    def __init__(self, turn: float) -> None:
        self.turn = turn
        self.asks: list[Ask] = []


class Line:
    """All asks that wait."""

    def __init__(self) -> None:
        self._asks: dict[Key, Ask] = {}
        self._trees: dict[str, _Tree] = {}
        #: (turn, tree) of every tree, and what is left of earlier turns.
        self._turns: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._asks)

    def __iter__(self) -> Iterator[Ask]:
        return iter(self._asks.values())

    def get(self, key: Key) -> Ask | None:
        """The ask of this name, if it waits."""
        return self._asks.get(key)

    def add(self, ask: Ask) -> None:
        """Let an ask wait. Another one of the same name is replaced."""
        self.remove(ask.key)
        self._asks[ask.key] = ask
        tree = self._trees.get(ask.tree)
        if tree is None or ask.since < tree.turn:
            tree = tree or self._trees.setdefault(ask.tree, _Tree(ask.since))
            tree.turn = ask.since
            heappush(self._turns, (tree.turn, ask.tree))
        insort(tree.asks, ask)

    def remove(self, key: Key) -> Ask | None:
        """Take an ask out of the line."""
        ask = self._asks.pop(key, None)
        if ask is not None:
            tree = self._trees[ask.tree]
            tree.asks.remove(ask)
            if not tree.asks:
                del self._trees[ask.tree]
        return ask

    def first(self, now: float) -> Ask | None:
        """The ask whose turn it is. None: nobody waits, or everybody has to wait for a time of its own."""
        held: list[tuple[float, str]] = []
        found: Ask | None = None
        while self._turns:
            turn, name = self._turns[0]
            tree = self._trees.get(name)
            if tree is None or tree.turn != turn:
                heappop(self._turns)
                continue
            found = next((ask for ask in tree.asks if ask.not_before <= now), None)
            if found is not None:
                break
            held.append(heappop(self._turns))
        for entry in held:
            heappush(self._turns, entry)
        return found

    def serve(self, ask: Ask, now: float) -> None:
        """The ask goes out. Its tree goes behind all others."""
        self.remove(ask.key)
        tree = self._trees.get(ask.tree)
        if tree is not None:
            tree.turn = max(now, tree.asks[0].since)
            heappush(self._turns, (tree.turn, ask.tree))

    def places(self) -> dict[Key, int]:
        """How many go out before each ask, if nobody else comes."""
        order = [(rank, tree.turn, ask) for tree in self._trees.values() for rank, ask in enumerate(tree.asks)]
        return {ask.key: place for place, (_, _, ask) in enumerate(sorted(order))}
