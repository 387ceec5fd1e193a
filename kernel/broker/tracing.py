"""Finds the trace that a new event belongs to, and the span that it comes from. Pure.

Rules.
- A request within a turn belongs to the turn's trace, whatever the sender writes. So no tool and no agent can put its
  work into somebody else's trace.
- A client names a trace, or gets a new one. A tool host that speaks for itself does the same: only the host knows the
  trace of a call whose pending work has ended.
- An agent names the span that asks. The span of a handler's request is the call in whose name it asks.

Source: PROTOCOL.md "Traces".
"""

from __future__ import annotations

from goondan.kernel.broker.acting import Actor
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.spans import call_span, is_span_id, is_trace_id, trace_id_of


def trace_of(actor: Actor, frame: Frame, born: float) -> tuple[str, str | None]:
    """The trace of the new event in `frame`, and the span that it comes from. `born`: seconds since 1970.

    Raises GoondanError E_FRAME_INVALID for bad ids.
    """
    parent = frame.parent_span_id
    if parent is not None and not is_span_id(parent):
        raise _invalid("parentSpanId is 16 hexadecimal digits in lower case, not all of them zero")
    if actor.call_id is not None:
        parent = call_span(actor.call_id)
    turn = actor.turn
    if turn is not None:
        return turn.content.trace_id or trace_id_of(turn.root), parent
    named = frame.trace_id
    if named is None:
        return trace_id_of(frame.event_id or "", actor.sender, f"{born:.3f}"), parent
    if not is_trace_id(named):
        raise _invalid("traceId is 32 hexadecimal digits in lower case, not all of them zero")
    return named, parent


def _invalid(message: str) -> GoondanError:
    return GoondanError(error_payload("E_FRAME_INVALID", message))
