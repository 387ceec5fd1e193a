"""Frames and payloads of a client, and the checks that a receiver makes itself. Pure.

Source: PROTOCOL.md "Frames", "Payloads", "What a receiver checks itself", "Large payloads".
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more.

import re
from math import isfinite
from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from goondan_client.errors import GoondanError

#: The version of the protocol that is spoken here.
VERSION: Final = 1
#: The largest frame that is sent, what the broker adds to its header, and the largest that arrives (bytes).
MAX_SENT: Final = 1 << 20
MAX_HEADER: Final = 64 << 10
MAX_RECEIVED: Final = MAX_SENT + MAX_HEADER
#: A payload with more goes by reference (bytes): half of what a frame may have.
INLINE: Final = 512 << 10
#: The largest payload by reference, and the largest of an event (bytes).
MAX_BLOB: Final = (64 << 20) + (256 << 10)
MAX_EVENT: Final = 16 << 20
#: Values in a payload by reference, keys included; and how deep a payload nests.
MAX_VALUES: Final = 1 << 20
MAX_DEPTH: Final = 64
#: Frames that may have a payload by reference.
REFERENCES: Final = frozenset(("event", "ack", "tool.call", "tool.result", "tool.answer", "tool.completed"))
NOTHING: Final = Raw(b"\xc0")

_FILE: Final = re.compile("[0-9a-f]{32}")
_DIGEST: Final = re.compile("[0-9a-f]{64}")

T = TypeVar("T")


class Blob(Struct, frozen=True):
    """A payload that lies in a file."""

    #: The file's name: 32 hexadecimal digits.
    file: str
    #: SHA-256 of its bytes, in hexadecimal digits.
    digest: str
    #: How many bytes.
    size: int


class Frame(Struct, rename="camel", omit_defaults=True):
    """A message that has come: what a client has a use for."""

    #: What it is.
    type: str
    #: Its id, to which answers refer.
    id: str | None = None
    #: The event.
    event_id: str | None = None
    #: What it answers.
    in_reply_to: str | None = None
    #: Of `clock`.
    stage: str | None = None
    #: Of `clock`: what is left (milliseconds).
    deadline_ms: int | None = None
    #: A payload that is too large for the frame.
    blob: Blob | None = None
    #: What it says, still encoded.
    payload: Raw = NOTHING


class Welcome(Struct, frozen=True, rename="camel"):
    """The broker's answer to it."""

    #: The version that is spoken.
    version: int
    #: The name of this connection.
    principal: str
    #: How many new events may be unanswered at once.
    credit: int
    #: The folder of large payloads.
    blobs: str | None = None
    #: What an accepted event survives.
    durability: Literal["power", "process"] = "power"

    def by_file(self, size: int) -> bool:
        """Whether an event's payload of this size goes by reference. Raises GoondanError E_FRAME_TOO_LARGE."""
        limit = MAX_SENT - MAX_HEADER if self.blobs is None else MAX_EVENT
        if size > limit:
            hint = "Write the content to a file in the workdir and send its path."
            raise GoondanError("E_FRAME_TOO_LARGE", f"a message of {size} bytes, limit {limit}", hint)
        return size > INLINE and self.blobs is not None


class Credit(Struct, frozen=True):
    """A new credit window."""

    #: How many new events may be unanswered at once.
    window: int


class ErrorPayload(Struct, frozen=True, rename="camel"):
    """An error on the wire, and of an answer or a tool."""

    #: What is wrong.
    message: str
    #: The stable code. A tool's error may have none.
    code: str | None = None
    #: What to do about it.
    suggestion: str | None = None
    #: When to try again (milliseconds).
    retry_after_ms: int | None = None

    def as_exception(self, code: str = "E_INTERNAL") -> GoondanError:
        """The exception that says it. `code` stands in for one that is missing."""
        retry = None if self.retry_after_ms is None else self.retry_after_ms / 1000
        return GoondanError(self.code or code, self.message, self.suggestion, retry)


