"""Accepted events: hands them over under a lease, takes them back, ends them. Pure.

Rules.
- Accepted means journaled: `accepted` sends the ack and the first delivery, never the intake. The same holds for every
  end: the asker is told when the journal has it.
- `done` has the turn's answer in it: the event's end and its answer are one journal record.

intake.py takes new events, ends.py sends answers.

Source: docs/design/delivery.md sections 2, 5 and 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Raw

from goondan.kernel.broker.routing.calls import ToolCalls
from goondan.kernel.broker.routing.ends import (
    Answering,
    Cancels,
    Ends,
    QuietPeers,
    deleted_answer,
    late_answer_frame,
    late_answer_frames,
)
from goondan.kernel.broker.routing.processes import Processes
from goondan.kernel.broker.state import mailbox, records
from goondan.kernel.broker.state.bus import Bus, left_ms
from goondan.kernel.broker.state.entities import AGENTS, Connection, End, Event, Instance
from goondan.kernel.broker.state.parts import Hooks, OfEvents, Part, Take
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import Blob, Frame, Hello

#: Longest cause of a dead letter (characters): a person reads it, and the journal keeps it.
MAX_CAUSE: Final = 1000


class Events(Part):
    """Handles events between their acceptance and their answer."""

    def __init__(
        self,
        bus: Bus,
        *,
        answering: Answering,
        cancels: Cancels,
        ends: Ends,
        processes: Processes,
        quiet: QuietPeers,
        tool_calls: ToolCalls,
        hooks: Hooks,
    ) -> None:
        self._bus = bus
        self._answering = answering
        self._cancels = cancels
        self._ends = ends
        self._processes = processes
        self._quiet = quiet
        self._kept = hooks.of(OfEvents, OfEvents.kept)
        self._leased = hooks.of(OfEvents, OfEvents.leased)
        self._handed = hooks.of(OfEvents, OfEvents.handed)
        self._tool_calls = tool_calls
        bus.mailbox.on_left = hooks.of(OfEvents, OfEvents.left)
        self._mailbox = bus.mailbox
        self.takes = (Take((AGENTS,), "ack", self.agent_ack),)
        #: Handlers for the states that an agent can report about its event.
        self._stages: dict[str, Callable[[Connection, Event, Frame, float], None]] = {
            "renew": self._renewed,
            "done": self._ended,
            "failed": self._ended,
            "release": self._released,
            "park": self._released,
        }

    def accepted(self, event: Event, kept: bool) -> None:
        """The journal has a new event, or that nobody waits for its answer any more: tell its senders, and hand it
        over. Without room on the disk, a new event is refused.
        """
        if not kept:
            self._refuse(event)
            return
        if event.state == "staged":
            event.parts = None
            self._mailbox.accept(event)
            for heard in self._kept:
                heard(event)
        else:  # nobody waits for its answer any more
            self._mailbox.contents.recall(event)
        for connection, frame_id in event.waiting_acks:
            self._bus.ack(connection, frame_id, event)
        event.waiting_acks = ()
        self._hand_over(event)

    def finished(
        self,
        event: Event,
        state: End,
        answer: Raw,
        blob: Blob | None,
        holder: Connection | None,
        frame_id: str,
        follow: Event | None,
        kept: bool,
    ) -> None:
        """The journal has the end of an event: act on it, and acknowledge its holder's frame. `follow` is the event
        that comes into the mailbox with the end: the answer to a request whose sender does not wait.
        """
        if follow is not None:  # before the end, which would let go of a payload that both refer to
            where = follow.instance
            follow.instance = self._bus.instance(where.agent, where.key, self._bus.now)  # it may have been forgotten
            self._mailbox.stage(follow)
            self._mailbox.accept(follow)
            for heard in self._kept:
                heard(follow)
        if not event.finished:  # else it is a second word about the same end
            self._tool_calls.drop(event)
            if event.cancelled:  # its turn may have made requests before it heard of that
                self._cancels.cancel_requests(event)
            self._mailbox.finish(event, state, answer, blob)
            self._bus.counters["answers"] += 1
            if state in ("expired", "dead"):
                self._bus.counters[f"events_{state}"] += 1
            self._answering.send_answer(event)
            self._cancels.ended(event)
            for left in self._mailbox.on_left:
                left(event, ended=True)
        if follow is not None:
            self._tell_late(follow)
        if holder is not None:
            self._bus.ack(holder, frame_id, event)
        self._hand_over(event)

    def _hand_over(self, event: Event) -> None:
        """Hand over the next event of this one's instance, if it can be. What waits is in the journal only."""
        self.dispatch(event.instance, self._bus.now)
        if event.state == "accepted":
            self._mailbox.contents.rests(event)

    def _tell_late(self, answer: Event) -> None:
        """A late answer waits for its instance. A turn that runs there is told at once."""
        instance = answer.instance
        if instance.leased is not None and instance.conn is not None and not instance.leaving:
            self._bus.send(instance.conn, late_answer_frame(answer))
        self._hand_over(answer)

    def _refuse(self, event: Event) -> None:
        """The disk has no room for a new event: tell its senders, and forget it."""
        if event.state != "staged":
            return
        self._mailbox.unstage(event)
        for left in self._mailbox.on_left:
            left(event, ended=True)
        event.state = event.end = "cancelled"
        self._mailbox.forget_idle(event.instance)  # it may have been made for this event
        self._bus.counters["disk_full"] += 1
        info = error_payload("E_DISK_FULL", "the disk of the state directory is full; new events are not accepted")
        for connection, frame_id in event.waiting_acks:
            asked = Frame("event", id=frame_id)
            self._bus.error(connection.cls, connection.ident, info, asked)

    # --- leases

    def dispatch(self, instance: Instance, now: float) -> None:
        """Hand over the next event of an instance, or have a process started for it."""
        if instance.leased is not None or self._bus.closing:
            return
        if not instance.queue:
            self._processes.rests(instance, now)
            return
        event = instance.queue[0]
        if event.deadline is not None and event.deadline <= now and not event.held:
            self._ends.expire(event)
        if event.end is not None:
            return  # its end is on the way to the journal
        if event.cancelled:
            self._cancels.end_queued(event)
            return
        if event.standing is not None and event.standing.waits:
            self._processes.rests(instance, now)
            return
        connection = instance.conn
        if connection is None or instance.leaving:
            self._processes.want(instance, now)
            return
        if not self._processes.has_place(instance, now):
            return
        self._mailbox.lease(event, now)
        content = event.content
        frame = Frame(
            "event",
            from_=content.from_,
            to=instance.agent,
            instance_key=instance.key,
            event_id=event.id,
            reply_to=content.reply_to,
            chain=content.chain,
            epoch=instance.epoch,
            trace_id=content.trace_id,
            parent_span_id=content.parent_span_id,
            waited_ms=max(0, int((now - event.since) * 1000)),
            place_ms=int(instance.place_s * 1000) or None,
            deadline_ms=left_ms(event, now),
            source=event.source,
            auth=content.auth,
            workdir=content.workdir or instance.workdir.path,
            payload=content.payload,
            live=event.live,
            blob=event.blob,
            files=event.files,
            root_event=event.root,
            in_reply_to=event.in_reply_to,
            asynchronous=event.in_reply_to is not None,
        )
        for leased in self._leased:
            leased(event, frame)
        instance.place_s = 0.0  # the place stays with the instance while it has events
        self._bus.send(connection, frame)
        self._quiet.watch(connection)
        for handed in self._handed if event.standing is not None else ():
            handed(event)
        for told in late_answer_frames(instance, self._mailbox.contents) if instance.queue else ():
            self._bus.send(connection, told)

    def adopt(self, instance: Instance, hello: Hello, now: float) -> None:
        """Compare the lease that a process says it holds with the lease that is known here.

        After a restart no lease is known here. Then the process is believed: its token names the instance, and no other
        process can hold it. A lease that is known here and that the process does not name was never delivered. A
        process may name an event that does not wait here: it is told so at its next frame about the event.
        """
        held = {lease.event_id: lease for lease in hello.leases}
        if instance.leased is not None and instance.leased.id not in held:
            self._mailbox.give_back(instance)
        for event_id, lease in held.items():
            event = self._mailbox.events.get(event_id)
            if event is None or event.instance is not instance or event.state != "accepted":
                continue
            if instance.leased is not None:
                continue
            instance.queue.remove(event)
            instance.queue.appendleft(event)
            self._mailbox.lease(event, now)
            for leased in self._leased:
                leased(event, None)
            instance.epoch = lease.epoch

    def agent_ack(self, connection: Connection, frame: Frame, now: float) -> None:
        """`ack` from an agent."""
        instance = connection.instance
        if instance is None:
            return
        if frame.stage == "result":
            self._tool_calls.stored(instance, frame)
            return
        event, event_id = instance.leased, frame.event_id or ""
        if event is None or event.id != event_id or frame.epoch != instance.epoch:
            if frame.stage == "done" and self._answering.taken(instance, event_id):
                return
            if frame.stage == "renew" or not self._has_ended(event_id, instance):
                raise fail("E_LEASE_LOST", f"event {event_id[:100]!r} is not held under epoch {frame.epoch}")
            # A repeat of a handled frame. Its payload may be the kept file itself, so a sweep decides about it.
            self._bus.send(connection, Frame("ack", in_reply_to=frame.id, event_id=frame.event_id, stage="accepted"))
            return
        heard = self._stages.get(frame.stage or "")
        if heard is None:
            raise fail("E_FRAME_INVALID", f"no ack stage {str(frame.stage)[:40]!r}")
        heard(connection, event, frame, now)

    def _renewed(self, connection: Connection, event: Event, frame: Frame, now: float) -> None:
        work = event.work
        work.lease_until = now + mailbox.LEASE_S
        work.moved(frame.position)

    def _ended(self, connection: Connection, event: Event, frame: Frame, now: float) -> None:
        state: End = "done" if frame.stage == "done" else "cancelled" if event.cancelled else "failed"
        answer, blob = frame.payload, frame.blob
        if event.instance.deleting and state == "cancelled":
            self._mailbox.blobs.discard(blob)
            answer, blob = deleted_answer(event), None
        cause = (frame.cause or "")[:MAX_CAUSE]
        if cause and state == "failed" and event.asking is None and blob is None and self._mailbox.may_die(event):
            state = "dead"  # it can be sent again; a turn that waits for it is told, and decides itself
        self._ends.stage_end(event, state, answer, blob, cause=cause, conn=connection, frame_id=frame.id)

    def _released(self, connection: Connection, event: Event, frame: Frame, now: float) -> None:
        """The holder gives the event back: it leaves, or its epoch is too old, or the event waits (`park`)."""
        instance = event.instance
        above = True
        if frame.seen_epoch is not None:  # the instance's file is ahead of us: go above it
            above = self._mailbox.epochs.raise_above(frame.seen_epoch)
            self._bus.reserve_epochs()
            instance.epoch = self._mailbox.epochs.next()
        self._mailbox.give_back(instance)
        if not above:  # the file is damaged: nobody ever gets above that, and it would go round for ever
            event.work.attempts += 1
            self._processes.count_attempt(event, f"the conversation file names epoch {frame.seen_epoch}")
        self._bus.ack(connection, frame.id, event)
        if frame.seen_epoch is not None or frame.stage == "park":
            self.dispatch(instance, now)  # of a parked one, what it waited for may be decided meanwhile
        self._processes.serve(now)

    def _has_ended(self, event_id: str, instance: Instance) -> bool:
        event = self._mailbox.events.get(event_id)
        if event is not None:
            return event.instance is instance and event.finished
        ended = self._bus.archive.find_ended(records.event_subject(event_id))
        return ended is not None and ended.digest[: records.INSTANCE_DIGEST_BYTES] == records.instance_digest(
            instance.agent, instance.key
        )

    # --- deadlines

    def tick(self, now: float) -> None:
        """End queued events at their deadline."""
        for event in self._mailbox.deadlines.take(now):
            if event.deadline is not None and event.deadline <= now:  # else it has moved
                self._ends.expire(event)
