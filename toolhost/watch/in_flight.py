"""Files whose last descriptors lie in sockets of a jail: nobody can see them. Pure; times and sizes are arguments.

What nobody sees can be told from what the machine has lost, and only while a jail keeps descriptors there: a program
that passes some on has them received within milliseconds, and must not be blamed for what others take.

Source: docs/design/sandbox.md section 4; docs/decisions/029.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: Descriptors that lie in one socket for so long (seconds), and at so many looks in turn, are kept there.
KEPT_S: Final = 0.12
LOOKS: Final = 4
#: The same where they move from one socket to the next, and there were some at each look.
MOVED_S: Final = 2.0


class InFlight(NamedTuple):
    """Sockets (inodes) in which descriptors lay."""

    #: At the last of a few looks in turn.
    last: frozenset[int] = frozenset()
    #: At each of them: a program that passes descriptors on receives them meanwhile.
    each: frozenset[int] = frozenset()


class Kept:
    """Whether a jail keeps descriptors in flight."""

    def __init__(self) -> None:
        self._same: frozenset[int] = frozenset()
        self._some = False
        self._since = self._moved_since = 0.0
        self._looks = 0

    def look(self, now: float, found: InFlight) -> bool:
        """These sockets have some now, on a clock in seconds; whether they are kept."""
        if not self._some:
            self._moved_since = now
        self._some = bool(found.last)
        same = self._same & found.each
        if not same:
            same, self._since, self._looks = found.each, now, 0
        self._same = same
        self._looks += 1
        if same and self._looks >= LOOKS and now - self._since >= KEPT_S:
            return True
        return self._some and now - self._moved_since >= MOVED_S


class HiddenMemory:
    """What a jail may have at most in files in memory that nobody sees (bytes). `shared` is the machine's in all."""

    def __init__(self, shared: int) -> None:
        self._others = shared

    def most(self, shared: int, seen: int) -> int:
        """The jail is seen to have `seen` of `shared`. What others gave back it may have taken since."""
        others = max(0, shared - seen)
        self._others = min(self._others, others)
        return others - self._others

    def clear(self, shared: int, seen: int) -> None:
        """It has nothing in flight: all else is others'."""
        self._others = max(0, shared - seen)
