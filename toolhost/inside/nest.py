"""The walls around one call in a jail that several calls share. The call's first process puts them up, before its tool.

The process begins in new process, mount and IPC namespaces, as a copy of the fork server. It has two capabilities and
the server's descriptors, and gives all of them up here. Then it forks. The parent is process 1 of the namespace and
only waits. The child is the worker, and returns from `enter`. When process 1 ends, Linux ends every process of the
namespace.

If a wall cannot be put up, the process ends, and the call with it.

Source: docs/design/sandbox.md section 5; toolhost/policy/launch_plan.py computes the plan.
"""

from __future__ import annotations

import posix

from .confine import RLIMIT_NOFILE, fail, landlock, limit, open_places
from .init import wait
from .system import PR_SET_DUMPABLE, Filter, bound_capabilities, call, drop_capabilities
from .wire import FD

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any

_READ_ONLY, _BIND, _RECURSIVE = 1, 4096, 16384
_O_PATH, _O_NOFOLLOW = 0o10000000, posix.O_NOFOLLOW
_S_IFMT, _S_IFDIR = 0o170000, 0o040000
_ALL = 0xFFFFFFFF


class Walls:
    """What every call of this jail needs for its walls, prepared once."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """`plan` is the jail's boot plan."""
        calls = plan["calls"]
        self.limits = [(number, value) for number, value in plan["limits"] if number == RLIMIT_NOFILE]
        self.landlock = plan["landlock"]
        self.kept = [path.encode("utf-8", "surrogateescape") for path in calls["kept"]]
        self.covered = [path.encode() for path in calls["covered"]]
        self.fresh = [
            (fresh["kind"].encode(), fresh["at"].encode(), fresh["flags"], fresh["options"].encode())
            for fresh in calls["fresh"]
        ]
        # Places that no call can change are opened once, before any call: later a link could stand there. Each call
        # opens its fresh places itself. The descriptors of the former are the lowest, so one range keeps them.
        rules = [] if self.landlock is None else self.landlock["rules"]
        self.own = [(path, rights) for path, rights in rules if self._is_fresh(path.encode("utf-8", "surrogateescape"))]
        self.places = open_places([rule for rule in rules if rule not in self.own], plan["seen"])
        self.last_place = max((place for place, _ in self.places), default=FD)
        self.workdir = calls["workdir"]
        self.drop = calls["drop"]
        self.filter = Filter(bytes.fromhex(calls["filter"]))

    def _is_fresh(self, path: bytes) -> bool:
        at = [place for _, place, _, _ in self.fresh]
        return _is_below(path, at) and not _is_below(path, self.kept)


def enter(walls: Walls, channel: int, output: int) -> None:
    """Become the worker of one call, with the socket `channel`, and print to `output`. Returns in the worker only."""
    try:
        posix.dup2(output, 1)
        posix.dup2(output, 2)
        posix.dup2(channel, FD, False)  # in place of the server's own
        posix.close(channel)
        posix.close(output)
        call("close_range", walls.last_place + 1, _ALL, 0)
        posix.setpgid(0, 0)  # or else a signal to its own group would reach the server and all other calls
        _mount(walls)
        posix.chdir(walls.workdir)  # the old one leads to what is covered now
        bound_capabilities(walls.drop)
        drop_capabilities()
        walls.filter.install()
        worker = posix.fork()
        if worker:
            wait(worker)
        if walls.landlock is not None:
            # Not on process 1, which must stay out of the worker's reach.
            landlock(walls.landlock, walls.places + open_places(walls.own, {}))
        for number, value in walls.limits:
            limit(number, value)
        call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # what the server hides, this process has none of
    except (OSError, ValueError, KeyError, TypeError) as error:
        fail(f"{type(error).__name__}: {error}")


def _is_below(path: bytes, places: list[bytes]) -> bool:
    return any(path == place or path.startswith(place + b"/") for place in places)


def _mount(walls: Walls) -> None:
    kept = [(path, posix.open(path, _O_PATH | _O_NOFOLLOW | posix.O_CLOEXEC)) for path in walls.kept]
    for kind, at, flags, options in walls.fresh:
        if kind == b"tmpfs":
            call("mount", b"none", at, kind, flags, options)
    for path, fd in kept:
        _make(path, posix.fstat(fd).st_mode & _S_IFMT == _S_IFDIR)
        call("mount", f"/proc/self/fd/{fd}".encode(), path, None, _BIND | _RECURSIVE, None)
        posix.close(fd)
    for kind, at, flags, options in walls.fresh:
        if kind == b"devpts":
            try:
                call("mount", b"none", at, kind, flags, options)
            except OSError:  # some kernels want a user 0 for it: then there are no terminals, and not another call's
                call("mount", b"none", at, b"tmpfs", flags | _READ_ONLY, b"size=4k")
        elif kind != b"tmpfs":
            call("mount", b"none", at, kind, flags, options)
    for path in walls.covered:
        call("mount", b"/dev/null", path, None, _BIND, None)


def _make(path: bytes, is_folder: bool) -> None:
    """An empty place to mount on, and the folders above it."""
    names = path.split(b"/")
    for depth in range(2, len(names) + is_folder):
        try:  # noqa: SIM105 # contextlib is not imported here
            posix.mkdir(b"/".join(names[:depth]), 0o755)
        except FileExistsError:
            pass
    if not is_folder:
        posix.close(posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_CLOEXEC, 0o644))
