"""Who holds how much of something that there is a fixed amount of, and who may have more. Pure.

It is counted by session (who set the work going) and by root (the one event that it began with). The rule is one line:

    what a session and the root hold, added, may be at most twice what is left after the next piece.

So one root alone gets half of everything, and a session with many roots two thirds. Two sessions with one root each
get a third each, and whoever comes next still finds something. Nobody has to be counted as "waiting" for that, and
nothing is taken back: who holds more than the rule gives gets nothing more until the others have caught up. Nobody who
holds something takes the last piece.

A part is kept for what operators send themselves: for everything else it does not count as free.

Source: docs/decisions/047.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

#: What a session and a root hold may be this many times what they leave.
TIMES_LEFT: Final = 2
#: One part in so many is kept for operators.
KEPT_PART: Final = 16

Quota = Literal["root", "session", "whole"]


class Shortage(Struct, frozen=True):
    """Why something is refused: which quota, how much its holder has of it, and with how much it would get more now."""

    quota: Quota
    held: int
    limit: int


class Pool:
    """One such thing. `capacity` is all of it; `kept` of that is for operators only."""

    __slots__ = ("_roots", "_sessions", "capacity", "held", "kept")

    def __init__(self, capacity: int, kept: int) -> None:
        self.capacity = capacity
        self.kept = kept
        self.held = 0
        self._sessions: dict[str, int] = {}
        self._roots: dict[str, int] = {}

    def of_session(self, session: str) -> int:
        """What a session holds."""
        return self._sessions.get(session, 0)

    def of_root(self, root: str) -> int:
        """What a root holds."""
        return self._roots.get(root, 0)

    def free(self, *, operator: bool) -> int:
        """What nobody holds, for an operator's own message or for any other; not below 0."""
        return max(0, self.capacity - self.held - (0 if operator else self.kept))

    def allows(self, weight: int, amount: int, *, operator: bool) -> bool:
        """Whether a session and a root that hold `weight`, added, may have `amount` more."""
        left = self.capacity - self.held - amount - (0 if operator else self.kept)
        return left >= 0 and weight <= TIMES_LEFT * left

    def may_take(self, session: str, root: str, amount: int, *, operator: bool) -> bool:
        """Whether this root of this session may have `amount` more."""
        weight = self._sessions.get(session, 0) + self._roots.get(root, 0)
        return self.allows(weight, amount, operator=operator)

    def shortage(self, session: str, root: str, amount: int, *, operator: bool) -> Shortage | None:
        """What stands against `amount` more, if anything does."""
        of_session, of_root = self.of_session(session), self.of_root(root)
        if self.allows(of_session + of_root, amount, operator=operator):
            return None
        free = self.free(operator=operator)
        if free < amount:
            return Shortage("whole", self.held, self.capacity - (0 if operator else self.kept))
        may = TIMES_LEFT * (free - amount)
        if of_session > may or of_root == 0:
            return Shortage("session", of_session, may)
        return Shortage("root", of_root, may - of_session)

    def take(self, session: str, root: str, amount: int) -> None:
        """Count `amount` more, whatever the rule says: the caller has asked it, or has no choice."""
        self.held += amount
        sessions, roots = self._sessions, self._roots
        sessions[session] = sessions.get(session, 0) + amount
        # The very number that the caller holds, for the first piece: there may be 100,000 roots with one each.
        roots[root] = roots[root] + amount if root in roots else amount

    def give(self, session: str, root: str, amount: int) -> None:
        """Count `amount` less, which was taken under the same names."""
        self.held -= amount
        for holders, name in ((self._sessions, session), (self._roots, root)):
            left = holders[name] - amount
            if left:
                holders[name] = left
            else:
                del holders[name]


def kept_of(amount: int) -> int:
    """The part that is kept for operators."""
    return max(1, amount // KEPT_PART)


def describe_shortage(shortage: Shortage, root: str, what: str, amount: int, capacity: int) -> str:
    """A shortage in words: which quota, with the numbers; `what` is counted."""
    refused = f"no room for {amount:,} {what} of root {root[:100]!r} now"
    if shortage.quota == "whole":
        return f"{refused}: all together hold {shortage.held:,} of {shortage.limit:,} (quota: whole)"
    whose = "this root" if shortage.quota == "root" else "its session"
    limit = max(0, shortage.limit)
    return (
        f"{refused}: {whose} holds {shortage.held:,}, and gets more once that is at most {limit:,}; "
        f"there are {capacity:,} in all (quota: {shortage.quota})"
    )
