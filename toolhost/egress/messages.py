"""What the tool host and the egress proxy say to each other: JSON datagrams over a socket pair, descriptors beside.

Source: docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from schemas.hosts import Network, read_network, write_network
from toolhost.egress.rules import Listener

#: One message (bytes); 64 rules take some 10 KiB.
MAX_MESSAGE: Final = 65536
#: Descriptors in one message: the system's bound is 253.
MAX_FDS: Final = 250


class Open(NamedTuple):
    """Serve a jail. The descriptors: its listening sockets in this order, then sockets that see refused connections."""

    jail: int
    network: Network
    listeners: tuple[Listener, ...]
    addresses: dict[str, str]


class Close(NamedTuple):
    """The jail is gone: end what it had."""

    jail: int


class Settle(NamedTuple):
    """Say what you know of this jail by now, then `settled` with the same number."""

    jail: int
    number: int


class Settled(NamedTuple):
    """Everything that happened before the question has been said."""

    jail: int
    number: int


class Reached(NamedTuple):
    """A connection to a granted host was made."""

    jail: int
    host: str
    port: int


class Denied(NamedTuple):
    """A connection was refused. `host` as the jail named it; port 0: it only asked for the name's address."""

    jail: int
    host: str
    port: int
    reason: str


class Failed(NamedTuple):
    """A granted host could not be reached."""

    jail: int
    host: str
    port: int
    reason: str


Message = Open | Close | Settle | Settled | Reached | Denied | Failed
_KINDS: Final[dict[str, Any]] = {kind.__name__: kind for kind in (Close, Settle, Settled, Reached, Denied, Failed)}


def encode(message: Message) -> bytes:
    """One datagram."""
    fields: dict[str, Any] = {"kind": type(message).__name__, **message._asdict()}
    if isinstance(message, Open):
        fields["network"] = write_network(message.network)
    return json.dumps(fields).encode()


def decode(data: bytes) -> Message:
    """A datagram back. Raises ValueError for what is none."""
    try:
        fields = json.loads(data)
        kind = fields.pop("kind")
        if kind == "Open":
            listeners = tuple(Listener(*item) for item in fields["listeners"])
            return Open(fields["jail"], read_network(fields["network"]), listeners, fields["addresses"])
        message: Message = _KINDS[kind](**fields)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message: {error}") from None
    return message
