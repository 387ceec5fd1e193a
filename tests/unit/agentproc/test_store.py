"""The conversation file: folding, epochs, crashes between transactions, and disks that fail."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.agentproc.conversation.file import EARLIER_FILE, Durability
from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.messages import (
    Append,
    Message,
    MessageEvent,
    MessageSource,
    Remove,
    Replace,
    Truncate,
    UserData,
    fold,
)
from goondan.schemas.wire.errors import GoondanError

AT = "2026-01-01T00:00:00.000Z"


def user(message_id: str, text: str = "hi") -> Message:
    return Message(message_id, UserData(text), AT, MessageSource("user"))


def opened(path: Path, epoch: int = 1, durability: Durability = "process") -> ConversationStore:
    store = ConversationStore(str(path), durability=durability)
    store.adopt(epoch)
    return store


def finish(store: ConversationStore, key: str, turn: str, events: list[MessageEvent], answer: bytes = b"a") -> None:
    with store.write():
        store.begin_turn(key, turn, 1, AT)
    with store.write(final=True):
        for position, event in enumerate(events):
            store.append(turn, position, event)
        store.finish_turn(key, turn, "completed", AT, steps=1, answer=answer)


def code(caught: pytest.ExceptionInfo[GoondanError]) -> str:
    return caught.value.info.code


@pytest.mark.parametrize("durability", ["power", "process"])
def test_what_was_written_is_there_for_the_next_incarnation(tmp_path: Path, durability: Durability) -> None:
    store = opened(tmp_path / "i" / "k", durability=durability)
    finish(store, "e1", "t1", [Append(user("1")), Append(user("2"))], b"answer")
    store.close()
    again = opened(tmp_path / "i" / "k", durability=durability)
    row = again.find_turn("e1")
    assert row is not None
    assert (row.status, row.answer, row.turn_id) == ("completed", b"answer", "t1")
    assert again.load_messages() == [user("1"), user("2")]
    assert again.turn_events("t1") == []
    assert again.running_turns() == []
    again.close()


def test_files_are_closed_to_others(tmp_path: Path) -> None:
    opened(tmp_path / "a" / "b").close()
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b" / "conversation.db").stat().st_mode) == 0o600


def test_nothing_is_created_before_the_first_use(tmp_path: Path) -> None:
    ConversationStore(str(tmp_path / "k"))
    assert not (tmp_path / "k").exists()


def test_events_of_a_running_turn_come_back_by_position(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with store.write():
        store.begin_turn("e1", "t1", 1, AT)
        for position in (2, 0, 1):
            store.append("t1", position, Append(user(str(position))))
        store.append("t1", 1, Append(user("1", "again")))
    store.close()
    with closing(opened(tmp_path)) as again:
        events = again.turn_events("t1")
    assert [event.event for event in events] == [Append(user("0")), Append(user("1", "again")), Append(user("2"))]
    assert all(event.stored_ms > 0 for event in events)


def test_events_of_an_earlier_boot_are_older_than_every_process(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with store.write():
        store.append("t1", 0, Append(user("0")))
    store.close()
    with sqlite3.connect(tmp_path / "conversation.db") as db:
        db.execute("UPDATE meta SET value = 'another boot' WHERE name = 'boot'")
    db.close()
    with closing(opened(tmp_path)) as again:
        assert [event.stored_ms for event in again.turn_events("t1")] == [0]


def test_a_stale_epoch_writes_nothing(tmp_path: Path) -> None:
    old, new = opened(tmp_path, 3), ConversationStore(str(tmp_path))
    with old.write():
        old.begin_turn("e1", "t1", 1, AT)
    new.adopt(4)
    with pytest.raises(GoondanError) as caught, old.write():
        old.append("t1", 0, Append(user("stale")))
    assert code(caught) == "E_LEASE_LOST"
    assert old.adopt(3) == 4, "the later epoch is named"
    assert new.turn_events("t1") == []
    with new.write():
        new.append("t1", 0, Append(user("fresh")))
    assert len(new.turn_events("t1")) == 1
    new.close()
    old.close()


def test_an_error_inside_a_transaction_takes_all_of_it_back(tmp_path: Path) -> None:
    store = opened(tmp_path)

    def half() -> None:
        with store.write():
            store.begin_turn("e1", "t1", 1, AT)
            store.append("t1", 0, Append(user("0")))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert store.find_turn("e1") is None
    assert store.turn_events("t1") == []
    with store.write():
        store.begin_turn("e1", "t1", 1, AT)
    assert [row.event_key for row in store.running_turns()] == ["e1"]
    store.close()


@pytest.mark.parametrize("after", range(6))
def test_a_crash_at_any_write_leaves_the_state_before_or_after_it(tmp_path: Path, after: int) -> None:
    """The process is gone after `after` transactions (its connection is dropped without a word); the next one sees
    exactly those."""
    store = opened(tmp_path)

    def step(number: int) -> None:
        with store.write(final=number == 4):
            if number == 0:
                store.begin_turn("e1", "t1", 1, AT)
            elif number < 4:
                store.append("t1", number, Append(user(str(number))))
            else:
                store.finish_turn("e1", "t1", "completed", AT, steps=1, answer=b"done")

    for number in range(min(after, 5)):
        step(number)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tmp_path.glob("conversation.db*"):
        if not path.name.endswith("-shm"):  # the WAL index is memory of the live processes; it is made anew
            (copy / path.name).write_bytes(path.read_bytes())
    crashed = opened(copy, epoch=2)
    row = crashed.find_turn("e1")
    if after == 0:
        assert row is None
    elif after < 5:
        assert row is not None
        assert row.status == "running"
        assert [e.position for e in crashed.turn_events("t1")] == list(range(1, min(after, 4)))
        assert crashed.load_messages() == []
    else:
        assert row is not None
        assert (row.status, row.answer) == ("completed", b"done")
        assert crashed.load_messages() == [user("1"), user("2"), user("3")]
        assert crashed.turn_events("t1") == []
    crashed.close()
    store.close()


def test_an_event_key_has_one_turn(tmp_path: Path) -> None:
    store = opened(tmp_path)
    finish(store, "e1", "t1", [Append(user("1"))], b"first")
    with store.write():
        store.begin_turn("e2", "t2", 1, AT)
        store.append("t2", 0, Append(user("2")))
    with store.write():
        store.finish_turn("e2", "t2", "abandoned", AT, steps=0, answer=None)
        store.begin_turn("e2", "t2-2", 2, AT)
    row = store.find_turn("e2")
    assert row is not None
    assert (row.turn_id, row.attempt, row.status, row.answer) == ("t2-2", 2, "running", None)
    assert store.load_messages() == [user("1"), user("2")]
    store.close()


# --- folding in SQL equals folding in Python --------------------------------------------------------------------------

_ids = st.sampled_from(["1", "2", "3", "4"])
_event: st.SearchStrategy[MessageEvent] = st.one_of(
    st.builds(lambda i, t: Append(user(i, t)), _ids, st.text(max_size=3)),
    st.builds(lambda i, j: Replace(i, user(j, "replaced")), _ids, _ids),
    st.builds(Remove, _ids),
    st.just(Truncate()),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(_event, max_size=5), min_size=1, max_size=4))
def test_folding_on_disk_is_the_fold(tmp_path_factory: pytest.TempPathFactory, turns: list[list[MessageEvent]]) -> None:
    store = opened(tmp_path_factory.mktemp("fold"))
    expected: list[Message] = []
    for number, events in enumerate(turns):
        finish(store, f"e{number}", f"t{number}", events)
        expected = fold(expected, events)
        assert store.load_messages() == expected
    store.close()


# --- failing disks ----------------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_error_and_goes_away_with_its_cause(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with store.write():
        store.begin_turn("e1", "t1", 1, AT)
    connection = store._db
    assert connection is not None
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")

    def too_much() -> None:
        with store.write():
            for position in range(100):
                store.append("t1", position, Append(user(str(position), "x" * 4000)))

    with pytest.raises(GoondanError) as caught:
        too_much()
    assert code(caught) == "E_DISK_FULL"
    # the next turn opens the file anew, without the limit of that connection
    with store.write():
        store.append("t1", 0, Append(user("0")))
    assert len(store.turn_events("t1")) == 1
    store.close()


def test_a_file_that_is_no_database_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "conversation.db").write_bytes(b"not a database, certainly not" * 100)
    store = ConversationStore(str(tmp_path))
    for _ in range(2):
        with pytest.raises(GoondanError) as caught:
            store.adopt(1)
        assert code(caught) == "E_STATE"
    assert (tmp_path / "conversation.db").read_bytes().startswith(b"not a database")


def test_damaged_messages_are_one_error(tmp_path: Path) -> None:
    store = opened(tmp_path)
    finish(store, "e1", "t1", [Append(user("1"))])
    store.close()
    with sqlite3.connect(tmp_path / "conversation.db") as db:
        db.execute("UPDATE base SET message = x'c1'")
    db.close()
    with pytest.raises(GoondanError) as caught:
        opened(tmp_path).load_messages()
    assert code(caught) == "E_STATE"


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with sqlite3.connect(tmp_path / "conversation.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(GoondanError) as caught:
        ConversationStore(str(tmp_path)).adopt(1)
    assert code(caught) == "E_STATE"
    assert "format 99" in str(caught.value)


def test_a_locked_file_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.agentproc.conversation.file.BUSY_MS", 20)
    store = opened(tmp_path)
    other = sqlite3.connect(tmp_path / "conversation.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(GoondanError) as caught, store.write():
        store.begin_turn("e1", "t1", 1, AT)
    assert code(caught) == "E_STATE"
    assert "locked" in str(caught.value)
    other.execute("ROLLBACK")
    other.close()
    with store.write():
        store.begin_turn("e1", "t1", 1, AT)
    store.close()


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(GoondanError) as caught:
        ConversationStore(str(tmp_path / "file" / "k")).adopt(1)
    assert code(caught) == "E_STATE"


# --- cost -------------------------------------------------------------------------------------------------------------


def test_a_turn_reads_no_history_unless_asked(tmp_path: Path) -> None:
    """With every stored message unreadable, turns still run: nothing but load_messages looks at them."""
    store = opened(tmp_path)
    finish(store, "e0", "t0", [Append(user(str(n))) for n in range(50)])
    with store.write():
        store.execute("UPDATE base SET message = x'c1'")
    finish(store, "e1", "t1", [Append(user("new"))])
    assert store.find_turn("e1") is not None
    with pytest.raises(GoondanError):
        store.load_messages()
    store.close()


def test_old_answers_and_notes_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("KEPT_ANSWERS", 3), ("KEPT_RUNTIME_EVENTS", 4), ("_TRIM_EVERY", 5)):
        monkeypatch.setattr(f"goondan.agentproc.conversation.store.{name}", value)
    store = ConversationStore(str(tmp_path), durability="process", kept_messages=2)
    store.adopt(1)
    for number in range(10):
        with store.write():
            store.note(f"t{number}", "turn.started", AT)
        finish(store, f"e{number}", f"t{number}", [Append(user(str(number)))])
    assert store.find_turn("e6") is None
    assert store.find_turn("e7") is not None
    assert [message.id for message in store.load_messages()] == ["8", "9"]
    assert store._db is not None
    assert store._db.execute("SELECT count(*) FROM runtime_events").fetchone() == (4,)
    store.close()


@pytest.mark.parametrize("kept_messages", [None, 100])
def test_large_answers_and_an_operators_messages_have_a_bound_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_messages: int | None
) -> None:
    for name, value in (("KEPT_BYTES", 1000), ("_TRIM_BYTES", 500)):
        monkeypatch.setattr(f"goondan.agentproc.conversation.store.{name}", value)
    store = ConversationStore(str(tmp_path), durability="process", kept_messages=kept_messages)
    store.adopt(1)
    for number in range(10):
        finish(store, f"e{number}", f"t{number}", [Append(user(f"m{number}", "x" * 300))], b"a" * 400)
    assert [number for number in range(10) if store.find_turn(f"e{number}") is not None] == [7, 8, 9]
    assert len(store.load_messages()) == (10 if kept_messages is None else 3)
    finish(store, "huge", "th", [Append(user("mh", "x" * 5000))], b"a" * 5000)
    assert store.find_turn("huge") is not None
    assert store.find_turn("e9") is None
    assert len(store.load_messages()) == (11 if kept_messages is None else 1)
    store.close()


# --- conversations that begin anew


def of_generation(path: Path, generation: int) -> ConversationStore:
    store = ConversationStore(str(path), durability="process", generation=generation)
    store.adopt(1)
    return store


def earlier(path: Path) -> list[tuple[int, str]]:
    with closing(sqlite3.connect(path / EARLIER_FILE)) as db:
        return list(db.execute("SELECT generation, id FROM messages ORDER BY generation, seq"))


def test_a_later_generation_begins_anew_and_keeps_what_was_said_beside_it(tmp_path: Path) -> None:
    store = of_generation(tmp_path, 0)
    finish(store, "e1", "t1", [Append(user("1")), Append(user("2"))])
    with store.write():  # a turn that has begun goes on with what it has
        store.begin_turn("e2", "t2", 1, AT)
        store.append("t2", 0, Append(user("3")))
    store.close()
    assert not (tmp_path / EARLIER_FILE).exists()
    store = of_generation(tmp_path, 7)
    assert store.load_messages() == []
    assert [event.position for event in store.turn_events("t2")] == [0]
    row = store.find_turn("e1")
    assert row is not None
    assert row.answer == b"a"
    assert earlier(tmp_path) == [(7, "1"), (7, "2")]
    assert stat.S_IMODE((tmp_path / EARLIER_FILE).stat().st_mode) == 0o600
    finish(store, "e3", "t3", [Append(user("4"))])
    store.close()
    for same in (7, 3, 0):  # once, and never back
        store = of_generation(tmp_path, same)
        assert [message.id for message in store.load_messages()] == ["4"]
        store.close()
    of_generation(tmp_path, 8).close()
    assert earlier(tmp_path) == [(7, "1"), (7, "2"), (8, "4")]


def test_a_new_conversation_is_of_its_generation_and_leaves_no_file(tmp_path: Path) -> None:
    store = of_generation(tmp_path, 5)
    finish(store, "e1", "t1", [Append(user("1"))])
    store.close()
    assert [message.id for message in of_generation(tmp_path, 5).load_messages()] == ["1"]
    assert not (tmp_path / EARLIER_FILE).exists()


def test_a_crash_between_the_copy_and_the_new_beginning_loses_and_doubles_nothing(tmp_path: Path) -> None:
    store = of_generation(tmp_path, 0)
    finish(store, "e1", "t1", [Append(user("1"))])
    store.close()
    of_generation(tmp_path, 7).close()
    with closing(sqlite3.connect(tmp_path / "conversation.db")) as db, db:  # as the crash would have left it
        db.execute("INSERT INTO base SELECT seq, id, message FROM (SELECT 1 AS seq, '1' AS id, x'00' AS message)")
        db.execute("DELETE FROM meta WHERE name = 'generation'")
    store = of_generation(tmp_path, 7)
    assert store.load_messages() == []
    assert earlier(tmp_path) == [(7, "1")]


def test_what_another_holder_did_between_is_not_what_is_remembered(tmp_path: Path) -> None:
    mine = opened(tmp_path, epoch=1)
    with mine.write():
        mine.begin_turn("e1", "t1", 1, AT)
    assert [row.turn_id for row in mine.running_turns()] == ["t1"]
    other = opened(tmp_path, epoch=2)
    with other.write(final=True):
        other.record_start("t1", "c1")
        other.append("t1", 0, Append(user("1")))
        other.append("t1", 1, Remove("1"))
        other.finish_turn("e1", "t1", "completed", AT, steps=1, answer=b"")
        other.begin_turn("e2", "t2", 1, AT)
    other.close()
    mine.adopt(3)
    assert [row.turn_id for row in mine.running_turns()] == ["t2"]
    mine.close()


@pytest.mark.parametrize("known", [False, True])
def test_a_turn_whose_begin_was_rolled_back_is_not_one_that_runs(tmp_path: Path, known: bool) -> None:
    store = opened(tmp_path)
    if known:
        assert store.running_turns() == []
    with suppress(KeyError), store.write():
        store.begin_turn("e1", "t1", 1, AT)
        raise KeyError
    assert store.running_turns() == []
    with store.write():
        store.begin_turn("e1", "t1", 1, AT)
        store.append("t1", 0, Append(user("1")))
    with suppress(KeyError), store.write(final=True):
        store.append("t1", 1, Remove("1"))
        store.finish_turn("e1", "t1", "completed", AT, steps=1, answer=b"")
        raise KeyError
    assert [row.turn_id for row in store.running_turns()] == ["t1"]
    with store.write(final=True):
        store.finish_turn("e1", "t1", "completed", AT, steps=1, answer=b"")
    assert (store.load_messages(), store.running_turns()) == ([user("1")], [])
    store.close()
