"""The tables of the journal's file: checksums, rows that writes leave, how long rows stay, and errors of SQLite.

store.py says what the tables are for. A record whose subject is retired by a later write of the same transaction is not
written at all. Under load this is true of most records.

Source: docs/design/delivery.md section 1.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from goondan.kernel.broker.journal.redo import RedoEntry, advance, record_checksum
from goondan.kernel.broker.state.records import DropAnswer, Put, Retire
from goondan.schemas.wire.errors import GoondanError, fail

#: Format of the file. Every other one is refused. 2: a record of a feature has the name of the feature in it.
FORMAT: Final = 2
#: "Gdnj": tells our file from any other SQLite file.
APPLICATION_ID: Final = 0x47646E6A
#: Numbers of writes are below this. A higher number cannot be right, and leaves SQLite no room above it.
MAX_NUMBER: Final = 1 << 60

SELECT_META: Final = "SELECT last, digest, ended, answer_bytes, large_bytes FROM meta"
INSERT_RECORD: Final = "INSERT INTO records VALUES (?, ?, ?, ?)"
INSERT_ENDED: Final = "INSERT OR REPLACE INTO ended VALUES (?, ?, ?, ?, ?, ?)"
INSERT_ANSWER: Final = "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)"

SCHEMA: Final = """\
CREATE TABLE records (seq INTEGER PRIMARY KEY, subject TEXT NOT NULL, data BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE INDEX records_subject ON records (subject);
CREATE TABLE ended (
    number INTEGER PRIMARY KEY, subject TEXT NOT NULL, digest BLOB NOT NULL, state TEXT NOT NULL,
    at_ms INTEGER NOT NULL, crc INTEGER NOT NULL
);
CREATE UNIQUE INDEX ended_subject ON ended (subject);
CREATE TABLE answers (
    number INTEGER PRIMARY KEY, subject TEXT NOT NULL UNIQUE, data BLOB NOT NULL, size INTEGER NOT NULL,
    at_ms INTEGER NOT NULL, crc INTEGER NOT NULL, file TEXT
);
CREATE INDEX answers_file ON answers (file) WHERE file IS NOT NULL;
CREATE TABLE quarantine (
    seq INTEGER PRIMARY KEY, subject TEXT, data BLOB, reason TEXT NOT NULL, at_ms INTEGER NOT NULL
);
CREATE TABLE suspects (seq INTEGER PRIMARY KEY, failures INTEGER NOT NULL);
CREATE TABLE meta (
    one INTEGER PRIMARY KEY CHECK (one = 1), last INTEGER NOT NULL, digest INTEGER NOT NULL,
    ended INTEGER NOT NULL, answer_bytes INTEGER NOT NULL, large_bytes INTEGER NOT NULL
);
INSERT INTO meta VALUES (1, 0, 0, 0, 0, 0);
"""


class Meta(Struct):
    """The row of `meta`."""

    #: The number of the last write.
    last: int
    #: The running digest of all writes.
    digest: int
    #: How many ids `ended` has.
    ended: int
    #: Bytes of `answers` in all.
    answer_bytes: int
    #: Those of them that lie in files.
    large_bytes: int

    def put(self, db: sqlite3.Connection) -> None:
        """Write it."""
        db.execute(
            "UPDATE meta SET last = ?, digest = ?, ended = ?, answer_bytes = ?, large_bytes = ?",
            msgspec.structs.astuple(self),
        )


def ended_checksum(subject: str, digest: bytes, state: str, at_ms: int) -> int:
    """The checksum of a row of `ended`."""
    return zlib.crc32(f"{subject}\0{state}\0{at_ms}".encode(), zlib.crc32(digest))


def is_key(number: object) -> bool:
    """Whether this can be the number of a write."""
    return isinstance(number, int) and 0 <= number <= MAX_NUMBER


def is_right(stored: object, checksum: Callable[..., int], *values: object) -> bool:
    """Whether these values of a row have their checksum. One bit can also have changed the type of one of them."""
    try:
        return stored == checksum(*values)
    except (TypeError, ValueError, AttributeError):
        return False


def write_rows(db: sqlite3.Connection, entries: Sequence[RedoEntry], meta: Meta) -> None:
    """Bring the tables to what `entries` leave when all of them are over, within the caller's transaction. Counts their
    writes in `meta`. Raises sqlite3.Error.
    """
    number, last = meta.last, entries[-1]
    retired = _retired(entries, number)
    records: list[tuple[int, str, bytes, int]] = []
    ended: list[tuple[int, str, bytes, str, int, int]] = []
    answers: dict[str, tuple[int, str, bytes, int, int, int, str | None]] = {}
    for at_ms, write in [(entry.at_ms, write) for entry in entries for write in entry.writes]:
        number += 1
        subject = write.subject
        if isinstance(write, Put):
            if retired.get(subject, 0) < number:
                records.append((number, subject, write.data, record_checksum(subject, write.data)))
            continue
        if isinstance(write, DropAnswer):
            answers.pop(subject, None)
            _drop_answer(db, subject, meta)
            continue
        if write.digest is not None:
            crc = ended_checksum(subject, write.digest, write.state, at_ms)
            ended.append((number, subject, write.digest, write.state, at_ms, crc))
        if write.answer is not None:
            file, more = write.large or (None, 0)
            size, crc = len(write.answer) + more, record_checksum(subject, write.answer)
            answers[subject] = (number, subject, write.answer, size, at_ms, crc, file)
    db.executemany("DELETE FROM records WHERE subject = ?", [(subject,) for subject in retired])
    db.executemany(INSERT_ENDED, ended)
    db.executemany(INSERT_ANSWER, answers.values())
    db.executemany(INSERT_RECORD, records)
    meta.last, meta.digest = number, advance(last.digest, last.writes)
    meta.ended += len(ended)
    meta.answer_bytes += sum(answer[3] for answer in answers.values())
    meta.large_bytes += sum(answer[3] - len(answer[2]) for answer in answers.values())


def _retired(entries: Sequence[RedoEntry], number: int) -> dict[str, int]:
    """The subjects that are retired, and the number of the last write that does it."""
    writes = [write for entry in entries for write in entry.writes]
    return {write.subject: at for at, write in enumerate(writes, number + 1) if isinstance(write, Retire)}


def _drop_answer(db: sqlite3.Connection, subject: str, meta: Meta) -> None:
    gone = db.execute("DELETE FROM answers WHERE subject = ? RETURNING data, size", (subject,)).fetchall()
    for data, size in gone:
        meta.answer_bytes -= size
        meta.large_bytes -= size - len(data)


#: How long retired ids are kept at least (milliseconds): a sender may repeat its message a week later, after a holiday.
#: The newest KEPT_IDS are kept in any case.
KEEP_IDS_MS: Final = 7 * 24 * 3600 * 1000
KEPT_IDS: Final = 1_000_000
#: When more of the file is in use (bytes), ids are removed before their week is over, the oldest first. The newest
#: KEPT_IDS stay. Otherwise a sender that never pauses would fill the disk: with some 30 million events in a week, 50 a
#: second.
CROWDED_BYTES: Final = 4 << 30
#: How long answers of retired subjects are kept at most (milliseconds), and how many bytes of them.
KEEP_ANSWERS_MS: Final = 24 * 3600 * 1000
KEEP_ANSWER_BYTES: Final = 1 << 30
#: How many bytes of these answers may lie in files: a quarter of the limit of the folder for large payloads.
KEEP_LARGE_BYTES: Final = 256 << 20
#: The most rows that one purge removes, so that it does not delay the next batches.
PURGE_ROWS: Final = 2_000


def purge(db: sqlite3.Connection, meta: Meta, now_ms: int) -> int:
    """Remove ids and answers that were kept long enough, at most PURGE_ROWS of each kind, in the open transaction.
    `meta` is updated. Returns how many rows were removed. Raises sqlite3.Error.
    """
    return _purge_answers(db, meta, now_ms) + _purge_ended(db, meta, now_ms)


def _purge_answers(db: sqlite3.Connection, meta: Meta, now_ms: int) -> int:
    """Remove answers that are too old, and then the oldest ones beyond the limits in bytes."""
    gone = 0
    for among in ("true", "file IS NOT NULL"):
        oldest = db.execute(
            "SELECT number, size, size - length(data), at_ms FROM answers "  # noqa: S608 - our own words
            f"WHERE {among} ORDER BY number LIMIT ?",
            (PURGE_ROWS,),
        )
        too_many: list[tuple[int]] = []
        for number, size, large, at_ms in oldest.fetchall():
            over = meta.answer_bytes > KEEP_ANSWER_BYTES or (large and meta.large_bytes > KEEP_LARGE_BYTES)
            if at_ms >= now_ms - KEEP_ANSWERS_MS and not over:
                break
            too_many.append((number,))
            meta.answer_bytes -= size
            meta.large_bytes -= large
        db.executemany("DELETE FROM answers WHERE number = ?", too_many)
        gone += len(too_many)
    return gone


def _purge_ended(db: sqlite3.Connection, meta: Meta, now_ms: int) -> int:
    """Remove the oldest ids beyond KEPT_IDS, if they are old enough or too many."""
    surplus = min(PURGE_ROWS, meta.ended - KEPT_IDS)
    if surplus <= 0:
        return 0
    gone = db.execute(
        "DELETE FROM ended WHERE number IN (SELECT number FROM ended ORDER BY number LIMIT ?) AND (? OR at_ms < ?)",
        (surplus, _used_bytes(db) > CROWDED_BYTES, now_ms - KEEP_IDS_MS),
    ).rowcount
    meta.ended -= gone
    return gone


def _used_bytes(db: sqlite3.Connection) -> int:
    """How much of the file is in use (bytes)."""
    size, pages, free = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_size", "page_count", "freelist_count")
    )
    return size * (pages - free)


#: Damages that one error names.
MAX_NAMED: Final = 5


def code_of(error: Exception) -> int:
    """SQLite's primary result code."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def is_full(error: Exception) -> bool:
    """Whether the disk had no room."""
    # SQLite's shared memory beside the WAL is a file as well, and has an error of its own when it cannot grow.
    extended = getattr(error, "sqlite_errorcode", 0)
    return code_of(error) == sqlite3.SQLITE_FULL or extended == sqlite3.SQLITE_IOERR_SHMSIZE


def is_busy(error: Exception) -> bool:
    """Whether another program has the file."""
    return code_of(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def name_of(error: sqlite3.Error) -> str:
    """SQLite's name for it."""
    return str(getattr(error, "sqlite_errorname", "") or type(error).__name__)


def corrupt(path: str, damage: list[str]) -> GoondanError:
    """The error that names the first damages of a file."""
    more = f", and {len(damage) - MAX_NAMED} more" if len(damage) > MAX_NAMED else ""
    return fail("E_JOURNAL_CORRUPT", f"{path}: {'; '.join(damage[:MAX_NAMED])}{more}")


def start_error(path: str, error: sqlite3.Error) -> GoondanError:
    """Why the file cannot be opened."""
    if is_full(error):
        return fail("E_DISK_FULL", f"{path}: there is no room on the disk to open the journal")
    if is_busy(error):
        return fail("E_STATE", f"{path} is in use by another program")
    return fail("E_STATE", f"{path}: {error}")
