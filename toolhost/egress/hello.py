"""The server name in a TLS ClientHello. Pure, and as strict as the server that the name belongs to.

Source: docs/design/sandbox.md section 6; RFC 8446 section 4.1.2, RFC 6066 section 3.
"""

from __future__ import annotations

from typing import Final

from goondan.schemas.hosts import BadHost, is_address, parse_host
from goondan.toolhost.egress.fields import Fields, TooShort

#: A ClientHello with post-quantum key shares has some 2 KiB; larger ones than this are none (bytes).
MAX_HELLO: Final = 16384
_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_HOST_NAME: Final = 0


class NoHello(ValueError):
    """The bytes are no ClientHello."""


def looks_like_tls(data: bytes) -> bool:
    """Whether a connection that begins like this is TLS."""
    return data[:1] == b"\x16" and data[1:2] in (b"", b"\x03")


def server_name(data: bytes) -> str | None:
    """The name in the ClientHello that `data` begins with, as it is written; '' when it has none.

    None: more bytes are needed. Raises NoHello for what can become no ClientHello.
    """
    message = b""
    at = 0
    while len(data) - at >= 5:
        if data[at] != _HANDSHAKE or data[at + 1] != 3:
            raise NoHello("not a TLS handshake")
        size = int.from_bytes(data[at + 3 : at + 5], "big")
        if size == 0 or size > MAX_HELLO:
            raise NoHello("a record of an impossible length")
        message += data[at + 5 : at + 5 + size]
        at += 5 + size
        if len(message) >= 4:
            if message[0] != _CLIENT_HELLO:
                raise NoHello("not a ClientHello")
            wanted = 4 + int.from_bytes(message[1:4], "big")
            if wanted > MAX_HELLO:
                raise NoHello("too long a ClientHello")
            if len(message) >= wanted:
                try:
                    return _name_in(Fields(message[4:wanted]))
                except TooShort as error:
                    raise NoHello(str(error)) from None
    if data and not looks_like_tls(data):
        raise NoHello("not a TLS handshake")
    if len(data) > MAX_HELLO:
        raise NoHello("too long a ClientHello")
    return None


def _name_in(body: Fields) -> str:
    body.take(2 + 32)  # version, random
    body.vector(1)  # session
    body.vector(2)  # ciphers
    body.vector(1)  # compression
    if body.empty:
        return ""
    extensions = Fields(body.vector(2))
    found: list[str] = []
    while not extensions.empty:
        kind = extensions.number(2)
        content = extensions.vector(2)
        if kind == _SERVER_NAME:
            found.append(_server_name_in(content))
    if len(found) > 1:
        raise NoHello("two server names")
    return found[0] if found else ""


def _server_name_in(content: bytes) -> str:
    names = Fields(Fields(content).vector(2))
    kind, name = names.number(1), names.vector(2)
    if kind != _HOST_NAME or not names.empty:
        raise NoHello("a server name that is none")
    try:
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise NoHello("a server name that is none") from None


class Gate:
    """Holds back what a client sends through a tunnel to `host`, until its ClientHello names that host.

    `must`: only TLS passes. An exact grant carries any protocol, also ones in which the server speaks first.
    """

    def __init__(self, host: str, *, must: bool) -> None:
        self._host = host
        self._must = must
        self._held = b""
        self._open = False
        self.done = False  # as for a body: a tunnel has no end of its own

    def feed(self, data: bytes) -> bytes:
        """The part of what has come that may be passed on now. Raises NoHello."""
        if self._open:
            return data
        self._held += data
        if not self._held:
            return b""
        if self._must or looks_like_tls(self._held):
            name = server_name(self._held)
            if name is None:
                return b""
            if not self._fits(name):
                raise NoHello("the TLS server name is not the host that the proxy was asked for")
        self._open = True
        held, self._held = self._held, b""
        return held

    def _fits(self, name: str) -> bool:
        if not name:  # an address has none (RFC 6066), and what must be TLS must say where it goes
            return not self._must or is_address(self._host)
        try:
            return parse_host(name) == self._host
        except BadHost:
            return False
