"""The tables of the journal's file, its one row of `meta`, and checksums of rows. store.py says what they are for."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from typing import Final

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


class Meta:
    """The row of `meta`: number of the last write, running digest, ids in `ended`, bytes of `answers` in all, and of
    those of them that lie in files.
    """

    __slots__ = ("answer_bytes", "digest", "ended", "large_bytes", "last")

    def __init__(self, last: int, digest: int, ended: int, answer_bytes: int, large_bytes: int) -> None:
        self.last = last
        self.digest = digest
        self.ended = ended
        self.answer_bytes = answer_bytes
        self.large_bytes = large_bytes

    def copy(self) -> Meta:
        """The same, for a transaction that may come to nothing."""
        return Meta(self.last, self.digest, self.ended, self.answer_bytes, self.large_bytes)

    def put(self, db: sqlite3.Connection) -> None:
        """Write it."""
        db.execute(
            "UPDATE meta SET last = ?, digest = ?, ended = ?, answer_bytes = ?, large_bytes = ?",
            (self.last, self.digest, self.ended, self.answer_bytes, self.large_bytes),
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
