"""The side file of the journal: the number and the digest of the last promised write.

It is written after each commit, without a sync of its own. So within one boot it is never behind the promises. After a
loss of power it may be behind the journal, but never ahead of a synced journal.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib
from contextlib import suppress
from typing import Final, NamedTuple

_MAGIC: Final = b"GdnM"
#: Magic, boot id (36 characters of a UUID), the number of the write, and its digest. A checksum of these follows.
_BODY: Final = struct.Struct("<4s36sQI")
_CHECKSUM: Final = struct.Struct("<I")


class Mark(NamedTuple):
    """The last promise."""

    #: The boot of the machine in which it was made (/proc/sys/kernel/random/boot_id).
    boot_id: str
    #: Number of the write.
    last: int
    #: Running digest of all writes up to it.
    digest: int


class MarkFile:
    """The file at `path`. It is made with the first mark."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None

    def read(self) -> Mark | None:
        """The mark. None when there is none, or when a loss of power tore it. Raises OSError."""
        try:
            # There may be a pipe of this name. A read that does not wait fails at once.
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            _check_regular(file.fileno(), self._path)
            data = file.read(_BODY.size + _CHECKSUM.size)
        if len(data) < _BODY.size + _CHECKSUM.size:
            return None
        body = data[: _BODY.size]
        magic, boot_id, last, digest = _BODY.unpack(body)
        if magic != _MAGIC or _CHECKSUM.unpack(data[_BODY.size :])[0] != zlib.crc32(body):
            return None
        return Mark(boot_id.decode("ascii", "replace"), last, digest)

    def write(self, mark: Mark) -> None:
        """Replace the mark. A full disk leaves the old one, which promises less. Raises OSError otherwise."""
        body = _BODY.pack(_MAGIC, mark.boot_id.encode("ascii", "replace"), mark.last, mark.digest)
        try:
            if self._fd is None:
                self._fd = _open(self._path)
            os.pwrite(self._fd, body + _CHECKSUM.pack(zlib.crc32(body)), 0)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)


def _open(path: str) -> int:
    """Open the file for writing. A file that is not ours is replaced: it may be another user's file under a second
    name.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    state = os.fstat(fd)
    ours = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid()
    if ours and (os.pread(fd, len(_MAGIC), 0) == _MAGIC if state.st_size else state.st_nlink == 1):
        return fd
    os.close(fd)
    os.unlink(path)
    return os.open(path, flags | os.O_EXCL, 0o600)


def _check_regular(fd: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "is no regular file", path)
