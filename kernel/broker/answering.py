"""Sends answers to whoever asked: an agent, a client or a tool host. Pure.

Answers to an agent's own requests have a lane of their own, so they do not queue behind the turn that waits. Answers to
a handler's requests go to its tool host at once.

Source: docs/design/delivery.md sections 5 and 7.
"""

from __future__ import annotations

from msgspec import Raw

from goondan.kernel.broker.blobs import Receiver
from goondan.kernel.broker.bus import Bus
from goondan.kernel.broker.entities import AGENTS, CLIENTS, TOOLS, Connection, Event, Instance
from goondan.kernel.broker.journal.records import Finished, event_subject
from goondan.kernel.broker.journal.records import decode as decode_record
from goondan.kernel.broker.parts import Part, Take
from goondan.kernel.broker.quiet import QuietPeers
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import Frame, Source
from goondan.schemas.wire.questions import ANSWER_SUFFIX


class Answering(Part):
    """Sends answers until they have arrived."""

    def __init__(self, bus: Bus, quiet: QuietPeers) -> None:
        self._bus = bus
        self._quiet = quiet
        self._mailbox = bus.mailbox
        self._ledger = bus.ledger
        self.takes = (Take((TOOLS, CLIENTS), "ack", self.acknowledged),)

    def send(self, event: Event) -> None:
        """Send the answer of an ended event to whoever waits for it. Does nothing when nobody waits."""
        asker = event.asker
        if not event.wants_answer or asker is None or not event.finished or event.asynchronous:
            return
        self._mailbox.contents.recall(event)
        content = event.content
        answer = event.work.answer if event.work.answer is not None else self._journaled_answer(event.id)
        agent, key = event.instance.agent, event.instance.key
        frame = Frame(
            "event",
            from_=agent,
            instance_key=key,
            event_id=event.answer_id,
            in_reply_to=None if content.reply_to is None else content.reply_to.correlation_id,
            trace_id=content.trace_id,
            source=Source("agent", agent, key),
            payload=answer,
            call_id=event.call_id,
            blob=event.work.answer_blob,
            root_event=event.root,
        )
        if event.call_id is not None and self._bus.calls.get(event.call_id) is None:
            self._bus.counters["answers_late"] += 1  # its tool host drops it, or is about to name the call again
        asking = asker.instance
        to: Receiver = "agent" if asking is not None else "client" if asker.cls == CLIENTS else "toolhost"
        self._mailbox.blobs.sent(event.answer_id, event.work.answer_blob, to=to)
        if asking is None:
            self._bus.send(asker, frame)
            return
        frame.id = self._bus.next_id()
        data = asking.answers[event.answer_id] = encode_value(frame)
        if asking.conn is not None:
            self._bus.out.append((AGENTS, asking.conn.ident, data))
            self._quiet.watch(asking.conn)

    def _journaled_answer(self, event_id: str) -> Raw:
        """Read an answer back from the journal: the asker had read it, so it left memory, and now asks for it again."""
        for data in self._bus.archive.find_records(event_subject(event_id)):
            record = decode_record(data)
            if isinstance(record, Finished):
                return record.answer
        raise GoondanError(
            error_payload("E_ANSWER_GONE", f"the answer of event {event_id[:100]!r} is not in the journal")
        )

    def repeat(self, instance: Instance, connection: Connection) -> None:
        """An agent is back: send all answers that its lane still holds."""
        for data in instance.answers.values():
            self._bus.out.append((AGENTS, connection.ident, data))

    def acknowledged(self, connection: Connection, frame: Frame, now: float) -> None:
        """`ack` from a client or a tool host: it has an answer, so the payload is no longer kept for it."""
        answer_id = frame.event_id
        at: Receiver = "client" if connection.cls == CLIENTS else "toolhost"
        if frame.stage == "done" and answer_id is not None and self._mailbox.arrived(answer_id, at=at):
            item = self._ledger.answer_arrived(answer_id.removesuffix(ANSWER_SUFFIX))
            self._bus.stage(item)
        if frame.stage == "done" and answer_id is not None and at == "toolhost":
            self._mailbox.answer_read(answer_id)

    def taken(self, instance: Instance, answer_id: str | None) -> bool:
        """An agent acknowledges an id. True when it is an answer of its lane; this answer is not sent again."""
        if answer_id is None or answer_id not in instance.answers:
            return False
        del instance.answers[answer_id]
        self._mailbox.arrived(answer_id, at="agent")
        self._mailbox.answer_read(answer_id)
        return True
