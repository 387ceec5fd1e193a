"""Takes new events: checks the sender and the room, and recognises repeats. Pure.

Rules.
- An event is staged here and acknowledged when the journal has it (events.py).
- A repeat of an event id is acknowledged again, and answered again if the answer is there. It is never a second event.
- The repeat of a request that says it does not wait makes it one: the answer becomes an event. The turn that asked is
  told when the journal has that, whatever process asks, and never waits for it again.
- A request that would wait for itself is refused. The chain of waiting instances shows this, and so do the requests
  that they wait for now.

Source: docs/design/delivery.md sections 2, 5 and 7.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Final

from goondan.kernel.broker.routing import acting, ends
from goondan.kernel.broker.state.bus import (
    MAX_CORRELATION,
    MAX_ID,
    REQUEUED_SUFFIX,
    RETRY_AFTER_MS,
    Bus,
    Clocks,
    overloaded,
)
from goondan.kernel.broker.state.entities import AGENTS, CLIENTS, TOOLS, Actor, Connection, Content, Event, Instance
from goondan.kernel.broker.state.mailbox import MAX_LATE, MAX_QUEUED
from goondan.kernel.broker.state.parts import Hooks, OfEvents, Part, Take
from goondan.kernel.broker.state.records import Finished, event_digest, event_subject
from goondan.kernel.broker.state.records import decode as decode_record
from goondan.kernel.broker.state.workdirs import passed_on
from goondan.schemas.bundle.address import MAX_PATH_BYTES, is_given_id, is_name, is_path
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Frame, ReplyTo
from goondan.schemas.wire.questions import ANSWER_SUFFIX

#: Agents that may wait for each other in a row. A longer chain counts as a loop.
MAX_CHAIN: Final = 32
#: Bytes of `auth`. The broker adds it to frames that may already have full size. Links accept 64 KiB more than the full
#: size; `auth`, the workdir, the chain and the names together stay below that.
MAX_AUTH: Final = 16 << 10
#: A turn may always send one request of so many bytes, even when everything is full. Otherwise events that wait behind
#: turns could take all room, and these turns would wait for room for the requests that they need to end.
MAX_NESTED_BYTES: Final = 64 << 10
_BAD_ID: Final = "the eventId of a client has letters and digits of ASCII, _ - . : and nothing else"


class Intake(Part):
    """Takes events, or refuses them with a reason."""

    def __init__(
        self,
        bus: Bus,
        accepted: Callable[[Event, bool], None],
        actors: acting.Actors,
        answering: ends.Answering,
        clocks: Clocks,
        hooks: Hooks,
    ) -> None:
        """`accepted` acts on an event when the journal has it (events.py)."""
        self._bus = bus
        self._accepted = accepted
        self._actors = actors
        self._answering = answering
        self._clocks = clocks
        self._accepts = hooks.of(OfEvents, OfEvents.accepts)
        self._mailbox = bus.mailbox
        self._ledger = bus.ledger
        self.takes = (
            Take((AGENTS,), "event", self.event, confined="inside"),
            Take((TOOLS, CLIENTS), "event", self.event),
        )

    def event(self, connection: Connection, frame: Frame, now: float) -> None:
        """`event` from a client, an agent, or a tool host (its own, or a handler's): a new one, or a repeat."""
        actor = self._actors.of(connection, frame)
        instance = self._target(connection, frame, now)
        try:
            self._event(connection, actor, instance, frame, now)
        finally:
            if not instance.open:
                self._mailbox.forget_idle(instance)  # it may have been made for an event that was not taken

    def _event(self, connection: Connection, actor: Actor, instance: Instance, frame: Frame, now: float) -> None:
        event_id = frame.event_id
        if not event_id or not is_name(event_id, MAX_ID):
            raise fail("E_FRAME_INVALID", f"an event needs an eventId of 1 to {MAX_ID} visible characters")
        if connection.cls == CLIENTS and not is_given_id(event_id, MAX_ID):
            raise fail("E_FRAME_INVALID", _BAD_ID, suggestion="Choose another id, as 1a2b-3.")
        if event_id.endswith(REQUEUED_SUFFIX):
            raise fail("E_FRAME_INVALID", f"event ids that end with {REQUEUED_SUFFIX!r} are the broker's own")
        if event_id.endswith(ANSWER_SUFFIX):
            raise fail("E_FRAME_INVALID", f"an eventId does not end with {ANSWER_SUFFIX}: answers have such ids")
        _check_kept(frame)
        said = _said(frame) if connection.cls == CLIENTS else frame.digest
        digest = event_digest(instance.agent, instance.key, actor.sender, said)
        known = self._mailbox.events.get(event_id) or self._mailbox.dead.get(event_id)
        if known is not None:
            self._repeat(known, actor, connection, frame, digest)
            return
        ended = self._bus.archive.find_ended(event_subject(event_id))
        if ended is not None:
            if ended.digest != digest:
                raise _id_in_use()
            self._late_repeat(event_id, instance, actor, connection, frame)
            return
        turn, asks = actor.turn, _asks(actor, frame)
        auth = frame.auth if connection.claims.operator and actor.instance is None else None
        chain = self._chain(actor, frame, instance) if asks else None
        trace_id, parent_span_id = acting.trace_of(actor, frame, self._bus.booted_at + now)
        event = Event(
            event_id,
            instance,
            sender=actor.sender,
            content_here=Content(
                from_=actor.name,
                payload=frame.payload,
                reply_to=_reply_to(actor, frame) if asks else frame.reply_to,
                chain=chain,
                # An operator may name one, and an agent passes on that of its own event.
                auth=auth if turn is None else turn.content.auth,
                workdir=frame.workdir if actor.instance is None else self._passed_on(actor, instance),
                trace_id=trace_id,
                parent_span_id=parent_span_id,
                digest=digest,
            ),
            source=actor.source,
            deadline=None if frame.deadline_ms is None else now + max(0, frame.deadline_ms) / 1000,
            call_id=actor.call_id,
            blob=frame.blob,
            files=frame.files or None,
            root=actor.root or "",
            session=actor.session,
            asking=None if chain is None else turn,
            since=now,
            asynchronous=asks and frame.asynchronous,
        )
        self._admit(connection, actor, event, now)
        for accepts in self._accepts:
            accepts(event, actor)
        event.asker = connection
        event.live = _wants_live(connection, frame)
        event.waiting_acks += ((connection, frame.id),)
        self._mailbox.stage(event)
        self._bus.stage(self._ledger.accepted(event, now), partial(self._accepted, event))
        self._bus.counters["events"] += 1

    def _passed_on(self, actor: Actor, target: Instance) -> str | None:
        """The working directory in which the target does what another agent that shares it asks."""
        me, sharing = actor.instance, self._bus.plan.sharing_agents
        if me is None or me.agent not in sharing or target.agent not in sharing:
            return None
        return passed_on(me.workdir, None if actor.turn is None else actor.turn.content.workdir, target.workdir)

    def _target(self, connection: Connection, frame: Frame, now: float) -> Instance:
        agent, key, operator = frame.to or "", frame.instance_key or "", connection.claims.operator
        self._bus.check_target(agent, key, operator=operator)
        if frame.workdir is not None and not operator:
            raise fail("E_FORBIDDEN", "only an operator may name a workdir")
        if frame.workdir is not None and not is_path(frame.workdir):
            message = f"a workdir is an absolute path of at most {MAX_PATH_BYTES} bytes, none of them zero"
            raise fail("E_FRAME_INVALID", message)
        if frame.auth is not None and len(memoryview(frame.auth)) > MAX_AUTH:
            raise fail("E_FRAME_INVALID", f"auth has at most {MAX_AUTH} bytes")
        if self._bus.closing and not (connection.cls == CLIENTS and frame.event_id in self._mailbox.events):
            if self._comes_too_late(connection, frame.event_id or ""):
                message = "the kernel is stopping; the message was not accepted"
                suggestion = "Start the kernel again with `gdn run` or `gdn run --detach`, then send it again."
                raise fail("E_KERNEL_NOT_RUNNING", message, suggestion=suggestion)
            raise overloaded("the kernel is stopping", 1000)
        return self._bus.instance(agent, key, now)

    def _comes_too_late(self, connection: Connection, event_id: str) -> bool:
        """Whether the sender is told at once that the kernel stops. This holds for a client with a new event. An agent
        waits for the next kernel, which also goes on with accepted events. When the kernel restarts, everybody waits.
        """
        draining = self._bus.draining
        if connection.cls != CLIENTS or draining is None or draining[0] != "orchestrator_shutdown":
            return False
        known = event_id in self._mailbox.events or event_id in self._mailbox.dead
        return not known and self._bus.archive.find_ended(event_subject(event_id)) is None

    def _admit(self, connection: Connection, actor: Actor, event: Event, now: float) -> None:
        """Refuse an event that would not be taken later either (`_check_hopeless`), or for which there is no room.

        After a refusal for lack of room, all later events of the same sender for this target are refused until the
        first one is back, so that they stay in order. This does not hold for handlers: a handler that needs an order
        sends the next event after the answer to the one before.
        """
        instance = event.instance
        self._check_hopeless(actor, event)
        target = (instance.agent, instance.key)
        ordered = actor.call_id is None
        waits_for = connection.refused.get(target) if ordered else None
        if waits_for is not None and waits_for.event_id != event.id and now < waits_for.until:
            message = f"an earlier message for {instance.address} was refused and has to come first"
        elif (refusal := self._refusal(event)) is not None:
            message = refusal
        else:
            if ordered:
                connection.refused.pop(target, None)
            return
        self._bus.counters["overloaded"] += 1
        retry_ms = RETRY_AFTER_MS
        if ordered:
            retry_ms = connection.refuse(target, event.id, now, retry_ms)
        raise overloaded(message, retry_ms)

    def _check_hopeless(self, actor: Actor, event: Event) -> None:
        """Raise GoondanError for a new event that would be refused however often it is sent. Requests without waiting
        end only with the sender's own turn, and dead letters only when a person has looked. A tool host's own events
        are always taken.
        """
        agent, asker = event.instance.agent, actor.instance
        of_turn = event.asynchronous or (event.asking is not None and event.call_id is None)  # it may lose patience
        if of_turn and asker is not None and self._mailbox.late_of(asker) >= MAX_LATE:
            message = f"{MAX_LATE} questions that {asker.address} does not wait for are open or answered"
            raise fail("E_TOOL_LIMIT", message, suggestion="Wait for answers, or ask the rest in later turns.")
        if (event.source is None or event.source.kind != "tool") and not self._mailbox.may_die(event):
            message = f"messages for the agent {agent!r} were given up, and no room is left for more of this sender"
            raise fail("E_AGENT_FAILED", message, suggestion="See `gdn dead list`; requeue or drop them.")

    def _refusal(self, event: Event) -> str | None:
        """Why there is no room for a new event, in words; None when there is room."""
        mailbox, instance, root, size = self._mailbox, event.instance, event.root, event.size
        if instance.deleting:
            return f"{instance.address} is being deleted"
        if len(instance.queue) >= MAX_QUEUED:
            return f"{MAX_QUEUED} messages wait for {instance.address}, and no more may"
        operator, session = event.by_operator, event.session
        # The usual case is checked first: it takes a third of the time that a refusal takes.
        if mailbox.open.may_take(session, root, 1, operator=operator) and mailbox.held.may_take(
            session, root, size, operator=operator
        ):
            return None
        turn = event.asking
        if size <= MAX_NESTED_BYTES and turn is not None and all(one.finished for one in turn.work.requests):
            return None  # its turn waits for nothing else, and could not go on without it
        return self._bus.shortage(mailbox.open, event, 1, "open messages") or self._bus.shortage(
            mailbox.held, event, size, "bytes of messages"
        )

    def _repeat(self, event: Event, actor: Actor, connection: Connection, frame: Frame, digest: bytes) -> None:
        self._mailbox.contents.recall(event)
        try:
            if event.sender != actor.sender or event.content.digest != digest:
                raise _id_in_use()
            self._heard_again(event, actor, connection, frame)
        finally:
            if event.state == "accepted":
                self._mailbox.contents.rests(event)

    def _heard_again(self, event: Event, actor: Actor, connection: Connection, frame: Frame) -> None:
        content = event.content
        self._discard(frame)
        event.asker = connection
        event.live = _wants_live(connection, frame)
        if not event.wants_answer and frame.reply_to is not None:
            content.reply_to, content.changed, event.wants_answer = _reply_to(actor, frame), True, True
        if event.waiting_acks:  # the journal does not have it yet, or not that nobody waits for its answer
            event.waiting_acks += ((connection, frame.id),)
            return
        waits_no_more = _asks(actor, frame) and frame.asynchronous and not event.asynchronous and actor.call_id is None
        if waits_no_more and not event.ending and not event.cancelled:  # else its answer is on the way
            self._mailbox.awaited_no_more(event)
            event.waiting_acks += ((connection, frame.id),)
            self._bus.stage(self._ledger.awaited_no_more(event), partial(self._accepted, event))
            return
        self._bus.ack(connection, frame.id, event)
        if event.finished:
            self._answering.send_answer(event)
        elif event.held:
            self._clocks.tell_asker(event)

    def _late_repeat(
        self, event_id: str, instance: Instance, actor: Actor, connection: Connection, frame: Frame
    ) -> None:
        """A repeat of an event that has ended and is forgotten here. Nothing is done twice. Its answer may be kept."""
        self._discard(frame)
        content = Content(reply_to=_reply_to(actor, frame))  # its trace is named in the answer
        event = Event(event_id, instance, actor.sender, content, call_id=actor.call_id)
        event.asker = connection
        # The answer that a turn waits for is here as long as the turn. So the turn waited no more, and was told then.
        of_turn = frame.reply_to is not None and actor.instance is not None and actor.call_id is None
        event.state, event.asynchronous = "done", of_turn or (_asks(actor, frame) and frame.asynchronous)
        if frame.reply_to is not None and not event.asynchronous:
            kept = self._bus.archive.find_answer(event_subject(event_id))
            record = None if kept is None else decode_record(kept)
            if not isinstance(record, Finished):
                raise fail("E_ANSWER_GONE", f"event {event_id[:100]!r} was answered, and its answer is no longer kept")
            event.work.answer, event.work.answer_blob = record.answer, record.blob
        self._bus.ack(connection, frame.id, event)
        self._answering.send_answer(event)

    def _discard(self, frame: Frame) -> None:
        """A repeat brought files that are not used."""
        self._mailbox.blobs.discard(frame.blob)
        for file in frame.files or ():
            self._mailbox.blobs.discard(file.blob)

    def _chain(self, actor: Actor, frame: Frame, target: Instance) -> list[str] | None:
        """The instances that wait for each other, the sender of this request last; None when nobody waits. Refuses a
        circle.
        """
        if actor.instance is None or frame.asynchronous:
            return None
        chain = _longer(actor.turn, actor.instance)
        if target.address in chain or len(chain) > MAX_CHAIN:
            raise fail("E_AGENT_CYCLE", f"{' -> '.join(chain)} -> {target.address}")
        # Two chains without a circle can still wait for each other.
        if self._waits_for(target, actor.instance):
            raise fail("E_AGENT_CYCLE", f"{target.address} waits for {actor.instance.address} already")
        return chain

    def _waits_for(self, one: Instance, other: Instance) -> bool:
        """Whether the turn of `one` waits for `other`, directly or through others. Nobody waits for requests of ended
        calls.
        """
        calls, seen, waiting = self._bus.calls, {one}, [one]
        while waiting:
            turn = waiting.pop().leased
            for asked in turn.work.requests if turn is not None else ():
                target = asked.instance
                if asked.finished or (asked.call_id is not None and calls.get(asked.call_id) is None):
                    continue
                if target is other:
                    return True
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return False


def _check_kept(frame: Frame) -> None:
    """Raise GoondanError for header texts that are kept with the event and are longer than ids may be."""
    reply_to = frame.reply_to
    if reply_to is not None and not (
        is_name(reply_to.correlation_id, MAX_CORRELATION) and is_name(reply_to.target, MAX_ID)
    ):
        message = f"replyTo has a correlationId of 1 to {MAX_CORRELATION} visible characters, and a target of {MAX_ID}"
        raise fail("E_FRAME_INVALID", message)
    if frame.trace_id is not None and len(frame.trace_id) > MAX_ID:
        raise fail("E_FRAME_INVALID", f"traceId has at most {MAX_ID} characters")


def _said(frame: Frame) -> str | None:
    """What the content of a client's event is compared by: the digest that the client gives, else the SHA-256 of its
    payload's bytes, in the frame or in a file, with those of its files.
    """
    if frame.digest:
        return frame.digest
    payload = hashlib.sha256(frame.payload).hexdigest() if frame.blob is None else frame.blob.digest
    return payload if not frame.files else "+".join([payload, *(file.blob.digest for file in frame.files)])


def _wants_live(connection: Connection, frame: Frame) -> bool:
    """Whether the asker gets live events of the turn: a client that asks for them and waits for the answer."""
    return frame.live and connection.cls == CLIENTS and frame.reply_to is not None


def _reply_to(actor: Actor, frame: Frame) -> ReplyTo | None:
    """Where the answer goes, as the asked agent sees it. The broker fills in an agent's name."""
    if frame.reply_to is None or actor.instance is None:
        return frame.reply_to
    return ReplyTo(actor.instance.agent, frame.reply_to.correlation_id)


def _asks(actor: Actor, frame: Frame) -> bool:
    """Whether an agent sends a request. For clients it makes no difference whether they wait."""
    return actor.instance is not None and frame.reply_to is not None


def _id_in_use() -> GoondanError:
    message = "the event id is in use for another sender, another instance or another content"
    return fail("E_FRAME_INVALID", message)


def _longer(turn: Event | None, instance: Instance) -> list[str]:
    """The chain of a request that `instance` makes in `turn`: those that wait now. One may have lost patience."""
    chain = [instance.address]
    while turn is not None and (turn := turn.asking) is not None:
        chain.append(turn.instance.address)
    return chain[::-1]
