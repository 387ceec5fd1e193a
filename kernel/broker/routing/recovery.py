"""Rebuilds the broker's state from the rows of its journal. Pure.

Records about events are applied here, the others by the parts that they belong to (`Record`, parts.py). A record of a
feature that is not here stays where it is; the events that it concerns become dead letters (router.py).

Each row is applied separately. A row that cannot be applied is reported, and the other rows are still applied. The
caller decides about the bad row (journal/store.py, `suspect`).

After this, every accepted event is queued with its content, in the order of acceptance; no sender is needed. A process
that held an event when the broker ended names it in `hello`. Until then the event is at the front of its queue.

Source: docs/design/delivery.md section 8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from sys import intern
from typing import Any, Union

import msgspec

from goondan.kernel.broker.state import entities, ledger, parts, records, workdirs
from goondan.kernel.broker.state.bus import Bus
from goondan.schemas.wire import codec, frames


class BadRow(Exception):
    """A row that cannot be applied."""

    def __init__(self, row: records.Row, reason: str) -> None:
        super().__init__(f"record {row.seq} of {row.subject!r}: {reason}")
        self.row = row
        self.reason = reason


def reserved_epochs(written: Iterable[bytes]) -> int:
    """The highest reserved epoch, from the records of the subject EPOCHS; 0 when there is none.

    A record that cannot be read is skipped: the clock is nearly always above its epoch (Epochs).
    """
    top = 0
    for data in written:
        with suppress(*codec.DECODE_ERRORS):
            record = records.decode(data)
            if isinstance(record, records.EpochsReserved):
                top = max(top, record.top)
    return top


class Missing:
    """What the journal has of features that are not here. Their records stay, for a kernel that has them."""

    def __init__(self) -> None:
        #: Feature -> how many records it has.
        self.records: Counter[str] = Counter()
        #: Event -> a feature that has a record which concerns the event, or all work that began with it.
        self.of_events: dict[str, str] = {}

    def of(self, event: entities.Event) -> str | None:
        """A feature that is not here and that this event needs."""
        return self.of_events.get(event.id) or self.of_events.get(event.root)


def restore(
    bus: Bus, rows: Iterable[records.Row], table: Sequence[parts.Record], on_bad: Callable[[BadRow], None]
) -> Missing:
    """Put events into the mailbox, and hand other records to the parts that they belong to (`table`). `on_bad`
    is called for each bad row.
    """
    recovery = _Recovery(bus, table)
    for row in rows:
        try:
            recovery.apply(row)
        except BadRow as bad:
            on_bad(bad)
        except Exception as error:  # whatever it was: one row must not keep a kernel from starting for ever
            on_bad(BadRow(row, f"{type(error).__name__}: {error}"))
    _release_orphans(bus)
    return recovery.missing


class _Recovery:
    """Applies rows. `missing` is what it has found of features that are not here."""

    def __init__(self, bus: Bus, table: Sequence[parts.Record]) -> None:
        self._bus = bus
        self._restores = {record.struct: record.restore for record in table}
        self._decode = msgspec.msgpack.Decoder(Union[(records.Record, *self._restores)]).decode
        tags = (str(struct.__struct_config__.tag) for struct in self._restores)
        self._features = {tag.partition("/")[0] for tag in tags if "/" in tag}
        self.missing = Missing()

    def apply(self, row: records.Row) -> None:
        """Apply one row. Raises BadRow."""
        try:
            record = self._decode(row.data)
        except codec.DECODE_ERRORS as error:
            self._set_aside(row, str(error))
            return
        kind = type(record)
        if (restore_it := self._restores.get(kind)) is not None:
            restore_it(row.subject, record)
            return
        if kind is records.EpochsReserved:
            return  # this was read before everything else (`reserved_epochs`)
        event_id = records.event_of(row.subject)
        if event_id is None:
            raise BadRow(row, f"{kind.__name__} is about no event")
        if isinstance(record, records.Accepted):
            _accept(self._bus, row, event_id, record)
            for feature in (record.parts or {}).keys() - self._features:
                self.missing.of_events[event_id] = feature
            return
        event = self._bus.mailbox.events.get(event_id)
        if event is None:
            raise BadRow(row, "its event is not there")
        _apply_later(self._bus, event, record)

    def _set_aside(self, row: records.Row, reason: str) -> None:
        """A row that nobody can read. It may be of a feature that is not here."""
        try:
            owner = records.feature_of(row.data)
        except codec.DECODE_ERRORS:
            owner = None
        if owner is None or owner[0] in self._features:
            raise BadRow(row, reason)
        feature, concerned = owner
        self.missing.records[feature] += 1
        if concerned:
            self.missing.of_events[concerned] = feature


def _apply_later(bus: Bus, event: entities.Event, record: Any) -> None:
    """A record about an accepted event."""
    match record:
        case records.Attempt(count, position):
            event.work.attempts, event.work.position = count, position
        case records.CancelRequested():
            event.cancelled = True
        case records.DeadlineMoved(deadline):
            event.deadline = bus.ledger.on_clock(deadline)
            bus.mailbox.deadlines.add(event.deadline, event)
        case records.AnswerUnwanted():
            bus.mailbox.unwanted(event)
        case records.AnswerAwaitedNoMore():
            bus.mailbox.awaited_no_more(event)
        case records.Finished():
            bus.mailbox.contents.recall(event)
            event.end = record.state
            event.work.cause, event.work.ended_ms = record.cause, record.at_ms
            bus.mailbox.finish(event, record.state, record.answer, record.blob)


def _accept(bus: Bus, row: records.Row, event_id: str, record: records.Accepted) -> None:
    if event_id in bus.mailbox.events:
        raise BadRow(row, "the event was accepted before")
    instance = bus.instance(record.agent, record.key, bus.now)
    instance.workdir = workdirs.Workdir(record.instance_workdir, record.instance_beneath)
    asking = bus.mailbox.events.get(record.asking or "")
    event = entities.Event(
        event_id,
        instance,
        # Many events share these values, but each record has its own copy.
        sender=intern(record.sender),
        content_here=ledger.content_of(record),
        source=None if record.source is None else _shared(record.source),
        deadline=None if record.deadline is None else bus.ledger.on_clock(record.deadline),
        call_id=record.call_id,
        blob=record.blob,
        files=record.files,
        root=record.root or "",
        session=intern(record.session or ""),
        asking=asking,
        since=record.at_ms / 1000 - bus.booted_at,
        asynchronous=record.asynchronous,
        in_reply_to=record.in_reply_to,
        parts=record.parts,
    )
    bus.mailbox.stage(event)
    bus.mailbox.accept(event)
    bus.mailbox.contents.rests(event)


@lru_cache(maxsize=1024)
def _shared(source: frames.Source) -> frames.Source:
    """One object for all sources that are equal."""
    return source


def _release_orphans(bus: Bus) -> None:
    """Drop answers whose asking event is gone, with their payloads: nobody needs them."""
    for event in list(bus.mailbox.events.values()):
        if event.finished and event.asking is None and event.id not in bus.mailbox.dead:
            del bus.mailbox.events[event.id]
