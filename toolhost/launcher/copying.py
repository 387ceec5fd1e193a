"""Copies small folders whose files only their owner may read into memory, for a user who is not the owner.

For hosts or file systems that cannot show owners as others. The originals stay as they are, and no link is followed.
A file or folder whose name begins with a dot is copied empty: a jail covers it anyway.

Source: docs/design/sandbox.md section 3.2; docs/decisions/038.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from goondan.toolhost.launcher import syscalls
from goondan.toolhost.launcher.descriptors import opened, reopened, write_all

#: Limits of the copies for one jail: entries, bytes and nested folders. A tool is a few files; a folder that brings an
#: environment along is larger.
MAX_ENTRIES: Final = 2048
MAX_BYTES: Final = 16 << 20
MAX_DEPTH: Final = 64
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class _Entry(NamedTuple):
    """A file, folder or link below the folder that is walked."""

    #: Its path below the folder that is walked.
    path: str
    #: A descriptor of the folder that it is in.
    folder: int
    #: Its name in that folder.
    name: str
    #: Its status; a link's is its own.
    status: os.stat_result


def closed(fd: int, uid: int, *, deep: bool) -> str | None:
    """The first place at (".") or below `fd` (O_PATH) that the user may not read; None when there is none.

    Checks mode bits of the first MAX_ENTRIES entries; without `deep` only those of `fd` itself. Raises OSError.
    """
    status = os.fstat(fd)
    if not _may_read(status, uid):
        return "."
    if not deep or not stat.S_ISDIR(status.st_mode):
        return None
    with reopened(fd) as top:
        for entry in islice(_walk(top, "", 0), MAX_ENTRIES):
            if not entry.name.startswith(".") and not _may_read(entry.status, uid):
                return entry.path
    return None


def copied(fd: int) -> int | bytes | None:
    """Make a copy that everybody may read: of a folder a detached mount, of a file its content; None when too large.

    Raises OSError.
    """
    with reopened(fd) as source:
        status = os.fstat(source)
        if not stat.S_ISDIR(status.st_mode):
            return _content(source) if status.st_size <= MAX_BYTES else None
        copy = syscalls.detached_tmpfs({"mode": "0755", "size": str(2 * MAX_BYTES), "nr_inodes": str(2 * MAX_ENTRIES)})
        made = False
        try:
            if _fill(copy, source):
                syscalls.set_attributes(copy, read_only=True, user_namespace=None, recursive=False)
                made = True
        finally:
            if not made:
                os.close(copy)
        return copy if made else None


def _fill(copy: int, source: int) -> bool:
    """Copy the content of one folder into another. False when it is too much."""
    size = 0
    for number, entry in enumerate(_walk(source, "", 0)):
        mode = entry.status.st_mode
        if number >= MAX_ENTRIES or entry.path.count("/") >= MAX_DEPTH:
            return False
        if stat.S_ISDIR(mode):
            os.mkdir(entry.path, 0o755, dir_fd=copy)
            os.chmod(entry.path, 0o755, dir_fd=copy)  # noqa: S103 - as a jail sees it, whatever our umask
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(entry.name, dir_fd=entry.folder), entry.path, dir_fd=copy)
        elif stat.S_ISREG(mode):
            size += entry.status.st_size
            if size > MAX_BYTES:
                return False
            _copy_file(entry, copy)
    return True


def _copy_file(entry: _Entry, copy: int) -> None:
    run = 0o755 if entry.status.st_mode & 0o111 else 0o644
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with opened(entry.path, flags, dir_fd=copy) as target:
        os.fchmod(target, run)  # whatever our umask
        if not entry.name.startswith("."):
            with opened(entry.name, _READ, dir_fd=entry.folder) as source:
                write_all(target, _content(source))
        # Compiled Python names the modification time of its source.
        os.utime(target, ns=(entry.status.st_atime_ns, entry.status.st_mtime_ns))


def _content(source: int) -> bytes:
    data = b""
    while len(data) <= MAX_BYTES and (more := os.read(source, MAX_BYTES)):
        data += more
    return data


def _walk(folder: int, above: str, depth: int) -> Iterator[_Entry]:
    """Everything below a folder, each folder before its content. What is in a folder with a dotted name is left out."""
    for name in sorted(os.listdir(folder)):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        yield _Entry(above + name, folder, name, status)
        if stat.S_ISDIR(status.st_mode) and not name.startswith(".") and depth < MAX_DEPTH:
            with opened(name, _READ | os.O_DIRECTORY, dir_fd=folder) as below:
                yield from _walk(below, f"{above}{name}/", depth + 1)


def _may_read(status: os.stat_result, uid: int) -> bool:
    wanted = 0o5 if stat.S_ISDIR(status.st_mode) else 0o4 if stat.S_ISREG(status.st_mode) else 0
    bits = status.st_mode >> 6 if status.st_uid == uid else status.st_mode
    return bits & wanted == wanted
