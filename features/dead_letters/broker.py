"""Dead letters: events that were given up and wait for a person, who shows, requeues or drops them. Pure.

Rules.
- Only operators ask (`admin`): `dead.list`, `dead.show`, `dead.requeue`, `dead.drop`.
- A dead letter is a record of the journal until it is requeued or dropped, so it survives every restart.
- To requeue means to accept a new event at the end of the instance's queue. Its id contains the old id. It wants no
  answer, because the asker was told long ago. Only the broker makes such ids: no peer's event may have one (intake.py).
- Requeue and drop take effect and are answered when the journal has them. A repeat gets the same answer. When the disk
  is full, the dead letter stays.

Source: docs/design/delivery.md section 10.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct

from goondan.kernel.broker.state import ledger, records
from goondan.kernel.broker.state.bus import MAX_ID, REQUEUED_SUFFIX, Bus, Core, overloaded
from goondan.kernel.broker.state.entities import Connection, Event
from goondan.kernel.broker.state.parts import Op, Part, fitting
from goondan.kernel.broker.state.records import Accepted, Finished, Item
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import Frame

#: At most so many dead letters are in one list, because it must fit in one frame.
MAX_LISTED: Final = 1000
#: How the journal names the end of a dead letter that was requeued, or dropped.
REQUEUED: Final = "requeued"
DROPPED: Final = "dropped"


class _Dealing(Struct):
    """A person's decision about a dead letter, while it is on its way into the journal."""

    #: The dead letter.
    event: Event
    #: What is done with it.
    how: str
    #: Connection and frame id of everybody who waits for the answer.
    askers: list[tuple[Connection, str]]


def parts(core: Core) -> Sequence[Part]:
    """See parts.MakeParts."""
    return (DeadLetters(core.bus, core.accepted),)


