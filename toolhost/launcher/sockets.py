"""Tells what sockets of another process hold. It asks copies of them, which are closed at once."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import Final

from goondan.toolhost.launcher import syscalls

_SO_MEMINFO: Final = 55


def held_by(pid: int, numbers: list[int]) -> int:
    """Bytes that lie unread in these sockets of one process. A socket that cannot be asked counts for nothing."""
    total = 0
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            for number in numbers:
                total += _ask(pidfd, number)
        finally:
            os.close(pidfd)
    return total


def _ask(pidfd: int, number: int) -> int:
    with suppress(OSError, struct.error):
        fd = syscalls.copy_of(pidfd, number)
        try:
            copy = socket.socket(fileno=fd)
        except OSError:  # it has become something else
            os.close(fd)
            raise
        with copy:
            # struct of sk_meminfo: rmem_alloc, rcvbuf, wmem_alloc, sndbuf, fwd_alloc, wmem_queued, …
            words = struct.unpack_from("=6I", copy.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 64))
            return int(words[0] + max(words[2], words[5]))
    return 0
