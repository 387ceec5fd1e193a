"""What a program of ours gives up before it reads a byte of somebody hostile: its user, new privileges, files, system
calls. The egress proxy and the template of MCP workers do.

A step that this kernel does not know is left out. Landlock leaves the folders that are named, to be read, and nothing
to write or run. It keeps the process away from abstract sockets, and from signals to other processes.

Source: docs/design/sandbox.md sections 3, 6 and 8; docs/decisions/024.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterable
from typing import Final

from goondan.toolhost.inside.confine import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, Filter, call, landlock, open_places

NOBODY: Final = 65534
_PR_SET_PDEATHSIG: Final = 1
_VERSION: Final = 1
_READ: Final = 1 << 2 | 1 << 3  # files and folders
#: Rights on files that each version of Landlock added (linux/landlock.h): all of them are handled, so refused.
_FS_BITS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_SCOPES: Final = 0b11  # abstract sockets, signals; version 6


def confine(filter_fd: int, readable: Iterable[str], *, user: int = NOBODY, descriptors: int) -> None:
    """Give everything up. `filter_fd` holds the filter, and is closed. `readable` are folders that can still be read.

    `user`: who root becomes. `descriptors`: so many can be open. Raises OSError when that is not possible.
    """
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    die_with_parent()  # a change of user clears it, so it comes after
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = descriptors if hard == resource.RLIM_INFINITY else min(hard, descriptors)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    with open(filter_fd, "rb") as source:
        program = Filter(source.read())
    _landlock(readable)
    program.install(threads=True)  # a thread of the resolver may still be there


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends."""
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _landlock(readable: Iterable[str]) -> None:
    try:
        version = call("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return  # a kernel without it
    handled = {"files": (1 << _FS_BITS.get(version, 16)) - 1, "net": 0, "scopes": _SCOPES if version >= 6 else 0}
    landlock(handled, open_places([(path, _READ) for path in readable if os.path.isdir(path)], {}))
