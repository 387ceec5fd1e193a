"""The notes of a running turn, for traces. They are made inside the transaction that stores them, or before the next
one.

Rules.
- A turn has one beginning and one end, and so has each of its steps, however often the turn is resumed.
- A step begins when its model is asked. It ends when all its work is done, the middleware around it included.
- An error is noted without the model's secrets and with a message of bounded length.

Source: schemas/traces/turn_notes.py; docs/design/traces.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal

from msgspec import Raw, Struct, structs

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine import answers, messages, model_waits
from goondan.agentproc.machine.catalog import StepCatalog, refusal, unreachable
from goondan.agentproc.machine.turn import Action, AskModel, End, EnterStep, LeaveStep, LeaveTurn, RunTool, Yield
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from goondan.schemas.bundle.launch import AgentSpec
from goondan.schemas.text.times import rfc3339
from goondan.schemas.traces import turn_notes
from goondan.schemas.wire import codec, errors
from goondan.schemas.wire.frames import ErrorPayload, ToolResult
from goondan.schemas.wire.spans import call_span, model_span, step_span, turn_span
from goondan.schemas.wire.usage import Used
from goondan.schemas.worker.receipts import Receipt, kept

log = logging.getLogger("agentproc")

#: The ends of turns and steps. Notes and live news have the same names for them.
EndKind = Literal["turn.completed", "turn.failed", "step.completed", "step.failed"]


class Ending(Struct, frozen=True):
    """The end of the turn or of one of its steps, as it was noted, for live news."""

    #: The kind of the note, and of the news.
    kind: EndKind
    #: The span of the turn or the step.
    span_id: str
    #: The span around it; None: there is none.
    parent_span_id: str | None
    #: The step, from 1; 0: the turn itself.
    step: int = 0
    #: The error of a turn or step that failed.
    error: ErrorPayload | None = None


class TurnNotes:
    """The notes of one turn. `parent_span_id` is the span that the turn's event comes from. `redact` removes secrets
    from a text. `spec` gives the agent's specification as it is now. `live`: somebody takes the endings.
    """

    def __init__(
        self,
        store: ConversationStore,
        turn_id: str,
        trace_id: str,
        parent_span_id: str | None,
        redact: Callable[[str], str],
        spec: Callable[[], AgentSpec],
        *,
        live: bool = False,
    ) -> None:
        self._spec = spec
        self._whole = spec().traces == "whole"
        self._store = store
        self._add = store.notes.append  # see ConversationFile.note
        self._turn_id = turn_id
        self._trace_id = trace_id
        self._parent = parent_span_id
        self._redact = redact
        self._span = self._step_span = turn_span(turn_id)
        self._step = 0  # the step that was begun and has no end; 0: none
        self._step_error: ErrorPayload | None = None
        self._called: dict[str, Any] = {}  # the arguments of calls that this incarnation makes, or has noted
        #: The ends of model calls that are not noted yet. Extensions may ask the model several times in a step.
        self.model_ends: list[turn_notes.ModelDetail] = []
        #: Of calls whose results are not stored yet.
        self._receipts: dict[str, tuple[Raw | None, turn_notes.WayDetail]] = {}
        self._refusals: dict[str, tuple[str, str]] = {}  # of calls whose results are not noted yet
        self._endings: list[Ending] = []
        #: Somebody takes the endings.
        self.live = live
        #: What the turn's model calls have used.
        self.usage = answers.TurnUsage()

    # --- the turn

    def begun(self, at: str, waited_ms: int | None, place_ms: int, *, awaited: bool) -> None:
        """Note that the turn begins, how long its event has waited, and whether another turn waits for it."""
        detail = turn_notes.TurnDetail(self._trace_id, waited_ms, awaited, place_ms)
        self._note("turn.started", at, turn_notes.encode_detail(detail))

    def resumed(self, at: str) -> None:
        """Note that another process goes on with the turn. What it has used before counts, too."""
        self.usage.count_notes(self._store.model_notes(self._turn_id))
        last = self._store.last_step_note(self._turn_id)
        if last is not None and last[0] == "step.started" and (last[1] or "").isdecimal():
            self._step = int(last[1] or "0")
            self._step_span = step_span(self._turn_id, self._step)
        self._note("turn.resumed", at)

    def ended(self, end: End, at: str) -> None:
        """Note the end of the turn, and of its last step if that is open."""
        self._end_step(at, _failure(end))
        if end.status == "completed":
            self._end("turn.completed", at, self._span, self._parent)
        else:
            error = end.error or _UNKNOWN
            self._end("turn.failed", at, self._span, self._parent, 0, error)
            found = refusal(self._spec(), "", error.code, error.message, error.suggestion)
            if found is not None:
                self._note("call.refused", at, self._refused(found))

    # --- steps, model calls, tool calls

    def actions(self, actions: Sequence[Action], at: str, catalog: StepCatalog) -> None:
        """Note the model calls and tool calls that go out now, and the steps that are over. `catalog` is the step's
        catalog.
        """
        for action in actions:
            if isinstance(action, AskModel):
                self._begin_step(action.step, at)
            elif isinstance(action, RunTool):
                part = action.part
                # For a call that is made again, an earlier incarnation has noted it.
                is_new = not action.again and part.tool_call_id not in self._called
                self._called[part.tool_call_id] = part.args
                if is_new:
                    kept = self._kept(part.args, turn_notes.WHOLE_CHARS) if self._whole else None
                    outside = catalog.is_outside(part.tool_name)
                    called = turn_notes.CallDetail(part.tool_call_id, part.tool_name, outside, args=kept)
                    self._note_call("tool.called", at, part.tool_call_id, turn_notes.encode_detail(called))
            elif isinstance(action, EnterStep):
                if action.step != self._step:
                    self._end_step(at, None)
            elif isinstance(action, LeaveStep):
                self._step_error = action.error
            elif isinstance(action, LeaveTurn):
                self._end_step(at, _failure(action.end))
            elif isinstance(action, Yield):
                self._end_step(at, None)

    def results(self, parts: Sequence[messages.ToolResultPart], at: str) -> None:
        """Note results."""
        for part in parts:
            kept = self._output(part.result, turn_notes.WHOLE_CHARS) if self._whole else None
            args = self._called.get(part.tool_call_id)
            self._result(part.tool_name, part.tool_call_id, args, part.result, at, None, kept)

    def inner_began(self, script: str, part: messages.ToolCallPart, at: str, catalog: StepCatalog) -> str:
        """Note a call that a script makes. It stands below the script. Returns what is noted of its arguments."""
        kept = self._kept(part.args, turn_notes.WHOLE_CHARS if self._whole else turn_notes.SHORT_CHARS)
        called = turn_notes.CallDetail(
            part.tool_call_id, part.tool_name, catalog.is_outside(part.tool_name), script, kept
        )
        self._note_call(
            "tool.called", at, part.tool_call_id, turn_notes.encode_detail(called), f"{self._turn_id}/{script}"
        )
        return kept

    def inner_ended(self, script: str, part: messages.ToolCallPart, result: ToolResult, at: str) -> None:
        """Note the result of a call that a script has made."""
        kept = self._output(result, turn_notes.WHOLE_CHARS if self._whole else turn_notes.SHORT_CHARS)
        self._result(part.tool_name, part.tool_call_id, part.args, result, at, f"{self._turn_id}/{script}", kept)

    def _result(
        self, tool: str, tool_call_id: str, args: Any, result: ToolResult, at: str, within: str | None, kept: str | None
    ) -> None:
        error = result.error
        data, way = self._receipts.pop(tool_call_id, (None, None))
        receipt = None if data is None else self._receipt(tool_call_id, data)
        kind: turn_notes.NoteKind = "tool.failed" if result.status == "error" else "tool.completed"
        detail = turn_notes.ResultDetail(
            tool_call_id,
            result.status,
            None if error is None else error.code,
            None if receipt is None else turn_notes.encode_receipt(receipt),
            None if error is None else self._bounded(errors.for_people(error)),
            kept,
            way,
        )
        self._note_call(kind, at, tool_call_id, turn_notes.encode_detail(detail), within)
        found = None
        if error is not None:
            found = refusal(self._spec(), tool, error.code or "", error.message, error.suggestion)
        elif receipt is not None and receipt.call.denied:
            found = unreachable(tool, receipt.call.denied)
        known = self._refusals.pop(tool_call_id, None)
        if found is not None:
            if known is not None:
                found = structs.replace(found, by=known[0], allow=known[1])
            refused = structs.replace(found, tool_call_id=tool_call_id, args=self._kept(args, turn_notes.SHORT_CHARS))
            self._note_call("call.refused", at, tool_call_id, self._refused(refused), within)

    def _refused(self, detail: turn_notes.RefusedDetail) -> str:
        message, allow = self._bounded(detail.message), self._bounded(detail.allow)
        log.info("turn %s: %s was refused by %s: %s", self._turn_id, detail.tool_name or "it", detail.by, message)
        return turn_notes.encode_detail(structs.replace(detail, message=message, allow=allow))

    def _kept(self, value: Any, most: int) -> str:
        return turn_notes.in_short(value, most, self._redact)

    def _output(self, result: ToolResult, most: int) -> str | None:
        return None if result.output is None else self._kept(codec.from_raw(result.output, object), most)

    def received(self, tool_call_id: str, receipt: Raw | None, way: turn_notes.WayDetail) -> None:
        """Remember the tool host's receipt of a call, and the call's way. They are noted with the call's result, even
        if middleware changes the result.
        """
        self._receipts[tool_call_id] = receipt, way

    def refused(self, tool_call_id: str, by: str, allow: str) -> None:
        """Remember who has refused a call, and what would allow it: whoever knows it better than its code says it."""
        self._refusals[tool_call_id] = by, allow

    def model_ended(
        self,
        request: ModelRequest,
        attempts: model_waits.ModelAttempts,
        *,
        code: str | None = None,
        answer: ModelAnswer | None = None,
    ) -> None:
        """Remember that a model call has ended, with this answer or with the error of this code. It is noted with the
        next transaction. Of a failed call, `answer` has what was used.
        """
        answer = answer or ModelAnswer()
        model, usage = request.model, answer.usage
        answered = answer.model or model.model
        used = Used() if usage is None else answers.used_by(usage)
        ended = turn_notes.ModelDetail(
            step=request.step,
            model=f"{model.provider}/{answered}".rstrip("/"),
            finish_reason=answer.finish_reason,
            input_tokens=None if usage is None else used.input_tokens,
            output_tokens=None if usage is None else used.output_tokens,
            code=code,
            attempts=max(1, attempts.count),
            paused_ms=round(attempts.paused_s * 1000),
            waited_ms=round(attempts.waited_s * 1000),
            tries=attempts.tries,
            cached_tokens=used.cached_tokens,
            cache_write_tokens=used.cache_write_tokens,
            reasoning_tokens=used.reasoning_tokens,
            asked=model.model if model.model and model.model != answered else None,
            money=None if usage is None else answers.money_of(model, used),
            currency=None if model.pricing is None else model.pricing.currency,
            cut_off=answer.cut_off,
            left_out=request.left_out,
            shortened=request.shortened,
        )
        self.model_ends.append(ended)

    def model(self, at: str) -> None:
        """Note the remembered ends of model calls."""
        ends, self.model_ends = self.model_ends, []
        for ended in ends:
            self.usage.count(ended, at)
            kind: turn_notes.NoteKind = "model.failed" if ended.code is not None else "model.answered"
            span = model_span(self._turn_id, ended.step)
            self._add((self._turn_id, kind, at, turn_notes.encode_detail(ended), span, self._step_span))

    def take_endings(self) -> list[Ending]:
        """The ends that were noted since the last call of this function."""
        endings, self._endings = self._endings, []
        return endings

    # --- inside

    def _begin_step(self, step: int, at: str) -> None:
        if step == self._step:
            return  # its model is asked again, by another incarnation
        self._end_step(at, None)
        self._step, self._step_span = step, step_span(self._turn_id, step)
        self._add((self._turn_id, "step.started", at, str(step), self._step_span, self._span))

    def _end_step(self, at: str, error: ErrorPayload | None) -> None:
        error, self._step_error = error or self._step_error, None
        step, self._step = self._step, 0
        if step != 0:
            self._end(
                "step.completed" if error is None else "step.failed", at, self._step_span, self._span, step, error
            )

    def _end(
        self,
        kind: EndKind,
        at: str,
        span_id: str,
        parent_span_id: str | None,
        step: int = 0,
        error: ErrorPayload | None = None,
    ) -> None:
        detail = str(step) if step else None
        if error is not None:
            error = ErrorPayload(error.code, self._bounded(error.message), name=error.name)
            detail = turn_notes.encode_detail(turn_notes.FailureDetail(error, step or None))
        self._add((self._turn_id, kind, at, detail, span_id, parent_span_id))
        if self.live:
            self._endings.append(Ending(kind, span_id, parent_span_id, step, error))

    def hangs(self, extension: str, place: str, at: str, hangs_s: float | None) -> None:
        """Note that a layer of an extension hangs, for `hangs_s` seconds now; None: it does not any more."""
        kind: turn_notes.NoteKind = "extension.over" if hangs_s is None else "extension.waits"
        since = rfc3339(datetime.fromisoformat(at).timestamp() - (hangs_s or 0.0))
        self._note(kind, since, turn_notes.encode_detail(turn_notes.LayerDetail(extension, place)))

    def waits(self, tool_call_id: str, at: str, within: str | None) -> None:
        """Note that a call begins to wait for a person. `within` is the callId of the script that makes it."""
        self._note_call("tool.waits", at, tool_call_id, json.dumps(tool_call_id), within)

    def _note(self, kind: turn_notes.NoteKind, at: str, detail: str | None = None) -> None:
        self._add((self._turn_id, kind, at, detail, self._span, self._parent))

    def _note_call(
        self, kind: turn_notes.NoteKind, at: str, tool_call_id: str, detail: str, within: str | None = None
    ) -> None:
        parent = self._step_span if within is None else call_span(within)
        self._add((self._turn_id, kind, at, detail, call_span(f"{self._turn_id}/{tool_call_id}"), parent))

    def _bounded(self, message: str) -> str:
        return errors.cut_message(self._redact(message), turn_notes.MAX_NOTED_MESSAGE)

    def _receipt(self, tool_call_id: str, data: Raw) -> Receipt | None:
        try:
            return kept(codec.from_raw(data, Receipt))
        except errors.GoondanError as error:
            log.warning("call %s: its receipt cannot be read: %s", tool_call_id, error.info.message)
            return None


#: The error of a turn that failed without one.
_UNKNOWN = ErrorPayload("E_AGENT_FAILED", "the turn failed")


def _failure(end: End) -> ErrorPayload | None:
    """Why the open step failed; None when it is done. A turn without steps left has no failed step."""
    if end.status == "completed" or (end.error is not None and end.error.code == "E_MAX_STEPS"):
        return None
    return end.error or _UNKNOWN
