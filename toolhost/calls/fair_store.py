"""Values that are kept for a while within a bound. It decides which one goes first when there are too many. Pure.

If the oldest of all went first, one owner could push out what is kept for everybody else. So the oldest value of the
owner who has most goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")
Owner = tuple[str, str]


class FairStore(Generic[Name, Value]):
    """The values by their names, each with its owner and its size. Iterating gives the values, the oldest first."""

    def __init__(self) -> None:
        #: The sizes of all values together.
        self.total = 0
        #: name -> the owner and the size of its value.
        self._entries: dict[Name, tuple[Owner, int]] = {}
        self._values: dict[Name, Value] = {}
        #: The value of a name, None when it is not kept.
        self.get: Callable[[Name], Value | None] = self._values.get
        #: owner -> the names of its values, the oldest first.
        self._names: dict[Owner, dict[Name, None]] = {}
        self._held: dict[Owner, int] = {}

    def put(self, name: Name, owner: Owner, size: int, value: Value) -> None:
        """Keep a new value. It replaces one of the same name."""
        if name in self._entries:
            self.take(name)
        self._entries[name] = (owner, size)
        self._values[name] = value
        self._names.setdefault(owner, {})[name] = None
        self._held[owner] = self._held.get(owner, 0) + size
        self.total += size

    def take(self, name: Name) -> Value | None:
        """Keep a value no longer. Return it, or None when it is not there."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        owner, size = entry
        names = self._names[owner]
        del names[name]
        self.total -= size
        self._held[owner] -= size
        if not names:
            del self._names[owner], self._held[owner]
        return self._values.pop(name)

    def held_by(self, owner: Owner) -> int:
        """The sizes of this owner's values together."""
        return self._held.get(owner, 0)

    def names_of(self, owner: Owner) -> list[Name]:
        """The names of this owner's values, the oldest first."""
        return list(self._names.get(owner, ()))

    def first_to_go(self) -> Name:
        """The name of the value that goes when there is too much. Something must be kept."""
        return next(iter(self._names[max(self._held, key=self._held.__getitem__)]))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Value]:
        return iter(self._values.values())
