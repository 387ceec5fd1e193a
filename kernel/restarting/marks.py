"""The marks of a bundle's files: size, time and inode number of each. No file is read.

The files are polled. The system is not asked to report changes: a bundle has some dozen files, and one look at them
costs tens of microseconds. Polling works on every file system, and for files that an editor exchanges
(docs/design/processes.md section 6).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from goondan.kernel.bundle.files import SKIPPED_FOLDERS
from goondan.kernel.restarting.rest import Marks

#: Entries that are looked at in all: a bundle with more is looked at as far as that.
MAX_ENTRIES: Final = 20_000
#: Names that editors and interpreters make beside files, and that no bundle is made of.
_JUNK_ENDS: Final = ("~", ".swp", ".swo", ".swx", ".tmp", ".pyc", ".bak")


class Watched(Struct, frozen=True):
    """The files of a bundle that are watched."""

    #: These files.
    files: list[str]
    #: This file. If it is a folder: every YAML file below it.
    documents: str | None = None
    #: Every file below these folders.
    trees: list[str] = []


def marks_of(watched: Watched) -> Marks:
    """The marks of all files that are there; one that is not has none."""
    found: dict[str, tuple[int, ...]] = {}
    for path in watched.files:
        _mark(path, found)
    if watched.documents is not None:
        _walk([watched.documents], found, (".yaml", ".yml"))
    _walk(watched.trees, found, ())
    return found


def _mark(path: str, found: dict[str, tuple[int, ...]]) -> None:
    try:
        state = os.stat(path)
    except OSError:
        return
    found[path] = (state.st_mtime_ns, state.st_size, state.st_ino, state.st_mode)


def _walk(roots: Iterable[str], found: dict[str, tuple[int, ...]], ends: tuple[str, ...]) -> None:
    todo = list(roots)
    seen = 0
    while todo and seen < MAX_ENTRIES:
        here = todo.pop()
        try:
            entries = list(os.scandir(here))
        except NotADirectoryError:
            _mark(here, found)
            continue
        except OSError:
            continue
        for entry in entries:
            seen += 1
            name = entry.name
            if name.startswith((".", "#")) or name in SKIPPED_FOLDERS or name.endswith(_JUNK_ENDS):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                elif not ends or name.endswith(ends):
                    _mark(entry.path, found)
            except OSError:
                continue
