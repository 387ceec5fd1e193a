"""The answers that the broker gives instead of an agent: expired, dead, could not be started. Pure.

Source: docs/design/delivery.md section 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Raw

from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import AgentEvent, Answer, ErrorPayload

if TYPE_CHECKING:
    from goondan.kernel.broker.entities import Event

#: There is no wall clock here, and nobody needs one: the event's own times are in its trace.
_NO_TIME = "1970-01-01T00:00:00Z"


def failure_answer(event: Event, error: ErrorPayload) -> Raw:
    """The payload of the answer to a turn that never ended (AgentEvent of type `agent.response`)."""
    answer = Answer(turn_id="", status="failed", finish_reason="error", error=error, trace_id=event.content.trace_id)
    return to_raw(
        AgentEvent(
            id=event.answer_id,
            type="agent.response",
            created_at=_NO_TIME,
            instance_key=event.instance.key,
            metadata={"inReplyTo": event.id},
            answer=answer,
        )
    )


def no_room_answer(event: Event, size: int) -> Raw:
    """Replaces an answer of `size` bytes for which there is no room."""
    message = f"the answer of {event.instance.address} has {size:,} bytes, and there is no room for so many now"
    suggestion = "Ask for less at a time, or let the agent write to a file."
    return failure_answer(event, error_payload("E_TOOL_LIMIT", message, suggestion=suggestion))


def deleted_answer(event: Event) -> Raw:
    """The answer to a request whose instance was deleted."""
    message = f"{event.instance.address} was deleted before it had answered"
    return failure_answer(event, error_payload("E_INSTANCE_DELETED", message))
