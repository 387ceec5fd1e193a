"""The worker's own msgpack against the library that the host uses."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.toolhost.calls.untrusted import MAX_OUTPUT_DEPTH, check_json
from goondan.toolhost.inside import wire

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=15
)


@given(values)
def test_both_write_the_same(value: Any) -> None:
    assert decode(wire.pack(value)) == value
    check_json(wire.pack(value))


@given(values)
def test_both_read_the_same(value: Any) -> None:
    assert wire.unpack(encode(value)) == value


@pytest.mark.parametrize("size", [0, 15, 16, 31, 32, 255, 256, 65535, 65536])
def test_every_width_of_length(size: int) -> None:
    for value in ("x" * size, [1] * size, {str(n): n for n in range(size)}):
        assert decode(wire.pack(value)) == value
        assert wire.unpack(encode(value)) == value


@pytest.mark.parametrize(
    "value",
    [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1, -1, -32, -33, -128, -129, -32768, -32769,
     -(2**31), -(2**31) - 1, -(2**63)],
)  # fmt: skip
def test_integers_take_the_shortest_form(value: int) -> None:
    assert wire.pack(value) == encode(value)


@given(st.binary(max_size=60))
def test_garbage_is_a_value_error(data: bytes) -> None:
    try:
        value = wire.unpack(data)
    except ValueError:
        return
    assert decode(data) == value or value != value  # NaN, which only our own host could send


def test_lengths_that_lie_build_nothing() -> None:
    for data in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xa5ab", b"\xcf\x00"):
        with pytest.raises(ValueError, match=r"longer than the frame|not msgpack"):
            wire.unpack(data)


def test_nesting_is_no_crash() -> None:
    with pytest.raises(ValueError, match="not msgpack"):
        wire.unpack(b"\x91" * 100_000)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"x", "output: a value of type bytes is no JSON value"),
        ({"a": [1, {2}]}, "output['a'][1]: a value of type set is no JSON value"),
        ({"a": {1: 2}}, "output['a']: the key 1 is no string"),
        ({(1, 2): 2}, "output: the key tuple is no string"),
        ([math.nan], "output[0]: nan is no JSON number"),
        (-math.inf, "output: -inf is no JSON number"),
        (10**400, "output: an integer is larger than any double"),
        ({"k" * 100: object()}, "output['" + "k" * 56 + "...]: a value of type object is no JSON value"),
    ],
)
def test_what_is_no_json_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(wire.BadValue) as caught:
        wire.pack(value)
    assert str(caught.value) == message


def test_depth_and_cycles() -> None:
    value: Any = 1
    for _ in range(wire.MAX_DEPTH):
        value = [value]
    wire.pack(value)
    with pytest.raises(wire.BadValue, match=f"deeper than {wire.MAX_DEPTH}"):
        wire.pack([value])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(wire.BadValue, match="contains itself"):
        wire.pack(loop)
    assert wire.MAX_DEPTH == MAX_OUTPUT_DEPTH


def test_surrogates() -> None:
    assert decode(wire.pack("a\ud800b\udfff")) == "a\ufffdb\ufffd"
    assert decode(wire.pack("\ud83d\udc4d")) == "\U0001f44d"
    assert decode(wire.pack({"\ud800": 1})) == {"\ufffd": 1}


def test_integers_beyond_64_bits_become_doubles() -> None:
    assert decode(wire.pack([2**64, -(2**63) - 1])) == [2.0**64, -(2.0**63)]


@given(
    st.dictionaries(st.text(max_size=40), st.text() | st.integers(-9, 1 << 40) | st.lists(st.booleans()), max_size=15),
    st.integers(0, 15),
)
def test_a_frame_can_be_read_in_two_pieces(frame: dict[str, object], first: int) -> None:
    data = wire.pack(frame)
    left = len(frame) - min(first, len(frame))
    opened, at = wire.opened(data, 1, len(frame) - left)
    assert list(opened.items()) == list(frame.items())[: len(frame) - left]
    assert opened | wire.others(data, at, left) == wire.unpack(data) == frame
    with pytest.raises(ValueError, match="after the value"):
        wire.others(data + b"\xc0", at, left)
