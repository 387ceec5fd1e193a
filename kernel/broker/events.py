"""Events: accepted, handed over under a lease, answered. Pure.

Rules.
- Accepted means journaled: the ack and the first delivery come from `settled`, never from `event`. So does every end:
  whoever asked is told when the journal has it.
- A repeat of an event id is acknowledged again, and answered again if its answer is there; it is never a second event.
- `done` carries the turn's answer: the event's end and its answer are one journal record.
- Answers to an agent's own requests have a lane of their own, so they do not queue behind the turn that waits; those to
  a handler's requests go to its tool host at once.
- A request that would wait for itself is refused: by the chain of those who wait, and by what they wait for now.

Source: docs/design/delivery.md sections 2, 5 and 7.
"""

from __future__ import annotations

from typing import Final

from msgspec import Raw

from kernel.broker.acting import Actor, Actors
from kernel.broker.answers import deleted_answer
from kernel.broker.approvals.clocks import left_ms
from kernel.broker.approvals.room import Approvals
from kernel.broker.blobs import Receiver
from kernel.broker.budgets.desk import Budgets
from kernel.broker.bus import MAX_CORRELATION, MAX_ID, RETRY_AFTER_MS, Bus
from kernel.broker.cancels import Cancels
from kernel.broker.dead_letters import REQUEUED_SUFFIX
from kernel.broker.ends import Ends
from kernel.broker.entities import AGENTS, CLIENTS, Connection, Content, Event, Instance, Staged, State
from kernel.broker.journal.interface import Ended
from kernel.broker.journal.records import INSTANCE_DIGEST_BYTES, Finished, event_digest, event_subject, instance_digest
from kernel.broker.journal.records import decode as decode_record
from kernel.broker.late_answers import news, waiting_news
from kernel.broker.mailbox import LEASE_S, MAX_LATE, MAX_QUEUED
from kernel.broker.processes import Processes
from kernel.broker.quiet import QuietPeers
from kernel.broker.restarts import Restarts
from kernel.broker.shares import describe_shortage
from kernel.broker.tool_calls import ToolCalls
from kernel.broker.tracing import trace_of
from schemas.address import MAX_PATH_BYTES, is_instance_key, is_path
from schemas.codec import encode_value
from schemas.errors import GoondanError, error_payload
from schemas.frames import OPERATOR_AGENT, ErrorPayload, Frame, Hello, ReplyTo, Source
from schemas.questions import ANSWER_SUFFIX

#: Agents that may wait for each other in a row; a longer chain is taken for a loop.
MAX_CHAIN: Final = 32
#: What an operator says about an event is stamped on frames that may be of full size themselves; links take 64 KiB more
#: than that, which this, the workdir, the chain and the names stay below (bytes).
MAX_AUTH: Final = 16 << 10
#: A turn may always ask for one thing of so many bytes, whatever else is full: else the messages that wait behind turns
#: could take all room, and those turns wait for room to ask for what they need to end (bytes).
MAX_NESTED_BYTES: Final = 64 << 10


