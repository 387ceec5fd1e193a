"""The spans of a turn, with the names of OpenTelemetry's conventions. The names are literals: the package that has them
as constants moves them from one version to the next. Our own begin with `goondan.`.

A span has the ids of schemas/wire/spans.py: one that is made again is the same. What a file says is not believed: texts
are bounded, times are put in order.

Source: docs/design/traces.md; OpenTelemetry semantic conventions 1.44.0, those for generative AI included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from goondan.kernel.traces.rules.turn import ModelCall, Step, ToolCall, Trace, Waits, moment
from goondan.schemas.text.visible import visible_line
from goondan.schemas.traces.turn_notes import WHOLE_CHARS
from goondan.schemas.wire import errors, spans

#: What makes the spans, and the version of the conventions, as each batch says them.
SCOPE: Final = InstrumentationScope("goondan", None, "https://opentelemetry.io/schemas/1.44.0")
#: Providers of ours that the conventions know by another name. One that they do not know keeps its own.
PROVIDERS: Final = {"responses": "openai", "": "unknown"}
#: The attributes that have texts: what was said and done.
_CONTENTS: Final = ("input.messages", "output.messages", "tool.call.arguments", "tool.call.result")
CONTENTS: Final = tuple(f"gen_ai.{name}" for name in _CONTENTS)
#: Characters of one of these (JSON writes a character with six at most), and of any other text.
MAX_CONTENT: Final = 7 * WHOLE_CHARS
MAX_TEXT: Final = 500
#: The largest time (milliseconds since 1970; the year 2200) and the largest number.
_MOST_MS: Final = 7_258_118_400_000
_MOST: Final = (1 << 63) - 1

Attributes = dict[str, Any]
Told = Trace | Step | ModelCall | ToolCall


class SpansOf:
    """The spans of one turn that is over. `answer`: what it has answered, if the spans have texts, too."""

    def __init__(self, turn: Trace, resource: Resource, answer: str | None = None) -> None:
        self._turn, self._resource, self._answer = turn, resource, answer
        known = turn.trace_id if spans.is_trace_id(turn.trace_id or "") else None
        self._trace_id = int(known or spans.trace_id_of(turn.turn_id), 16)
        conversation = f"{turn.agent}/{turn.instance_key}"
        self._whose: Attributes = {"gen_ai.agent.name": turn.agent, "gen_ai.conversation.id": conversation}

    def __iter__(self) -> Iterator[ReadableSpan]:
        turn, own = self._turn, spans.turn_span(self._turn.turn_id)
        for step in turn.steps:
            span_id = spans.step_span(turn.turn_id, step.step)
            if step.model is not None:
                yield self._chat(spans.model_span(turn.turn_id, step.step), span_id, step.model)
            for call in step.tools:
                for parent, one in ((span_id, call), *((call.span_id, inner) for inner in call.calls)):
                    yield self._made(f"execute_tool {one.tool_name}", one.span_id, parent, one, self._of_tool(one))
            if step.step:
                yield self._made(f"step {step.step}", span_id, own, step, {"goondan.step": step.step})
        yield self._made(f"invoke_agent {turn.agent}", own, turn.parent_span_id, turn, self._of_turn())

    def _of_turn(self) -> Attributes:
        turn = self._turn
        found = (
            self._whose
            | {"gen_ai.operation.name": "invoke_agent"}
            | _fields("goondan.turn", turn, "turn_id event_id status attempt")
        )
        found |= _fields("goondan.wait", turn.waits or Waits(), "queue_ms place_ms model_ms person_ms lost_ms")
        if self._answer is not None:
            found[CONTENTS[0]] = _message("user", turn.message or "")
            found[CONTENTS[1]] = _message("assistant", self._answer, finish_reason="stop")
        return found

    def _chat(self, span_id: str, parent: str, model: ModelCall) -> ReadableSpan:
        provider, _, answered = (model.model or "").partition("/")
        asked = model.asked or answered
        found = self._whose | {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": PROVIDERS.get(provider, provider),
            "gen_ai.request.model": asked,
            "gen_ai.response.model": answered if model.status == "answered" else None,
            "gen_ai.response.finish_reasons": None if model.finish_reason is None else [model.finish_reason],
            "gen_ai.usage.cache_read.input_tokens": model.cached_tokens,
            "gen_ai.usage.cache_creation.input_tokens": model.cache_write_tokens,
            "gen_ai.usage.reasoning.output_tokens": model.reasoning_tokens,
            **_fields("gen_ai.usage", model, "input_tokens output_tokens"),
            **_fields("goondan.model", model, "attempts waited_ms paused_ms cut_off left_out shortened"),
            **{_sound("", f"goondan.cost.{currency}"): cost for currency, cost in list(model.costs.items())[:2]},
        }
        return self._made(f"chat {asked}", span_id, parent, model, found)

    def _of_tool(self, call: ToolCall) -> Attributes:
        found = self._whose | _fields("goondan.tool", call, "status") | {"gen_ai.operation.name": "execute_tool"}
        found |= {"gen_ai.tool.name": call.tool_name or "unknown", "gen_ai.tool.type": "function"}
        found["gen_ai.tool.call.id"] = call.tool_call_id
        if self._answer is not None:
            found |= {CONTENTS[2]: call.args, CONTENTS[3]: call.output}
        if call.refused is not None:
            found |= _fields("goondan.refused", call.refused, "by code")
        if call.receipt is not None:
            found |= _fields("goondan.receipt", call.receipt.jail, "tier cpu_ms peak_memory_kb reached exit")
            found |= _fields("goondan.receipt", call.receipt.call, "wall_ms denied")
        return found

    def _made(self, name: str, span_id: str | None, parent: str | None, of: Told, found: Attributes) -> ReadableSpan:
        """The span of `of`, with the attributes that were found, but for those that are None."""
        around = self._context(parent) if spans.is_span_id(parent or "") else None
        start = _ms(of.started_at)
        end = start + of.duration_ms if of.duration_ms is not None else _ms(self._turn.ended_at or self._turn.last_at)
        fault = _fault(of)
        found["error.type"] = fault and fault[0]
        return ReadableSpan(
            str(_sound("", name)),
            self._context(span_id),
            around,
            self._resource,
            {key: _sound(key, value) for key, value in found.items() if value is not None},
            links=[Link(around, {"goondan.awaited": False})] if around and not getattr(of, "awaited", True) else [],
            kind=SpanKind.CLIENT if isinstance(of, ModelCall) else SpanKind.INTERNAL,
            status=Status() if fault is None else Status(StatusCode.ERROR, str(_sound("", fault[1]))),
            start_time=start * 1_000_000,
            end_time=max(start, min(end, _MOST_MS)) * 1_000_000,
            instrumentation_scope=SCOPE,
        )

    def _context(self, span_id: str | None) -> SpanContext:
        return SpanContext(self._trace_id, int(span_id or "0", 16), is_remote=False, trace_flags=TraceFlags(1))


def _fields(prefix: str, of: object, names: str) -> Attributes:
    """Fields of a struct as attributes."""
    return {f"{prefix}.{name}": getattr(of, name) for name in names.split()}


def _fault(of: Told) -> tuple[str, str] | None:
    """The type and the text of the error of something that failed; None: it did not."""
    if (error := getattr(of, "error", None)) is not None:
        return error.code, error.message
    status = getattr(of, "status", "ok")
    code = getattr(of, "code", None) or status
    good = status in ("completed", "answered", "ok", "pending")
    return None if good else (code, of.message if isinstance(of, ToolCall) and of.message else code)


def _message(role: str, text: str, **more: str) -> str:
    """One message of text, as the conventions have messages."""
    parts = [{"type": "text", "content": errors.cut_message(text, WHOLE_CHARS)}]
    return msgspec.json.encode([{"role": role, "parts": parts, **more}]).decode()


def _sound(name: str, value: Any) -> Any:
    """A value that OTLP can have, bounded. In a short text nothing steers a terminal."""
    if isinstance(value, str):
        if name in CONTENTS:
            return errors.cut_message(value, MAX_CONTENT).encode("utf-8", "replace").decode()
        return visible_line(errors.cut_message(value, MAX_TEXT))
    if isinstance(value, list):
        return [_sound("", item) for item in value]
    return max(-_MOST, min(value, _MOST)) if isinstance(value, int) and not isinstance(value, bool) else value


def _ms(at: str | None) -> int:
    """A time in milliseconds since 1970; 0 for what is none."""
    return max(0, min(moment(at) or 0, _MOST_MS))
