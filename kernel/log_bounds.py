"""The log files of a workspace: how they are named and opened, and how they are kept within their bounds.

A role has up to three files. `<role>.log` is what its processes append to. When it has grown too large, its content
becomes `<role>.log.1`, and what was there before becomes `<role>.log.2`. What one source may write at once and later is
bounded where lines are written (schemas/system/log_admission.py): so a flood takes long to push out others' lines.

Everything is opened below the folder's descriptor and never through a link. A file that takes another file's place was
made at that moment, under a name that nobody can guess.

Source: docs/decisions/158.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final

SUFFIX: Final = ".log"
OLD_SUFFIX: Final = ".1"
OLDER_SUFFIX: Final = ".2"
#: A log that is larger moves to `<role>.log.1` (bytes).
MAX_LOG_BYTES: Final = 8 << 20
#: Of each older file (bytes): what was written until the next look at a log that had become too large fits as well.
#: What is more is cut from its middle.
MAX_OLD_BYTES: Final = 12 << 20
#: Room for the line that says how much was cut (bytes).
_LINE: Final = 256
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def role_of(name: str) -> str | None:
    """The role that a file of the log folder belongs to; None for what is no log."""
    role = name.removesuffix(OLD_SUFFIX).removesuffix(OLDER_SUFFIX).removesuffix(SUFFIX)
    return role if role and name in (role + SUFFIX + end for end in ("", OLD_SUFFIX, OLDER_SUFFIX)) else None


def open_log(path: str) -> int:
    """A log file to append to, closed to others. The content of a file that is too large already moves first.

    Raises OSError, also when it is a link, or somebody else's.
    """
    folder = os.open(os.path.dirname(path), _FOLDER)
    try:
        fd = os.open(os.path.basename(path), _APPEND, 0o600, dir_fd=folder)
        try:
            _check(fd, path)
        except OSError:
            os.close(fd)
            raise
        os.set_blocking(fd, True)
    finally:
        os.close(folder)
    bound_log(path)
    return fd


def bound_logs(folder: str) -> None:
    """Bound every log in a folder that is being written to. Never raises: a log that cannot be bounded stays."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.endswith(SUFFIX):
                bound_log(os.path.join(folder, name))


def bound_log(path: str) -> None:
    """Bound a log that is being written: its content so far becomes `<path>.1`, and it starts again from nothing.

    The writers append, so they go on at the new end. Lines written between the copy and the cut are lost. Never raises.
    """
    with suppress(OSError):
        folder = os.open(os.path.dirname(path), _FOLDER)
        try:
            name = os.path.basename(path)
            log = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                _check(log, path)
                if os.fstat(log).st_size > MAX_LOG_BYTES:
                    _rotate(folder, name, log)
                    os.ftruncate(log, 0)
            finally:
                os.close(log)
        finally:
            os.close(folder)


def _rotate(folder: int, name: str, log: int) -> None:
    """Copy what a log holds into `<name>.1`, whose content becomes `<name>.2`."""
    from goondan.schemas.system.private_files import replace_in  # every command and every start opens logs

    old = name + OLD_SUFFIX
    with suppress(FileNotFoundError):
        # What is no plain file of ours is replaced where it is: a link to elsewhere is no older log.
        if _is_ours(os.stat(old, dir_fd=folder, follow_symlinks=False)):
            os.rename(old, name + OLDER_SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
    replace_in(folder, old, _content(log, MAX_OLD_BYTES))


def _content(fd: int, limit: int) -> bytes:
    """The content of a file. When it is too large: its beginning, a line that says how much is left out, and its end.
    It ends with a line's end.
    """
    size = os.fstat(fd).st_size
    if size <= limit:
        data = _part(fd, 0, size)
    else:
        from goondan.schemas.system.log_admission import suppressed_bytes

        half = (limit - _LINE) // 2
        first, last = _part(fd, 0, half), _part(fd, size - half, half)
        first, last = first[: first.rfind(b"\n") + 1], last[last.find(b"\n") + 1 :]
        missing = size - len(first) - len(last)
        data = first + suppressed_bytes(missing) + b"\n" + last
    return data if not data or data.endswith(b"\n") else data + b"\n"


def _part(fd: int, start: int, length: int) -> bytes:
    data = b""
    while len(data) < length and (more := os.pread(fd, length - len(data), start + len(data))):
        data += more
    return data


def _check(fd: int, path: str) -> None:
    """Raise OSError unless it is a plain file of ours with this one name."""
    if not _is_ours(os.fstat(fd)):
        raise OSError(errno.EPERM, "is no plain file of ours", path)


def _is_ours(state: os.stat_result) -> bool:
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and state.st_nlink <= 1
