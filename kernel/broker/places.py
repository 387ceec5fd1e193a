"""Places for turns: who has one, who waits, and who is next. Pure.

A turn needs a place while it runs, and an agent that is being started for it has that place already. There is a fixed
number of them, and some more that are kept for what operators send themselves.

Rules.
- A place goes to whoever may have one by the rule of shares (shares.py), of those that wait to the lightest
  (wishes.py).
- Who may not have one of its own may get the place of a turn that waits for it (loans.py).
- A place is taken for a reason (`Claim`): an event, whose session and root it is counted with. Where several wait for
  one instance, any of them may pay.

Keys are whatever stands for an instance.

Source: docs/decisions/047.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Generic, TypeVar

from msgspec import Struct

from kernel.broker.loans import Loans
from kernel.broker.shares import Pool
from kernel.broker.wishes import First, Line

Key = TypeVar("Key")


class Claim(Struct, frozen=True):
    """Why somebody is to get a place: a session's, a root's. `operator`: an operator sent it. `lender` is the id of the
    event whose turn waits for it, and `depth` how many wait for it in a row.
    """

    session: str
    root: str
    operator: bool = False
    lender: str | None = None
    depth: int = 0


class Grant(Struct, Generic[Key], frozen=True):
    """Who may have a place now, and on which claim; `lent`: its lender's."""

    key: Key
    claim: Claim
    lent: bool


class Places(Generic[Key]):
    """`number` of them, and `kept` more for operators."""

    def __init__(self, number: int, kept: int) -> None:
        self.pool = Pool(number + kept, kept)
        self._loans: Loans[Key] = Loans(number)
        turns = count()
        self._common: Line[Key] = Line(self.pool, turns)
        self._operators: Line[Key] = Line(self.pool, turns)
        self._held: dict[Key, Grant[Key]] = {}
        #: Of those that wait: root -> claim.
        self._claims: dict[Key, dict[str, Claim]] = {}

    @property
    def capacity(self) -> int:
        """How many may have one now, with those that are lent."""
        return self.pool.capacity + self._loans.lent

    @property
    def lent(self) -> int:
        """How many are lent."""
        return self._loans.lent

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._claims)

    def holds(self, key: Key) -> bool:
        """Whether it has a place."""
        return key in self._held

    def waits(self, key: Key) -> bool:
        """Whether it waits for one."""
        return key in self._claims

    def take(self, key: Key, claim: Claim) -> bool:
        """A place at once, where nobody waits and the rule allows it."""
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
        """It has a place already, as its process says: nobody can be asked any more."""
        if key not in self._held:
            self.grant(Grant(key, claim, lent=False))

    def wait(self, key: Key, claims: Iterable[Claim]) -> None:
        """Stand in line for a place on any of these claims, beside those that it has made before."""
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
        """It waits no more."""
        if self._claims.pop(key, None) is not None:
            self._common.discard(key)
            self._operators.discard(key)
            self._loans.discard(key)

    def first(self) -> Grant[Key] | None:
        """Who may have a place now. None: nobody waits, or nobody of those who wait may have one."""
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
        """It has the place."""
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
        """It has none any more."""
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
        """The turn of this event has ended: it lends its place to nobody any more."""
        self._loans.over(event_id)
