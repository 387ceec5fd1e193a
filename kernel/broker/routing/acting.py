"""On whose behalf a frame speaks, and in which trace its work is done. Pure.

Rules.
- An agent speaks for its own instance, within the turn of the event that it holds; a client for itself.
- A tool host that names a `callId` speaks for the agent instance that made this call, within the same turn. The call
  must be open, and its tool must have been granted the permission `agents`. Without a `callId` it speaks for itself.
- The connection and the call decide who speaks. What the frame says about its sender does not count.
- They also decide the root event. Only a tool host's own events name their root themselves: the call whose pending
  work has ended is already over then.
- A request within a turn belongs to the turn's trace, whatever the sender writes. So no tool and no agent can put its
  work into somebody else's trace. A client names a trace, or gets a new one, and so does a tool host that speaks for
  itself: only the host knows the trace of a call whose pending work has ended.
- An agent names the span that asks. The span of a handler's request is the call in whose name it asks.

Source: docs/design/wire.md section 4; docs/design/sandbox.md section 1; PROTOCOL.md "Traces".
"""

from __future__ import annotations

from typing import Final

from goondan.kernel.broker.state.bus import MAX_ID, Bus, overloaded
from goondan.kernel.broker.state.entities import TOOLS, Actor, Connection, Event, Instance
from goondan.kernel.broker.state.presence import agent_address
from goondan.schemas.bundle import address, launch
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import OPERATOR, Frame, Source
from goondan.schemas.wire.spans import call_span, is_span_id, is_trace_id, trace_id_of

#: One shared object, because there may be very many events of clients.
_CLIENT: Final = Source("client", "client")


class Actors:
    """Finds out who speaks."""

    def __init__(self, bus: Bus) -> None:
        self._calls = bus.calls
        self._mailbox = bus.mailbox
        self._tools: dict[str, launch.ToolSpec] = {}
        self.revise(bus.plan)

    def revise(self, plan: launch.KernelPlan) -> None:
        """The tools are those of `plan` from now on."""
        self._tools = {
            address.build_tool_name(tool.name, export.name): tool
            for tool in plan.toolhost.tools
            for export in tool.exports
        }

    def of(self, connection: Connection, frame: Frame) -> Actor:
        """Who speaks in `frame`. Raises GoondanError: E_FORBIDDEN, or E_OVERLOADED while the call is not open here.

        A call that is not open now may soon be open again: after a reconnect of the tool host and after a restart of
        the broker, its agent is asked to send it again. The tool host drops the frame when the call has ended.
        """
        instance = connection.instance
        if instance is not None:
            return _of_turn(connection.sender, instance, instance.leased)
        if connection.cls != TOOLS:
            source = OPERATOR if connection.claims.operator else _CLIENT
            return Actor(connection.sender, connection.address, source, connection.session)
        if frame.call_id is None:
            if frame.reply_to is not None:
                raise fail("E_FORBIDDEN", "a tool host asks in the name of an open call only")
            root = frame.root_event
            if root is not None and not 0 < len(root) <= MAX_ID:
                raise fail("E_FRAME_INVALID", f"rootEvent has 1 to {MAX_ID} characters")
            session = connection.session if root is None else self._mailbox.session_of(root)
            return Actor(connection.sender, connection.address, Source("tool", connection.address), session, root)
        return self._of_call(connection, frame.call_id)

    def _of_call(self, connection: Connection, call_id: str) -> Actor:
        call = self._calls.get(call_id)
        if call is None or call.host is None:
            raise overloaded("no such call is open here")
        if call.host is not connection:
            raise fail("E_FORBIDDEN", "the call runs in another tool host")
        instance = call.event.instance
        tool = self._tools.get(call.tool or "")
        if tool is None or "agents" not in tool.narrowed.get(instance.agent, tool.sandbox).permissions:
            raise fail("E_FORBIDDEN", f"{str(call.tool)[:100]!r} was not granted the permission 'agents'")
        return _of_turn(agent_address(instance.agent, instance.key), instance, call.event, call_id)


def _of_turn(sender: str, instance: Instance, turn: Event | None, call_id: str | None = None) -> Actor:
    """An agent. Its session and root are those of its turn; between turns it acts for itself."""
    source = Source("agent", instance.agent, instance.key)
    session, root = (sender, None) if turn is None else (turn.session, turn.root)
    return Actor(sender, instance.agent, source, session, root, instance, turn, call_id)


def trace_of(actor: Actor, frame: Frame, born: float) -> tuple[str, str | None]:
    """The trace of the new event in `frame`, and the span that it comes from. `born`: seconds since 1970.

    Raises GoondanError E_FRAME_INVALID for bad ids.
    """
    parent = frame.parent_span_id
    if parent is not None and not is_span_id(parent):
        raise fail("E_FRAME_INVALID", "parentSpanId is 16 hexadecimal digits in lower case, not all of them zero")
    if actor.call_id is not None:
        parent = call_span(actor.call_id)
    turn = actor.turn
    if turn is not None:
        return turn.content.trace_id or trace_id_of(turn.root), parent
    named = frame.trace_id
    if named is None:
        return trace_id_of(frame.event_id or "", actor.sender, f"{born:.3f}"), parent
    if not is_trace_id(named):
        raise fail("E_FRAME_INVALID", "traceId is 32 hexadecimal digits in lower case, not all of them zero")
    return named, parent
