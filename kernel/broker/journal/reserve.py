"""The reserve: space on the disk that is freed piece by piece when the disk is full, so that running work can end.

It is a file of RESERVE_BYTES beside the journal. Its blocks are really allocated (fallocate), or written if the file
system cannot do that.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final

#: Room for some ten thousand ends of events with short answers.
RESERVE_BYTES: Final = 16 << 20
#: The reserve is given back in pieces of so many bytes, one for each write that finds no room: whatever filled the disk
#: goes on filling it, and would take the whole reserve at once.
RELEASE_BYTES: Final = 128 << 10
_CHUNK: Final = 1 << 20
#: What `st_blocks` counts (bytes).
_BLOCK: Final = 512
#: How a disk, or a user's part of it, says that it is full.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class Reserve:
    """The file at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def make(self) -> bool:
        """Take the space. False when the disk does not have enough room. Anything else at the path is replaced.

        The rest of an old reserve is made longer in place. Without room for this it stays as it is: it must not be
        free for a moment, because whatever filled the disk would take it. When a reserve cannot be made for another
        reason, the result is True: the disk is not full, it only has no reserve.
        """
        try:
            fd, left = self._open()
        except OSError as error:
            return error.errno not in _FULL
        try:
            _fill(fd)
            return True
        except OSError as error:
            with suppress(OSError):
                os.truncate(fd, left) if left else os.unlink(self._path)
            return error.errno not in _FULL
        finally:
            os.close(fd)

    def _open(self) -> tuple[int, int]:
        """The file for writing, and the bytes that it has already. Raises OSError."""
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # not to be kept waiting by a pipe
        with suppress(OSError):
            fd = os.open(self._path, flags)
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_size <= RESERVE_BYTES:
                return fd, found.st_size
            os.close(fd)
        with suppress(FileNotFoundError):
            os.unlink(self._path)  # a link, a pipe, a file that is too long or has a second name
        return os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o600), 0

    def release(self) -> bool:
        """Give RELEASE_BYTES back to the disk; True when there was something to give."""
        try:
            left = os.stat(self._path, follow_symlinks=False).st_size - RELEASE_BYTES
            if left > 0:
                os.truncate(self._path, left)
            else:
                os.unlink(self._path)
            return True
        except OSError:
            return False


def _fill(fd: int) -> None:
    """Take all blocks of the file; those that it has stay. Raises OSError."""
    found = os.fstat(fd)
    if found.st_size == RESERVE_BYTES <= found.st_blocks * _BLOCK:
        return
    try:
        os.posix_fallocate(fd, 0, RESERVE_BYTES)
        return
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    zeros = bytes(_CHUNK)
    for offset in range(0, RESERVE_BYTES, _CHUNK):
        os.pwrite(fd, zeros, offset)
