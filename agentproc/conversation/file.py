"""The file of a conversation (SQLite): one transaction at a time, under the epoch of its holder and within its room.

Rules.
- The file is opened at the first use. Files and folders of this module are closed to other users (0600, 0700).
- Everything is written inside `write()`: one transaction, which begins by checking the epoch. A stale holder gets
  E_LEASE_LOST and writes nothing; a newer epoch is taken over by `adopt`.
- The file and its log together never exceed `max_bytes`: a transaction that does not leave room for the end of its turn
  is refused as a whole (E_STORE_FULL). Nothing that is stored is cut.
- Every failure is one GoondanError: E_STORE_FULL, E_DISK_FULL, E_LEASE_LOST, or E_STATE for anything else. After a
  failure the file is closed, and the next use opens it again.

Durability. WAL with synchronous NORMAL survives the end of the process; `power` makes the commit of a final transaction
wait for the disk, which covers everything before it.

Source: docs/design/turns.md section 4; docs/design/delivery.md sections 2 and 6.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, Self

import msgspec

from goondan.schemas.traces.turn_notes import CONVERSATION_FILE, CONVERSATION_FORMAT, TRACE_TABLES, NoteKind
from goondan.schemas.wire.errors import GoondanError, fail

#: How long a write waits for another process that has the file (milliseconds). That is longer than any transaction of
#: this module, and much shorter than the time after which a silent agent counts as hung.
BUSY_MS: Final = 2000
#: Pages in memory, as SQLite counts them (negative: KiB). An agent process may hold 9 MiB in all.
_CACHE: Final = -256
#: WAL pages after which SQLite copies them into the file (4 KiB each). A turn waits for the disk then, so it is done as
#: seldom as LARGE_LOG_BYTES allows.
_CHECKPOINT_PAGES: Final = 768
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
#: The sizes that SQLite knows of the file: bytes of a page, pages in all, pages that are free.
_PAGES: Final = ("page_size", "page_count", "freelist_count")
#: SQLite's names for the failure to create or extend a file.
_NO_ROOM: Final = ("SQLITE_IOERR", "SQLITE_CANTOPEN")

#: A row of runtime_events: turn, kind, time, detail, span, parent.
Note = tuple[str, str, str, str | None, str | None, str | None]

Durability = Literal["power", "process"]
_Writing = Literal["usual", "final", "reserve"]


class ConversationFile:
    """The conversation file in `directory`. Not for use by several threads.

    `durability`, `max_bytes` and `generation` are those of ConversationStore.
    """

    def __init__(self, directory: str, durability: Durability, max_bytes: int | None, generation: int) -> None:
        self.path = Path(directory) / CONVERSATION_FILE
        #: Rows of runtime_events that the next transaction writes, all with one statement: that costs less than one
        #: statement each. They are dropped when the file is closed.
        self.notes: list[Note] = []
        self._log = f"{self.path}-wal"
        self._max_bytes = max_bytes
        #: The generation of conversations that it is opened with.
        self.generation = generation
        self._durability = durability
        self._writing: _Writing = "usual"
        self._waits = False  # the commit waits for the disk
        self._room = 0  # bytes that can be written before the sizes have to be looked at again
        self._unlooked = LARGE_LOG_BYTES  # bytes that may have gone into the log since its size was looked at
        self._db: sqlite3.Connection | None = None
        self._epoch = 0

    @property
    @contextmanager
    def errors(self) -> Iterator[None]:
        """A context in which the file is read: what fails closes it, and is one GoondanError."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def adopt(self, epoch: int) -> int:
        """Work under `epoch` from now on, and return it. If the file has seen a later epoch, return that one and change
        nothing. One that is adopted already is looked at by the next write.
        """
        if self._db is not None and epoch == self._epoch:
            return epoch
        self.close()  # another process may have had it under the epochs between: what is known of it counts no more
        with self.errors:
            db = self._open()
            stored: int = db.execute(_EPOCH).fetchone()[0]
            if stored < epoch:
                db.execute("BEGIN IMMEDIATE")
                stored = db.execute(_EPOCH).fetchone()[0]
                if stored <= epoch:
                    db.execute("UPDATE meta SET value = ? WHERE name = 'epoch'", (epoch,))
                    stored = epoch
                db.execute("COMMIT")
            if stored <= epoch:
                self._epoch = epoch
            return stored

    def write(self, *, final: bool = False, reserve: bool = False) -> Self:
        """One transaction under the adopted epoch: a context, in which there is no other one. With `final` its commit
        is as durable as the instance promises. With `reserve` it may use the room that is kept for the end of a turn;
        it must be small.

        Raises E_LEASE_LOST when a later epoch was adopted meanwhile, E_STORE_FULL, E_STATE, E_DISK_FULL. Then nothing
        is written: a failure rolls it back.
        """
        self._writing = "reserve" if reserve else "final" if final else "usual"
        self._waits = final and self._durability == "power"
        return self

    def __enter__(self) -> Self:
        try:
            db = self._db or self._open()
            if self._unlooked >= LARGE_LOG_BYTES // 8:
                self._empty_log(db)
            if self._waits:
                db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            if (stored := db.execute(_EPOCH).fetchone()[0]) != self._epoch:
                raise fail("E_LEASE_LOST", f"the conversation is at epoch {stored}, this process holds {self._epoch}")
        except BaseException as error:
            self.failed(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(error)
            return
        try:
            db = self._db
            if db is None:
                raise _closed()
            self._room -= _WRITE_BYTES
            self._unlooked += _WRITE_BYTES
            if self.notes:
                for note in self.notes:
                    self._room -= 4 * (_NOTE_BYTES + len(note[3] or ""))
                db.executemany(_INSERT_NOTE, self.notes)
                self.notes.clear()
            if self._room <= 0 and self._max_bytes is not None:
                self._check_room(db, self._max_bytes)
            db.execute("COMMIT")
            if self._waits:
                db.execute("PRAGMA synchronous = NORMAL")
        except BaseException as failure:
            self.failed(failure)
            raise

    def close(self) -> None:
        """Close the file. The next use opens it again."""
        self.notes.clear()
        db, self._db, self._room = self._db, None, 0
        if db is not None:
            with suppress(sqlite3.Error):
                db.close()

    def forget_earlier(self) -> None:
        """Remove the file of messages that were put aside. Nobody has it open: it is written in one go."""
        with self.errors:
            self._open()  # which may be what puts them aside
            for left in ("", "-journal", "-wal", "-shm"):
                (self.path.parent / f"{EARLIER_FILE}{left}").unlink(missing_ok=True)

    def note(self, turn_id: str, kind: NoteKind, at: str, detail: str | None = None) -> None:
        """Store a runtime event, which only traces use: inside `write`, or with the next one. `detail` has a form of
        schemas/traces/turn_notes.py.
        """
        self.notes.append((turn_id, kind, at, detail, None, None))

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[Any]:
        """The rows that a statement finds."""
        try:
            return (self._db or self._open()).execute(statement, values).fetchall()
        except BaseException as error:
            self.failed(error)
            raise

    def execute(self, statement: str, values: Sequence[object] = ()) -> None:
        """Change rows (inside `write`)."""
        if self._db is None:
            raise _closed()
        size = 0
        for value in values:
            if type(value) is bytes or type(value) is str:
                size += len(value)
        self._room -= 4 * size
        self._unlooked += size
        if size > _WRITE_BYTES and self._room <= 0 and self._max_bytes is not None:
            self._check_room(self._db, self._max_bytes, more=size)  # before it is in the log
        self._db.execute(statement, values)

    def failed(self, error: BaseException) -> None:
        """Something has failed: close the file, which rolls back. Raises one GoondanError in place of errors of SQLite
        and of the system.
        """
        self.close()
        if isinstance(error, sqlite3.Error):
            name = getattr(error, "sqlite_errorname", "")
            full = name == "SQLITE_FULL" or (name.startswith(_NO_ROOM) and _is_full(self.path.parent))
            code = "E_DISK_FULL" if full else "E_STATE"
            raise fail(code, f"{self.path}: {error}{f' ({name})' if name else ''}") from None
        if isinstance(error, OSError):
            code = "E_DISK_FULL" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "E_STATE"
            raise fail(code, f"{self.path}: {error.strerror or error}") from None
        if isinstance(error, msgspec.DecodeError | UnicodeDecodeError):
            raise fail("E_STATE", f"{self.path} holds something that is no message: {error}") from None

    # --- inside

    def _empty_log(self, db: sqlite3.Connection) -> None:
        """Copy a large log into the file, unless another process reads the conversation at this moment."""
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

    def _check_room(self, db: sqlite3.Connection, max_bytes: int, *, more: int = 0) -> None:
        """The known room is used up: look at the sizes. Raise E_STORE_FULL when the transaction leaves no room for the
        end of its turn, or (a final one) for itself.

        At the end of a turn its messages are copied within the file, and the pages of the copies go through the log.
        `more` bytes are about to be added. As a message they count for themselves, for their copy, and for the log of
        both.
        """
        if self._writing == "reserve":
            return
        page, pages, free = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in _PAGES)
        copied = db.execute("SELECT coalesce(sum(length(message) + ?), 0) FROM events", (_EVENT_BYTES,)).fetchone()[0]
        log = os.stat(self._log).st_size - _CACHE * 1024  # what is in memory still goes there
        final = self._writing == "final"
        most = max(pages * page, (pages - free) * page + copied) + log + copied + more * (2 if final else 4)
        self._room = max_bytes - RESERVE_BYTES - most
        if self._room < 0 and not (final and most <= max_bytes):
            used = (pages - free) * page
            raise fail(
                "E_STORE_FULL",
                f"the conversation takes {used / (1 << 20):.1f} MiB and needs {(most - used) / (1 << 20):.1f} MiB more "
                f"to store this and to end the turn; limit {max_bytes >> 20} MiB, of which "
                f"{RESERVE_BYTES >> 20} MiB are kept for ends of turns",
            )

    def _open(self) -> sqlite3.Connection:
        if self._db is not None:
            return self._db
        created = create_file(self.path)
        db = sqlite3.connect(self.path, timeout=BUSY_MS / 1000, isolation_level=None)
        try:
            db.execute(f"PRAGMA cache_size = {_CACHE}")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            prepare(db, self.path, self.generation)
        except BaseException:
            db.close()
            raise
        if created and self._durability == "power":
            for directory in created:
                sync_directory(directory)
        self._db = db
        return db


