"""Turns decisions of the broker into writes of the journal, and an event's record back into its content. Pure.

Rules.
- An accepted event is one record. Its end removes the record, unless the answer must still be delivered.
- An answer to a waiting turn stays as a record until the event of that turn has ended: another process may run the turn
  again, and then it asks again.
- An answer to a client is kept beside its ended id for a while (journal/tables.py), because clients do not report
  that they have read it.
- A dead letter stays as a record until a person drops it or sends it again.
- Leases and open calls are not written: their holders name them in `hello`.

Source: docs/design/delivery.md section 1.
"""

from __future__ import annotations

from typing import Final

from msgspec import Raw

from goondan.kernel.broker.state import records
from goondan.kernel.broker.state.entities import Content, End, Event, Instance, Spawned
from goondan.schemas.wire.frames import NO_PAYLOAD, Blob

#: How many epochs are reserved with one write, so that a new epoch seldom needs a write.
EPOCH_BLOCK: Final = 1_000_000


class Ledger:
    """Makes the writes of decisions. Times are seconds on the broker's clock (CLOCK_BOOTTIME)."""

    def __init__(self, boot_id: str, booted_at: float) -> None:
        """`boot_id` names the machine's present boot, which began at `booted_at` (seconds since 1970)."""
        self.boot_id = boot_id
        self.booted_at = booted_at

    def accepted(self, event: Event, now: float) -> records.Item:
        """A new event."""
        deadline, content = event.deadline, event.content
        record = records.Accepted(
            agent=event.instance.agent,
            key=event.instance.key,
            instance_workdir=event.instance.workdir.path,
            instance_beneath=event.instance.workdir.beneath,
            sender=event.sender,
            from_=content.from_,
            payload=content.payload,
            blob=event.blob,
            files=event.files,
            source=event.source,
            reply_to=content.reply_to,
            chain=content.chain,
            auth=content.auth,
            workdir=content.workdir,
            trace_id=content.trace_id,
            deadline=None if deadline is None else self.moment(deadline),
            call_id=event.call_id,
            asking=None if event.asking is None else event.asking.id,
            digest=content.digest,
            at_ms=self._wall_ms(now),
            root=event.root,
            session=event.session,
            asynchronous=event.asynchronous,
            in_reply_to=event.in_reply_to,
            parent_span_id=content.parent_span_id,
            parts=event.parts,
        )
        return records.Item((records.Put(records.event_subject(event.id), records.encode(record)),), refusable=True)

    def attempt(self, event: Event) -> records.Item:
        """A delivery has failed."""
        return _put(event, records.Attempt(event.work.attempts, event.work.position))

    def cancel_requested(self, event: Event) -> records.Item:
        """The event was cancelled."""
        return _put(event, records.CancelRequested())

    def finished(
        self,
        event: Event,
        state: End,
        answer: Raw,
        blob: Blob | None,
        cause: str,
        now: float,
        follow: Event | None = None,
    ) -> records.Item:
        """The end of an event. It also ends the answers that its turn had asked for. Its own answer may become an
        event.
        """
        work, ended_ms = event.work, self._wall_ms(now)
        work.cause, work.ended_ms = cause, ended_ms
        record = records.Finished(state, answer, blob, ended_ms, cause)
        # An answer that comes into the journal with the same batch ends as well.
        writes: list[records.Write] = []
        if work.answered or work.requests:
            asked_for = [*work.answered, *(asked for asked in work.requests if asked.ending)]
            writes = [self._over(asked) for asked in asked_for if asked.end != "dead"]
        subject = records.event_subject(event.id)
        waited_for = event.asking is not None and not event.asking.ending
        if state == "dead" or waited_for:
            writes.append(records.Put(subject, records.encode(record)))
        else:
            kept = records.encode(record) if event.keeps_answer else None
            large = None if kept is None or blob is None else (blob.file, blob.size)
            writes.append(records.Retire(subject, event.content.digest, state, kept, large))
        if follow is not None:
            writes.extend(self.accepted(follow, now).writes)
        return records.Item(tuple(writes))

    def dealt_with(self, event: Event, how: str) -> records.Item:
        """A person has dealt with a dead letter."""
        return records.Item((records.Retire(records.event_subject(event.id), event.content.digest, how),))

    def answer_arrived(self, event_id: str) -> records.Item:
        """A client has read its answer."""
        return records.Item((records.DropAnswer(records.event_subject(event_id)),))

    def spawned(self, instance: Instance, spawned: Spawned | None) -> records.Item:
        """An instance was spawned, or is forgotten (None)."""
        subject = records.instance_subject(instance.agent, instance.key)
        if spawned is None:
            return records.Item((records.Retire(subject),))
        cwd, beneath = (None, None) if spawned.cwd is None else (spawned.cwd.path, spawned.cwd.beneath)
        owner, created = (spawned.owner_agent, spawned.owner_key), self.booted_at + spawned.created
        written = records.InstanceSpawned(instance.agent, instance.key, *owner, created, cwd, beneath)
        return _replace(subject, written)

    def tombstone(self, agent: str, key: str, keep_workdir: bool) -> records.Item:
        """An instance is to be deleted."""
        return _replace(records.deleted_subject(agent, key), records.InstanceDeleted(agent, key, keep_workdir))

    def buried(self, agent: str, key: str, *, gone: bool) -> records.Item:
        """An instance was deleted, or could not be. A deletion is remembered as long as the id of an event."""
        subject = records.deleted_subject(agent, key)
        return records.Item((records.Retire(subject, b"", "deleted") if gone else records.Retire(subject),))

    def answer_unwanted(self, event: Event) -> records.Item:
        """The asker of the event, which did not wait for the answer, is gone."""
        return _put(event, records.AnswerUnwanted())

    def awaited_no_more(self, event: Event) -> records.Item:
        """The turn that sent the request does not wait for its answer any more."""
        return _put(event, records.AnswerAwaitedNoMore())

    def deadline_moved(self, event: Event, deadline: float) -> records.Item:
        """The event has another deadline."""
        return _put(event, records.DeadlineMoved(self.moment(deadline)))

    def moment(self, at: float) -> records.Deadline:
        """A moment of the broker's clock, in the form that is written."""
        return records.Deadline(self.boot_id, at, self.booted_at + at)

    def on_clock(self, moment: records.Deadline) -> float:
        """A written moment, on the broker's clock."""
        return moment.boot_s if moment.boot_id == self.boot_id else moment.wall_s - self.booted_at

    def boot_ms(self, moment: records.Deadline) -> int:
        """The same in milliseconds. 0 for a moment of an earlier boot."""
        return int(moment.boot_s * 1000) if moment.boot_id == self.boot_id else 0

    def epochs(self, top: int) -> records.Item:
        """Epochs up to `top` may be used from now on."""
        return _replace(records.EPOCHS, records.EpochsReserved(top))

    def _over(self, event: Event) -> records.Retire:
        return records.Retire(records.event_subject(event.id), event.content.digest, event.end or event.state)

    def _wall_ms(self, now: float) -> int:
        return int((self.booted_at + now) * 1000)


def _put(event: Event, record: records.Record) -> records.Item:
    return records.Item((records.Put(records.event_subject(event.id), records.encode(record)),))


def _replace(subject: str, record: records.Record) -> records.Item:
    """Make this the only record of its subject."""
    return records.Item((records.Retire(subject), records.Put(subject, records.encode(record))))


def content_of(record: records.Accepted) -> Content:
    """The content of the event, from its record in the journal."""
    return Content(
        from_=record.from_,
        payload=record.payload.copy(),  # else it would keep the whole record in memory
        reply_to=record.reply_to,
        chain=record.chain,
        auth=None if record.auth is None or record.auth == NO_PAYLOAD else record.auth,  # nil means None
        workdir=record.workdir,
        trace_id=record.trace_id,
        parent_span_id=record.parent_span_id,
        digest=record.digest,
    )
