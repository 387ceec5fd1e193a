"""The binary protocols that jails and their resolvers speak with the egress proxy: DNS, and how TLS begins. Pure.

Questions of a jail's resolver come over TCP and are answered without asking a server. A granted name has an address in
the jail. Every other name does not exist there. The proxy learns from the question which name a tool wanted, so the
refusal can name it. Programs of the jail normally find granted names in /etc/hosts and do not ask. The server name in a
TLS ClientHello is read as strictly as the server reads it that the name belongs to.

Source: docs/design/sandbox.md section 6; RFC 1035, RFC 7766; RFC 8446 section 4.1.2, RFC 6066 section 3.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from goondan.schemas.worker.hosts import BadHost, is_address, parse_host

#: A question has a header, one name and four bytes; resolvers add some options (bytes).
MAX_QUERY: Final = 1024
_A: Final = 1
_AAAA: Final = 28
_IN: Final = 1
_HEADER: Final = struct.Struct(">HHHHHH")
#: response, recursion available
_ANSWERED: Final = 0x8080
_NAME_ERROR: Final = 3
_FORMAT_ERROR: Final = 1
_TTL_S: Final = 1
#: A ClientHello with post-quantum key shares has some 2 KiB; larger ones than this are none (bytes).
MAX_HELLO: Final = 16384
_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_HOST_NAME: Final = 0


class TooShort(ValueError):
    """A field is longer than the bytes that are left."""


class Fields:
    """Takes fields off the front. Each method raises TooShort when the field is not all there."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data = data
        #: Where the next field begins.
        self.at = at

    def take(self, size: int) -> bytes:
        """So many bytes."""
        end = self.at + size
        if end > len(self._data):
            raise TooShort("a field ends too early")
        found = self._data[self.at : end]
        self.at = end
        return found

    def number(self, width: int) -> int:
        """A number of so many bytes, the highest one first."""
        return int.from_bytes(self.take(width), "big")

    def vector(self, width: int) -> bytes:
        """A field with its length before it, which is a number of so many bytes."""
        return self.take(self.number(width))

    @property
    def empty(self) -> bool:
        """Whether nothing is left."""
        return self.at == len(self._data)


class Question(NamedTuple):
    """One question."""

    #: The number of the query.
    id: int
    #: The name, normalised; None when no host can have it.
    host: str | None
    #: The type of record that is asked for.
    type: int
    #: Where the question ends in the message.
    end: int


def parse_query(message: bytes) -> Question | None:
    """The question of a query; None for what is none."""
    if len(message) < _HEADER.size or len(message) > MAX_QUERY:
        return None
    number, flags, questions, _, _, _ = _HEADER.unpack_from(message)
    if flags & 0xF800 or questions != 1:  # a response, or an operation that is no query
        return None
    fields = Fields(message, _HEADER.size)
    labels: list[bytes] = []
    try:
        while label := fields.vector(1):
            if len(label) > 63 or b"." in label:
                return None  # a question has nothing that a compressed name could point to
            labels.append(label)
        kind, cls = fields.number(2), fields.number(2)
    except TooShort:
        return None
    if cls != _IN:
        return None
    try:
        host: str | None = parse_host(b".".join(labels).decode("ascii"))
    except (BadHost, UnicodeDecodeError):
        host = None
    return Question(number, host, kind, fields.at)


def answer(message: bytes, address_of: Callable[[str], str | None]) -> tuple[bytes, str | None]:
    """The response to a query, and the name that was refused, if one was.

    `address_of` gives the IPv4 address in the jail of a granted name.
    """
    question = parse_query(message)
    if question is None:
        number = int.from_bytes(message[:2], "big")
        return _HEADER.pack(number, _ANSWERED | _FORMAT_ERROR, 0, 0, 0, 0), None
    address = None if question.host is None else address_of(question.host)
    asked = message[_HEADER.size : question.end]
    if address is None:
        return _HEADER.pack(question.id, _ANSWERED | _NAME_ERROR, 1, 0, 0, 0) + asked, question.host
    if question.type != _A:  # the name exists, but has nothing of this type
        return _HEADER.pack(question.id, _ANSWERED, 1, 0, 0, 0) + asked, None
    record = struct.pack(">HHHIH", 0xC00C, _A, _IN, _TTL_S, 4) + ipaddress.IPv4Address(address).packed
    return _HEADER.pack(question.id, _ANSWERED, 1, 1, 0, 0) + asked + record, None


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
