"""The journal's file: `<state_dir>/kernel.db`, SQLite in WAL mode. It stores subjects and bytes without their meaning.

Tables.
- `records`: what replay must read. A row belongs to a subject (an event, an instance, …). All rows of a subject are
  removed together when it is retired, so this table is as small as the unfinished work.
- `ended`: the ids of retired subjects, with the digest of what was accepted under them. Never read as a whole.
- `answers`: answers of retired subjects that somebody may still ask for. Never read as a whole.
- `quarantine`: rows whose replay failed twice. Only a person reads them.
- `meta`: one row: the number of the last write, a running digest of all writes, the format, failed recoveries.

Rules.
- One transaction writes one batch, so a batch is there whole or not at all. SQLite repairs a torn tail by itself.
- Every row has a checksum, because SQLite does not notice a flipped bit in a payload.
- A side file holds the number and the digest of the last write that was promised to somebody. It is written after the
  commit is as durable as it has to be. A journal that knows less than its side file has lost promised writes: that is
  E_JOURNAL_CORRUPT. After a loss of power this holds with `power` only: `process` never promised more.
- A journal that is refused stays as it is. `--accept-loss` keeps a copy of it and goes on with what can be read.
- With `process` the redo file promises a batch, and the batch comes into the tables later (redo.py): `promise` and
  `fold`. Whoever looks for something that is not in the tables yet has it folded first.
- A write that fails for lack of space raises DiskFull and leaves the file as it was. Any other failure raises
  JournalFailed. Then the caller must end: after a failed fsync nobody knows what the disk holds.

Source: docs/design/delivery.md section 1.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, Final, Literal

from goondan.kernel.broker.journal import files as journal_files
from goondan.kernel.broker.journal import redo, tables
from goondan.kernel.broker.state.records import DiskFull, Ended, JournalFailed, Retire, Row, Write
from goondan.schemas.wire.errors import fail

#: The file in the state directory.
JOURNAL_FILE: Final = "kernel.db"
#: This file lies beside the journal after SQLite has found damage in the journal during use.
SUSPICION_SUFFIX: Final = "-suspected"
#: Free pages (4 KiB) that stay in the file for new rows; more are given back to the disk.
SPARE_PAGES: Final = 4096
#: Pages that one round gives back.
VACUUM_PAGES: Final = 1024
#: Pages in the WAL after which SQLite copies them into the file. The copy happens in the thread that commits.
CHECKPOINT_PAGES: Final = 2000
#: Processes that may fail on a row before it is put aside: one failure may be the machine's.
MAX_RECOVERIES: Final = 2
#: Pages of memory, as SQLite counts them (negative: KiB).
_WRITER_CACHE: Final = -4096
#: How long the reader waits for the writer (milliseconds). In WAL mode it never has to, but for a checkpoint's restart.
_BUSY_MS: Final = 2000

Durability = Literal["power", "process"]


class JournalStore:
    """The open file. With `power` one thread writes, and `find_*` are for one other thread.

    `path` is the file, `durability` what a commit survives, `boot_id` the machine's present boot. `witness` is a file
    in another folder that remembers that there was a journal. None: nobody notices a journal that is gone with its side
    file.
    """

    def __init__(
        self,
        path: str,
        *,
        durability: Durability,
        boot_id: str,
        accept_loss: bool = False,
        witness: str | None = None,
    ) -> None:
        """Open or make the file. Raises GoondanError E_JOURNAL_CORRUPT, E_DISK_FULL, E_STATE."""
        self.path = path
        self.durability: Durability = durability
        self._boot_id = boot_id
        self._mark = journal_files.MarkFile(path + "-acked")
        self._redo = redo.RedoFile(path + redo.REDO_SUFFIX)
        #: Batches that were promised and are not in the tables, and their subjects.
        self._owed: list[redo.RedoEntry] = []
        self._owed_subjects: set[str] = set()
        self._witness = None if witness is None else journal_files.Witness(witness)
        #: What could not be read at the start, for the log; empty in an ordinary start.
        self.losses: list[str] = []
        try:
            self._db = self._open(accept_loss)
            #: The row of `meta`: nobody else writes the file.
            self._meta = tables.Meta(*self._db.execute(tables.SELECT_META).fetchone())
            if left := redo.following(self._redo.read(), self._meta.last, self._meta.digest):
                self._write(left)
            #: Number and digest of the last write that was promised.
            self._last, self._digest = self._meta.last, self._meta.digest
            # With `power` a thread uses the other connection. With `process` that one has the pages in memory already.
            self._reader = self._connect() if durability == "power" else self._db
        except sqlite3.Error as error:
            raise tables.start_error(path, error) from None
        except OSError as error:
            raise fail("E_STATE", f"{error.filename or path}: {error.strerror}") from None

    # --- reading

    def rows(self) -> Iterator[Row]:
        """What replay must read, in order. Each row's checksum was verified when the file was opened."""
        self.fold()
        for seq, subject, data in self._db.execute("SELECT seq, subject, data FROM records ORDER BY seq"):
            yield Row(seq, subject, data)

    def find_ended(self, subject: str) -> Ended | None:
        """See interface.Archive. Raises JournalFailed when the file cannot be read at all."""
        owed = self._told(subject)
        if owed is not None and owed.ended is not None:
            return owed.ended
        rows = self._find("SELECT digest, state, at_ms, crc FROM ended WHERE subject = ?", subject)
        if not rows:
            return None
        digest, state, at_ms, crc = rows[0]
        _check(f"the end of {subject!r}", crc, tables.ended_checksum, subject, digest, state, at_ms)
        return Ended(digest, state, at_ms)

    def find_answer(self, subject: str) -> bytes | None:
        """See interface.Archive. Raises JournalFailed when the file cannot be read at all."""
        owed = self._told(subject)
        if owed is not None and (owed.dropped or owed.answer is not None):
            return owed.answer
        rows = self._find("SELECT data, crc FROM answers WHERE subject = ?", subject)
        if not rows:
            return None
        data, crc = rows[0]
        _check(f"the answer of {subject!r}", crc, redo.record_checksum, subject, data)
        return bytes(data)

    def _find(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        try:
            return self._reader.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from None

    def find_records(self, subject: str) -> list[bytes]:
        """See interface.Archive. Raises JournalFailed when the file cannot be read at all."""
        owed = self._told(subject)
        if owed is not None and owed.alone:
            return owed.records
        rows = self._find("SELECT data, crc FROM records WHERE subject = ? ORDER BY seq", subject)
        for data, crc in rows:
            _check(f"a record of {subject!r}", crc, redo.record_checksum, subject, data)
        return [*(bytes(data) for data, _ in rows), *(owed.records if owed is not None else ())]

    def files(self) -> frozenset[str]:
        """Files of large payloads that kept answers refer to. Raises JournalFailed."""
        with suppress(DiskFull):  # then some that were dropped meanwhile are named as well
            self.fold()
        owed = (write.large for entry in self._owed for write in entry.writes if isinstance(write, Retire))
        rows = self._find("SELECT file FROM answers WHERE file IS NOT NULL")
        return frozenset([*(row[0] for row in rows), *(large[0] for large in owed if large is not None)])

    def _failed(self, error: sqlite3.Error) -> Exception:
        """The exception for the caller. Damage is remembered, so that the next start checks the whole file."""
        if tables.is_full(error):
            return DiskFull(str(error))
        if tables.code_of(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            with suppress(OSError):
                journal_files.create_private(self.path + SUSPICION_SUFFIX)
        return JournalFailed(f"{error} ({tables.name_of(error)})")

    # --- writing

    def commit(self, batch: Sequence[Write], now_ms: int) -> int:
        """Write a batch as one transaction, as durable as promised; returns the number of its last write.

        Raises DiskFull (nothing was written) and JournalFailed.
        """
        self.fold()
        try:
            self._write([redo.RedoEntry(self._last + 1, self._digest, now_ms, batch)])
        except sqlite3.Error as error:
            raise self._failed(error) from None
        self._last, self._digest = self._meta.last, self._meta.digest
        self._put_mark()
        return self._last

    def promise(self, batch: Sequence[Write], now_ms: int) -> int:
        """Write a batch so that it survives the end of every process; it comes into the tables with `fold`. Returns the
        number of its last write. Raises DiskFull (nothing was written) and JournalFailed.
        """
        entry = redo.RedoEntry(self._last + 1, self._digest, now_ms, batch)
        self._redo.append(entry)
        self._owed.append(entry)
        self._owed_subjects.update([write.subject for write in batch])
        self._last, self._digest = entry.last, redo.advance(entry.digest, batch)
        self._put_mark()
        return self._last

    def fold(self) -> None:
        """Bring what was promised into the tables. Raises DiskFull (it stays promised, and is tried again), and
        JournalFailed.
        """
        if not self._owed:
            return
        try:
            self._write(self._owed)
        except sqlite3.Error as error:
            raise self._failed(error) from None
        self._redo.clear()
        self._owed = []
        self._owed_subjects = set()

    def _told(self, subject: str) -> redo.Told | None:
        """The promised changes of a subject that are not in the tables yet."""
        return redo.told(self._owed, subject) if subject in self._owed_subjects else None

    def _put_mark(self) -> None:
        try:
            self._mark.write(journal_files.Mark(self._boot_id, self._last, self._digest))
        except OSError as error:
            raise JournalFailed(f"{self.path}-acked: {error.strerror}") from None

    def _write(self, entries: Sequence[redo.RedoEntry]) -> None:
        """Write batches as one transaction, or none of them. Raises sqlite3.Error."""
        db, meta = self._db, copy(self._meta)
        try:
            db.execute("BEGIN IMMEDIATE")
            tables.write_rows(db, entries, meta)
            meta.put(db)
            db.execute("COMMIT")
        except sqlite3.Error:
            self._roll_back()
            raise
        self._meta = meta

    def tidy(self, now_ms: int) -> bool:
        """Remove what was kept long enough, and give free pages back; True when there is more to do.

        Bounded work, for moments in which no batch waits. Raises DiskFull and JournalFailed.
        """
        db = self._db
        self.fold()
        try:
            db.execute("BEGIN IMMEDIATE")
            meta = copy(self._meta)
            gone = tables.purge(db, meta, now_ms)
            if gone:
                meta.put(self._db)
            db.execute("COMMIT")
            self._meta = meta
            free: int = db.execute("PRAGMA freelist_count").fetchone()[0]
            if free > SPARE_PAGES:
                db.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES});")  # execute() stops after one page
            return gone >= tables.PURGE_ROWS or free > SPARE_PAGES + VACUUM_PAGES
        except sqlite3.Error as error:
            self._roll_back()
            raise self._failed(error) from None

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    # --- rows that break recovery

    def suspect(self, row: Row, reason: str, now_ms: int) -> bool:
        """A row could not be replayed. True when it is now in quarantine: that is from the second time on.

        The first time the caller ends: a row is given up only when a second process fails on it as well.
        """
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        db.execute(
            "INSERT INTO suspects VALUES (?, 1) ON CONFLICT (seq) DO UPDATE SET failures = failures + 1", (row.seq,)
        )
        failures: int = db.execute("SELECT failures FROM suspects WHERE seq = ?", (row.seq,)).fetchone()[0]
        if failures >= MAX_RECOVERIES:
            values = (row.seq, row.subject, row.data, reason, now_ms)
            db.execute("INSERT OR REPLACE INTO quarantine VALUES (?, ?, ?, ?, ?)", values)
            db.execute("DELETE FROM records WHERE seq = ?", (row.seq,))
        db.execute("COMMIT")
        return failures >= MAX_RECOVERIES

    def checkpoint(self) -> None:
        """Copy what is in the WAL into the file, over a connection of its own: for a thread that may wait for the disk.

        A failure is left to the next one: nothing is lost by it.
        """
        with suppress(sqlite3.Error, OSError):
            db = self._connect()
            try:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            finally:
                db.close()

    def close(self) -> None:
        """Copy what is in the WAL into the file, and close."""
        with suppress(DiskFull, JournalFailed):  # the next start does it
            self.fold()
        self._redo.close()
        with suppress(sqlite3.Error):
            self._reader.close()
        with suppress(sqlite3.Error):
            self._db.close()
            if self._witness is not None:
                self._witness.kept()  # SQLite has synced the file
        self._mark.close()

    # --- opening

    def _open(self, accept_loss: bool) -> sqlite3.Connection:
        journal_files.create_private(self.path)
        for suffix in ("-wal", "-shm"):
            journal_files.take_apart(self.path + suffix)
        mark = self._mark.read()
        if mark is not None and self.durability == "process" and mark.boot_id != self._boot_id:
            mark = None  # a loss of power may have taken what it promises
        promised = 0 if mark is None else mark.last
        suspicion = self.path + SUSPICION_SUFFIX
        db, damage = self._examine(mark if promised else None, thorough=accept_loss or os.path.lexists(suspicion))
        if not damage:
            with suppress(FileNotFoundError):
                os.unlink(suspicion)
            return db
        db.close()
        if not accept_loss:
            raise tables.corrupt(self.path, damage)
        copy = journal_files.set_aside(self.path)
        with suppress(FileNotFoundError):
            os.unlink(suspicion)
        self.losses = [f"{text}; the damaged journal is kept as {copy}" for text in damage]
        return self._salvage(copy, promised)

    def _examine(self, promised: journal_files.Mark | None, *, thorough: bool) -> tuple[sqlite3.Connection, list[str]]:
        """The open file, and what is wrong with it. Raises GoondanError for a file that is not ours."""
        db = self._connect()
        try:
            db.execute(f"PRAGMA cache_size = {_WRITER_CACHE}")
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                return db, self._examine_empty(db, promised)
            damage = self._examine_tables(db, promised, thorough=thorough)
            if self._witness is not None and not damage:
                self._witness.kept()
            return db, damage
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:
            if tables.is_full(error) or tables.is_busy(error):
                db.close()
                raise
            return db, [f"it cannot be read: {error}"]
        except BaseException:
            db.close()
            raise

    def _examine_empty(self, db: sqlite3.Connection, promised: journal_files.Mark | None) -> list[str]:
        """The damage of a file without tables. A file without damage gets its tables."""
        if promised is not None:
            return [f"the journal is empty, but {promised.last} writes were promised"]
        if self._witness is not None and self._witness.must_be_there(self._boot_id, power=self.durability == "power"):
            return ["the journal is gone, and its side file too: one was kept here before"]
        self._create(db)
        return []

    def _examine_tables(
        self, db: sqlite3.Connection, promised: journal_files.Mark | None, *, thorough: bool
    ) -> list[str]:
        """The damage of a file that has tables. Raises GoondanError for a file that is not ours."""
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        if db.execute("PRAGMA application_id").fetchone()[0] != tables.APPLICATION_ID or version != tables.FORMAT:
            age = "newer" if version > tables.FORMAT else "older"
            message = f"{self.path} has format {version}; this kernel reads format {tables.FORMAT}"
            hint = (
                f"Start it with the {age} kernel that wrote it. To begin with an empty journal, move the file away "
                "and start once with --accept-loss."
            )
            raise fail("E_STATE", message, suggestion=hint)
        self._prepare(db)
        meta = tables.Meta(*db.execute(tables.SELECT_META).fetchone())
        damage = [
            f"record {seq} of {subject!r} has a wrong checksum"
            for seq, subject, data, crc in db.execute("SELECT seq, subject, data, crc FROM records ORDER BY seq")
            if not tables.is_right(crc, redo.record_checksum, subject, data)
        ]
        damage += self._disorder(db, meta, thorough)
        damage += self._shortage(meta, promised)
        return damage

    def _shortage(self, meta: tables.Meta, promised: journal_files.Mark | None) -> list[str]:
        """The promised writes that are neither in the tables nor in the redo file."""
        if promised is None:
            return []
        last, digest = meta.last, meta.digest
        for entry in redo.following(self._redo.read(), last, digest):
            last, digest = entry.last, redo.advance(digest, entry.writes)
        if last < promised.last:
            return [f"it ends with write {last}, but {promised.last} were promised"]
        if last == promised.last and digest != promised.digest:
            return [f"write {last} is not the one that was promised"]
        return []

    @staticmethod
    def _disorder(db: sqlite3.Connection, meta: tables.Meta, thorough: bool) -> list[str]:
        """The damage in the order of the file. Every start checks the rows of `records` and their index: a damaged
        index can keep a retired row, whose event would run again. The other tables can be large, so they are checked
        only when there is a reason. This takes about 5 µs for each row.
        """
        found = db.execute(f"PRAGMA integrity_check({'20' if thorough else 'records'})").fetchall()
        disorder = [str(text) for (text,) in found if text != "ok"]
        for table, key in (("records", "seq"), ("ended", "number"), ("answers", "number")):
            highest = db.execute(f"SELECT max({key}) FROM {table}").fetchone()[0]  # noqa: S608 - our own names
            if highest is not None and highest > meta.last:
                disorder.append(f"{table} holds write {highest}, but the last one is {meta.last}")
        return disorder

    def _salvage(self, damaged: str, promised: int) -> sqlite3.Connection:
        """A new file with every row of the damaged one that is whole. Numbers go on above all that were promised."""
        from goondan.kernel.broker.journal.salvage import copy_intact  # what copies files takes milliseconds

        journal_files.create_private(self.path)
        db = self._connect()
        self._create(db)
        meta = copy_intact(damaged, db, promised)
        self._mark.write(journal_files.Mark(self._boot_id, meta.last, meta.digest))
        return db

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False)

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA journal_mode = WAL")
        # With `process` the commits are the loop's, and the copy from the WAL is a thread's (`checkpoint`).
        db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES if self.durability == 'power' else 0}")
        db.execute(f"PRAGMA synchronous = {'FULL' if self.durability == 'power' else 'NORMAL'}")

    def _create(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before anything is written
        self._prepare(db)
        db.executescript(
            f"BEGIN; {tables.SCHEMA} PRAGMA user_version = {tables.FORMAT}; "
            f"PRAGMA application_id = {tables.APPLICATION_ID}; COMMIT;"
        )
        if self.durability == "power":
            journal_files.sync_folder(os.path.dirname(self.path))
        if self._witness is not None:
            self._witness.made(self._boot_id)


def _check(what: str, stored: object, checksum: Callable[..., int], *values: object) -> None:
    if not tables.is_right(stored, checksum, *values):
        raise fail("E_JOURNAL_CORRUPT", f"the journal's checksum of {what} is wrong")
