"""Questions of a jail's resolver, over TCP (RFC 1035, RFC 7766). They are answered without asking a server: pure.

A granted name has an address in the jail. Every other name does not exist there. The proxy learns from the question
which name a tool wanted, so the refusal can name it. Programs of the jail normally find granted names in /etc/hosts and
do not ask.

Source: docs/design/sandbox.md section 6.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from goondan.schemas.hosts import BadHost, parse_host
from goondan.toolhost.egress.fields import Fields, TooShort

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
