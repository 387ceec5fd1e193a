"""One instance's conversation on disk: `<state_dir>/instances/<agent>/<key>/conversation.db` (SQLite).

Rules.
- The file is opened at the first turn, never when the process starts. Files and folders of this module are closed to
  other users (0600, 0700).
- Everything is written inside `write()`: one transaction, which begins by checking the epoch. A stale holder gets
  E_LEASE_LOST and writes nothing; a newer epoch is taken over by `adopt`.
- A turn appends message events at positions of its own; `finish` folds them into the base and stores the answer under
  the event's key, in the same transaction. An event key has at most one row, so a finished event is answered again from
  its row and never run again.
- Only `load_messages` reads the history, so a turn costs the same at any age of the conversation.
- The file and its log together never exceed `max_bytes`: a transaction that does not leave room for the end of its turn
  is refused as a whole (E_STORE_FULL). Nothing that is stored is cut.
- Every failure is one GoondanError: E_STORE_FULL, E_DISK_FULL, E_LEASE_LOST, or E_STATE for anything else. After a
  failure the file is closed, and the next turn opens it again.

Durability. WAL with synchronous NORMAL survives the end of the process; `power` makes the commit of `finish` wait for
the disk, which covers everything before it.

Source: docs/design/turns.md section 4; docs/design/delivery.md sections 2 and 6.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from agentproc.conversation import (
    Append,
    Message,
    MessageEvent,
    Remove,
    Replace,
    Truncate,
    decode_message,
    encode_message,
)
from schemas.errors import GoondanError, fail
from schemas.link import boottime_ms
from schemas.traces import (
    CONVERSATION_FILE,
    CONVERSATION_FORMAT,
    TRACE_COLUMNS,
    TRACE_TABLES,
    TRACED_FORMAT,
    NoteKind,
    TurnStatus,
)

#: How long a write waits for another process that has the file (milliseconds). That is longer than any transaction of
#: this module, and much shorter than the time after which a silent agent counts as hung.
BUSY_MS: Final = 2000
#: Pages in memory, as SQLite counts them (negative: KiB). An agent process may hold 9 MiB in all.
_CACHE: Final = -256
#: WAL pages after which SQLite copies them into the file (4 KiB each).
_CHECKPOINT_PAGES: Final = 256
#: How many answers are kept for events that may be delivered again. The broker forgets an event long before so many
#: others.
KEPT_ANSWERS: Final = 10_000
#: The most bytes of those answers, and of the messages of an instance whose messages no model reads. The broker
#: remembers 64 MiB of finished events, of all instances together.
KEPT_BYTES: Final = 64 << 20
#: How many runtime events are kept.
KEPT_RUNTIME_EVENTS: Final = 50_000
#: The room that only the end of a turn may use (bytes): for a thousand results of calls that were given up, the answer
#: with its error, and SQLite's own needs besides the stored data.
RESERVE_BYTES: Final = 4 << 20
#: A log of this size is copied into the file and emptied before the next write (bytes). Otherwise a large message would
#: count twice for as long as the file is open.
LARGE_LOG_BYTES: Final = 4 << 20
#: The size of a stored event besides its message (bytes).
_EVENT_BYTES: Final = 256
#: The size of a runtime event besides its detail (bytes).
_NOTE_BYTES: Final = 160
#: How much a transaction may add besides its data (bytes): pages of tables and indexes are written whole.
_WRITE_BYTES: Final = 64 << 10
#: How often the limits above are applied: after so many finished turns, and after so many stored bytes.
_TRIM_EVERY: Final = 256
_TRIM_BYTES: Final = 32 << 20

_SCHEMA: Final = """\
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE base (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, message BLOB NOT NULL);
CREATE TABLE events (
    turn_id TEXT NOT NULL, position INTEGER NOT NULL, type TEXT NOT NULL, target TEXT, message BLOB,
    stored_ms INTEGER NOT NULL, origin TEXT, PRIMARY KEY (turn_id, position)
) WITHOUT ROWID;
"""

#: A row of runtime_events: turn, kind, time, detail, span, parent.
_Note = tuple[str, str, str, str | None, str | None, str | None]
#: The file beside the conversation with the messages from before it began again, and the generation that followed.
EARLIER_FILE: Final = "earlier.db"
_EARLIER_SCHEMA: Final = """\
CREATE TABLE IF NOT EXISTS earlier.messages (
    generation INTEGER, seq INTEGER, id TEXT NOT NULL, message BLOB NOT NULL, PRIMARY KEY (generation, seq)
) WITHOUT ROWID
"""

_PAGES: Final = ("page_size", "page_count", "freelist_count")
#: SQLite's names for the failure to create or extend a file.
_NO_ROOM: Final = ("SQLITE_IOERR", "SQLITE_CANTOPEN")

Durability = Literal["power", "process"]


class TurnRow(Struct, frozen=True):
    """The stored turn of one event."""

    #: The key of the event.
    event_key: str
    #: The id of the turn.
    turn_id: str
    #: The number of the attempt, from 1.
    attempt: int
    #: Whether the turn runs, and how it ended.
    status: TurnStatus
    #: The payload of its `done` or `failed` frame.
    answer: bytes | None = None


class StoredEvent(Struct, frozen=True):
    """A message event of an unfinished turn."""

    #: Its position in the turn.
    position: int
    #: The event.
    event: MessageEvent
    #: When it was stored (CLOCK_BOOTTIME, milliseconds). 0: before the machine's last boot, so earlier than the start
    #: of every process that runs now.
    stored_ms: int
    #: The place in an extension that it came from; None: the turn itself.
    origin: str | None = None


class ConversationStore:
    """The conversation file in `directory`. Not for use by several threads.

    `kept_messages` limits the base (None: everything is kept). It is for an instance whose messages no model reads.
    `max_bytes` limits the file and its log together (None: only the disk limits them). A file of an earlier
    `generation` begins again: its history is moved to EARLIER_FILE, which this module never reads.
    """

    def __init__(
        self,
        directory: str,
        *,
        durability: Durability = "power",
        kept_messages: int | None = None,
        max_bytes: int | None = None,
        generation: int = 0,
    ) -> None:
        self.path = Path(directory) / CONVERSATION_FILE
        self._log = f"{self.path}-wal"
        self._max_bytes = max_bytes
        self._writing: Literal["usual", "final", "reserve"] = "usual"
        self._room = 0  # bytes that can be written before the sizes have to be looked at again
        self._unlooked = LARGE_LOG_BYTES  # bytes that may have gone into the log since its size was looked at
        self._kept_messages = kept_messages
        self._generation = generation
        self._durability = durability
        self._db: sqlite3.Connection | None = None
        self._epoch = 0
        self._finished = 0
        self._notes: list[_Note] = []  # of the transaction that is open, or of the next one
        self._stored = 0  # bytes since the last trim

    # --- transactions

    def adopt(self, epoch: int) -> int:
        """Work under `epoch` from now on, and return it. If the file has seen a later epoch, return that one and change
        nothing.
        """
        with self._errors():
            db = self._open()
            stored = self._stored_epoch(db)
            if stored < epoch:
                db.execute("BEGIN IMMEDIATE")
                stored = self._stored_epoch(db)
                if stored <= epoch:
                    db.execute("UPDATE meta SET value = ? WHERE name = 'epoch'", (epoch,))
                    stored = epoch
                db.execute("COMMIT")
            if stored <= epoch:
                self._epoch = epoch
            return stored

    @contextmanager
    def write(self, *, final: bool = False, reserve: bool = False) -> Iterator[None]:
        """One transaction under the adopted epoch. With `final` its commit is as durable as the instance promises. With
        `reserve` it may use the room that is kept for the end of a turn; it must be small.

        Raises E_LEASE_LOST when a later epoch was adopted meanwhile, E_STORE_FULL, E_STATE, E_DISK_FULL. Then nothing
        is written.
        """
        with self._errors():
            db = self._open()
            self._empty_log(db)
            self._writing = "reserve" if reserve else "final" if final else "usual"
            full = final and self._durability == "power"
            if full:
                db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            stored = self._stored_epoch(db)
            if stored != self._epoch:
                raise _stale(stored, self._epoch)
            yield
            self._write_notes()
            self._room -= _WRITE_BYTES
            self._unlooked += _WRITE_BYTES
            self._check_room(db)
            db.execute("COMMIT")
            if full:
                db.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        """Close the file. The next use opens it again."""
        self._notes.clear()
        db, self._db, self._room = self._db, None, 0
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    # --- turns

    def find_turn(self, event_key: str) -> TurnRow | None:
        """The stored turn of an event; None when it was never begun."""
        with self._errors():
            row = (
                self._open()
                .execute("SELECT turn_id, attempt, status, answer FROM turns WHERE event_key = ?", (event_key,))
                .fetchone()
            )
        return None if row is None else TurnRow(event_key, *row)

    def running_turns(self) -> list[TurnRow]:
        """Turns that were begun and have no end. There is at most one, unless an event was taken out of the mailbox."""
        with self._errors():
            rows = (
                self._open()
                .execute("SELECT event_key, turn_id, attempt, status FROM turns WHERE status = 'running' ORDER BY seq")
                .fetchall()
            )
        return [TurnRow(*row) for row in rows]

    def begin_turn(
        self,
        event_key: str,
        turn_id: str,
        attempt: int,
        at: str,
        *,
        trace_id: str | None = None,
        parent_span_id: str | None = None,
        waited_ms: int | None = None,
    ) -> None:
        """Record that a turn runs (inside `write`), before its first note. A later attempt replaces an
        abandoned one.
        """
        self._execute(
            "INSERT INTO turns "
            "(event_key, turn_id, attempt, status, started_at, trace_id, parent_span_id, waited_ms, first_note) "
            "VALUES (?, ?, ?, 'running', ?, ?, ?, ?, (SELECT coalesce(max(seq), 0) + 1 FROM runtime_events)) "
            "ON CONFLICT (event_key) DO UPDATE SET turn_id = excluded.turn_id, attempt = excluded.attempt, "
            "status = 'running', started_at = excluded.started_at, ended_at = NULL, answer = NULL, "
            "trace_id = excluded.trace_id, parent_span_id = excluded.parent_span_id, waited_ms = excluded.waited_ms, "
            "first_note = excluded.first_note",
            (event_key, turn_id, attempt, at, trace_id, parent_span_id, waited_ms),
        )

    def finish_turn(
        self, event_key: str, turn_id: str, status: TurnStatus, at: str, *, steps: int, answer: bytes | None
    ) -> None:
        """Fold the turn's events into the base and store its end and its answer (inside `write(final=True)`)."""
        self._fold(turn_id)
        started = _started(turn_id)
        self._execute(
            "DELETE FROM meta WHERE name > ? AND name < ?", (started, started[:-1] + chr(ord(started[-1]) + 1))
        )
        self._execute(
            "UPDATE turns SET status = ?, ended_at = ?, steps = ?, answer = ? WHERE event_key = ?",
            (status, at, steps, answer, event_key),
        )
        self._finished += 1
        self._stored += len(answer or b"")
        if self._finished % _TRIM_EVERY == 0 or self._stored >= _TRIM_BYTES:
            self._trim()
            self._stored = 0

    # --- calls that run in the agent's process

    def record_start(self, turn_id: str, tool_call_id: str) -> None:
        """Record that this call of a running turn begins (inside `write`). The end of the turn forgets it."""
        self._execute("INSERT OR REPLACE INTO meta VALUES (?, 1)", (_started(turn_id) + tool_call_id,))

    def was_started(self, turn_id: str, tool_call_id: str) -> bool:
        """Whether the begin of this call was recorded."""
        with self._errors():
            name = _started(turn_id) + tool_call_id
            return self._open().execute("SELECT 1 FROM meta WHERE name = ?", (name,)).fetchone() is not None

    # --- messages

    def append(self, turn_id: str, position: int, event: MessageEvent, *, origin: str | None = None) -> None:
        """Store one message event of a running turn (inside `write`). An event with the same position replaces the
        earlier one.
        """
        target: str | None = None
        message: bytes | None = None
        if isinstance(event, Append):
            kind, target, message = "append", event.message.id, encode_message(event.message)
        elif isinstance(event, Replace):
            kind, target, message = "replace", event.target_id, encode_message(event.message)
        elif isinstance(event, Remove):
            kind, target = "remove", event.target_id
        else:
            kind = "truncate"
        self._stored += len(message or b"")
        self._execute(
            "INSERT OR REPLACE INTO events (turn_id, position, type, target, message, stored_ms, origin) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (turn_id, position, kind, target, message, boottime_ms(), origin),
        )

    def turn_events(self, turn_id: str) -> list[StoredEvent]:
        """The message events of a running turn, in the order of their positions."""
        with self._errors():
            rows = (
                self._open()
                .execute(
                    "SELECT position, type, target, message, stored_ms, origin FROM events "
                    "WHERE turn_id = ? ORDER BY position",
                    (turn_id,),
                )
                .fetchall()
            )
            return [
                StoredEvent(position, _event(kind, target, message), stored, origin)
                for position, kind, target, message, stored, origin in rows
            ]

    def load_messages(self) -> list[Message]:
        """BaseMessages, in order. This is the only read whose cost grows with the conversation."""
        with self._errors():
            rows = self._open().execute("SELECT message FROM base ORDER BY seq").fetchall()
            return [decode_message(row[0]) for row in rows]

    def remember(self, name: str, value: bytes) -> None:
        """Keep a value under a name (inside `write`). It replaces the earlier value."""
        self._execute("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", (name, value))

    def remembered(self, name: str) -> bytes | None:
        """The value that is kept under a name."""
        with self._errors():
            row = self._open().execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else bytes(row[0])

    def has_message(self, message_id: str) -> bool:
        """Whether a message with this id is in the conversation that finished turns left."""
        with self._errors():
            row = self._open().execute("SELECT 1 FROM base WHERE id = ?", (message_id,)).fetchone()
        return row is not None

    def note(
        self,
        turn_id: str,
        kind: NoteKind,
        at: str,
        detail: str | None = None,
        span_id: str | None = None,
        parent_span_id: str | None = None,
    ) -> None:
        """Store a runtime event, which only traces use: inside `write`, or with the next one. `detail` has a form of
        schemas/traces.py.
        """
        self._notes.append((turn_id, kind, at, detail, span_id, parent_span_id))

    @property
    def has_notes(self) -> bool:
        """Whether runtime events wait for the next `write`."""
        return bool(self._notes)

    def last_step_note(self, turn_id: str) -> tuple[str, str | None] | None:
        """Kind and detail of the last note about a step of a turn."""
        with self._errors():
            row: tuple[str, str | None] | None = (
                self._open()
                .execute(
                    "SELECT type, detail FROM runtime_events WHERE turn_id = ? AND type LIKE 'step.%' "
                    "ORDER BY seq DESC LIMIT 1",
                    (turn_id,),
                )
                .fetchone()
            )
        return row

    # --- inside

    def _write_notes(self) -> None:
        """Write the runtime events of a transaction together: one statement costs less than several."""
        notes = self._notes
        if not notes:
            return
        if self._db is None:
            raise _closed()
        self._room -= 4 * sum(_NOTE_BYTES + len(note[3] or "") for note in notes)
        self._db.executemany(
            "INSERT INTO runtime_events (turn_id, type, at, detail, span_id, parent_span_id) VALUES (?, ?, ?, ?, ?, ?)",
            notes,
        )
        notes.clear()

    def _execute(self, statement: str, values: Sequence[object] = ()) -> None:
        if self._db is None:
            raise _closed()
        size = 0
        for value in values:
            if type(value) is bytes or type(value) is str:
                size += len(value)
        self._room -= 4 * size
        self._unlooked += size
        if size > _WRITE_BYTES:
            self._check_room(self._db, more=size)  # before it is in the log
        self._db.execute(statement, values)

    def _empty_log(self, db: sqlite3.Connection) -> None:
        """Copy a large log into the file, unless another process reads the conversation at this moment."""
        if self._unlooked < LARGE_LOG_BYTES // 8:
            return
        self._unlooked = 0
        try:
            if os.stat(self._log).st_size <= LARGE_LOG_BYTES:
                return
            db.execute("PRAGMA busy_timeout = 0")  # a reader may take long, and is not waited for
            try:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        except (FileNotFoundError, sqlite3.OperationalError):
            pass

    def _check_room(self, db: sqlite3.Connection, *, more: int = 0) -> None:
        """Raise E_STORE_FULL when the transaction leaves no room for the end of its turn, or (a final one) for itself.

        At the end of a turn its messages are copied within the file, and the pages of the copies go through the log.
        `more` bytes are about to be added. As a message they count for themselves, for their copy, and for the log of
        both.
        """
        if self._max_bytes is None or self._writing == "reserve":
            return
        if self._room > 0:
            return
        page, pages, free = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in _PAGES)
        copied = db.execute("SELECT coalesce(sum(length(message) + ?), 0) FROM events", (_EVENT_BYTES,)).fetchone()[0]
        log = os.stat(self._log).st_size - _CACHE * 1024  # what is in memory still goes there
        final = self._writing == "final"
        most = max(pages * page, (pages - free) * page + copied) + log + copied + more * (2 if final else 4)
        self._room = self._max_bytes - RESERVE_BYTES - most
        if self._room < 0 and not (final and most <= self._max_bytes):
            used = (pages - free) * page
            raise fail(
                "E_STORE_FULL",
                f"the conversation takes {used / (1 << 20):.1f} MiB and needs {(most - used) / (1 << 20):.1f} MiB more "
                f"to store this and to end the turn; limit {self._max_bytes >> 20} MiB, of which "
                f"{RESERVE_BYTES >> 20} MiB are kept for ends of turns",
            )

    def _fold(self, turn_id: str) -> None:
        kinds = self._open().execute("SELECT DISTINCT type FROM events WHERE turn_id = ?", (turn_id,)).fetchall()
        if kinds in ([], [("append",)]):
            self._execute(
                "INSERT INTO base (id, message) SELECT target, message FROM events WHERE turn_id = ? ORDER BY position "
                "ON CONFLICT (id) DO UPDATE SET message = excluded.message",
                (turn_id,),
            )
        else:
            for stored in self.turn_events(turn_id):
                self._apply(stored.event)
        self._execute("DELETE FROM events WHERE turn_id = ?", (turn_id,))

    def _apply(self, event: MessageEvent) -> None:
        """Apply one event to the base table, with the same effect as conversation.fold."""
        if isinstance(event, Append):
            self._execute(
                "INSERT INTO base (id, message) VALUES (?, ?) "
                "ON CONFLICT (id) DO UPDATE SET message = excluded.message",
                (event.message.id, encode_message(event.message)),
            )
        elif isinstance(event, Replace):
            if event.message.id != event.target_id:
                self._execute(
                    "DELETE FROM base WHERE id = ?1 AND EXISTS (SELECT 1 FROM base WHERE id = ?2)",
                    (event.message.id, event.target_id),
                )
            self._execute(
                "UPDATE base SET id = ?, message = ? WHERE id = ?",
                (event.message.id, encode_message(event.message), event.target_id),
            )
        elif isinstance(event, Remove):
            self._execute("DELETE FROM base WHERE id = ?", (event.target_id,))
        else:
            self._execute("DELETE FROM base")

    def _trim(self) -> None:
        self._execute(
            "DELETE FROM turns WHERE status != 'running' AND seq <= (SELECT max(seq) FROM turns) - ?", (KEPT_ANSWERS,)
        )
        self._execute(
            "DELETE FROM runtime_events WHERE seq <= (SELECT max(seq) FROM runtime_events) - ?", (KEPT_RUNTIME_EVENTS,)
        )
        self._trim_bytes("turns", "answer", "status != 'running'")
        if self._kept_messages is not None:
            self._execute("DELETE FROM base WHERE seq <= (SELECT max(seq) FROM base) - ?", (self._kept_messages,))
            self._trim_bytes("base", "message", "true")

    def _trim_bytes(self, table: str, column: str, among: str) -> None:
        """Delete the oldest rows beyond KEPT_BYTES in `column`. The newest row stays whatever its size."""
        self._execute(
            f"DELETE FROM {table} WHERE {among} AND seq <= (SELECT max(seq) FROM (SELECT seq, "  # noqa: S608 - ours
            f"sum(length({column})) OVER (ORDER BY seq DESC) - length({column}) AS newer FROM {table} "
            f"WHERE {column} IS NOT NULL) WHERE newer >= ?)",
            (KEPT_BYTES,),
        )

    @staticmethod
    def _stored_epoch(db: sqlite3.Connection) -> int:
        row = db.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()
        return int(row[0])

    def _open(self) -> sqlite3.Connection:
        if self._db is not None:
            return self._db
        created = _create_file(self.path)
        db = sqlite3.connect(self.path, timeout=BUSY_MS / 1000, isolation_level=None)
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        if created and self._durability == "power":
            for directory in created:
                _sync_directory(directory)
        self._db = db
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA cache_size = {_CACHE}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            # executescript would commit by itself; a second opener must find all of the schema or none.
            db.execute("BEGIN IMMEDIATE")
            if db.execute("PRAGMA user_version").fetchone()[0] == 0:
                for statement in (_SCHEMA + TRACE_TABLES).split(";\n"):
                    db.execute(statement)
                db.execute("INSERT INTO meta VALUES ('epoch', 0), ('boot', ?)", (boot,))
                db.execute(f"PRAGMA user_version = {CONVERSATION_FORMAT}")
            db.execute("COMMIT")
        elif version < CONVERSATION_FORMAT:
            db.execute("BEGIN IMMEDIATE")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version < 2:
                db.execute("ALTER TABLE events ADD COLUMN origin TEXT")
            if version < TRACED_FORMAT:
                for table, column in TRACE_COLUMNS:
                    db.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
                db.execute(f"PRAGMA user_version = {CONVERSATION_FORMAT}")
            db.execute("COMMIT")
        elif version != CONVERSATION_FORMAT:
            raise fail("E_STATE", f"{self.path} has format {version}, this version reads {CONVERSATION_FORMAT}")
        if db.execute("SELECT value FROM meta WHERE name = 'boot'").fetchone() != (boot,):
            db.execute("BEGIN IMMEDIATE")
            db.execute("UPDATE events SET stored_ms = 0")
            db.execute("UPDATE meta SET value = ? WHERE name = 'boot'", (boot,))
            db.execute("COMMIT")

        self._begin_anew(db)

    def _begin_anew(self, db: sqlite3.Connection) -> None:
        """If earlier turns are of an earlier generation, put their messages aside. A turn that was begun goes on."""
        row = db.execute("SELECT value FROM meta WHERE name = 'generation'").fetchone()
        if (0 if row is None else int(row[0])) >= self._generation:
            return
        if db.execute("SELECT 1 FROM base LIMIT 1").fetchone() is not None:
            # First written there, then deleted here: one transaction over two files would not be atomic after a loss of
            # power.
            _create_file(self.path.parent / EARLIER_FILE)
            db.execute("ATTACH DATABASE ? AS earlier", (str(self.path.parent / EARLIER_FILE),))
            db.execute("PRAGMA earlier.synchronous = FULL")
            db.execute(_EARLIER_SCHEMA)
            db.execute(
                "INSERT OR REPLACE INTO earlier.messages SELECT ?, seq, id, message FROM base", (self._generation,)
            )
            db.execute("DETACH DATABASE earlier")
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM base")
        db.execute("INSERT OR REPLACE INTO meta VALUES ('generation', ?)", (self._generation,))
        db.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Roll back and close on any failure. Errors of SQLite and of the system become one GoondanError."""
        try:
            yield
        except GoondanError:
            self.close()  # which rolls back
            raise
        except sqlite3.Error as error:
            self.close()
            name = getattr(error, "sqlite_errorname", "")
            full = name == "SQLITE_FULL" or (name.startswith(_NO_ROOM) and _is_full(self.path.parent))
            code = "E_DISK_FULL" if full else "E_STATE"
            raise fail(code, f"{self.path}: {error}{f' ({name})' if name else ''}") from None
        except OSError as error:
            self.close()
            code = "E_DISK_FULL" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "E_STATE"
            raise fail(code, f"{self.path}: {error.strerror or error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.close()
            raise fail("E_STATE", f"{self.path} holds something that is no message: {error}") from None
        except BaseException:
            self.close()
            raise


def _is_full(folder: Path) -> bool:
    """Whether the disk of a folder is full. For some files SQLite only says that they could not be written."""
    try:
        left = os.statvfs(folder)
    except OSError:
        return False
    return left.f_bavail * left.f_frsize < _WRITE_BYTES


def _started(turn_id: str) -> str:
    """The beginning of the names of rows in `meta` that record calls of this turn."""
    return f"started:{turn_id}/"


def _closed() -> GoondanError:
    return fail("E_STATE", "the conversation file was closed by an earlier error")


def _stale(stored: int, epoch: int) -> GoondanError:
    return fail("E_LEASE_LOST", f"the conversation is at epoch {stored}, this process holds {epoch}")


def _event(kind: str, target: str, message: bytes) -> MessageEvent:
    if kind == "append":
        return Append(decode_message(message))
    if kind == "replace":
        return Replace(target, decode_message(message))
    return Remove(target) if kind == "remove" else Truncate()


def _create_file(path: Path) -> list[Path]:
    """Create the file and its folders, closed to other users. Returns the folders that have a new entry."""
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return []
    return [path.parent, *(folder.parent for folder in missing)]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
