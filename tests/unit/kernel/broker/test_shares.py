"""The rule of shares, who is next for a place, and places that are lent: with any demand, in any order."""

from __future__ import annotations

from itertools import count, cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from goondan.kernel.broker.state.shares import (
    LENT_BY_ROOT,
    LENT_SPARE,
    Claim,
    Loans,
    Places,
    Pool,
    WaitingQueue,
    describe_shortage,
    kept_of,
)
from tests.checks import there

NUMBERS = st.integers(0, 6)


def fill(pool: Pool, session: str, root: str, *, operator: bool = False) -> int:
    """Take one after the other, as long as it is allowed."""
    taken = 0
    while pool.may_take(session, root, 1, operator=operator):
        pool.take(session, root, 1)
        taken += 1
    return taken


# --- the rule


def test_alone_a_root_gets_half_and_a_session_two_thirds() -> None:
    pool = Pool(256 + 16, 16)
    assert fill(pool, "a", "r") == 128
    pool = Pool(256 + 16, 16)
    for number in range(256):
        if pool.may_take("a", f"r{number}", 1, operator=False):
            pool.take("a", f"r{number}", 1)
    assert pool.of_session("a") == 171


def test_two_that_take_in_turns_get_a_third_each_and_a_third_stays_free() -> None:
    pool = Pool(300, 0)
    for _ in range(300):
        for name in "ab":
            if pool.may_take(name, name, 1, operator=False):
                pool.take(name, name, 1)
    assert 99 <= pool.of_session("a") <= 100 and 99 <= pool.of_session("b") <= 100
    assert fill(pool, "c", "c") > 0


def test_who_has_taken_half_gets_nothing_more_until_another_has_as_much() -> None:
    pool = Pool(256, 0)
    fill(pool, "a", "a")
    others = fill(pool, "b", "b")
    assert 0 < others < 128
    while pool.of_root("a") > pool.of_root("b"):
        pool.give("a", "a", 1)  # its turns end
        fill(pool, "b", "b")
        assert not pool.may_take("a", "a", 1, operator=False) or pool.of_root("a") <= pool.of_root("b") + 1
    assert abs(pool.of_root("a") - pool.of_root("b")) <= 2


def test_a_root_leaves_room_for_others_of_its_session() -> None:
    pool = Pool(256, 0)
    assert fill(pool, "connector", "mallory") == 128
    assert [fill(pool, "connector", name) > 0 for name in ("alice", "bob", "carol")] == [True] * 3


def test_the_last_ones_are_kept_for_operators() -> None:
    pool = Pool(8 + 2, 2)
    for name in map(str, range(8)):
        pool.take(name, name, 1)
    assert not pool.may_take("new", "new", 1, operator=False)
    shortage = there(pool.shortage("new", "new", 1, operator=False))
    assert (shortage.quota, shortage.held, shortage.limit) == ("whole", 8, 8)
    assert pool.may_take("new", "new", 1, operator=True)
    pool.take("new", "new", 1)
    assert not pool.may_take("new", "again", 1, operator=True), "one that holds something does not get the last one"
    assert pool.may_take("another", "another", 1, operator=True)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 16])
