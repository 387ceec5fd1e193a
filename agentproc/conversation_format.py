"""The tables of a conversation file: made in a new file, and begun again for a later generation.

Source: docs/design/turns.md section 4.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Final

from goondan.schemas.traces.turn_notes import CONVERSATION_FORMAT, TRACE_TABLES
from goondan.schemas.wire.errors import fail

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
