"""The messages between the tool host and the egress proxy: JSON datagrams over a socket pair, with descriptors.

Source: docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from goondan.schemas.worker.hosts import Network, read_network, write_network
from goondan.toolhost.traffic.rules import Listener

#: One message (bytes); 64 rules take some 10 KiB.
MAX_MESSAGE: Final = 65536
#: Descriptors in one message: the system's bound is 253.
MAX_FDS: Final = 250


class Open(NamedTuple):
    """Serve a jail. The descriptors: its listening sockets in this order, then sockets that see refused connections."""

    #: The tool host's number of the jail, as in every message.
    jail: int
    #: What was granted.
    network: Network
    #: What each listening socket is for.
    listeners: tuple[Listener, ...]
    #: Addresses in the jail of granted names.
    addresses: dict[str, str]


class Close(NamedTuple):
    """The jail is gone: end what it had."""

    jail: int


class Settle(NamedTuple):
    """Send what is known of this jail by now, then `Settled` with the same number."""

    jail: int
    number: int


class Settled(NamedTuple):
    """All that happened before `Settle` has been sent; with the number 0: the jail is served."""

    jail: int
    number: int


class Reached(NamedTuple):
    """A connection to a granted host was made."""

    #: The tool host's number of the jail.
    jail: int
    #: The host as the jail named it.
    host: str
    #: The port of the connection.
    port: int


class Denied(NamedTuple):
    """A connection was refused."""

    #: The tool host's number of the jail.
    jail: int
    #: The host as the jail named it.
    host: str
    #: The port; 0 when the jail only asked for the name's address.
    port: int
    #: Why it was refused.
    reason: str


class Failed(NamedTuple):
    """A granted host could not be reached."""

    #: The tool host's number of the jail.
    jail: int
    #: The host as the jail named it.
    host: str
    #: The port of the connection.
    port: int
    #: Why it could not be reached.
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
