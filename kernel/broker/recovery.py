"""Rebuilds the broker's state from the rows of its journal. Pure.

Each row is applied separately. A row that cannot be applied is reported, and the other rows are still applied. The
caller decides about the bad row (journal/store.py, `suspect`).

After this, every accepted event is queued with its content, in the order of acceptance; no sender is needed. A process
that held an event when the broker ended names it in `hello`. Until then the event is at the front of its queue.

Source: docs/design/delivery.md section 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from sys import intern
from typing import Any, Final, NamedTuple

from goondan.kernel.broker.bus import Bus
from goondan.kernel.broker.contents import content_of
from goondan.kernel.broker.entities import Event
from goondan.kernel.broker.journal import records
from goondan.kernel.broker.journal.interface import Row
from goondan.kernel.broker.journal.records import (
    Accepted,
    AnswerAwaitedNoMore,
    AnswerUnwanted,
    ApprovalAnswered,
    ApprovalAsked,
    ApprovalRemembered,
    ApprovalStarted,
    Attempt,
    BudgetHold,
    BudgetTree,
    CancelWish,
    ConfigPatched,
    DeadlineMoved,
    EpochsReserved,
    Finished,
    FreshStart,
    InstanceDeleted,
    InstanceSpawned,
    RestartWished,
)
from goondan.kernel.broker.restart_wishes import Wish
from goondan.kernel.broker.spawns import SpawnRecord
from goondan.kernel.broker.workdirs import Workdir
from goondan.schemas.codec import DECODE_ERRORS
from goondan.schemas.frames import Source


class BadRow(Exception):
    """A row that cannot be applied."""

    def __init__(self, row: Row, reason: str) -> None:
        super().__init__(f"record {row.seq} of {row.subject!r}: {reason}")
        self.row = row
        self.reason = reason


def reserved_epochs(written: Iterable[bytes]) -> int:
    """The highest reserved epoch, from the records of the subject EPOCHS; 0 when there is none.

    A record that cannot be read is skipped: the clock is nearly always above its epoch (epochs.py).
    """
    top = 0
    for data in written:
        with suppress(*DECODE_ERRORS):
            record = records.decode(data)
            if isinstance(record, EpochsReserved):
                top = max(top, record.top)
    return top


class Restored(NamedTuple):
    """What the journal has besides events."""

    #: Spawned instances, oldest first.
    spawned: list[SpawnRecord]
    #: Instances whose deletion was decided and is not finished.
    deleted: list[InstanceDeleted]
    #: Event id -> the agents whose budgets an accepted event is charged to.
    budgets: dict[str, tuple[str, ...]]
    #: Decisions on patches of configuration.
    patches: list[ConfigPatched]
    #: Items that wait for a person: subjects and records, in order.
    approvals: list[tuple[str, records.Record]]
    #: Decisions of people about earlier items.
    remembered: list[ApprovalRemembered]


#: The result for an empty journal.
NOTHING: Final = Restored([], [], {}, [], [], [])


def restore(bus: Bus, rows: Iterable[Row], on_bad: Callable[[BadRow], None]) -> Restored:
    """Put events into the mailbox and return the rest. `on_bad` is called for each bad row."""
    restored = Restored([], [], {}, [], [], [])
    for row in rows:
        try:
            _apply(bus, row, restored)
        except BadRow as bad:
            on_bad(bad)
        except Exception as error:  # whatever it was: one row must not keep a kernel from starting for ever
            on_bad(BadRow(row, f"{type(error).__name__}: {error}"))
    _release_orphans(bus)
    return restored


def _decode(row: Row) -> records.Record:
    try:
        return records.decode(row.data)
    except DECODE_ERRORS as error:
        raise BadRow(row, str(error)) from None


def _apply(bus: Bus, row: Row, restored: Restored) -> None:
    record = _decode(row)
    kind = type(record)
    if (beside := _BESIDE_EVENTS.get(kind)) is not None:
        beside(bus, row, record, restored)
        return
    event_id = records.event_of(row.subject)
    if event_id is None:
        raise BadRow(row, f"{kind.__name__} is about no event")
    if isinstance(record, Accepted):
        _accept(bus, row, event_id, record)
        if record.budgets:
            restored.budgets[event_id] = tuple(record.budgets)
        return
    event = bus.mailbox.events.get(event_id)
    if event is None:
        raise BadRow(row, "its event is not there")
    if (later := _OF_AN_EVENT.get(kind)) is not None:
        later(bus, event, record)


# --- records that are about no event, one function for each kind ------------------------------------------------------


def _spawned(bus: Bus, row: Row, record: InstanceSpawned, restored: Restored) -> None:
    owner = record.owner_agent, record.owner_key
    spawn = SpawnRecord(record.agent, record.key, *owner, record.created, record.cwd, beneath=record.beneath)
    restored.spawned.append(spawn)


def _deleted(bus: Bus, row: Row, record: InstanceDeleted, restored: Restored) -> None:
    restored.deleted.append(record)


def _patched(bus: Bus, row: Row, record: ConfigPatched, restored: Restored) -> None:
    restored.patches.append(record)


def _reserved(bus: Bus, row: Row, record: EpochsReserved, restored: Restored) -> None:
    """Nothing to do: this was read before everything else (`reserved_epochs`)."""


def _restart_wished(bus: Bus, row: Row, record: RestartWished, restored: Restored) -> None:
    bus.wishes[row.subject] = Wish(row.subject, record.reason, record.event_id, record.at_ms, "wished")


def _approval(
    bus: Bus, row: Row, record: ApprovalAsked | ApprovalAnswered | ApprovalStarted, restored: Restored
) -> None:
    restored.approvals.append((row.subject, record))


def _remembered(bus: Bus, row: Row, record: ApprovalRemembered, restored: Restored) -> None:
    restored.remembered.append(record)


def _fresh(bus: Bus, row: Row, record: FreshStart, restored: Restored) -> None:
    bus.generations[record.agent] = record.generation


def _budget_tree(bus: Bus, row: Row, record: BudgetTree, restored: Restored) -> None:
    bus.budgets.restore(record)


def _budget_hold(bus: Bus, row: Row, record: BudgetHold, restored: Restored) -> None:
    bus.budgets.restore_hold(record)


_BESIDE_EVENTS: Final[dict[type[Any], Callable[[Bus, Row, Any, Restored], None]]] = {
    InstanceSpawned: _spawned,
    InstanceDeleted: _deleted,
    ConfigPatched: _patched,
    EpochsReserved: _reserved,
    RestartWished: _restart_wished,
    ApprovalAsked: _approval,
    ApprovalAnswered: _approval,
    ApprovalStarted: _approval,
    ApprovalRemembered: _remembered,
    FreshStart: _fresh,
    BudgetTree: _budget_tree,
    BudgetHold: _budget_hold,
}


# --- records about an accepted event, one function for each kind ------------------------------------------------------


def _attempted(bus: Bus, event: Event, record: Attempt) -> None:
    event.work.attempts = record.count
    event.work.position = record.position


def _cancel_wished(bus: Bus, event: Event, record: CancelWish) -> None:
    event.cancelled = True


def _deadline_moved(bus: Bus, event: Event, record: DeadlineMoved) -> None:
    event.deadline = bus.ledger.on_clock(record.deadline)
    bus.mailbox.deadlines.add(event.deadline, event)


def _answer_unwanted(bus: Bus, event: Event, record: AnswerUnwanted) -> None:
    bus.mailbox.unwanted(event)


def _awaited_no_more(bus: Bus, event: Event, record: AnswerAwaitedNoMore) -> None:
    bus.mailbox.awaited_no_more(event)


def _finished(bus: Bus, event: Event, record: Finished) -> None:
    bus.mailbox.contents.recall(event)
    event.end = record.state
    event.work.cause, event.work.ended_ms = record.cause, record.at_ms
    bus.mailbox.finish(event, record.state, record.answer, record.blob)


_OF_AN_EVENT: Final[dict[type[Any], Callable[[Bus, Event, Any], None]]] = {
    Attempt: _attempted,
    CancelWish: _cancel_wished,
    DeadlineMoved: _deadline_moved,
    AnswerUnwanted: _answer_unwanted,
    AnswerAwaitedNoMore: _awaited_no_more,
    Finished: _finished,
}


def _accept(bus: Bus, row: Row, event_id: str, record: Accepted) -> None:
    if event_id in bus.mailbox.events:
        raise BadRow(row, "the event was accepted before")
    instance = bus.instance(record.agent, record.key, bus.now)
    instance.workdir = Workdir(record.instance_workdir, record.instance_beneath)
    asking = bus.mailbox.events.get(record.asking or "")
    event = Event(
        event_id,
        instance,
        # Many events share these values, but each record has its own copy.
        sender=intern(record.sender),
        content=content_of(record, event_id),
        source=None if record.source is None else _shared(record.source),
        deadline=None if record.deadline is None else record.deadline.on_clock(bus.ledger.boot_id, bus.booted_at),
        call_id=record.call_id,
        blob=record.blob,
        files=record.files,
        root=None if record.root == event_id else record.root,
        session=None if record.session is None else intern(record.session),
        asking=asking,
        since=record.at_ms / 1000 - bus.booted_at,
        asynchronous=record.asynchronous,
        in_reply_to=record.in_reply_to,
    )
    if asking is not None:
        asking.work.requests[event] = None
    bus.mailbox.stage(event)
    bus.mailbox.accept(event)
    bus.mailbox.contents.rests(event)


@lru_cache(maxsize=1024)
def _shared(source: Source) -> Source:
    """One object for all sources that are equal."""
    return source


def _release_orphans(bus: Bus) -> None:
    """Drop answers whose asking event is gone, with their payloads: nobody needs them."""
    for event in list(bus.mailbox.events.values()):
        if event.finished and event.asking is None and event.id not in bus.mailbox.dead:
            del bus.mailbox.events[event.id]
