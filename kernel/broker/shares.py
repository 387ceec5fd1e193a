"""Shares of a fixed amount: who holds how much of it, and who may have more. Pure.

The amount is counted by session (who began the work) and by root (the event that the work began with). The rule is:

    the sum of what a session and a root hold may be at most twice the amount that is free after the next piece.

So one root alone gets half of everything, and a session with many roots two thirds. Two sessions with one root each get
a third each, and whoever comes next still finds something. The rule does not need to count who waits, and it takes
nothing back: a holder that has more than the rule allows gets nothing more until the others have caught up. A holder
never takes the last piece.

A part is kept for events that operators send themselves. For everybody else this part does not count as free.

Source: docs/decisions/047.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

#: A session and a root may together hold this many times the amount that they leave free.
TIMES_LEFT: Final = 2
#: One part in so many is kept for operators.
KEPT_PART: Final = 16

Quota = Literal["root", "session", "whole"]


class Shortage(Struct, frozen=True):
    """Why something is refused."""

    #: The quota that is used up.
    quota: Quota
    #: How much its holder has of it.
    held: int
    #: How much the holder may have at most to get more now.
    limit: int


class Pool:
    """A fixed amount that is shared. `capacity` is all of it; `kept` of that is for operators only."""

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
        """The free amount, for an operator's own event or for any other; never below 0."""
        return max(0, self.capacity - self.held - (0 if operator else self.kept))

    def allows(self, weight: int, amount: int, *, operator: bool) -> bool:
        """Whether a session and a root that together hold `weight` may have `amount` more."""
        left = self.capacity - self.held - amount - (0 if operator else self.kept)
        return left >= 0 and weight <= TIMES_LEFT * left

    def may_take(self, session: str, root: str, amount: int, *, operator: bool) -> bool:
        """Whether this root of this session may have `amount` more."""
        weight = self._sessions.get(session, 0) + self._roots.get(root, 0)
        return self.allows(weight, amount, operator=operator)

    def shortage(self, session: str, root: str, amount: int, *, operator: bool) -> Shortage | None:
        """Why this root may not have `amount` more; None when it may."""
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
        """Count `amount` more without a check: the caller has checked the rule, or has no choice."""
        self.held += amount
        sessions, roots = self._sessions, self._roots
        sessions[session] = sessions.get(session, 0) + amount
        # For the first piece, store the caller's own number object: there may be 100,000 roots with one piece each.
        roots[root] = roots[root] + amount if root in roots else amount

    def give(self, session: str, root: str, amount: int) -> None:
        """Count `amount` less. It was taken under the same names."""
        self.held -= amount
        for holders, name in ((self._sessions, session), (self._roots, root)):
            left = holders[name] - amount
            if left:
                holders[name] = left
            else:
                del holders[name]


def kept_of(amount: int) -> int:
    """The part of `amount` that is kept for operators."""
    return max(1, amount // KEPT_PART)


def describe_shortage(shortage: Shortage, root: str, what: str, amount: int, capacity: int) -> str:
    """A shortage in words: the quota and the numbers. `what` names the thing that is counted."""
    refused = f"no room for {amount:,} {what} of root {root[:100]!r} now"
    if shortage.quota == "whole":
        return f"{refused}: all together hold {shortage.held:,} of {shortage.limit:,} (quota: whole)"
    whose = "this root" if shortage.quota == "root" else "its session"
    limit = max(0, shortage.limit)
    return (
        f"{refused}: {whose} holds {shortage.held:,}, and gets more once that is at most {limit:,}; "
        f"there are {capacity:,} in all (quota: {shortage.quota})"
    )
