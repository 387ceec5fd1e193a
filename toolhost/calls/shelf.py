"""Things that are kept for a while within a bound, and which of them goes first when there are too many. Pure.

The oldest of all would let one owner push out what is kept for everybody else. So it is the oldest of the owner who has
most.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Name = TypeVar("Name")
Owner = tuple[str, str]


class Shelf(Generic[Name]):
    """The sizes of what is kept; the things themselves are elsewhere."""

    def __init__(self) -> None:
        self.total = 0
        self._owner: dict[Name, Owner] = {}
        #: owner -> name -> size, the oldest first.
        self._sizes: dict[Owner, dict[Name, int]] = {}
        self._held: dict[Owner, int] = {}

    def put(self, name: Name, owner: Owner, size: int) -> None:
        """Something new."""
        self.take(name)
        self._owner[name] = owner
        self._sizes.setdefault(owner, {})[name] = size
        self._held[owner] = self._held.get(owner, 0) + size
        self.total += size

    def take(self, name: Name) -> None:
        """It is kept no more, or never was."""
        owner = self._owner.pop(name, None)
        if owner is None:
            return
        sizes = self._sizes[owner]
        size = sizes.pop(name)
        self.total -= size
        self._held[owner] -= size
        if not sizes:
            del self._sizes[owner], self._held[owner]

    def held_by(self, owner: Owner) -> int:
        """What is kept of this owner."""
        return self._held.get(owner, 0)

    def first_to_go(self) -> Name:
        """What goes when there is too much. Something must be kept."""
        return next(iter(self._sizes[max(self._held, key=self._held.__getitem__)]))

    def __len__(self) -> int:
        return len(self._owner)
