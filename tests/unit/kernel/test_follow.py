"""Turns one after another, as they end, behind a position that outlives its program."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest

from goondan.agentproc.conversation.store import ConversationStore
from goondan.kernel.traces import follow
from goondan.kernel.traces.follow import Follower
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.system.trace_index import IndexRow, TraceIndex
from goondan.schemas.text.times import rfc3339

BEGAN = datetime(2026, 11, 23, 9, tzinfo=UTC).timestamp()


def begin(folder: Path, event: str, seconds: float, *, ends: bool = True) -> None:
    """A turn that began so long after BEGAN."""
    when = rfc3339(BEGAN + seconds)
    store = ConversationStore(instance_dir(str(folder), "main", event))
    store.adopt(1)
    with store.write(final=True):
        store.begin_turn(event, f"t-{event}", 1, when, trace_id="ab" * 16)
        if ends:
            store.finish_turn(event, f"t-{event}", "completed", when, steps=0, answer=None)
    store.close()
    index = TraceIndex(str(folder))
    index.add(IndexRow(when, "ab" * 16, f"t-{event}", event, "main", event))
    index.close()


def ended(turns: Follower, now: float) -> list[str]:
    """The turns that are over now; they are done then."""
    turns.take_up(now)
    found = {row.turn_id: row for row in turns.due(now) if turns.read(row, now) is not None}
    turns.settle(list(found.values()))
    return list(found)


def test_each_turn_once_also_after_a_crash_and_one_that_runs_when_it_ends(tmp_path: Path) -> None:
    path, now = f"{tmp_path}/x/position.json", BEGAN + 10
    begin(tmp_path, "early", -1)
    begin(tmp_path, "a", 1)
    begin(tmp_path, "b", 2, ends=False)
    turns = Follower(str(tmp_path), path, rfc3339(BEGAN))
    assert ended(turns, now) == ["t-a"]
    begin(tmp_path, "c", 3)
    turns.take_up(now)  # it is killed here
    turns = Follower(str(tmp_path), path, rfc3339(now))
    assert ended(turns, now) == ["t-c"]
    store = ConversationStore(instance_dir(str(tmp_path), "main", "b"))
    store.adopt(2)
    with store.write(final=True):
        store.finish_turn("b", "t-b", "completed", rfc3339(now), steps=0, answer=None)
    store.close()
    assert ended(turns, now + 1) == []  # it is looked at again after a quarter of its age
    assert ended(turns, now + 3) == ["t-b"]


def test_what_is_too_old_or_too_much_is_given_up_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        begin(tmp_path, f"e{number}", number, ends=False)
    monkeypatch.setattr(follow, "MAX_TURNS", 2)
    turns = Follower(str(tmp_path), f"{tmp_path}/position.json", rfc3339(BEGAN))
    turns.take_up(BEGAN + follow.MAX_AGE_S + 0.5)
    assert [row.event_id for row in turns.position.turns] == ["e2", "e3"]
    assert turns.position.given_up == 2


def test_a_turn_whose_beginning_was_not_stored_is_over_without_anything(tmp_path: Path) -> None:
    index = TraceIndex(str(tmp_path))
    index.add(IndexRow(rfc3339(BEGAN), "ab" * 16, "t-x", "x", "main", "x"))
    index.close()
    turns = Follower(str(tmp_path), f"{tmp_path}/position.json", rfc3339(BEGAN))
    assert ended(turns, BEGAN + 1) == []
    assert ended(turns, BEGAN + follow.BEGINS_S + 1) == ["t-x"]


def test_a_clock_that_is_put_back_holds_nothing_up(tmp_path: Path) -> None:
    begin(tmp_path, "a", 0, ends=False)
    turns = Follower(str(tmp_path), f"{tmp_path}/position.json", rfc3339(BEGAN))
    assert ended(turns, BEGAN + 3600) == []
    store = ConversationStore(instance_dir(str(tmp_path), "main", "a"))
    store.adopt(2)
    with store.write(final=True):
        store.finish_turn("a", "t-a", "completed", rfc3339(BEGAN), steps=0, answer=None)
    store.close()
    assert ended(turns, BEGAN + 1) == ["t-a"]


def test_a_position_of_a_clock_that_was_ahead_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "position.json"
    path.write_text('{"seq": 9, "turn_id": "gone", "at": "2099-01-01T00:00:00.000Z"}')
    turns = Follower(str(tmp_path), str(path), rfc3339(BEGAN))
    begin(tmp_path, "a", 5)
    assert ended(turns, BEGAN + 6) == ["t-a"]


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"seq": 99999999999999999999999, "turn_id": "x", "at": "x"}',
        b'{"seq": -1, "turn_id": "x", "at": "x"}',
        b'{"given_up": 99999999999999999999999, "at": "x"}',
        b'{"at": "x", "later": ' + b"[" * 100_000,
        b"\xff\xfe",
        b"",
        b"[]",
    ],
)
def test_a_damaged_position_is_a_new_one(tmp_path: Path, damaged: bytes) -> None:
    begin(tmp_path, "a", 5)
    (tmp_path / "position.json").write_bytes(damaged)
    turns = Follower(str(tmp_path), f"{tmp_path}/position.json", rfc3339(BEGAN))
    assert ended(turns, BEGAN + 6) == ["t-a"]


def test_a_row_that_is_no_text_hides_no_other(tmp_path: Path) -> None:
    index = TraceIndex(str(tmp_path))
    index.add(IndexRow(rfc3339(BEGAN), "ab" * 16, "t-x", "x", "main", "x"))
    with sqlite3.connect(f"{tmp_path}/traces/index.db") as db:
        db.execute("UPDATE turns SET agent = CAST(x'ff00' AS TEXT)")
    db.close()
    index.close()
    begin(tmp_path, "a", 5)
    turns = Follower(str(tmp_path), f"{tmp_path}/position.json", rfc3339(BEGAN))
    assert ended(turns, BEGAN + 6) == ["t-a"]
