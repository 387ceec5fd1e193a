"""The questions of a turn to other agents, and how answers and ends of pending work come back. Pure.

Rules.
- An id is made of the turn's id, the tool call's id, and a digest of the question. So a turn that another process
  resumes asks again under the same id and gets the stored answer. Another question gets another id.
- The frame also carries the whole digest. The broker refuses a known id with another content.
- An agent cannot ask its own instance. To ask an agent of its own name, it gives another instance key.
- A tool that answered `pending` has ended its call. The agent hears of the end of the work at most twice: by a frame
  while a turn runs, whose content goes into the conversation before the next model call, and by an event in its
  mailbox. The event begins a turn of its own, unless the frame was taken already. The message has the id of the event,
  so a repeated one is recognised.

Source: docs/design/delivery.md section 5; requirements AGENTS-01 to AGENTS-30, HANDOFF-01 to HANDOFF-08, RESULT-04;
PROTOCOL-TOOLHOSTS.md "Pending results".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from goondan.agentproc.machine.messages import Message, MessageSource, ToolData, UserData
from goondan.schemas.bundle.address import is_instance_key
from goondan.schemas.wire import blobs, frames, spans
from goondan.schemas.wire import questions as wire_questions
from goondan.schemas.wire.codec import check_depth, check_json, encode_value, from_raw, replace_surrogates, to_raw
from goondan.schemas.wire.errors import GoondanError, fail, for_model

#: Longer names of calls are shortened in ids. An id may have 256 characters.
_MAX_NAME: Final = 170
#: Hexadecimal digits of the digest in an id, enough that two questions of one call never have the same digits by
#: chance.
_ID_DIGITS: Final = 24
#: The beginning of the names of questions that extensions ask (extensions/api.py): around a turn or a step, or in a
#: call. The id of a call may hold any character, so its length stands before it.
_PLACE: Final = re.compile(r"@(?:turn|step(?P<step>\d{1,9})|call(?P<length>\d{1,4}))\.")
#: The longest name of an agent in a message (characters). A model may have written any text as a name.
_MAX_TARGET: Final = 256


#: How much of the reason for a restart the kernel gets (characters). It is for a log.
_MAX_REASON: Final = 500


class Asker(Struct, frozen=True):
    """The asking agent instance, in this turn."""

    #: The name of the agent.
    agent: str
    #: The instance key.
    instance_key: str
    #: The id of the turn.
    turn_id: str


class Question(Struct, frozen=True, kw_only=True):
    """A question to an agent."""

    #: What is asked for: a request, an event without an answer, or a handoff.
    op: Literal["request", "send", "handoff"]
    #: The tool call's id, or another name of the question within its turn.
    name: str
    #: The agent that is asked.
    target: str
    #: Any JSON value.
    input: Any
    #: The instance of the target; None: the asker's own instance key.
    instance_key: str | None = None
    #: The type of the event; None: the default type.
    event_type: str | None = None
    #: How long the answer may take; None: there is no limit.
    timeout_ms: int | None = wire_questions.TIMEOUT_MS
    #: The metadata of the event.
    metadata: dict[str, Any] | None = None
    #: The asker goes on, and the answer comes as a message (agentproc/machine/questions.py).
    asynchronous: bool = False
    #: So it does after `timeout_ms`, and the work goes on. False: `timeout_ms` ends both sides.
    goes_on: bool = False


def event_frame(asker: Asker, question: Question, left_ms: int | None, created_at: str) -> frames.Frame:
    """The `event` frame for a question. `left_ms` is the time that the asker's turn has left, None for no end.
    `created_at` is RFC 3339.

    Raises GoondanError E_TOOL_INVALID_ARGS, E_AGENT_CYCLE, E_FRAME_TOO_LARGE.
    """
    key = _checked_key(asker, question.target, question.instance_key)
    kind = question.event_type or wire_questions.EVENT_TYPES[question.op]
    if question.event_type is not None and not wire_questions.is_event_type(question.event_type):
        raise _invalid("eventType is 1 to 128 letters, digits and .:_- and no type that the kernel uses itself")
    if question.timeout_ms is not None and question.timeout_ms < 1:
        raise _invalid("timeoutMs is at least 1")
    if question.metadata is not None and not isinstance(question.metadata, dict):
        raise _invalid("metadata is an object")
    digest = hashlib.sha256(_encoded([question.target, key, kind, question.input, question.metadata])).hexdigest()
    event_id = f"{_named(asker.turn_id, question.name)}~{digest[:_ID_DIGITS]}"
    named = wire_questions.handoff_correlation if question.op == "handoff" else wire_questions.correlation
    reply_to = None if question.op == "send" else frames.ReplyTo(asker.agent, named(event_id))
    event = frames.AgentEvent(
        id=event_id,
        type=kind,
        created_at=created_at,
        input=question.input,
        instance_key=key,
        metadata=question.metadata,
        reply_to=reply_to,
    )
    frame = frames.Frame(
        "event", to=question.target, instance_key=key, event_id=event_id, reply_to=reply_to, digest=digest
    )
    frame.parent_span_id = asking_span(asker.turn_id, question.name)
    if question.asynchronous:
        frame.asynchronous, frame.deadline_ms = True, question.timeout_ms
    elif question.op == "request":
        frame.deadline_ms = left_ms if question.goes_on else _shorter(question.timeout_ms, left_ms)
    frame.payload = to_raw(event)
    return frame


def asking_span(turn_id: str, name: str) -> str:
    """The span that asks the question of this name: a tool call, or the turn or step whose middleware asks."""
    place = _PLACE.match(name)
    if place is None:
        return spans.call_span(f"{turn_id}/{name}")
    if place["length"] is not None:
        return spans.call_span(f"{turn_id}/{name[place.end() : place.end() + int(place['length'])]}")
    return spans.step_span(turn_id, int(place["step"] or 0))


def call_place(tool_call_id: str) -> str:
    """The beginning of the names of questions that the handler of a call asks in the agent's process."""
    return f"@call{len(tool_call_id)}.{tool_call_id}"