class Usage(Struct, rename="camel"):
    """What model calls have used."""

    #: All that models read, in tokens.
    input_tokens: int = 0
    #: All that models wrote, in tokens.
    output_tokens: int = 0
    #: The part of the input that came from the vendor's cache.
    cached_tokens: int = 0
    #: The part of the input that was put into it.
    cache_write_tokens: int = 0
    #: The part of the output that was reasoning.
    reasoning_tokens: int = 0
    #: Model calls.
    model_calls: int = 0
    #: What it cost. None: it is not known.
    cost: float | None = None
    #: The currency of the cost. None: USD.
    currency: str | None = None


class Answer(Struct, rename="camel", kw_only=True):
    """How a turn ended."""

    #: What it is in a stream.
    kind: ClassVar[str] = "answer"
    #: The turn.
    turn_id: str
    #: A failed answer is raised as GoondanError.
    status: Literal["completed", "failed"]
    #: The text of the model's last message.
    text: str | None = field(default=None, name="response")
    #: Of an agent with an output schema: the value that the response is.
    object: Any = None
    #: What the model calls of the turn have used.
    usage: Usage | None = None
    #: The event that was answered.
    event_id: str = ""
    #: The trace of the turn.
    trace_id: str | None = None
    #: The model that answered last, as `provider/name`.
    model: str | None = None
    #: Why the model ended its last message.
    finish_reason: str | None = None
    #: How many steps the turn took.
    steps: int = 0
    #: The response ends where the model reached its limit.
    cut_off: bool = False
    #: The reasoning of the model's last message.
    reasoning: str | None = None
    #: Why it failed.
    error: ErrorPayload | None = None
    #: Of an operator's call: a ToolResult, still encoded.
    output: Raw = NOTHING


class AgentEvent(Struct, rename="camel", kw_only=True):
    """The payload of an event that has come."""

    #: The event.
    id: str
    #: What it is.
    type: str
    #: When it was made: RFC 3339.
    created_at: str
    #: Anything else.
    metadata: dict[str, Any] | None = None
    #: Of an answering event: how the turn ended.
    answer: Answer | None = None


class ToolResult(Struct, rename="camel", kw_only=True):
    """What a tool gave."""

    #: An `error` is raised as GoondanError.
    status: Literal["ok", "error", "pending"]
    #: The tool's value.
    output: Any = None
    #: With `pending`: the name of the work that goes on.
    handle: str | None = None
    #: Why it failed.
    error: ErrorPayload | None = None
    #: What the tool host saw of the jail that had the call.
    receipt: Any = None


class LiveEvent(Struct, frozen=True, rename="camel", kw_only=True):
    """News of a turn that runs. Any may be lost."""

    #: What happened: PROTOCOL.md "Live events".
    kind: str
    #: The number of the step, from 1.
    step: int = 0
    #: A piece of the model's text or reasoning.
    text: str | None = None
    #: How many characters of it came before.
    at: int = 0
    #: What was heard of the step before is void.
    again: bool = False
    #: The model's name of the call.
    tool_call_id: str | None = None
    #: The tool.
    tool_name: str | None = None
    #: The arguments, in one short line.
    arguments: str | None = None
    #: The code of the tool's error.
    code: str | None = None
    #: How much is done, as the handler says.
    done: float | None = None
    #: How much there is in all.
    total: float | None = None
    #: The handler's words.
    message: str | None = None
    #: Why a turn or a step failed.
    error: ErrorPayload | None = None
    #: What is waited for.
    wait: dict[str, str | int | float | None] | None = None


_read = msgspec.msgpack.Decoder(Frame).decode
encode = msgspec.msgpack.Encoder().encode
"""A value to msgpack bytes."""
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_SCALARS: Final = frozenset((str, int, float, bool))
#: What msgspec raises for bad bytes.
_BAD: Final = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError)


def packed(value: Any) -> bytes:
    """A value as a payload. Raises GoondanError E_FRAME_INVALID when msgpack has no such value."""
    try:
        return encode(value)
    except (TypeError, *_BAD) as error:
        hint = "Send what JSON has: maps with texts as keys, lists, texts, numbers, booleans and None."
        raise GoondanError("E_FRAME_INVALID", f"this cannot be sent: {str(error)[:200]}", hint) from None