class Events:
    """The event side of the broker."""

    def __init__(
        self,
        bus: Bus,
        *,
        actors: Actors,
        approvals: Approvals,
        budgets: Budgets,
        cancels: Cancels,
        ends: Ends,
        processes: Processes,
        quiet: QuietPeers,
        restarts: Restarts,
        tool_calls: ToolCalls,
    ) -> None:
        self._bus = bus
        self._actors = actors
        self._approvals = approvals
        self._budgets = budgets
        self._cancels = cancels
        self._ends = ends
        self._processes = processes
        self._quiet = quiet
        self._restarts = restarts
        self._tool_calls = tool_calls
        self._mailbox = bus.mailbox
        self._ledger = bus.ledger

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
        if event_id.endswith(REQUEUED_SUFFIX):
            message = f"event ids that end with {REQUEUED_SUFFIX!r} are the broker's own"
            raise GoondanError(error_payload("E_FRAME_INVALID", message))
        if event_id.endswith(ANSWER_SUFFIX):
            message = f"an eventId does not end with {ANSWER_SUFFIX}: answers have such ids"
            raise GoondanError(error_payload("E_FRAME_INVALID", message))
        _check_kept(frame)
        digest = event_digest(instance.agent, instance.key, actor.sender, frame.digest)
        known = self._mailbox.events.get(event_id) or self._mailbox.dead.get(event_id)
        if known is not None:
            self._repeat(known, actor, connection, frame, digest)
            return
        ended = self._bus.archive.find_ended(event_subject(event_id))
        if ended is not None:
            self._late_repeat(event_id, instance, ended, actor, connection, frame, digest)
            return
        chain = self._chain(actor, frame, instance)
        trace_id, parent_span_id = trace_of(actor, frame, self._bus.booted_at + now)
        event = Event(
            event_id,
            instance,
            sender=actor.sender,
            content=Content(
                from_=actor.name,
                payload=frame.payload,
                reply_to=_reply_to(actor, frame),
                chain=chain,
                auth=_auth(actor, connection, frame),
                workdir=frame.workdir,
                trace_id=trace_id,
                parent_span_id=parent_span_id,
                digest=digest,
            ),
            source=actor.source,
            deadline=None if frame.deadline_ms is None else now + max(0, frame.deadline_ms) / 1000,
            call_id=actor.call_id,
            blob=frame.blob,
            root=actor.root,
            session=actor.session,
            asking=None if chain is None else actor.turn,
            since=now,
            asynchronous=_is_asynchronous(actor, frame),
        )
        self._admit(connection, actor, event, now)
        event.budget = self._budgets.line_of(event, actor.root, actor.turn)
        if event.asking is not None:
            event.asking.work.requests[event] = None
        event.asker = connection
        event.live = _wants_live(connection, frame)
        event.waiting_acks.append((connection, frame.id))
        self._mailbox.stage(event)
        self._bus.staged.append(Staged("accept", self._ledger.accepted(event, now), event))
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
            if self._comes_too_late(connection, frame.event_id or ""):
                message = "the kernel is stopping; the message was not accepted"
                suggestion = "Start the kernel again with `gdn run` or `gdn run --detach`, then send it again."
                raise GoondanError(error_payload("E_KERNEL_NOT_RUNNING", message, suggestion=suggestion))
            raise GoondanError(error_payload("E_OVERLOADED", "the kernel is stopping", retry_after_ms=1000))
        return self._bus.instance(agent, key, now)

    def _comes_too_late(self, connection: Connection, event_id: str) -> bool:
        """Whether a person is to be told at once that the kernel stops. An agent waits for the next kernel, which also
        goes on with what was accepted before; and when the kernel only starts anew, everybody does.
        """
        draining = self._bus.draining
        if connection.cls != CLIENTS or draining is None or draining[0] != "orchestrator_shutdown":
            return False
        known = event_id in self._mailbox.events or event_id in self._mailbox.dead
        return not known and self._bus.archive.find_ended(event_subject(event_id)) is None

    def _admit(self, connection: Connection, actor: Actor, event: Event, now: float) -> None:
        """Refuse what would not be taken later either (`_hopeless`). Refuse what there is no room for, and then all
        that comes later from the same sender until the first refused one is back. Of a handler each event is by itself:
        one that waits for its order sends the next after it has heard.
        """
        instance = event.instance
        if (error := self._hopeless(actor, event)) is not None:
            raise GoondanError(error)
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

    def _hopeless(self, actor: Actor, event: Event) -> ErrorPayload | None:
        """What a new event would be refused for however often it is sent: what its sender has not waited for goes with
        the sender's own turn, and dead letters go when a person has looked. What tool hosts say themselves is taken.
        """
        agent, asker = event.instance.agent, actor.instance
        if event.asynchronous and asker is not None and self._mailbox.late_of(asker) >= MAX_LATE:
            message = f"{MAX_LATE} questions that {asker.address} does not wait for are open or answered"
            return error_payload(
                "E_TOOL_LIMIT", message, suggestion="Wait for answers, or ask the rest in later turns."
            )
        if (event.source is None or event.source.kind != "tool") and not self._mailbox.may_die(event):
            message = f"messages for the agent {agent!r} were given up, and no room is left for more of this sender"
            return error_payload("E_AGENT_FAILED", message, suggestion="See `gdn dead list`; requeue or drop them.")
        return None

    def _refusal(self, actor: Actor, event: Event) -> str | None:
        """What stands against a new event, in words; None when there is room for it."""
        mailbox, instance, root, size = self._mailbox, event.instance, event.root, event.size
        if instance.deleting:
            return f"{instance.address} is being deleted"
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

    def _repeat(self, event: Event, actor: Actor, connection: Connection, frame: Frame, digest: bytes) -> None:
        self._mailbox.contents.recall(event)
        try:
            self._heard_again(event, actor, connection, frame, digest)
        finally:
            if event.state == "accepted":
                self._mailbox.contents.rests(event)

    def _heard_again(self, event: Event, actor: Actor, connection: Connection, frame: Frame, digest: bytes) -> None:
        content = event.content
        if event.sender != actor.sender or content.digest != digest:
            raise _id_in_use()
        self._mailbox.blobs.discard(frame.blob)
        event.asker = connection
        event.live = _wants_live(connection, frame)
        if not event.wants_answer and frame.reply_to is not None:
            content.reply_to, content.changed, event.wants_answer = _reply_to(actor, frame), True, True
        if event.state == "staged":
            event.waiting_acks.append((connection, frame.id))
            return
        self._bus.ack(connection, frame.id, event)
        if event.finished:
            self._send_answer(event)
        elif event.held:
            self._approvals.clocks.tell_asker(event)

    def _late_repeat(
        self,
        event_id: str,
        instance: Instance,
        ended: Ended,
        actor: Actor,
        connection: Connection,
        frame: Frame,
        digest: bytes,
    ) -> None:
        """Of an event that has ended and is forgotten here: nothing is done twice; its answer may still be kept."""
        if ended.digest != digest:
            raise _id_in_use()
        self._mailbox.blobs.discard(frame.blob)
        content = Content(reply_to=_reply_to(actor, frame))  # its trace is named in the answer
        event = Event(event_id, instance, sender=actor.sender, content=content, call_id=actor.call_id)
        event.asker = connection
        event.state, event.asynchronous = "done", _is_asynchronous(actor, frame)
        if frame.reply_to is not None and not event.asynchronous:
            kept = self._bus.archive.find_answer(event_subject(event_id))
            record = None if kept is None else decode_record(kept)
            if not isinstance(record, Finished):
                message = f"event {event_id[:100]!r} was answered, and its answer is no longer kept"
                raise GoondanError(error_payload("E_ANSWER_GONE", message))
            event.work.answer, event.work.answer_blob = record.answer, record.blob
        self._bus.ack(connection, frame.id, event)
        self._send_answer(event)

    def _chain(self, actor: Actor, frame: Frame, target: Instance) -> list[str] | None:
        """Who waits for whom, ending with the sender; None when nobody waits. Refuses what would close a circle."""
        if actor.instance is None or frame.reply_to is None or frame.asynchronous:
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

    def settled(self, item: Staged, now: float) -> None:
        """The journal has it."""
        event = item.event
        if event is None:
            return
        if item.kind == "accept":
            if event.state == "staged":
                self._mailbox.accept(event)
            for connection, frame_id in event.waiting_acks:
                self._bus.ack(connection, frame_id, event)
            event.acknowledged()
        elif item.kind == "finish":
            follow = item.follow
            if follow is not None:  # before the end, which would let go of a payload that both refer to
                where = follow.instance
                follow.instance = self._bus.instance(where.agent, where.key, now)  # it may have been forgotten
                self._mailbox.stage(follow)
                self._mailbox.accept(follow)
            if not event.finished:  # else it is a second word about the same end
                self._end(event, item)
            if follow is not None:
                self._tell_late(follow, now)
            if item.conn is not None:
                self._bus.ack(item.conn, item.frame_id, event)
        self.dispatch(event.instance, now)
        if event.state == "accepted":
            self._mailbox.contents.rests(event)

    def _tell_late(self, answer: Event, now: float) -> None:
        """A late answer waits for its instance; a turn that runs there hears of it at once."""
        instance = answer.instance
        if instance.leased is not None and instance.conn is not None and not instance.leaving:
            self._bus.send(instance.conn, news(answer))
        self.dispatch(instance, now)
        if answer.state == "accepted":
            self._mailbox.contents.rests(answer)

    def _end(self, event: Event, item: Staged) -> None:
        self._tool_calls.drop(event)
        self._approvals.drop(event)
        self._cancels.ending(event)
        self._mailbox.finish(event, item.state, item.answer, item.blob)
        self._budgets.ended(event)
        self._bus.counters["answers"] += 1
        if item.state in ("expired", "dead"):
            self._bus.counters[f"events_{item.state}"] += 1
        self._send_answer(event)
        self._cancels.ended(event)
        self._restarts.left(event)

    def refused(self, item: Staged) -> None:
        """The disk has no room for a new event: its senders are told, and nothing of it stays."""
        event = item.event
        if event is None or event.state != "staged":
            return
        if event.asking is not None:
            event.asking.work.requests.pop(event, None)
        self._mailbox.unstage(event)
        self._budgets.ended(event)
        event.state = event.end = "cancelled"
        self._mailbox.forget_idle(event.instance)  # it may have been made for this event
        self._bus.counters["disk_full"] += 1
        info = error_payload("E_DISK_FULL", "the disk of the state directory is full; new events are not accepted")
        for connection, frame_id in event.waiting_acks:
            asked = Frame("event", id=frame_id)
            self._bus.error(connection.cls, connection.ident, info, asked)

    # --- leases

    def dispatch(self, instance: Instance, now: float) -> None:
        """Hand the next event over, or have a process started that it can be handed to."""
        if instance.leased is not None or self._bus.closing:
            return
        first = instance.queue[0] if instance.queue else None
        if first is not None and first.deadline is not None and first.deadline <= now and not first.held:
            self._ends.expire(first)
        if not instance.queue:
            self._processes.rests(instance, now)
            return
        if instance.queue[0].ending:
            return  # its end is on the way to the journal
        if instance.queue[0].cancelled:
            self._cancels.end_queued(instance.queue[0])
            return
        if instance.queue[0].waits:
            self._processes.rests(instance, now)
            return
        connection = instance.conn
        if connection is None or instance.leaving:
            self._processes.want(instance, now)
            return
        if not self._processes.has_place(instance, now):
            return
        event = instance.queue[0]
        self._budgets.begin(event, anew=True)
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
            root_event=event.root,
            in_reply_to=event.in_reply_to,
            asynchronous=event.in_reply_to is not None,
            budget=event.budget is not None,
        )
        instance.place_s = 0.0  # the place stays with the instance while it has events
        self._bus.send(connection, frame)
        self._quiet.watch(connection)
        self._approvals.holder_here(event)
        for told in waiting_news(instance, self._mailbox.contents):
            self._bus.send(connection, told)

    def adopt(self, instance: Instance, hello: Hello, now: float) -> None:
        """Bring the lease that a process says it holds together with the one that is known here.

        After a restart none is known: the process is believed, since its token names the instance and no other process
        can hold it. A lease known here that the process does not name was never delivered. A process that names an
        event which is not waiting here hears so when it speaks about it.
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
            self._budgets.begin(event, anew=False)
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
            self._mailbox.arrived(frame.event_id, at="agent")
            self._mailbox.answer_read(frame.event_id)
            return
        event = self._mailbox.events.get(frame.event_id or "")
        if frame.stage != "renew" and self._has_ended(frame.event_id or "", instance):
            # A repeat: it was heard the first time. Its payload may be the very file that is kept; a sweep decides.
            self._bus.send(connection, Frame("ack", in_reply_to=frame.id, event_id=frame.event_id, stage="accepted"))
            return
        if event is None or instance.leased is not event or frame.epoch != instance.epoch:
            message = f"event {(frame.event_id or '')[:100]!r} is not held under epoch {frame.epoch}"
            raise GoondanError(error_payload("E_LEASE_LOST", message))
        if frame.stage == "renew":
            event.work.lease_until = now + LEASE_S
            event.moved(frame.position)
        elif frame.stage == "done" or frame.stage == "failed":
            state: State = "done" if frame.stage == "done" else "cancelled" if event.cancelled else "failed"
            answer, blob = frame.payload, frame.blob
            if instance.deleting and state == "cancelled":
                self._mailbox.blobs.discard(blob)
                answer, blob = deleted_answer(event), None
            self._ends.stage(event, state, answer, blob, conn=connection, frame_id=frame.id)
        elif frame.stage in ("release", "park"):
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
            self._restarts.left(event)
            if frame.seen_epoch is not None or frame.stage == "park":
                self.dispatch(instance, now)  # of a parked one, what it waited for may be decided meanwhile
            self._processes.serve(now)
        else:
            raise GoondanError(error_payload("E_FRAME_INVALID", f"no ack stage {str(frame.stage)[:40]!r}"))

    def _has_ended(self, event_id: str, instance: Instance) -> bool:
        event = self._mailbox.events.get(event_id)
        if event is not None:
            return event.instance is instance and event.finished
        ended = self._bus.archive.find_ended(event_subject(event_id))
        return ended is not None and ended.digest[:INSTANCE_DIGEST_BYTES] == instance_digest(
            instance.agent, instance.key
        )

    def answer_ack(self, connection: Connection, frame: Frame, now: float) -> None:
        """`ack` from a client or a tool host: it has an answer, whose payload need not be kept for it any longer."""
        answer_id = frame.event_id
        at: Receiver = "client" if connection.cls == CLIENTS else "toolhost"
        if frame.stage == "done" and answer_id is not None and self._mailbox.arrived(answer_id, at=at):
            item = self._ledger.answer_arrived(answer_id.removesuffix(ANSWER_SUFFIX))
            self._bus.staged.append(Staged("note", item))
        if frame.stage == "done" and answer_id is not None and at == "toolhost":
            self._mailbox.answer_read(answer_id)

    # --- out

    def _send_answer(self, event: Event) -> None:
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
        """An answer that was dropped from memory when its asker had read it, and is asked for again."""
        for data in self._bus.archive.find_records(event_subject(event_id)):
            record = decode_record(data)
            if isinstance(record, Finished):
                return record.answer
        raise GoondanError(
            error_payload("E_ANSWER_GONE", f"the answer of event {event_id[:100]!r} is not in the journal")
        )

    def repeat_answers(self, instance: Instance, connection: Connection) -> None:
        """An agent is back: what its lane of answers still holds."""
        for data in instance.answers.values():
            self._bus.out.append((AGENTS, connection.ident, data))

    def tick(self, now: float) -> None:
        """Queued events end at their deadline."""
        for event in self._mailbox.deadlines.take(now):
            if event.deadline is not None and event.deadline <= now:  # else it has moved
                self._ends.expire(event)


def _check_kept(frame: Frame) -> None:
    """Raise GoondanError for texts of a header that are kept with the event and are longer than ids are."""
    reply_to = frame.reply_to
    if reply_to is not None and (len(reply_to.correlation_id) > MAX_CORRELATION or len(reply_to.target) > MAX_ID):
        message = f"replyTo has a correlationId of at most {MAX_CORRELATION} characters, and a target of {MAX_ID}"
        raise GoondanError(error_payload("E_FRAME_INVALID", message))
    if frame.trace_id is not None and len(frame.trace_id) > MAX_ID:
        raise GoondanError(error_payload("E_FRAME_INVALID", f"traceId has at most {MAX_ID} characters"))


def _is_first(actor: Actor, event: Event) -> bool:
    """Whether a turn asks this and waits for nothing else: without it the turn could only keep what it holds."""
    return event.parent is not None and actor.turn is not None and all(one.finished for one in actor.turn.work.requests)


def _wants_live(connection: Connection, frame: Frame) -> bool:
    """Whether this asker is to hear of the turn while it runs: clients that wait for the answer."""
    return frame.live and connection.cls == CLIENTS and frame.reply_to is not None


def _reply_to(actor: Actor, frame: Frame) -> ReplyTo | None:
    """Where the answer goes, as the agent that is asked sees it: an agent's name is the broker's word."""
    if frame.reply_to is None or actor.instance is None:
        return frame.reply_to
    return ReplyTo(actor.instance.agent, frame.reply_to.correlation_id)


def _is_asynchronous(actor: Actor, frame: Frame) -> bool:
    """Whether an agent asks without waiting; a client's answers come as they always do."""
    return frame.asynchronous and frame.reply_to is not None and actor.instance is not None


def _id_in_use() -> GoondanError:
    message = "the event id is in use for another sender, another instance or another content"
    return GoondanError(error_payload("E_FRAME_INVALID", message))


def _longer(turn: Event | None, instance: Instance) -> list[str]:
    """The chain of a request that `instance` makes in `turn`."""
    return [*((turn.content.chain if turn is not None else None) or []), instance.address]


def _auth(actor: Actor, connection: Connection, frame: Frame) -> Raw | None:
    """On whose behalf: an operator may say it, an agent passes on what its own event said."""
    if actor.instance is not None:
        return actor.turn.content.auth if actor.turn is not None else None
    return frame.auth if connection.claims.operator else None