def spawn_frame(
    asker: Asker, name: str, target: str, instance_key: str | None, cwd: str | None, left_ms: int | None
) -> frames.Frame:
    """`agents.spawn`. Raises GoondanError E_TOOL_INVALID_ARGS, E_AGENT_CYCLE."""
    key = _checked_key(asker, target, instance_key)
    digest = hashlib.sha256(_encoded([target, key, cwd])).hexdigest()
    frame = frames.Frame("agents.spawn", id=f"{_named(asker.turn_id, name)}~{digest[:_ID_DIGITS]}", to=target)
    frame.instance_key, frame.payload = key, to_raw(frames.AgentsSpawn(cwd))
    frame.deadline_ms = _shorter(wire_questions.TIMEOUT_MS, left_ms)
    return frame


def list_frame(include_all: bool, left_ms: int | None) -> frames.Frame:
    """`agents.list`."""
    deadline_ms = _shorter(wire_questions.LOOK_UP_MS, left_ms)
    return frames.Frame(
        "agents.list", deadline_ms=deadline_ms, payload=to_raw(frames.AgentsList(include_all=include_all))
    )


def catalog_frame(left_ms: int | None) -> frames.Frame:
    """`agents.catalog`."""
    return frames.Frame("agents.catalog", deadline_ms=_shorter(wire_questions.LOOK_UP_MS, left_ms))


def restart_frame(asker: Asker, name: str, reason: str) -> frames.Frame:
    """The `restart` frame of this tool call."""
    request = frames.RestartRequest(replace_surrogates(reason[:_MAX_REASON]))
    return frames.Frame("restart", call_id=f"{asker.turn_id}/{name}", payload=to_raw(request))


def response_of(asked: frames.Frame, answer: frames.Frame) -> dict[str, Any]:
    """The response to a request (AGENTS-13). Raises GoondanError E_AGENT_*, and E_TOOL_LIMIT for an answer that is too
    large.
    """
    target, event_id = asked.to or "", asked.event_id or ""
    response = wire_questions.answered(target, event_id, wire_questions.correlation(event_id), text_of(target, answer))
    ended = from_raw(answer.payload, frames.AgentEvent).answer
    return response if ended is None else wire_questions.with_object(response, ended)


def text_of(target: str, answer: frames.Frame) -> str | None:
    """The text of an answering event. Raises GoondanError as `response_of`."""
    ended = from_raw(answer.payload, frames.AgentEvent).answer
    if (error := wire_questions.answer_error(target, ended)) is not None:
        raise GoondanError(error)
    response = None if ended is None else ended.response
    size = len((response or "").encode("utf-8", "replace"))
    if size > wire_questions.MAX_ANSWER_BYTES:
        message = f"the answer of agent {target!r} has {size} bytes, limit {wire_questions.MAX_ANSWER_BYTES}"
        raise fail("E_TOOL_LIMIT", message, suggestion="Let the agent write to a file.")
    return response


def late(asked: frames.Frame, waited_ms: int | None = None) -> GoondanError:
    """The error when no answer came in time. `waited_ms`: how long its asker has waited, and waits no more."""
    message = f"agent {asked.to!r} ({asked.instance_key}) did not answer within {waited_ms or asked.deadline_ms} ms"
    if waited_ms is None:
        return fail("E_AGENT_TIMEOUT", message, suggestion="Give the request more time: timeoutMs.")
    message += f". It works on; its answer will come as a message about request {asked.event_id}"
    hint = (
        "Do not ask again: a second request waits behind the first. Go on with something else, or end the turn; the "
        "answer comes by itself. Next time give timeoutMs, or `async`: true, which does not wait at all."
    )
    return fail("E_AGENT_TIMEOUT", message, suggestion=hint)


def _checked_key(asker: Asker, target: Any, key: Any) -> str:
    if not isinstance(target, str) or not target or len(target) > _MAX_TARGET:
        raise _invalid(f"target is the name of an agent, of 1 to {_MAX_TARGET} characters")
    wanted = asker.instance_key if key is None else key
    if not isinstance(wanted, str) or not is_instance_key(wanted):
        raise _invalid("instanceKey has 1 to 256 visible characters")
    if (target, wanted) == (asker.agent, asker.instance_key):
        message = f"agent {target!r} with instance key {wanted!r} is the one that asks"
        raise fail("E_AGENT_CYCLE", message, suggestion="Give another instanceKey, or name another agent.")
    return wanted


