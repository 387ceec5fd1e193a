"""Payloads of live events: what a running turn tells its asker, and what a tool's handler tells of its work.

Source: docs/design/wire.md section 8; PROTOCOL.md "Live events".
"""

# Annotations are no text here (`from __future__ import annotations`): msgspec would compile each of them once more, in
# every program that starts.

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from goondan.schemas.wire.frames import ErrorPayload

#: What a running turn tells its asker and observers. `text`: a piece of the answer, or of what is said before a tool
#: call. `reasoning`: a piece of the model's reasoning. The last two are the broker's own words, for observers.
RuntimeEventKind = Literal[
    "turn.started",
    "turn.completed",
    "turn.failed",
    "step.started",
    "step.completed",
    "step.failed",
    "text",
    "tool.called",
    "tool.completed",
    "tool.failed",
    "tool.progress",
    "tool.waits",
    "reasoning",
    "model.waits",
    "extension.waits",
    "waits.over",
    "event.accepted",
    "event.ended",
]


class Wait(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What a turn waits for."""

    #: For how long it has waited already (milliseconds).
    waited_ms: int = 0
    #: The model that is asked, and its server.
    model: str | None = None
    #: Which try it is, from 1; 0: it has not gone out.
    attempt: int = 0
    #: How long it waits at least, before it goes out or is tried again (milliseconds).
    wait_ms: int | None = None
    #: How many requests of others go out before this one. None: it is not in a line.
    before: int | None = None
    #: The extension whose layer is not done.
    extension: str | None = None
    #: The point of the layer, or the kind of its middleware.
    point: str | None = None


class RuntimeEvent(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """Payload of `runtime.event` from an agent: news of a turn that runs. Any of them may be lost."""

    #: What happened. `tool.waits`: the call waits for a person. `model.waits`: the step's request to the model waits.
    #: `extension.waits`: a layer of an extension is not done. `waits.over`: the turn goes on, of which the last two had
    #: told.
    kind: RuntimeEventKind
    #: The number of the step, from 1.
    step: int = 0
    #: A piece of the model's text, or of its reasoning.
    text: str | None = None
    #: Where the piece stands in its step's text, or in its step's reasoning, in characters (code points). When this is
    #: not the length of what was heard of it so far, something was lost.
    at: int = 0
    #: Of a step: the text and the reasoning of it that were heard before are void. Of `turn.started`: the turn was
    #: begun before, by an incarnation that is gone.
    again: bool = False
    #: The model's id of the call.
    tool_call_id: str | None = None
    #: Full name of the tool.
    tool_name: str | None = None
    #: Of `tool.failed`: the code of the error.
    code: str | None = None
    #: Of `tool.called`, for an operator: the arguments in one short line (`argument_line`).
    arguments: str | None = None
    #: Of `tool.progress`: how much is done, as the handler says.
    done: float | None = None
    #: Of `tool.progress`: how much there is in all, as the handler says.
    total: float | None = None
    #: Of `tool.progress`: the handler's own words. Of `model.waits`: why the last try failed.
    message: str | None = None
    #: Of `turn.failed` and `step.failed`: why it failed.
    error: ErrorPayload | None = None
    #: Of `model.waits` and `extension.waits`: what is waited for.
    wait: Wait | None = None
    #: Of `event.ended`: how (`done`, `failed`, `expired`, `dead`, `cancelled`).
    state: str | None = None


class ToolProgress(Struct, frozen=True, omit_defaults=True):
    """Payload of `tool.progress`: a handler tells people how far its work is."""

    #: How much is done.
    done: float
    #: How much there is in all. None: the handler does not know.
    total: float | None = None
    #: The handler's own words.
    message: str | None = None


#: The least bytes of a window: every frame to an observer fits into them.
MIN_WINDOW_BYTES: Final = 32 << 10
#: The largest window: events, and bytes.
MAX_WINDOW_EVENTS: Final = 4096
MAX_WINDOW_BYTES: Final = 1 << 20
#: The longest name in a subscription (characters).
_MAX_NAME: Final = 256

_Name = Annotated[str, Meta(min_length=1, max_length=_MAX_NAME)]


class Observe(Struct, frozen=True, rename="camel", kw_only=True):
    """The question `observe` of an operator's client: it wants to hear of turns of others."""

    #: Of which agent. None: of all.
    agent: _Name | None = None
    #: Of which instance key. None: of all.
    instance_key: _Name | None = None
    #: Of which root event: what it has set going. None: of all.
    root_event: _Name | None = None
    #: How many events may be on their way to it, sent and not read.
    events: Annotated[int, Meta(ge=1, le=MAX_WINDOW_EVENTS)]
    #: The same in bytes of their frames.
    bytes: Annotated[int, Meta(ge=MIN_WINDOW_BYTES, le=MAX_WINDOW_BYTES)]
    #: The name of the question.
    op: Literal["observe"] = "observe"


class Gap(Struct, frozen=True):
    """Payload of `observed` with the stage `gap`: an observer did not read in time, and has missed these."""

    #: The first number that was missed.
    first: int
    #: The last one.
    last: int
