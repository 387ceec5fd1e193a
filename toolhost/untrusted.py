"""Values that come out of a jail or from the bus, checked before anybody opens them. Pure."""

from __future__ import annotations

import struct
from typing import Final

from schemas.blobs import MAX_OUTPUT_BYTES

#: Levels of maps and arrays in one output; the frames around it need the rest of the 64 that a payload may have.
MAX_OUTPUT_DEPTH: Final = 60
#: Values (keys included) in one output. 200,000 take 50 ms to walk and 15 MiB in a receiver that decodes them.
MAX_ELEMENTS: Final = 200_000


class Violation(Exception):
    """The worker broke the protocol; the message says how, without repeating what it sent.

    `code` is what its calls are answered with: E_TOOL_LIMIT when something was too large, else E_TOOL_CRASHED.
    """

    def __init__(self, message: str, code: str = "E_TOOL_CRASHED") -> None:
        super().__init__(message)
        self.code = code


_double = struct.Struct(">d").unpack_from
_float = struct.Struct(">f").unpack_from
_INFINITE: Final = (float("inf"), float("-inf"))
_TOO_EARLY: Final = "the output ends too early"
# What a value's first byte says: a string, a value of one byte, another scalar of a fixed size, or a container.
_STRING, _ONE_BYTE, _SCALAR, _CONTAINER = range(4)
# first byte -> bytes that follow, for scalars that have some
_FIXED: Final = dict.fromkeys((0xC0, 0xC2, 0xC3), 0) | {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_KINDS: Final = bytes(
    _STRING
    if 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB
    else _ONE_BYTE
    if first <= 0x7F or first >= 0xE0
    else _SCALAR
    if first in _FIXED
    else _CONTAINER
    for first in range(256)
)


def check_json(data: bytes) -> None:
    """Raise Violation unless `data` is one JSON value as msgpack.

    Refused: bin and ext types, keys that are no strings, bad UTF-8, NaN and infinities, more than MAX_OUTPUT_DEPTH
    levels, more than MAX_ELEMENTS values, lengths beyond the end, bytes after the value.
    """
    try:
        end = _walk(data)
    except (IndexError, struct.error):
        raise Violation(_TOO_EARLY) from None
    except UnicodeDecodeError:
        raise Violation("a string in the output is not UTF-8") from None
    if end != len(data):
        raise Violation("the worker sent bytes after its output")


def _walk(data: bytes) -> int:
    """Where the value ends."""
    at = 0
    left = 1  # values still wanted by the innermost container; keys count too
    keys = False  # whether the innermost container is a map, whose values at even `left` are keys
    outer: list[tuple[int, bool]] = []
    budget = MAX_ELEMENTS
    while True:
        while left == 0:
            if not outer:
                return at
            left, keys = outer.pop()
        left -= 1
        budget -= 1
        if budget < 0:
            raise Violation(f"the output has more than {MAX_ELEMENTS} values", "E_TOOL_LIMIT")
        first = data[at]
        at += 1
        kind = _KINDS[first]
        if kind == _STRING:
            at = _string_end(data, at, first)
        elif keys and left & 1:
            raise Violation("a key in the output is no string")
        elif kind == _SCALAR:
            at = _scalar_end(data, at, first)
        elif kind == _CONTAINER:
            outer.append((left, keys))
            at, left, keys = _container(data, at, first, len(outer))


def _string_end(data: bytes, at: int, first: int) -> int:
    if first <= 0xBF:
        stop = at + first - 0xA0
    else:
        width = 1 << (first - 0xD9)
        stop = at + width + int.from_bytes(data[at : at + width], "big")
        at += width
    if stop > len(data):
        raise Violation(_TOO_EARLY)
    str(data[at:stop], "utf-8")
    return stop


def _scalar_end(data: bytes, at: int, first: int) -> int:
    if first == 0xCB or first == 0xCA:
        number = (_double if first == 0xCB else _float)(data, at)[0]
        if number != number or number in _INFINITE:
            raise Violation("a number in the output is not finite")
    at += _FIXED[first]
    if at > len(data):
        raise Violation(_TOO_EARLY)
    return at


def _container(data: bytes, at: int, first: int, depth: int) -> tuple[int, int, bool]:
    """Where what is in it begins, how many values that are, and whether it is a map."""
    if first <= 0x8F:
        count, is_map = (first & 0x0F) * 2, True
    elif first <= 0x9F:
        count, is_map = first & 0x0F, False
    elif first < 0xDC:
        raise Violation("the output has a type that is not JSON")
    else:
        width, is_map = 2 if first in (0xDC, 0xDE) else 4, first >= 0xDE
        count = int.from_bytes(data[at : at + width], "big") * (2 if is_map else 1)
        at += width
    if count > len(data) - at:  # every value takes a byte
        raise Violation(_TOO_EARLY)
    if depth > MAX_OUTPUT_DEPTH:
        raise Violation(f"the output is nested deeper than {MAX_OUTPUT_DEPTH}")
    return at, count, is_map


def output_limit(output_mb: int) -> int:
    """How many bytes an output may have: the tool's outputMb, and what the bus carries."""
    return min(output_mb << 20, MAX_OUTPUT_BYTES)
