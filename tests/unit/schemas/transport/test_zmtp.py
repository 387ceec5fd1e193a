"""The bytes of a ZeroMQ connection: whole, in pieces, and from somebody who means harm."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.schemas.wire.zmtp import (
    GREETING,
    MAX_COMMAND,
    MAX_COMMANDS,
    MAX_READY,
    Handshake,
    Messages,
    ZmtpError,
    head,
    ready,
)

LIMIT = 1000
#: What libzmq 4.3 sends as a DEALER with the routing id `ab`.
LIBZMQ = (
    b"\xff\0\0\0\0\0\0\0\3\x7f\3\1NULL" + bytes(16 + 1 + 31) + b"\x04\x2b\5READY"
    b"\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\2ab"
)


def command(body: bytes) -> bytes:
    return bytes((4, len(body))) + body


def greeted(pieces: Iterable[bytes]) -> Handshake:
    handshake = Handshake({b"DEALER"})
    for piece in pieces:
        if handshake.done:
            handshake.rest += piece
        else:
            handshake.feed(piece)
    return handshake


def refused(data: bytes) -> str:
    with pytest.raises(ZmtpError) as caught:
        Handshake({b"DEALER"}).feed(data)
    return str(caught.value)


def taken(messages: Messages) -> list[bytes]:
    found = []
    while more := messages.take(3):
        found += more
    return found


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in pairwise(at)]


CUTS = st.lists(st.integers(0, 5000), max_size=8)


# --- greeting and READY


@given(CUTS)
def test_a_handshake_may_come_in_any_pieces(cuts: list[int]) -> None:
    handshake = greeted(pieces_of(LIBZMQ + b"\0\0rest", cuts))
    assert handshake.done and handshake.rest == b"\0\0rest"


def test_our_own_handshake_is_one() -> None:
    assert len(GREETING) == 64
    assert greeted([GREETING + ready(b"DEALER")]).done


def test_a_long_ready_and_names_in_other_letters() -> None:
    body = b"\5READY\x0bSOCKET-TYPE\0\0\0\6DEALER\1x" + (300).to_bytes(4, "big") + bytes(300)
    assert greeted([GREETING + b"\6" + len(body).to_bytes(8, "big") + body]).done


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "no greeting"),
        (b"\1\0", "no greeting"),
        (b"\xff" + bytes(8) + b"\x7e", "no greeting"),
        (b"\xff" + bytes(8) + b"\x7f\1", "version 1"),
        (b"\xff" + bytes(8) + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0"), "NULL"),
        (b"\xff" + bytes(8) + b"\x7f\3\1" + b"NULLS".ljust(20, b"\0"), "NULL"),
        (GREETING + b"\0\0", "something else than a command"),
        (GREETING + b"\6" + (MAX_READY + 1).to_bytes(8, "big"), "limit"),
        (GREETING + b"\6" + b"\xff" * 8, "limit"),
        (GREETING + command(b"\5ERROR\3bad"), "refuses"),
        (GREETING + command(b"\4PING\0\0"), "no READY"),
        (GREETING + ready(b"PUB"), "type"),
        (GREETING + command(b"\5READY"), "type"),
        (GREETING + command(b"\5READY\x0bSocket-Type\0\0\0\7DEALER"), "broken"),
        (GREETING + command(b"\5READY\x0bSocket"), "broken"),
        (GREETING + command(b"\5READY\0\0\0\0\0"), "broken"),
    ],
)
def test_who_greets_otherwise_is_refused_with_a_reason(data: bytes, why: str) -> None:
    assert why in refused(data)


@given(st.binary(max_size=200), CUTS)
def test_any_bytes_are_a_handshake_or_an_error_and_bounded(tail: bytes, cuts: list[int]) -> None:
    for data in (tail, GREETING + tail, GREETING + b"\4" + tail):
        handshake = Handshake({b"DEALER"})
        try:
            for piece in pieces_of(data, cuts):
                if handshake.feed(piece):
                    break
        except ZmtpError:
            pass


# --- messages


@given(st.lists(st.binary(max_size=600), max_size=12), CUTS)
def test_messages_arrive_whole_and_in_order_however_they_are_cut(sent: list[bytes], cuts: list[int]) -> None:
    messages, found = Messages(LIMIT), []
    for piece in pieces_of(b"".join(head(len(data)) + data for data in sent), cuts):
        messages.feed(piece)
        found += taken(messages)
    assert found == sent and not messages.more


@given(st.lists(st.binary(max_size=20), min_size=2, max_size=12), CUTS)
def test_one_message_at_a_time_leaves_the_others(sent: list[bytes], cuts: list[int]) -> None:
    """Whoever stops in the middle goes on where it stopped, also when more is fed."""
    messages, found = Messages(LIMIT), []
    for piece in pieces_of(b"".join(head(len(data)) + data for data in sent), cuts):
        messages.feed(piece)
        found += messages.take(1)
    while messages.more:
        found += messages.take(1)
    assert found == sent


def test_a_message_of_several_parts_is_dropped_and_counted_once() -> None:
    messages = Messages(LIMIT)
    messages.feed(b"\1\1a\1\0\0\1b" + head(1) + b"c" + b"\3" + (300).to_bytes(8, "big") + bytes(300) + b"\0\1d\0\1e")
    assert taken(messages) == [b"c", b"e"] and messages.multipart == 2


def test_many_messages_of_several_parts_do_not_end_the_connection() -> None:
    messages = Messages(LIMIT)
    messages.feed(b"\1\1a\0\1b" * 400 + head(4) + b"good")
    assert taken(messages) == [b"good"] and messages.multipart == 400


def test_a_ping_is_answered_and_any_other_command_is_skipped() -> None:
    messages = Messages(LIMIT)
    messages.feed(
        b"\1\1a" + command(b"\4PING\0\x64context") + command(b"\4PONG") + command(b"") + b"\0\1b" + head(1) + b"c"
    )
    assert taken(messages) == [b"c"] and messages.answers == [command(b"\4PONGcontext")]
    messages.feed(command(b"\4PING\0\0" + bytes(30)))
    assert taken(messages) == [] and messages.answers[1:] == [command(b"\4PONG" + bytes(16))]


@pytest.mark.parametrize(
    "data",
    [
        b"\2" + (LIMIT + 1).to_bytes(8, "big"),
        b"\2" + b"\xff" * 8,
        b"\3" + (LIMIT + 1).to_bytes(8, "big"),
        b"\6" + (MAX_COMMAND + 1).to_bytes(8, "big"),
        b"\5\0",
        b"\7" + bytes(8),
        b"\x08\0",
        b"\xff" + bytes(8),
        command(b"") * (MAX_COMMANDS + 1),
    ],
)
def test_what_is_no_frame_or_too_large_ends_before_its_body_is_there(data: bytes) -> None:
    messages = Messages(LIMIT)
    messages.feed(data)
    with pytest.raises(ZmtpError):
        taken(messages)


def test_a_message_at_the_limit_passes() -> None:
    messages = Messages(LIMIT)
    messages.feed(head(LIMIT) + bytes(LIMIT))
    assert taken(messages) == [bytes(LIMIT)]


@given(st.binary(max_size=300), CUTS)
def test_any_bytes_are_messages_or_an_error(data: bytes, cuts: list[int]) -> None:
    """However they are cut: the same messages come before the same end."""
    found = []
    for pieces, most in ((pieces_of(data, cuts), 2), ([data], 100), ([data], 1)):
        messages: Messages = Messages(LIMIT)
        got: list[bytes | None] = []
        try:
            for piece in pieces:
                messages.feed(piece)
                while more := messages.take(most):
                    got += more
        except ZmtpError:
            got.append(None)
        found.append((got, messages.answers, messages.multipart))
    assert found[0] == found[1] == found[2]