def test_with_few_there_is_one_for_whoever_holds_none(number: int) -> None:
    pool = Pool(number + kept_of(number), kept_of(number))
    assert 1 <= fill(pool, "a", "a") <= max(1, number // 2 + 1)
    assert pool.may_take("operator", "operator", 1, operator=True)


def test_a_refusal_names_the_quota_the_root_and_the_numbers() -> None:
    pool = Pool(160, 10)
    fill(pool, "s", "r")
    shortage = there(pool.shortage("s", "r", 1, operator=False))
    text = describe_shortage(shortage, "r\x1b[31m", "open messages", 1, pool.capacity)
    assert "(quota: root)" in text and "holds 75" in text and "160 in all" in text and "\x1b" not in text
    for number in range(200):
        if pool.may_take("s", f"r{number}", 1, operator=False):
            pool.take("s", f"r{number}", 1)
    assert there(pool.shortage("s", "new", 1, operator=False)).quota == "session"


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(1, 40), st.booleans(), st.booleans()), max_size=200))
def test_whatever_is_taken_and_given_the_rule_holds_and_nothing_is_lost(
    steps: list[tuple[int, int, int, bool, bool]],
) -> None:
    pool = Pool(200, 12)
    held: list[tuple[str, str, int]] = []
    for session, root, amount, give, operator in steps:
        names = (f"s{session}", f"r{session}.{root}")
        if give and held:
            pool.give(*held.pop(0))
            continue
        weight = pool.of_session(names[0]) + pool.of_root(names[1])
        allowed = pool.may_take(*names, amount, operator=operator)
        assert allowed == (pool.shortage(*names, amount, operator=operator) is None)
        if allowed:
            pool.take(*names, amount)
            held.append((*names, amount))
            left = pool.capacity - pool.held - (0 if operator else pool.kept)
            assert left >= 0 and weight <= 2 * left
    assert pool.held == sum(amount for _, _, amount in held)
    for one in held:
        pool.give(*one)
    assert (pool.held, pool.of_session("s0"), pool.of_root("r0.0")) == (0, 0, 0)


# --- who is next


