"""A turn's notes as the story of the turn: steps, each with its model call and its tool calls (pure).

Whatever is missing is left open: a turn that runs, one that a killed process left, notes that were dropped for their
age, kinds that a later version writes. Times are RFC 3339; durations are whole milliseconds, None while open, and 0
where the wall clock went backwards.

Source: design section 11; schemas/traces.py has what is noted.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from schemas.frames import ErrorPayload
from schemas.receipts import Receipt
from schemas.traces import CallDetail, ModelDetail, ResultDetail, read_receipt

_T = TypeVar("_T")


class Note(Struct, frozen=True):
    """One row of `runtime_events`."""

    kind: str
    at: str
    detail: str | None = None


class Turn(Struct, frozen=True, kw_only=True):
    """One row of `turns`, whose it is, and its answer's end. `instance_key` None: too long to stand in a path."""

    turn_id: str
    event_id: str
    agent: str
    instance_key: str | None
    attempt: int
    status: str
    started_at: str
    ended_at: str | None = None
    finish_reason: str | None = None
    error: ErrorPayload | None = None


class ModelCall(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One model call. `status` is `lost` when another process had to ask again, or the turn ended without it."""

    status: Literal["answered", "failed", "running", "lost"]
    started_at: str
    duration_ms: int | None = None
    model: str | None = None
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    code: str | None = None


class ToolCall(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One tool call. `status` is its result's (ok, error, pending), or `running`, or `lost`; `receipt` is what the tool
    host saw of the jail that had it. `direct`: by a policy it went past the step's catalog.
    """

    tool_call_id: str
    tool_name: str
    status: str
    started_at: str
    duration_ms: int | None = None
    code: str | None = None
    receipt: Receipt | None = None
    direct: bool = False


class Step(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """One step. An operator call has no step of its own: its number is 0 and it has no model call."""

    step: int
    started_at: str
    model: ModelCall | None = None
    tools: list[ToolCall] = []


class Trace(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """What `gdn trace --json` prints. Tokens are sums over the model calls that said any."""

    turn_id: str
    event_id: str
    agent: str
    instance_key: str | None
    attempt: int
    status: str
    started_at: str
    ended_at: str | None = None
    duration_ms: int | None = None
    finish_reason: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    resumed_at: list[str] = []
    steps: list[Step]
    error: ErrorPayload | None = None


def tell(turn: Turn, notes: Iterable[Note]) -> Trace:
    """The story of a turn from its notes, in the order in which they were written."""
    trace = Trace(
        turn_id=turn.turn_id,
        event_id=turn.event_id,
        agent=turn.agent,
        instance_key=turn.instance_key,
        attempt=turn.attempt,
        status=turn.status,
        started_at=turn.started_at,
        ended_at=turn.ended_at,
        duration_ms=None if turn.ended_at is None else between_ms(turn.started_at, turn.ended_at),
        finish_reason=turn.finish_reason,
        steps=[],
        error=turn.error,
    )
    calls: dict[str, ToolCall] = {}
    for note in notes:
        _add(trace, calls, note)
    if turn.status != "running":
        _close(trace, calls)
    return trace


def _add(trace: Trace, calls: dict[str, ToolCall], note: Note) -> None:
    if note.kind == "turn.resumed":
        trace.resumed_at.append(note.at)
        model = trace.steps[-1].model if trace.steps else None
        if model is not None and model.status == "running":
            model.started_at = note.at  # it is asked again now, and the time in between was nobody's
    elif note.kind == "step.started":
        _begin_step(trace, _read(note, int), note.at)
    elif note.kind in ("model.answered", "model.failed"):
        _end_model(trace, note)
    elif note.kind == "tool.called":
        called = _read(note, CallDetail)
        if called is not None:
            call = ToolCall(
                tool_call_id=called.tool_call_id,
                tool_name=called.tool_name,
                status="running",
                started_at=note.at,
                direct=called.direct,
            )
            calls[called.tool_call_id] = call
            _last_step(trace, note.at).tools.append(call)
    elif note.kind in ("tool.completed", "tool.failed"):
        ended = _read(note, ResultDetail)
        known = None if ended is None else calls.get(ended.tool_call_id)
        if ended is not None and known is not None:
            known.status, known.code = ended.status, ended.code
            known.duration_ms = between_ms(known.started_at, note.at)
            known.receipt = read_receipt(ended.receipt)


def _begin_step(trace: Trace, number: int | None, at: str) -> None:
    step = number if number is not None else len(trace.steps) + 1
    trace.steps.append(Step(step=step, started_at=at, model=ModelCall(status="running", started_at=at)))


def _end_model(trace: Trace, note: Note) -> None:
    detail = _read(note, ModelDetail)
    step = _last_step(trace, note.at)
    call = step.model
    if detail is None or call is None:
        return
    call.status = "failed" if note.kind == "model.failed" else "answered"
    call.duration_ms = between_ms(call.started_at, note.at)
    call.model = detail.model or None
    call.finish_reason, call.code = detail.finish_reason, detail.code
    call.input_tokens, call.output_tokens = detail.input_tokens, detail.output_tokens
    trace.input_tokens = _sum(trace.input_tokens, detail.input_tokens)
    trace.output_tokens = _sum(trace.output_tokens, detail.output_tokens)


def _last_step(trace: Trace, at: str) -> Step:
    if not trace.steps:
        trace.steps.append(Step(step=0, started_at=at))
    return trace.steps[-1]


def _close(trace: Trace, calls: dict[str, ToolCall]) -> None:
    """A turn that is over has nothing that runs: what has no end was lost, with the process or for want of a note."""
    for step in trace.steps:
        if step.model is not None and step.model.status == "running":
            step.model.status = "lost"
    for call in calls.values():
        if call.status == "running":
            call.status = "lost"


def _read(note: Note, kind: type[_T]) -> _T | None:
    """A detail, None when it is none: another version may write another."""
    try:
        return msgspec.json.decode(note.detail or "", type=kind)
    except (msgspec.DecodeError, UnicodeError):
        return None


def _sum(total: int | None, more: int | None) -> int | None:
    return total if more is None else (total or 0) + more


def between_ms(start: str, end: str) -> int | None:
    """Milliseconds between two times, at least 0; None when one of them is none."""
    try:
        seconds = (datetime.datetime.fromisoformat(end) - datetime.datetime.fromisoformat(start)).total_seconds()
    except (ValueError, TypeError):
        return None
    return max(0, round(seconds * 1000))
