"""Which turns a trace has, and where: one SQLite table of a workspace. Agents add to it, `gdn trace` reads it.

Rules.
- A turn that begins adds one row, which is never changed. The table is bounded. The oldest turns are forgotten
  first.
- It is a hint. The conversation files hold the truth. Everything here can be deleted. So nothing is synced, a turn goes
  on when its row cannot be written, and a reader finds nothing in a file that it cannot read.
- There is no index on it: a row would cost a turn four times as much, and all rows are read in 50 ms.

Source: docs/decisions/159.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any, Final

import msgspec
from msgspec import Struct

from goondan.schemas.wire.spans import is_trace_id

FOLDER: Final = "traces"
_FILES: Final = ("index.db", "index.db-wal", "index.db-shm")
#: Turns that are remembered. With its file, some 60 MiB.
MAX_TURNS: Final = 400_000
#: How often the oldest rows are removed (turns).
_SWEEP: Final = 256
#: The last turns are looked for among so many rows.
_TAIL: Final = 4096
#: How long a turn waits for others that write, each for some microseconds (seconds).
_WRITE_S: Final = 0.1
#: How long a reader waits (seconds).
_READ_S: Final = 2.0
#: Rows that are read at once by who reads all.
_PART: Final = 20_000

_SCHEMA: Final = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = OFF",
    "CREATE TABLE IF NOT EXISTS turns (seq INTEGER PRIMARY KEY, at TEXT NOT NULL, trace_id TEXT NOT NULL, "
    "turn_id TEXT NOT NULL, event_id TEXT NOT NULL, agent TEXT NOT NULL, instance_key TEXT NOT NULL)",
)
_ADD: Final = "INSERT INTO turns (at, trace_id, turn_id, event_id, agent, instance_key) VALUES (?, ?, ?, ?, ?, ?)"
_SWEEP_OLDEST: Final = "DELETE FROM turns WHERE seq <= ?"
#: A turn that was cut off in its beginning has a row for each time that it began; the first one counts. SQLite takes
#: the other columns from the row with the least `at`.
_OF_TRACE: Final = (
    "SELECT min(at) AS began, trace_id, turn_id, event_id, agent, instance_key FROM turns "
    "WHERE trace_id = ? GROUP BY agent, instance_key, turn_id ORDER BY began"
)
_NAMED: Final = (
    "SELECT min(at) AS began, trace_id, turn_id, event_id, agent, instance_key FROM turns "
    "WHERE ?1 IN (turn_id, event_id) GROUP BY agent, instance_key, turn_id ORDER BY began"
)
_LAST: Final = (
    "SELECT min(at) AS began, trace_id, turn_id, event_id, agent, instance_key "
    "FROM (SELECT * FROM turns ORDER BY seq DESC LIMIT ?4) "
    "WHERE ifnull(?1, agent) = agent AND ifnull(?2, instance_key) = instance_key "
    "GROUP BY agent, instance_key, turn_id ORDER BY began DESC LIMIT ?3"
)
_OF_RUNS: Final = (
    "SELECT min(at) AS began, trace_id, turn_id, event_id, agent, instance_key FROM turns "
    "WHERE trace_id IN (SELECT trace_id FROM turns WHERE turn_id IN (SELECT value FROM json_each(?))) "
    "GROUP BY agent, instance_key, turn_id ORDER BY began"
)
_NUMBERED: Final = (
    "SELECT at, trace_id, turn_id, event_id, agent, instance_key, seq FROM turns "
    "WHERE seq IN (SELECT value FROM json_each(?)) ORDER BY seq DESC"
)
_BEHIND: Final = (
    "SELECT at, trace_id, turn_id, event_id, agent, instance_key, seq FROM turns WHERE seq > ? ORDER BY seq LIMIT ?"
)
#: Looked for from the end: who follows asks each second, and all rows are too many for that.
_SINCE: Final = (
    "SELECT at, trace_id, turn_id, event_id, agent, instance_key, seq FROM turns "
    "WHERE seq > ifnull((SELECT seq FROM turns WHERE at < ?1 ORDER BY seq DESC LIMIT 1), 0) ORDER BY seq LIMIT ?2"
)
#: Whether a row is still what it was, or was removed for its age.
_KNOWN: Final = (
    "SELECT (SELECT turn_id FROM turns WHERE seq = ?1) IS ?2 OR ifnull((SELECT min(seq) FROM turns) > ?1, 0)"
)


class IndexRow(Struct, frozen=True, array_like=True):
    """One turn."""

    #: When it began: RFC 3339 in UTC with milliseconds.
    at: str
    #: Its trace.
    trace_id: str
    #: Its id.
    turn_id: str
    #: The event that it was for.
    event_id: str
    #: The agent.
    agent: str
    #: Its instance.
    instance_key: str


class NumberedRow(IndexRow, frozen=True, array_like=True):
    """One turn with its number, which grows from turn to turn."""

    #: The number.
    seq: int


class TraceIndex:
    """Adds turns to the index of one workspace. The first turn opens its connection, which stays: to open it costs as
    much as ten rows.
    """

    def __init__(self, state_dir: str) -> None:
        """`state_dir` is the workspace's."""
        self._folder = f"{state_dir}/{FOLDER}"
        self._db: sqlite3.Connection | None = None

    def add(self, row: IndexRow) -> None:
        """Add a turn. Raises OSError, sqlite3.Error, UnicodeEncodeError; a damaged file is made anew next time."""
        try:
            if self._db is None:
                self._db = _opened(self._folder)
            number = self._db.execute(_ADD, msgspec.structs.astuple(row)).lastrowid or 0
            if number % _SWEEP == 0:
                self._db.execute(_SWEEP_OLDEST, (number - MAX_TURNS,))
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            self.close()
            for name in _FILES:
                with suppress(OSError):
                    os.unlink(f"{self._folder}/{name}")
            raise

    def close(self) -> None:
        """Close its connection. A turn that comes afterwards opens another one."""
        if self._db is not None:
            self._db.close()
            self._db = None


