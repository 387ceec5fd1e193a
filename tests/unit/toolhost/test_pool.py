"""Which jail a call goes to: sharing, room, eviction of the longest idle, and the queue behind it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from goondan.schemas.bundle.launch import SandboxSpec
from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.calls.machine import LEFT_PART, Assign, End, JailPool, PoolAction, Start
from goondan.toolhost.calls.session import MAX_CALLS_PER_JAIL, MAX_PENDING_PER_JAIL, JailSession, Key, key_of
from goondan.toolhost.policy.launch_plan import MAX_CALLS
from tests.unit.toolhost.test_calls import call


def calls_without_a_place(pool: JailPool) -> int:
    """How many calls wait."""
    return sum(map(len, pool._waiting.values()))


class Driver:
    """Performs actions like the host does, on jails that are only names. `prompt`: they are launched at once."""

    def __init__(self, max_jails: int, *, prompt: bool = True) -> None:
        self.prompt = prompt
        self.pool = JailPool(max_jails)
        self.where: dict[str, JailSession] = {}
        self.launching: list[JailSession] = []
        self.live: list[JailSession] = []
        self.ending: list[JailSession] = []
        self.now = 0.0

    def perform(self, actions: list[PoolAction]) -> None:
        for action in actions:
            if isinstance(action, Start):
                assert action.session not in self.live + self.launching
                assert action.session.room == 0
                self.launching.append(action.session)
                if self.prompt:
                    self.launched(action.session)
            elif isinstance(action, Assign):
                self.enter(action.session, action.call)
            elif isinstance(action, End):
                assert not action.session.calls
                if action.session not in self.ending:
                    self.ending.append(action.session)

    def launched(self, slot: JailSession) -> None:
        self.launching.remove(slot)
        self.live.append(slot)
        self.perform(self.pool.launched(slot, self.now))

    def failed(self, slot: JailSession) -> list[Call]:
        """The jail could not be started; the calls that have waited for it."""
        self.launching.remove(slot)
        lost, actions = self.pool.failed(slot)
        self.perform(actions)
        return lost

    def enter(self, slot: JailSession, made: Call) -> None:
        assert slot in self.live
        assert not slot.closed
        assert made.id not in self.where
        self.pool.enter(slot, made.id, made)
        self.where[made.id] = slot

    def come(self, key: Key, made: Call) -> None:
        slot = self.pool.find(key)
        if slot is not None:
            self.enter(slot, made)
        else:
            self.perform(self.pool.place(key, made))

    def finish(self, made: Call) -> None:
        slot = self.where.pop(made.id)
        self.perform(self.pool.leave(slot, made.id, self.now))

    def over(self, slot: JailSession) -> list[Call]:
        """The jail has ended; the calls it still ran."""
        self.live.remove(slot)
        if slot in self.ending:
            self.ending.remove(slot)
        lost = list(slot.calls.values())
        for made in lost:
            self.where.pop(made.id)
        slot.calls.clear()
        self.perform(self.pool.gone(slot))
        return lost


@pytest.mark.parametrize(("forks", "places"), [(False, MAX_CALLS_PER_JAIL), (True, MAX_CALLS)])
def test_calls_of_one_key_share_a_jail_until_it_is_full(forks: bool, places: int) -> None:
    driver = Driver(2)
    calls = [call(str(number)) for number in range(places + 2)]
    for made in calls:
        if forks:
            made.tool = msgspec.structs.replace(made.tool, sandbox=SandboxSpec(isolation="call"))
        driver.come(key_of(made, forks=True) if forks else ("t",), made)
    assert (len(driver.where), len(driver.live), calls_without_a_place(driver.pool)) == (places, 1, 2)
    driver.finish(calls[0])
    assert calls[-2].id in driver.where
    assert calls_without_a_place(driver.pool) == 1
    assert not forks or len({key_of(made, forks=False) for made in calls}) == len(calls), "each has a jail of its own"


def of_root(name: str, root: str, agent: str = "a") -> Call:
    made = call(name, agent=agent)
    made.root_event = root
    return made


@pytest.mark.parametrize("pending", [False, True])
def test_one_root_does_not_take_every_jail(pending: bool) -> None:
    """A tool asked 64 instances of its own agent, each of which called a tool that blocks: nobody else had a jail."""
    driver = Driver(64)
    flood = [of_root(f"f{number}", "flood") for number in range(100)]
    for made in flood:
        driver.come(("t", "g", made.agent, made.id), made)
        if pending and made.id in driver.where:
            driver.perform(driver.pool.goes_on(driver.where[made.id], made.id))
    assert len(driver.where) == 64 - 64 // LEFT_PART
    others = [of_root(f"o{number}", f"other{number}") for number in range(64 // LEFT_PART)]
    for made in others:
        driver.come(("t", "g", made.agent, made.id), made)
        assert made.id in driver.where, "a jail at once"
    for made in others[:4]:
        driver.finish(made)
    assert len(driver.where) == 64 - 64 // LEFT_PART + 4, "what they leave is for the next, not for the flood"
    several = [of_root(f"s{number}", "several") for number in range(4)]
    for made in several:
        driver.come(("t", "g", made.agent, made.id), made)
        for slot in list(driver.ending):
            driver.over(slot)
    assert sum(made.id in driver.where for made in several) == 2, "as many as it leaves"
    for made in flood:
        if made.id in driver.where:
            driver.finish(made)
            for slot in list(driver.ending):
                driver.over(slot)
    assert calls_without_a_place(driver.pool) == 0, "and everything goes on when there is room"


def test_a_jail_that_goes_to_another_root_counts_there() -> None:
    driver = Driver(8)
    first = [of_root(f"a{number}", "a") for number in range(7)]
    for made in first:
        driver.come(("t", "g", "x", made.id), made)
        driver.finish(made)
    for made in first:
        again = of_root(f"{made.id}again", "b")
        driver.come(("t", "g", "x", made.id), again)
    driver.come(("t", "g", "x", "new"), of_root("more", "b"))
    assert "more" not in driver.where, "b has seven in use"
    driver.come(("t", "g", "x", "other"), of_root("other", "a"))
    assert "other" in driver.where


def test_the_longest_idle_jail_makes_room() -> None:
    driver = Driver(2)
    first, second, third = call("1"), call("2"), call("3")
    driver.come(("a",), first)
    driver.come(("b",), second)
    driver.finish(second)
    driver.now = 1.0
    driver.finish(first)
    driver.come(("c",), third)
    assert [slot.key for slot in driver.ending] == [("b",)]
    assert "3" not in driver.where
    driver.over(driver.ending[0])
    assert driver.where["3"].key == ("c",)


def test_one_ending_jail_is_enough_for_one_waiting_key() -> None:
    driver = Driver(2)
    idle = [call("1"), call("2")]
    for made in idle:
        driver.come((made.id,), made)
    for made in idle:
        driver.finish(made)
    driver.come(("x",), call("3"))
    driver.come(("x",), call("4"))
    assert len(driver.ending) == 1


def test_a_closed_slot_finishes_what_it_runs_and_new_calls_go_elsewhere() -> None:
    driver = Driver(2)
    first, second = call("1"), call("2")
    driver.come(("a",), first)
    driver.perform(driver.pool.close(driver.where["1"]))
    assert driver.ending == []
    driver.come(("a",), second)
    assert driver.where["1"] is not driver.where["2"]
    driver.finish(first)
    assert len(driver.ending) == 1
    assert driver.pool.close(driver.ending[0]) == []


def test_idle_jails_retire() -> None:
    driver = Driver(4)
    for number in range(3):
        made = call(str(number))
        driver.come((made.id,), made)
        driver.now = float(number)
        driver.finish(made)
    driver.perform(driver.pool.retire(1.0))
    assert [slot.key for slot in driver.ending] == [("0",), ("1",)]
    assert [slot.key for slot in driver.pool.idle()] == [("2",)]


def test_calls_wait_for_a_launch_and_can_be_withdrawn_meanwhile() -> None:
    driver = Driver(2, prompt=False)
    first, second = call("1"), call("2")
    driver.come(("a",), first)
    driver.come(("a",), second)
    (slot,) = driver.launching
    assert driver.pool.find(("a",)) is None
    for key in (("a",), ("a",), ("c",)):  # twice, and under a key that nobody has: it is gone already
        driver.pool.withdraw(key, first)
    assert calls_without_a_place(driver.pool) == 1
    driver.launched(slot)
    assert set(driver.where) == {"2"}
    driver.come(("b",), call("3"))
    driver.pool.withdraw(("b",), driver.pool._waiting[("b",)][0])
    driver.launched(driver.launching[0])
    assert [idle.key for idle in driver.pool.idle()] == [("b",)]  # it is there for the next one


def test_a_launch_that_fails_fails_those_who_waited_for_it() -> None:
    driver = Driver(1, prompt=False)
    driver.come(("a",), call("1"))
    driver.come(("b",), call("2"))
    driver.come(("a",), call("3"))
    assert [lost.id for lost in driver.failed(driver.launching[0])] == ["1", "3"]
    assert [slot.key for slot in driver.launching] == [("b",)]  # whose turn it is now


def test_a_slot_closed_while_it_is_launched_is_ended_when_it_is_there() -> None:
    driver = Driver(2, prompt=False)
    driver.come(("a",), call("1"))
    (first,) = driver.launching
    driver.perform(driver.pool.close(first))
    assert driver.ending == []
    second = driver.launching[1]
    driver.launched(first)
    assert driver.ending == [first]
    driver.launched(second)
    assert driver.where["1"] is second


def test_work_that_goes_on_leaves_its_place_to_calls() -> None:
    driver = Driver(1)
    for number in range(MAX_CALLS_PER_JAIL + 1):
        driver.come(("t",), call(str(number)))
    slot = driver.where["0"]
    assert calls_without_a_place(driver.pool) == 1
    driver.perform(driver.pool.goes_on(slot, "0"))
    assert calls_without_a_place(driver.pool) == 0
    assert slot.room == 0
    driver.finish(slot.calls["0"])
    assert slot.room == 0  # it had left it before
    driver.finish(slot.calls["1"])
    assert slot.room == 1


def test_work_that_goes_on_has_a_bound_of_its_own() -> None:
    driver = Driver(1)
    for number in range(MAX_PENDING_PER_JAIL):
        driver.come(("t",), call(str(number)))
        driver.perform(driver.pool.goes_on(driver.where[str(number)], str(number)))
    slot = driver.where["0"]
    assert slot.is_full_of_pending
    assert slot.room == MAX_CALLS_PER_JAIL
    driver.finish(slot.calls["7"])
    assert not slot.is_full_of_pending


class Jails(RuleBasedStateMachine):
    """Whatever comes: never too many jails, no call twice or nowhere, and all of them served in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(3, prompt=False)
        self.calls: dict[str, Call] = {}
        self.keys: dict[str, Key] = {}
        self.count = 0

    @rule(key=st.integers(0, 6))
    def come(self, key: int) -> None:
        self.count += 1
        made = call(str(self.count))
        self.calls[made.id], self.keys[made.id] = made, (str(key),)
        self.driver.come((str(key),), made)

    @precondition(lambda self: self.driver.launching)
    @rule(data=st.data(), well=st.booleans())
    def launch(self, data: st.DataObject, well: bool) -> None:
        slot = data.draw(st.sampled_from(self.driver.launching))
        if well:
            self.driver.launched(slot)
        else:
            for lost in self.driver.failed(slot):
                self.calls.pop(lost.id)

    @precondition(lambda self: self.driver.where)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """A running call is answered with `pending`."""
        name = data.draw(st.sampled_from(sorted(self.driver.where)))
        self.driver.perform(self.driver.pool.goes_on(self.driver.where[name], name))

    @precondition(lambda self: self.driver.where)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.driver.where)))
        self.driver.now += 1
        self.driver.finish(self.calls.pop(name))

    @precondition(lambda self: len(self.calls) > len(self.driver.where))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.calls.keys() - self.driver.where.keys())))
        self.driver.pool.withdraw(self.keys[name], self.calls.pop(name))

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data(), crash=st.booleans())
    def end(self, data: st.DataObject, crash: bool) -> None:
        slots = self.driver.live if crash else self.driver.ending
        if slots:
            for lost in self.driver.over(data.draw(st.sampled_from(slots))):
                self.calls.pop(lost.id)

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slots = self.driver.live + self.driver.launching
        self.driver.perform(self.driver.pool.close(data.draw(st.sampled_from(slots))))

    @rule(age=st.integers(0, 5))
    def retire(self, age: int) -> None:
        self.driver.perform(self.driver.pool.retire(self.driver.now - age))

    @invariant()
    def bounded_and_complete(self) -> None:
        pool = self.driver.pool
        assert len(self.driver.live) + len(self.driver.launching) == len(pool.sessions()) <= 3
        assert len(self.calls) == len(self.driver.where) + calls_without_a_place(pool)
        assert all(slot.closed for slot in self.driver.ending)
        if pool._waiting.keys() - pool._by_key.keys() and len(pool.sessions()) == 3:
            leaving = self.driver.ending or [slot for slot in self.driver.launching if slot.closed]
            assert leaving or not pool.idle(), "an idle jail keeps its place while calls wait for one"

    def teardown(self) -> None:
        for _ in range(10_000):
            if not self.calls:
                return
            for slot in list(self.driver.launching):
                self.driver.launched(slot)
            for name in list(self.driver.where):
                self.driver.finish(self.calls.pop(name))
            for slot in list(self.driver.ending):
                self.driver.over(slot)
        raise AssertionError("calls wait for ever")


TestJails = Jails.TestCase
TestJails.settings = settings(max_examples=40, stateful_step_count=40)


def test_the_next_jail_goes_to_the_agent_that_has_the_fewest() -> None:
    driver = Driver(3)
    many = [(call(f"m{n}"), ("t", "1", "many", str(n), "")) for n in range(6)]
    for made, key in many:
        driver.come(key, made)
    late, key = call("late"), ("t", "1", "late", "0", "")
    driver.come(key, late)
    assert set(driver.where) == {"m0", "m1", "m2"}
    driver.finish(many[0][0])
    (ending,) = driver.ending
    driver.over(ending)
    assert set(driver.where) == {"m1", "m2", "late"}  # though three others came before it
    driver.finish(many[1][0])
    driver.over(driver.ending[0])
    assert set(driver.where) == {"m2", "late", "m3"}  # and among one agent's own, who came first
