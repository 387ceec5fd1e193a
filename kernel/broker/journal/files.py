"""The journal's files as names in a folder: made, separated from second names, put aside.

Source: docs/design/delivery.md section 1.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from goondan.kernel.broker.journal.redo import REDO_SUFFIX


def set_aside(path: str) -> str:
    """Move a damaged journal and its WAL out of the way. Returns its new name."""
    number = 1
    while os.path.lexists(aside := f"{path}.damaged-{number}"):
        number += 1
    for suffix in ("-wal", "-shm", REDO_SUFFIX, ""):
        with suppress(FileNotFoundError):
            os.rename(path + suffix, aside + suffix)
    return aside


def create_private(path: str) -> None:
    """Make the file, closed to other users, before SQLite makes it with the mode of the umask.

    Raises OSError, also for a file of another user, who could write events into it, and for an empty file with a second
    name: somebody wants us to write to that other name.

    Call it only before the first connection: the system drops all locks of a process on a file when one descriptor of
    the file closes.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path)
        if state.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"belongs to uid {state.st_uid}", path)
        if not state.st_size and state.st_nlink > 1:
            raise OSError(errno.EPERM, "is empty and has a second name", path)
    finally:
        os.close(fd)


def take_apart(path: str) -> None:
    """Replace a file with a second name by a copy. SQLite writes to the files of these names, and the second name may
    be another file, or a backup that was made with hard links. Raises OSError, also for a file of another user.
    """
    try:
        state = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(state.st_mode):
        return  # SQLite opens only files, and no links
    if state.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"belongs to uid {state.st_uid}", path)
    if state.st_nlink > 1:
        import shutil  # it takes milliseconds

        with suppress(FileNotFoundError):
            os.unlink(path + "-copy")
        fd = os.open(path + "-copy", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as copy, open(path, "rb") as source:
            shutil.copyfileobj(source, copy)
        os.rename(path + "-copy", path)


def sync_folder(path: str) -> None:
    """Sync a folder, so that its names survive a loss of power. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
