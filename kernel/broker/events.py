"""Events: accepted, handed over under a lease, answered. Pure.

Rules.
- Accepted means journaled: the ack and the first delivery come from `settled`, never from `event`.
- A repeat of an event id is acknowledged again, and answered again if its answer is there; it is never a second event.
- `done` carries the turn's answer: the event's end and its answer are one journal record.
- Answers to an agent's own requests have a lane of their own, so they do not queue behind the turn that waits; those to
  a handler's requests go to its tool host at once.
- A request that would wait for itself is refused: by the chain of those who wait, and by what they wait for now.

Source: delivery.md sections 3, 4, 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from msgspec import Raw

from kernel.broker.acting import Actor, Actors
from kernel.broker.answers import failure_answer
from kernel.broker.bus import MAX_ID, RETRY_AFTER_MS, Bus
from kernel.broker.cancels import Cancels
from kernel.broker.mailbox import LEASE_S, MAX_QUEUED, Event, Instance, Staged
from kernel.broker.presence import AGENTS, CLIENTS, Connection
from kernel.broker.shares import describe_shortage
from kernel.broker.tool_calls import ToolCalls
from schemas.address import MAX_PATH_BYTES, is_instance_key, is_path
from schemas.codec import encode_value
from schemas.errors import GoondanError, error_payload
from schemas.frames import NO_PAYLOAD, OPERATOR_AGENT, Frame, Hello, ReplyTo, Source

if TYPE_CHECKING:
    from kernel.broker.processes import Processes

#: Agents that may wait for each other in a row; a longer chain is taken for a loop.
MAX_CHAIN: Final = 32
#: What an operator says about an event is stamped on frames that may be of full size themselves; links take 64 KiB more
#: than that, which this, the workdir, the chain and the names stay below (bytes).
MAX_AUTH: Final = 16 << 10
#: A turn may always ask for one thing of so many bytes, whatever else is full: else the messages that wait behind turns
#: could take all room, and those turns wait for room to ask for what they need to end (bytes).
MAX_NESTED_BYTES: Final = 64 << 10


class Events:
    """The event side of the broker. `processes` is set once both exist."""

    processes: Processes

    def __init__(self, bus: Bus, tool_calls: ToolCalls, actors: Actors) -> None:
        self._bus = bus
        self._mailbox = bus.mailbox
        self._tool_calls = tool_calls
        self._actors = actors
        self.cancels = tool_calls.cancels = Cancels(bus)

    # --- in

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
        if not event_id or len(event_id) > MAX_ID or len(frame.id) > MAX_ID:
            message = f"an event needs an eventId of 1 to {MAX_ID} characters"
            raise GoondanError(error_payload("E_FRAME_INVALID", message))
        known = self._mailbox.events.get(event_id)
        if known is not None:
            self._repeat(known, actor, connection, frame, instance)
            return
        if self._mailbox.was_answered(actor.sender, instance, event_id):
            self._late_repeat(
                Event(event_id, instance, sender=actor.sender, from_=None, payload=NO_PAYLOAD), connection, frame
            )
            return
        chain = self._chain(actor, frame, instance)
        event = Event(
            event_id,
            instance,
            sender=actor.sender,
            from_=actor.name,
            payload=frame.payload,
            source=actor.source,
            reply_to=_reply_to(actor, frame),
            chain=chain,
            auth=_auth(actor, connection, frame),
            workdir=frame.workdir,
            trace_id=frame.trace_id or (None if actor.turn is None else actor.turn.trace_id),
            deadline=None if frame.deadline_ms is None else now + max(0, frame.deadline_ms) / 1000,
            call_id=actor.call_id,
            blob=frame.blob,
            root=actor.root,
            session=actor.session,
            parent=None if chain is None or actor.turn is None else actor.turn.id,
        )
        self._admit(connection, actor, event, now)
        if chain is not None:
            _note(actor, event)
        event.asker = connection
        event.live = _wants_live(connection, frame)
        event.waiting_acks.append((connection, frame.id))
        self._mailbox.stage(event)
        self._bus.staged.append(Staged("accept", event))
        self._bus.counters["events"] += 1

    def _target(self, connection: Connection, frame: Frame, now: float) -> Instance:
        agent, key = frame.to or "", frame.instance_key or ""
        agents, operator = self._bus.plan.agents, connection.claims.operator
        if agent not in agents or (agent == OPERATOR_AGENT and not operator):
            known = ", ".join(sorted(name for name in agents if name != OPERATOR_AGENT))[:500]
            raise GoondanError(error_payload("E_AGENT_NOT_FOUND", f"no agent {agent[:100]!r}; there are: {known}"))
        if not is_instance_key(key):
            message = "instanceKey must be 1 to 256 characters without control characters"
            raise GoondanError(error_payload("E_FRAME_INVALID", message))
        if frame.workdir is not None and not operator:
            raise GoondanError(error_payload("E_FORBIDDEN", "only an operator may name a workdir"))
        auth = 0 if frame.auth is None else len(memoryview(frame.auth))
        if frame.workdir is not None and not is_path(frame.workdir):
            message = f"a workdir is an absolute path of at most {MAX_PATH_BYTES} bytes, none of them zero"
            raise GoondanError(error_payload("E_FRAME_INVALID", message))
        if auth > MAX_AUTH:
            raise GoondanError(error_payload("E_FRAME_INVALID", f"auth has at most {MAX_AUTH} bytes"))
        if self._bus.closing:
            raise GoondanError(error_payload("E_OVERLOADED", "the kernel is stopping", retry_after_ms=1000))
        return self._bus.instance(agent, key, now)

    def _admit(self, connection: Connection, actor: Actor, event: Event, now: float) -> None:
        """Refuse what there is no room for, and then everything later from the same sender until the first refused one
        is back. Of a handler each event is by itself: one that waits for its order sends the next after it has heard.
        """
        instance = event.instance
        target = (instance.agent, instance.key)
        ordered = actor.call_id is None
        waits_for = connection.refused.get(target) if ordered else None
        if waits_for is not None and waits_for.event_id != event.id and now < waits_for.until:
            message = f"an earlier message for {instance.address} was refused and has to come first"
        elif (refusal := self._refusal(actor, event)) is not None:
            message = refusal
        else:
            if ordered:
                connection.refused.pop(target, None)
            return
        self._bus.counters["overloaded"] += 1
        retry_ms = RETRY_AFTER_MS
        if ordered:
            retry_ms = connection.refuse(target, event.id, now, retry_ms)
        raise GoondanError(error_payload("E_OVERLOADED", message, retry_after_ms=retry_ms))

    def _refusal(self, actor: Actor, event: Event) -> str | None:
        """What stands against a new event, in words; None when there is room for it."""
        mailbox, instance, root, size = self._mailbox, event.instance, event.root, event.size
        if len(instance.queue) >= MAX_QUEUED:
            return f"{MAX_QUEUED} messages wait for {instance.address}, and no more may"
        operator, session = event.by_operator, event.session
        # The usual case first: it costs a third of the way to a refusal.
        if mailbox.open.may_take(session, root, 1, operator=operator) and mailbox.held.may_take(
            session, root, size, operator=operator
        ):
            return None
        for pool, amount, what in ((mailbox.open, 1, "open messages"), (mailbox.held, size, "bytes of messages")):
            shortage = pool.shortage(session, root, amount, operator=operator)
            if shortage is None or (size <= MAX_NESTED_BYTES and _is_first(actor, event)):
                continue
            self._bus.note_refusal(root, shortage.quota, what)
            return describe_shortage(shortage, root, what, amount, pool.capacity)
        return None

    def _repeat(self, event: Event, actor: Actor, connection: Connection, frame: Frame, instance: Instance) -> None:
        # By name: an instance that had nothing to do may have been forgotten and made anew.
        same_target = event.instance.address == instance.address
        if event.adopted and same_target:
            self._complete(event, actor, connection, frame)
        if event.sender != actor.sender or not same_target:
            message = "the event id is in use for another sender or another instance"
            raise GoondanError(error_payload("E_FRAME_INVALID", message))
        self._mailbox.blobs.discard(frame.blob)
        event.asker = connection
        event.live = _wants_live(connection, frame)
        if event.reply_to is None:
            event.reply_to = _reply_to(actor, frame)
        if event.state == "staged":
            event.waiting_acks.append((connection, frame.id))
            return
        self._bus.ack(connection, frame.id, event)
        if event.finished:
            self._send_answer(event)

    def _late_repeat(self, event: Event, connection: Connection, frame: Frame) -> None:
        """Of an event that finished long ago: nothing is done twice; who wants its answer is told so."""
        if frame.reply_to is not None:
            message = f"event {event.id[:100]!r} was answered, and its answer is no longer kept"
            raise GoondanError(error_payload("E_ANSWER_GONE", message))
        self._bus.ack(connection, frame.id, event)

    def _complete(self, event: Event, actor: Actor, connection: Connection, frame: Frame) -> None:
        """The sender of an event that was known from its holder only has come back with its content."""
        event.adopted = False
        event.sender = actor.sender
        event.call_id = actor.call_id
        if event.finished:
            return
        event.source = actor.source
        self._mailbox.complete(event, frame.payload, frame.blob, actor.root or event.id, actor.session)
        event.from_ = actor.name
        event.workdir = frame.workdir
        event.auth = _auth(actor, connection, frame)
        if frame.reply_to is not None and actor.instance is not None:
            # It was let in once, and its holder works on it: whatever it closes now is too late to refuse.
            event.chain = _longer(actor.turn, actor.instance)
            event.parent = None if actor.turn is None else actor.turn.id
            _note(actor, event)

    def _chain(self, actor: Actor, frame: Frame, target: Instance) -> list[str] | None:
        """Who waits for whom, ending with the sender; None when nobody waits. Refuses what would close a circle."""
        if actor.instance is None or frame.reply_to is None:
            return None
        chain = _longer(actor.turn, actor.instance)
        if target.address in chain or len(chain) > MAX_CHAIN:
            raise GoondanError(error_payload("E_AGENT_CYCLE", f"{' -> '.join(chain)} -> {target.address}"))
        # Two chains that are clean by themselves can wait for each other all the same.
        if self._waits_for(target, actor.instance):
            message = f"{target.address} waits for {actor.instance.address} already"
            raise GoondanError(error_payload("E_AGENT_CYCLE", message))
        return chain

    def _waits_for(self, one: Instance, other: Instance) -> bool:
        """Whether the turn of `one` waits for `other`, directly or by others; what ended calls asked for is waited for
        by nobody.
        """
        calls, seen, waiting = self._bus.calls, {one}, [one]
        while waiting:
            turn = waiting.pop().leased
            for asked in turn.requests if turn is not None else ():
                target = asked.instance
                if asked.finished or (asked.call_id is not None and calls.get(asked.call_id) is None):
                    continue
                if target is other:
                    return True
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return False

    def settled(self, item: Staged, now: float) -> None:
        """The journal has it."""
        event = item.event
        if item.kind == "accept":
            if event.state == "staged":
                self._mailbox.accept(event)
            for connection, frame_id in event.waiting_acks:
                self._bus.ack(connection, frame_id, event)
            event.waiting_acks.clear()
        else:
            if not event.finished:
                self._tool_calls.drop(event)
                self.cancels.ending(event)
                cancelled = event.cancelled and item.state == "failed"
                self._mailbox.finish(event, "cancelled" if cancelled else item.state, item.answer, item.blob)
                self._bus.counters["answers"] += 1
                self._send_answer(event)
                self.cancels.ended(event)
            elif item.answer is not None:
                self._mailbox.blobs.discard(item.blob)
            if isinstance(item.conn, Connection):
                self._bus.ack(item.conn, item.frame_id, event)
        self.dispatch(event.instance, now)

    # --- leases

    def dispatch(self, instance: Instance, now: float) -> None:
        """Hand the next event over, or have a process started that it can be handed to."""
        if instance.leased is not None or self._bus.closing:
            return
        while instance.queue and (deadline := instance.queue[0].deadline) is not None and deadline <= now:
            self._expire(instance.queue[0])
        if not instance.queue:
            self.processes.rests(instance, now)
            return
        if instance.queue[0].cancelled:
            self.cancels.end_queued(instance.queue[0])
            return
        connection = instance.conn
        if connection is None or instance.leaving:
            self.processes.want(instance, now)
            return
        if not self.processes.has_place(instance, now):
            return
        event = instance.queue[0]
        self._mailbox.lease(event, now)
        frame = Frame(
            "event",
            from_=event.from_,
            to=instance.agent,
            instance_key=instance.key,
            event_id=event.id,
            reply_to=event.reply_to,
            chain=event.chain,
            epoch=instance.epoch,
            trace_id=event.trace_id,
            deadline_ms=None if event.deadline is None else max(1, int((event.deadline - now) * 1000)),
            source=event.source,
            auth=event.auth,
            workdir=event.workdir or instance.workdir,
            payload=event.payload,
            live=event.live,
            blob=event.blob,
            root_event=event.root,
        )
        self._bus.send(connection, frame)

    def adopt(self, instance: Instance, hello: Hello, now: float) -> None:
        """Bring the lease that a process says it holds together with the one that is known here.

        After a restart of a broker without a durable journal none is known: the process is believed then, since its
        token names the instance and no other process can hold it. A lease known here that the process does not name
        was never delivered.
        """
        held = {lease.event_id: lease for lease in hello.leases}
        if instance.leased is not None and instance.leased.id not in held:
            self._mailbox.give_back(instance)
        for event_id, lease in held.items():
            event = self._mailbox.events.get(event_id)
            if event is None:
                root = (lease.root_event or event_id)[:MAX_ID]
                session = self._mailbox.session_of(root)
                event = Event(
                    event_id, instance, sender=None, from_=None, payload=NO_PAYLOAD, root=root, session=session
                )
                event.adopted = True
                self._mailbox.stage(event)
                self._mailbox.accept(event)
            if event.instance is not instance or event.finished or instance.leased is not None:
                continue
            if event.state == "staged":  # its sender was quicker than the holder; the journal follows
                self._mailbox.accept(event)
            instance.queue.remove(event)
            instance.queue.appendleft(event)
            self._mailbox.lease(event, now)
            instance.epoch = lease.epoch

    def agent_ack(self, connection: Connection, frame: Frame, now: float) -> None:
        """`ack` from an agent."""
        instance = connection.instance
        if instance is None:
            return
        if frame.stage == "result":
            self._tool_calls.stored(instance, frame)
            return
        if frame.stage == "done" and frame.event_id in instance.answers:
            del instance.answers[frame.event_id]
            self._mailbox.answered(frame.event_id, by_agent=True)
            return
        event = self._mailbox.events.get(frame.event_id or "")
        if frame.stage != "renew" and event is not None and event.instance is instance and event.finished:
            self._mailbox.blobs.discard(frame.blob)
            self._bus.ack(connection, frame.id, event)  # a repeat: it was heard the first time
            return
        if event is None or instance.leased is not event or frame.epoch != instance.epoch:
            message = f"event {(frame.event_id or '')[:100]!r} is not held under epoch {frame.epoch}"
            raise GoondanError(error_payload("E_LEASE_LOST", message))
        if frame.stage == "renew":
            event.lease_until = now + LEASE_S
        elif frame.stage == "done":
            self._bus.staged.append(Staged("finish", event, connection, frame.id, frame.payload, "done", frame.blob))
        elif frame.stage == "failed":
            self._bus.staged.append(Staged("finish", event, connection, frame.id, frame.payload, "failed", frame.blob))
        elif frame.stage == "release":
            self._mailbox.give_back(instance)
            self._bus.ack(connection, frame.id, event)
            self.processes.serve(now)
        else:
            raise GoondanError(error_payload("E_FRAME_INVALID", f"no ack stage {str(frame.stage)[:40]!r}"))

    def answer_ack(self, connection: Connection, frame: Frame, now: float) -> None:
        """`ack` from a client or a tool host: it has an answer, whose payload need not be kept for it any longer."""
        if frame.stage == "done" and frame.event_id is not None:
            self._mailbox.answered(frame.event_id, by_agent=False)

    # --- out

    def _send_answer(self, event: Event) -> None:
        asker = event.asker
        if event.reply_to is None or event.answer is None or asker is None:
            return
        agent, key = event.instance.agent, event.instance.key
        frame = Frame(
            "event",
            from_=agent,
            instance_key=key,
            event_id=event.answer_id,
            in_reply_to=event.reply_to.correlation_id,
            trace_id=event.trace_id,
            source=Source("agent", agent, key),
            payload=event.answer,
            call_id=event.call_id,
            blob=event.answer_blob,
            root_event=event.root,
        )
        if event.call_id is not None and self._bus.calls.get(event.call_id) is None:
            self._bus.counters["answers_late"] += 1  # its tool host drops it, or is about to name the call again
        asking = asker.instance
        self._mailbox.blobs.sent(event.answer_id, event.answer_blob, to_agent=asking is not None)
        if asking is None:
            self._bus.send(asker, frame)
            return
        frame.id = self._bus.next_id()
        data = asking.answers[event.answer_id] = encode_value(frame)
        if asking.conn is not None:
            self._bus.out.append((AGENTS, asking.conn.ident, data))

    def repeat_answers(self, instance: Instance, connection: Connection) -> None:
        """An agent is back: what its lane of answers still holds."""
        for data in instance.answers.values():
            self._bus.out.append((AGENTS, connection.ident, data))

    def end(self, event: Event, state: Literal["expired", "dead"], code: str, message: str) -> None:
        """End an event in its agent's place: the sender gets an answer all the same."""
        answer: Raw = failure_answer(event, error_payload(code, message))
        self._tool_calls.drop(event)
        self.cancels.ending(event)
        self._mailbox.finish(event, state, answer)
        self._bus.counters[f"events_{state}"] += 1
        self._send_answer(event)
        self.cancels.ended(event)

    def _expire(self, event: Event) -> None:
        self.end(event, "expired", "E_AGENT_TIMEOUT", "the deadline passed before the agent could take the event")

    def tick(self, instance: Instance, now: float) -> None:
        """Queued events end at their deadline."""
        for event in [e for e in instance.queue if e.deadline is not None and e.deadline <= now]:
            self._expire(event)


