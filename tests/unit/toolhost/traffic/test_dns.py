"""The jail's resolver: granted names have an address, others do not exist, rubbish is answered as such."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.toolhost.traffic.protocols import answer, parse_query

_ADDRESSES = {"api.example.org": "127.42.0.2"}


def query(name: str, kind: int = 1, *, number: int = 7, flags: int = 0x0100) -> bytes:
    labels = b"".join(bytes([len(part)]) + part for part in name.encode("latin-1").split(b"."))
    return struct.pack(">HHHHHH", number, flags, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


def test_a_granted_name_has_its_address() -> None:
    response, refused = answer(query("API.example.org"), _ADDRESSES.get)
    number, flags, questions, answers = struct.unpack_from(">HHHH", response)
    assert (number, flags & 0x800F, questions, answers) == (7, 0x8000, 1, 1)
    assert response.endswith(socket.inet_aton("127.42.0.2"))
    assert refused is None


@pytest.mark.parametrize(
    ("name", "kind", "flags", "told"),
    [("api.example.org", 28, 0x8080, None), ("evil.example", 1, 0x8083, "evil.example")],
)
def test_a_granted_name_has_no_ipv6_address_and_another_does_not_exist(
    name: str, kind: int, flags: int, told: str | None
) -> None:
    response, refused = answer(query(name, kind), _ADDRESSES.get)
    assert (struct.unpack_from(">HHHH", response)[1:], refused) == ((flags, 1, 0), told)


def test_a_name_that_no_host_can_have_is_refused_without_being_repeated() -> None:
    assert answer(query("a b.example"), _ADDRESSES.get)[1] is None
    assert answer(query("caf\xe9.example"), _ADDRESSES.get)[1] is None


@given(st.binary(max_size=80) | st.binary(max_size=40).map(lambda tail: query("api.example.org")[:-4] + tail))
def test_any_message_gets_an_answer(message: bytes) -> None:
    response, _ = answer(message, _ADDRESSES.get)
    assert len(response) >= 12
    assert response[2] & 0x80


def test_a_response_is_no_question() -> None:
    assert parse_query(query("a.example", flags=0x8180)) is None
    assert parse_query(query("a.example") + bytes(1024)) is None
    assert parse_query(query("a.example")[:20]) is None
