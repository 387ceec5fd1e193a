"""Files whose last descriptors lie in sockets of a jail, where nobody sees them. Pure; times and sizes are arguments.

Their size follows from what the machine has lost, and only while a jail keeps descriptors there. A program that passes
descriptors on has them received within milliseconds; it must not be blamed for what others take.

Source: docs/design/sandbox.md section 4; docs/decisions/029.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: Descriptors count as kept in a socket after this time (seconds) and so many looks in turn.
KEPT_S: Final = 0.12
LOOKS: Final = 4
#: The same when they move from one socket to the next, and there were some at each look.
MOVED_S: Final = 2.0


class InFlight(NamedTuple):
    """Sockets (inodes) in which descriptors lay."""

    #: At the last of a few looks in turn.
    last: frozenset[int] = frozenset()
    #: At each of them: a program that passes descriptors on receives them meanwhile.
    each: frozenset[int] = frozenset()


class KeptDescriptors:
    """Whether a jail keeps descriptors in flight."""

    def __init__(self) -> None:
        self._same: frozenset[int] = frozenset()
        self._some = False
        self._since = self._moved_since = 0.0
        self._looks = 0

    def look(self, now: float, found: InFlight) -> bool:
        """Note the sockets that have descriptors now, on a clock in seconds. Returns whether they are kept there."""
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
    """The most that a jail may have in files in memory that nobody sees (bytes). `shared` is that of the whole
    machine.
    """

    def __init__(self, shared: int) -> None:
        self._others = shared

    def most(self, shared: int, seen: int) -> int:
        """The jail is seen to have `seen` of `shared`. It may have taken what others have given back since."""
        others = max(0, shared - seen)
        self._others = min(self._others, others)
        return others - self._others

    def clear(self, shared: int, seen: int) -> None:
        """The jail has nothing in flight: everything else is others'."""
        self._others = max(0, shared - seen)
