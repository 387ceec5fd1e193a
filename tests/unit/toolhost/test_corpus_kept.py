"""Attempts of one agent to have the tool host forget what it keeps for the others."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from goondan.toolhost.app import _MAX_BYTES, read_promises, write_promises
from goondan.toolhost.calls.call_registry import CallRegistry, FairStore, StoredResult
from goondan.toolhost.calls.results import (
    KEPT_S,
    MAX_HANDLE,
    MAX_PROMISED_BYTES,
    MAX_RUNNING,
    PendingRegistry,
    Work,
    full_handle,
)
from tests.unit.toolhost.test_calls import call
from tests.unit.toolhost.test_pending import promise

#: As long as a handler may choose it, of characters with four bytes each.
LONG = "\U00020000" * MAX_HANDLE


def test_results_of_one_agent_push_out_no_other_agents() -> None:
    book = CallRegistry(kept_bytes=100_000)
    for name, agent, size in [("theirs", "victim", 1000), *((f"m{n}", "flood", 9000) for n in range(50))]:
        made = call(name, agent=agent)
        book.open(made)
        book.close(made, Raw(b"x" * size), 1.0)
    assert book.kept_bytes <= 100_000
    theirs = book.get("theirs")
    assert isinstance(theirs, StoredResult)
    assert theirs.payload is not None, "the one who has most goes first"


def test_ids_of_one_agent_push_out_no_other_agents() -> None:
    """A call whose id is forgotten could run a second time."""
    book = CallRegistry(kept_s=1.0, forgotten=10)
    for number, (name, agent) in enumerate([("theirs", "victim"), *((f"m{n}", "flood") for n in range(100))]):
        made = call(name, agent=agent)
        book.open(made)
        book.close(made, Raw(b"x"), float(number))
    book.expire(1000.0)
    assert isinstance(book.get("theirs"), StoredResult)
    assert sum(isinstance(book.get(f"m{n}"), StoredResult) for n in range(100)) == 9


def test_what_pending_work_came_to_is_kept_for_the_others(tmp_path: Path) -> None:
    book = PendingRegistry(kept_bytes=10_000)
    for number in range(60):
        owner = "victim" if number == 0 else "flood"
        work = book.begin(promise(f"h{number}", key=owner, call=f"c{number}"), 0.0)
        assert isinstance(work, Work)
        book.told(work.promise)
        book.end(work, Raw(b"x" * 1000), 1.0)
    assert book.get(("a", "victim"), "h0") is not None
    book.expire(1.0 + KEPT_S)
    assert book.empty
    assert (book._done.total, len(book._done)) == (0, 0)


def test_promises_of_one_agent_leave_room_for_those_of_the_others(tmp_path: Path) -> None:
    """They are written as a whole, and a file that is too large was read as none: all work would end without a word."""
    handle = full_handle("t", LONG)
    assert handle is not None
    book, number = PendingRegistry(), 0
    for instance in range(50):  # as many as ask
        for _ in range(MAX_RUNNING):
            number += 1
            made = replace(promise(f"{handle}{number}", key=f"flood{instance}"), call_id=f"c{number}")
            if not isinstance(book.begin(made, 0.0), Work):
                break
    assert isinstance(book.begin(promise("h", key="victim", call="theirs"), 0.0), Work)
    file = str(tmp_path / "pending.json")
    write_promises(file, book.promised())
    assert (tmp_path / "pending.json").stat().st_size <= MAX_PROMISED_BYTES + (1 << 20) <= _MAX_BYTES
    assert promise("h", key="victim", call="theirs") in read_promises(file)
    again = PendingRegistry()
    for known in read_promises(file):
        assert isinstance(again.begin(known, 0.0, again=True), Work), "what was promised is told, whatever it holds"


def test_a_promise_is_counted_until_somebody_was_told() -> None:
    """Else work that ends at once could be promised without end while the broker is away."""
    handle, book = full_handle("t", LONG) or "", PendingRegistry()
    taken: list[Work] = []
    while len(taken) < 5000:
        made = book.begin(promise(f"{handle}{len(taken)}", call=f"c{len(taken)}"), 0.0)
        if not isinstance(made, Work):
            assert made == "no room"
            break
        book.end(made, Raw(b"x"), 0.0)
        taken.append(made)
    assert 100 < len(taken) < 1000
    for made in taken:
        book.told(made.promise)
    assert isinstance(book.begin(promise("h"), 0.0), Work)


@given(st.lists(st.tuples(st.sampled_from(["put", "take"]), st.integers(0, 9), st.integers(0, 3), st.integers(1, 9))))
def test_a_shelf_is_what_stands_on_it(actions: list[tuple[str, int, int, int]]) -> None:
    shelf: FairStore[int, int] = FairStore()
    model: dict[int, tuple[tuple[str, str], int]] = {}
    for action, name, owner, size in actions:
        if action == "put":
            model.pop(name, None)
            model[name] = (("a", str(owner)), size)
            shelf.put(name, ("a", str(owner)), size, -name)
        else:
            kept = model.pop(name, None)
            assert shelf.take(name) == (None if kept is None else -name)
        held: dict[tuple[str, str], int] = {}
        for who, much in model.values():
            held[who] = held.get(who, 0) + much
        assert (shelf.total, len(shelf)) == (sum(held.values()), len(model))
        assert list(shelf) == [-name for name in model]
        assert all(shelf.held_by(who) == much for who, much in held.items())
        if model:
            first = shelf.first_to_go()
            who = model[first][0]
            assert held[who] == max(held.values())
            assert first == next(name for name, (one, _) in model.items() if one == who)