class Lines(RuleBasedStateMachine):
    """The heaps beside a list of all that wait: the first is always one of the lightest."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(1000, 0)
        self.line: WaitingQueue[int] = WaitingQueue(self.pool, count())
        self.waiting: dict[int, list[tuple[str, str]]] = {}
        self.held: list[tuple[str, str]] = []
        self.keys = 0

    @rule(session=NUMBERS, root=NUMBERS, again=st.booleans())
    def add(self, session: int, root: int, again: bool) -> None:
        if not (again and self.waiting):
            self.keys += 1
        key = self.keys
        names = (f"s{session}", f"r{session}.{root}")
        self.line.add(key, *names)
        if names not in self.waiting.setdefault(key, []):
            self.waiting[key].append(names)

    @precondition(lambda self: self.waiting)
    @rule(at=st.integers(0, 50))
    def leave(self, at: int) -> None:
        key = list(self.waiting)[at % len(self.waiting)]
        del self.waiting[key]
        self.line.discard(key)

    @precondition(lambda self: self.waiting)
    @rule()
    def serve(self) -> None:
        first = there(self.line.first())
        self.line.discard(first.key)
        del self.waiting[first.key]
        self.pool.take(first.session, first.root, 1)
        self.line.served(first.session, first.root)
        self.held.append((first.session, first.root))

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 50))
    def end(self, at: int) -> None:
        names = self.held.pop(at % len(self.held))
        self.pool.give(*names, 1)
        self.line.lighter(*names)

    @invariant()
    def the_first_is_the_lightest(self) -> None:
        first = self.line.first()
        assert len(self.line._where) == len(self.waiting)
        if first is None:
            assert not self.waiting
            return
        assert (first.session, first.root) in self.waiting[first.key]
        weights = [self.pool.of_session(s) + self.pool.of_root(r) for names in self.waiting.values() for s, r in names]
        assert first.weight == min(weights)


TestLines = Lines.TestCase
TestLines.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)


def test_equals_come_in_turns_and_within_a_root_in_order() -> None:
    pool = Pool(1000, 0)
    line: WaitingQueue[str] = WaitingQueue(pool, count())
    for number in range(3):
        line.add(f"a{number}", "a", "a")
    for number in range(3):
        line.add(f"b{number}", "b", f"b{number}")
    order = []
    while (first := line.first()) is not None:
        order.append(first.key)
        line.discard(first.key)
        line.served(first.session, first.root)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_flood_of_roots_is_one_session_and_the_next_one_is_first() -> None:
    places: Places[str] = Places(256, 16)
    for number in range(1500):
        places.wait(f"flood{number}", [Claim("flood", f"r{number}")])
    while (grant := places.first()) is not None:
        places.grant(grant)
    assert (places.pool.held, places.waiting) == (171, 1500 - 171)
    places.wait("one", [Claim("somebody", "else")])
    grant = places.first()
    assert grant is not None and grant.key == "one"


def test_whoever_waits_behind_may_pay() -> None:
    places: Places[str] = Places(8, 1)
    for number in range(8):
        places.wait(f"x{number}", [Claim("flood", "root")])
    while (grant := places.first()) is not None:
        places.grant(grant)
    assert places.first() is None
    places.wait("x7", [Claim("person", "other")])
    grant = places.first()
    assert grant is not None and (grant.key, grant.claim.session) == ("x7", "person")
    places.grant(grant)
    places.release("x7")
    assert places.pool.of_session("person") == 0


# --- lending


def test_a_turn_that_waits_lends_its_place_to_one_at_a_time() -> None:
    places: Places[str] = Places(1, 1)
    main = Claim("s", "r")
    assert places.take("main", main)
    asked = Claim("s", "r", lender="e-main", depth=1)
    places.wait("one", [asked])
    places.wait("two", [asked])
    grant = places.first()
    assert grant is not None and (grant.key, grant.lent) == ("one", True)
    places.grant(grant)
    assert places.first() is None
    places.release("one")
    grant = places.first()
    assert grant is not None and (grant.key, places.lent) == ("two", 0)
    places.over("e-main")
    assert places.first() is None, "it waits for nobody any more"


def test_a_root_lends_within_its_bound_and_the_deepest_first() -> None:
    loans: Loans[str] = Loans(1000)

    def lend() -> list[str]:
        lent = []
        while (found := loans.first()) is not None:
            loans.discard(found[0])
            loans.lend(*found)
            lent.append(found[0])
        return lent

    for number in range(50):
        loans.wait(f"shallow{number}", f"lender{number}", "r", 1)
    assert len(lend()) == LENT_BY_ROOT + 1
    loans.wait("deep", "shallow0's turn", "r", 2)
    assert lend() == ["deep"]
    loans.give_back("deep")
    assert lend() == [], "it had one more than the others may have"
    loans.give_back("shallow0")
    loans.wait("other", "another's", "another root", 1)
    assert sorted(lend()) == ["other", "shallow9"], "what one root has lent is no other's loss"


@settings(max_examples=50, deadline=None)
@given(
    number=st.integers(1, 6),
    roots=st.integers(1, 12),
    fans=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    depth=st.integers(1, 32),
)
def test_trees_of_questions_never_stand_still_for_want_of_places(
    number: int, roots: int, fans: list[int], depth: int
) -> None:
    """Every turn asks some others and waits for all of them before it ends; a root is limited to some 60 turns."""
    places: Places[str] = Places(number, 1)
    fan = cycle(fans)
    turns: dict[str, tuple[str, int, list[str]]] = {}  # name -> root, depth, what it still waits for
    parents: dict[str, str] = {}
    made = dict.fromkeys(map(str, range(roots)), 1)
    for root in made:
        places.wait(root, [Claim(f"s{root}", root, operator=True)])
    done = 0
    while places.waiting or turns:
        if (grant := places.first()) is not None:
            places.grant(grant)
            name, root, at = grant.key, grant.claim.root, grant.key.count("/")
            asks = [f"{name}/{n}" for n in range(next(fan))] if at < depth and made[root] < 60 else []
            made[root] += len(asks)
            turns[name] = (root, at, list(asks))
            for asked in asks:
                parents[asked] = name
                places.wait(asked, [Claim(f"s{root}", root, lender=name, depth=at + 1)])
            assert places.lent <= number + LENT_SPARE + 32
            continue
        ready = [name for name, (_, _, waits) in turns.items() if not waits]
        assert ready, "everybody waits for a place or for somebody who does"
        name = ready[0]
        del turns[name]
        places.release(name)
        places.over(name)
        done += 1
        if name in parents:
            turns[parents[name]][2].remove(name)
    assert done == sum(made.values())
    assert (places.pool.held, places.lent, places.waiting) == (0, 0, 0)
