"""The worker's end of its protocol, in plain Python: frames on its socket, and msgpack without a library.

A library would cost a cold jail 24 ms and 5 MiB; this costs under one. It knows exactly what the protocol allows:
nil, booleans, 64-bit integers, doubles, strings, arrays and maps with string keys. `pack` is at the same time the
check that a handler returned JSON (HANDLER-07).

Source: docs/design/wire.md section 2; schemas/WORKER.md.
"""

from __future__ import annotations

from _struct import Struct
from _struct import error as TooShort  # type: ignore[attr-defined] # which its stub lacks

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: The worker's socket.
FD = 3
#: One read of the socket (bytes); larger buffers would come from mmap each time.
READ_BYTES = 65536
#: One frame in either direction (bytes).
MAX_FRAME = 8 << 20
#: Levels of maps and arrays in one value; deeper values (and cycles) are refused. The bus allows 64 with its frames.
MAX_DEPTH = 60
#: Longer keys are decoded again each time, so that a caller cannot fill the cache with large strings.
_CACHED_KEY_BYTES = 32
_MAX_CACHED_KEYS = 1024
_INFINITY = float("inf")

#: A double, behind its first byte 0xCB. It must be finite.
pack_double = Struct(">Bd").pack

_keys: dict[bytes, str] = {}


