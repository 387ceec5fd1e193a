"""The older message form and the frames that carry it. Pure; link.py is its shell.

A message is {type, from, to, payload, correlationId?} with one of four types:

| message | frame |
| --- | --- |
| `delegate` | `event` with `replyTo` {target: from, correlationId} |
| `delegate_result` | to the broker `ack` with stage `done` or `failed`; from the broker `event` with `inReplyTo` |
| `event` | `event` without `replyTo` |
| `shutdown` | `shutdown` |

A payload travels as `input` of the AgentEvent. A result that is a text is the answer's `response`; any other is both
`input`, as it is, and `response`, as JSON text, so that a plain client reads it too. A result that is exactly
{"error": {code, message, …}} is a failure, and failures of others arrive in that shape.

Source: docs/design/wire.md section 9; requirements IPC-01 to IPC-08.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from goondan.schemas.bundle.address import is_resource_name
from goondan.schemas.wire.codec import check_depth, check_json, encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import ORCHESTRATOR, AgentEvent, Answer, ErrorPayload, Frame, ReplyTo, Shutdown

LegacyType = Literal["delegate", "delegate_result", "event", "shutdown"]

#: Types of the AgentEvents that carry a delegate, an event and a result.
DELEGATE_TYPE: Final = "agent.delegate"
EVENT_TYPE: Final = "agent.event"
RESULT_TYPE: Final = "agent.response"
#: Longer correlation ids are refused, as everywhere on the bus (characters).
MAX_CORRELATION_ID: Final = 256
#: The senders and receivers that are no agents: `client` is a sender's own name, `client/7` is the broker's name for
#: it.
_CLIENT: Final = re.compile(r"client/[0-9]+\Z")


class LegacyMessage(
    Struct, frozen=True, omit_defaults=True, rename={"from_": "from", "correlation_id": "correlationId"}
):
    """One message. A sender or receiver is an agent's name, `client`, `client/<n>` or `orchestrator`."""

    #: What it is about.
    type: LegacyType
    #: Who sends it.
    from_: str
    #: Who receives it.
    to: str
    #: What it says.
    payload: Any
    #: The request that it belongs to.
    correlation_id: str | None = None


def parse(value: Any) -> LegacyMessage:
    """A decoded JSON object to a message. Raises GoondanError E_FRAME_INVALID for anything that is none."""
    try:
        message = msgspec.convert(value, LegacyMessage)
    except (msgspec.ValidationError, RecursionError) as error:
        raise fail("E_FRAME_INVALID", f"not a message of the older form: {str(error)[:200]}") from None
    for field, name in (("from", message.from_), ("to", message.to)):
        if not is_resource_name(name) and not _CLIENT.match(name):
            raise fail("E_FRAME_INVALID", f"`{field}` is no agent's name: {name[:100]!r}")
    correlation = message.correlation_id
    if correlation is not None and not 0 < len(correlation) <= MAX_CORRELATION_ID:
        raise fail("E_FRAME_INVALID", f"a correlationId has 1 to {MAX_CORRELATION_ID} characters")
    _check_payload(message.payload)
    return message


def unparse(message: LegacyMessage) -> dict[str, Any]:
    """A message as the JSON object that `parse` takes."""
    return msgspec.to_builtins(message)  # type: ignore[no-any-return]


def request_frame(
    message: LegacyMessage, *, event_id: str, created_at: str, instance_key: str, deadline_ms: int | None = None
) -> Frame:
    """A `delegate` or an `event` as the frame to send. Raises GoondanError E_FRAME_INVALID for other types.

    A `delegate` needs its correlationId here; that of an `event` has no meaning and is carried as metadata.
    """
    reply_to: ReplyTo | None = None
    if message.type == "delegate":
        reply_to = ReplyTo(message.from_, _correlation(message))
    elif message.type != "event":
        raise fail("E_FRAME_INVALID", f"a {message.type} is no request")
    told = message.type == "event" and message.correlation_id is not None
    event = AgentEvent(
        id=event_id,
        type=DELEGATE_TYPE if reply_to is not None else EVENT_TYPE,
        created_at=created_at,
        input=message.payload,
        instance_key=instance_key,
        reply_to=reply_to,
        metadata={"correlationId": message.correlation_id} if told else None,
    )
    return Frame(
        "event",
        from_=message.from_,
        to=message.to,
        instance_key=instance_key,
        event_id=event_id,
        reply_to=reply_to,
        deadline_ms=deadline_ms,
        payload=to_raw(event),
    )