def _opened(folder: str) -> sqlite3.Connection:
    path = f"{folder}/{_FILES[0]}"
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    # It is made closed to others; a link in its place is not followed.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(path, timeout=_WRITE_S, isolation_level=None)
    try:
        for line in _SCHEMA:
            db.execute(line)
    except BaseException:
        db.close()
        raise
    return db


def of_trace(state_dir: str, trace_id: str) -> list[IndexRow]:
    """The turns of a trace, in the order in which they began."""
    return _read(state_dir, _OF_TRACE, trace_id) if is_trace_id(trace_id) else []


def named(state_dir: str, name: str) -> list[IndexRow]:
    """The turns with this id, or of an event with this id, in the order in which they began."""
    return _read(state_dir, _NAMED, name)


def of_runs(state_dir: str, turn_ids: Sequence[str]) -> list[IndexRow]:
    """All turns of the traces that the turns with these ids are in, in the order in which they began."""
    return _read(state_dir, _OF_RUNS, msgspec.json.encode(turn_ids).decode())


def numbered(state_dir: str, numbers: Sequence[int]) -> list[NumberedRow]:
    """The turns with these numbers, the last one first."""
    return _converted(_rows(state_dir, _NUMBERED, msgspec.json.encode(numbers).decode()))


def last(state_dir: str, number: int, agent: str | None = None, instance_key: str | None = None) -> list[IndexRow]:
    """The turns that began last, the last one first; of one agent, or one instance key, if given. Only the rows that
    were added last are searched.
    """
    return _read(state_dir, _LAST, agent, instance_key, number, _TAIL)


def behind(state_dir: str, seq: int, turn_id: str, at: str, number: int) -> list[NumberedRow]:
    """The next turns behind the one with this number, which began `at`. If the index has another turn there, it was
    made anew or has lost rows: then those behind the last one that began earlier.
    """
    known = bool(seq) and any(found for (found,) in _rows(state_dir, _KNOWN, seq, turn_id))
    return _converted(_rows(state_dir, _BEHIND, seq, number) if known else _rows(state_dir, _SINCE, at, number))


def _converted(found: list[Any]) -> list[NumberedRow]:
    """Those rows that can be read."""
    rows = []
    for row in found:
        with suppress(msgspec.ValidationError):
            rows.append(msgspec.convert(row, NumberedRow))
    return rows


class Firsts:
    """The first turns of all traces, among those of some agents, for who lists them again and again."""

    def __init__(self, shown: Callable[[str], bool]) -> None:
        """`shown`: whether turns of an agent count."""
        self._shown = shown
        self._forget()

    def _forget(self) -> None:
        self._last = NumberedRow("", "", "", "", "", "", 0)
        self._numbers: dict[int, int] = {}  # by a digest of their traces: names would take three times as much

    def numbers(self, state_dir: str) -> list[int]:
        """Their numbers, the least first."""
        while rows := behind(state_dir, self._last.seq, self._last.turn_id, self._last.at, _PART):
            if rows[0].seq <= self._last.seq or len(self._numbers) > 2 * MAX_TURNS:
                self._forget()  # it was made anew, or has lost much
                continue
            for row in rows:
                if self._shown(row.agent):
                    self._numbers.setdefault(hash(row.trace_id), row.seq)
            self._last = rows[-1]
        return [*self._numbers.values()]


def _read(state_dir: str, query: str, *values: str | int | None) -> list[IndexRow]:
    """What a query finds; nothing if a row of it cannot be read."""
    try:
        return msgspec.convert(_rows(state_dir, query, *values), list[IndexRow])
    except msgspec.ValidationError:
        return []


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _rows(state_dir: str, query: str, *values: str | int | None) -> list[Any]:
    """The rows of a query; none of a file that is not there or cannot be read."""
    path = f"{state_dir}/{FOLDER}/{_FILES[0]}"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
        with closing(sqlite3.connect(path, timeout=_READ_S, isolation_level=None)) as db:
            db.text_factory = _text  # one that is none must not hide the others
            return db.execute(query, values).fetchall()
    except (OSError, sqlite3.Error, UnicodeEncodeError):
        return []
