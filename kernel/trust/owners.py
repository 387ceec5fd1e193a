"""The other users who can change the files of a bundle: other owners, groups, everybody.

Looked at are the files themselves and every folder above them, up to `/`: whoever can write to one of those can put
something else in the place of the file. The system and the user count as one; so does a group that holds only the user.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

from goondan.kernel.trust.powers import Owner, Writers
from goondan.schemas.system.directories import has_list, is_group_of

#: Files and folders of one tool that are looked at; a folder with more holds something else as well.
MAX_BELOW: Final = 5_000
#: Owners and groups that are named; where there are more, it is everybody (entries).
MAX_NAMED: Final = 8


def others_who_can_write(paths: Iterable[str]) -> list[Owner | Writers]:
    """Owners first, each once. A file that cannot be looked at is left out: it cannot be loaded either."""
    owners: set[int] = set()
    groups: set[int | None] = set()
    seen: set[str] = set()
    for path in paths:
        if os.path.islink(path):
            _look(path, owners, groups, seen)
            _above(os.path.dirname(path), owners, groups, seen)
        _above(os.path.realpath(path), owners, groups, seen)
    if max(len(owners), len(groups)) > MAX_NAMED or None in groups:
        groups = {None}
    named = [Owner(uid) for uid in sorted(owners)[:MAX_NAMED]]
    return [*named, *(Writers(gid) for gid in sorted(groups, key=lambda gid: -1 if gid is None else gid))]


def all_below(folder: str) -> Iterator[str]:
    """Files and folders below a folder, at most MAX_BELOW of them, without hidden ones; links are not followed."""
    left = MAX_BELOW
    todo = [folder]
    while todo:
        try:
            entries = list(os.scandir(todo.pop()))
        except OSError:
            continue  # a file, or a folder that cannot be read
        for entry in entries[:left]:
            if not entry.name.startswith("."):
                left -= 1
                yield entry.path
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)


def _above(path: str, owners: set[int], groups: set[int | None], seen: set[str]) -> None:
    while path not in seen:
        _look(path, owners, groups, seen)
        path = os.path.dirname(path)


def _look(path: str, owners: set[int], groups: set[int | None], seen: set[str]) -> None:
    seen.add(path)
    try:
        state = os.lstat(path)
    except OSError:
        return
    if state.st_uid not in (0, os.geteuid()):
        owners.add(state.st_uid)
    if stat.S_ISLNK(state.st_mode) or (stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX):
        return  # a link has no mode; in a sticky folder each file is its owner's
    if state.st_mode & stat.S_IWOTH:
        groups.add(None)
    elif state.st_mode & stat.S_IWGRP and (has_list(path) or not is_own_group(state.st_gid, os.geteuid())):
        groups.add(state.st_gid)


@lru_cache(maxsize=64)
def is_own_group(gid: int, uid: int) -> bool:
    """Whether a group holds nobody but the user and root."""
    return is_group_of(gid, (0, uid))


def owner_name(uid: int) -> str:
    """`NAME (uid N)`, or `uid N` where the user has no name here."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def group_name(gid: int) -> str:
    """`NAME (gid N)`, or `gid N`."""
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"
