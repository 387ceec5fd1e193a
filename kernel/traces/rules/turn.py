"""A turn's notes as one document: its steps, each with its model call and its tool calls (pure).

Parts that are missing stay open: of a turn that runs or that a killed process left, of notes that were dropped for
their age, of kinds that a later version writes. Times are RFC 3339; durations are whole milliseconds, None while open,
and 0 where the wall clock went backwards. The tree of turns of several agents is in tree.py, which also fills in
`work_ms` and `waits`.

Source: docs/design/traces.md; schemas/traces/turn_notes.py has what is noted.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from goondan.schemas.traces import turn_notes
from goondan.schemas.wire import errors, frames, spans, usage
from goondan.schemas.worker.receipts import Receipt

_T = TypeVar("_T")


class Note(Struct, frozen=True):
    """One row of `runtime_events`."""

    #: The kind of the runtime event.
    kind: str
    #: When it happened: RFC 3339 in UTC.
    at: str
    #: More about it, in a form of schemas/traces/turn_notes.py.
    detail: str | None = None


class Waits(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The times of a turn in which nothing of it was at work (milliseconds)."""

    #: Before it began: it waited for the messages before it and for the start of its process.
    queue_ms: int = 0
    #: Before it began: it waited for a place for its turn.
    place_ms: int = 0
    #: It waited for its model.
    model_ms: int = 0
    #: It waited for other agents.
    agents_ms: int = 0
    #: It waited for a jail to begin with its call.
    sandbox_ms: int = 0
    #: Its process was gone, and it waited for another one that resumes it.
    lost_ms: int = 0
    #: It waited for a person.
    person_ms: int = 0


