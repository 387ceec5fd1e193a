"""The journal's files as names in a folder: made, taken apart, put aside.

Source: docs/design/delivery.md section 1.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from kernel.broker.journal.redo import REDO_SUFFIX


def set_aside(path: str) -> str:
    """Move a damaged journal, with its WAL, out of the way; returns its new name."""
    number = 1
    while os.path.lexists(aside := f"{path}.damaged-{number}"):
        number += 1
    for suffix in ("-wal", "-shm", REDO_SUFFIX, ""):
        with suppress(FileNotFoundError):
            os.rename(path + suffix, aside + suffix)
    return aside


def create_private(path: str) -> None:
    """Make the file, closed to others, before SQLite makes it with the umask's mode. Raises OSError, also for a file
    of somebody else, who could put words into the mouth of everybody, and for an empty one with a second name: it is
    another file that somebody wants to be written to.

    Only before the first connection: the system drops all of a process's locks on a file when one descriptor closes.
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
    """SQLite writes to what stands here beside its file. One with a second name becomes a copy: it may be another file,
    or a backup that was made with hard links. Raises OSError, also for a file of somebody else.
    """
    try:
        state = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(state.st_mode):
        return  # SQLite opens neither links nor what is no file
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
    """Make the names in a folder survive a loss of power. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
