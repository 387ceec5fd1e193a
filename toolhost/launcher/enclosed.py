"""Checks of a launch by a tool host that gave root up, where bubblewrap runs as root: one program, one set of walls.

On other hosts the launcher becomes a user who owns nothing before it executes anything, so the program does not matter.
Here bubblewrap runs as root. The tool host chooses the mounts among the parts that jails are made of. It does not
choose the program, its environment, its namespaces, its capabilities or its filter. The allow-list fixes them, and it
was written before anything hostile was read.

Source: docs/decisions/038 and 039.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

from goondan.toolhost.launcher.allow_list import NotAllowed, within
from goondan.toolhost.launcher.request import Enclosed, Launch

#: Largest size of the options and of a filter, which have some kilobytes (bytes).
MAX_TEXT: Final = 1 << 20
#: Options that put something at a place, and how many words follow each.
_MOUNTS: Final = {
    "--ro-bind": 2, "--bind": 2, "--ro-bind-data": 2, "--symlink": 2, "--tmpfs": 1, "--proc": 1, "--dev": 1,
    "--perms": 1, "--size": 1, "--dir": 1, "--remount-ro": 1, "--setenv": 2, "--chdir": 1,
}  # fmt: skip
#: Those of them that take their first word from bubblewrap's own root directory.
_BINDS: Final = ("--ro-bind", "--bind")


def way_of(request: Launch, ways: list[Enclosed]) -> Enclosed:
    """The entry of `ways` that has this root directory. Raises NotAllowed. Pure."""
    for way in ways:
        if request["enclosure"] == way["enclosure"]:
            return way
    raise NotAllowed("that is not the root directory that bubblewrap gets here")


def check_enclosed(request: Launch, options: bytes, code: bytes, allowed: Enclosed) -> None:
    """Raise NotAllowed for anything but a jail that begins as root with the walls of `allowed`. Pure."""
    if request["argv"] != allowed["argv"] or request["env"] or request["folder"] is not None:
        raise NotAllowed("that is not how bubblewrap is started here")
    if hashlib.sha256(code).hexdigest() not in allowed["filters"]:
        raise NotAllowed("that is no system call filter of a jail")
    words = [os.fsdecode(word) for word in options.split(b"\0")]
    walls = allowed["walls"]
    if words[: len(walls)] != walls or words[-1] != "":
        raise NotAllowed("these are not the walls of a jail")
    # Processes of the host show in its /proc, which bubblewrap needs for itself.
    sources = [path for path in allowed["enclosure"]["shown"] if path != "/proc"]
    _check_mounts(words[len(walls) : -1], [*sources, str(request["stage"])])


def _check_mounts(words: list[str], sources: list[str]) -> None:
    at = 0
    while at < len(words):
        option = words[at]
        count = _MOUNTS.get(option)
        given = words[at + 1 : at + 1 + (count or 0)]
        if count is None or len(given) < count:
            raise NotAllowed(f"bubblewrap has no {option} for a jail")
        if option in _BINDS and not (_is_plain(given[0]) and any(within(given[0], path) for path in sources)):
            raise NotAllowed(f"nothing of a jail is in {given[0]}")
        if option in ("--proc", "--dev") and given[0] != option.replace("--", "/"):
            raise NotAllowed(f"bubblewrap has no {option} {given[0]} for a jail")
        at += 1 + count


def _is_plain(path: str) -> bool:
    return path.startswith("/") and ".." not in path.split("/")


def hold(request: Launch, fds: list[int], ways: list[Enclosed]) -> None:
    """Check such a launch. What was checked is replaced by a copy that nobody else can write to."""
    allowed = way_of(request, ways)
    found = {}
    for number in (allowed["options"], allowed["filter"]):
        if number not in request["places"]:
            raise NotAllowed("that is not how bubblewrap is started here")
        index = request["places"].index(number)
        data = found[number] = os.pread(fds[index], MAX_TEXT, 0)
        copy = os.memfd_create("jail", os.MFD_CLOEXEC)
        os.close(fds[index])
        fds[index] = copy
        os.write(copy, data)
        os.lseek(copy, 0, os.SEEK_SET)
    check_enclosed(request, found[allowed["options"]], found[allowed["filter"]], allowed)
