"""Bytes to frames and back, and the walk that counts what a payload claims to hold."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from goondan.schemas.wire.codec import (
    MAX_DEPTH,
    MAX_FRAME_BYTES,
    MAX_RELAYED_BYTES,
    FrameError,
    check_depth,
    check_json,
    check_values,
    decode,
    describe_decode_error,
    encode,
    from_raw,
    replace_surrogates,
    to_raw,
)
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import Frame, Shutdown


def error_of(caught: pytest.ExceptionInfo[GoondanError]) -> tuple[str, str]:
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "no traceback of msgspec behind it"
    return caught.value.info.code, caught.value.info.message


def sized(data: bytes, size: int) -> bytes:
    """The frame `ping` whose payload makes it this many bytes long."""
    frame = encode(Frame("ping", id="f1", payload=to_raw(data)))
    return encode(Frame("ping", id="f1", payload=to_raw(data + bytes(size - len(frame)))))


# --- frames


def test_a_frame_may_be_as_long_as_the_limit_and_no_byte_longer() -> None:
    data = sized(bytes(1 << 19), MAX_FRAME_BYTES)
    assert len(data) == MAX_FRAME_BYTES == 1 << 20
    assert decode(data).id == "f1"
    longer = Frame("ping", id="f1x", payload=decode(data).payload)
    with pytest.raises(FrameError) as caught:
        encode(longer)
    assert error_of(caught) == ("E_FRAME_TOO_LARGE", f"frame of {MAX_FRAME_BYTES + 1} bytes, limit {MAX_FRAME_BYTES}")
    data = msgspec.msgpack.encode(longer)
    with pytest.raises(FrameError) as caught:
        decode(data)
    assert error_of(caught) == ("E_FRAME_TOO_LARGE", f"frame of {MAX_FRAME_BYTES + 1} bytes, limit {MAX_FRAME_BYTES}")
    assert decode(data, MAX_RELAYED_BYTES).id == "f1x", "the broker's stamps may make it longer"
    assert MAX_RELAYED_BYTES == MAX_FRAME_BYTES + 65536


def test_too_long_is_said_before_anything_is_read() -> None:
    with pytest.raises(FrameError) as caught:
        decode(b"\xc1" * 11, 10)
    assert error_of(caught) == ("E_FRAME_TOO_LARGE", "frame of 11 bytes, limit 10")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "truncated"),
        (b"\xc0", "Expected `object`"),
        (b"\x81\xa4type\x05", "Expected `str`, got `int`"),
        (b"\x81\xa4type\xa2\xff\xfe", "a string is not UTF-8"),
        (b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 5000 + b"\xc0", "nested too deep"),
    ],
)
def test_bad_bytes_are_one_error_that_says_what_is_wrong(data: bytes, said: str) -> None:
    with pytest.raises(FrameError) as caught:
        decode(data)
    code, message = error_of(caught)
    assert code == "E_FRAME_INVALID"
    assert message.startswith("not a frame: ")
    assert said in message


def test_a_description_is_short_and_of_its_own_words() -> None:
    assert describe_decode_error(ValueError("x" * 300)) == "x" * 200
    assert describe_decode_error(RecursionError("x")) == "nested too deep"


# --- payloads


def test_a_payload_is_what_it_is_opened_as() -> None:
    raw = to_raw(Shutdown(600, "restart"))
    assert type(raw) is Raw
    for _ in range(2):  # the second time with the same decoder
        assert from_raw(raw, Shutdown) == from_raw(bytes(raw), Shutdown) == Shutdown(600, "restart")
        assert from_raw(raw, dict) == {"gracePeriodMs": 600, "reason": "restart"}
    with pytest.raises(FrameError) as caught:
        from_raw(to_raw([1]), Shutdown)
    code, message = error_of(caught)
    assert code == "E_FRAME_INVALID"
    assert message.startswith("payload is no Shutdown: Expected `object`, got `array`")
    with pytest.raises(FrameError) as caught:
        from_raw(to_raw(["x"]), list[int])
    assert error_of(caught)[1].startswith("payload is no list: Expected `int`, got `str`")


def test_a_kind_that_was_never_met_before() -> None:
    class Fresh(msgspec.Struct):
        a: int

    raw = to_raw({"a": 1})
    assert [from_raw(raw, Fresh), from_raw(raw, Fresh)] == [Fresh(1), Fresh(1)]
    kind: Any = int | str
    with pytest.raises(FrameError) as caught:
        from_raw(raw, kind)
    assert error_of(caught)[1].startswith("payload is no int | str: ")


def test_a_payload_that_nests_too_deep_is_refused_whatever_it_is_opened_as() -> None:
    deep = b"\x91" * MAX_DEPTH
    assert from_raw(Raw(deep + b"\xc0"), list)
    with pytest.raises(FrameError) as caught:
        from_raw(Raw(b"\x91" + deep + b"\xc0"), list)
    assert error_of(caught) == ("E_FRAME_INVALID", "payload is no list: nested deeper than 64")


@pytest.mark.parametrize("value", [None, True, 3, "x", 1.5, [], {}, [1, [None, {"a": [-0.0, "b"]}]], 2**64 - 1])
def test_what_is_json(value: Any) -> None:
    check_json(value, "it")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([(2,), 1], "a value of type tuple"),
        ([b"x", [1]], "a value of type bytes"),
        (b"x", "a value of type bytes"),
        ([1, (2,)], "a value of type tuple"),
        ({"a": {"b": {1}}}, "a value of type set"),
        (nan, "a number that is not finite"),
        ([[-inf]], "a number that is not finite"),
        ({1: "x"}, "a key that is no text"),
        ({"a": 1, None: 2}, "a key that is no text"),
        ([{b"k": 1}], "a key that is no text"),
    ],
)
def test_what_is_no_json(value: Any, found: str) -> None:
    with pytest.raises(FrameError) as caught:
        check_json(value, "the answer")
    assert error_of(caught) == ("E_FRAME_INVALID", f"the answer is no JSON value: it has {found}")


# --- what a payload claims

#: Every scalar of the format, with each width of its length.
SCALARS = [
    b"\x00", b"\x7f", b"\xe0", b"\xff", b"\xc0", b"\xc2", b"\xc3",
    b"\xa0", b"\xa3abc", b"\xbf" + b"\x91" * 31,
    b"\xc4\x02\x91\x91", b"\xc5\x00\x02\x91\x91", b"\xc6\x00\x00\x00\x02\x91\x91",
    b"\xc5\x01\x00" + b"\x91" * 256, b"\xc6\x00\x01\x00\x00" + b"\x91" * 65536,
    b"\xc7\x02\x91\x91\x91", b"\xc8\x00\x02\x91\x91\x91", b"\xc9\x00\x00\x00\x02\x91\x91\x91",
    b"\xca" + b"\x91" * 4, b"\xcb" + b"\x91" * 8,
    b"\xcc\x91", b"\xcd" + b"\x91" * 2, b"\xce" + b"\x91" * 4, b"\xcf" + b"\x91" * 8,
    b"\xd0\x91", b"\xd1" + b"\x91" * 2, b"\xd2" + b"\x91" * 4, b"\xd3" + b"\x91" * 8,
    b"\xd4" + b"\x91" * 2, b"\xd5" + b"\x91" * 3, b"\xd6" + b"\x91" * 5, b"\xd7" + b"\x91" * 9,
    b"\xd8" + b"\x91" * 17,
    b"\xd9\x02\x91\x91", b"\xda\x00\x02\x91\x91", b"\xdb\x00\x00\x00\x02\x91\x91",
    b"\xda\x01\x00" + b"\x91" * 256,
]  # fmt: skip

#: bytes, how deep maps and arrays nest in them, how many values they claim
Encoded = tuple[bytes, int, int]


def heads(fixed: int, wide: int, count: int) -> list[bytes]:
    """The ways in which a map or an array can say that it has so many members."""
    made = [bytes([wide]) + count.to_bytes(2, "big"), bytes([wide + 1]) + count.to_bytes(4, "big")]
    return [bytes([fixed | count]), *made] if count < 16 else made


def encoded(draw: st.DrawFn, levels: int) -> Encoded:
    if levels == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(SCALARS)), 0, 0
    is_map = draw(st.booleans())
    members = [encoded(draw, levels - 1) for _ in range(draw(st.integers(0, 3)) * (2 if is_map else 1))]
    count = len(members) // 2 if is_map else len(members)
    head = draw(st.sampled_from(heads(0x80, 0xDE, count) if is_map else heads(0x90, 0xDC, count)))
    depth = 1 + max((member[1] for member in members), default=0)
    return head + b"".join(member[0] for member in members), depth, len(members) + sum(m[2] for m in members)


@given(st.composite(lambda draw: encoded(draw, 4))())
def test_depth_and_number_are_counted_whatever_the_spelling(value: Encoded) -> None:
    data, depth, values = value
    check_values(data, values, depth)
    check_depth(data, depth)
    if values:
        with pytest.raises(ValueError, match="more values than there may be"):
            check_values(data, values - 1, depth)
    if depth:
        with pytest.raises(ValueError, match=f"nested deeper than {depth - 1}"):
            check_values(data, values, depth - 1)
        with pytest.raises(ValueError, match=f"nested deeper than {depth - 1}"):
            check_depth(data, depth - 1)


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda scalar: scalar[:6].hex())
def test_what_looks_like_a_container_inside_a_scalar_is_none(scalar: bytes) -> None:
    """Two of them and then an array: who skips a byte too many or too few does not find the array."""
    data = b"\x93" + scalar + scalar + b"\x91\xc0"
    check_values(data, 4, 2)
    with pytest.raises(ValueError, match="more values"):
        check_values(data, 3, 2)
    with pytest.raises(ValueError, match="nested deeper than 1"):
        check_values(data, 4, 1)


def test_many_members_are_as_many_in_each_width() -> None:
    for count in (15, 16, 255, 256, 65535):
        for head in heads(0x90, 0xDC, count):
            check_values(head + b"\xc0" * count, count)
            with pytest.raises(ValueError, match="more values"):
                check_values(head + b"\xc0" * count, count - 1)
        for head in heads(0x80, 0xDE, count):
            check_values(head + b"\xc0" * 2 * count, 2 * count)
            with pytest.raises(ValueError, match="more values"):
                check_values(head, 2 * count - 1)


def test_a_claim_counts_although_its_members_are_missing() -> None:
    with pytest.raises(ValueError, match="more values"):
        check_values(b"\xdd\xff\xff\xff\xff", 1 << 20)
    check_values(b"\xdd\x00\x00\x00\x05", 5)
    check_values(b"\xc6\xff\xff\xff\xff", 0)
    check_values(b"\xc1\x92\xc0", 0)  # a byte that means nothing: the value ends there


def test_the_usual_limit_of_depth() -> None:
    check_depth(b"\x91" * 64 + b"\xc0")
    check_values(b"\x91" * 64 + b"\xc0", 64)
    check_depth(b"\xde\x00\x01\xa1a" * 64 + b"\xc0")
    for data in (b"\x91" * 65 + b"\xc0", b"\x81\xa1a" * 65 + b"\xc0", b"\xdf\x00\x00\x00\x01\xa1a" * 65 + b"\xc0"):
        with pytest.raises(ValueError, match="nested deeper than 64"):
            check_depth(data)
        with pytest.raises(ValueError, match="nested deeper than 64"):
            check_values(data, 1000)
    check_depth(b"\xdc\x00\x40" + b"\x90" * 64)  # many side by side are not deep
    check_depth(b"\xc4\x50" + b"\x91" * 80)


# --- surrogates


def test_halves_of_surrogate_pairs_are_replaced_wherever_they_stand() -> None:
    assert replace_surrogates("a\ud800b\udfff") == "a\ufffdb\ufffd"
    assert replace_surrogates(["\udc00", {"\ud900": ["한\udabc"]}]) == ["\ufffd", {"\ufffd": ["한\ufffd"]}]
    for value in ("plain", "한글 👍", 3, None, 1.5, True):
        assert replace_surrogates(value) == value
