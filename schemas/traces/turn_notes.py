"""The notes on a turn while it runs, their places and their names. Agents write them, `gdn trace` reads them.

An instance's conversation file holds two tables for this. `turns` has one row for each event, and stays; in
`runtime_events` one row is one note, in the order in which things happened, and old notes are dropped. `at` is RFC 3339
in UTC with milliseconds. A note is written in the transaction that stores what it tells of, so a trace shows nothing
that a crash took back. `detail` is JSON, by kind:

- `turn.started`: TurnDetail. `turn.resumed` (by another process, after the one before was lost), `turn.completed`:
  nothing. A turn has one `turn.started`, however often it is resumed.
- `step.started`, `step.completed`: a number, the step (from 1); with the first a model call is out.
- `model.answered`, `model.failed`: ModelDetail.
- `tool.called`: CallDetail. `tool.completed`, `tool.failed`: ResultDetail.
- `step.failed`, `turn.failed`: FailureDetail.
- `call.refused`: RefusedDetail.

`span_id` is the span of what a note is about, `parent_span_id` what that is a part of (schemas/wire/spans.py). A turn's
parent is in its row as well, with its trace, how long its event had waited (milliseconds), and which note is its first.

Arguments and outputs are messages, where a reader finds them. Notes have them, without secrets and bounded, of calls
that are in no message (those of scripts), of calls that were refused, and of all if the agent keeps them whole. Errors
are there in the same way.
The tool host's receipt of the jail is the other way round: it is in the call's note and in no message, so no model
reads it.

Source: docs/design/traces.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from msgspec import DecodeError, Raw, Struct, json

from goondan.schemas.wire import errors, frames
from goondan.schemas.wire.usage import Part, Used
from goondan.schemas.worker.receipts import Receipt

#: The file of an instance, in goondan.schemas.bundle.address.instance_dir; `PRAGMA user_version` is its format.
CONVERSATION_FILE: Final = "conversation.db"
CONVERSATION_FORMAT: Final = 3
#: The tables that are read by others than their writer.
TRACE_TABLES: Final = """\
CREATE TABLE turns (
    seq INTEGER PRIMARY KEY, event_key TEXT NOT NULL UNIQUE, turn_id TEXT NOT NULL, attempt INTEGER NOT NULL,
    status TEXT NOT NULL, started_at TEXT NOT NULL, ended_at TEXT, steps INTEGER NOT NULL DEFAULT 0, answer BLOB,
    trace_id TEXT, parent_span_id TEXT, waited_ms INTEGER, first_note INTEGER
);
CREATE INDEX turns_running ON turns (status) WHERE status = 'running';
CREATE TABLE runtime_events (
    seq INTEGER PRIMARY KEY, turn_id TEXT NOT NULL, type TEXT NOT NULL, at TEXT NOT NULL, detail TEXT,
    span_id TEXT, parent_span_id TEXT
);
"""
#: An error's message in a note (characters); the whole is in the answer, or in the call's result.
MAX_NOTED_MESSAGE: Final = 500
#: Arguments, a result or a message in short (characters).
SHORT_CHARS: Final = 200
#: The same if an agent keeps them whole (characters).
WHOLE_CHARS: Final = 16 << 10
#: How much behind a cut is looked through for secrets (characters).
LONGEST_SECRET: Final = 4096
#: Attempts of one model call that a note tells of.
MAX_TRIES: Final = 20

#: The name of the console's provider. It has no tokens, and nobody counts its calls.
_CONSOLE: Final = "embedded"

#: Who refuses calls, beside features (errors.ErrorCode): the step's catalog, a rule, what a tool was granted, a person,
#: an extension.
Refuser = Literal["catalog", "rule", "grant", "person", "extension"]

TurnStatus = Literal["running", "completed", "failed", "abandoned"]
NoteKind = Literal[
    "turn.started",
    "turn.resumed",
    "step.started",
    "step.completed",
    "step.failed",
    "model.answered",
    "model.failed",
    "tool.called",
    "tool.waits",
    "tool.completed",
    "tool.failed",
    "call.refused",
    "turn.completed",
    "turn.failed",
    "extension.waits",
    "extension.over",
]


class TurnDetail(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The beginning of a turn."""

    #: Its trace.
    trace_id: str
    #: How long its event had waited since it was accepted (milliseconds).
    waited_ms: int | None = None
    #: Another turn waits for this one.
    awaited: bool = False
    #: How much of that time it waited for a place for its turn (milliseconds).
    place_ms: int = 0


class LayerDetail(Struct, frozen=True, rename="camel"):
    """A layer of an extension that hangs, or does not any more. The note has the time since when that is so."""

    #: The extension.
    extension: str
    #: The point of the layer, or the kind of its middleware.
    point: str


