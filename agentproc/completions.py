"""How the end of pending work enters the conversation (pure).

A tool that answered `pending` has ended its call. The agent hears of the end of the work at most twice: by a frame
while a turn runs, whose content goes into the conversation before the next model call, and by an event in its mailbox.
The event begins a turn of its own, unless the frame was taken already. The message has the id of the event, so a
repeated one is recognised.

Source: requirement RESULT-04; PROTOCOL-TOOLHOSTS.md "Pending results".
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Struct

from goondan.agentproc.conversation import Message, MessageSource, ToolData, UserData
from goondan.agentproc.questions import text_of
from goondan.schemas.wire.codec import check_json, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail, for_model
from goondan.schemas.wire.frames import TOOL_COMPLETED, AgentEvent, Completion, ErrorPayload, Frame, ToolResult
from goondan.schemas.wire.questions import ANSWER_SUFFIX, handoff_correlation, with_object


class Ended(Struct, frozen=True):
    """The end of one piece of pending work."""

    #: The id of the event, and of the message.
    event_id: str
    #: The text of the user message.
    text: str
    #: The source of the message.
    source: MessageSource
    #: The metadata of the message.
    metadata: dict[str, Any] = {}
    #: The answer of another agent, as extensions get it. None for any other work, and for an agent that failed.
    answer: dict[str, Any] | None = None
    #: The turn that the work was begun in; None for an answer of another agent.
    turn_id: str | None = None


def read_completion(frame: Frame, event: AgentEvent) -> Ended:
    """Read a `tool.completed` event or frame. Raises GoondanError E_FORBIDDEN when the sender is no tool host,
    E_FRAME_INVALID.
    """
    if frame.source is None or frame.source.kind != "tool":
        raise fail("E_FORBIDDEN", f"only tool hosts send {TOOL_COMPLETED} events")
    told = from_raw(msgspec.msgpack.encode(event.input), Completion)
    result = from_raw(told.result, ToolResult)
    shown: dict[str, object] = {"status": result.status}
    if result.output is not None:
        shown["output"] = from_raw(result.output, object)
        check_json(shown["output"], "output")
    if result.error is not None:
        shown["error"] = msgspec.to_builtins(for_model(result.error))
    text = (
        f"The pending result {told.handle} of {told.tool_name} (call {told.tool_call_id}) is here:\n"
        f"{msgspec.json.encode(shown).decode()}"
    )
    return Ended(event.id, text, MessageSource("tool", told.tool_name), turn_id=told.turn_id)


#: The source of a message that tells the end of handed-over work.
HANDOFF: Final = MessageSource("tool", "handoff__request")
#: The key in the metadata of a message made from an answer: {target, eventId, correlationId, status, response or
#: error}.
INTER_AGENT: Final = "__goondanInterAgentResponse"


def read_answer(frame: Frame) -> Ended:
    """Read the answer to a question that was asked without waiting: by `agents__request`, or by `handoff__request`,
    whose handle is the correlation id. Raises GoondanError E_FRAME_INVALID.
    """
    target, correlation_id = frame.from_ or "", frame.in_reply_to or ""
    event_id = (frame.event_id or "").removesuffix(ANSWER_SUFFIX)
    shown: dict[str, Any] = {"target": target, "eventId": event_id, "correlationId": correlation_id}
    error: ErrorPayload | None = None
    response: str | None = None
    try:
        response = text_of(target, frame)
    except GoondanError as failure:
        error = for_model(failure.info)
    answer = {"sourceAgent": target, "result": response} if error is None else None
    if correlation_id == handoff_correlation(event_id):
        call = event_id.rpartition("~")[0].partition("/")[2]
        ended = {"status": "ok", "output": {**shown, "response": response}}
        if error is not None:
            ended = {"status": "error", "error": msgspec.to_builtins(error)}
        text = f"{_head(correlation_id)} (call {call}) is here:\n{msgspec.json.encode(ended).decode()}"
        return Ended(str(frame.event_id), text, HANDOFF, answer=answer)
    if error is None:
        text = f"The answer of agent {target} to your request {event_id} is here:\n{response or ''}"
        shown |= {"status": "ok", "response": response}
        answer_here = from_raw(frame.payload, AgentEvent).answer
        shown = shown if answer_here is None else with_object(shown, answer_here)
    else:
        text = f"Agent {target} did not answer your request {event_id}: {error.message} [{error.code}]"
        shown |= {"status": "error", "error": msgspec.to_builtins(error)}
    return Ended(str(frame.event_id), text, MessageSource("tool", "agents__request"), {INTER_AGENT: shown}, answer)


def _head(handle: str) -> str:
    return f"The pending result {handle} of handoff__request"


def end_of(handle: str, news: Iterable[Ended], messages: Iterable[Message]) -> ToolResult:
    """What the work behind the handle of a handoff came to, by the `news` that no model has read yet and the messages
    of the conversation; `pending` if it goes on. Raises GoondanError: its error, or E_TOOL_OUTCOME_UNKNOWN for a handle
    that is not in the conversation.
    """
    texts, begun = [ended.text for ended in news if ended.source == HANDOFF], False
    for message in messages:
        if isinstance(message.data, UserData) and message.source == HANDOFF:
            texts.append(message.data.content)
        elif isinstance(message.data, ToolData):
            begun = begun or any(part.result.handle == handle for part in message.data.content)
    text = next((text for text in texts if text.startswith(_head(handle) + " ")), None)
    if text is not None:
        ended = msgspec.json.decode(text.partition("\n")[2])
        if "error" in ended:
            raise GoondanError(msgspec.convert(ended["error"], ErrorPayload))
        return ToolResult(status="ok", output=to_raw(ended["output"]))
    if begun:
        return ToolResult(status="pending", handle=handle)
    message_text = f"no work {handle[:200]!r} was handed over in this conversation, as far as it is kept"
    raise fail("E_TOOL_OUTCOME_UNKNOWN", message_text, suggestion="Give the handle as it stands in the pending result.")


def describe_late(frame: Frame) -> str:
    """The log line for an answer that came too late: its asker was already told that there was no answer."""
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
