"""Stops clocks while a person is asked: the clock of the asking turn, and those of all turns that wait for it. Pure.

Rules.
- The clock of an event stands still as long as one item holds it. Then the lost time is added to its deadline, and the
  new deadline is journaled.
- Everybody who measures its time is told when the clock stops and when it goes on: the process of the turn, the asker
  that waits, and the tool hosts of the turn's calls that ask their agent. They are told again when they reconnect.
"""

from __future__ import annotations

from goondan.kernel.broker.bus import Bus
from goondan.kernel.broker.calls import Call
from goondan.kernel.broker.entities import Connection, Event
from goondan.kernel.broker.standing import Standing
from goondan.schemas.wire.frames import ClockStage, Frame


def left_ms(event: Event, now: float) -> int | None:
    """The time that the turn of an event has left (milliseconds); None without a deadline."""
    if event.deadline is None:
        return None
    standing = event.standing
    at = standing.held_since if standing is not None and standing.holds else now
    return max(1, int((event.deadline - at) * 1000))


class Clocks:
    """The clocks of all events."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def hold(self, event: Event, since: float) -> list[Event]:
        """One more item holds this event since `since` (the broker's clock). Returns the events whose clocks stop."""
        chain: list[Event] = []
        held: Event | None = event
        while held is not None and held not in chain:
            chain.append(held)
            held = held.asking
        for one in chain:
            standing = one.standing = one.standing or Standing()
            standing.holds += 1
            standing.held_since = since if standing.holds == 1 else min(since, standing.held_since)
            if standing.holds == 1:
                self._tell_all(one)
        return chain

    def release(self, chain: list[Event], now: float) -> None:
        """An item does not hold these events any more."""
        for event in chain:
            standing = event.standing
            if standing is None or not standing.holds:
                continue
            standing.holds -= 1
            if not standing.holds and not event.finished:
                self._go_on(event, standing, now)

    def _go_on(self, event: Event, standing: Standing, now: float) -> None:
        if event.deadline is not None:
            event.deadline += max(0.0, now - standing.held_since)
            if event.state == "accepted":
                self._bus.mailbox.deadlines.add(event.deadline, event)
            if not event.ending:
                self._bus.stage(self._bus.ledger.deadline_moved(event, event.deadline))
        self._tell_all(event)

    def _tell_all(self, event: Event) -> None:
        self.tell_holder(event)
        self.tell_asker(event)
        for call_id in event.work.calls if event.work.open_calls else ():
            call = self._bus.calls.get(call_id)
            if call is not None and call.asks and call.host is not None:
                self._bus.send(call.host, self.of_call(call))

    def of_call(self, call: Call) -> Frame:
        """What the tool host of a call that asks its agent is told about the call's time: it is that of its turn."""
        return Frame("clock", call_id=call.id, stage="held" if call.event.held else "runs")

    def tell_holder(self, event: Event) -> None:
        """Tell the process of the turn."""
        instance = event.instance
        if instance.leased is event and instance.conn is not None:
            self._send(instance.conn, event, None)

    def tell_asker(self, event: Event) -> None:
        """Tell the asker that waits for the event."""
        asker, contents = event.asker, self._bus.mailbox.contents
        if asker is None or not event.wants_answer or event.asynchronous or event.ending:
            return
        contents.recall(event)
        reply_to = event.content.reply_to
        if event.state == "accepted":
            contents.rests(event)
        if reply_to is not None and self._bus.presence.connections[asker.cls].get(asker.ident) is asker:
            self._send(asker, event, reply_to.correlation_id)

    def tell_call(self, item: str, stage: ClockStage) -> None:
        """Tell the tool host of the call that asks a person. Its questions are named after it: `<callId>?<number>`."""
        call_id, mark, _ = item.rpartition("?")
        call = self._bus.calls.get(call_id) if mark else None
        if call is not None and call.host is not None:
            self._bus.send(call.host, Frame("clock", call_id=call.id, stage=stage))

    def _send(self, connection: Connection, event: Event, correlation: str | None) -> None:
        frame = Frame("clock", event_id=event.id, in_reply_to=correlation, stage="held" if event.held else "runs")
        frame.epoch = event.instance.epoch if correlation is None else None
        frame.call_id = event.call_id if correlation is not None else None
        frame.deadline_ms = left_ms(event, self._bus.now)
        self._bus.send(connection, frame)
