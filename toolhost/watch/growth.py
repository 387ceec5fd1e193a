"""How much a jail has added to a folder: a walk over a tree that the jail may be changing at this moment.

It counts what is newer than the jail or was changed since, by the times that Linux keeps and no program can set. A file
that was appended to counts whole; decide.DiskMeter bounds that by what the file system has lost.

The walk opens every folder relative to its parent, without following links, down to MAX_DEPTH. A changed folder below
that counts as `deep`: no tool needs such a tree, and one that builds it hides something.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final

from goondan.toolhost.limits.decide import Growth

#: Folders in folders; each holds one of our descriptors while it is walked.
MAX_DEPTH: Final = 128
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def walk(root: str, since: float, enough: Growth) -> Growth:
    """How much was added to the folder (or file) `root` since then (seconds since 1970). Stops at `enough` of either.

    A tree that is too deep counts as `enough`.
    """
    try:
        status = os.lstat(root)
        if stat.S_ISREG(status.st_mode):
            return Growth(status.st_blocks * 512, 1) if status.st_ctime >= since else Growth(0, 0)
        top = os.open(root, _FLAGS)
    except OSError:
        return Growth(0, 0)
    found = _Found(status.st_dev, since)
    stack: list[tuple[int, list[str]]] = [(top, [""])]
    try:
        while stack:
            above, names = stack[-1]
            if not names:
                os.close(above)
                stack.pop()
                continue
            name = names.pop()
            try:
                fd = os.open(name or ".", _FLAGS, dir_fd=above)
            except OSError:
                continue  # gone, or not a folder any more
            folders: list[str] = []
            stack.append((fd, folders))
            if not found.look(fd, folders, deepest=len(stack) >= MAX_DEPTH):
                return enough
            if found.size >= enough.size or found.entries >= enough.entries:
                break
        return Growth(found.size, found.entries)
    finally:
        for fd, _ in stack:
            os.close(fd)


class _Found:
    """What a walk has counted on one file system."""

    def __init__(self, device: int, since: float) -> None:
        self.size = self.entries = 0
        self._device = device
        self._since = since
        self._seen: set[tuple[int, int]] = set()

    def look(self, fd: int, folders: list[str], *, deepest: bool) -> bool:
        """Count what is in a folder, and name the folders in it; False for a changed folder in the `deepest` one."""
        with suppress(OSError), os.scandir(fd) as listing:
            for entry in listing:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev != self._device:
                        continue  # something else is mounted there
                    is_folder = stat.S_ISDIR(status.st_mode)
                    if self._count(status, is_folder) and is_folder and deepest:
                        return False
                    if is_folder and not deepest:
                        folders.append(entry.name)
        return True

    def _count(self, status: os.stat_result, is_folder: bool) -> bool:
        """Whether it is newer, and was not counted under another name."""
        file = (status.st_dev, status.st_ino)
        if status.st_ctime < self._since or file in self._seen:
            return False
        if status.st_nlink > 1 and not is_folder:
            self._seen.add(file)
        self.size += status.st_blocks * 512
        self.entries += 1
        return True
