"""What `gdn acp` keeps in the state of a bundle: in which folders tools may work, as a person has said for good
(`folders`: path, yes or no), and the sessions (`sessions`: id, then cwd, agent and title).

One file for all processes of the bundle, closed to others, changed under a lock. What cannot be read counts as nothing,
so a person is asked again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.schemas.system.directories import replace_file
from goondan.schemas.wire.errors import fail

Records = dict[str, dict[str, Any]]

#: The file, beside the instances.
FILE: Final = "acp.json"
#: The most folders and sessions that are kept; the oldest go. A record is some hundred bytes.
MAX_KEPT: Final = 2000


def read(state_dir: str) -> Records:
    """What is kept."""
    kept: Records = {}
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        with open(os.open(f"{state_dir}/{FILE}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            kept = msgspec.json.decode(file.read(), type=Records)
    return {"folders": {}, "sessions": {}, **kept}


def change(state_dir: str, what: Callable[[Records], object]) -> None:
    """Change it. Raises GoondanError E_STATE."""
    try:
        folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            what(kept := read(state_dir))
            kept = {kind: dict([*those.items()][-MAX_KEPT:]) for kind, those in kept.items()}
            replace_file(f"{state_dir}/{FILE}", msgspec.json.encode(kept))
        finally:
            os.close(folder)
    except OSError as error:
        raise fail("E_STATE", f"{state_dir}/{FILE}: {error.strerror}") from None


def keep_session(state_dir: str, session_id: str, cwd: str, agent: str, title: str) -> None:
    """An agent answers in a session, which was used last. The first title stays. Raises GoondanError E_STATE."""

    def keep(kept: Records) -> None:
        before = kept["sessions"].pop(session_id, {})
        kept["sessions"][session_id] = {"cwd": cwd, "agent": agent, "title": before.get("title") or title}

    change(state_dir, keep)
