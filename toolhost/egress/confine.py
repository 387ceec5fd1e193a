"""What the egress proxy gives up before it reads a byte of a jail (toolhost/own_confinement.py), and what it keeps.

Source: docs/design/sandbox.md sections 3 and 6; docs/decisions/024.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Final

from goondan.toolhost import own_confinement

#: What getaddrinfo reads: configuration, and the libraries that its name services are.
_READABLE: Final = ("/etc", "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/run/systemd/resolve")
#: Threads of the resolver, and descriptors: two a connection, 64 connections a jail.
_DESCRIPTORS: Final = 16384


def confine(filter_fd: int) -> None:
    """Give everything up; `filter_fd` holds the filter, and is closed. Raises OSError when that is not possible."""
    asyncio.run(_warm_up())
    own_confinement.confine(filter_fd, _READABLE, descriptors=_DESCRIPTORS)


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