class DeadLetters(Part):
    """Answers `dead.*`."""

    def __init__(self, bus: Bus, accepted: Callable[[Event, bool], None]) -> None:
        """`accepted` acts on a new event when the journal has it (events.py)."""
        self._bus = bus
        self._accepted = accepted
        #: Decisions on their way into the journal, by the id of the dead letter.
        self._dealings: dict[str, _Dealing] = {}
        self.ops = (
            Op("dead.list", self.list),
            Op("dead.show", self.show),
            Op("dead.requeue", self.requeue),
            Op("dead.drop", self.drop),
        )

    def list(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`dead.list`: the dead letters, the oldest first."""
        known = self._bus.mailbox.dead
        listed = fitting(_line(event) for event in [*known.values()][:MAX_LISTED])
        self._bus.reply(connection, frame.id, {"events": listed, "more": len(known) - len(listed)})

    def show(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`dead.show`: one dead letter with its payload; `large` instead when the payload lies in a file."""
        event = self._dead(asked.get("eventId"))
        accepted, finished = self._records(event)
        body = {**_line(event), "from": accepted.from_, "acceptedMs": accepted.at_ms, "answer": finished.answer}
        body["event"] = accepted.payload
        body["large"] = None if accepted.blob is None else accepted.blob.size
        self._bus.reply(connection, frame.id, body)

    def drop(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`dead.drop`: forget a dead letter."""
        event_id = asked.get("eventId")
        if self._told_again(connection, frame, event_id, DROPPED):
            return
        event = self._dead(event_id)
        dealing = self._dealings[event.id] = _Dealing(event, DROPPED, [(connection, frame.id)])
        self._bus.stage(self._bus.ledger.dealt_with(event, DROPPED), partial(self._settle, dealing))

    def requeue(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`dead.requeue`: accept a new event with the same content."""
        event_id = asked.get("eventId")
        if self._told_again(connection, frame, event_id, REQUEUED):
            return
        event = self._dead(event_id)
        if event.instance.agent not in self._bus.plan.agents:
            raise fail("E_AGENT_NOT_FOUND", f"the bundle has no agent {event.instance.agent!r} any more")
        known = self._bus.mailbox.instances.get((event.instance.agent, event.instance.key))
        if known is not None and known.deleting:
            raise overloaded(f"{known.address} is being deleted")
        accepted, _ = self._records(event)
        again = Event(
            new_id(event.id),
            self._bus.instance(event.instance.agent, event.instance.key, self._bus.now),
            sender=event.sender,
            content_here=msgspec.structs.replace(ledger.content_of(accepted), reply_to=None, chain=None),
            source=accepted.source,
            blob=accepted.blob,
            files=accepted.files,
            since=self._bus.now,
            in_reply_to=accepted.in_reply_to,  # else the answer to a question would be read as one
        )
        self._bus.mailbox.stage(again)
        accept = self._bus.ledger.accepted(again, self._bus.now)
        over = self._bus.ledger.dealt_with(event, REQUEUED)
        dealing = self._dealings[event.id] = _Dealing(event, REQUEUED, [(connection, frame.id)])

        def settle(kept: bool) -> None:
            self._accepted(again, kept)
            self._settle(dealing, kept)

        self._bus.stage(Item((*accept.writes, *over.writes), refusable=True), settle)

    def _settle(self, dealing: _Dealing, kept: bool) -> None:
        """The journal has a decision: carry it out. Without room on the disk, nothing is done."""
        del self._dealings[dealing.event.id]
        if kept:
            self._bus.mailbox.drop_dead(dealing.event)
        for connection, frame_id in dealing.askers:
            if kept:
                self._tell(connection, frame_id, dealing.event.id, dealing.how)
            else:
                info = error_payload("E_DISK_FULL", "the disk of the state directory is full; the dead letter stays")
                self._bus.error(connection.cls, connection.ident, info, Frame("admin", id=frame_id))

    def _told_again(self, connection: Connection, frame: Frame, event_id: Any, state: str) -> bool:
        """Whether the question is a repeat: the same was done before, or is being done now."""
        if not isinstance(event_id, str):
            return False
        dealing = self._dealings.get(event_id)
        if dealing is not None:
            if dealing.how != state:
                raise fail("E_EVENT_NOT_FOUND", f"the dead letter {event_id[:100]!r} was {dealing.how}")
            dealing.askers.append((connection, frame.id))
            return True
        if event_id in self._bus.mailbox.dead:
            return False
        ended = self._bus.archive.find_ended(records.event_subject(event_id))
        if ended is None or ended.state != state:
            return False
        self._tell(connection, frame.id, event_id, state)
        return True

    def _tell(self, connection: Connection, frame_id: str, event_id: str, state: str) -> None:
        body = {"eventId": event_id, "state": state}
        if state == REQUEUED:
            body["newEventId"] = new_id(event_id)
        self._bus.reply(connection, frame_id, body)

    def _dead(self, event_id: Any) -> Event:
        event = self._bus.mailbox.dead.get(event_id) if isinstance(event_id, str) else None
        if event is None:
            raise fail("E_EVENT_NOT_FOUND", f"there is no dead letter {str(event_id)[:100]!r}")
        return event

    def _records(self, event: Event) -> tuple[Accepted, Finished]:
        found = [records.decode(data) for data in self._bus.archive.find_records(records.event_subject(event.id))]
        accepted = next((record for record in found if isinstance(record, Accepted)), None)
        finished = next((record for record in found if isinstance(record, Finished)), None)
        if accepted is None or finished is None:
            raise fail("E_JOURNAL_CORRUPT", f"the journal lacks records of {event.id[:100]!r}")
        return accepted, finished


def new_id(event_id: str) -> str:
    """The id of the event that replaces a dead letter. It begins with the old id, as far as there is room."""
    name = event_id + REQUEUED_SUFFIX
    if len(name) <= MAX_ID:
        return name
    digest = hashlib.sha256(event_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{event_id[: MAX_ID - 42]}~{digest}{REQUEUED_SUFFIX}"


def _line(event: Event) -> dict[str, Any]:
    return {
        "eventId": event.id,
        "agent": event.instance.agent,
        "instanceKey": event.instance.key,
        "attempts": event.work.attempts,
        "cause": event.work.cause,
        "endedMs": event.work.ended_ms,
    }
