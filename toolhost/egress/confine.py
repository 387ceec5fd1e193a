"""What the egress proxy gives up before it looks at a byte of anybody: its user, new privileges, files, system calls.

Each step is taken where the system knows it. Root becomes nobody. Landlock leaves the files that name resolution
needs, to read, and nothing to write or run; it keeps the proxy away from abstract sockets and from signals to others.

Source: docs/design/sandbox.md sections 3 and 6; docs/decisions/024.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import socket
import struct
from contextlib import suppress
from typing import Final

_NOBODY: Final = 65534
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER, _SECCOMP_TSYNC = 1, 1
#: struct sock_filter (bytes).
_INSTRUCTION: Final = 8
_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_VERSION: Final = 1
_RULE_PATH: Final = 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
#: Rights on files that each version of Landlock added (linux/landlock.h): all of them are handled, so refused.
_FS_BITS: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_SCOPES: Final = 0b11  # abstract sockets, signals; version 6
#: What getaddrinfo reads: configuration, and the libraries that its name services are.
_READABLE: Final = ("/etc", "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/run/systemd/resolve")
#: Threads of the resolver, and descriptors: two a connection, 64 connections a jail.
_DESCRIPTORS: Final = 16384


def confine(filter_fd: int) -> None:
    """Give everything up; `filter_fd` holds the filter, and is closed. Raises OSError when that is not possible."""
    asyncio.run(_rehearse())
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user clears it, so it comes after
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    with open(filter_fd, "rb") as source:
        program = source.read()
    _landlock(libc)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxQ", len(program) // _INSTRUCTION, ctypes.addressof(buffer))
    # For all threads: the resolver's may not be quite gone.
    number = ctypes.c_long(_SECCOMP[os.uname().machine])
    if libc.syscall(number, ctypes.c_long(_SECCOMP_SET_MODE_FILTER), ctypes.c_long(_SECCOMP_TSYNC), header) != 0:
        raise OSError(ctypes.get_errno(), "the filter was refused")


async def _rehearse() -> None:
    """Do once what the proxy does: modules and name services load what they need while it can still be read."""
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


def _landlock(libc: ctypes.CDLL) -> None:
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return  # a kernel without it
    handled = (1 << _FS_BITS.get(version, 16)) - 1
    fields = struct.pack("QQQ", handled, 0, _SCOPES if version >= 6 else 0)
    # Older kernels refuse fields that they do not know unless they are left out.
    attributes = fields if version >= 6 else fields[:8]
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return
    for path in _READABLE:
        with suppress(OSError):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", _READ_FILE | _READ_DIR, fd)
            libc.syscall(_ADD_RULE, ruleset, _RULE_PATH, rule, 0)
            os.close(fd)
    libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