def _encoded(value: Any) -> bytes:
    """A question's content, encoded. Raises GoondanError when it cannot be sent."""
    try:
        data = encode_value(value)
        check_depth(data)
        check_json(value, "it")
    except UnicodeEncodeError:
        raise _invalid("a string has half of a surrogate pair") from None
    except GoondanError as error:
        raise _invalid(error.info.message) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _invalid(f"it is no JSON value: {str(error)[:200]}") from None
    if len(data) > blobs.MAX_ARGS_BYTES:
        raise blobs.too_large(len(data), blobs.MAX_ARGS_BYTES)
    return data


def _named(turn_id: str, name: str) -> str:
    named = f"{turn_id}/{name}"
    if len(named) <= _MAX_NAME:
        return named
    return f"{turn_id}/{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _invalid(message: str) -> GoondanError:
    return fail("E_TOOL_INVALID_ARGS", message, suggestion="Correct the argument.")


def _shorter(milliseconds: int | None, left_ms: int | None) -> int | None:
    if milliseconds is None or left_ms is None:
        return left_ms if milliseconds is None else milliseconds
    return min(milliseconds, left_ms)


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


def read_completion(frame: frames.Frame, event: frames.AgentEvent) -> Ended:
    """Read a `tool.completed` event or frame. Raises GoondanError E_FORBIDDEN when the sender is no tool host,
    E_FRAME_INVALID.
    """
    if frame.source is None or frame.source.kind != "tool":
        raise fail("E_FORBIDDEN", f"only tool hosts send {frames.TOOL_COMPLETED} events")
    told = from_raw(msgspec.msgpack.encode(event.input), frames.Completion)
    result = from_raw(told.result, frames.ToolResult)
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


def read_answer(frame: frames.Frame) -> Ended:
    """Read the answer to a question that was asked without waiting: by `agents__request`, or by `handoff__request`,
    whose handle is the correlation id. Raises GoondanError E_FRAME_INVALID.
    """
    target, correlation_id = frame.from_ or "", frame.in_reply_to or ""
    event_id = (frame.event_id or "").removesuffix(wire_questions.ANSWER_SUFFIX)
    shown: dict[str, Any] = {"target": target, "eventId": event_id, "correlationId": correlation_id}
    error: frames.ErrorPayload | None = None
    response: str | None = None
    try:
        response = text_of(target, frame)
    except GoondanError as failure:
        error = for_model(failure.info)
    answer = {"sourceAgent": target, "result": response} if error is None else None
    if correlation_id == wire_questions.handoff_correlation(event_id):
        call = event_id.rpartition("~")[0].partition("/")[2]
        ended = {"status": "ok", "output": {**shown, "response": response}}
        if error is not None:
            ended = {"status": "error", "error": msgspec.to_builtins(error)}
        text = f"{_head(correlation_id)} (call {call}) is here:\n{msgspec.json.encode(ended).decode()}"
        return Ended(str(frame.event_id), text, HANDOFF, answer=answer)
    if error is None:
        text = f"The answer of agent {target} to your request {event_id} is here:\n{response or ''}"
        shown |= {"status": "ok", "response": response}
        answer_here = from_raw(frame.payload, frames.AgentEvent).answer
        shown = shown if answer_here is None else wire_questions.with_object(shown, answer_here)
    else:
        text = f"Agent {target} did not answer your request {event_id}: {error.message} [{error.code}]"
        shown |= {"status": "error", "error": msgspec.to_builtins(error)}
    return Ended(str(frame.event_id), text, MessageSource("tool", "agents__request"), {INTER_AGENT: shown}, answer)


def _head(handle: str) -> str:
    return f"The pending result {handle} of handoff__request"


def end_of(handle: str, news: Iterable[Ended], messages: Iterable[Message]) -> frames.ToolResult:
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
            raise GoondanError(msgspec.convert(ended["error"], frames.ErrorPayload))
        return frames.ToolResult(status="ok", output=to_raw(ended["output"]))
    if begun:
        return frames.ToolResult(status="pending", handle=handle)
    message_text = f"no work {handle[:200]!r} was handed over in this conversation, as far as it is kept"
    raise fail("E_TOOL_OUTCOME_UNKNOWN", message_text, suggestion="Give the handle as it stands in the pending result.")


def describe_late(frame: frames.Frame) -> str:
    """The log line for an answer that came too late: its asker was already told that there was no answer."""
    event_id = (frame.event_id or "").removesuffix(wire_questions.ANSWER_SUFFIX)
    how = ""
    if frame.blob is None:
        with suppress(GoondanError):
            answer = from_raw(frame.payload, frames.AgentEvent).answer
            how = "" if answer is None else f" ({answer.status}, turn {answer.turn_id})"
    return (
        f"the answer of agent {frame.from_} to the request {event_id} came after its time{how}; "
        "the model is not told of it, it is in that agent's trace"
    )
