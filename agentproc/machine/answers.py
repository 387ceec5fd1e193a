"""What a turn begins with and ends with (pure): its event, its name, the answer that is stored and sent, and what its
model
calls have used.

- The sender of an event writes the payload. The broker states in the header who the sender is and on whose behalf it
  acts.
- A model call is counted when its end is noted, asides and models in another's place included. Whoever resumes the turn
  reads it again from the notes. So a call counts exactly when its note is stored.

Source: docs/design/delivery.md sections 2 and 5; docs/design/traces.md section 4; PROTOCOL.md, "What a receiver checks
itself".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from goondan.agentproc.machine.turn import End
from goondan.agentproc.providers.base import Usage as CallUsage
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.traces.turn_notes import ModelDetail, used_by_call
from goondan.schemas.wire.blobs import MAX_BLOB_BYTES
from goondan.schemas.wire.codec import check_json, encode_value, from_raw, is_small_json
from goondan.schemas.wire.errors import CUT_MARK, ENVIRONMENT, error_payload, tool_error
from goondan.schemas.wire.frames import AgentEvent, Answer, ErrorPayload, Frame, ToolResult
from goondan.schemas.wire.usage import Part, Usage, Used, total_of

#: The most tokens of one call that are believed: more than any model reads or writes at once, by far.
_MOST: Final = 1_000_000_000


class TurnUsage(Struct, eq=False):
    """The sums of a turn, each of one day and one model."""

    #: The sums.
    parts: dict[Part, Used] = {}
    #: The model that answered last, as `provider/name`; None: none has.
    model: str | None = None

    def count(self, ended: ModelDetail, at: str) -> None:
        """Count a model call whose end was noted at this time (RFC 3339 in UTC)."""
        if ended.code is None:
            self.model = ended.model or self.model
        counted = used_by_call(at, ended)
        if counted is not None:
            part, used = counted
            self.parts.setdefault(part, Used()).add(used)

    def count_notes(self, notes: Iterable[tuple[str, str | None]]) -> None:
        """Count what the notes of an earlier incarnation say: time and detail of each end of a model call."""
        for at, detail in notes:
            try:
                ended = msgspec.json.decode(detail or "", type=ModelDetail)
            except (msgspec.DecodeError, UnicodeError):
                continue  # of another version
            self.count(ended, at)

    @property
    def total(self) -> Usage | None:
        """The sum; None when no model was asked."""
        return total_of(self.parts.items()) if self.parts else None


def used_by(usage: CallUsage) -> Used:
    """What one call used, without its price. A server may report any number."""
    read, written = max(0, min(usage.input_tokens, _MOST)), max(0, min(usage.output_tokens, _MOST))
    cached = max(0, min(usage.cached_tokens, read))
    return Used(
        input_tokens=read,
        output_tokens=written,
        cached_tokens=cached,
        cache_write_tokens=max(0, min(usage.cache_write_tokens, read - cached)),
        reasoning_tokens=max(0, min(usage.reasoning_tokens, written)),
    )


def money_of(model: ModelSpec, used: Used) -> int | None:
    """What a call of a model cost: billionths of its currency. None: the model has no price."""
    return None if model.pricing is None else used.cost(model.pricing)


def told_event(frame: Frame) -> AgentEvent:
    """The event in a frame, with `auth` and `source` of the header. Raises GoondanError E_FRAME_INVALID."""
    event = from_raw(frame.payload, AgentEvent)
    auth = None if frame.auth is None else from_raw(frame.auth, object)
    if auth is not None or not is_small_json(bytes(frame.payload)):
        for name, part in (("input", event.input), ("auth", auth), ("metadata", event.metadata)):
            check_json(part, name)
    return replace(event, auth=auth, source=frame.source or event.source)


#: The answering event's type.
RESPONSE_TYPE: Final = "agent.response"
#: Room for header and event around an answer (bytes).
_ROOM: Final = 8192
#: An operator's output or a response beyond this is replaced or cut (bytes).
MAX_ANSWER_BYTES: Final = MAX_BLOB_BYTES - _ROOM


def turn_id(agent: str, instance_key: str, event_id: str, attempt: int = 1) -> str:
    """The id of an event's turn. It is the same in every incarnation, and so are the callIds made from it."""
    name = f"{agent}\0{instance_key}\0{event_id}".encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(name).hexdigest()[:20]
    return f"t{digest}" if attempt == 1 else f"t{digest}-{attempt}"


def input_text(value: Any) -> str:
    """The text of the user message for an event's input: a text as it is, any other value as JSON, no input as ""."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def answer_payload(
    end: End, turn: str, event_id: str, at: str, trace_id: str | None = None, used: TurnUsage | None = None
) -> bytes:
    """The payload of the `done` or `failed` frame: an AgentEvent with the Answer, within the limit of a payload."""
    output = None if end.output is None else encode_value(end.output)
    if output is not None and len(output) > MAX_ANSWER_BYTES:
        output = encode_value(_too_large(len(output)))
    reasoning = end.reasoning or None
    room = MAX_ANSWER_BYTES - (0 if reasoning is None else len(reasoning.encode("utf-8", "replace")))
    answer = Answer(
        turn_id=turn,
        status=end.status,
        response=None if end.response is None else _fitting(end.response, room),
        finish_reason=end.finish_reason,
        error=end.error,
        output=None if output is None else Raw(output),
        steps=end.steps,
        trace_id=trace_id,
        model=None if used is None else used.model,
        usage=None if used is None else used.total,
        cut_off=end.cut_off,
        reasoning=reasoning,
        object=end.value,
    )
    return encode_value(
        AgentEvent(
            id=f"{turn}.answer",
            type=RESPONSE_TYPE,
            created_at=at,
            metadata={"inReplyTo": event_id},
            answer=answer,
        )
    )


def failed(error: ErrorPayload, steps: int = 0) -> End:
    """The end of a turn that could not run."""
    return End(status="failed", steps=steps, finish_reason="error", error=error)


def internal_error(what: str) -> ErrorPayload:
    """The error of a turn that met a bug. `what` names the exception; the log has the traceback."""
    return error_payload("E_INTERNAL", f"the agent process met an unexpected {what}")


def done_frame(event_id: str, epoch: int | None, status: str, payload: bytes) -> Frame:
    """The one frame that ends an event. `status` is the answer's. It names the cause of a failure for which the message
    is not to blame.
    """
    frame = Frame("ack", stage="done", event_id=event_id, epoch=epoch, payload=Raw(payload))
    if status != "completed":
        frame.stage = "failed"
        answer = from_raw(frame.payload, AgentEvent).answer
        if answer is not None and answer.error is not None and answer.error.code in ENVIRONMENT:
            frame.cause = f"{answer.error.code}: {answer.error.message}"
    return frame


def _fitting(text: str, limit: int) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - len(CUT_MARK)].decode("utf-8", "ignore") + CUT_MARK


def _too_large(size: int) -> ToolResult:
    message = f"The result of {size} bytes does not fit into an answer of {MAX_ANSWER_BYTES}."
    return ToolResult(status="error", error=tool_error("E_TOOL_LIMIT", message, name="FrameError"))
