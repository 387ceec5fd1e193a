"""Writes files for a person beneath one folder, and nowhere else; and adds a document to a goondan.yaml there.

The person has named the folder. The files in it may be somebody else's work: the folder may be a clone, or the workdir
of a tool. There `tools` can be a link that leads to the person's home. So everything below the folder is reached by the
descriptors of its directories, and no link is followed. Everything is checked before the first byte is written. When a
later step fails, the new files are removed again.

A document is appended as text, so the rest of the file keeps its comments and its form.

Source: docs/design/tools.md section 10.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from goondan.kernel.bundle.rules.problems import BundleError, Report, shown
from goondan.schemas.wire.errors import CODES, GoondanError, fail

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Placing:
    """A folder that files are written into. It is made if it is not there. A context manager: an exception removes
    everything that was made. Files that were replaced stay replaced.

    Raises GoondanError E_USAGE for a text that is no path, and E_INIT for a folder that cannot be made or opened.
    """

    def __init__(self, folder: str) -> None:
        if not folder or "\0" in folder:
            raise fail("E_USAGE", "DIR is the path of a directory")
        self.folder = folder
        #: The entries to remove, the last first: the descriptor of a directory, a name in it, and whether that is a
        #: directory.
        self._made: list[tuple[int, str, bool]] = []
        #: Relative path -> descriptor; "" is the folder itself.
        self._open: dict[str, int] = {}
        self._made_above: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._make_folder()
            self._open[""] = os.open(self.folder, _FOLDER & ~os.O_NOFOLLOW)
        except OSError as error:
            self._undo()
            raise _refused(error.filename or self.folder, error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._undo()
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def write(self, files: Mapping[str, bytes], *, replace: bool) -> list[str]:
        """Write files: relative path with `/` -> content; what begins with `#!` is executable. Returns the paths, in
        order.

        `replace`: the new file replaces a file or a link of its name; it is never written through a link. Raises
        GoondanError E_INIT before anything is written when a file exists already, or when a folder on the way is a link
        or no folder. Raises it later for a file that cannot be written.
        """
        name = ""
        there: set[str] = set()
        staged: list[tuple[str, str]] = []
        try:
            for name in files:
                there |= {name} if self._stands(name, replace) else set()
            if there and not replace:
                names = ", ".join(os.path.join(self.folder, name) for name in sorted(there))
                raise fail("E_INIT", f"already there: {names}", suggestion="Name another directory, or give --force.")
            for name, data in files.items():
                staged.append((name, self._stage(name, data, replace)))
            for name, temporary in staged:
                if replace:
                    self._put(name, temporary, new=name not in there)
        except OSError as error:
            raise _refused(os.path.join(self.folder, name), error) from None
        return list(files)

    def append(self, name: str, before: bytes, added: bytes) -> None:
        """Append bytes to a file of the folder whose content is `before`, in one write.

        Raises GoondanError E_INIT when the file has another content now, is a link, or cannot be written.
        """
        shown = os.path.join(self.folder, name)
        try:
            fd = os.open(name, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._open[""])
            with open(fd, "r+b", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode) or _read(fd, len(before) + 1) != before:
                    raise fail("E_INIT", f"{shown} was changed meanwhile", suggestion="Try again.")
                if file.write(added) != len(added):
                    os.ftruncate(fd, len(before))
                    raise fail("E_INIT", f"{shown}: the disk is full")
        except OSError as error:
            message = f"{shown}: {error.strerror}"
            raise fail("E_INIT", message, suggestion="Make the file writable.") from None

    # --- inside

    def _make_folder(self) -> None:
        """Make the missing folders on the path of the folder. A link on the path must be the person's."""
        _refuse_planted(self.folder)
        path = self.folder
        missing: list[str] = []
        while path and not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path.rstrip("/"))
        for path in reversed(missing):
            os.mkdir(path)
            self._made_above.append(path)

    def _stands(self, name: str, replace: bool) -> bool:
        """Whether a file or link of this name exists. Raises GoondanError E_INIT for a name that cannot be written."""
        try:
            fd, leaf = self._place_of(name, make=False)
            mode = os.stat(leaf, dir_fd=fd, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return False
        if replace and stat.S_ISDIR(mode):
            raise fail("E_INIT", f"{os.path.join(self.folder, name)} is a directory", suggestion="Move it away first.")
        return True

    def _enter(self, folder: str, fd: int, path: str) -> int:
        try:
            return os.open(folder, _FOLDER, dir_fd=fd)
        except NotADirectoryError:
            # O_DIRECTORY with O_NOFOLLOW says this of a link, too.
            linked = stat.S_ISLNK(os.stat(folder, dir_fd=fd, follow_symlinks=False).st_mode)
            what = "is a link, and nothing is written through it" if linked else "is no directory"
            message = f"{os.path.join(self.folder, path)} {what}"
            raise fail("E_INIT", message, suggestion="Remove it, or name another directory.") from None

    def _place_of(self, name: str, *, make: bool = True) -> tuple[int, str]:
        """The directory of a file, and the file's name in it. A missing directory is made. Raises FileNotFoundError for
        it without `make`.
        """
        fd = self._open[""]
        *folders, leaf = name.split("/")
        for depth, folder in enumerate(folders, 1):
            path = "/".join(folders[:depth])
            if path not in self._open:
                try:
                    self._open[path] = self._enter(folder, fd, path)
                except FileNotFoundError:
                    if not make:  # it is made when everything was checked
                        raise
                    os.mkdir(folder, dir_fd=fd)
                    self._made.append((fd, folder, True))
                    self._open[path] = os.open(folder, _FOLDER, dir_fd=fd)
            fd = self._open[path]
        return fd, leaf

    def _stage(self, name: str, data: bytes, replace: bool) -> str:
        """Write a file under its name, or, to replace one, under another name beside it. Returns the name."""
        fd, leaf = self._place_of(name)
        target = f".{leaf}.{os.getpid()}.new" if replace else leaf
        out = os.open(target, _NEW, 0o777 if data.startswith(b"#!") else 0o666, dir_fd=fd)
        self._made.append((fd, target, False))
        with open(out, "wb") as file:
            file.write(data)
        return target

    def _put(self, name: str, temporary: str, *, new: bool) -> None:
        """Give a file that was written under another name its own name. `new`: no file had it before."""
        fd, leaf = self._place_of(name)
        os.rename(temporary, leaf, src_dir_fd=fd, dst_dir_fd=fd)
        self._made.remove((fd, temporary, False))
        if new:
            self._made.append((fd, leaf, False))

    def _undo(self) -> None:
        for fd, name, is_folder in reversed(self._made):
            with suppress(OSError):
                os.rmdir(name, dir_fd=fd) if is_folder else os.unlink(name, dir_fd=fd)
        for path in reversed(self._made_above):
            with suppress(OSError):
                os.rmdir(path)


def _refuse_planted(folder: str) -> None:
    """Refuse a link of another user in a folder where everybody can make names. Raises GoondanError E_INIT."""
    here = "/" if folder.startswith("/") else "."
    for name in folder.split("/"):
        above, here = here, os.path.join(here, name)
        with suppress(OSError):
            linked, state = os.lstat(here), os.stat(above)
            others = linked.st_uid not in (0, os.geteuid()) or linked.st_nlink > 1
            if stat.S_ISLNK(linked.st_mode) and others and state.st_mode & 0o002:
                message = f"{here} is a link of uid {linked.st_uid} in a folder that everybody can write to"
                raise fail("E_INIT", message, suggestion="Name another directory.")


def _refused(path: str, error: OSError) -> GoondanError:
    message = f"{path}: {error.strerror}"
    return fail("E_INIT", message, suggestion="Name a directory in which you may write.")


def _read(fd: int, size: int) -> bytes:
    """Read at most `size` bytes from the beginning. One read of the system may give fewer."""
    parts: list[bytes] = []
    at = 0
    while at < size and (chunk := os.pread(fd, size - at, at)):
        parts.append(chunk)
        at += len(chunk)
    return b"".join(parts)


_END_HINT: Final = "End the file with a complete document, without --- behind it."


def check_name(name: str, kind: str, bundled: Container[str], *, fits: bool = True) -> None:
    """Check a name: a resource of this kind can have it, and no bundled one has it. `fits`: the names that are made of
    it are short enough.

    Raises GoondanError E_USAGE, E_INIT.
    """
    from goondan.schemas.bundle.address import is_resource_name

    if not is_resource_name(name) or not fits:
        message = f"{shown(name)} cannot be the name of a new {kind}"
        raise fail("E_USAGE", message, suggestion=CODES["E_CONFIG_INVALID_NAME"])
    if name in bundled:
        raise fail("E_INIT", f"there is a bundled {kind} {name!r}", suggestion="Choose another name.")


def read_bundle(path: str, name: str, kind: str) -> bytes | None:
    """Read the goondan.yaml to which a resource of a kind can be added. None when there is none.

    Raises BundleError for a file that is no YAML. Raises GoondanError E_INIT for a link, and for a bundle that has the
    resource already.
    """
    from goondan.kernel.bundle.documents import load_documents
    from goondan.kernel.bundle.rules.positions import Scalar, node_at

    if not os.path.lexists(path):
        return None
    if os.path.islink(path):  # a tool could have made it, in a folder that was its workdir
        raise fail("E_INIT", f"{path} is a link", suggestion="Name the folder that has the file itself.")
    report = Report()
    loaded = load_documents(os.path.realpath(path), report)
    if report.errors:
        raise BundleError(report.errors, report.dropped)
    for document in loaded.documents:
        found, named = (node_at(document.node, at)[0] for at in (("kind",), ("metadata", "name")))
        if isinstance(found, Scalar) and isinstance(named, Scalar) and (found.text, named.text) == (kind, name):
            where = document.place("metadata", "name")
            message = f"{kind}/{name} is there already: {where.file}:{where.line}"
            raise fail("E_INIT", message, suggestion="Choose another name.")
    return loaded.sources[0].data


def addition(path: str, before: bytes, document: bytes) -> bytes:
    """The text to append to a file in order to add a document. Raises GoondanError E_INIT."""
    from goondan.kernel.bundle.rules.positions import Allowance, compose_file

    def documents(data: bytes) -> int:
        composed = compose_file(data, Allowance())
        return len(composed.documents) if not composed.faults else -1

    added = (b"" if before.endswith(b"\n") else b"\n") + b"---\n" + document
    if documents(before + added) != documents(before) + 1:
        raise fail("E_INIT", f"{path}: a document cannot be added behind the last one", suggestion=_END_HINT)
    return added
