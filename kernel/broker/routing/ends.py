"""Ends of events: the journal writes the end with its answer, then whoever asked is told. Cancels. Pure.

Rules.
- The holder of an event ends it. The broker ends it instead at its deadline, when its agent cannot take it, and after
  too many attempts. The asker gets an answer in every case.
- Answers to an agent's own requests have a lane of their own, so they do not queue behind the turn that waits. Answers
  to a handler's requests go to its tool host at once.
- The answer to a request that an agent sent without waiting becomes an event of its own (a late answer). The journal
  has both or none. It goes to the asking instance like any other event: it waits in the queue, starts a process, and
  survives restarts. A running turn of the instance is told at once as well. The event has the answer's id, which no
  sender may use, so a repeat is never a second answer.
- Such a request reserves room for an ordinary answer from the beginning (mailbox.py). A larger answer needs room within
  the shares when it comes. Otherwise an error replaces it: one turn could else ask for more than all may hold.
- A cancel is journaled. A queued event ends as cancelled through the journal, like any other end. Until the journal
  has this end, the event is not handed over.
- A leased event is ended by its holder. The holder is told (`tool.cancel` with the event's id and epoch), again at its
  next hello, and answers `failed`. If it is lost or gives the event back, the event ends like a queued one.
- Requests to other agents that the turn waits for are cancelled with it. Requests that it sent without waiting go on.
- The requests of a handler are cancelled when its call has ended, however it ended: nobody waits for them any more.
- Who has asked for a cancel is told when the event has ended. A repeated question gets the same answer.
- A broker that has just started does not know yet which events exist and who holds them, so it tells the asker to ask
  again. A holder may come back even later with an event that has ended here meanwhile: it is told to end it, too.

Source: docs/design/delivery.md sections 2, 5 and 7; PROTOCOL.md "Cancelling"; requirement AGENTS-16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Final, Literal

from msgspec import Raw

from goondan.kernel.broker.state import blobs, entities, mailbox, presence
from goondan.kernel.broker.state.bus import RETURN_S, Bus, join, overloaded
from goondan.kernel.broker.state.parts import Hooks, OfEvents, Op, Part, Take, fitting
from goondan.kernel.broker.state.records import Finished, Item, event_digest, event_subject
from goondan.kernel.broker.state.records import decode as decode_record
from goondan.schemas.wire import codec, questions
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import AgentEvent, Answer, Blob, ErrorPayload, Frame, Lease, Source

#: There is no wall clock here, and nobody needs one: the event's own times are in its trace.
_NO_TIME = "1970-01-01T00:00:00Z"


def failure_answer(event: entities.Event, error: ErrorPayload) -> Raw:
    """The payload of the answer to a turn that never ended (AgentEvent of type `agent.response`)."""
    answer = Answer(turn_id="", status="failed", finish_reason="error", error=error, trace_id=event.content.trace_id)
    return codec.to_raw(
        AgentEvent(
            id=event.answer_id,
            type="agent.response",
            created_at=_NO_TIME,
            instance_key=event.instance.key,
            metadata={"inReplyTo": event.id},
            answer=answer,
        )
    )


def no_room_answer(event: entities.Event, size: int) -> Raw:
    """Replaces an answer of `size` bytes for which there is no room."""
    message = f"the answer of {event.instance.address} has {size:,} bytes, and there is no room for so many now"
    suggestion = "Ask for less at a time, or let the agent write to a file."
    return failure_answer(event, error_payload("E_TOOL_LIMIT", message, suggestion=suggestion))


def deleted_answer(event: entities.Event) -> Raw:
    """The answer to a request whose instance was deleted."""
    message = f"{event.instance.address} was deleted before it had answered"
    return failure_answer(event, error_payload("E_INSTANCE_DELETED", message))


#: A turn is told of at most so many late answers when it begins. Later ones get turns of their own.
MAX_LATE_FRAMES: Final = 64


def late_answer(bus: Bus, event: entities.Event, answer: Raw, blob: Blob | None) -> entities.Event | None:
    """The event with the answer to `event`, which nobody waits for. None when none is wanted, or the asker's agent is
    gone.
    """
    asker = event.source
    reply_to = event.content.reply_to
    if reply_to is None or asker is None or asker.kind != "agent":
        return None
    if asker.name not in bus.plan.agents or asker.instance_key is None:
        bus.counters["answers_lost"] += 1
        return None
    agent, key = event.instance.agent, event.instance.key
    sender = presence.agent_address(agent, key)
    payload, size = answer, entities.size_in_memory(answer, event.content.auth) + blobs.size_of(blob)
    more = size - event.size
    if more > 0 and not bus.mailbox.held.may_take(event.session, event.root, more, operator=False):
        bus.counters["answers_too_large"] += 1
        payload, blob = no_room_answer(event, size), None
    return entities.Event(
        event.answer_id,
        bus.instance(asker.name, asker.instance_key, bus.now),
        sender=sender,
        content_here=entities.Content(
            from_=agent,
            payload=payload,
            auth=event.content.auth,
            workdir=event.content.workdir,
            trace_id=event.content.trace_id,
            parent_span_id=event.content.parent_span_id,  # the call that asked
            digest=event_digest(asker.name, asker.instance_key, sender, None),
        ),
        source=Source("agent", agent, key),
        blob=blob,
        root=event.root,
        session=event.session,
        in_reply_to=reply_to.correlation_id,
        since=bus.now,
    )


def late_answer_frame(event: entities.Event) -> Frame:
    """The frame that tells a running turn of a late answer. It has no epoch, because the event is not handed over."""
    content = event.content
    return Frame(
        "event",
        from_=content.from_,
        to=event.instance.agent,
        instance_key=event.instance.key,
        event_id=event.id,
        in_reply_to=event.in_reply_to,
        trace_id=content.trace_id,
        source=event.source,
        payload=content.payload,
        blob=event.blob,
        root_event=event.root,
        asynchronous=True,
    )


def late_answer_frames(instance: entities.Instance, contents: mailbox.Contents) -> list[Frame]:
    """Frames about the late answers at the front of an instance's queue."""
    frames = []
    for event in islice(instance.queue, MAX_LATE_FRAMES):
        if event.in_reply_to is not None:
            contents.recall(event)
            frames.append(late_answer_frame(event))
            contents.rests(event)
    return frames


