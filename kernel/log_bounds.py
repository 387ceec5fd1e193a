"""Keeps log files within their bounds. A source that writes much does not push out the lines of others.

A role has up to three files: `<role>.log`, which its processes append to; `<role>.log.1`, the lines before that file
grew too large; and `<role>.log.2`, older lines, a fair share for each source (log_shares.py).

Everything is opened below the folder's descriptor and never through a link. A file that takes another file's place was
made at that moment, under a name that nobody can guess.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final

from goondan.kernel.log_names import OLD_SUFFIX, OLDER_SUFFIX, SUFFIX

# The modules that read and rewrite lines are imported only when a log has become too large: every command and every
# start opens logs.

#: A log that is larger moves to `<name>.1` (bytes); what is kept of all older lines is at most as large.
MAX_LOG_BYTES: Final = 8 << 20
#: Of `<name>.1` (bytes): what was written until the next look at a log that had become too large fits as well. What is
#: more is cut from its middle.
MAX_OLD_BYTES: Final = 12 << 20
#: Room for the line that says how much was cut (bytes).
_LINE: Final = 256
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_log(path: str) -> int:
    """A log file to append to, closed to others. A file that is too large already moves to `<path>.1` first.

    Raises OSError, also when it is a link, or somebody else's.
    """
    folder = os.open(os.path.dirname(path), _FOLDER)
    try:
        name = os.path.basename(path)
        _rotate(folder, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            _check(fd, path)
        except OSError:
            os.close(fd)
            raise
        os.set_blocking(fd, True)
        return fd
    finally:
        os.close(folder)


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
                    _keep_older(folder, name)
                    _replace(folder, name + OLD_SUFFIX, _content(log, MAX_OLD_BYTES))
                    os.ftruncate(log, 0)
            finally:
                os.close(log)
        finally:
            os.close(folder)


def _rotate(folder: int, name: str) -> None:
    """Move a log that no process writes to out of the way when it is too large."""
    with suppress(FileNotFoundError):
        state = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(state.st_mode) or state.st_size <= MAX_LOG_BYTES:
            return
        _keep_older(folder, name)
        if state.st_size <= MAX_OLD_BYTES:
            os.rename(name, name + OLD_SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            fd = os.open(name, _READ, dir_fd=folder)
            try:
                _replace(folder, name + OLD_SUFFIX, _content(fd, MAX_OLD_BYTES))
            finally:
                os.close(fd)
            os.unlink(name, dir_fd=folder)


def _keep_older(folder: int, name: str) -> None:
    """Before `<name>.1` is replaced: what is kept of it joins `<name>.2`."""
    from goondan.kernel.log_shares import thin

    old = _read(folder, name + OLD_SUFFIX)
    if not old:
        return
    lines = (_read(folder, name + OLDER_SUFFIX) + old).split(b"\n")
    if not lines[-1]:
        lines.pop()
    kept = thin(name.removesuffix(SUFFIX), lines, MAX_LOG_BYTES)
    _replace(folder, name + OLDER_SUFFIX, b"".join(line + b"\n" for line in kept))


def _replace(folder: int, name: str, data: bytes) -> None:
    from goondan.schemas.system.private_files import replace_in

    replace_in(folder, name, data)


def _read(folder: int, name: str) -> bytes:
    try:
        fd = os.open(name, _READ, dir_fd=folder)
    except OSError:  # none, or a link, which is replaced
        return b""
    try:
        _check(fd, name)
        return _content(fd, MAX_OLD_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _content(fd: int, limit: int) -> bytes:
    """The content of a file. When it is too large: its beginning, a line that says how much is left out, and its end.
    It ends with a line's end.
    """
    size = os.fstat(fd).st_size
    if size <= limit:
        data = _part(fd, 0, size)
    else:
        from goondan.kernel.log_shares import cut_line

        half = (limit - _LINE) // 2
        first, last = _part(fd, 0, half), _part(fd, size - half, half)
        first, last = first[: first.rfind(b"\n") + 1], last[last.find(b"\n") + 1 :]
        missing = size - len(first) - len(last)
        data = first + cut_line(missing) + b"\n" + last
    return data if not data or data.endswith(b"\n") else data + b"\n"


def _part(fd: int, start: int, length: int) -> bytes:
    data = b""
    while len(data) < length and (more := os.pread(fd, length - len(data), start + len(data))):
        data += more
    return data


def _check(fd: int, path: str) -> None:
    """Raise OSError unless it is a plain file of ours with this one name."""
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_nlink > 1:
        raise OSError(errno.EPERM, "is no plain file of ours", path)
