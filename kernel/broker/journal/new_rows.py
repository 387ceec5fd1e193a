"""The rows that batches of writes leave in the journal's tables.

A record whose subject is retired by a later write is not written at all. Under load this is true of most records.

Source: docs/design/delivery.md section 1.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Sequence

from goondan.kernel.broker.journal.interface import DropAnswer, Put, Retire
from goondan.kernel.broker.journal.redo import RedoEntry, record_checksum
from goondan.kernel.broker.journal.tables import INSERT_ANSWER, INSERT_ENDED, INSERT_RECORD, Meta, ended_checksum


class NewRows:
    """What `entries` leave when all of them are over. Counts their writes in `meta`: number and digest of the last."""

    def __init__(self, entries: Sequence[RedoEntry], meta: Meta) -> None:
        self._meta = meta
        #: Subjects that are retired, and the number of the last write that does it.
        self._retired = _retired(entries, meta.last)
        #: Rows for the tables, and the subjects whose answers go.
        self._records: list[tuple[int, str, bytes, int]] = []
        self._ended: list[tuple[int, str, bytes, str, int, int]] = []
        self._answers: dict[str, tuple[int, str, bytes, int, int, int, str | None]] = {}
        self._dropped: list[str] = []
        for entry in entries:
            for write in entry.writes:
                meta.last += 1
                if isinstance(write, Put):
                    self._put(write)
                    continue
                meta.digest = zlib.crc32(write.subject.encode(), meta.digest)
                if isinstance(write, DropAnswer):
                    self._drop(write)
                else:
                    self._retire(write, entry.at_ms)

    def _put(self, write: Put) -> None:
        meta, subject = self._meta, write.subject
        crc = record_checksum(subject, write.data)
        meta.digest = zlib.crc32(crc.to_bytes(4, "little"), meta.digest)
        if self._retired.get(subject, 0) < meta.last:
            self._records.append((meta.last, subject, write.data, crc))

    def _drop(self, write: DropAnswer) -> None:
        self._answers.pop(write.subject, None)
        self._dropped.append(write.subject)

    def _retire(self, write: Retire, at_ms: int) -> None:
        number, subject = self._meta.last, write.subject
        if write.digest is not None:
            crc = ended_checksum(subject, write.digest, write.state, at_ms)
            self._ended.append((number, subject, write.digest, write.state, at_ms, crc))
        if write.answer is not None:
            file, more = write.large or (None, 0)
            size, crc = len(write.answer) + more, record_checksum(subject, write.answer)
            self._answers[subject] = (number, subject, write.answer, size, at_ms, crc, file)

    def write(self, db: sqlite3.Connection) -> None:
        """Bring the tables up to date, within the caller's transaction. Raises sqlite3.Error."""
        meta = self._meta
        for subject in self._dropped:
            _drop_answer(db, subject, meta)
        if self._retired:
            db.executemany("DELETE FROM records WHERE subject = ?", [(subject,) for subject in self._retired])
        if self._ended:
            db.executemany(INSERT_ENDED, self._ended)
            meta.ended += len(self._ended)
        if self._answers:
            db.executemany(INSERT_ANSWER, self._answers.values())
            meta.answer_bytes += sum(answer[3] for answer in self._answers.values())
            meta.large_bytes += sum(answer[3] - len(answer[2]) for answer in self._answers.values())
        if self._records:
            db.executemany(INSERT_RECORD, self._records)


def _retired(entries: Sequence[RedoEntry], number: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in entries:
        for write in entry.writes:
            number += 1
            if isinstance(write, Retire):
                found[write.subject] = number
    return found


def _drop_answer(db: sqlite3.Connection, subject: str, meta: Meta) -> None:
    gone = db.execute("DELETE FROM answers WHERE subject = ? RETURNING data, size", (subject,)).fetchall()
    for data, size in gone:
        meta.answer_bytes -= size
        meta.large_bytes -= size - len(data)