class Tokens(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """What model calls have used."""

    #: Tokens that models read.
    input_tokens: int = 0
    #: Tokens that models wrote.
    output_tokens: int = 0
    #: The part of `input_tokens` that came from caches of vendors.
    cached_tokens: int = 0
    #: The part of `input_tokens` that was put into a vendor's cache.
    cache_write_tokens: int = 0
    #: The part of `output_tokens` that was reasoning.
    reasoning_tokens: int = 0
    #: What they cost, by the currency of the model's price, as far as it has one.
    costs: dict[str, float] = {}

    def add(self, other: Tokens | turn_notes.ModelDetail, costs: Mapping[str, float]) -> None:
        """Add what another one has used."""
        for name in Tokens.__struct_fields__[:-1]:
            setattr(self, name, getattr(self, name) + (getattr(other, name) or 0))
        for currency, cost in costs.items():
            self.costs[currency] = self.costs.get(currency, 0) + cost


class ModelCall(Tokens, rename="camel", omit_defaults=True, kw_only=True):
    """One model call."""

    #: `lost`: another process had to ask again, or the turn ended without it. `interrupted`: it ended with its kernel.
    status: Literal["answered", "failed", "running", "lost", "interrupted"]
    #: When it began: RFC 3339 in UTC.
    started_at: str
    #: How long it took (milliseconds).
    duration_ms: int | None = None
    #: The model, as `provider/name`.
    model: str | None = None
    #: Why the model ended its message.
    finish_reason: str | None = None
    #: Of a failure: the error's code.
    code: str | None = None
    #: How often the model was asked.
    attempts: int = 1
    #: How long nothing was asked between the attempts (milliseconds).
    paused_ms: int = 0
    #: How long it waited for the requests of others (milliseconds).
    waited_ms: int = 0
    #: The attempts that failed and were followed by another one, the first of them.
    tries: list[turn_notes.TryDetail] = []
    #: The name that was asked for, where the server says that another one has answered.
    asked: str | None = None
    #: Whether the message ends where the model reached its limit of tokens.
    cut_off: bool = False
    #: How many messages of the conversation it was not shown, because they did not fit.
    left_out: int = 0
    #: How many messages with results it was shown shortened.
    shortened: int = 0


class Total(Tokens, rename="camel", omit_defaults=True, kw_only=True):
    """The sum over some turns."""

    #: How many turns they are.
    turns: int
    #: Their agents.
    agents: list[str]


class ToolCall(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One tool call."""

    #: The model's id of the call.
    tool_call_id: str
    #: What the model wrote.
    tool_name: str
    #: The status of its result (ok, error, pending), or `running`, `lost` or `interrupted`.
    status: str
    #: When it began: RFC 3339 in UTC.
    started_at: str
    #: How long it took (milliseconds).
    duration_ms: int | None = None
    #: Of an error: its code.
    code: str | None = None
    #: What the tool host observed of the call and its jail.
    receipt: Receipt | None = None
    #: A policy let it pass although the tool is outside the step's catalog.
    direct: bool = False
    #: Of an error: its message.
    message: str | None = None
    #: Its span.
    span_id: str | None = None
    #: What is left of `duration_ms` without the time of the turns that it asked for, and without the time that its jail
    #: took to begin.
    work_ms: int | None = None
    #: The turns of other agents that it asked for.
    turns: list[Trace] = []
    #: When a person was asked about it. There is one entry more for each time that its turn was resumed.
    asked_at: list[str] = []
    #: Of a script of code mode: the calls that it made.
    calls: list[ToolCall] = []
    #: The id of the script that made it; None for a call of the model.
    script: str | None = None
    #: Its arguments as JSON, in short, or whole if the agent keeps them whole. None: they are not known any more.
    args: str | None = None
    #: Who refused it, and the line that would allow it.
    refused: turn_notes.RefusedDetail | None = None
    #: What it gave, in the same form. None: nothing, or it is not known any more.
    output: str | None = None
    #: When it passed where, on its way to its tool host and back.
    way: turn_notes.WayDetail | None = None


class Hang(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """A layer of an extension that hung."""

    #: The extension.
    extension: str
    #: The point of the layer, or the kind of its middleware.
    point: str
    #: Since when: RFC 3339 in UTC.
    started_at: str
    #: For how long (milliseconds). None: nobody has seen its end.
    duration_ms: int | None = None


class Step(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One step. An operator call has no step of its own: its number is 0 and it has no model call."""

    #: Its number, from 1.
    step: int
    #: When it began: RFC 3339 in UTC.
    started_at: str
    #: How long it took (milliseconds).
    duration_ms: int | None = None
    #: Its model call.
    model: ModelCall | None = None
    #: Its tool calls.
    tools: list[ToolCall] = []
    #: Why it failed.
    error: frames.ErrorPayload | None = None


class Trace(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One turn, as `gdn trace --json` prints it."""

    #: The turn.
    turn_id: str
    #: The event that it was for.
    event_id: str
    #: The agent.
    agent: str
    #: Its instance. None: the key is too long to stand in a path.
    instance_key: str | None
    #: How often the event was begun.
    attempt: int
    #: The state of the turn. `interrupted`: it ended with its kernel, and goes on when the kernel starts again.
    status: str
    #: When it began: RFC 3339 in UTC.
    started_at: str
    #: When it ended. None: it has not ended.
    ended_at: str | None = None
    #: How long it took (milliseconds).
    duration_ms: int | None = None
    #: Why the model ended its last message.
    finish_reason: str | None = None
    #: When another process went on with it.
    resumed_at: list[str] = []
    #: Its steps.
    steps: list[Step]
    #: Why it failed.
    error: frames.ErrorPayload | None = None
    #: Its trace.
    trace_id: str | None = None
    #: Its span.
    span_id: str | None = None
    #: The span that it is a part of.
    parent_span_id: str | None = None
    #: How long something of it was at work (milliseconds).
    work_ms: int | None = None
    #: How long it waited, and for what.
    waits: Waits | None = None
    #: When each process before a resumption was last heard of.
    lost_at: list[str] = []
    #: When the turn was last heard of.
    last_at: str | None = None
    #: The turns that its middleware asked for, and those of which nobody knows which call asked for them.
    turns: list[Trace] = []
    #: The asker of this turn waited for it.
    awaited: bool = False
    #: Layers of extensions that hung.
    hangs: list[Hang] = []
    #: Of the turn that is shown: the sum over it and all turns that hang on it.
    total: Total | None = None
    #: The beginning of the message that it was for.
    message: str | None = None

    @property
    def tools(self) -> list[ToolCall]:
        """The calls of all steps, with those of scripts."""
        return [each for step in self.steps for call in step.tools for each in (call, *call.calls)]


class Said(Struct):
    """What the messages of a turn say, each text in short."""

    #: The message that the turn was for.
    message: str | None = None
    #: Tool call id -> the arguments, as JSON.
    args: dict[str, str] = {}
    #: Tool call id -> the output, as JSON.
    outputs: dict[str, str] = {}


def said_in(messages: Iterable[Any]) -> Said:
    """The same of stored messages (agentproc/machine/messages.py). What has another form is left out."""
    said = Said()
    for message in messages:
        data = message.get("data") if isinstance(message, dict) else None
        content = data.get("content") if isinstance(data, dict) else None
        if isinstance(content, str) and said.message is None and str(message.get("id")).endswith(".0"):
            said.message = errors.cut_message(content, turn_notes.SHORT_CHARS)
        for part in content if isinstance(content, list) else ():
            name = part.get("toolCallId") if isinstance(part, dict) else None
            if not isinstance(name, str):
                continue
            if "args" in part:
                said.args[name] = turn_notes.in_short(part["args"])
            elif isinstance(result := part.get("result"), dict) and "output" in result:
                said.outputs[name] = turn_notes.in_short(result["output"])
    return said


def tell(trace: Trace, notes: Iterable[Note], said: Said | None = None, *, interrupted: bool = False) -> Trace:
    """What a turn did, from its notes in the order in which they were written, and from what its messages have
    `said`. `trace` has what its row in `turns` says, and gets the rest. `interrupted`: no process works on it if it has
    no end.
    """
    trace.span_id = spans.turn_span(trace.turn_id)
    trace.last_at = trace.ended_at or trace.started_at
    if trace.ended_at is not None:
        trace.duration_ms = between_ms(trace.started_at, trace.ended_at)
    calls: dict[str, ToolCall] = {}
    for note in notes:
        if (add := _ADD.get(note.kind)) is not None:
            add(trace, calls, note)
        trace.last_at = note.at
    if said is not None:
        trace.message = said.message
        for call in calls.values():
            call.args = call.args or said.args.get(call.tool_call_id)
            call.output = call.output or said.outputs.get(call.tool_call_id)
    if trace.status != "running":
        _close(trace, calls, "lost")
    elif interrupted:
        trace.status = "interrupted"
        _close(trace, calls, "interrupted")
    return trace


def _resumed(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    trace.resumed_at.append(note.at)
    trace.lost_at.append(trace.last_at or note.at)
    model = trace.steps[-1].model if trace.steps else None
    if model is not None and model.status == "running":
        model.started_at = note.at  # it is asked again now, and the time in between was nobody's


def _started(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    begun = _read(note, turn_notes.TurnDetail)
    trace.awaited = begun is not None and begun.awaited
    if begun is not None and begun.waited_ms is not None:
        place_ms = min(begun.place_ms, begun.waited_ms)
        trace.waits = Waits(queue_ms=begun.waited_ms - place_ms, place_ms=place_ms)


def _call_made(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    called = _read(note, turn_notes.CallDetail)
    if called is None:
        return
    call = ToolCall(
        tool_call_id=called.tool_call_id,
        tool_name=called.tool_name,
        status="running",
        started_at=note.at,
        direct=called.direct,
        args=called.args,
        span_id=spans.call_span(f"{trace.turn_id}/{called.tool_call_id}"),
    )
    script = calls.get(called.script or "")
    if script is not None and script.script is None and script is not calls.get(called.tool_call_id):
        call.script = script.tool_call_id
        script.calls.append(call)
    else:
        _last_step(trace, note.at).tools.append(call)
    calls[called.tool_call_id] = call


def _call_waits(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    waiting = calls.get(_read(note, str) or "")
    if waiting is not None:
        waiting.asked_at.append(note.at)


def _call_ended(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    ended = _read(note, turn_notes.ResultDetail)
    known = None if ended is None else calls.get(ended.tool_call_id)
    if ended is None or known is None:
        return
    known.status, known.code, known.message = ended.status, ended.code, ended.message
    known.duration_ms = between_ms(known.started_at, note.at)
    known.receipt = turn_notes.read_receipt(ended.receipt)
    known.output, known.way = ended.output, ended.way


def _call_refused(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    refused = _read(note, turn_notes.RefusedDetail)
    known = None if refused is None else calls.get(refused.tool_call_id)
    if refused is not None and known is not None:
        known.refused, known.args = refused, known.args or refused.args


def _step_ended(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    if not trace.steps:
        return
    step, failure = trace.steps[-1], _read(note, turn_notes.FailureDetail)
    step.duration_ms = between_ms(step.started_at, note.at)
    step.error = None if failure is None else failure.error


def _step_begun(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    number = _read(note, int)
    step = number if number is not None else len(trace.steps) + 1
    trace.steps.append(Step(step=step, started_at=note.at, model=ModelCall(status="running", started_at=note.at)))


def _model_ended(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    detail = _read(note, turn_notes.ModelDetail)
    step = _last_step(trace, note.at)
    call = step.model
    if detail is None or call is None:
        return
    asked_before = call.duration_ms is not None  # by an extension or another model, in the same step
    if call.status == "failed":
        call.tries.append(turn_notes.TryDetail(f"{call.model or 'model'}: {call.code or 'failed'}"))
    call.status = "failed" if note.kind == "model.failed" else "answered"
    call.duration_ms = between_ms(call.started_at, note.at)
    call.model = detail.model or None
    call.finish_reason, call.code = detail.finish_reason, detail.code
    call.attempts = detail.attempts + (call.attempts if asked_before else 0)
    call.paused_ms += detail.paused_ms
    call.waited_ms += detail.waited_ms
    call.tries = [*call.tries, *detail.tries][: turn_notes.MAX_TRIES]
    call.add(
        detail,
        {} if detail.money is None else {detail.currency or "USD": min(detail.money, usage.MAX_COST) / usage.NANO},
    )
    call.asked = detail.asked
    call.left_out, call.shortened = detail.left_out, detail.shortened
    call.cut_off = detail.cut_off


def _layer_hangs(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    if (layer := _read(note, turn_notes.LayerDetail)) is not None:
        trace.hangs.append(Hang(extension=layer.extension, point=layer.point, started_at=note.at))


def _layer_goes_on(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    for hang in trace.hangs:
        if hang.duration_ms is None:
            hang.duration_ms = between_ms(hang.started_at, note.at)


#: What each kind of note adds; another version may write others.
_ADD: Final[dict[str, Callable[[Trace, dict[str, ToolCall], Note], None]]] = {
    "turn.resumed": _resumed,
    "turn.started": _started,
    "step.started": _step_begun,
    "model.answered": _model_ended,
    "model.failed": _model_ended,
    "tool.called": _call_made,
    "tool.waits": _call_waits,
    "tool.completed": _call_ended,
    "tool.failed": _call_ended,
    "call.refused": _call_refused,
    "step.completed": _step_ended,
    "step.failed": _step_ended,
    "extension.waits": _layer_hangs,
    "extension.over": _layer_goes_on,
}


def _last_step(trace: Trace, at: str) -> Step:
    if not trace.steps:
        trace.steps.append(Step(step=0, started_at=at))
    return trace.steps[-1]


def _close(trace: Trace, calls: dict[str, ToolCall], status: Literal["lost", "interrupted"]) -> None:
    """Nothing of the turn runs: what has no end was lost, with the process or for want of a note."""
    for step in trace.steps:
        if step.model is not None and step.model.status == "running":
            step.model.status = status
    for call in calls.values():
        if call.status == "running":
            call.status = status


def _read(note: Note, kind: type[_T]) -> _T | None:
    """A detail, None when it is none: another version may write another."""
    try:
        return msgspec.json.decode(note.detail or "", type=kind)
    except (msgspec.DecodeError, UnicodeError):
        return None


def moment(at: str | None) -> int | None:
    """A time in milliseconds since 1970; None for what is none."""
    try:
        parsed = datetime.datetime.fromisoformat(at or "")
    except (ValueError, TypeError):
        return None
    return None if parsed.tzinfo is None else round(parsed.timestamp() * 1000)


def between_ms(start: str, end: str) -> int | None:
    """Milliseconds between two times, at least 0; None when one of them is none."""
    before, after = moment(start), moment(end)
    return None if before is None or after is None else max(0, after - before)
