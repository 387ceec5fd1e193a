"""How long the journal keeps the ids of ended events, and answers that a client may still ask for."""

from __future__ import annotations

import sqlite3
from typing import Final

from goondan.kernel.broker.journal.tables import Meta

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
