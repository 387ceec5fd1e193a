"""What comes out of a jail, bytes to frames: pure, and the first wall against a hostile worker.

Rules.
- A frame's length is checked before its bytes are kept; at most one frame is kept per jail.
- A frame that is not one of the protocol, breaks a limit or comes at the wrong time is a Violation: the caller ends the
  jail. There is no second chance, because a worker of ours never does it.
- Log, progress and ask frames have a budget; a worker that keeps to WORKER.md stays far below it.
- `output` is not decoded: it is walked (`check_json`) and forwarded as it came.

Source: sandbox.md section 5; schemas/WORKER.md; requirement HANDLER-07.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from schemas.codec import DECODE_ERRORS
from schemas.worker_frames import Ask, LoadFailed, Log, Progress, Ready, Result, WorkerFrame

#: What a frame needs beside its output: names, ids, an error's texts (bytes).
FRAME_SLACK: Final = 64 << 10
#: Levels of maps and arrays in one output; the frames around it need the rest of the 64 that a payload may have.
MAX_OUTPUT_DEPTH: Final = 60
#: Values (keys included) in one output. 200,000 take 50 ms to walk and 15 MiB in a receiver that decodes them.
MAX_ELEMENTS: Final = 200_000
#: Log and progress frames at once, and then per second; the Python worker drops beyond 1,000 and 200 (and 20 a call).
NEWS_BURST: Final = 20_000
NEWS_PER_S: Final = 2_000
#: Bytes of such frames at once, and then per second.
NEWS_BYTES_BURST: Final = 64 << 20
NEWS_BYTES_PER_S: Final = 8 << 20

_decode = msgspec.msgpack.Decoder(WorkerFrame).decode


class Violation(Exception):
    """The worker broke the protocol; the message says how, without repeating what it sent.

    `code` is what its calls are answered with: E_TOOL_LIMIT when something was too large, else E_TOOL_CRASHED.
    """

    def __init__(self, message: str, code: str = "E_TOOL_CRASHED") -> None:
        super().__init__(message)
        self.code = code


class Channel:
    """The incoming half of one jail's socket."""

    __slots__ = ("_chunks", "_have", "_max_frame", "_news", "_news_at", "_news_bytes", "_want")

    def __init__(self, output_limit: int, now: float) -> None:
        self._max_frame = output_limit + FRAME_SLACK
        self._chunks: list[bytes] = []
        self._have = 0
        self._want = 4
        self._news = float(NEWS_BURST)
        self._news_bytes = float(NEWS_BYTES_BURST)
        self._news_at = now

    @property
    def kept(self) -> int:
        """Bytes of an incomplete frame."""
        return self._have

    def feed(self, data: bytes, now: float) -> list[WorkerFrame]:
        """The frames that `data` completes, in order. Raises Violation; the channel is of no use afterwards."""
        if self._chunks:
            self._chunks.append(data)
            self._have += len(data)
            if self._have < self._want:
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
        frames: list[WorkerFrame] = []
        at, end = 0, len(data)
        want = 4
        while end - at >= 4:
            size = int.from_bytes(data[at : at + 4], "little")
            if size > self._max_frame:
                message = f"the worker sent a frame of {size} bytes, limit {self._max_frame} (outputMb)"
                raise Violation(message, "E_TOOL_LIMIT")
            stop = at + 4 + size
            if stop > end:
                want = 4 + size
                break
            frame = self._frame(data[at + 4 : stop])
            if type(frame) is not Result:
                self._spend(frame, size, now)
            frames.append(frame)
            at = stop
        if at < end:
            self._chunks.append(data[at:] if at else data)
        self._have, self._want = end - at, want
        return frames

    def _frame(self, body: bytes) -> WorkerFrame:
        try:
            return _decode(body)  # type: ignore[no-any-return]
        except DECODE_ERRORS as error:
            raise Violation(f"the worker sent no frame of the protocol ({_reason(error)})") from None

    def _spend(self, frame: WorkerFrame, size: int, now: float) -> None:
        """Take the frame from the budget; Ready and LoadFailed come once and are the caller's to judge."""
        if not isinstance(frame, Log | Progress | Ask):
            return
        passed = max(0.0, now - self._news_at)
        self._news_at = now
        self._news = min(float(NEWS_BURST), self._news + passed * NEWS_PER_S) - 1
        self._news_bytes = min(float(NEWS_BYTES_BURST), self._news_bytes + passed * NEWS_BYTES_PER_S) - size
        if self._news < 0 or self._news_bytes < 0:
            raise Violation("the worker flooded its channel with log lines or questions", "E_TOOL_LIMIT")


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    return "a string is not UTF-8" if isinstance(error, UnicodeDecodeError) else type(error).__name__


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


__all__ = ["Channel", "LoadFailed", "Log", "Progress", "Ready", "Result", "Violation", "check_json"]
