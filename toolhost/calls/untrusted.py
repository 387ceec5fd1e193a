"""The first check of what comes out of a jail or from the bus: values, before anything opens them, and frames of a
worker. Pure.

Rules.
- A frame's length is checked before its bytes are kept; at most one frame is kept per jail.
- A frame that is not of the protocol, breaks a limit or comes at the wrong time is a Violation: the caller ends the
  jail. There is no second chance, because our own worker never sends such a frame.
- Log lines, progress, questions and news have an allowance; a worker that keeps to WORKER.md stays far below it.
- `output` is checked (untrusted.check_json) and forwarded as it came.

Source: docs/design/sandbox.md section 5; schemas/WORKER.md; requirement HANDLER-07.
"""

from __future__ import annotations

import math
import struct
from typing import Final

import msgspec

from goondan.schemas.wire.blobs import MAX_OUTPUT_BYTES
from goondan.schemas.wire.codec import DECODE_ERRORS, HEADS, MAP, OTHER, SCALAR, STRING, is_small_json
from goondan.schemas.worker.worker_frames import Ask, Log, LoginNeeded, News, Progress, Result, WorkerFrame

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
    if is_small_json(data):  # so it has fewer bytes than MAX_ELEMENTS, and each value takes one
        return
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
    at, end = 0, len(data)
    left = 1  # values that are missing in the innermost container, keys included
    keys = False  # whether the innermost container is a map, whose values at even `left` are keys
    outer: list[tuple[int, bool]] = []
    allowance = MAX_ELEMENTS
    while True:
        while left == 0:
            if not outer:
                return at
            left, keys = outer.pop()
        left -= 1
        allowance -= 1
        if allowance < 0:
            raise Violation(f"the output has more than {MAX_ELEMENTS} values", "E_TOOL_LIMIT")
        first = data[at]
        kind, width, size = HEADS[first]
        at += 1
        if width:
            size = int.from_bytes(data[at : at + width], "big") * (2 if kind == MAP else 1)
            at += width
        if size > end - at:  # every value in a container takes a byte
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
        elif kind == OTHER or len(outer) >= MAX_OUTPUT_DEPTH:
            deep = f"is nested deeper than {MAX_OUTPUT_DEPTH}"
            raise Violation(f"the output {'has a type that is not JSON' if kind == OTHER else deep}")
        else:
            outer.append((left, keys))
            left, keys = size, kind == MAP


def output_limit(output_mb: int) -> int:
    """The largest output (bytes): the tool's outputMb, and not more than the bus carries."""
    return min(output_mb << 20, MAX_OUTPUT_BYTES)


# --- frames of a worker -----------------------------------------------------------------------------------------------

#: Bytes of a frame beyond its output: names, ids, an error's texts.
FRAME_SLACK: Final = 64 << 10
#: Log lines, progress, questions and news that a worker may send at once, and per second after that. The Python worker
#: drops its own frames much earlier: beyond 1,000 and 200 (and 20 a call).
NEWS_BURST: Final = 20_000
NEWS_PER_S: Final = 2_000
#: Bytes of such frames at once, and per second after that.
NEWS_BYTES_BURST: Final = 64 << 20
NEWS_BYTES_PER_S: Final = 8 << 20

_decode = msgspec.msgpack.Decoder(WorkerFrame).decode


class Allowance:
    """So many at once, and so many a second after that. The time is passed in (seconds)."""

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, burst: float, per_s: float, now: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = burst
        self._at = now

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Whether there is room for `amount`; then it is taken."""
        passed = max(0.0, now - self._at)
        self._at = now
        self._left = min(self._burst, self._left + passed * self._per_s)
        if self._left < amount:
            return False
        self._left -= amount
        return True


class Channel:
    """The incoming half of one jail's socket."""

    __slots__ = ("_chunks", "_have", "_max_frame", "_news", "_news_bytes", "_want")

    def __init__(self, output_limit: int, now: float) -> None:
        self._max_frame = output_limit + FRAME_SLACK
        self._chunks: list[bytes] = []
        self._have = 0
        self._want = 4
        self._news = Allowance(NEWS_BURST, NEWS_PER_S, now)
        self._news_bytes = Allowance(NEWS_BYTES_BURST, NEWS_BYTES_PER_S, now)

    @property
    def kept(self) -> int:
        """Bytes of an incomplete frame."""
        return self._have

    def feed(self, data: bytes, now: float) -> list[WorkerFrame]:
        """Return the frames that `data` completes, in order. Raises Violation; the channel is of no use then."""
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
        try:
            while end - at >= 4:
                size = int.from_bytes(data[at : at + 4], "little")
                if size > self._max_frame:
                    message = f"the worker sent a frame of {size} bytes, limit {self._max_frame} (outputMb)"
                    raise Violation(message, "E_TOOL_LIMIT")
                stop = at + 4 + size
                if stop > end:
                    want = 4 + size
                    break
                frame = _decode(data[at + 4 : stop])
                if type(frame) is not Result:
                    self._spend(frame, size, now)
                frames.append(frame)
                at = stop
        except DECODE_ERRORS as error:
            raise Violation(f"the worker sent no frame of the protocol ({_reason(error)})") from None
        self._have = end - at
        if at < end:
            self._chunks.append(data[at:] if at else data)
            self._want = want
        return frames

    def _spend(self, frame: WorkerFrame, size: int, now: float) -> None:
        """Take the frame from the allowance. Ready and LoadFailed come once; the caller checks that."""
        if isinstance(frame, Log | Progress | Ask | News | LoginNeeded) and not (
            self._news.take(now) and self._news_bytes.take(now, size)
        ):
            raise Violation("the worker flooded its channel with log lines, questions or news", "E_TOOL_LIMIT")


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    return "a string is not UTF-8" if isinstance(error, UnicodeDecodeError) else type(error).__name__
