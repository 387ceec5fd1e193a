"""How long the journal keeps what has ended: ids, and answers that somebody may still ask for."""

from __future__ import annotations

import sqlite3
from typing import Final

from kernel.broker.journal.tables import Meta

#: Retired ids are kept this long at least (milliseconds), and KEPT_IDS of them in any case: a sender may repeat a week
#: later, after a holiday.
KEEP_IDS_MS: Final = 7 * 24 * 3600 * 1000
KEPT_IDS: Final = 1_000_000
#: Where more of the file is in use (bytes), ids go before their week is over, the oldest first, but for KEPT_IDS of
#: them: a sender that never rests would fill the disk. It takes some 30 million events in a week, 50 a second.
CROWDED_BYTES: Final = 4 << 30
#: Answers of retired subjects are kept this long at most (milliseconds), and KEEP_ANSWER_BYTES of them at most.
KEEP_ANSWERS_MS: Final = 24 * 3600 * 1000
KEEP_ANSWER_BYTES: Final = 1 << 30
#: Of these, bytes that lie in files: a quarter of what the folder of large payloads may hold.
KEEP_LARGE_BYTES: Final = 256 << 20
#: Rows that one round of purging removes at most: a purge must not delay the batches behind it.
PURGE_ROWS: Final = 2_000


def purge(db: sqlite3.Connection, meta: Meta, now_ms: int) -> int:
    """Remove what was kept long enough, at most PURGE_ROWS of each kind, in the transaction that is open. `meta` is
    changed with it. Returns how many rows went. Raises sqlite3.Error.
    """
    return _purge_answers(db, meta, now_ms) + _purge_ended(db, meta, now_ms)


def _purge_answers(db: sqlite3.Connection, meta: Meta, now_ms: int) -> int:
    """Answers that are too old, then the oldest ones beyond the budgets."""
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
    """The oldest ids beyond KEPT_IDS, if they are old enough or too many."""
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
    """Of the file, what is in use."""
    size, pages, free = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_size", "page_count", "freelist_count")
    )
    return size * (pages - free)
