"""Space on the disk that is kept for bad times: freed when the disk is full, so that running work can still end.

A file of RESERVE_BYTES beside the journal. Its blocks are really taken (fallocate), or written where a file system
cannot do that.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import Final

#: Room for some ten thousand ends of events with short answers.
RESERVE_BYTES: Final = 16 << 20
_CHUNK: Final = 1 << 20


class Reserve:
    """The file at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def make(self) -> bool:
        """Take the space; True when it is there. A disk without so much room is no error."""
        try:
            if os.stat(self._path, follow_symlinks=False).st_size == RESERVE_BYTES:
                return True
        except FileNotFoundError:
            pass
        except OSError:
            return False
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return False
        try:
            _fill(fd)
            return True
        except OSError:
            self.release()
            return False
        finally:
            os.close(fd)

    def release(self) -> bool:
        """Give the space back; True when there was some."""
        with suppress(OSError):
            os.unlink(self._path)
            return True
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
