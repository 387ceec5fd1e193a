"""What was promised and is not in the tables yet survives every process, is found, and comes into the tables once."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.kernel.broker.journal.committer import FOLD_ITEMS, MAX_UNFOLDED_ITEMS, GroupWriter, InlineJournal
from goondan.kernel.broker.journal.files import Reserve
from goondan.kernel.broker.journal.redo import KEPT_BYTES, REDO_SUFFIX, RedoEntry, RedoFile
from goondan.kernel.broker.journal.store import JOURNAL_FILE, Durability, JournalStore
from goondan.kernel.broker.state.records import DiskFull, DropAnswer, Ended, Item, Put, Retire, Row, Write
from goondan.schemas.wire.errors import GoondanError

BOOT = "11111111-2222-3333-4444-555555555555"
LATER_BOOT = "99999999-2222-3333-4444-555555555555"
T = TypeVar("T")
SUFFIXES = ("", "-wal", "-acked", REDO_SUFFIX)


def opened(
    folder: Path, durability: Durability = "process", boot_id: str = BOOT, *, accept_loss: bool = False
) -> JournalStore:
    path = str(folder / JOURNAL_FILE)
    return JournalStore(path, durability=durability, boot_id=boot_id, accept_loss=accept_loss)


def killed(folder: Path, copy: Path, suffixes: tuple[str, ...] = SUFFIXES) -> Path:
    """What the next process finds when the one that has `folder` open is gone."""
    copy.mkdir(exist_ok=True)
    for suffix in suffixes:
        source = folder / f"{JOURNAL_FILE}{suffix}"
        if source.exists():
            shutil.copyfile(source, copy / source.name)
    return copy


def subjects(store: JournalStore) -> list[str]:
    return [row.subject for row in store.rows()]


def test_what_was_promised_is_there_after_a_kill(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.promise([Put("event:1", b"one"), Put("event:2", b"two")], 5)
    store.promise([Retire("event:1", b"digest", "done", b"answer")], 7)
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as db:
        assert db.execute("SELECT count(*) FROM records").fetchone() == (0,)
    after = opened(killed(tmp_path, tmp_path / "copy"))
    assert list(after.rows()) == [Row(2, "event:2", b"two")]
    assert after.find_ended("event:1") == Ended(b"digest", "done", 7)
    assert after.find_answer("event:1") == b"answer"


def test_numbers_and_digests_go_on_however_it_was_written(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    writes: list[list[Write]] = [
        [Put("event:1", b"a")],
        [Put("event:2", b"b"), Retire("event:1", b"d", "done")],
        [Put("event:3", b"c")],
    ]
    direct, promised = opened(one), opened(two)
    for batch in writes:
        assert direct.commit(batch, 0) == promised.promise(batch, 0)
    assert (one / f"{JOURNAL_FILE}-acked").read_bytes() == (two / f"{JOURNAL_FILE}-acked").read_bytes()
    assert list(direct.rows()) == list(promised.rows())


def test_a_commit_comes_after_what_was_promised_before(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.promise([Put("event:1", b"one")], 0)
    assert store.commit([Put("event:2", b"two")], 0) == 2
    assert subjects(opened(killed(tmp_path, tmp_path / "copy"))) == ["event:1", "event:2"]


def test_entries_of_an_earlier_round_are_not_written_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(5):
        store.promise([Put(f"event:{number}", bytes(100))], 0)
    store.fold()
    store.promise([Retire("event:0", b"d", "done")], 0)  # over the first of them; the others are still behind it
    after = opened(killed(tmp_path, tmp_path / "copy"))
    assert subjects(after) == [f"event:{number}" for number in range(1, 5)]


def test_a_kill_between_the_tables_and_the_new_round_writes_nothing_twice(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.promise([Put("event:1", b"one")], 0)
    copy = killed(tmp_path, tmp_path / "copy", (REDO_SUFFIX,))
    store.fold()
    after = opened(killed(tmp_path, copy, ("", "-wal", "-acked")))
    assert list(after.rows()) == [Row(1, "event:1", b"one")]


@pytest.mark.parametrize("kept", [0, 1, 11, 30, -1])
def test_a_torn_redo_file_is_a_loss_within_one_boot_and_none_after_it(tmp_path: Path, kept: int) -> None:
    store = opened(tmp_path)
    store.promise([Put("event:1", b"one")], 0)
    before = (tmp_path / f"{JOURNAL_FILE}{REDO_SUFFIX}").stat().st_size
    store.promise([Put("event:2", bytes(50))], 0)
    copy = killed(tmp_path, tmp_path / "copy")
    redo = copy / f"{JOURNAL_FILE}{REDO_SUFFIX}"
    os.truncate(redo, before + kept if kept >= 0 else redo.stat().st_size - 1)
    with pytest.raises(GoondanError, match="ends with write 1, but 2 were promised"):
        opened(copy)
    assert subjects(opened(copy, boot_id=LATER_BOOT)) == ["event:1"]


def test_no_flipped_bit_of_the_redo_file_changes_what_was_promised(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.promise([Put("event:1", b"one"), Retire("event:0", b"d", "done", b"answer", ("file", 9))], 0)
    copy = killed(tmp_path, tmp_path / "copy")
    redo = copy / f"{JOURNAL_FILE}{REDO_SUFFIX}"
    sound = redo.read_bytes()
    for at in range(len(sound)):
        redo.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :])
        assert RedoFile(str(redo)).read() == []


def test_after_a_loss_of_power_newer_entries_do_not_continue_older_tables(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.promise([Put("event:1", b"one")], 0)
    store.fold()
    store.checkpoint()
    copy = killed(tmp_path, tmp_path / "copy", ("",))
    store.promise([Put("event:2", b"two")], 0)
    store.fold()  # lost with the WAL
    store.promise([Put("event:3", b"three")], 0)
    after = opened(killed(tmp_path, copy, (REDO_SUFFIX, "-acked")), boot_id=LATER_BOOT)
    assert subjects(after) == ["event:1"]
    with pytest.raises(GoondanError, match="ends with write 1, but 3 were promised"):
        opened(killed(tmp_path, copy, (REDO_SUFFIX, "-acked")))


def test_entries_of_another_history_are_not_taken(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    ours, theirs = opened(one), opened(two)
    ours.commit([Put("event:ours", b"")], 0)
    theirs.commit([Put("event:theirs", b"")], 0)
    theirs.promise([Put("event:another", b"")], 0)
    copy = killed(one, tmp_path / "copy", ("", "-wal"))
    assert subjects(opened(killed(two, copy, (REDO_SUFFIX,)))) == ["event:ours"]


def test_a_journal_that_is_opened_with_power_takes_what_process_has_left(tmp_path: Path) -> None:
    opened(tmp_path).promise([Put("event:1", b"one")], 0)
    copy = killed(tmp_path, tmp_path / "copy")
    assert subjects(opened(copy, "power")) == ["event:1"]
    assert subjects(opened(killed(copy, tmp_path / "again", ("", "-wal", "-acked")), "power")) == ["event:1"]


def test_what_was_promised_is_saved_from_a_damaged_journal(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.commit([Put("event:1", b"one"), Put("event:2", b"two")], 0)
    store.checkpoint()
    store.promise([Retire("event:1", b"d", "done"), Put("event:3", b"three")], 0)
    copy = killed(tmp_path, tmp_path / "copy", ("", "-acked", REDO_SUFFIX))
    with sqlite3.connect(copy / JOURNAL_FILE) as db:
        db.execute("UPDATE records SET crc = 0 WHERE subject = 'event:2'")
    with pytest.raises(GoondanError, match="wrong checksum"):
        opened(copy)
    after = opened(copy, accept_loss=True)
    assert list(after.rows()) == [Row(4, "event:3", b"three")]
    assert after.find_ended("event:1") is not None
    assert after.commit([Put("event:4", b"")], 0) == 5


def test_what_has_ended_is_not_saved_from_an_earlier_round(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.commit([Put("damaged", b"one")], 0)
    for number in range(5):
        store.promise([Put(f"event:{number}", b"")], 0)
    store.commit([Retire("event:3", b"d", "done")], 0)
    store.promise([Put("event:9", b"")], 0)  # as long as the entry that it is written over: the others follow it
    store.checkpoint()
    copy = killed(tmp_path, tmp_path / "copy", ("", "-acked", REDO_SUFFIX))
    with sqlite3.connect(copy / JOURNAL_FILE) as db:
        db.execute("UPDATE records SET crc = 0 WHERE subject = 'damaged'")
    assert subjects(opened(copy, accept_loss=True)) == ["event:0", "event:1", "event:2", "event:4", "event:9"]


@pytest.mark.parametrize("kind", ["pipe", "second name"])
def test_what_stands_in_the_redo_files_place_is_neither_waited_for_nor_written_to(tmp_path: Path, kind: str) -> None:
    state, mine = tmp_path / "state", tmp_path / "mine"
    state.mkdir()
    mine.write_text("mine")
    place = state / f"{JOURNAL_FILE}{REDO_SUFFIX}"
    os.mkfifo(place) if kind == "pipe" else os.link(mine, place)
    opened(state).promise([Put("event:1", b"one")], 0)
    assert mine.read_text() == "mine"
    assert subjects(opened(killed(state, tmp_path / "copy"))) == ["event:1"]


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_link_or_a_folder_in_its_place_is_named(tmp_path: Path, kind: str) -> None:
    place = tmp_path / f"{JOURNAL_FILE}{REDO_SUFFIX}"
    place.symlink_to(tmp_path / "mine") if kind == "link" else place.mkdir()
    with pytest.raises(GoondanError, match=place.name) as caught:
        opened(tmp_path)
    assert caught.value.info.code == "E_STATE"


def test_a_full_disk_refuses_a_batch_whole_and_the_next_one_goes_on(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.promise([Put("event:1", b"one")], 0)
    kept, full = store._redo._fd, os.open("/dev/full", os.O_WRONLY)
    store._redo._fd = full
    with pytest.raises(DiskFull):
        store.promise([Put("event:2", bytes(5000))], 0)
    store._redo._fd = kept
    os.close(full)
    assert store.find_records("event:2") == []
    assert store.promise([Put("event:3", b"three")], 0) == 2
    assert subjects(opened(killed(tmp_path, tmp_path / "copy"))) == ["event:1", "event:3"]


def test_half_an_entry_that_found_no_room_is_written_over(tmp_path: Path) -> None:
    redo = RedoFile(str(tmp_path / "redo"))
    redo.append(RedoEntry(1, 0, 0, [Put("a", b"a")]))
    at = redo._at
    redo.append(RedoEntry(2, 0, 0, [Put("b", bytes(500))]))
    os.truncate(tmp_path / "redo", at + 100)
    redo._at = at  # as after a write that was cut short
    redo.append(RedoEntry(2, 0, 0, [Put("c", b"c")]))
    assert [entry.writes for entry in redo.read()] == [[Put("a", b"a")], [Put("c", b"c")]]


def limit(store: JournalStore, more: int) -> None:
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + more}")


def test_without_room_for_the_tables_it_stays_promised_and_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    writer = GroupWriter(store, Reserve(str(tmp_path / "reserve")), lambda: 0)
    monkeypatch.setattr(Reserve, "make", lambda self: False)
    store.promise([Put("event:1", bytes(60_000)), Put("event:2", b"two")], 0)
    store.promise([Retire("event:2", b"digest", "done", b"answer", ("file", 7))], 3)
    limit(store, 1)
    writer.fold()
    assert writer.full
    assert store.find_records("event:1") == [bytes(60_000)]
    assert (store.find_records("event:2"), store.find_answer("event:2")) == ([], b"answer")
    assert store.find_ended("event:2") == Ended(b"digest", "done", 3)
    assert store.files() == {"file"}
    store.promise([DropAnswer("event:2")], 4)
    assert store.find_answer("event:2") is None
    assert subjects(opened(killed(tmp_path, tmp_path / "copy"))) == ["event:1"]
    store._db.execute("PRAGMA max_page_count = 1000000")
    writer._next_try = 0.0
    writer.fold()
    assert subjects(store) == ["event:1"]
    assert store.files() == frozenset()


def test_a_large_round_does_not_stay_on_the_disk(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.promise([Put("event:1", bytes(KEPT_BYTES + 1))], 0)
    store.fold()
    store.promise([Put("event:2", b"two")], 0)
    assert (tmp_path / f"{JOURNAL_FILE}{REDO_SUFFIX}").stat().st_size < 1000


def test_the_inline_journal_folds_in_quiet_moments_under_load_and_at_its_end(tmp_path: Path) -> None:
    store = opened(tmp_path)
    journal = InlineJournal(store, GroupWriter(store, Reserve(str(tmp_path / "reserve")), lambda: 0))
    for number in range(FOLD_ITEMS):
        assert not journal.is_behind()
        journal.append([Item((Put(f"event:{number}", b""),))])
    assert journal.is_behind()
    journal.catch_up()
    assert (journal.is_behind(), store._owed) == (False, [])
    for number in range(MAX_UNFOLDED_ITEMS):
        journal.append([Item((Put(f"more:{number}", b""),))])
    assert store._owed == []
    journal.append([Item((Put("last", b""),))])
    assert len(store._owed) == 1
    journal.close()
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as db:
        found = db.execute("SELECT count(*) FROM records").fetchone()
    assert found == (FOLD_ITEMS + MAX_UNFOLDED_ITEMS + 1,)
    assert not (tmp_path / f"{JOURNAL_FILE}{REDO_SUFFIX}").exists()


def _maybe(value: T) -> st.SearchStrategy[T | None]:
    return st.sampled_from([None, value])


def _writes() -> st.SearchStrategy[Write]:
    subject = st.sampled_from(["a", "b", "c"])
    return st.one_of(
        st.builds(Put, subject, st.binary(max_size=20)),
        st.builds(Retire, subject, _maybe(b"d"), st.just("done"), _maybe(b"answer"), _maybe(("file", 7))),
        st.builds(DropAnswer, subject),
    )


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.one_of(st.lists(_writes(), min_size=1, max_size=4), st.sampled_from(["fold", "kill"]))))
def test_promised_folded_and_killed_at_any_time_is_the_plain_history(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[Write] | str]
) -> None:
    plain, folder = (tmp_path_factory.mktemp(name) for name in ("plain", "promised"))
    expected, store = opened(plain), opened(folder)
    for step in steps:
        if step == "fold":
            store.fold()
        elif step == "kill":
            store = opened(killed(folder, folder := tmp_path_factory.mktemp("promised")))
        elif isinstance(step, list):
            assert store.promise(step, 1) == expected.commit(step, 1)
            for subject in ("a", "b", "c"):
                assert store.find_ended(subject) == expected.find_ended(subject)
                assert store.find_answer(subject) == expected.find_answer(subject)
                assert store.find_records(subject) == expected.find_records(subject)
    assert list(store.rows()) == list(expected.rows())
    for each in (store, expected):
        each.close()
