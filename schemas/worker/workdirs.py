"""The record of write exposures. The tool host writes it, and the kernel reads it before it loads a bundle.

`<state root>/workspaces/<digest>/toolhosts/<name>/workdirs.json` is a list of write exposures. The file `lock` beside
it is locked for as long as that tool host lives. While jails do, the list is touched every second.

A file that a jail has made or changed has a time of change (`st_ctime`, which no program can set) within an exposure of
a folder that it lies in. A place that was read-only there all the time (`kept`) is exempt: others may have changed it.

Source: docs/design/sandbox.md section 2.
"""

from __future__ import annotations

import os
from typing import Final

from msgspec import Struct

#: Below a workspace's state directory.
TOOLHOSTS: Final = "toolhosts"
LOCK: Final = "lock"
EXPOSURES: Final = "workdirs.json"
#: The times of files come from a clock that ticks every few milliseconds (nanoseconds).
SLACK_NS: Final = 50_000_000
#: A tool host that was killed had its last touch at most so long before its jails ended (seconds): it touches every
#: second, and one that did not for so long was stuck.
MAX_SILENCE_S: Final = 60.0


class GuardedPlace(Struct, frozen=True, array_like=True):
    """A place that stays read-only."""

    #: Its path.
    path: str
    #: The device of its inode.
    device: int
    #: The number of its inode.
    inode: int


class WriteExposure(Struct, frozen=True, omit_defaults=True):
    """A time in which jails could write below a folder."""

    #: The folder.
    folder: str
    #: When it began (nanoseconds since 1970).
    began: int
    #: When it ended (nanoseconds since 1970). None: it has not ended.
    ended: int | None = None
    #: Places in the folder that jails could not write to. When the exposure ended, they were still the same inodes.
    #: Before that, a place counts while its path leads to that inode. The tool host holds the inode open, so no other
    #: file can have its number. When the tool host is gone, a new file has a later time.
    kept: list[GuardedPlace] = []
    #: Empty folders that the tool host put there.
    made: list[str] = []


def leads_to(path: str, device: int, inode: int) -> bool:
    """Whether the path is still that of this file."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (device, inode)