class Ends:
    """Stages the ends of events."""

    def __init__(self, bus: Bus, finished: Callable[..., None], hooks: Hooks) -> None:
        """`finished` acts on an end when the journal has it (Events.finished)."""
        self._finished = finished
        self._follows = hooks.of(OfEvents, OfEvents.follows)
        self._bus = bus
        self._mailbox = bus.mailbox

    def give_up(self, event: entities.Event, state: Literal["expired", "dead"], code: str, message: str) -> None:
        """End an event instead of its agent. The sender gets an answer, too."""
        if not event.ending:
            self._mailbox.contents.recall(event)
            answer = failure_answer(event, error_payload(code, message))
            self.stage_end(event, state, answer, None, cause=f"{code}: {message}")

    def without_agent(self) -> None:
        """After a restart: events for agents that are no longer in the bundle become dead letters."""
        for event in list(self._mailbox.events.values()):
            if not event.ending and event.instance.agent not in self._bus.plan.agents:
                message = f"the bundle has no agent {event.instance.agent!r} any more"
                self.give_up(event, "dead", "E_AGENT_NOT_FOUND", message)

    def stage_end(
        self,
        event: entities.Event,
        state: entities.End,
        answer: Raw,
        blob: Blob | None,
        *,
        cause: str = "",
        conn: entities.Connection | None = None,
        frame_id: str = "",
    ) -> None:
        """Have the journal write an end. A second end of the same event waits for the first and changes nothing."""
        item, follow = Item(()), None
        if event.end is None:
            if event.state != "leased":
                self._mailbox.contents.recall(event)
            if event.asking is not None and not self._mailbox.keeps(event, answer, blob):
                self._bus.counters["answers_too_large"] += 1
                self._mailbox.blobs.discard(blob)
                answer, blob = no_room_answer(event, len(memoryview(answer)) + blobs.size_of(blob)), None
            if event.asynchronous and (follow := late_answer(self._bus, event, answer, blob)) is not None:
                for follows in self._follows:
                    follows(follow, event)
            item = self._bus.ledger.finished(event, state, answer, blob, cause, self._bus.now, follow)
            event.end = state
        self._bus.stage(item, partial(self._finished, event, state, answer, blob, conn, frame_id, follow))

    def expire(self, event: entities.Event) -> None:
        """End an event whose deadline has passed while it waited."""
        self.give_up(event, "expired", "E_AGENT_TIMEOUT", "the deadline passed before the agent could take the event")


#: A peer that was silent this long is pinged; an unreachable one is dropped then (seconds).
PING_AFTER_S: Final = 2.0


