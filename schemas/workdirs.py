"""When jails could write to which folders: the tool host writes it down, the kernel reads it before it loads a bundle.

`<state root>/workspaces/<digest>/toolhosts/<name>/workdirs.json` is a list of stays; the file `lock` beside it is
locked for as long as that tool host lives. While jails do, the list is touched every second.

A file that a jail has made or changed has a time of change (`st_ctime`, which no program can set) within a stay in a
folder that it lies in. What stood read-only there all the time (`kept`) is exempt: others may have changed it.

Source: docs/decisions/034.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

#: Below a workspace's state directory.
TOOLHOSTS: Final = "toolhosts"
LOCK: Final = "lock"
STAYS: Final = "workdirs.json"
#: The times of files come from a clock that ticks every few milliseconds (nanoseconds).
SLACK_NS: Final = 50_000_000
#: A tool host that was killed had its last touch at most so long before its jails ended (seconds): it touches every
#: second, and one that did not for so long was stuck.
MAX_SILENCE_S: Final = 60.0


class Kept(Struct, frozen=True, array_like=True):
    """A place that stays read-only: its path, and which inode that was."""

    path: str
    device: int
    inode: int


class Stay(Struct, frozen=True, omit_defaults=True):
    """Jails could write below `folder` from `began` to `ended` (nanoseconds since the epoch; None: until now).

    `kept` are places in it that they could not write to. Of a stay that has ended they were still the same at its end.
    Before that, they count while the path leads to that inode: the tool host holds it open, so no other file can have
    its number, and once the tool host is gone what is new has a later time. `made` are empty folders that it put there.
    """

    folder: str
    began: int
    ended: int | None = None
    kept: list[Kept] = []
    made: list[str] = []
