"""Encodes and decodes frames, with the limits for hostile senders.

`HEADS` says what a msgpack value's first byte means. Two walks use it: the one here counts and measures any value, that
of toolhost/calls/untrusted.py demands that a value is JSON. Nearly every value is small and nested little: msgspec
knows of such a one whether it is JSON, forty times as fast as a walk.

The order of checks: first the size (nothing is parsed), then msgspec (which skips the payload without building it),
then version and type. Every fault of the bytes becomes a FrameError, also the RecursionError (deep nesting) and the
UnicodeDecodeError that msgspec lets through.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md; docs/design/wire.md section 2; PROTOCOL.md "What a
receiver checks itself"; replayed from schemas/vectors/.
"""

from __future__ import annotations

import re
from math import isfinite
from sys import float_info
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Raw

from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import Frame

#: Kinds of values. OTHER is what JSON does not have: bin, ext, and the byte that is never used.
STRING, SCALAR, LIST, MAP, OTHER = range(5)

#: For each first byte: the kind, how many bytes a length has that follows, and the size without that length. A size is
#: bytes, items of a list, or keys and values of a map. A length that follows counts pairs of a map.
HEADS: Final = (
    *[(SCALAR, 0, 0)] * 0x80,
    *((MAP, 0, size * 2) for size in range(16)),
    *((LIST, 0, size) for size in range(16)),
    *((STRING, 0, size) for size in range(32)),
    (SCALAR, 0, 0), (OTHER, 0, 0), (SCALAR, 0, 0), (SCALAR, 0, 0),
    (OTHER, 1, 0), (OTHER, 2, 0), (OTHER, 4, 0), (OTHER, 1, 1), (OTHER, 2, 1), (OTHER, 4, 1),
    *((SCALAR, 0, size) for size in (4, 8, 1, 2, 4, 8, 1, 2, 4, 8)),
    *((OTHER, 0, size) for size in (2, 3, 5, 9, 17)),
    (STRING, 1, 0), (STRING, 2, 0), (STRING, 4, 0), (LIST, 2, 0), (LIST, 4, 0), (MAP, 2, 0), (MAP, 4, 0),
    *[(SCALAR, 0, 0)] * 0x20,
)  # fmt: skip


# --- frames -----------------------------------------------------------------------------------------------------------

#: The largest frame (bytes). Larger payloads go by reference (docs/design/wire.md section 7).
MAX_FRAME_BYTES: Final = 1 << 20
#: The largest frame after the broker has stamped it: sender, instance, workdir and chain add at most the difference.
MAX_RELAYED_BYTES: Final = MAX_FRAME_BYTES + (64 << 10)
#: The deepest nesting of maps and arrays inside a payload.
MAX_DEPTH: Final = 64

T = TypeVar("T")

decode_frame = msgspec.msgpack.Decoder(Frame).decode
"""Bytes to a frame without the size check and with msgspec's own errors (DECODE_ERRORS), for the hottest loop."""
_encoder = msgspec.msgpack.Encoder()
encode_value = _encoder.encode
"""A value (struct, dict, …) to msgpack bytes."""

# The errors that msgspec raises for bad bytes (docs/design/wire.md section 2).
DECODE_ERRORS: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError, ValueError)


class FrameError(GoondanError):
    """The bytes are no valid frame."""


def decode(data: bytes, max_bytes: int = MAX_FRAME_BYTES) -> Frame:
    """Decode one message part into a frame. The payload stays encoded.

    Raises FrameError: E_FRAME_TOO_LARGE (nothing was parsed) or E_FRAME_INVALID.
    """
    if len(data) > max_bytes:
        message = f"frame of {len(data)} bytes, limit {max_bytes}"
        raise FrameError(error_payload("E_FRAME_TOO_LARGE", message))
    try:
        return decode_frame(data)
    except DECODE_ERRORS as error:
        if (without := without_nil(data)) is not None:
            return decode(without)
        raise FrameError(error_payload("E_FRAME_INVALID", f"not a frame: {describe_decode_error(error)}")) from None


def without_nil(data: bytes) -> bytes | None:
    """The same frame without its fields that are nil: those mean what absent ones mean, but not every type takes nil.
    None: there is none, or the bytes are no map of texts.
    """
    try:
        fields = msgspec.msgpack.decode(data, type=dict[str, Raw])
    except DECODE_ERRORS:
        return None
    kept = {name: value for name, value in fields.items() if bytes(value) != b"\xc0"}
    return encode_value(kept) if len(kept) < len(fields) else None


def encode(frame: Frame) -> bytes:
    """Encode a frame, with the header fields in canonical order and without defaults.

    Raises FrameError E_FRAME_TOO_LARGE, so that a large frame fails at its sender and not on the bus.
    """
    data = encode_value(frame)
    if len(data) > MAX_FRAME_BYTES:
        message = f"frame of {len(data)} bytes, limit {MAX_FRAME_BYTES}"
        raise FrameError(error_payload("E_FRAME_TOO_LARGE", message))
    return data


