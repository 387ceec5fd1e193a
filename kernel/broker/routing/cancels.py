"""Cancels events: who may do so, what happens to a waiting or leased event, and who is told of its end. Pure.

Rules.
- The wish is journaled. A queued event ends as cancelled through the journal, like any other end. Until the journal
  has this end, the event is not handed over.
- A leased event is ended by its holder. The holder is told (`tool.cancel` with the event's id and epoch), again at its
  next hello, and answers `failed`. If it is lost or gives the event back, the event ends like a queued one.
- Requests to other agents that the turn waits for are cancelled with it. Requests that it sent without waiting go on.
- The requests of a handler are cancelled when its call has ended, however it ended: nobody waits for them any more.
- The asker is told when the event has ended. A repeated question gets the same answer.
- A broker that has just started does not know yet which events exist and who holds them, so it tells the asker to ask
  again. A holder may come back even later with an event that has ended here meanwhile: it is told to end it, too.

Source: docs/design/delivery.md section 2; PROTOCOL.md "Cancelling".
"""

from __future__ import annotations

from typing import Any, Final

from goondan.kernel.broker.routing.ends import Ends, deleted_answer, failure_answer
from goondan.kernel.broker.state.bus import RETRY_AFTER_MS, RETURN_S, Bus
from goondan.kernel.broker.state.entities import Connection, Event, Instance
from goondan.kernel.broker.state.parts import Op, Part, fitting
from goondan.kernel.broker.state.records import event_subject
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import Frame, Lease

#: Questions that may wait for the end of one event. More are refused with E_OVERLOADED.
MAX_ASKERS: Final = 64
#: At most so many events of an instance are in one answer, because it must fit in one frame.
MAX_LISTED: Final = 1000


class Cancels(Part):
    """The part of the broker that cancels events."""

    def __init__(self, bus: Bus, ends: Ends) -> None:
        self._bus = bus
        self._mailbox = bus.mailbox
        self._ends = ends
        #: Frames to answer when an event has ended: (connection, frame id).
        self._asked: dict[Event, list[tuple[Connection, str]]] = {}
        self.ops = (Op("cancel", self.ask, for_all=True), Op("events", self.list_events))

    # --- questions of clients

    def ask(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "cancel", eventId}`: answered when the event has ended."""
        event_id = asked.get("eventId")
        if not isinstance(event_id, str):
            raise GoondanError(error_payload("E_FRAME_INVALID", "admin cancel needs an eventId"))
        event = self._mailbox.events.get(event_id)
        ended = self._bus.archive.find_ended(event_subject(event_id)) if event is None else None
        if ended is not None:
            self._reply(connection, frame.id, event_id, ended.state)
            return
        if event is None or (event.state == "accepted" and event.instance.conn is None):
            self._expect_more(now)
        if event is None or not _may_cancel(connection, event):
            message = f"no event {event_id[:100]!r} waits or is worked on"
            raise GoondanError(error_payload("E_EVENT_NOT_FOUND", message))
        if event.finished:
            self._reply(connection, frame.id, event.id, event.state)
            return
        waiting = self._asked.setdefault(event, [])
        for at, (_, frame_id) in enumerate(waiting):
            if frame_id == frame.id:  # its link came back over another connection
                waiting[at] = connection, frame_id
                return
        if len(waiting) >= MAX_ASKERS:
            message = "too many ask for the end of this event"
            raise GoondanError(error_payload("E_OVERLOADED", message, retry_after_ms=RETRY_AFTER_MS))
        waiting.append((connection, frame.id))
        self._bus.counters["cancels"] += 1
        self.cancel(event)

    def list_events(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "events", agent, instanceKey}`: the event that the instance works on, then its queue in order."""
        agent, key = asked.get("agent"), asked.get("instanceKey")
        if not isinstance(agent, str) or agent not in self._bus.plan.agents or not isinstance(key, str):
            raise GoondanError(error_payload("E_AGENT_NOT_FOUND", f"no agent {str(agent)[:100]!r}"))
        instance = self._mailbox.instances.get((agent, key))
        if instance is None:
            self._expect_more(now)
        events = [] if instance is None else [instance.leased] * (instance.leased is not None) + [*instance.queue]
        listed = fitting({"eventId": e.id, "state": e.state} for e in events[:MAX_LISTED] if e is not None)
        body = {"events": listed, "more": len(events) - len(listed)}
        self._bus.send(connection, Frame("reply", in_reply_to=frame.id, payload=to_raw(body)))

    def _expect_more(self, now: float) -> None:
        """Raises GoondanError E_OVERLOADED, which links answer by asking again, while the broker is new."""
        if now - self._bus.started_ms / 1000 < RETURN_S:
            message = "the broker has just started and may not know it yet"
            raise GoondanError(error_payload("E_OVERLOADED", message, retry_after_ms=RETRY_AFTER_MS))

    # --- what becomes of events

    def cancel(self, event: Event) -> None:
        """End this event, and the requests that its turn waits for."""
        if not event.ending and not event.cancelled:
            self._bus.stage(self._bus.ledger.cancel_wished(event))
        event.cancelled = True
        if event.instance.leased is event:
            self._tell_holder(event.instance)
        else:
            self.end_queued(event)
        self._cancel_requests(event)

    def end_queued(self, event: Event) -> None:
        """Stage the end of a cancelled event that nobody holds."""
        if not event.ending:
            self._mailbox.contents.recall(event)
            error = error_payload("E_CANCELLED", "the event was cancelled before its turn began or was over")
            answer = deleted_answer(event) if event.instance.deleting else failure_answer(event, error)
            self._ends.stage(event, "cancelled", answer, None)

    def holder_here(self, instance: Instance, connection: Connection, leases: list[Lease]) -> None:
        """An agent said hello with its leases: tell it of cancels that it may not have heard of."""
        for lease in leases:
            event = self._mailbox.events.get(lease.event_id)
            if event is not None and event.instance is instance and event.cancelled:
                self._bus.send(connection, Frame("tool.cancel", event_id=event.id, epoch=lease.epoch))

    def ending(self, event: Event) -> None:
        """The event ends, in whatever way. Requests that its turn made before it heard of the cancel end with it."""
        if event.cancelled:
            self._cancel_requests(event)

    def call_ended(self, event: Event, call_id: str) -> None:
        """A call of this turn has ended: cancel the requests of its handler that are still open."""
        for request in list(event.work.requests):
            if request.call_id == call_id and not request.cancelled:
                self.cancel(request)

    def ended(self, event: Event) -> None:
        """The event has ended: tell everybody who asked."""
        for connection, frame_id in self._asked.pop(event, ()):
            self._reply(connection, frame_id, event.id, event.state)

    def _cancel_requests(self, event: Event) -> None:
        for request in list(event.work.requests):
            if not request.cancelled:
                self.cancel(request)

    def _tell_holder(self, instance: Instance) -> None:
        event = instance.leased
        if event is not None and instance.conn is not None:
            self._bus.send(instance.conn, Frame("tool.cancel", event_id=event.id, epoch=instance.epoch))

    def _reply(self, connection: Connection, frame_id: str, event_id: str, state: str) -> None:
        body = {"eventId": event_id, "state": state}
        self._bus.send(connection, Frame("reply", in_reply_to=frame_id, payload=to_raw(body)))


def _may_cancel(connection: Connection, event: Event) -> bool:
    """An operator may cancel every event. Any other client may cancel events that came from such clients."""
    if connection.claims.operator:
        return True
    return event.sender == connection.sender and event.source is not None and event.source.name != "operator"
