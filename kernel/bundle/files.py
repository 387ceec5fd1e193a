"""Files of a bundle: reading its documents, and finding what they point at without leaving the bundle.

Source: docs/design/bundle.md section 2; requirements SCHEMA-02, EXT-02, VALIDATE-01.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Final

from goondan.kernel.bundle.rules.lookup import MAX_MODULE_BYTES, MAX_PROMPT_BYTES, Found, Unreadable
from goondan.kernel.paths import BUNDLE_FILE, is_utf8

#: The most YAML files in a bundle's directory. A directory with more is no bundle, and was named by mistake.
MAX_FILES: Final = 500
#: The most directory entries that are read in the search for them.
MAX_ENTRIES: Final = 20_000
#: The most files of a tool's folder whose content counts for its digest. A larger folder is not a tool's own.
MAX_TREE_FILES: Final = 5_000
#: The largest file whose content counts (bytes). Of larger ones only size and time count, because reading data files at
#: every start is costly.
MAX_DIGESTED_BYTES: Final = 1 << 20
#: The names of folders that never have documents or code of a tool.
SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "node_modules"})


#: The content that files are taken to have, by their absolute paths, instead of what they hold; None: the file is taken
#: as gone. So a change is looked at before it is made.
Overlay = Mapping[str, bytes | None]
NOTHING: Final[Overlay] = {}


#: The bits of a mode by which somebody may execute a file. Copies of bundles keep them, whoever they were for.
_EXECUTE: Final = 0o111


class BundleFiles:
    """Looks up paths that documents name, relative to the bundle's root. `instead`: see Overlay; of texts only."""

    def __init__(self, root: str, instead: Overlay = NOTHING) -> None:
        self.root = os.path.realpath(root)
        self._instead = instead

    def find(self, named: str) -> Found:
        """Find a regular file of the bundle. Links may not lead out of the bundle. Never raises."""
        if any(c < " " or c == "\x7f" for c in named):
            return Found("", "the path holds control characters")
        if os.path.isabs(named) or named.startswith("~"):
            return Found("", "the path must be relative to the bundle's root")
        lexical = os.path.normpath(os.path.join(self.root, named))
        if not self._inside(lexical):
            return Found("", "the path leads out of the bundle")
        if lexical in self._instead:
            return Found(lexical, None if self._instead[lexical] is not None else "the file does not exist")
        try:
            real = os.path.realpath(lexical, strict=True)
            state = os.stat(real)
        except OSError as error:
            return Found("", "the file does not exist" if isinstance(error, FileNotFoundError) else _why(error))
        if not self._inside(real):
            return Found("", "the path leads out of the bundle, through a link")
        if not is_utf8(real):
            return Found("", "the path is not UTF-8")
        fault = None if stat.S_ISREG(state.st_mode) else "it is not a regular file"
        return Found(real, fault, bool(state.st_mode & _EXECUTE))

    def read_text(self, path: str) -> str:
        """Read a text file of at most MAX_PROMPT_BYTES that was found before. Raises Unreadable."""
        try:
            return read_instead(path, MAX_PROMPT_BYTES, self._instead).decode("utf-8")
        except UnicodeDecodeError:
            raise Unreadable("it is not UTF-8") from None

    def resolve(self, path: str) -> str:
        """A path that a sandbox names: absolute, below the home directory (`~/`), or relative to the root."""
        return "/" + os.path.normpath(os.path.join(self.root, os.path.expanduser(path))).lstrip("/")

    def is_environment(self, path: str) -> bool:
        """Whether a virtual environment of Python is there."""
        return os.path.isfile(os.path.join(path, "pyvenv.cfg"))

    def is_file(self, path: str) -> bool:
        """Whether a regular file is there."""
        return os.path.isfile(path)

    def is_folder(self, path: str) -> bool:
        """Whether a folder is there."""
        return os.path.isdir(path)

    def list_files(self, folder: str, suffixes: tuple[str, ...], limit: int) -> list[str]:
        """Files below a folder whose names end so, by their paths in it, without hidden and SKIPPED_FOLDERS.

        Raises Unreadable when there are more than `limit`, or more than MAX_ENTRIES entries to look at.
        """
        found: list[str] = []
        seen = 0
        todo = [folder]
        while todo:
            here = todo.pop()
            try:
                entries = sorted(os.scandir(here), key=lambda entry: entry.name)
            except OSError:
                continue  # a folder that cannot be read cannot be imported from either
            seen += len(entries)
            for entry in entries:
                if entry.name.startswith(".") or not is_utf8(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in SKIPPED_FOLDERS:
                        todo.append(entry.path)
                elif entry.name.endswith(suffixes) and entry.is_file():
                    found.append(os.path.relpath(entry.path, folder))
            if len(found) > limit or seen > MAX_ENTRIES:
                raise Unreadable(f"its folder holds more than {limit} modules, or {MAX_ENTRIES} entries")
        return sorted(found)

    def digest(self, path: str) -> str:
        """SHA-256 of a file of at most MAX_MODULE_BYTES, in hexadecimal digits. Raises Unreadable."""
        return file_digest(path, MAX_MODULE_BYTES)

    def _inside(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root.rstrip("/") + "/")


def read_file(path: str, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes (one byte more is read to tell). Raises Unreadable.

    A pipe or a device is never opened for reading: it could block or never end.
    """
    return b"".join(_parts(path, limit))


def file_digest(path: str, limit: int) -> str:
    """SHA-256 of what `read_file` returns, in hexadecimal digits, without keeping the content. Raises Unreadable."""
    total = hashlib.sha256()
    for part in _parts(path, limit):
        total.update(part)
    return total.hexdigest()


def _parts(path: str, limit: int) -> Iterator[bytes]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Unreadable(_why(error)) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Unreadable("it is not a regular file")
        left = limit + 1
        while left > 0 and (part := os.read(fd, min(left, 1 << 20))):
            yield part
            left -= len(part)
    except OSError as error:
        raise Unreadable(_why(error)) from None
    finally:
        os.close(fd)
    if left <= 0:
        raise Unreadable(f"it is larger than {limit} bytes")


def read_instead(path: str, limit: int, instead: Overlay) -> bytes:
    """The content of a file, or the content that is used in its place. Raises Unreadable."""
    if path not in instead:
        return read_file(path, limit)
    data = instead[path]
    if data is None:
        raise Unreadable("no such file or directory")
    if len(data) > limit:
        raise Unreadable(f"it is larger than {limit} bytes")
    return data


def list_documents(folder: str) -> Iterator[str]:
    """The YAML files of a bundle's directory, at any depth: its goondan.yaml first, then by name.

    Hidden folders, links to folders, virtual environments, node_modules and folders that are bundles of their own
    (they have a goondan.yaml) are left out, and names that are not UTF-8. Raises Unreadable when there are too many
    or the folder cannot be read.
    """
    found: list[str] = []
    seen = 0
    todo = [folder]
    while todo:
        here = todo.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            raise Unreadable(f"{here}: {_why(error)}") from None
        names = {entry.name for entry in entries}
        seen += len(entries)
        if seen > MAX_ENTRIES:
            raise Unreadable(f"the directory holds more than {MAX_ENTRIES} entries; name the {BUNDLE_FILE} in it")
        if here != folder and names & {BUNDLE_FILE, "pyvenv.cfg"}:
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in SKIPPED_FOLDERS and is_utf8(entry.name):
                    todo.append(entry.path)
            elif entry.name.endswith((".yaml", ".yml")) and entry.is_file() and is_utf8(entry.name):
                found.append(entry.path)
                if len(found) > MAX_FILES:
                    raise Unreadable(f"the directory holds more than {MAX_FILES} YAML files")
    first = os.path.join(folder, BUNDLE_FILE)
    return iter(sorted(found, key=lambda path: (path != first, path)))


def tree_digest(root: str) -> tuple[str, bool]:
    """SHA-256 over a tool's folder, or over the one file that is its root, and whether it covers everything.

    Hidden files and compiled modules do not count. Content counts up to MAX_DIGESTED_BYTES a file, beyond it size and
    time; and so does whether a file is executable. One that cannot be read counts as unreadable, so that the digest
    changes when it can be read.
    """
    total = hashlib.sha256()
    if not os.path.isdir(root):
        total.update(_file_digest(root, os.path.basename(root)))
        return total.hexdigest(), True
    count = 0
    todo = [root]
    while todo:
        here = todo.pop()
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as error:
            total.update(f"unreadable {here} {error.errno}\0".encode("utf-8", "surrogateescape"))
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in SKIPPED_FOLDERS:
                continue
            count += 1
            if count > MAX_TREE_FILES:
                return total.hexdigest(), False
            name = os.path.relpath(entry.path, root)
            if entry.is_symlink():
                total.update(f"link {name} {_link(entry.path)}\0".encode("utf-8", "surrogateescape"))
            elif entry.is_dir(follow_symlinks=False):
                todo.append(entry.path)
            else:
                total.update(_file_digest(entry.path, name))
    return total.hexdigest(), True


def _file_digest(path: str, name: str) -> bytes:
    try:
        state = os.stat(path, follow_symlinks=False)
        if stat.S_ISREG(state.st_mode) and state.st_size <= MAX_DIGESTED_BYTES:
            what = hashlib.sha256(read_file(path, MAX_DIGESTED_BYTES)).hexdigest()
            what += " executable" if state.st_mode & _EXECUTE else ""
        else:
            what = f"{state.st_mode} {state.st_size} {state.st_mtime_ns}"
    except (OSError, Unreadable):
        what = "unreadable"
    return f"file {name} {what}\0".encode("utf-8", "surrogateescape")


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return "unreadable"


def _why(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