def decode(data: bytes) -> Frame:
    """A frame that has arrived. Raises GoondanError E_FRAME_TOO_LARGE, E_FRAME_INVALID."""
    if len(data) > MAX_RECEIVED:
        raise GoondanError("E_FRAME_TOO_LARGE", f"a frame of {len(data)} bytes, limit {MAX_RECEIVED}")
    try:
        return _read(data)
    except _BAD as error:
        raise GoondanError("E_FRAME_INVALID", f"no frame: {str(error)[:200]}") from None


def opened(raw: Raw | bytes, kind: type[T]) -> T:
    """A payload as `kind`. What it has of JSON values is looked through with `checked`.

    Raises GoondanError E_FRAME_INVALID.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        found: T = decoder.decode(raw)
    except _BAD as error:
        message = f"a payload is no {getattr(kind, '__name__', kind)}: {str(error)[:200]}"
        raise GoondanError("E_FRAME_INVALID", message) from None
    if kind is Any or kind is dict:
        checked(found)
    return found


def checked(value: Any, depth: int = MAX_DEPTH) -> None:
    """See that a decoded value is a JSON value that nests at most `depth` deep. Level by level: nothing recurses.

    Raises GoondanError E_FRAME_INVALID.
    """
    level = [value]
    while level:
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict or kind is list:
                if kind is dict and not all(type(key) is str for key in item):
                    raise GoondanError("E_FRAME_INVALID", "a key of a map is no text")
                if not depth:
                    raise GoondanError("E_FRAME_INVALID", "a payload nests too deep")
                below.extend(item.values() if kind is dict else item)
            elif kind is float and not isfinite(item):
                raise GoondanError("E_FRAME_INVALID", "a number is not finite")
            elif item is not None and kind not in _SCALARS:
                raise GoondanError("E_FRAME_INVALID", f"a value of the type {kind.__name__} is no JSON value")
        level, depth = below, depth - 1


def check_reference(frame: Frame) -> None:
    """See that a frame's reference is a good one. Raises GoondanError E_BLOB_INVALID, E_FRAME_TOO_LARGE."""
    blob = frame.blob
    if blob is None:
        return
    if frame.type not in REFERENCES or frame.payload != NOTHING:
        raise GoondanError("E_BLOB_INVALID", "this frame may have no reference to a payload")
    if _FILE.fullmatch(blob.file) is None or _DIGEST.fullmatch(blob.digest) is None or blob.size < 1:
        raise GoondanError("E_BLOB_INVALID", "the reference to a payload is none")
    if blob.size > MAX_BLOB:
        raise GoondanError("E_FRAME_TOO_LARGE", f"a payload of {blob.size} bytes, limit {MAX_BLOB}")


#: By the first byte of a value: how many bytes follow, and how many bytes tell a length, as in msgpack's specification.
_SIZES: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_LENGTHS: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def check_values(data: bytes, limit: int = MAX_VALUES) -> None:
    """See that bytes announce at most `limit` values, keys included, before anything is made of them.

    Raises GoondanError E_FRAME_INVALID.
    """
    at = seen = handled = 0
    while handled <= seen and at < len(data):  # what is left over makes no values: it is refused later
        first = data[at]
        at, handled = at + 1, handled + 1
        if (width := _LENGTHS.get(first)) is not None:
            length = int.from_bytes(data[at : at + width], "big")
            at += width + (length if first < 0xDC else 0)
            seen += 0 if first < 0xDC else length if first < 0xDE else 2 * length
        elif 0x80 <= first < 0xA0:
            seen += (first & 15) * (2 if first < 0x90 else 1)
        elif 0xA0 <= first < 0xC0:
            at += first & 31
        elif 0xC4 <= first < 0xCA or 0xD4 <= first < 0xD9:
            raise GoondanError("E_FRAME_INVALID", "a payload has bytes or an ext type, which JSON has not")
        else:
            at += _SIZES.get(first, 0)
        if seen > limit:
            raise GoondanError("E_FRAME_INVALID", f"a payload has more than {limit} values")
