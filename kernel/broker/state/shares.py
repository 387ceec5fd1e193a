"""Shares of what is scarce: who may have more of it, who waits for a place of a turn, and who is next. Pure.

An amount (`Pool`) is counted by session (who began the work) and by root (the event that it began with). The rule is:

    the sum of what a session and a root hold may be at most twice the amount that is free after the next piece.

So one root alone gets half of everything, and a session with many roots two thirds. Two sessions with one root each get
a third each, and whoever comes next still finds something. The rule does not need to count who waits, and it takes
nothing back: a holder that has more than the rule allows gets nothing more until the others have caught up. A holder
never takes the last piece. A part is kept for events that operators send themselves. For everybody else this part does
not count as free.

A turn needs a place while it runs (`Places`). An agent that is being started for a turn already has the place. The
number of places is fixed, and some more are kept for events that operators send themselves.
- Of those that wait, the one whose session and root hold the least is first (`WaitingQueue`).
- An instance that may not have a place of its own may borrow the place of a turn that waits for it (`Loans`).
- A place is taken for an event (`Claim`), and is counted with its session and root. When several events wait for one
  instance, the place may be counted with any of them.

A key stands for an instance.

Source: docs/decisions/047.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Final, Generic, Literal, TypeVar

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

    def may_take(self, session: str, root: str, amount: int, *, operator: bool) -> bool:
        """Whether this root of this session may have `amount` more."""
        left = self.capacity - self.held - amount - (0 if operator else self.kept)
        return left >= 0 and self._sessions.get(session, 0) + self._roots.get(root, 0) <= TIMES_LEFT * left

    def shortage(self, session: str, root: str, amount: int, *, operator: bool) -> Shortage | None:
        """Why this root may not have `amount` more; None when it may."""
        if self.may_take(session, root, amount, operator=operator):
            return None
        of_session, of_root = self.of_session(session), self.of_root(root)
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


Key = TypeVar("Key")

#: When a heap has so many more entries than things that wait, it is made again.
_STALE: Final = 64


class _Root(Struct, Generic[Key]):
    """Those that wait for one root of one session."""

    #: Orders equal ones: the one that was served last is last.
    turn: int
    #: Those that wait.
    keys: dict[Key, None] = {}


class _Session(Struct, Generic[Key]):
    """The waiting roots of one session."""

    #: As that of a root.
    turn: int
    #: By name.
    roots: dict[str, _Root[Key]] = {}
    #: Amount that the root holds, its turn, its name.
    heap: list[tuple[int, int, str]] = []


class First(Struct, Generic[Key]):
    """The one that is next."""

    #: The sum of what its session and its root hold.
    weight: int
    #: Orders equal weights: the lower one is first.
    turn: int
    #: Who it is.
    key: Key
    #: The session that it is counted with.
    session: str
    #: The root that it is counted with.
    root: str


class WaitingQueue(Generic[Key]):
    """Everybody that waits for a piece of one pool. Queues that are compared share one counter of `turns`."""

    def __init__(self, pool: Pool, turns: Iterator[int]) -> None:
        self._pool = pool
        self._turns = turns
        self._sessions: dict[str, _Session[Key]] = {}
        #: Sessions as (sum of what the session and its lightest root hold, turn, name).
        self._heap: list[tuple[int, int, str]] = []
        self._where: dict[Key, list[tuple[str, str]]] = {}

    def add(self, key: Key, session: str, root: str) -> None:
        """Wait in the queue of a root, behind the others. A second call changes nothing."""
        found = self._sessions.get(session)
        if found is None:
            found = self._sessions[session] = _Session(next(self._turns))
        waiting = found.roots.get(root)
        new = waiting is None
        if waiting is None:
            waiting = found.roots[root] = _Root(next(self._turns))
        if key in waiting.keys:
            return
        waiting.keys[key] = None
        self._where.setdefault(key, []).append((session, root))
        if new:
            self._enter_root(found, root)
            self._enter(session, found)

    def discard(self, key: Key) -> None:
        """Leave every queue."""
        for session, root in self._where.pop(key, ()):
            found = self._sessions[session]
            waiting = found.roots[root]
            del waiting.keys[key]
            if not waiting.keys:
                del found.roots[root]
                if not found.roots:
                    del self._sessions[session]

    def served(self, session: str, root: str) -> None:
        """An instance of this root got a place: roots with an equal weight are first now."""
        found = self._sessions.get(session)
        if found is None:
            return
        found.turn = next(self._turns)
        waiting = found.roots.get(root)
        if waiting is not None:
            waiting.turn = next(self._turns)
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
            waiting = found.roots.get(name)
            if waiting is None:
                heappop(heap)
                continue
            now = (self._pool.of_root(name), waiting.turn, name)
            if heap[0] == now:
                return now[0], name
            heapreplace(heap, now)

    def _enter_root(self, found: _Session[Key], root: str) -> None:
        heap = found.heap
        heappush(heap, (self._pool.of_root(root), found.roots[root].turn, root))
        if len(heap) > 2 * len(found.roots) + _STALE:
            heap[:] = [(self._pool.of_root(name), waiting.turn, name) for name, waiting in found.roots.items()]
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


#: Places that one root may have lent, in addition to one for each step of its longest chain.
LENT_BY_ROOT: Final = 8
#: Places that all roots may have lent, in addition to the number of places: four longest chains (events.MAX_CHAIN).
LENT_SPARE: Final = 128


class _Lender(Struct, Generic[Key]):
    """A turn that waits, and those that it waits for."""

    #: Its root.
    root: str
    #: How many turns wait in a row for each that wants its place.
    depth: int
    #: Those that want its place.
    waiting: dict[Key, None] = {}
    #: The one that has its place now.
    to: Key | None = None
    #: True when it is in a heap.
    entered: bool = False


class Loans(Generic[Key]):
    """All lenders. The name of a lender is the id of the event of its turn. `places` is the number of places."""

    def __init__(self, places: int) -> None:
        self.lent = 0
        self._most = places + LENT_SPARE
        self._of_root: dict[str, int] = {}
        self._lenders: dict[str, _Lender[Key]] = {}
        self._where: dict[Key, list[str]] = {}
        self._borrowed: dict[Key, tuple[str, str]] = {}  # key -> lender, root
        #: Lenders as (-depth, turn, lender, root).
        self._heap: list[tuple[int, int, str, str]] = []
        #: Root -> lenders that wait until the root has lent less.
        self._parked: dict[str, list[tuple[int, int, str, str]]] = {}
        self._turns = count()

    def may_lend(self, lender: str, root: str, depth: int) -> bool:
        """Whether this turn may lend its place to a borrower at `depth`."""
        known = self._lenders.get(lender)
        return (known is None or known.to is None) and self._within(root, depth) and self._in_all(depth)

    def wait(self, key: Key, lender: str, root: str, depth: int) -> None:
        """`key` wants the place of this turn."""
        found = self._lenders.get(lender)
        if found is None:
            found = self._lenders[lender] = _Lender(root, depth)
        if key not in found.waiting:
            found.waiting[key] = None
            self._where.setdefault(key, []).append(lender)
            self._enter(lender, found)

    def discard(self, key: Key) -> None:
        """`key` does not wait any more."""
        for lender in self._where.pop(key, ()):
            found = self._lenders.get(lender)
            if found is not None:
                found.waiting.pop(key, None)
                self._forget(lender, found)

    def first(self) -> tuple[Key, str, str, int] | None:
        """The next borrower: its key, its lender, their root, and the depth. None when nobody may borrow now."""
        heap = self._heap
        while heap:
            _, _, lender, root = heap[0]
            found = self._lenders.get(lender)
            if found is None or found.to is not None or not found.waiting:
                heappop(heap)
                if found is not None:
                    found.entered = False
                self._unpark(root)  # it may have been unparked in the place of another
                continue
            if not self._within(found.root, found.depth):
                heappush(self._parked.setdefault(found.root, []), heappop(heap))
                continue
            if not self._in_all(found.depth):
                return None
            return next(iter(found.waiting)), lender, found.root, found.depth
        return None

    def lend(self, key: Key, lender: str, root: str, depth: int) -> None:
        """`key` borrows the place."""
        found = self._lenders.get(lender)
        if found is None:
            found = self._lenders[lender] = _Lender(root, depth)
        found.to = key
        self._borrowed[key] = lender, root
        self._of_root[root] = self._of_root.get(root, 0) + 1
        self.lent += 1

    def give_back(self, key: Key) -> None:
        """`key` gives the place back: it has done its work, or is gone."""
        lender, root = self._borrowed.pop(key)
        self.lent -= 1
        left = self._of_root.pop(root) - 1
        if left:
            self._of_root[root] = left
        found = self._lenders.get(lender)
        if found is not None and found.to is key:
            found.to = None
            if found.waiting:
                self._enter(lender, found)
            else:
                self._forget(lender, found)
        self._unpark(root)

    def over(self, lender: str) -> None:
        """The lender's turn has ended, so it waits for nobody any more."""
        found = self._lenders.pop(lender, None)
        if found is not None:
            for key in found.waiting:
                lenders = self._where[key]
                lenders.remove(lender)
                if not lenders:
                    del self._where[key]

    def _within(self, root: str, depth: int) -> bool:
        return self._of_root.get(root, 0) < LENT_BY_ROOT + depth

    def _in_all(self, depth: int) -> bool:
        return self.lent < self._most + depth

    def _enter(self, lender: str, found: _Lender[Key]) -> None:
        if not found.entered and found.to is None:
            found.entered = True
            heappush(self._heap, (-found.depth, next(self._turns), lender, found.root))

    def _unpark(self, root: str) -> None:
        """The root has one loan less: put its deepest parked lender back into the heap."""
        parked = self._parked.get(root)
        if parked:
            heappush(self._heap, heappop(parked))
            if not parked:
                del self._parked[root]

    def _forget(self, lender: str, found: _Lender[Key]) -> None:
        if not found.waiting and found.to is None:
            self._lenders.pop(lender, None)


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
        self._common: WaitingQueue[Key] = WaitingQueue(self.pool, turns)
        self._operators: WaitingQueue[Key] = WaitingQueue(self.pool, turns)
        self._held: dict[Key, Grant[Key]] = {}
        #: For each key that waits: root -> claim.
        self.claims: dict[Key, dict[str, Claim]] = {}
        #: The turn of the event with this id has ended: it does not lend its place any more.
        self.over = self._loans.over

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
        return len(self.claims)

    def holds(self, key: Key) -> bool:
        """Whether this key has a place."""
        return key in self._held

    def waits(self, key: Key) -> bool:
        """Whether this key waits for a place."""
        return key in self.claims

    def take(self, key: Key, claim: Claim) -> bool:
        """Take a place at once. False when somebody waits or the rule of shares does not allow it."""
        if self.claims:
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
        known = self.claims.setdefault(key, {})
        for claim in claims:
            if claim.root not in known:
                known[claim.root] = claim
                (self._operators if claim.operator else self._common).add(key, claim.session, claim.root)
            if claim.lender is not None:
                self._loans.wait(key, claim.lender, claim.root, claim.depth)

    def withdraw(self, key: Key) -> None:
        """This key does not wait any more."""
        if self.claims.pop(key, None) is not None:
            self._common.discard(key)
            self._operators.discard(key)
            self._loans.discard(key)

    def first(self) -> Grant[Key] | None:
        """Who may have a place now. None when nobody waits, or when none of those who wait may have one."""
        best: First[Key] | None = None
        for queue, operator in ((self._common, False), (self._operators, True)):
            found = queue.first()
            if found is None or not self.pool.may_take(found.session, found.root, 1, operator=operator):
                continue
            if best is None or (found.weight, found.turn) < (best.weight, best.turn):
                best = found
        if best is not None:
            return Grant(best.key, self.claims[best.key][best.root], lent=False)
        loan = self._loans.first()
        if loan is None:
            return None
        key, lender, root, depth = loan
        return Grant(key, Claim(self.claims[key][root].session, root, lender=lender, depth=depth), lent=True)

    def grant(self, grant: Grant[Key]) -> None:
        """Give the place."""
        key, claim = grant.key, grant.claim
        if self.claims:
            self.withdraw(key)
        self._held[key] = grant
        if grant.lent:
            self._loans.lend(key, claim.lender or "", claim.root, claim.depth)
            return
        self.pool.take(claim.session, claim.root, 1)
        if self.claims:
            self._common.served(claim.session, claim.root)
            self._operators.served(claim.session, claim.root)

    def release(self, key: Key) -> None:
        """Take the place back. The key does not wait any more either."""
        if self.claims:
            self.withdraw(key)
        grant = self._held.pop(key, None)
        if grant is None:
            return
        if grant.lent:
            self._loans.give_back(key)
            return
        claim = grant.claim
        self.pool.give(claim.session, claim.root, 1)
        if self.claims:
            self._common.lighter(claim.session, claim.root)
            self._operators.lighter(claim.session, claim.root)
