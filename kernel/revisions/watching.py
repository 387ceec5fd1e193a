"""Watching the files of a bundle, for `gdn run --watch`: their marks, when a change has come to rest, and what is said.

A mark is a file's size, time and inode number. No file is read. The files are polled. The system is not asked to report
changes: a bundle has some dozen files, and one look at them costs tens of microseconds. Polling works on every file
system, and for files that an editor exchanges (docs/design/processes.md section 6).

Editors write in several steps: a new file, a rename, an attribute. A bundle is looked at when none of its files has
changed for REST_S, and once for each such change.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from msgspec import Struct

from goondan.kernel.bundle.files import SKIPPED_FOLDERS
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import fail

#: Entries that are looked at in all: a bundle with more is looked at as far as that.
MAX_ENTRIES: Final = 20_000
#: Names that editors and interpreters make beside files, and that no bundle is made of.
_JUNK_ENDS: Final = ("~", ".swp", ".swo", ".swx", ".tmp", ".pyc", ".bak")
#: How long files rest before anything happens (seconds).
REST_S: Final = 0.3
#: Path -> what tells one content of it from another.
Marks = Mapping[str, tuple[int, ...]]
#: How often the files are looked at (seconds): a change shows within the time that files have to rest.
LOOK_S: Final = 0.1
#: A look that takes long comes seldom: looking takes a fiftieth of the time at most.
SHARE: Final = 50
#: Lines that are kept for a command that asks late.
KEPT: Final = 200

_log = logging.getLogger("supervisor")


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


class Rest:
    """Told of the files again and again. `marks` are those that the revision which runs was read from."""

    def __init__(self, marks: Marks) -> None:
        self._settled = marks
        self._seen = marks
        self._since = 0.0

    def see(self, marks: Marks, now: float) -> bool:
        """Whether there is a change that has come to rest; it is told once. `now`: seconds of a steady clock."""
        if marks != self._seen:
            self._seen, self._since = marks, now
            return False
        if self._seen == self._settled or now - self._since < REST_S:
            return False
        self._settled = self._seen
        return True


class Watcher:
    """`watched` may be set again at any time; `follow` is awaited for each change."""

    def __init__(self, watched: Watched, follow: Callable[[], Awaitable[None]]) -> None:
        self.watched = watched
        self._follow = follow

    async def run(self) -> None:
        """Until it is cancelled. The first look counts as a change: files may have changed since they were read."""
        loop = asyncio.get_running_loop()
        rest = Rest({})
        while True:
            began = loop.time()
            marks = await loop.run_in_executor(None, marks_of, self.watched)
            now = loop.time()
            if rest.see(marks, now):
                await self._follow()
            await asyncio.sleep(max(LOOK_S, SHARE * (now - began)))


class News:
    """Lines, numbered from the first."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._told = 0
        self._more = asyncio.Event()
        self._over = False

    def close(self) -> None:
        """The kernel ends: who waits for more is told so."""
        self._over = True
        self._more.set()

    def say(self, line: str) -> None:
        """Tell everybody."""
        shown = visible_line(line)
        _log.info("%s", shown)
        self._lines = [*self._lines, shown][-KEPT:]
        self._told += 1
        self._more.set()
        self._more = asyncio.Event()

    async def after(self, known: int) -> tuple[list[str], int]:
        """The lines after the first `known`, as soon as there is one, and how many there are. A command that knows more
        lines than there are has asked the program before this one.

        Raises GoondanError E_KERNEL_NOT_RUNNING when there will be no more.
        """
        known = known if known <= self._told else 0
        while known >= self._told:
            if self._over:
                raise fail("E_KERNEL_NOT_RUNNING", "the kernel is stopping")
            await self._more.wait()
        return self._lines[max(0, len(self._lines) - (self._told - known)) :], self._told