def _is_first(actor: Actor, event: Event) -> bool:
    """Whether a turn asks this and waits for nothing else: without it the turn could only keep what it holds."""
    return event.parent is not None and actor.turn is not None and all(one.finished for one in actor.turn.requests)


def _wants_live(connection: Connection, frame: Frame) -> bool:
    """Whether this asker is to hear of the turn while it runs: clients that wait for the answer."""
    return frame.live and connection.cls == CLIENTS and frame.reply_to is not None


def _reply_to(actor: Actor, frame: Frame) -> ReplyTo | None:
    """Where the answer goes, as the agent that is asked sees it: an agent's name is the broker's word."""
    if frame.reply_to is None or actor.instance is None:
        return frame.reply_to
    return ReplyTo(actor.instance.agent, frame.reply_to.correlation_id)


def _note(actor: Actor, event: Event) -> None:
    """The actor's turn waits for `event`; what has ended meanwhile need not be remembered."""
    if actor.turn is not None:
        actor.turn.requests = [asked for asked in actor.turn.requests if not asked.finished]
        actor.turn.requests.append(event)


def _longer(turn: Event | None, instance: Instance) -> list[str]:
    """The chain of a request that `instance` makes in `turn`."""
    return [*((turn.chain if turn is not None else None) or []), instance.address]


def _auth(actor: Actor, connection: Connection, frame: Frame) -> Raw | None:
    """On whose behalf: an operator may say it, an agent passes on what its own event said."""
    if actor.instance is not None:
        return actor.turn.auth if actor.turn is not None else None
    return frame.auth if connection.claims.operator else None
