"""What a jail has added to a folder: a walk over a tree that the jail may be changing at this moment.

Counted is what is newer than the jail, or was changed since, by the times that the kernel keeps and no program can set.
A file that was appended to counts whole; decide.DiskMeter bounds that by what the file system has lost.

The walk opens every folder relative to its parent, without following links, and goes MAX_DEPTH down. Below that a
changed folder counts as `deep`: no tool needs such a tree, and whoever builds one hides something.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final

from toolhost.limits.decide import Growth

#: Folders in folders; each holds one of our descriptors while it is walked.
MAX_DEPTH: Final = 128
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def walk(root: str, since: float, enough: Growth) -> Growth:
    """What was added to the folder (or file) `root` since then (seconds since 1970). Stops at `enough` of either.

    A tree that is too deep is `enough` as well.
    """
    seen: set[tuple[int, int]] = set()
    size = entries = 0
    stack: list[tuple[int, list[str]]] = []
    try:
        try:
            status = os.lstat(root)
            if stat.S_ISREG(status.st_mode):
                return Growth(status.st_blocks * 512, 1) if status.st_ctime >= since else Growth(0, 0)
            stack.append((os.open(root, _FLAGS), [""]))
        except OSError:
            return Growth(0, 0)
        device = status.st_dev
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
            with suppress(OSError), os.scandir(fd) as listing:
                for entry in listing:
                    with suppress(OSError):
                        found = entry.stat(follow_symlinks=False)
                        folder = stat.S_ISDIR(found.st_mode)
                        if found.st_dev != device:
                            continue  # something else is mounted there
                        if found.st_ctime >= since and (found.st_dev, found.st_ino) not in seen:
                            if found.st_nlink > 1 and not folder:
                                seen.add((found.st_dev, found.st_ino))
                            size += found.st_blocks * 512
                            entries += 1
                            if folder and len(stack) >= MAX_DEPTH:
                                return enough
                        if folder and len(stack) < MAX_DEPTH:
                            folders.append(entry.name)
            if size >= enough.size or entries >= enough.entries:
                return Growth(size, entries)
        return Growth(size, entries)
    finally:
        for fd, _ in stack:
            os.close(fd)
