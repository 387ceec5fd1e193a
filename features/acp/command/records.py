"""What `gdn acp` keeps in the state of a bundle: in which folders tools may work, and where each session works.

One file for all processes of the bundle, closed to others, changed under a lock. What cannot be read counts as nothing,
so a person is asked again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct

from goondan.schemas.system.directories import replace_file
from goondan.schemas.wire.errors import fail

#: The file, beside the instances.
FILE: Final = "acp.json"
#: The most folders and sessions that are kept; the oldest go. A record is some hundred bytes.
MAX_RECORDS: Final = 2000
#: The most of a file that is believed (bytes).
MAX_BYTES: Final = 32 << 20


class SessionRecord(Struct):
    """A session."""

    #: The editor's folder.
    cwd: str
    #: The agents that have answered in it, the last one last.
    agents: list[str]
    #: When it was used last (seconds since 1970).
    used: float
    #: The beginning of its first prompt.
    title: str = ""


class Records(Struct):
    """All of it."""

    #: Whether tools may work in a folder, as a person has said for good.
    folders: dict[str, bool] = {}
    #: The sessions, by their ids.
    sessions: dict[str, SessionRecord] = {}


def read(state_dir: str) -> Records:
    """What is kept."""
    try:
        with open(os.open(f"{state_dir}/{FILE}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=Records)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return Records()


def change(state_dir: str, what: Callable[[Records], None]) -> None:
    """Change it. Raises GoondanError E_STATE."""
    try:
        folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lock = os.open(f"{FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            records = read(state_dir)
            what(records)
            _trim(records)
            replace_file(f"{state_dir}/{FILE}", msgspec.json.encode(records))
        finally:
            os.close(lock)
            os.close(folder)
    except OSError as error:
        raise fail("E_STATE", f"{state_dir}/{FILE}: {error.strerror}") from None


def remember_folder(state_dir: str, folder: str, granted: bool) -> None:
    """Keep what a person has said of a folder. Raises GoondanError E_STATE."""

    def keep(records: Records) -> None:
        records.folders.pop(folder, None)
        records.folders[folder] = granted

    change(state_dir, keep)


def remember_session(state_dir: str, session_id: str, cwd: str, agent: str, title: str = "") -> None:
    """Keep that an agent answers in a session. Raises GoondanError E_STATE."""

    def keep(records: Records) -> None:
        before = records.sessions.pop(session_id, None)
        agents = [name for name in (before.agents if before else []) if name != agent]
        kept = SessionRecord(cwd, [*agents, agent], time.time(), (before.title if before else "") or title)
        records.sessions[session_id] = kept

    change(state_dir, keep)


def forget_folders(state_dir: str) -> None:
    """A person is asked again about every folder. Raises GoondanError E_STATE."""
    change(state_dir, lambda records: records.folders.clear())


def _trim(records: Records) -> None:
    for kept in (records.folders, records.sessions):
        for name in list(kept)[:-MAX_RECORDS]:
            del kept[name]
