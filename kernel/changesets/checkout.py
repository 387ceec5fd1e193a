"""Changing files of a checkout, each as a whole, without following a link on the way to it.

Source: docs/decisions/067.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from goondan.kernel.changesets.entries import EXECUTABLE, REGULAR
from goondan.kernel.changesets.git import io_error

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: The largest file that is compared (bytes): no changeset writes a larger one.
_MAX_FILE: Final = 2 << 20
#: An entry that no changeset has put there: no file of a changeset could have its mode.
NO_FILE: Final = ("", b"")
_NO_FILE_ERRORS: Final = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)


class Checkout:
    """The files below `top`. `mark` is in the names of what is left when this is killed; `umask` is the user's."""

    def __init__(self, top: str, mark: str, umask: int = 0o022) -> None:
        self._top = top
        self._temporary = f".goondan-{mark}.new"
        self._umask = umask

    def read(self, path: str) -> tuple[str, bytes] | None:
        """Mode and content of a file; None where none is, NO_FILE where a person has something else: a folder, a link,
        a file on the way. Raises GoondanError E_CHANGESET_IO.
        """
        with self._named(path):
            try:
                with self._folder(path) as (folder, name):
                    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno in _NO_FILE_ERRORS:
                    return NO_FILE
                raise
            state = os.fstat(file)
            if not stat.S_ISREG(state.st_mode) or state.st_size > _MAX_FILE:
                os.close(file)
                return NO_FILE
            with open(file, "rb") as source:
                return EXECUTABLE if state.st_mode & stat.S_IXUSR else REGULAR, source.read(_MAX_FILE + 1)

    def write(self, path: str, data: bytes) -> None:
        """Put a content in the place of a file, durably; folders on the way are made. Raises E_CHANGESET_IO."""
        with self._named(path), self._folder(path, make=True) as (folder, name):
            permissions = 0o666 & ~self._umask
            with suppress(FileNotFoundError):
                permissions = stat.S_IMODE(os.lstat(name, dir_fd=folder).st_mode) & 0o777
            with suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(self._temporary, flags, 0o600, dir_fd=folder), "wb") as out:
                out.write(data)
                out.flush()
                os.fchmod(out.fileno(), permissions)
                os.fsync(out.fileno())
            os.rename(self._temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)

    def remove(self, path: str) -> None:
        """Remove a file, and the folders that are empty then. Raises GoondanError E_CHANGESET_IO."""
        with self._named(path):
            try:
                with self._folder(path) as (folder, name):
                    os.unlink(name, dir_fd=folder)
                    os.fsync(folder)
            except FileNotFoundError:
                return
            here = os.path.dirname(path)
            while here:
                try:
                    with self._folder(here) as (folder, name):
                        os.rmdir(name, dir_fd=folder)
                except OSError:
                    return
                here = os.path.dirname(here)

    def clean(self, path: str) -> None:
        """Remove what was left beside a file by a program that was killed."""
        with suppress(OSError), self._folder(path) as (folder, _):
            os.unlink(self._temporary, dir_fd=folder)

    @contextmanager
    def _folder(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The folder of a path, opened step by step, and the path's name in it. Raises OSError."""
        *parts, name = path.split("/")
        here = os.open(self._top, _FOLDER)
        try:
            for part in parts:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o777 & ~self._umask, dir_fd=here)
                inside = os.open(part, _FOLDER, dir_fd=here)
                os.close(here)
                here = inside
            yield here, name
        finally:
            os.close(here)

    @contextmanager
    def _named(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise io_error(f"{self._top}/{path}: {error.strerror}") from None
