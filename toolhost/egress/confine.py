"""What the egress proxy gives up before it reads a byte of a jail: its user, new privileges, files, system calls.

A step that this kernel does not know is left out. Root becomes nobody. Landlock leaves the files that name resolution
reads, and nothing to write or run. It keeps the proxy away from abstract sockets, and from signals to other processes.

Source: docs/design/sandbox.md sections 3 and 6; docs/decisions/024.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from contextlib import suppress
from typing import Final

from toolhost.inside.confine import landlock, open_places
from toolhost.inside.system import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, Filter, call

_NOBODY: Final = 65534
_PR_SET_PDEATHSIG: Final = 1
_VERSION: Final = 1
_READ: Final = 1 << 2 | 1 << 3  # files and folders
#: Rights on files that each version of Landlock added (linux/landlock.h): all of them are handled, so refused.
_FS_BITS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_SCOPES: Final = 0b11  # abstract sockets, signals; version 6
#: What getaddrinfo reads: configuration, and the libraries that its name services are.
_READABLE: Final = ("/etc", "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/run/systemd/resolve")
#: Threads of the resolver, and descriptors: two a connection, 64 connections a jail.
_DESCRIPTORS: Final = 16384


def confine(filter_fd: int) -> None:
    """Give everything up; `filter_fd` holds the filter, and is closed. Raises OSError when that is not possible."""
    asyncio.run(_warm_up())
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user clears it, so it comes after
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    with open(filter_fd, "rb") as source:
        program = Filter(source.read())
    _landlock()
    program.install(threads=True)  # a thread of the resolver may still be there


async def _warm_up() -> None:
    """Do once what the proxy does, so that modules and name services load what they need while they can read it."""
    import encodings.idna  # noqa: F401 # getaddrinfo encodes every name with it

    loop = asyncio.get_running_loop()
    with suppress(OSError):
        await loop.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    theirs.close()
    async with asyncio.timeout(1.0):
        await reader.read()
    writer.close()


def _landlock() -> None:
    try:
        version = call("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return  # a kernel without it
    handled = {"files": (1 << _FS_BITS.get(version, 16)) - 1, "net": 0, "scopes": _SCOPES if version >= 6 else 0}
    landlock(handled, open_places([(path, _READ) for path in _READABLE if os.path.isdir(path)], {}))
