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
#: The largest frame that is sent, and the largest that arrives: the broker adds to its header (bytes).
MAX_SENT: Final = 1 << 20
MAX_RECEIVED: Final = MAX_SENT + (64 << 10)
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


class FilePart(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A picture or a PDF of a message."""

    #: Where its bytes lie.
    blob: Blob
    #: What it is, as its first bytes say.
    media_type: str
    #: Its name.
    name: str | None = None
    #: Always `file`.
    type: Literal["file"] | None = None


class ReplyTo(Struct, frozen=True, rename="camel"):
    """An answer is wanted."""

    #: Always `client`.
    target: str
    #: How the answer will be recognised.
    correlation_id: str


class Frame(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One message. Fields that a client has no use for are skipped."""

    #: What it is.
    type: str
    #: Its id, to which answers refer.
    id: str | None = None
    #: The agent that it is for.
    to: str | None = None
    #: The instance of the agent.
    instance_key: str | None = None
    #: The event.
    event_id: str | None = None
    #: An answer is wanted.
    reply_to: ReplyTo | None = None
    #: What it answers.
    in_reply_to: str | None = None
    #: Of `ack` and `clock`.
    stage: str | None = None
    #: The trace.
    trace_id: str | None = None
    #: What is left of its time when it is sent (milliseconds).
    deadline_ms: int | None = None
    #: Where the turn works: an absolute path.
    workdir: str | None = None
    #: The asker wants to hear of the turn.
    live: bool | None = None
    #: A payload that is too large for the frame.
    blob: Blob | None = None
    #: What the sender says of its content.
    digest: str | None = None
    #: The files of a message.
    files: list[FilePart] | None = None
    #: What it says, still encoded.
    payload: Raw = NOTHING


class Hello(Struct, rename="camel", omit_defaults=True):
    """The first frame of a connection."""

    #: The operator's token.
    token: str
    #: Random, one for each program.
    incarnation: str
    #: Versions that are spoken here.
    versions: list[int]
    #: Correlation ids of the answers that are waited for.
    awaiting: list[str] = []
    #: Our process.
    pid: int | None = None


class Welcome(Struct, frozen=True, rename="camel"):
    """The broker's answer to it."""

    #: The version that is spoken.
    version: int
    #: The name of this connection.
    principal: str
    #: Random for each start of the broker.
    broker: str
    #: How many new events may be unanswered at once.
    credit: int
    #: The largest frame (bytes).
    max_frame: int
    #: The folder of large payloads.
    blobs: str | None = None
    #: What an accepted event survives.
    durability: Literal["power", "process"] = "power"
    #: Names the content of the bundle.
    revision: str | None = None


class Credit(Struct, frozen=True):
    """A new credit window."""

    #: How many new events may be unanswered at once.
    window: int


class Shutdown(Struct, frozen=True, rename="camel"):
    """The kernel was told to stop. What was accepted is kept."""

    #: How long it takes (milliseconds). None: no limit.
    grace_period_ms: int | None
    #: Why.
    reason: Literal["restart", "config_change", "orchestrator_shutdown", "idle"]


class ErrorPayload(Struct, frozen=True, rename="camel"):
    """An error on the wire, and of an answer or a tool."""

    #: What is wrong.
    message: str
    #: The stable code. A tool's error may have none.
    code: str | None = None
    #: What to do about it.
    suggestion: str | None = None
    #: A page that says more.
    help_url: str | None = None
    #: When to try again (milliseconds).
    retry_after_ms: int | None = None

    def as_exception(self, code: str = "E_INTERNAL") -> GoondanError:
        """The exception that says it. `code` stands in for one that is missing."""
        retry = None if self.retry_after_ms is None else self.retry_after_ms / 1000
        return GoondanError(self.code or code, self.message, self.suggestion, retry, self.help_url)


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


class AgentEvent(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """The payload of an event."""

    #: The event.
    id: str
    #: What it is.
    type: str
    #: When it was made: RFC 3339.
    created_at: str
    #: What it says.
    input: Any = None
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
    wait: dict[str, Any] | None = None


class Approval(Struct, frozen=True, rename="camel", kw_only=True):
    """One item that waits for a person, or was decided."""

    #: The call; or give `code`.
    id: str
    #: A short name of it.
    code: str
    #: A call that waits for approval, or a question.
    kind: str
    #: The agent that asks.
    agent: str
    #: The instance that asks.
    instance_key: str
    #: The event whose turn asks.
    event_id: str
    #: The tool.
    tool: str
    #: `waits`, or how it was decided.
    state: str
    #: The final arguments. None: too large for a list.
    args: Any = None
    #: Where the call works.
    workdir: str | None = None
    #: Of a question: its text.
    message: str | None = None
    #: Of a question: the JSON Schema of its answer.
    schema: Any = None
    #: Why a person is asked.
    reason: str | None = None
    #: When it was asked (milliseconds since 1970).
    asked_ms: int = 0
    #: When it ends without a decision (milliseconds since 1970).
    expires_ms: int | None = None


class Instance(Struct, frozen=True, rename="camel", kw_only=True):
    """An instance of an agent that runs."""

    #: The agent.
    agent: str = field(name="name")
    #: Its key.
    instance: str | None = field(default=None, name="instanceKey")
    #: Its process.
    pid: int | None = None
    #: When that began (CLOCK_BOOTTIME, milliseconds).
    started_ms: int | None = None


_read = msgspec.msgpack.Decoder(Frame).decode
encode = msgspec.msgpack.Encoder().encode
"""A value to msgpack bytes."""
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
#: What msgspec raises for bad bytes.
_BAD: Final = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError)


def to_raw(value: Any) -> Raw:
    """A value as a payload. Raises GoondanError E_FRAME_INVALID when msgpack has no such value."""
    try:
        return Raw(encode(value))
    except (TypeError, *_BAD) as error:
        raise GoondanError("E_FRAME_INVALID", f"this cannot be sent: {str(error)[:200]}") from None


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
    for left in range(depth, -1, -1):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict:
                if not all(type(key) is str for key in item):
                    raise GoondanError("E_FRAME_INVALID", "a key of a map is no text")
                below.extend(item.values())
            elif kind is list:
                below.extend(item)
            elif kind is float:
                if not isfinite(item):
                    raise GoondanError("E_FRAME_INVALID", "a number is not finite")
                continue
            elif item is not None and kind is not str and kind is not int and kind is not bool:
                raise GoondanError("E_FRAME_INVALID", f"a value of the type {kind.__name__} is no JSON value")
            else:
                continue
            if not left:
                raise GoondanError("E_FRAME_INVALID", f"a payload nests deeper than {depth}")
        if not below:
            return
        level = below


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


#: How many bytes a value has besides its first, and how many values lie in it: (width of a length, size, kind).
_SIZES: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_TEXTS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_HOLDERS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def check_values(data: bytes, limit: int = MAX_VALUES) -> None:
    """See that bytes announce at most `limit` values, keys included, before anything is made of them.

    Raises GoondanError E_FRAME_INVALID.
    """
    at, seen = 0, 0
    while at < len(data):
        first = data[at]
        at += 1
        if 0x80 <= first < 0xA0:
            seen += (first & 15) * (2 if first < 0x90 else 1)
        elif 0xA0 <= first < 0xC0:
            at += first & 31
        elif (width := _TEXTS.get(first)) is not None:
            at += width + int.from_bytes(data[at : at + width], "big")
        elif (holder := _HOLDERS.get(first)) is not None:
            seen += holder[1] * int.from_bytes(data[at : at + holder[0]], "big")
            at += holder[0]
        else:
            at += _SIZES.get(first, 0)
        if seen > limit:
            raise GoondanError("E_FRAME_INVALID", f"a payload has more than {limit} values")
