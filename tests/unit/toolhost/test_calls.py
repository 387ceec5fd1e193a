"""What a callId means: it runs at most once, and its result is kept until somebody has it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import Raw

from goondan.schemas.bundle.launch import ExportSpec, ToolSpec
from goondan.toolhost.calls.call_registry import Call, CallRegistry, StoredResult

TOOL = ToolSpec(name="t", entry="/t/h.py", root="/t", exports=[])


def call(name: str, *, deadline: float | None = None, agent: str = "a") -> Call:
    return Call(
        id=name,
        agent=agent,
        instance_key="k",
        tool=TOOL,
        export=ExportSpec(name="f"),
        args=Raw(b"\x80"),
        turn_id="t",
        tool_call_id=name,
        message_id=None,
        workdir=None,
        deadline=deadline,
    )


def test_open_then_kept_then_unknown() -> None:
    book = CallRegistry()
    first = call("1")
    book.open(first)
    assert book.get("1") is first
    assert book.close(first, Raw(b"result"), 1.0)
    assert not book.close(first, Raw(b"other"), 2.0)
    kept = book.get("1")
    assert isinstance(kept, StoredResult)
    assert bytes(kept.payload or b"") == b"result"
    assert book.known_ids() == ["1"]
    book.acknowledge(["1", "unknown"])
    assert book.get("1") is None
    assert (book.kept_bytes, book.known_ids()) == (0, [])


def test_a_call_that_its_jail_has_not_got_is_told_and_when_it_has_it() -> None:
    book = CallRegistry()
    waiting, quick = call("1"), call("2")
    for one in (waiting, quick):
        book.open(one)
    assert book.waits() == []
    quick.state = "running"
    assert book.waits() == []
    assert book.waits() == [(waiting, True)]
    assert [told for _ in range(10) for told in book.waits()] == [(waiting, True)]  # news may be lost
    waiting.state = "running"
    assert book.waits() == [(waiting, False)]
    assert book.waits() == []


def test_kept_results_are_bounded_in_bytes_and_stay_known() -> None:
    book = CallRegistry(kept_bytes=5000)
    for number in range(10):
        made = call(str(number))
        book.open(made)
        book.close(made, Raw(b"x" * 1000), float(number))
    assert book.kept_bytes <= 5000
    dropped, here = book.get("0"), book.get("9")
    assert isinstance(dropped, StoredResult)
    assert dropped.payload is None
    assert isinstance(here, StoredResult)
    assert here.payload is not None
    book.acknowledge(["0"])
    assert book.get("0") is None


def test_kept_results_expire_and_forgotten_ids_are_bounded() -> None:
    book = CallRegistry(kept_s=10.0, forgotten=3)
    for number in range(6):
        made = call(str(number))
        book.open(made)
        book.close(made, Raw(b"x"), float(number))
    book.expire(12.5)  # 0, 1 and 2 are ten seconds old
    assert [bool(kept.payload) for kept in book.kept()] == [True] * 3
    book.expire(100.0)
    assert [book.get(str(number)) is None for number in range(6)] == [True] * 3 + [False] * 3


def test_deadlines_come_in_order_once_and_not_for_finished_calls() -> None:
    book = CallRegistry()
    made = {name: call(name, deadline=at) for name, at in (("late", 3.0), ("soon", 1.0), ("done", 0.5), ("mid", 2.0))}
    for one in made.values():
        book.open(one)
    book.open(call("never"))
    book.close(made["done"], Raw(b""), 0.1)
    assert book.next_deadline() == 1.0
    assert book.due(0.9) == []
    assert book.due(2.0) == [made["soon"], made["mid"]]
    assert book.due(2.0) == []
    assert book.next_deadline() == 3.0
    book.close(made["late"], Raw(b""), 2.5)
    assert book.next_deadline() is None


class Book(RuleBasedStateMachine):
    """Against a model: each callId has at most one result, which is never replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.book = CallRegistry(kept_bytes=4000, kept_s=5.0, forgotten=4)
        self.now = 0.0
        self.running: dict[str, Call] = {}
        self.answered: dict[str, bytes] = {}

    names = [str(number) for number in range(21)]
    ids = st.sampled_from(names)

    @rule(name=ids, deadline=st.none() | st.floats(0, 50))
    def come(self, name: str, deadline: float | None) -> None:
        if self.book.get(name) is None:
            self.running[name] = call(name, deadline=deadline)
            self.answered.pop(name, None)
            self.book.open(self.running[name])

    @rule(name=ids, size=st.integers(0, 1500))
    def finish(self, name: str, size: int) -> None:
        if name in self.running:
            made = self.running.pop(name)
            assert self.book.close(made, Raw(b"r" * size), self.now)
            self.answered[name] = b"r" * size

    @rule(name=ids)
    def acknowledge(self, name: str) -> None:
        if name not in self.running:
            self.book.acknowledge([name])
            self.answered.pop(name, None)

    @rule(seconds=st.floats(0.1, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.book.expire(self.now)
        for due in self.book.due(self.now):
            assert due.state != "done"

    @invariant()
    def nothing_runs_twice(self) -> None:
        assert {name for name in self.names if isinstance(self.book.get(name), Call)} == self.running.keys()
        assert 0 <= self.book.kept_bytes <= 4000
        for name, result in self.answered.items():
            kept = self.book.get(name)
            assert not isinstance(kept, Call)
            if kept is not None and kept.payload is not None:
                assert bytes(kept.payload) == result


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=30, stateful_step_count=40)


@pytest.mark.parametrize("agent", ["a", "b"])
def test_a_call_knows_its_owner(agent: str) -> None:
    book = CallRegistry()
    made = call("1", agent=agent)
    book.open(made)
    book.close(made, Raw(b""), 0.0)
    known = book.get("1")
    assert known is not None
    assert known.owner == (agent, "k")


def test_deadlines_of_finished_calls_do_not_pile_up() -> None:
    book = CallRegistry()
    for number in range(20_000):
        made = call(str(number), deadline=1e9 + number)
        made.args, made.message = Raw(b"x" * 100), b"x"
        book.open(made)
        book.close(made, Raw(b""), 0.0)
        book.acknowledge([made.id])
    assert len(book._deadlines) < 1000
    assert {(len(bytes(late.args)), late.message) for _, _, late in book._deadlines} == {(1, None)}
    last = call("last", deadline=5.0)
    book.open(last)
    assert book.next_deadline() == 5.0


def test_hello_names_what_fits_open_calls_first() -> None:
    book = CallRegistry()
    for number in range(10):
        made = call(f"kept-{number}")
        book.open(made)
        book.close(made, Raw(b""), 0.0)
    book.open(call("open"))
    assert book.known_ids()[:3] == ["open", "kept-9", "kept-8"]
    assert len(book.known_ids()) == 11
    assert book.known_ids(60) == ["open", "kept-9"]


def test_a_call_whose_time_stands_still_is_not_due_until_it_goes_on() -> None:
    book = CallRegistry()
    held, other = call("held", deadline=10.0), call("other", deadline=12.0)
    book.open(held)
    book.open(other)
    book.hold(held, 4.0)
    book.hold(held, 5.0)  # said anew
    assert book.next_deadline() == 12.0
    assert book.due(20.0) == [other]
    assert book.next_deadline() is None
    book.go_on(held, 100.0)
    book.go_on(held, 103.0)
    assert book.next_deadline() == 106.0
    assert book.due(105.9) == []
    assert book.due(106.0) == [held]
