"""The files beside the journal: how they are made and put aside, the side file, the witness and the reserve.

- The side file (`MarkFile`) has the number and the digest of the last promised write. It is written after each commit,
  without a sync of its own. So within one boot it is never behind the promises. After a loss of power it may be behind
  the journal, but never ahead of a synced journal.
- The witness is a file in another folder that says that there was a journal. The side file lies beside the journal. If
  both are removed, the promised writes and the promise are gone, and the next start would look like the first one. The
  witness claims only what the disk is known to have. A new journal may be lost with the power, so a new witness counts
  only within its boot; with `power` it always counts. As soon as the journal was found on the disk, or was copied to
  it, the witness counts for ever.
- The reserve is space on the disk that is freed piece by piece when the disk is full, so that running work can end. Its
  blocks are really allocated (fallocate), or written if the file system cannot do that.

Source: docs/design/delivery.md section 1.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib
from contextlib import suppress
from typing import Final, NamedTuple

from goondan.kernel.broker.journal.redo import REDO_SUFFIX, open_own
from goondan.schemas.system.directories import replace_file


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
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "is no regular file", self._path)
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
                self._fd = open_own(self._path)
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


#: Its content when the journal was found on the disk. Otherwise it has the boot (UUID) in which the journal was made.
_KEPT: Final = "kept"
#: Bytes that are read of it: a UUID and a line's end are 37.
_MAX_BYTES: Final = 64


class Witness:
    """The file at `path`, whose folder is made if it is missing."""

    def __init__(self, path: str) -> None:
        self._path = path

    def must_be_there(self, boot_id: str, *, power: bool) -> bool:
        """Whether a journal was kept here that no loss of power can have taken. `power`: what the journal survives.
        Raises OSError.
        """
        said = self._read()
        return said is not None and (power or said in (_KEPT, boot_id))

    def made(self, boot_id: str) -> None:
        """A journal was made. If the disk has no room for the witness, the next start writes it."""
        self._write(boot_id)

    def kept(self) -> None:
        """The journal is on the disk."""
        if self._read() != _KEPT:
            self._write(_KEPT)

    def _read(self) -> str | None:
        """Its content; None without a witness. Anything that is not a file does not count, and is replaced."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError), open(os.open(self._path, flags), "rb") as file:
            return file.read(_MAX_BYTES).decode("ascii", "replace").strip()
        return None

    def _write(self, word: str) -> None:
        with suppress(OSError):
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            replace_file(self._path, f"{word}\n".encode())


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
