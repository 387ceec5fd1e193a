"""What stays read-only in a folder that a jail may write to, whatever the tool host plans: our code and our state.

The plan of an honest tool host mounts all of it read-only as well (toolhost/policy). This holds for one that is not.

Source: docs/decisions/039.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import NamedTuple

from toolhost.launcher import calls
from toolhost.launcher.allow_list import within
from toolhost.launcher.descriptors import opened
from toolhost.launcher.request import Stage

_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Kept(NamedTuple):
    """A place in a stage: the number of the stage, the names that lead to it from there, and which inode it is."""

    stage: int
    names: list[str]
    device: int
    inode: int


def kept_in(index: int, folder: str, places: list[str]) -> list[Kept]:
    """Those of the places that lie in the folder which is that stage, without such as lie in others."""
    inside = [path for path in dict.fromkeys(places) if path != folder and within(path, folder)]
    found = []
    for path in inside:
        if not any(path != other and within(path, other) for other in inside):
            with suppress(OSError):  # there is none on this machine
                status = os.lstat(path)
                names = path[len(folder.rstrip("/")) + 1 :].split("/")
                found.append(Kept(index, names, status.st_dev, status.st_ino))
    return found


def keep(top: str, stages: list[Stage], kept: list[Kept]) -> None:
    """In a mount namespace with the stages in their places, seen from the folder `top`: mount each of them onto itself,
    to be read.

    So is each folder on the way, as it is: a folder that is a mount point cannot be renamed away. Raises OSError, also
    when something else is there meanwhile.
    """
    for place in kept:
        here = os.open(top + stages[place.stage]["at"], _FLAGS | os.O_DIRECTORY)
        try:
            for name in place.names:
                inner = _mounted(here, name)
                os.close(here)
                here = inner
            status = os.fstat(here)
            if (status.st_dev, status.st_ino) != (place.device, place.inode):
                raise _moved(place.names)
            calls.set_attributes(here, read_only=True, user_namespace=None, recursive=True)
        finally:
            os.close(here)


def _mounted(folder: int, name: str) -> int:
    """That place in a folder, which becomes a mount of its own."""
    with opened(name, _FLAGS, dir_fd=folder) as fd:
        before = os.fstat(fd)
        if stat.S_ISLNK(before.st_mode):
            raise _moved([name])
        if _mount_of(fd) != _mount_of(folder):
            return os.dup(fd)
        calls.bind_to_itself(fd)
    fd = os.open(name, _FLAGS, dir_fd=folder)
    if not os.path.samestat(before, os.fstat(fd)) or _mount_of(fd) == _mount_of(folder):
        os.close(fd)
        raise _moved([name])
    return fd


def _mount_of(fd: int) -> str:
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as source:
        return next(line for line in source if line.startswith("mnt_id:"))


def _moved(names: list[str]) -> OSError:
    return OSError(errno.EBUSY, f"{'/'.join(names)} was replaced while a jail was being started")