def _is_full(folder: Path) -> bool:
    """Whether the disk of a folder is full. For some files SQLite only says that they could not be written."""
    try:
        left = os.statvfs(folder)
    except OSError:
        return False
    return left.f_bavail * left.f_frsize < _WRITE_BYTES


def _closed() -> GoondanError:
    return fail("E_STATE", "the conversation file was closed by an earlier error")


def sync_directory(path: str | Path) -> None:
    """Wait until the names in a folder are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_EPOCH: Final = "SELECT value FROM meta WHERE name = 'epoch'"
_INSERT_NOTE: Final = (
    "INSERT INTO runtime_events (turn_id, type, at, detail, span_id, parent_span_id) VALUES (?, ?, ?, ?, ?, ?)"
)
_SCHEMA: Final = """\
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE base (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, message BLOB NOT NULL);
CREATE TABLE events (
    turn_id TEXT NOT NULL, position INTEGER NOT NULL, type TEXT NOT NULL, target TEXT, message BLOB,
    stored_ms INTEGER NOT NULL, origin TEXT, PRIMARY KEY (turn_id, position)
) WITHOUT ROWID;
"""

#: The file beside the conversation with the messages from before it began again, and the generation that followed.
EARLIER_FILE: Final = "earlier.db"
_EARLIER_SCHEMA: Final = """\
CREATE TABLE IF NOT EXISTS earlier.messages (
    generation INTEGER, seq INTEGER, id TEXT NOT NULL, message BLOB NOT NULL, PRIMARY KEY (generation, seq)
) WITHOUT ROWID
"""


def prepare(db: sqlite3.Connection, path: Path, generation: int) -> None:
    """Make the tables of the file at `path` usable for this version of the code. When the file is of an earlier
    `generation`, its messages are put aside.

    Raises GoondanError E_STATE for the format of another version, sqlite3.Error, OSError.
    """
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
    elif version != CONVERSATION_FORMAT:
        raise fail("E_STATE", f"{path} has format {version}, this version reads {CONVERSATION_FORMAT}")
    if db.execute("SELECT value FROM meta WHERE name = 'boot'").fetchone() != (boot,):
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE events SET stored_ms = 0")
        db.execute("UPDATE meta SET value = ? WHERE name = 'boot'", (boot,))
        db.execute("COMMIT")
    _begin_anew(db, path, generation)


def _begin_anew(db: sqlite3.Connection, path: Path, generation: int) -> None:
    """If earlier turns are of an earlier generation, put their messages aside. A turn that was begun goes on."""
    row = db.execute("SELECT value FROM meta WHERE name = 'generation'").fetchone()
    if (0 if row is None else int(row[0])) >= generation:
        return
    if db.execute("SELECT 1 FROM base LIMIT 1").fetchone() is not None:
        # First written there, then deleted here: one transaction over two files would not be atomic after a loss of
        # power.
        create_file(path.parent / EARLIER_FILE)
        db.execute("ATTACH DATABASE ? AS earlier", (str(path.parent / EARLIER_FILE),))
        db.execute("PRAGMA earlier.synchronous = FULL")
        db.execute(_EARLIER_SCHEMA)
        db.execute("INSERT OR REPLACE INTO earlier.messages SELECT ?, seq, id, message FROM base", (generation,))
        db.execute("DETACH DATABASE earlier")
    db.execute("BEGIN IMMEDIATE")
    db.execute("DELETE FROM base")
    db.execute("INSERT OR REPLACE INTO meta VALUES ('generation', ?)", (generation,))
    db.execute("COMMIT")


def create_file(path: Path) -> list[Path]:
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