def result_frame(message: LegacyMessage, *, event_id: str, epoch: int | None, created_at: str) -> Frame:
    """A `delegate_result` as the `ack` that ends the event it answers. Raises GoondanError E_FRAME_INVALID."""
    if message.type != "delegate_result":
        raise fail("E_FRAME_INVALID", f"a {message.type} is no result")
    payload, error = message.payload, _error_in(message.payload)
    text: str | None = None
    if payload is not None and error is None:
        text = payload if isinstance(payload, str) else msgspec.json.encode(payload).decode()
    return end_frame(
        event_id,
        epoch,
        created_at,
        response=text,
        error=error,
        value=None if isinstance(payload, str) else payload,
    )


def end_frame(
    event_id: str,
    epoch: int | None,
    created_at: str,
    *,
    response: str | None = None,
    error: ErrorPayload | None = None,
    value: Any = None,
) -> Frame:
    """The `ack` that ends an event: `failed` with an error, else `done`."""
    turn = f"legacy-{event_id}"
    answer = Answer(
        turn_id=turn,
        status="completed" if error is None else "failed",
        response=response,
        finish_reason="stop" if error is None else "error",
        error=error,
    )
    event = AgentEvent(
        id=f"{turn}.answer",
        type=RESULT_TYPE,
        created_at=created_at,
        input=value,
        metadata={"inReplyTo": event_id},
        answer=answer,
    )
    stage = "done" if error is None else "failed"
    return Frame("ack", stage=stage, event_id=event_id, epoch=epoch, payload=to_raw(event))


def shutdown_frame(message: LegacyMessage) -> Frame:
    """A `shutdown` as the frame it stands for. Raises GoondanError E_FRAME_INVALID when the payload is no Shutdown."""
    if message.type != "shutdown":
        raise fail("E_FRAME_INVALID", f"a {message.type} is no shutdown")
    return Frame("shutdown", from_=message.from_, payload=to_raw(from_raw(encode_value(message.payload), Shutdown)))


def message_of(frame: Frame, me: str) -> LegacyMessage | None:
    """What arrived, as a message to `me`; None for frames that the older form has no word for.

    Raises GoondanError E_FRAME_INVALID when the payload is not what the type promises.
    """
    if frame.type == "shutdown":
        payload = msgspec.to_builtins(from_raw(frame.payload, Shutdown))
        return LegacyMessage("shutdown", ORCHESTRATOR, me, payload)
    if frame.type != "event":
        return None
    event = from_raw(frame.payload, AgentEvent)
    check_json(event.input, "input")
    sender = frame.from_ or ORCHESTRATOR
    if frame.in_reply_to is not None:
        return LegacyMessage("delegate_result", sender, me, _result_payload(event), frame.in_reply_to)
    if frame.reply_to is not None:
        return LegacyMessage("delegate", sender, me, event.input, frame.reply_to.correlation_id)
    correlation = (event.metadata or {}).get("correlationId")
    return LegacyMessage("event", sender, me, event.input, correlation if isinstance(correlation, str) else None)


def failure(request: LegacyMessage, error: ErrorPayload) -> LegacyMessage:
    """The `delegate_result` for a `delegate` that the bus could not carry, or whose answer cannot be read."""
    return LegacyMessage("delegate_result", request.to, request.from_, error_value(error), request.correlation_id)


def error_value(error: ErrorPayload) -> dict[str, Any]:
    """An error as the payload of a `delegate_result`."""
    return {"error": msgspec.to_builtins(error)}


def _result_payload(event: AgentEvent) -> Any:
    answer = event.answer
    if event.input is not None or answer is None:
        return event.input
    return answer.response if answer.error is None else error_value(answer.error)


def _error_in(payload: Any) -> ErrorPayload | None:
    """The error that a result's payload is, if it is exactly one."""
    if not isinstance(payload, dict) or payload.keys() != {"error"}:
        return None
    try:
        return msgspec.convert(payload["error"], ErrorPayload)
    except msgspec.ValidationError:
        return None


def _correlation(message: LegacyMessage) -> str:
    if not message.correlation_id:
        raise fail("E_FRAME_INVALID", f"a {message.type} needs a correlationId")
    return message.correlation_id


def _check_payload(payload: Any) -> None:
    try:
        check_depth(encode_value({"": payload}))  # one level more: it travels inside an AgentEvent
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise fail("E_FRAME_INVALID", f"the payload cannot be sent: {str(error)[:200]}") from None
    check_json(payload, "payload")
