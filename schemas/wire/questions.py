"""Requests from one agent to another, and what a running call asks of the agent that made it.

Agents ask by themselves (the bundled `agents` and `handoff`) and through a tool's `ctx.runtime`; both follow this.

A tool host sends `tool.ask` in the name of a call that is open there. The broker passes it on to the agent that holds
the call, and to nobody else. The agent answers each with one `tool.answer`.

Source: requirements AGENTS-02, AGENTS-05, AGENTS-12, AGENTS-13, AGENTS-19, HANDOFF-02; docs/design/wire.md section 4;
docs/design/tools.md section 12.
"""

from __future__ import annotations

import re
from typing import Any, Final

from msgspec import Struct

from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import error_payload, row_of
from goondan.schemas.wire.frames import OPERATOR_TYPES, TOOL_COMPLETED, Answer, ErrorPayload, OptionalRaw

#: How long an answer may take when the asker does not say (milliseconds; AGENTS-12).
TIMEOUT_MS: Final = 60_000
#: How long the broker may take for what it knows itself (milliseconds).
LOOK_UP_MS: Final = 10_000
#: An answer as the asker gets it (bytes of its text, or of its msgpack): it becomes a tool's result, of which this is
#: the usual limit, and several must fit into what may wait for a jail.
MAX_ANSWER_BYTES: Final = 4 << 20
#: An answer is named after its event.
ANSWER_SUFFIX: Final = ":answer"
#: The handle of handed-over work begins so.
HANDOFF_PREFIX: Final = "handoff:"
#: Of `request`, `send` (AGENTS-12, AGENTS-19) and `handoff`.
EVENT_TYPES: Final = {"request": "agent.request", "send": "agent.send", "handoff": "agent.handoff"}
#: Events of these types come from elsewhere, and mean something to the agent.
RESERVED_TYPES: Final = OPERATOR_TYPES | {TOOL_COMPLETED, "agent.response"}
_EVENT_TYPE: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


def is_event_type(text: str) -> bool:
    """Whether an asker may give an event this type."""
    return _EVENT_TYPE.match(text) is not None and text not in RESERVED_TYPES


def correlation(event_id: str) -> str:
    """The correlation id of a request."""
    return f"corr:{event_id}"


def answer_error(target: str, answer: Answer | None) -> ErrorPayload | None:
    """Why there is no answer of `target`: errors about agents, and those that are passed on (errors.ErrorCode), as they
    are, every other as E_AGENT_FAILED that says which. None when the turn was completed.
    """
    if answer is None:
        return error_payload("E_AGENT_FAILED", f"agent {target!r} sent no answer")
    if answer.status != "failed":
        return None
    error = answer.error
    if error is None:
        return error_payload("E_AGENT_FAILED", f"agent {target!r} failed")
    if error.code.startswith("E_AGENT_") or row_of(error.code).passed_on:
        return error_payload(error.code, f"agent {target!r}: {error.message}", suggestion=error.suggestion)
    text = f"agent {target!r} failed: {error.message} [{error.code}]"
    return error_payload("E_AGENT_FAILED", text, suggestion=error.suggestion)


def handoff_correlation(event_id: str) -> str:
    """The correlation id of a handoff, which is its handle too."""
    return HANDOFF_PREFIX + event_id


def with_object(told: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """The same with `object`, where the agent that answered has an output schema."""
    return told if answer.object is None else {**told, "object": from_raw(answer.object, dict)}


def answered(target: str, event_id: str, correlation_id: str, response: str | None) -> dict[str, Any]:
    """What a request comes to (AGENTS-13)."""
    return {
        "target": target,
        "eventId": event_id,
        "correlationId": correlation_id,
        "accepted": True,
        "async": False,
        "response": response,
    }


# --- what a call asks of its agent ------------------------------------------------------------------------------------

#: A server asks a person (MCP elicitation).
ELICIT: Final = "elicit"
#: A server asks the agent's model (MCP sampling).
SAMPLE: Final = "sample"

#: Questions of one call that may be open at once.
MAX_OPEN: Final = 16
#: Calls of tools that one call may make in all.
MAX_INNER_CALLS: Final = 5_000
#: Bytes of one question, as msgpack.
MAX_ASK_BYTES: Final = 256 << 10


class ToolAsk(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `tool.ask`. The header's `callId` names the call that asks."""

    #: The number of the question in its call.
    ask_id: int
    #: What is asked: `tool`, `tools`, `elicit`, `sample`.
    kind: str
    #: What exactly. Its shape depends on `kind`.
    value: OptionalRaw = None


class ToolAnswer(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Payload of `tool.answer`: a value, or an error."""

    #: The number of the question in its call.
    ask_id: int
    #: The value. Its shape depends on the question's `kind`.
    value: OptionalRaw = None
    #: Why there is no value.
    error: ErrorPayload | None = None
