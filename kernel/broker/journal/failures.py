"""What SQLite's errors mean for the journal."""

from __future__ import annotations

import sqlite3
from typing import Final

from goondan.schemas.wire.errors import GoondanError, fail

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
