"""The digest of a folder: every name, every byte, every link's target. It names what somebody has agreed to.

No link is followed: each name is opened from the descriptor of its folder. So the digest is of this folder and of
nothing else, whoever changes it meanwhile.

Source: docs/design/sandbox.md section 1; docs/design/tools.md section 14.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

_CHUNK: Final = 1 << 20
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Of a copy: everybody may read it.
_FOLDER_MODE: Final = 0o755
_PROGRAM_MODE: Final = 0o755
_FILE_MODE: Final = 0o644
_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class NoDigest(Exception):
    """The folder has no digest: it cannot be read, or holds too much, or something that is no file."""


#: The largest content of a folder that a person can pin, because they have to have looked at it (a skill). Scripts and
#: references are some hundred files; more is a package, which is installed.
MAX_PINNED_FILES: Final = 4096
MAX_PINNED_BYTES: Final = 64 << 20


def folder_digest(root: str, *, max_files: int, max_bytes: int, copy_to: str | None = None) -> str:
    """`sha256:` and the digest of everything below the folder `root`, which may be named through links.

    `copy_to`: an existing empty folder, which gets a copy of what was read. Everybody can read the copy. Raises
    NoDigest.
    """
    walk = _Walk(max_files, max_bytes, copy_to)
    try:
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise NoDigest(f"{root} cannot be read: {error.strerror}") from None
    try:
        todo: list[tuple[str, ...]] = [()]
        while todo:
            names = todo.pop()
            try:
                todo += walk.folder(top, names)
            except OSError as error:
                raise NoDigest(f"{os.path.join(root, *names)} cannot be read: {error.strerror}") from None
    finally:
        os.close(top)
    return "sha256:" + walk.total.hexdigest()


class _Walk:
    """Reads folder by folder."""

    def __init__(self, max_files: int, max_bytes: int, copy_to: str | None) -> None:
        self.total = hashlib.sha256()
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._files = 0
        self._bytes = 0
        self._copy_to = copy_to

    def folder(self, top: int, names: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Take one folder in; returns the folders in it. Raises OSError, NoDigest."""
        here = _open_beneath(top, names)
        try:
            inner: list[tuple[str, ...]] = []
            for name in sorted(os.listdir(here)):
                self._files += 1
                if self._files > self._max_files:
                    raise NoDigest(f"it holds more than {self._max_files} files")
                below = (*names, name)
                if self._entry(here, name, below):
                    inner.append(below)
            return inner
        finally:
            os.close(here)

    def _entry(self, folder: int, name: str, names: tuple[str, ...]) -> bool:
        """Take one name in; returns whether it is a folder."""
        path = os.fsencode("/".join(names))
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            target = os.fsencode(os.readlink(name, dir_fd=folder))
            self.total.update(b"link %d %s %d %s" % (len(path), path, len(target), target))
            if self._copy_to is not None:
                os.symlink(target, os.path.join(os.fsencode(self._copy_to), path))
            return False
        if stat.S_ISDIR(mode):
            self.total.update(b"folder %d %s" % (len(path), path))
            if self._copy_to is not None:
                place = os.path.join(self._copy_to, *names)
                os.mkdir(place)
                os.chmod(place, _FOLDER_MODE)
            return True
        digest = self._file(folder, name, names)
        self.total.update(b"file %d %s %s" % (len(path), path, digest))
        return False

    def _file(self, folder: int, name: str, names: tuple[str, ...]) -> bytes:
        total = hashlib.sha256()
        with open(os.open(name, _FILE, dir_fd=folder), "rb") as source:
            mode = os.fstat(source.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise NoDigest(f"{'/'.join(names)} is no regular file")
            with self._copy(names, mode) as copy:
                while chunk := source.read(_CHUNK):
                    total.update(chunk)
                    self._bytes += len(chunk)
                    if self._bytes > self._max_bytes:
                        raise NoDigest(f"it holds more than {self._max_bytes >> 20} MiB")
                    if copy is not None:
                        copy.write(chunk)
        return total.digest()

    @contextmanager
    def _copy(self, names: tuple[str, ...], mode: int) -> Iterator[BinaryIO | None]:
        """The file of the copy; None when there is no copy."""
        if self._copy_to is None:
            yield None
            return
        with open(os.path.join(self._copy_to, *names), "xb") as copy:
            yield copy
            os.fchmod(copy.fileno(), _PROGRAM_MODE if mode & stat.S_IXUSR else _FILE_MODE)


def _open_beneath(top: int, names: tuple[str, ...]) -> int:
    """A descriptor of a folder below `top`. Raises OSError, also where a link is on the way."""
    here = os.open(".", _FOLDER, dir_fd=top)
    for name in names:
        try:
            below = os.open(name, _FOLDER, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here
