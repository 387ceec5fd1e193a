"""What pending work came to, as the conversation has it (pure).

A tool that answered `pending` has ended. Its agent hears of it twice at most: by a frame while a turn runs, whose
content goes into the conversation before the next model call, and by an event in its mailbox, which begins a turn of
its own unless the first way has told it already. The message's id is the event's, so the second one is recognised.

Source: requirement RESULT-04; PROTOCOL.md "Pending results".
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Struct

from agentproc.conversation import MessageSource
from agentproc.questions import text_of
from schemas.codec import check_json, from_raw
from schemas.errors import GoondanError, fail
from schemas.frames import TOOL_COMPLETED, AgentEvent, Completion, ErrorPayload, Frame, ToolResult
from schemas.questions import ANSWER_SUFFIX, handoff_correlation


class Ended(Struct, frozen=True):
    """The end of one piece of pending work: what a user message says of it, who said it, and its metadata. `answer` is
    what extensions are told of another agent's answer, None for anything else and for one that failed.
    """

    event_id: str
    text: str
    source: MessageSource
    metadata: dict[str, Any] = {}
    answer: dict[str, Any] | None = None


def read_completion(frame: Frame, event: AgentEvent) -> Ended:
    """A `tool.completed` event or frame. Raises GoondanError E_FORBIDDEN when no tool host sent it, E_FRAME_INVALID."""
    if frame.source is None or frame.source.kind != "tool":
        raise fail("E_FORBIDDEN", f"only tool hosts send {TOOL_COMPLETED} events")
    told = from_raw(msgspec.msgpack.encode(event.input), Completion)
    result = from_raw(told.result, ToolResult)
    shown: dict[str, object] = {"status": result.status}
    if result.output is not None:
        shown["output"] = from_raw(result.output, object)
        check_json(shown["output"], "output")
    if result.error is not None:
        shown["error"] = msgspec.to_builtins(result.error)
    text = (
        f"The pending result {told.handle} of {told.tool_name} (call {told.tool_call_id}) is here:\n"
        f"{msgspec.json.encode(shown).decode()}"
    )
    return Ended(event.id, text, MessageSource("tool", told.tool_name))


#: In the metadata of the message that an answer becomes: {target, eventId, correlationId, status, response or error}.
INTER_AGENT: Final = "__goondanInterAgentResponse"


def read_answer(frame: Frame) -> Ended:
    """The answer to what was asked without waiting: by `agents__request`, or by `handoff__request`, whose handle is the
    correlation id. Raises GoondanError E_FRAME_INVALID.
    """
    target, correlation_id = frame.from_ or "", frame.in_reply_to or ""
    event_id = (frame.event_id or "").removesuffix(ANSWER_SUFFIX)
    shown: dict[str, Any] = {"target": target, "eventId": event_id, "correlationId": correlation_id}
    error: ErrorPayload | None = None
    response: str | None = None
    try:
        response = text_of(target, frame)
    except GoondanError as failure:
        error = failure.info
    answer = {"sourceAgent": target, "result": response} if error is None else None
    if correlation_id == handoff_correlation(event_id):
        call = event_id.rpartition("~")[0].partition("/")[2]
        ended = {"status": "ok", "output": {**shown, "response": response}}
        if error is not None:
            ended = {"status": "error", "error": msgspec.to_builtins(error)}
        text = (
            f"The pending result {correlation_id} of handoff__request (call {call}) is here:\n"
            f"{msgspec.json.encode(ended).decode()}"
        )
        return Ended(str(frame.event_id), text, MessageSource("tool", "handoff__request"), answer=answer)
    if error is None:
        text = f"The answer of agent {target} to your request {event_id} is here:\n{response or ''}"
        shown |= {"status": "ok", "response": response}
    else:
        text = f"Agent {target} did not answer your request {event_id}: {error.message} [{error.code}]"
        shown |= {"status": "error", "error": msgspec.to_builtins(error)}
    return Ended(str(frame.event_id), text, MessageSource("tool", "agents__request"), {INTER_AGENT: shown}, answer)


def describe_late(frame: Frame) -> str:
    """What the log says of an answer that came after its asker was told that it got no answer."""
    event_id = (frame.event_id or "").removesuffix(ANSWER_SUFFIX)
    how = ""
    if frame.blob is None:
        with suppress(GoondanError):
            answer = from_raw(frame.payload, AgentEvent).answer
            how = "" if answer is None else f" ({answer.status}, turn {answer.turn_id})"
    return (
        f"the answer of agent {frame.from_} to the request {event_id} came after its time{how}; "
        "the model is not told of it, it is in that agent's trace"
    )
