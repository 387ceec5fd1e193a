"""The thread that writes: order, refusal on a full disk, failures."""

from __future__ import annotations

import select
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from goondan.kernel.broker.journal.committer import Committer, GroupWriter
from goondan.kernel.broker.journal.files import RESERVE_BYTES, Reserve
from goondan.kernel.broker.journal.store import JournalStore
from goondan.kernel.broker.state.records import Item, JournalFailed, Put, Retire

BOOT = "11111111-2222-3333-4444-555555555555"
NEW = [Item((Put("event:new", bytes(60_000)),), refusable=True)]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[JournalStore]:
    store = JournalStore(str(tmp_path / "kernel.db"), durability="power", boot_id=BOOT)
    yield store
    store.close()


@pytest.fixture
def committer(journal: JournalStore, tmp_path: Path) -> Iterator[Committer]:
    made = started(journal, tmp_path)
    yield made
    made.close()


def started(journal: JournalStore, folder: Path) -> Committer:
    return Committer(journal, GroupWriter(journal, Reserve(str(folder / "reserve")), lambda: 0))


def wait(committer: Committer, batches: int) -> list[frozenset[int]]:
    """What was refused of the next `batches` that are settled."""
    found: list[frozenset[int]] = []
    while len(found) < batches:
        assert select.select([committer._wake_r], [], [], 10)[0], "the journal says nothing"
        found += committer.settled()
    return found


def written(committer: Committer, batch: list[Item]) -> frozenset[int]:
    committer.append(batch)
    return wait(committer, 1)[0]


def test_batches_settle_in_order(committer: Committer, journal: JournalStore) -> None:
    for number in range(50):
        committer.append([Item((Put("s", str(number).encode()),), refusable=True)] * (number % 2))
    assert wait(committer, 50) == [frozenset()] * 50
    assert [row.data for row in journal.rows()] == [str(number).encode() for number in range(50) if number % 2]


def limit(journal: JournalStore, more: int) -> None:
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages + more}")


def test_a_full_disk_refuses_new_work_and_writes_ends(
    committer: Committer, journal: JournalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(committer, [Item((Put("event:1", b"one"),), refusable=True)])
    assert (tmp_path / "reserve").stat().st_size == RESERVE_BYTES
    limit(journal, 4)
    monkeypatch.setattr(Reserve, "make", lambda self: False)
    end = Item((Put("event:1", b"end"), Retire("event:1", b"d", "done")))
    assert written(committer, [*NEW, end, *NEW]) == {0, 2}
    assert committer._writer.full
    assert journal.find_ended("event:1") is not None
    assert list(journal.rows()) == []


def test_new_work_is_taken_again_when_there_is_room(
    journal: JournalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goondan.kernel.broker.journal.committer.FULL_RETRY_S", 0.0)
    committer = started(journal, tmp_path)
    try:
        limit(journal, 4)
        assert written(committer, NEW) == {0}
        journal._db.execute("PRAGMA max_page_count = 1000000")
        assert written(committer, NEW) == frozenset()
        assert not committer._writer.full
    finally:
        committer.close()


def test_a_failing_disk_is_told_to_the_loop(
    committer: Committer, journal: JournalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise JournalFailed("disk I/O error (SQLITE_IOERR_FSYNC)")

    monkeypatch.setattr(journal, "commit", broken)
    committer.append(NEW)
    assert select.select([committer._wake_r], [], [], 10)[0]
    with pytest.raises(JournalFailed, match="FSYNC"):
        committer.settled()


def test_close_writes_what_was_appended(journal: JournalStore, tmp_path: Path) -> None:
    committer = started(journal, tmp_path)
    for number in range(100):
        committer.append([Item((Put("s", str(number).encode()),))])
    committer.close()
    assert sqlite3.connect(tmp_path / "kernel.db").execute("SELECT count(*) FROM records").fetchone() == (100,)