class QuietPeers(Part):
    """Pings silent peers."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._due: mailbox.Due[entities.Connection] = mailbox.Due(
            lambda connection: True
        )  # each knows by itself whether it is in here

    def watch(self, connection: entities.Connection) -> None:
        """Watch a peer that was welcomed or got something."""
        if not connection.watched and connection.cls != entities.CONTROL:
            connection.watched = True
            self._due.add(connection.last_seen + PING_AFTER_S, connection)

    def tick(self, now: float) -> None:
        """Ping the peers that are due."""
        for connection in list(self._due.take(now)):  # what is added again is for later
            if not self._matters(connection):
                connection.watched = False
                continue
            if now - connection.last_seen > PING_AFTER_S:
                connection.last_seen = now
                self._bus.send(connection, Frame("ping"))
            self._due.add(max(now, connection.last_seen + PING_AFTER_S), connection)

    def _matters(self, connection: entities.Connection) -> bool:
        """Whether the peer is still connected and must be pinged to find out whether it lives."""
        if self._bus.presence.connections[connection.cls].get(connection.ident) is not connection:
            return False
        instance = connection.instance
        return instance is None or connection.claims.launch == 0 or instance.wanted


class Answering(Part):
    """Sends answers until they have arrived."""

    def __init__(self, bus: Bus, quiet: QuietPeers) -> None:
        self._bus = bus
        self._quiet = quiet
        self._mailbox = bus.mailbox
        self.takes = (Take((entities.TOOLS, entities.CLIENTS), "ack", self.acknowledged),)

    def send_answer(self, event: entities.Event) -> None:
        """Send the answer of an ended event to whoever waits for it. Does nothing when nobody waits."""
        asker = event.asker
        if not event.wants_answer or asker is None or event.asynchronous:
            return
        content, work, answer_id = event.content, event.work, event.answer_id
        answer = work.answer if work.answer is not None else self._journaled_answer(event.id)
        agent, key = event.instance.agent, event.instance.key
        frame = Frame(
            "event",
            from_=agent,
            instance_key=key,
            event_id=answer_id,
            in_reply_to=None if content.reply_to is None else content.reply_to.correlation_id,
            trace_id=content.trace_id,
            source=Source("agent", agent, key),
            payload=answer,
            call_id=event.call_id,
            blob=work.answer_blob,
            root_event=event.root,
        )
        if event.call_id is not None and self._bus.calls.get(event.call_id) is None:
            self._bus.counters["answers_late"] += 1  # its tool host drops it, or is about to name the call again
        asking = asker.instance
        if work.answer_blob is not None:
            to: blobs.Receiver = "client" if asker.cls == entities.CLIENTS else "toolhost"
            self._mailbox.blobs.sent(answer_id, work.answer_blob, to=to if asking is None else "agent")
        if asking is None:
            self._bus.send(asker, frame)
            return
        frame.id = self._bus.next_id()
        data = asking.answers[answer_id] = codec.encode_value(frame)
        if asking.conn is not None:
            self._bus.out.append((entities.AGENTS, asking.conn.ident, data))
            self._quiet.watch(asking.conn)

    def _journaled_answer(self, event_id: str) -> Raw:
        """Read an answer back from the journal: the asker had read it, so it left memory, and now asks for it again."""
        for data in self._bus.archive.find_records(event_subject(event_id)):
            record = decode_record(data)
            if isinstance(record, Finished):
                return record.answer
        raise fail("E_ANSWER_GONE", f"the answer of event {event_id[:100]!r} is not in the journal")

    def repeat_answers(self, instance: entities.Instance, connection: entities.Connection) -> None:
        """An agent is back: send all answers that its lane still holds."""
        for data in instance.answers.values():
            self._bus.out.append((entities.AGENTS, connection.ident, data))

    def acknowledged(self, connection: entities.Connection, frame: Frame, now: float) -> None:
        """`ack` from a client or a tool host: it has an answer, so the payload is no longer kept for it."""
        answer_id = frame.event_id
        if frame.stage != "done" or answer_id is None:
            return
        at: blobs.Receiver = "client" if connection.cls == entities.CLIENTS else "toolhost"
        if self._mailbox.blobs.arrived(answer_id, at=at):
            self._bus.stage(self._bus.ledger.answer_arrived(answer_id.removesuffix(questions.ANSWER_SUFFIX)))
        if at == "toolhost":
            self._mailbox.answer_read(answer_id)

    def taken(self, instance: entities.Instance, answer_id: str | None) -> bool:
        """An agent acknowledges an id. True when it is an answer of its lane; this answer is not sent again."""
        if answer_id is None or answer_id not in instance.answers:
            return False
        del instance.answers[answer_id]
        self._mailbox.blobs.arrived(answer_id, at="agent")
        self._mailbox.answer_read(answer_id)
        return True


#: At most so many events of an instance are in one answer, because it must fit in one frame.
MAX_LISTED: Final = 1000


class Cancels(Part):
    """The part of the broker that cancels events."""

    def __init__(self, bus: Bus, ends: Ends) -> None:
        self._bus = bus
        self._mailbox = bus.mailbox
        self._ends = ends
        #: Frames to answer when an event has ended: (connection, frame id).
        self._asked: dict[entities.Event, list[tuple[entities.Connection, str]]] = {}
        self.ops = (Op("cancel", self.ask, for_all=True), Op("events", self.list_events))

    # --- questions of clients

    def ask(self, connection: entities.Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "cancel", eventId}`: answered when the event has ended."""
        event_id = asked.get("eventId")
        if not isinstance(event_id, str):
            raise fail("E_FRAME_INVALID", "admin cancel needs an eventId")
        event = self._mailbox.events.get(event_id)
        ended = self._bus.archive.find_ended(event_subject(event_id)) if event is None else None
        if ended is not None:
            self._reply(connection, frame.id, event_id, ended.state)
            return
        if event is None or (event.state == "accepted" and event.instance.conn is None):
            self._expect_more(now)
        if event is None or not _may_cancel(connection, event):
            raise fail("E_EVENT_NOT_FOUND", f"no event {event_id[:100]!r} waits or is worked on")
        if event.finished:
            self._reply(connection, frame.id, event.id, event.state)
        elif join(self._asked.setdefault(event, []), connection, frame, "event"):
            self._bus.counters["cancels"] += 1
            self.cancel(event)

    def list_events(self, connection: entities.Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "events", agent, instanceKey}`: the event that the instance works on, then its queue in order."""
        agent, key = asked.get("agent"), asked.get("instanceKey")
        if not isinstance(agent, str) or agent not in self._bus.plan.agents or not isinstance(key, str):
            raise fail("E_AGENT_NOT_FOUND", f"no agent {str(agent)[:100]!r}")
        instance = self._mailbox.instances.get((agent, key))
        if instance is None:
            self._expect_more(now)
        events = [] if instance is None else [instance.leased] * (instance.leased is not None) + [*instance.queue]
        listed = fitting({"eventId": e.id, "state": e.state} for e in events[:MAX_LISTED] if e is not None)
        self._bus.reply(connection, frame.id, {"events": listed, "more": len(events) - len(listed)})

    def _expect_more(self, now: float) -> None:
        """Raises GoondanError E_OVERLOADED, which links answer by asking again, while the broker is new."""
        if now - self._bus.started_ms / 1000 < RETURN_S:
            raise overloaded("the broker has just started and may not know it yet")

    # --- what becomes of events

    def cancel(self, event: entities.Event) -> None:
        """End this event, and the requests that its turn waits for."""
        if not event.ending and not event.cancelled:
            self._bus.stage(self._bus.ledger.cancel_requested(event))
        event.cancelled = True
        instance = event.instance
        if instance.leased is not event:
            self.end_queued(event)
        elif instance.conn is not None:
            self._bus.send(instance.conn, Frame("tool.cancel", event_id=event.id, epoch=instance.epoch))
        self.cancel_requests(event)

    def end_queued(self, event: entities.Event) -> None:
        """Stage the end of a cancelled event that nobody holds."""
        if not event.ending:
            self._mailbox.contents.recall(event)
            error = error_payload("E_CANCELLED", "the event was cancelled before its turn began or was over")
            answer = deleted_answer(event) if event.instance.deleting else failure_answer(event, error)
            self._ends.stage_end(event, "cancelled", answer, None)

    def holder_here(self, instance: entities.Instance, connection: entities.Connection, leases: list[Lease]) -> None:
        """An agent said hello with its leases: tell it of cancels that it may not have heard of."""
        for lease in leases:
            event = self._mailbox.events.get(lease.event_id)
            if event is not None and event.instance is instance and event.cancelled:
                self._bus.send(connection, Frame("tool.cancel", event_id=event.id, epoch=lease.epoch))

    def call_ended(self, event: entities.Event, call_id: str) -> None:
        """A call of this turn has ended: cancel the requests of its handler that are still open."""
        for request in list(event.work.requests):
            if request.call_id == call_id and not request.cancelled:
                self.cancel(request)

    def ended(self, event: entities.Event) -> None:
        """The event has ended: tell everybody who asked."""
        for connection, frame_id in self._asked.pop(event, ()):
            self._reply(connection, frame_id, event.id, event.state)

    def cancel_requests(self, event: entities.Event) -> None:
        """Cancel the requests that the turn of this event waits for."""
        for request in list(event.work.requests):
            if not request.cancelled:
                self.cancel(request)

    def _reply(self, connection: entities.Connection, frame_id: str, event_id: str, state: str) -> None:
        self._bus.reply(connection, frame_id, {"eventId": event_id, "state": state})


def _may_cancel(connection: entities.Connection, event: entities.Event) -> bool:
    """An operator may cancel every event. Any other client may cancel events that came from such clients."""
    if connection.claims.operator:
        return True
    return event.sender == connection.sender and event.source is not None and event.source.name != "operator"