def to_raw(value: Any) -> Raw:
    """A value as a payload."""
    return Raw(encode_value(value))


_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def from_raw(raw: Raw | bytes, kind: type[T], *, checked: bool = False) -> T:
    """Open a payload as `kind`, after checking its depth. `checked`: it was checked, as a part of another payload.

    Raises FrameError E_FRAME_INVALID for anything that does not fit.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        if not checked:
            check_depth(bytes(raw))
        return decoder.decode(raw)  # type: ignore[no-any-return]
    except DECODE_ERRORS as error:
        message = f"payload is no {getattr(kind, '__name__', kind)}: {describe_decode_error(error)}"
        raise FrameError(error_payload("E_FRAME_INVALID", message)) from None


def check_json(value: Any, what: str) -> None:
    """Raise FrameError E_FRAME_INVALID when a decoded value is no JSON value. `what` names the value in the message.

    msgpack has values that JSON has not: bytes, ext types (timestamps among them), NaN and infinities, keys that are no
    texts. This check is for the parts of a payload that a struct declares as Any (PROTOCOL.md "What a receiver checks
    itself").
    """
    found = _not_json(value)
    if found:
        raise FrameError(error_payload("E_FRAME_INVALID", f"{what} is no JSON value: it has {found}"))


#: A larger value is not decoded only to be looked at: its objects may take a hundred times its bytes.
_SMALL_BYTES: Final = 64 << 10
_Finite = Annotated[float, Meta(ge=-float_info.max, le=float_info.max)]
# Each level makes the type twice as large. Values with more levels are rare.
_Scalar = None | bool | int | _Finite | str
_Level1 = _Scalar | list[_Scalar] | dict[str, _Scalar]
_Level2 = _Scalar | list[_Level1] | dict[str, _Level1]
_Level3 = _Scalar | list[_Level2] | dict[str, _Level2]
_Level4 = _Scalar | list[_Level3] | dict[str, _Level3]
_decode_small = msgspec.msgpack.Decoder(_Level4).decode


def is_small_json(data: bytes) -> bool:
    """Whether these bytes are one JSON value, small and nested little. False may mean anything."""
    if len(data) > _SMALL_BYTES:
        return False
    try:
        _decode_small(data)
    except DECODE_ERRORS:
        return False
    return True


def _not_json(value: Any) -> str:
    """The part of `value` that is not JSON, in words. "": there is none. A loop, because a payload may have a million
    values.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if kind is str or kind is int or kind is bool or item is None:
            continue
        if kind is list:
            waiting += item
        elif kind is dict:
            if any(type(key) is not str for key in item):
                return "a key that is no text"
            waiting += item.values()
        elif kind is not float:
            return f"a value of type {kind.__name__}"
        elif not isfinite(item):
            return "a number that is not finite"
    return ""


_NOT_CONTAINERS: Final = bytes(b for b in range(256) if not (0x80 <= b <= 0x9F or 0xDC <= b <= 0xDF))


def check_depth(data: bytes, limit: int = MAX_DEPTH) -> None:
    """Raise ValueError when maps and arrays nest deeper than `limit`.

    The depth cannot exceed the number of bytes that may open a container. C code counts them. Only when this number is
    over the limit, the value is walked, without recursion.
    """
    if len(data) <= limit or len(data.translate(None, _NOT_CONTAINERS)) <= limit:
        return
    _walk(data, limit, len(data))


def check_values(data: bytes, values: int, limit: int = MAX_DEPTH) -> None:
    """Raise ValueError when `data` announces more than `values` values, keys included, or nests deeper than `limit`."""
    _walk(data, limit, values)


def _walk(data: bytes, limit: int, values: int) -> None:
    open_items: list[int] = [1]  # how many values are missing in each open container, outermost first
    at, end = 0, len(data)
    while open_items and at < end:
        if open_items[-1] == 0:
            open_items.pop()
            continue
        open_items[-1] -= 1
        kind, width, size = HEADS[data[at]]
        at += 1
        if width:
            size += int.from_bytes(data[at : at + width], "big") * (2 if kind == MAP else 1)
            at += width
        if kind != LIST and kind != MAP:
            at += size
            continue
        if len(open_items) > limit:
            raise ValueError(f"nested deeper than {limit}")
        values -= size
        if values < 0:
            raise ValueError("more values than there may be")
        open_items.append(size)


_SURROGATE: Final = "[\ud800-\udfff]"  # compiled when the first one comes, if ever


def replace_surrogates(value: Any) -> Any:
    """Replace lone surrogates by U+FFFD, also in lists and dicts. For places where JSON enters (CLI, model
    adapters).
    """
    if isinstance(value, str):
        return re.sub(_SURROGATE, "\ufffd", value) if not value.isascii() else value
    if isinstance(value, list):
        return [replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    return value


def describe_decode_error(error: BaseException) -> str:
    """The fault of the bytes, in at most 200 characters."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, UnicodeDecodeError):
        return "a string is not UTF-8"
    return str(error)[:200]