class BadValue(Exception):
    """A value that is not JSON. `path` leads to it, outermost first, as it will be shown."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"output{''.join(self.path)}: {self.reason}"


# --- bytes to value -------------------------------------------------------------------------------------------------


def unpack(data: bytes) -> Any:
    """One complete msgpack value. Raises ValueError when `data` is not exactly one value of the protocol."""
    try:
        value, at = _unpack(data, 0)
    except (IndexError, UnicodeDecodeError, RecursionError, TooShort) as error:
        raise ValueError(f"not msgpack: {error}") from None
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes after the value")
    return value


def opened(data: bytes, at: int, fields: int) -> tuple[dict[str, Any], int]:
    """So many fields of a frame, the first one at `at`, and where the others begin. Raises ValueError."""
    try:
        return _map(data, at, fields)
    except (IndexError, UnicodeDecodeError, RecursionError, TooShort) as error:
        raise ValueError(f"not msgpack: {error}") from None


def others(data: bytes, at: int, count: int) -> dict[str, Any]:
    """The fields of a frame behind those that were opened. Raises ValueError when they do not end the frame."""
    try:
        found, end = _map(data, at, count)
    except (IndexError, UnicodeDecodeError, RecursionError, TooShort) as error:
        raise ValueError(f"not msgpack: {error}") from None
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes after the value")
    return found


def value_at(data: bytes, at: int) -> Any:
    """The value that begins at `at`, whatever follows. Raises ValueError."""
    try:
        return _unpack(data, at)[0]
    except (IndexError, UnicodeDecodeError, RecursionError, TooShort) as error:
        raise ValueError(f"not msgpack: {error}") from None


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    first = data[at]
    at += 1
    if first < 0x80:
        return first, at
    if first >= 0xE0:
        return first - 0x100, at
    if first >= 0xC0:
        return _WIDE[first - 0xC0](data, at)
    if first >= 0xA0:
        end = at + first - 0xA0
        return _text(data, at, end), end
    if first >= 0x90:
        return _array(data, at, first - 0x90)
    return _map(data, at, first - 0x80)


def _text(data: bytes, at: int, end: int) -> str:
    if end > len(data):
        raise ValueError("a string is longer than the frame")
    return str(data[at:end], "utf-8")


def _array(data: bytes, at: int, count: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    for _ in range(count):
        value, at = _unpack(data, at)
        items.append(value)
    return items, at


def _map(data: bytes, at: int, count: int) -> tuple[dict[str, Any], int]:
    result: dict[str, Any] = {}
    for _ in range(count):
        first = data[at]
        if 0xA0 <= first <= 0xBF:
            end = at + first - 0x9F
            raw = data[at + 1 : end]
            key = _keys.get(raw)
            if key is None:
                key = _new_key(data, at + 1, end)
        else:
            key, end = _unpack(data, at)
            if type(key) is not str:
                raise ValueError("a key is no string")
        first = data[end]  # the commonest values, without a call
        if first < 0x80:
            result[key] = first
            at = end + 1
        elif 0xA0 <= first <= 0xBF:
            at = end + first - 0x9F
            result[key] = str(data[end + 1 : at], "utf-8")
        elif first == 0xD9:
            at = end + 2 + data[end + 1]
            result[key] = str(data[end + 2 : at], "utf-8")
        else:
            result[key], at = _unpack(data, end)
    if at > len(data):
        raise ValueError("a string is longer than the frame")
    return result, at


def _new_key(data: bytes, at: int, end: int) -> str:
    key = _text(data, at, end)
    if end - at <= _CACHED_KEY_BYTES and len(_keys) < _MAX_CACHED_KEYS:
        _keys[data[at:end]] = key
    return key


def _fixed(value: Any) -> Callable[[bytes, int], tuple[Any, int]]:
    return lambda data, at: (value, at)


def _number(code: str) -> Callable[[bytes, int], tuple[Any, int]]:
    form = Struct(">" + code)
    return lambda data, at: (form.unpack_from(data, at)[0], at + form.size)


def _sized(width: int, body: Callable[[bytes, int, int], tuple[Any, int]]) -> Callable[[bytes, int], tuple[Any, int]]:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        start = at + width
        count = int.from_bytes(data[at:start], "big")
        if count > len(data):  # every item takes a byte, so this is a lie: refuse before building anything
            raise ValueError("a length is longer than the frame")
        return body(data, start, count)

    return read


def _string(data: bytes, at: int, count: int) -> tuple[Any, int]:
    return _text(data, at, at + count), at + count


def _refused(what: str) -> Callable[[bytes, int], tuple[Any, int]]:
    def read(data: bytes, at: int) -> tuple[Any, int]:
        raise ValueError(f"{what} is not allowed here")

    return read


_WIDE: tuple[Callable[[bytes, int], tuple[Any, int]], ...] = (
    _fixed(None), _refused("byte 0xc1"), _fixed(False), _fixed(True),
    _refused("bin"), _refused("bin"), _refused("bin"),
    _refused("ext"), _refused("ext"), _refused("ext"),
    *[_number(code) for code in "fdBHIQbhiq"],
    _refused("ext"), _refused("ext"), _refused("ext"), _refused("ext"), _refused("ext"),
    _sized(1, _string), _sized(2, _string), _sized(4, _string),
    _sized(2, _array), _sized(4, _array), _sized(2, _map), _sized(4, _map),
)  # fmt: skip


# --- value to bytes -------------------------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """A JSON value as msgpack. Raises BadValue, naming where in `value` the trouble is.

    Tuples become arrays; integers outside -2^63..2^64-1 become doubles; lone surrogates become U+FFFD.
    """
    out: list[bytes] = []
    try:
        _pack(value, out, 0)
    except RecursionError:
        raise BadValue(f"nested deeper than {MAX_DEPTH}") from None
    return out[0] if len(out) == 1 else b"".join(out)


def _pack(value: Any, out: list[bytes], depth: int) -> None:
    kind = type(value)
    if kind is str:
        out.append(pack_str(value))
    elif kind is int:
        out.append(_BYTE[value] if 0 <= value < 128 else _pack_int(value))
    elif value is None:
        out.append(b"\xc0")
    elif kind is bool:
        out.append(b"\xc3" if value else b"\xc2")
    elif kind is dict:
        _pack_map(value, out, depth)
    elif kind is list or kind is tuple:
        _pack_array(value, out, depth)
    elif kind is float:
        out.append(_pack_float(value))
    else:
        _pack_other(value, out, depth)


def _pack_map(value: dict[Any, Any], out: list[bytes], depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise BadValue(f"nested deeper than {MAX_DEPTH}, or contains itself")
    size = len(value)
    out.append(_BYTE[0x80 + size] if size < 16 else _wide(0xDE, size))
    for key, item in value.items():
        if not isinstance(key, str):
            raise BadValue(f"the key {_shown(key)} is no string")
        out.append(pack_str(key))
        if type(item) is str:  # the commonest value, without a call
            out.append(pack_str(item))
            continue
        try:
            _pack(item, out, depth + 1)
        except BadValue as error:
            error.path.insert(0, f"[{_shown(key)}]")
            raise


def _pack_array(value: list[Any] | tuple[Any, ...], out: list[bytes], depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise BadValue(f"nested deeper than {MAX_DEPTH}, or contains itself")
    size = len(value)
    out.append(_BYTE[0x90 + size] if size < 16 else _wide(0xDC, size))
    index = 0
    try:
        for item in value:
            _pack(item, out, depth + 1)
            index += 1
    except BadValue as error:
        error.path.insert(0, f"[{index}]")
        raise


def pack_str(value: str) -> bytes:
    """A string; what is no Unicode (lone surrogates) becomes U+FFFD."""
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        # Through UTF-16, so that two halves standing side by side become the character they are.
        raw = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
    size = len(raw)
    if size < 32:
        return _BYTE[0xA0 + size] + raw
    if size < 256:
        return b"\xd9" + _BYTE[size] + raw
    return _wide(0xDA, size) + raw


def _wide(first: int, size: int) -> bytes:
    """A length behind its first byte: two bytes, or four with the next first byte."""
    return _BYTE[first] + size.to_bytes(2, "big") if size < 65536 else _BYTE[first + 1] + size.to_bytes(4, "big")


def _pack_int(value: int) -> bytes:
    if -32 <= value < 128:
        return _BYTE[value & 255]
    for low, high, first, form in _INTEGERS:
        if low <= value < high:
            return form.pack(first, value)
    try:
        return pack_double(0xCB, float(value))
    except OverflowError:
        raise BadValue("an integer is larger than any double") from None


def _pack_float(value: float) -> bytes:
    if value != value or value == _INFINITY or value == -_INFINITY:
        raise BadValue(f"{value} is no JSON number")
    return pack_double(0xCB, value)


def _pack_other(value: Any, out: list[bytes], depth: int) -> None:
    """Subclasses of the JSON types count as those types (named tuples, ordered dicts, string and integer enums)."""
    if isinstance(value, str):
        out.append(pack_str(str.__str__(value)))
    elif isinstance(value, int):
        out.append(_pack_int(int.__index__(value)))
    elif isinstance(value, float):
        out.append(_pack_float(float.__float__(value)))
    elif isinstance(value, dict):
        _pack_map(value, out, depth)
    elif isinstance(value, list | tuple):
        _pack_array(value, out, depth)
    else:
        raise BadValue(f"a value of type {type(value).__name__} is no JSON value")


def _shown(key: object) -> str:
    text = ascii(key) if isinstance(key, str | int | float | bool | None) else type(key).__name__
    return text if len(text) <= 60 else text[:57] + "..."


_BYTE = [bytes([i]) for i in range(256)]
#: From which number to below which other one, the first byte, and its form with the number.
_INTEGERS = [
    (0, 1 << 8, 0xCC, Struct(">BB")), (0, 1 << 16, 0xCD, Struct(">BH")),
    (0, 1 << 32, 0xCE, Struct(">BI")), (0, 1 << 64, 0xCF, Struct(">BQ")),
    (-(1 << 7), 0, 0xD0, Struct(">Bb")), (-(1 << 15), 0, 0xD1, Struct(">Bh")),
    (-(1 << 31), 0, 0xD2, Struct(">Bi")), (-(1 << 63), 0, 0xD3, Struct(">Bq")),
]  # fmt: skip


# --- frames: four bytes of length before each (schemas/WORKER.md section 2) -----------------------------------------


def framed(body: bytes) -> bytes:
    """A frame with its length before it."""
    return len(body).to_bytes(4, "little") + body


class Frames:
    """Makes frames of what has been read. A long frame is copied once, however many reads it takes."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._have = 0
        self._want = 4

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are complete now, without their lengths. Raises ValueError for one that is too long."""
        if not self._have and len(data) - 4 == int.from_bytes(data[:4], "little"):
            return [data[4:]]  # most reads have one frame
        if self._have:
            self._chunks.append(data)
            self._have += len(data)
            if self._have < self._want:
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
        frames: list[bytes] = []
        at, end, self._want = 0, len(data), 4
        while end - at >= 4:
            body = at + 4
            size = int.from_bytes(data[at:body], "little")
            if size > MAX_FRAME:
                raise ValueError(f"frame of {size} bytes")
            if body + size > end:
                self._want = 4 + size
                break
            at = body + size
            frames.append(data[body:at])
        self._have = end - at
        if at < end:
            self._chunks.append(data[at:])
        return frames
