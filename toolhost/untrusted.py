"""Checks values that come out of a jail or from the bus, before anything opens them. Pure."""

from __future__ import annotations

import math
import struct
from typing import Final

from goondan.schemas.wire.blobs import MAX_OUTPUT_BYTES
from goondan.schemas.wire.msgpack_heads import HEADS, MAP, OTHER, SCALAR, STRING

#: The most levels of maps and arrays in one output. A payload may have 64; the frames around the output need the rest.
MAX_OUTPUT_DEPTH: Final = 60
#: The most values in one output, keys included. 200,000 take 50 ms to walk, and 15 MiB in a receiver that decodes them.
MAX_ELEMENTS: Final = 200_000


class Violation(Exception):
    """The worker broke the protocol. The message says how, without the content that it sent.

    `code` is the error code of its calls: E_TOOL_LIMIT when something was too large, otherwise E_TOOL_CRASHED.
    """

    def __init__(self, message: str, code: str = "E_TOOL_CRASHED") -> None:
        super().__init__(message)
        self.code = code


_TOO_EARLY: Final = "the output ends too early"
_FLOATS: Final = {0xCA: struct.Struct(">f").unpack_from, 0xCB: struct.Struct(">d").unpack_from}


def check_json(data: bytes) -> None:
    """Raise Violation unless `data` is one JSON value as msgpack.

    Refused are: bin and ext types, keys that are no strings, bad UTF-8, NaN and infinities, more than MAX_OUTPUT_DEPTH
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
    """The end of the value."""
    at = 0
    left = 1  # values that are missing in the innermost container, keys included
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
        kind, width, size = HEADS[first]
        at += 1
        if width:
            size = int.from_bytes(data[at : at + width], "big") * (2 if kind == MAP else 1)
            at += width
        if size > len(data) - at:  # every value in a container takes a byte
            raise Violation(_TOO_EARLY)
        if kind == STRING:
            str(data[at : at + size], "utf-8")
            at += size
        elif keys and left & 1:
            raise Violation("a key in the output is no string")
        elif kind == SCALAR:
            if first in _FLOATS and not math.isfinite(_FLOATS[first](data, at)[0]):
                raise Violation("a number in the output is not finite")
            at += size
        else:
            outer.append((left, keys))
            left, keys = size, _is_map(kind, len(outer))


def _is_map(kind: int, depth: int) -> bool:
    """Whether a container is a map. Raises Violation for a value that is no container, and for one container too
    many.
    """
    if kind == OTHER:
        raise Violation("the output has a type that is not JSON")
    if depth > MAX_OUTPUT_DEPTH:
        raise Violation(f"the output is nested deeper than {MAX_OUTPUT_DEPTH}")
    return kind == MAP


def output_limit(output_mb: int) -> int:
    """The largest output (bytes): the tool's outputMb, and not more than the bus carries."""
    return min(output_mb << 20, MAX_OUTPUT_BYTES)
