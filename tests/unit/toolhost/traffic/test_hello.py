"""The server name in a ClientHello: found in real ones, however they arrive, and nothing else passes for one."""

from __future__ import annotations

import ssl
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.toolhost.traffic.protocols import MAX_HELLO, Gate, NoHello, looks_like_tls, server_name


def client_hello(name: str | None) -> bytes:
    """What this Python's own TLS client says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with suppress(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


HELLO = client_hello("api.example.org")


def test_a_real_client_names_its_server() -> None:
    assert server_name(HELLO) == "api.example.org"
    assert server_name(client_hello(None)) == ""
    assert server_name(HELLO + b"more") == "api.example.org"


def test_it_may_come_in_pieces() -> None:
    for size in range(len(HELLO)):
        assert server_name(HELLO[:size]) is None
    body = HELLO[5:]
    split = b"".join(
        b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in (body[:3], body[3:100], body[100:])
    )
    assert server_name(split) == "api.example.org"


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n", b"\x15\x03\x01\0\x02\x02\x28", b"\x16\x02\0\0\x05", b"\x16\x03\x01\0\0",
     b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\0\x04\x02\0\0\0", b"\x16\x03\x01\0\x04\x01\xff\xff\xff", b"\0"],
)  # fmt: skip
def test_what_is_no_handshake_is_refused(data: bytes) -> None:
    with pytest.raises(NoHello):
        server_name(data)


@given(st.data())
def test_a_damaged_one_never_names_a_server_that_it_did_not(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(HELLO) - 1))
    damaged = HELLO[:at] + bytes([data.draw(st.integers(0, 255))]) + HELLO[at + 1 :]
    try:
        name = server_name(damaged)
    except NoHello:
        return
    assert name is None or name == "" or len(name) <= len(damaged)
    if name not in (None, "", "api.example.org"):
        # Only a change in the name itself gives another name.
        start = HELLO.index(b"api.example.org")
        assert start - 4 <= at < start + 15


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda tail: HELLO[:60] + tail))
def test_any_bytes_are_judged(data: bytes) -> None:
    with suppress(NoHello):
        server_name(data)
    looks_like_tls(data)


def test_it_does_not_grow_without_end() -> None:
    with pytest.raises(NoHello):
        server_name(b"\x16\x03\x01\0\x01\x01" * (MAX_HELLO // 5))


def test_a_gate_opens_for_the_right_name_only() -> None:
    gate = Gate("api.example.org", must=True)
    assert gate.feed(b"") == b""
    assert gate.feed(HELLO[:50]) == b""
    assert gate.feed(HELLO[50:]) == HELLO
    assert gate.feed(b"anything") == b"anything"
    with pytest.raises(NoHello):
        Gate("other.example.org", must=True).feed(HELLO)
    with pytest.raises(NoHello):
        Gate("other.example.org", must=False).feed(HELLO)
    with pytest.raises(NoHello):
        Gate("api.example.org", must=True).feed(b"SSH-2.0-x\r\n")
    assert Gate("api.example.org", must=False).feed(b"SSH-2.0-x\r\n") == b"SSH-2.0-x\r\n"


def test_a_client_without_a_name_reaches_addresses_only() -> None:
    unnamed = client_hello(None)
    assert Gate("93.184.216.34", must=True).feed(unnamed) == unnamed
    assert Gate("api.example.org", must=False).feed(unnamed) == unnamed
    with pytest.raises(NoHello):
        Gate("api.example.org", must=True).feed(unnamed)
