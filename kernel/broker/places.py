"""Places for turns: who has a place, who waits for one, and who is next. Pure.

A turn needs a place while it runs. An agent that is being started for a turn already has the place. The number of
places is fixed, and some more are kept for events that operators send themselves.

Rules.
- The rule of shares decides who may have a place (shares.py). Of those that wait, the lightest is first (wishes.py).
- An instance that may not have a place of its own may borrow the place of a turn that waits for it (loans.py).
- A place is taken for an event (`Claim`), and is counted with its session and root. When several events wait for one
  instance, the place may be counted with any of them.

A key stands for an instance.

Source: docs/decisions/047.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Generic, TypeVar

from msgspec import Struct

from goondan.kernel.broker.loans import Loans
from goondan.kernel.broker.shares import Pool
from goondan.kernel.broker.wishes import First, WaitingLine

Key = TypeVar("Key")


class Claim(Struct, frozen=True):
    """The event for which a place is taken."""

    #: The session that the place is counted with.
    session: str
    #: The root that the place is counted with.
    root: str
    #: True when an operator sent the event.
    operator: bool = False
    #: The id of the event whose turn waits for this one; None when no turn waits.
    lender: str | None = None
    #: How many turns wait for it in a row.
    depth: int = 0


class Grant(Struct, Generic[Key], frozen=True):
    """A place that may be given now."""

    #: Who gets it.
    key: Key
    #: The claim on which it is given.
    claim: Claim
    #: True when it is the place of the claim's lender.
    lent: bool


class Places(Generic[Key]):
    """All places: `number`, and `kept` more for operators."""

    def __init__(self, number: int, kept: int) -> None:
        self.pool = Pool(number + kept, kept)
        self._loans: Loans[Key] = Loans(number)
        turns = count()
        self._common: WaitingLine[Key] = WaitingLine(self.pool, turns)
        self._operators: WaitingLine[Key] = WaitingLine(self.pool, turns)
        self._held: dict[Key, Grant[Key]] = {}
        #: For each key that waits: root -> claim.
        self._claims: dict[Key, dict[str, Claim]] = {}

    @property
    def capacity(self) -> int:
        """How many places there are now, with those that are lent."""
        return self.pool.capacity + self._loans.lent

    @property
    def lent(self) -> int:
        """How many places are lent."""
        return self._loans.lent

    @property
    def waiting(self) -> int:
        """How many keys wait for a place."""
        return len(self._claims)

    def holds(self, key: Key) -> bool:
        """Whether this key has a place."""
        return key in self._held

    def waits(self, key: Key) -> bool:
        """Whether this key waits for a place."""
        return key in self._claims

    def take(self, key: Key, claim: Claim) -> bool:
        """Take a place at once. False when somebody waits or the rule of shares does not allow it."""
        if self._claims:
            return False
        if self.pool.may_take(claim.session, claim.root, 1, operator=claim.operator):
            self.grant(Grant(key, claim, lent=False))
            return True
        if claim.lender is not None and self._loans.may_lend(claim.lender, claim.root, claim.depth):
            self.grant(Grant(key, claim, lent=True))
            return True
        return False

    def force(self, key: Key, claim: Claim) -> None:
        """Count a place that its process already has: it is too late to ask the rule of shares."""
        if key not in self._held:
            self.grant(Grant(key, claim, lent=False))

    def wait(self, key: Key, claims: Iterable[Claim]) -> None:
        """Wait for a place on any of these claims, in addition to its earlier claims."""
        if key in self._held:
            return
        known = self._claims.setdefault(key, {})
        for claim in claims:
            if claim.root not in known:
                known[claim.root] = claim
                (self._operators if claim.operator else self._common).add(key, claim.session, claim.root)
            if claim.lender is not None:
                self._loans.wait(key, claim.lender, claim.root, claim.depth)

    def withdraw(self, key: Key) -> None:
        """This key does not wait any more."""
        if self._claims.pop(key, None) is not None:
            self._common.discard(key)
            self._operators.discard(key)
            self._loans.discard(key)

    def first(self) -> Grant[Key] | None:
        """Who may have a place now. None when nobody waits, or when none of those who wait may have one."""
        best: First[Key] | None = None
        for line, operator in ((self._common, False), (self._operators, True)):
            found = line.first()
            if found is None or not self.pool.allows(found.weight, 1, operator=operator):
                continue
            if best is None or (found.weight, found.turn) < (best.weight, best.turn):
                best = found
        if best is not None:
            return Grant(best.key, self._claims[best.key][best.root], lent=False)
        loan = self._loans.first()
        if loan is None:
            return None
        key, lender, root, depth = loan
        return Grant(key, Claim(self._claims[key][root].session, root, lender=lender, depth=depth), lent=True)

    def grant(self, grant: Grant[Key]) -> None:
        """Give the place."""
        key, claim = grant.key, grant.claim
        if key in self._claims:
            self.withdraw(key)
        self._held[key] = grant
        if grant.lent:
            self._loans.lend(key, claim.lender or "", claim.root, claim.depth)
            return
        self.pool.take(claim.session, claim.root, 1)
        if self._claims:
            self._common.served(claim.session, claim.root)
            self._operators.served(claim.session, claim.root)

    def release(self, key: Key) -> None:
        """Take the place back."""
        grant = self._held.pop(key, None)
        if grant is None:
            return
        if grant.lent:
            self._loans.give_back(key)
            return
        claim = grant.claim
        self.pool.give(claim.session, claim.root, 1)
        if self._claims:
            self._common.lighter(claim.session, claim.root)
            self._operators.lighter(claim.session, claim.root)

    def over(self, event_id: str) -> None:
        """The turn of this event has ended: it does not lend its place any more."""
        self._loans.over(event_id)
