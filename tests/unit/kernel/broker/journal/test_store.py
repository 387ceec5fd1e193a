"""The journal's file: what comes back after a restart, and which damage is noticed."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.kernel.broker.journal import store as module
from goondan.kernel.broker.journal import tables
from goondan.kernel.broker.journal import tables as retention
from goondan.kernel.broker.journal.store import JournalStore
from goondan.kernel.broker.state.records import DiskFull, Put, Retire, Write
from goondan.schemas.wire.errors import GoondanError
from tests.checks import refuses

BOOT = "11111111-2222-3333-4444-555555555555"
LATER_BOOT = "99999999-2222-3333-4444-555555555555"
DAY_MS = 24 * 3600 * 1000


def opened(folder: Path, **options: Any) -> JournalStore:
    settings_ = {"durability": "process", "boot_id": BOOT, **options}
    return JournalStore(str(folder / "kernel.db"), **settings_)


def closed(folder: Path, *batches: list[Write], now_ms: int = 0) -> None:
    """A journal that these were committed to, and that is closed."""
    journal = opened(folder)
    for batch in batches:
        journal.commit(batch, now_ms)
    journal.close()


def contents(journal: JournalStore) -> list[tuple[str, bytes]]:
    return [(row.subject, row.data) for row in journal.rows()]


def test_a_retired_subject_leaves_its_id_and_answer_only(tmp_path: Path) -> None:
    closed(
        tmp_path,
        [Put("event:1", b"one"), Put("event:2", b"two")],
        [Put("event:1", b"end"), Retire("event:1", b"digest", "done", b"answer")],
        now_ms=77,
    )
    journal = opened(tmp_path)
    assert contents(journal) == [("event:2", b"two")]
    assert journal.find_ended("event:1") == (b"digest", "done", 77)
    assert journal.find_answer("event:1") == b"answer"
    assert journal.find_ended("event:2") is None


def test_the_file_and_its_side_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        journal = opened(tmp_path)
        journal.commit([Put("a", b"b")], 0)
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        journal.close()
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600}, modes


@settings(max_examples=20, deadline=None)
@given(
    batches=st.lists(
        st.lists(
            st.one_of(
                st.builds(Put, st.sampled_from("abc"), st.binary(max_size=40)),
                st.builds(
                    Retire, st.sampled_from("abc"), st.binary(min_size=1, max_size=8), st.just("done"), large=st.none()
                ),
            ),
            max_size=6,
        ),
        max_size=8,
    )
)
def test_replay_is_the_plain_history(tmp_path_factory: pytest.TempPathFactory, batches: list[list[Write]]) -> None:
    folder = tmp_path_factory.mktemp("journal")
    expected: list[tuple[str, bytes]] = []
    journal = opened(folder)
    for batch in batches:
        journal.commit(batch, 0)
        for write in batch:
            if isinstance(write, Put):
                expected.append((write.subject, write.data))
            else:
                expected = [(subject, data) for subject, data in expected if subject != write.subject]
    journal.close()
    journal = opened(folder)
    assert contents(journal) == expected
    journal.close()


# --- damage


def flip(path: Path, needle: bytes) -> None:
    """Flip one bit inside `needle`, wherever it stands in the file."""
    data = bytearray(path.read_bytes())
    at = data.index(needle)
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_named_and_accept_loss_goes_on_with_what_is_whole_and_keeps_the_damaged_file(
    tmp_path: Path,
) -> None:
    closed(
        tmp_path,
        [Put("event:1", b"a long enough payload"), Put("event:2", b"another")],
        [Put("event:3", b"x"), Retire("event:3", b"digest", "done", b"answer")],
        now_ms=5,
    )
    flip(tmp_path / "kernel.db", b"a long enough payload")
    with refuses("E_JOURNAL_CORRUPT", match="event:1") as caught:
        opened(tmp_path)
    assert "--accept-loss" in (caught.value.info.suggestion or "")
    journal = opened(tmp_path, accept_loss=True)
    assert contents(journal) == [("event:2", b"another")]
    assert journal.find_ended("event:3") == (b"digest", "done", 5)
    assert journal.find_answer("event:3") == b"answer"
    assert any("event:1" in loss for loss in journal.losses)
    journal.commit([Put("event:4", b"new")], 0)
    journal.close()
    assert (tmp_path / "kernel.db.damaged-1").exists()
    journal = opened(tmp_path)  # it is whole again
    assert contents(journal) == [("event:2", b"another"), ("event:4", b"new")]
    assert not journal.losses


def test_a_flipped_bit_in_a_kept_id_is_noticed_when_it_is_asked_for(tmp_path: Path) -> None:
    closed(tmp_path, [Retire("event:1", b"the digest of it", "done")])
    flip(tmp_path / "kernel.db", b"the digest of it")
    journal = opened(tmp_path)
    with pytest.raises(GoondanError, match="checksum"):
        journal.find_ended("event:1")


@pytest.mark.parametrize("damage", ["cut to nothing", "cut in half", "garbage", "header"])
def test_a_broken_file_is_refused_and_can_be_given_up(tmp_path: Path, damage: str) -> None:
    closed(tmp_path, [Put(f"event:{number}", bytes(500)) for number in range(200)])
    path = tmp_path / "kernel.db"
    data = path.read_bytes()
    rng = random.Random(1)
    path.write_bytes(
        {
            "cut to nothing": b"",
            "cut in half": data[: len(data) // 2],
            "garbage": bytes(rng.randrange(256) for _ in range(len(data))),
            "header": bytes(100) + data[100:],
        }[damage]
    )
    broken = path.read_bytes()
    with refuses("E_JOURNAL_CORRUPT"):
        opened(tmp_path)
    assert path.read_bytes() == broken  # a refusal changes nothing
    journal = opened(tmp_path, accept_loss=True)
    journal.commit([Put("event:new", b"new")], 0)
    journal.close()
    journal = opened(tmp_path)
    assert contents(journal)[-1] == ("event:new", b"new")


def older_copy(folder: Path) -> None:
    """A journal that has lost its last write, as a disk that lies about its cache leaves it."""
    closed(folder, [Put("event:1", b"one")])
    shutil.copy(folder / "kernel.db", folder / "copy")
    closed(folder, [Put("event:2", b"two")])
    os.replace(folder / "copy", folder / "kernel.db")


@pytest.mark.parametrize(
    ("durability", "boot", "refused"),
    [("process", BOOT, True), ("process", LATER_BOOT, False), ("power", BOOT, True), ("power", LATER_BOOT, True)],
)
def test_a_shortfall_counts_within_one_boot_or_with_power(
    tmp_path: Path, durability: str, boot: str, refused: bool
) -> None:
    older_copy(tmp_path)
    if refused:
        with pytest.raises(GoondanError, match="promised"):
            opened(tmp_path, durability=durability, boot_id=boot)
        journal = opened(tmp_path, durability=durability, boot_id=boot, accept_loss=True)
    else:
        journal = opened(tmp_path, durability=durability, boot_id=boot)
    assert contents(journal) == [("event:1", b"one")]
    if refused:  # numbers go on above the promised ones, so that the side file never takes one for another
        assert journal.commit([Put("event:3", b"three")], 0) > 2


def test_another_history_of_the_same_length_is_noticed(tmp_path: Path) -> None:
    older_copy(tmp_path)
    db = sqlite3.connect(tmp_path / "kernel.db")
    db.execute("UPDATE meta SET last = 2")
    db.commit()
    db.close()
    with pytest.raises(GoondanError, match="not the one that was promised"):
        opened(tmp_path)


def test_a_torn_tail_of_the_wal_is_repaired_silently_after_a_power_cut(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.commit([Put("event:1", b"one")], 0)
    journal.commit([Put("event:2", b"two")], 0)
    cut = tmp_path / "cut"
    cut.mkdir()
    for name in ("kernel.db", "kernel.db-wal", "kernel.db-acked"):
        shutil.copy(tmp_path / name, cut / name)
    journal.close()
    wal = cut / "kernel.db-wal"
    os.truncate(wal, wal.stat().st_size - 100)
    journal = opened(cut, boot_id=LATER_BOOT)
    assert contents(journal) == [("event:1", b"one")]


@pytest.mark.parametrize(("format_", "age"), [(tables.FORMAT + 1, "newer"), (tables.FORMAT - 1, "older"), (0, "older")])
def test_another_format_is_refused_in_words_and_left_alone(tmp_path: Path, format_: int, age: str) -> None:
    closed(tmp_path, [Put("event:1", b"one")])
    db = sqlite3.connect(tmp_path / "kernel.db")
    db.execute(f"PRAGMA user_version = {format_}")
    db.close()
    before = (tmp_path / "kernel.db").read_bytes()
    for accept_loss in (False, True):
        with refuses("E_STATE", match=f"has format {format_}; this kernel reads format {tables.FORMAT}") as raised:
            opened(tmp_path, accept_loss=accept_loss)
        assert f"the {age} kernel that wrote it" in (raised.value.info.suggestion or "")
    assert (tmp_path / "kernel.db").read_bytes() == before


def test_where_the_file_of_another_format_was_the_suggestion_leads_to_an_empty_journal(tmp_path: Path) -> None:
    closed(tmp_path, [Put("event:1", b"one")])
    (tmp_path / "kernel.db").unlink()
    with refuses("E_JOURNAL_CORRUPT", match="promised"):  # its side file tells
        opened(tmp_path)
    assert contents(opened(tmp_path, accept_loss=True)) == []


def test_a_link_in_the_files_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "kernel.db").symlink_to(tmp_path / "target")
    with pytest.raises(GoondanError):
        opened(tmp_path)
    assert (tmp_path / "target").stat().st_size == 0


def test_a_row_that_breaks_recovery_twice_is_put_aside(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.commit([Put("event:1", b"poison"), Put("event:2", b"two")], 0)
    poison = next(iter(journal.rows()))
    assert not journal.suspect(poison, "it raised", 0)
    journal.close()
    journal = opened(tmp_path)
    assert len(contents(journal)) == 2
    assert journal.suspect(poison, "it raised", 0)
    assert contents(journal) == [("event:2", b"two")]


# --- room and time


def test_a_full_disk_refuses_the_whole_batch_and_the_next_one_goes_on(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.commit([Put("event:1", b"one")], 0)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(DiskFull):
        journal.commit([Put("event:2", bytes(100_000)), Put("event:3", b"three")], 0)
    assert contents(journal) == [("event:1", b"one")]
    journal._db.execute("PRAGMA max_page_count = 1000000")
    journal.commit([Put("event:4", b"four")], 0)
    journal.close()
    assert contents(opened(tmp_path)) == [("event:1", b"one"), ("event:4", b"four")]


def retired(journal: JournalStore, numbers: range, now_ms: int, answer: bytes | None = None) -> None:
    journal.commit([Retire(f"event:{number}", b"digest", "done", answer) for number in numbers], now_ms)


def tidied(journal: JournalStore, now_ms: int) -> None:
    while journal.tidy(now_ms):
        pass


def test_ids_are_kept_for_a_week_and_the_newest_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "KEPT_IDS", 10)
    journal = opened(tmp_path)
    retired(journal, range(20), 0)
    retired(journal, range(20, 30), 6 * DAY_MS)
    tidied(journal, 7 * DAY_MS)
    assert journal.find_ended("event:0") is not None  # exactly a week old
    tidied(journal, 7 * DAY_MS + 1)
    assert journal.find_ended("event:19") is None
    assert journal.find_ended("event:20") is not None
    tidied(journal, 100 * DAY_MS)
    assert journal.find_ended("event:20") is not None  # among the newest ten


def test_a_flood_of_ids_does_not_fill_the_disk_for_a_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "KEPT_IDS", 1000)
    monkeypatch.setattr(retention, "CROWDED_BYTES", 1 << 19)
    monkeypatch.setattr(module, "SPARE_PAGES", 16)
    journal = opened(tmp_path)
    for begin in range(0, 16_000, 1000):
        retired(journal, range(begin, begin + 1000), 0)
        tidied(journal, 1)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    assert 4096 * pages < (1 << 19) + 64 * 4096
    assert journal.find_ended("event:0") is None  # the oldest went first
    assert all(journal.find_ended(f"event:{number}") is not None for number in range(15_000, 16_000))
    monkeypatch.setattr(retention, "CROWDED_BYTES", 0)
    tidied(journal, 1)
    kept = [number for number in range(16_000) if journal.find_ended(f"event:{number}") is not None]
    assert kept == list(range(15_000, 16_000))  # so many stay in any case


def test_answers_are_kept_for_a_day_within_their_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "KEEP_ANSWER_BYTES", 100)
    journal = opened(tmp_path)
    retired(journal, range(12), 0, b"ten bytes!")
    tidied(journal, 1)
    assert [journal.find_answer(f"event:{number}") is not None for number in range(12)] == [False] * 2 + [True] * 10
    journal.close()
    journal = opened(tmp_path)  # the budget is known again
    retired(journal, range(12, 13), 1, b"ten bytes!")
    tidied(journal, 1)
    assert journal.find_answer("event:2") is None
    tidied(journal, DAY_MS + 1)
    assert journal.find_answer("event:11") is None
    assert journal.find_answer("event:12") is not None


def test_free_pages_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPARE_PAGES", 16)
    journal = opened(tmp_path)
    journal.commit([Put(f"event:{number}", bytes(4000)) for number in range(2000)], 0)
    journal.commit([Retire(f"event:{number}") for number in range(2000)], 0)
    tidied(journal, 0)
    journal.close()
    assert (tmp_path / "kernel.db").stat().st_size < 1 << 20
