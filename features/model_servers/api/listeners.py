"""Who listens on a port of this machine, from /proc/net/tcp and /proc/net/tcp6. Pure.

A port can have several listeners, and the more specific address gets a connection. So a port is somebody's only if all
its listeners that a connection within the machine can reach are theirs.

Source: proc_net_tcp(5); docs/design/commands.md section 10.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from msgspec import Struct

#: The state of a socket that listens.
_LISTENS: Final = "0A"
_ANY_4: Final = "0" * 8
_ANY_6: Final = "0" * 32
_LOOP_6: Final = "00000000000000000000000001000000"
#: The beginning of an address of version 4 in version 6.
_MAPPED: Final = "0000000000000000FFFF0000"


class Listener(Struct, frozen=True):
    """A socket that listens, and that a connection within the machine can reach."""

    #: Its port.
    port: int
    #: The user that made it.
    uid: int
    #: Whether 127.0.0.1 reaches it; else only ::1 does.
    v4: bool


def listeners(*tables: str) -> list[Listener]:
    """The listeners in such tables. A line that is none is passed over."""
    found = (_read(line.split()) for table in tables for line in table.splitlines()[1:])
    return [listener for listener in found if listener is not None]


def _read(fields: list[str]) -> Listener | None:
    if len(fields) < 8 or fields[3] != _LISTENS:
        return None
    address, _, port = fields[1].partition(":")
    try:
        number, uid = int(port, 16), int(fields[7])
    except ValueError:
        return None
    four = address.removeprefix(_MAPPED) if len(address) == len(_ANY_6) else address
    v4 = four == _ANY_4 or (len(four) == len(_ANY_4) and four.endswith("7F"))
    if not v4 and address not in (_ANY_6, _LOOP_6):
        return None
    return Listener(number, uid, v4 or address == _ANY_6)


def owned(found: Iterable[Listener], uids: Collection[int]) -> dict[int, str]:
    """The ports whose listeners all belong to these users, each with the host that reaches it."""
    ports: dict[int, list[Listener]] = {}
    for listener in found:
        ports.setdefault(listener.port, []).append(listener)
    return {
        port: "127.0.0.1" if any(listener.v4 for listener in group) else "[::1]"
        for port, group in ports.items()
        if all(listener.uid in uids for listener in group)
    }
