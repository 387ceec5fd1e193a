"""The spans of a turn, made of its notes one by one, so that a turn of any length takes little memory (pure).

- A span is made when its end is noted, so those of a turn that runs leave before the turn ends. The turn's own comes
  last. Ids are those of schemas/wire/spans.py: a span that is made again is the same.
- The span of a tool call waits for the note behind its end, which may say who refused it.
- A step can ask several models. The first call of one has the span of the step's model call, others have spans of their
  own. Nobody notes when they began: not before the last note that is not of a model.
- What a file says is not believed: texts are bounded, times are put in order.

Source: docs/design/traces.md; schemas/traces/turn_notes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from goondan.features.telemetry.process import conventions as names
from goondan.kernel.traces.rules.turn import moment
from goondan.schemas.text.visible import visible_line
from goondan.schemas.traces import turn_notes
from goondan.schemas.wire import spans
from goondan.schemas.wire.errors import cut_message
from goondan.schemas.wire.frames import OPERATOR_AGENT
from goondan.schemas.wire.usage import NANO

_T = TypeVar("_T")
#: Characters of an attribute that is a name, an id or a message, and of the text of one that is contents.
MAX_TEXT: Final = 500
MAX_CONTENT: Final = turn_notes.WHOLE_CHARS
#: Calls of a turn that are open at once; older ones are taken as lost.
MAX_OPEN_CALLS: Final = 4096
#: A note of milliseconds that no clock shows (the year 2200).
_MOST_MS: Final = 7_258_118_400_000

Value = str | int | float | bool | list[str]
Attributes = dict[str, Value]


class Span(Struct, kw_only=True):
    """One span."""

    #: The number of the note that ends it; of the turn itself a number above all notes.
    seq: int
    #: Its name.
    name: str
    #: Its id.
    span_id: str
    #: The span around it; None: there is none that we know.
    parent_id: str | None
    #: When it began (milliseconds since 1970).
    start_ms: int
    #: When it ended.
    end_ms: int
    #: Whether it asks a server.
    kind: Literal["internal", "client"] = "internal"
    #: What is known of it.
    attributes: Attributes
    #: Why it failed, for a person; None: it did not.
    error: str | None = None
    #: The span that asked for it and did not wait.
    link: str | None = None


class Note(Struct, frozen=True):
    """One row of `runtime_events`."""

    #: Its number.
    seq: int
    #: The kind.
    kind: str
    #: When: RFC 3339.
    at: str
    #: The detail.
    detail: str
    #: The span around what the note is about.
    parent_id: str | None


class TurnRow(Struct, kw_only=True):
    """The row of `turns`, as far as spans need it."""

    #: The turn.
    turn_id: str
    #: Its event.
    event_id: str
    #: The agent.
    agent: str
    #: The instance.
    instance_key: str
    #: How often the event was begun.
    attempt: int
    #: The status.
    status: str
    #: When it began: RFC 3339.
    started_at: str
    #: When it ended.
    ended_at: str | None
    #: The span that asked for it.
    parent_id: str | None


class _Call(Struct):
    """A tool call that is open."""

    #: When it began (milliseconds since 1970).
    start_ms: int
    #: The note of its beginning.
    detail: turn_notes.CallDetail
    #: The span around it.
    parent_id: str | None
    #: How long a person was asked (milliseconds).
    person_ms: int = 0
    #: Since when a person is asked; None: nobody is.
    asked_ms: int | None = None


#: Arguments and result of a tool call by its id, as JSON; None: unknown.
Said = Callable[[str], tuple[str | None, str | None]]


class TurnSpans:
    """The spans of one turn. `said`: what its messages say of calls, if contents are wanted."""

    def __init__(self, row: TurnRow, said: Said | None = None) -> None:
        self.row = row
        self.said = said
        #: Every note up to this one is in spans that were made.
        self.done_seq = 0
        self._span_id = spans.turn_span(row.turn_id)
        self._own: Attributes = {
            "goondan.turn.id": text(row.turn_id),
            "goondan.event.id": text(row.event_id),
            "goondan.turn.attempt": row.attempt,
        }
        self._whose: Attributes = {
            names.AGENT: text(row.agent),
            names.CONVERSATION: text(f"{row.agent}/{row.instance_key}"),
        }
        self._start_ms = self._last_ms = self._busy_ms = time_of(row.started_at, 0)
        self._step: tuple[int, int] | None = None  # its number, and when it began
        self._models = 0
        self._calls: dict[str, _Call] = {}
        self._held: Span | None = None
        self._link: str | None = row.parent_id
        self._error: turn_notes.FailureDetail | None = None
        self._resumed = 0
        self._tokens = {names.INPUT_TOKENS: 0, names.OUTPUT_TOKENS: 0}
        self._money: dict[str, int] = {}

    def take(self, note: Note) -> Iterator[Span]:
        """The spans that end with this note, or before it."""
        now = self._last_ms = time_of(note.at, self._last_ms)
        if self._held is not None and note.kind != "call.refused":
            yield from self._release()
        if note.kind not in ("model.answered", "model.failed"):
            self._busy_ms = max(self._busy_ms, now)
        if (handle := self.ON.get(note.kind)) is not None:
            yield from handle(self, note, now)
        self.done_seq = note.seq if self._held is None else self._held.seq - 1

    def finish(self, row: TurnRow, seq: int, content: Attributes) -> Iterator[Span]:
        """What is left when the turn is over, as its `row` says now: what has no end, and the turn itself. `seq`: a
        number above all notes. `content`: attributes with what the turn was asked and has answered.
        """
        end = time_of(row.ended_at, self._last_ms)
        yield from self._release()
        for name in list(self._calls):
            yield self._lost(name, seq, end)
        yield from self._end_step(seq, end, lost=True)
        attributes = {
            **self._own,
            **content,
            "goondan.turn.status": text(row.status),
            "goondan.turn.resumed": self._resumed,
        }
        if row.agent != OPERATOR_AGENT:
            attributes |= {names.OPERATION: names.INVOKE_AGENT, **self._whose, **self._tokens}
        if self._money:
            attributes["goondan.cost"] = [f"{sum_ / NANO:.9f} {unit}" for unit, sum_ in sorted(self._money.items())]
        error = None
        if self._error is not None:
            attributes[names.ERROR_TYPE] = text(self._error.error.code)
            error = text(self._error.error.message)
        elif row.status != "completed":
            attributes[names.ERROR_TYPE] = error = text(row.status)
        name = "operator call" if row.agent == OPERATOR_AGENT else f"{names.INVOKE_AGENT} {text(row.agent)}"
        yield self._span(seq, name, self._span_id, row.parent_id, self._start_ms, end, attributes, error, self._link)
        self.done_seq = seq

    # --- inside

    def _begun(self, note: Note, now: int) -> Iterable[Span]:
        begun = _read(note, turn_notes.TurnDetail)
        if begun is None:
            return ()
        if begun.awaited:
            self._link = None
        if begun.waited_ms is not None:
            place = min(begun.place_ms, begun.waited_ms)
            self._own |= {"goondan.wait.queue_ms": begun.waited_ms - place, "goondan.wait.place_ms": place}
        return ()

    def _goes_on(self, note: Note, now: int) -> Iterable[Span]:
        self._resumed += 1
        for call in self._calls.values():
            _answered(call, now)
        return ()

    def _fails(self, note: Note, now: int) -> Iterable[Span]:
        self._error = _read(note, turn_notes.FailureDetail)
        return ()

    def _step_begins(self, note: Note, now: int) -> Iterable[Span]:
        yield from self._end_step(note.seq, now, lost=True)
        self._step, self._models = (_read(note, int) or 0, now), 0

    def _step_ends(self, note: Note, now: int) -> Iterable[Span]:
        return self._end_step(note.seq, now, _read(note, turn_notes.FailureDetail))

    def _end_step(
        self, seq: int, now: int, failure: turn_notes.FailureDetail | None = None, *, lost: bool = False
    ) -> Iterator[Span]:
        if self._step is None:
            return
        (number, start), self._step = self._step, None
        attributes: Attributes = {"goondan.step": number}
        error = None
        if failure is not None:
            attributes[names.ERROR_TYPE], error = text(failure.error.code), text(failure.error.message)
        elif lost:
            attributes[names.ERROR_TYPE] = error = "lost"
        span_id = spans.step_span(self.row.turn_id, number)
        yield self._span(seq, f"step {number}", span_id, self._span_id, start, now, attributes, error)

    def _model_ends(self, note: Note, now: int) -> Iterable[Span]:
        ended = _read(note, turn_notes.ModelDetail)
        return () if ended is None else (self._model(note, ended, now),)

    def _model(self, note: Note, ended: turn_notes.ModelDetail, now: int) -> Span:
        first = self._models == 0
        start = self._step[1] if first and self._step is not None and not self._resumed else self._busy_ms
        span_id = spans.model_span(self.row.turn_id, ended.step)
        if not first:
            span_id = spans.call_span(f"{self.row.turn_id}#{ended.step}/model/{self._models}")
        self._models += 1
        provider, _, model = ended.model.partition("/")
        attributes: Attributes = {
            names.OPERATION: names.CHAT,
            names.PROVIDER: text(names.PROVIDERS.get(provider, provider) or "unknown"),
            **self._whose,
            names.REQUEST_MODEL: text(ended.asked or model),
            "goondan.wait.model_gate_ms": ended.waited_ms,
            "goondan.wait.retry_ms": ended.paused_ms,
            "goondan.model.attempts": ended.attempts,
            "goondan.model.cut_off": ended.cut_off,
            "goondan.model.messages_left_out": ended.left_out,
            "goondan.model.messages_shortened": ended.shortened,
        }
        if ended.code is None:
            attributes[names.RESPONSE_MODEL] = text(model)
        else:
            attributes[names.ERROR_TYPE] = text(ended.code)
        if ended.finish_reason is not None:
            attributes[names.FINISH_REASONS] = [text(ended.finish_reason)]
        if ended.input_tokens is not None or ended.output_tokens is not None:
            attributes |= {
                names.INPUT_TOKENS: ended.input_tokens or 0,
                names.OUTPUT_TOKENS: ended.output_tokens or 0,
                names.CACHE_READ_TOKENS: ended.cached_tokens,
                names.CACHE_WRITE_TOKENS: ended.cache_write_tokens,
                names.REASONING_TOKENS: ended.reasoning_tokens,
            }
            self._tokens[names.INPUT_TOKENS] += ended.input_tokens or 0
            self._tokens[names.OUTPUT_TOKENS] += ended.output_tokens or 0
        if ended.money is not None:
            unit = text(ended.currency or "USD")
            attributes |= {"goondan.cost.amount": ended.money / NANO, "goondan.cost.currency": unit}
            self._money[unit] = self._money.get(unit, 0) + ended.money
        name = f"{names.CHAT} {attributes[names.REQUEST_MODEL]}".rstrip()
        made = self._span(note.seq, name, span_id, note.parent_id, start, now, attributes, ended.code)
        made.kind = "client"
        return made

    def _call_begins(self, note: Note, now: int) -> Iterable[Span]:
        if (called := _read(note, turn_notes.CallDetail)) is None:
            return
        if len(self._calls) >= MAX_OPEN_CALLS:
            yield self._lost(next(iter(self._calls)), note.seq, now)
        self._calls[called.tool_call_id] = _Call(now, called, note.parent_id)

    def _call_waits(self, note: Note, now: int) -> Iterable[Span]:
        if (waiting := self._calls.get(_read(note, str) or "")) is not None:
            waiting.asked_ms = now
        return ()

    def _call_ends(self, note: Note, now: int) -> Iterable[Span]:
        ended = _read(note, turn_notes.ResultDetail)
        call = None if ended is None else self._calls.pop(ended.tool_call_id, None)
        if ended is None or call is None:
            return ()
        _answered(call, now)
        attributes = self._of_call(call)
        attributes["goondan.tool.status"] = text(ended.status)
        error = None
        if ended.code is not None or ended.status == "error":
            attributes[names.ERROR_TYPE] = text(ended.code or "error")
            error = text(ended.message or "")
        receipt = turn_notes.read_receipt(ended.receipt)
        person = call.person_ms
        if receipt is not None:
            before = max(0, now - call.start_ms - round(receipt.call.wall_ms))
            person = min(person, before)
            jail = receipt.jail
            attributes |= {
                "goondan.wait.jail_ms": before - person,
                "goondan.receipt.tier": jail.tier,
                "goondan.receipt.cpu_ms": jail.cpu_ms,
                "goondan.receipt.peak_memory_kb": jail.peak_memory_kb,
                "goondan.receipt.reached": [text(host) for host in jail.reached],
                "goondan.receipt.denied": [text(host) for host in receipt.call.denied],
            }
            if (left := receipt.call.exit or jail.exit) is not None:
                attributes["goondan.receipt.exit"] = text(left)
        attributes["goondan.wait.person_ms"] = person
        if self.said is not None:
            args, output = self.said(ended.tool_call_id)
            given, gave = call.detail.args or args, ended.output or output
            attributes |= {names.ARGUMENTS: clean(given)} if given else {}
            attributes |= {names.RESULT: clean(gave)} if gave else {}
        self._held = self._tool_span(note.seq, ended.tool_call_id, call, now, attributes, error)
        return ()

    def _lost(self, tool_call_id: str, seq: int, now: int) -> Span:
        call = self._calls.pop(tool_call_id)
        attributes = {**self._of_call(call), names.ERROR_TYPE: "lost"}
        return self._tool_span(seq, tool_call_id, call, now, attributes, "its result was never stored")

    def _of_call(self, call: _Call) -> Attributes:
        return {
            names.OPERATION: names.EXECUTE_TOOL,
            names.TOOL: text(call.detail.tool_name) or "unknown",
            names.TOOL_TYPE: "function",
            names.TOOL_CALL: text(call.detail.tool_call_id),
            **(self._whose if self.row.agent != OPERATOR_AGENT else {}),
        }

    def _tool_span(
        self, seq: int, tool_call_id: str, call: _Call, now: int, attributes: Attributes, error: str | None
    ) -> Span:
        span_id = spans.call_span(f"{self.row.turn_id}/{tool_call_id}")
        name = f"{names.EXECUTE_TOOL} {attributes[names.TOOL]}"
        return self._span(seq, name, span_id, call.parent_id, call.start_ms, now, attributes, error)

    def _refused(self, note: Note, now: int) -> Iterable[Span]:
        refused = _read(note, turn_notes.RefusedDetail)
        if refused is None:
            return ()
        held = self._held
        is_held = held is not None and held.attributes.get(names.TOOL_CALL) == text(refused.tool_call_id)
        about = held.attributes if held is not None and is_held else self._own
        about["goondan.refused.by"], about["goondan.refused.code"] = text(refused.by), text(refused.code)
        return ()

    def _release(self) -> Iterator[Span]:
        held, self._held = self._held, None
        if held is not None:
            yield held

    def _span(
        self,
        seq: int,
        name: str,
        span_id: str,
        parent_id: str | None,
        start_ms: int,
        end_ms: int,
        attributes: Attributes,
        error: str | None = None,
        link: str | None = None,
    ) -> Span:
        return Span(
            seq=seq,
            name=name,
            span_id=span_id,
            parent_id=parent_id if parent_id is not None and spans.is_span_id(parent_id) else None,
            start_ms=start_ms,
            end_ms=max(start_ms, end_ms),
            attributes=attributes,
            error=error,
            link=link if link is not None and spans.is_span_id(link) else None,
        )

    #: What each kind of note does; another version may write others.
    ON: ClassVar[Mapping[str, Callable[[TurnSpans, Note, int], Iterable[Span]]]] = {
        "turn.started": _begun,
        "turn.resumed": _goes_on,
        "turn.failed": _fails,
        "step.started": _step_begins,
        "step.completed": _step_ends,
        "step.failed": _step_ends,
        "model.answered": _model_ends,
        "model.failed": _model_ends,
        "tool.called": _call_begins,
        "tool.waits": _call_waits,
        "tool.completed": _call_ends,
        "tool.failed": _call_ends,
        "call.refused": _refused,
    }


def text(value: str) -> str:
    """A name, an id or a message of any origin: bounded, and nothing in it steers a terminal."""
    return visible_line(cut_message(value, MAX_TEXT))


def clean(value: str) -> str:
    """Contents: bounded, and UTF-8."""
    return cut_message(value, MAX_CONTENT).encode("utf-8", "replace").decode()


def time_of(at: str | None, otherwise: int) -> int:
    """A time in milliseconds since 1970; `otherwise` for what is none."""
    found = moment(at)
    return found if found is not None and 0 <= found < _MOST_MS else otherwise


def message(role: str, said: str) -> str:
    """One message of text, as `gen_ai.input.messages` and `gen_ai.output.messages` have it."""
    told: list[dict[str, Any]] = [{"role": role, "parts": [{"type": "text", "content": clean(said)}]}]
    if role == "assistant":
        told[0]["finish_reason"] = "stop"
    return msgspec.json.encode(told).decode()


def _answered(call: _Call, now: int) -> None:
    if call.asked_ms is not None:
        call.person_ms, call.asked_ms = call.person_ms + max(0, now - call.asked_ms), None


def _read(note: Note, kind: type[_T]) -> _T | None:
    """A detail; None when it is none: another version may write another."""
    try:
        return msgspec.json.decode(note.detail, type=kind)
    except (msgspec.DecodeError, UnicodeError):
        return None
