"""Reads the intact parts of a damaged journal, for `--accept-loss`. Never changes the damaged file.

Intact are:
- A row whose checksum is right. One bit can turn a text into bytes or a number, so a row's types are looked at as well.
- The rows on both sides of a hole. SQLite stops at a page that it cannot read, so a table is read from its end, too.
- The pages that are left of a file that was cut off. SQLite refuses such a file, so a copy is filled up with zeros.

Source: docs/design/delivery.md section 1.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import quote

from goondan.kernel.broker.journal import redo, tables

#: SQLite's header: the size of a page and the number of pages, both big-endian. A size of 1 stands for 65536 bytes.
_PAGE_SIZE: Final = slice(16, 18)
_PAGE_COUNT: Final = slice(28, 32)
_HEADER_BYTES: Final = 100
#: A file whose header says more than so many pages beyond its end is not filled up: the header is the damage.
_MAX_MISSING_BYTES: Final = 16 << 30


def copy_intact(damaged: str, db: sqlite3.Connection, promised: int) -> tables.Meta:
    """Copy every row of the damaged file that is whole into `db`, which is new. Returns its row of `meta`, whose last
    write is at least `promised`. Raises sqlite3.Error.
    """
    meta = tables.Meta(promised, 0, 0, 0, 0)
    db.execute("BEGIN IMMEDIATE")
    with suppress(sqlite3.Error, OSError), damaged_file(damaged) as old:
        for row in readable_rows(old, "records", "seq, subject, data, crc"):
            seq, subject, data, crc = row
            if tables.is_key(seq) and tables.is_right(crc, redo.record_checksum, subject, data):
                db.execute("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?)", row)
                meta.last = max(meta.last, seq)
        for row in readable_rows(old, "ended", "number, subject, digest, state, at_ms, crc"):
            number, *what, crc = row
            if tables.is_key(number) and tables.is_right(crc, tables.ended_checksum, *what):
                meta.ended += db.execute(tables.INSERT_ENDED, row).rowcount
                meta.last = max(meta.last, number)
        for row in readable_rows(old, "answers", "number, subject, data, size, at_ms, crc, file"):
            number, subject, data, size, at_ms, crc, file = row
            typed = isinstance(size, int) and isinstance(at_ms, int) and isinstance(file, str | None)
            if tables.is_key(number) and typed and tables.is_right(crc, redo.record_checksum, subject, data):
                db.execute(tables.INSERT_ANSWER, row)
                meta.answer_bytes += size
                meta.large_bytes += size - len(data)
                meta.last = max(meta.last, number)
    last = meta.last
    for entry in redo.RedoFile(damaged + redo.REDO_SUFFIX).read():
        db.execute("DELETE FROM records WHERE seq BETWEEN ? AND ?", (entry.first, entry.last))
        meta.last = entry.first - 1  # they keep their numbers
        tables.write_rows(db, [entry], meta)
        last = max(last, meta.last)
    meta.last = last
    meta.put(db)
    db.execute("COMMIT")
    return meta


@contextmanager
def damaged_file(path: str) -> Iterator[sqlite3.Connection]:
    """A connection for reading the damaged file. Raises sqlite3.Error, OSError."""
    filled = _filled_up(path)
    try:
        name = quote(os.path.abspath(filled or path))  # a path may hold `?`, `#` and `%`
        db = sqlite3.connect(f"file:{name}?mode={'rw' if filled else 'ro'}", uri=True, isolation_level=None)
        try:
            db.text_factory = _text
            yield db
        finally:
            db.close()
    finally:
        if filled is not None:
            for suffix in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    os.unlink(filled + suffix)


def readable_rows(db: sqlite3.Connection, table: str, columns: str) -> Iterator[tuple[Any, ...]]:
    """The rows of a table by its key, the first of `columns`: up to a hole, then those behind it from the end."""
    key = columns.partition(",")[0]
    last = -1
    with suppress(sqlite3.Error):
        for row in db.execute(f"SELECT {columns} FROM {table} ORDER BY {key}"):  # noqa: S608 - our own names
            last = row[0]
            yield row
        return
    with suppress(sqlite3.Error):
        yield from db.execute(
            f"SELECT {columns} FROM {table} WHERE {key} > ? ORDER BY {key} DESC",  # noqa: S608 - our own names
            (last,),
        )


def _text(data: bytes) -> str:
    """Decode a text. One wrong byte in it must not end the reading of its table."""
    return data.decode("utf-8", "surrogateescape")


def _filled_up(path: str) -> str | None:
    """A copy of a file that was cut off, as long as its header says; None for any other. Raises OSError."""
    with open(path, "rb") as file:
        header = file.read(_HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    if len(header) < _HEADER_BYTES:
        return None
    page = int.from_bytes(header[_PAGE_SIZE], "big")
    whole = (65536 if page == 1 else page) * int.from_bytes(header[_PAGE_COUNT], "big")
    if not size < whole <= size + _MAX_MISSING_BYTES:
        return None
    copy = path + "-filled"
    with open(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as target:
        with open(path, "rb") as source:
            shutil.copyfileobj(source, target)
        target.truncate(whole)
    with suppress(FileNotFoundError):
        shutil.copyfile(path + "-wal", copy + "-wal")
    return copy
