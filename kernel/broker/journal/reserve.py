"""Space on the disk that is kept for bad times: freed bit by bit when the disk is full, so that running work can end.

A file of RESERVE_BYTES beside the journal. Its blocks are really taken (fallocate), or written where a file system
cannot do that.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final

#: Room for some ten thousand ends of events with short answers.
RESERVE_BYTES: Final = 16 << 20
#: It is given back in pieces of so many bytes, one for each write that finds no room: whatever filled the disk goes on
#: filling it, and would take all of it at once.
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
        """Take the space; False when the disk has not so much room. What is no such file is replaced.

        Where no reserve can be made for another reason, the answer is True: the disk is not full, it only has none.
        """
        try:
            found = os.stat(self._path, follow_symlinks=False)
            whole = found.st_size == RESERVE_BYTES <= found.st_blocks * _BLOCK
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and whole:
                return True
            os.unlink(self._path)  # a link, a pipe, a file with holes in it, or with a second name
        except FileNotFoundError:
            pass
        except OSError as error:
            return error.errno not in _FULL
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            return error.errno not in _FULL
        try:
            _fill(fd)
            return True
        except OSError as error:
            with suppress(OSError):
                os.unlink(self._path)
            return error.errno not in _FULL
        finally:
            os.close(fd)

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
    try:
        os.posix_fallocate(fd, 0, RESERVE_BYTES)
        return
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    zeros = bytes(_CHUNK)
    for offset in range(0, RESERVE_BYTES, _CHUNK):
        os.pwrite(fd, zeros, offset)