class FailureDetail(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The end of a turn or step that failed. `step` is the step that failed, None of a turn."""

    #: Why it failed.
    error: frames.ErrorPayload
    #: The step that failed; None: the turn.
    step: int | None = None


class TryDetail(Struct, frozen=True, rename="camel", omit_defaults=True):
    """An attempt to ask a model that failed and was followed by another one."""

    #: Why, in the server's words.
    error: str
    #: How long the server asked to wait, or the agent chose to (milliseconds).
    waited_ms: int = 0


class ModelDetail(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The end of a model call."""

    #: The number of the step.
    step: int
    #: The model that answered, as `provider/name`; of a failure the one that was asked.
    model: str = ""
    #: Why the model ended its message.
    finish_reason: str | None = None
    #: Tokens that it read, as the vendor counts them.
    input_tokens: int | None = None
    #: Tokens that it wrote, as the vendor counts them.
    output_tokens: int | None = None
    #: Of a failure: the error's code.
    code: str | None = None
    #: How often the model was asked.
    attempts: int = 1
    #: How long nothing was asked between the attempts (milliseconds).
    paused_ms: int = 0
    #: How long it waited for the requests of others (milliseconds).
    waited_ms: int = 0
    #: The attempts that failed and were followed by another one: the first MAX_TRIES of them.
    tries: list[TryDetail] = []
    #: The part of `input_tokens` that came from the vendor's cache.
    cached_tokens: int = 0
    #: The part of `input_tokens` that was put into the vendor's cache.
    cache_write_tokens: int = 0
    #: The part of `output_tokens` that was reasoning.
    reasoning_tokens: int = 0
    #: The name that was asked for, where the server says that another one has answered.
    asked: str | None = None
    #: What it cost: billionths of `currency`. None: the model has no price, or nobody knows the tokens.
    money: int | None = None
    #: The currency of the model's price; None: it has none.
    currency: str | None = None
    #: Whether the message ends where the model reached its limit of tokens.
    cut_off: bool = False
    #: How many messages of the conversation it was not shown, because they did not fit.
    left_out: int = 0
    #: How many messages with results it was shown shortened.
    shortened: int = 0


class CallDetail(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A tool call that was asked for."""

    #: The model's id of the call.
    tool_call_id: str
    #: What the model wrote. There may be no such tool.
    tool_name: str
    #: The tool is outside the step's catalog, and the policy `toolCalls.allowRegistry` lets the call pass.
    direct: bool = False
    #: The model's id of the script (code mode) that makes the call; None for a call of the model.
    script: str | None = None
    #: The arguments as JSON without secrets: in short of a call that no message has, whole if the agent keeps them
    #: whole. None: the message has them.
    args: str | None = None


class WayDetail(Struct, frozen=True, rename="camel"):
    """When a call passed where, on its way to its tool host and back (CLOCK_BOOTTIME, microseconds). The tool host's
    own times are in the receipt.
    """

    #: When the agent sent it.
    sent_us: int
    #: When the agent had its result.
    got_us: int
    #: When the broker had the call, and when it had the result. Empty: the broker does not say.
    passed_us: list[int] = []


class ResultDetail(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The one result of a call."""

    #: The model's id of the call.
    tool_call_id: str
    #: The status of the result.
    status: str
    #: Of an error: its code.
    code: str | None = None
    #: A Receipt (`worker.receipts.kept`), when a jail had the call. It is encoded by itself: a reader that
    #: does not understand the receipt of a later version loses the receipt only.
    receipt: frames.OptionalRaw = None
    #: Of an error: its message.
    message: str | None = None
    #: What the call gave, as CallDetail has the arguments.
    output: str | None = None
    #: Its way, when it had one over the bus.
    way: WayDetail | None = None


class RefusedDetail(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A call that was refused, or a turn (no tool)."""

    #: Who refused it: a Refuser, or a feature.
    by: str
    #: The code of the error.
    code: str
    #: Its message.
    message: str
    #: The line that would allow it, or who can.
    allow: str
    #: The tool as the model named it; "": the turn itself, or one of its model calls.
    tool_name: str = ""
    #: The model's id of the call.
    tool_call_id: str = ""
    #: The arguments as JSON, in short and without secrets.
    args: str | None = None


def in_short(value: object, most: int = SHORT_CHARS, redact: Callable[[str], str] = str) -> str:
    """A JSON value as a text of at most `most` characters, without what `redact` takes out; "" for what is none."""
    try:
        text = json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return ""
    # A secret that the cut goes through is hidden while it is still whole.
    return errors.cut_message(redact(text[: most + LONGEST_SECRET]), most)


def used_by_note(at: str, detail: str | None) -> tuple[Part, Used] | None:
    """What the end of a model call counts, by its note: the time (RFC 3339 in UTC) and the detail. None: nothing, as
    for the console, or it is of another version.
    """
    try:
        ended = json.decode(detail or "", type=ModelDetail)
    except (DecodeError, UnicodeError):
        return None
    return used_by_call(at, ended)


def used_by_call(at: str, ended: ModelDetail) -> tuple[Part, Used] | None:
    """The same of a detail that was read."""
    if ended.model.partition("/")[0] == _CONSOLE:
        return None
    used = Used(
        1,
        ended.input_tokens or 0,
        ended.output_tokens or 0,
        ended.cached_tokens,
        ended.cache_write_tokens,
        ended.reasoning_tokens,
        ended.money or 0,
    )
    return Part(at[:10], ended.model, ended.currency), used


def encode_receipt(receipt: Receipt) -> Raw:
    """A receipt as it stands in a ResultDetail."""
    return Raw(json.encode(receipt))


def read_receipt(data: Raw | None) -> Receipt | None:
    """The receipt of a ResultDetail; None when there is none, or none that can be read."""
    try:
        return None if data is None else json.decode(data, type=Receipt)
    except (DecodeError, UnicodeError):
        return None


def encode_detail(detail: Struct) -> str:
    """The text that is stored."""
    return json.encode(detail).decode()
