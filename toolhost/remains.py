"""What a jail without namespaces leaves behind: processes of its session, and the tree of files in its own folder.

The launcher begins a session for each jail and the filter refuses another, so whoever is in it belongs to the jail. The
tree was written by a hostile hand: it may be deeper than any recursion, and closed to its owner.

Source: sandbox.md sections 5 and 7.
"""

from __future__ import annotations

import os
import secrets
import signal
from contextlib import suppress
from typing import Final

#: Rounds of finding and killing; each takes some milliseconds, and what is stopped first can start nothing more.
MAX_ROUNDS: Final = 50


def members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as source:
                state, _, _, its_session = source.read().rpartition(b")")[2].split()[:4]
                if int(its_session) == session and state not in (b"Z", b"X"):
                    found.append(int(name))
    return found


def end_session(session: int) -> None:
    """Kill every process of a session. They are stopped first, so that none can start another one meanwhile."""
    for _ in range(MAX_ROUNDS):
        found = members(session)
        if not found:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)


def remove_tree(path: str) -> None:
    """Remove a folder and all that is in it, without recursion. What cannot be removed stays. No jail may be in it."""
    with suppress(OSError):
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            while names := os.listdir(top):
                for name in names:
                    _remove(top, name)
        finally:
            os.close(top)
        os.rmdir(path)


def _remove(top: int, name: str) -> None:
    """Remove one entry; folders in a folder are moved up to the top, so that nothing is ever deep."""
    try:
        os.unlink(name, dir_fd=top)
        return
    except IsADirectoryError:
        os.chmod(name, 0o700, dir_fd=top)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        for child in os.listdir(folder):
            try:
                os.unlink(child, dir_fd=folder)
            except IsADirectoryError:
                os.chmod(child, 0o700, dir_fd=folder)  # a folder that is moved is written to
                os.rename(child, secrets.token_hex(16), src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)
