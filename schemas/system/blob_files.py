"""The `blobs` folder of a workspace: large payloads written, read and swept, always beneath one descriptor.

Everything in there may be hostile: names are hexadecimal digits and never paths, files are opened without following
links and without waiting (a FIFO, a device), must be regular, and of the size and the digest that were promised. Calls
block for as long as the disk takes: no event loop makes them itself.

Source: docs/design/wire.md section 7; PROTOCOL.md "Large payloads".
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from goondan.schemas.wire.blobs import MAX_BLOB_BYTES, MAX_FOLDER_BYTES, MAX_VALUES, describe, is_reference
from goondan.schemas.wire.codec import check_values
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Blob

#: Written at once (bytes).
_CHUNK: Final = 1 << 20
#: Copied at once (bytes).
_COPIED: Final = 1 << 17
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_OPENED: Final = {errno.ENOENT: "is not there", errno.ELOOP: "is a link", errno.ENXIO: "is no regular file"}
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def make_folder(path: str) -> None:
    """Make the folder, closed to others, if it is not there. Raises GoondanError E_STATE, E_DISK_FULL."""
    try:
        os.makedirs(path, 0o700, exist_ok=True)
        folder = os.open(path, _FOLDER_FLAGS)
        try:
            if stat.S_IMODE(os.fstat(folder).st_mode) != 0o700:
                os.fchmod(folder, 0o700)
        finally:
            os.close(folder)
    except OSError as error:
        code = "E_DISK_FULL" if error.errno in _FULL else "E_STATE"
        raise fail(code, f"{path}: {error.strerror or error}") from None


class BlobFolder:
    """The folder at `path`, for any number of threads and processes: nobody knows of a file before it is complete."""

    def __init__(self, path: str, *, max_bytes: int = MAX_FOLDER_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def write(self, payload: bytes | memoryview, *, sync: bool) -> Blob:
        """Lay `payload` down and return the reference to it; with `sync`, it survives a loss of power.

        Raises GoondanError E_BLOB_UNAVAILABLE, E_DISK_FULL, E_STATE; nothing is left behind then.
        """
        blob = describe(payload, os.urandom(16).hex())

        def fill(file: int) -> None:
            view = memoryview(payload)
            while view:
                view = view[os.write(file, view[:_CHUNK]) :]

        self._lay_down(blob.file, blob.size, fill, sync)
        return blob

    def copy(self, source: int, size: int, *, sync: bool) -> Blob:
        """Lay the first `size` bytes of the open file `source` down and return the reference to them.

        Raises the errors of `write`, and E_FILE_INVALID when the file has become shorter.
        """
        name, digest = os.urandom(16).hex(), hashlib.sha256()

        def fill(file: int) -> None:
            buffer = memoryview(bytearray(min(_COPIED, size)))  # one, used again: fresh memory costs more than the copy
            at = 0
            while at < size:
                count = os.preadv(source, [buffer[: size - at]], at)
                if not count:
                    raise fail("E_FILE_INVALID", f"the file has become shorter than its {size} bytes")
                digest.update(buffer[:count])
                view, at = buffer[:count], at + count
                while view:
                    view = view[os.write(file, view) :]

        self._lay_down(name, size, fill, sync)
        return Blob(name, digest.hexdigest(), size)

    def _lay_down(self, name: str, size: int, fill: Callable[[int], None], sync: bool) -> None:
        with self._open() as folder:
            used = sum(entry.stat(follow_symlinks=False).st_size for entry in _entries(folder))
            if used + size > self._max_bytes:
                raise fail("E_DISK_FULL", f"{self.path} holds {used} bytes, limit {self._max_bytes}")
            try:
                file = os.open(name, _WRITE_FLAGS, 0o600, dir_fd=folder)
                try:
                    fill(file)
                    if sync:
                        os.fsync(file)
                finally:
                    os.close(file)
                if sync:
                    os.fsync(folder)
            except (OSError, GoondanError) as error:
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                if isinstance(error, GoondanError):
                    raise
                code = "E_DISK_FULL" if error.errno in _FULL else "E_STATE"
                raise fail(code, f"{self.path}: a payload cannot be written: {error.strerror}") from None

    def read(self, blob: Blob, *, remove: bool = False) -> bytes:
        """The payload behind a reference, its depth and number of values checked; with `remove` its file goes.

        Raises GoondanError: E_BLOB_INVALID, E_BLOB_MISSING, E_BLOB_MISMATCH, E_BLOB_UNAVAILABLE, E_FRAME_INVALID.
        """
        if not is_reference(blob) or blob.size > MAX_BLOB_BYTES:
            raise fail("E_BLOB_INVALID", "the reference to the payload is none")
        with self._open() as folder:
            try:
                file = os.open(blob.file, _READ_FLAGS, dir_fd=folder)
            except OSError as error:
                raise _missing(
                    blob, _NOT_OPENED.get(error.errno or 0) or f"cannot be opened: {error.strerror}"
                ) from None
            try:
                payload = _content(file, blob)
            except OSError as error:
                raise _missing(blob, f"cannot be read: {error.strerror}") from None
            finally:
                os.close(file)
            if remove:
                with suppress(OSError):
                    os.unlink(blob.file, dir_fd=folder)
        try:
            check_values(payload, MAX_VALUES)
        except ValueError as error:
            raise fail("E_FRAME_INVALID", f"the payload has {error}") from None
        return payload

    def touch(self, blob: Blob) -> None:
        """Somebody still wants to refer to it: no sweep takes it for a while."""
        with suppress(OSError, GoondanError), self._open() as folder:
            os.utime(blob.file, dir_fd=folder, follow_symlinks=False)

    def remove(self, files: Iterable[str]) -> None:
        """Delete these files, as far as they are there."""
        with suppress(GoondanError), self._open() as folder:
            for file in files:
                with suppress(OSError):
                    os.unlink(file, dir_fd=folder)

    def sweep(self, referenced: Container[str], older_than_s: float) -> int:
        """Delete what nobody refers to and was written that long ago, finished or not; how many went."""
        before = time.time() - older_than_s
        gone = 0
        with suppress(GoondanError), self._open() as folder:
            for entry in _entries(folder):
                with suppress(OSError):
                    if entry.name not in referenced and entry.stat(follow_symlinks=False).st_mtime <= before:
                        os.unlink(entry.name, dir_fd=folder)
                        gone += 1
        return gone

    @contextmanager
    def _open(self) -> Iterator[int]:
        try:
            folder = os.open(self.path, _FOLDER_FLAGS)
        except OSError as error:
            message = f"the folder of large payloads, {self.path}, cannot be opened: {error.strerror}"
            raise fail("E_BLOB_UNAVAILABLE", message) from None
        try:
            yield folder
        finally:
            os.close(folder)


def _entries(folder: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # swept meanwhile
                entry.stat(follow_symlinks=False)
                yield entry


def _content(file: int, blob: Blob) -> bytes:
    """All of an open file, if it is what the reference says."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise _missing(blob, "is no regular file")
    if status.st_size != blob.size:
        raise _mismatch(blob, f"has {status.st_size} bytes")
    chunks = []
    digest, left = hashlib.sha256(), blob.size
    while left and (chunk := os.read(file, left)):
        digest.update(chunk)
        chunks.append(chunk)
        left -= len(chunk)
    if left:
        raise _mismatch(blob, f"ended {left} bytes early")
    if digest.hexdigest() != blob.digest:
        raise _mismatch(blob, "has another content")
    return b"".join(chunks)


def _missing(blob: Blob, why: str) -> GoondanError:
    return fail("E_BLOB_MISSING", f"the payload {blob.file} of {blob.size} bytes {why}")


def _mismatch(blob: Blob, why: str) -> GoondanError:
    return fail("E_BLOB_MISMATCH", f"the payload {blob.file} of {blob.size} bytes {why}")
