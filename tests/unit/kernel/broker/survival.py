"""What a new broker must know of what the one before it knew: everything that was in the journal, and nothing else.

Compared are two brokers: the one that died, and the one that has read its journal. What was on its way into the journal
when the first one died may be there or not, so it is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from goondan.kernel.broker.state import records
from goondan.kernel.broker.state.bus import Bus, Staged
from goondan.kernel.broker.state.entities import Event
from goondan.kernel.broker.state.records import Archive


def on_the_way(staged: Iterable[Staged]) -> set[str]:
    """The subjects that these decisions are about."""
    return {write.subject for decision in staged for write in decision.item.writes}


def assert_survived(old: Bus, new: Bus, archive: Archive, on_the_way: set[str]) -> None:
    """Raise AssertionError when the new broker knows less than the old one, more, or something else."""
    before, after = _events(old, on_the_way), _events(new, on_the_way)
    # An end on its way into the journal ends also what its turn has asked for, which only one of the two knows as such.
    for event_id in (before.keys() | after.keys()) - _left_out(old, on_the_way) - _left_out(new, on_the_way):
        one, other = before.get(event_id, {}), after.get(event_id, {})
        changed = {name: (one.get(name), other.get(name)) for name in one.keys() | other.keys()}
        changed = {name: both for name, both in changed.items() if both[0] != both[1]}
        assert not changed, f"{event_id}: {changed}"
    assert _queues(old, set(before)) == _queues(new, set(before)), "events changed their order"
    assert _spawned(old, on_the_way) == _spawned(new, on_the_way), "spawned instances were forgotten or invented"
    assert new.mailbox.epochs.last >= old.mailbox.epochs.last, "epochs go back"
    unfinished = [event for event in new.mailbox.events.values() if not event.finished]
    assert new.mailbox.open.held == len(unfinished), "the number of open messages is wrong"
    assert new.mailbox.held.held == sum(event.size for event in unfinished), "the bytes of open messages are wrong"
    referenced = new.mailbox.blobs.referenced()
    for event in new.mailbox.events.values():
        _assert_as_written(event, archive)
        assert event.blob is None or event.blob.file in referenced, f"nobody holds the file of {event.id}"


def _assert_as_written(event: Event, archive: Archive) -> None:
    """What only the journal tells: how far a turn had come when its holder was lost."""
    count = position = 0
    for data in archive.find_records(records.event_subject(event.id)):
        record = records.decode(data)
        if isinstance(record, records.Attempt):
            count, position = record.count, record.position
    assert (event.work.attempts, event.work.position) == (count, position), f"attempts of {event.id}"


def _events(bus: Bus, left_out: set[str]) -> dict[str, dict[str, Any]]:
    """What is known of events, by id, in a form that can be compared."""
    return {
        event.id: _picture(bus, event, left_out)
        for event in [*bus.mailbox.events.values(), *bus.mailbox.dead.values()]
        if event.state != "staged" and not _is_left_out(event, left_out)
    }


def _left_out(bus: Bus, left_out: set[str]) -> set[str]:
    return {event.id for event in bus.mailbox.events.values() if _is_left_out(event, left_out)}


def _is_left_out(event: Event, left_out: set[str]) -> bool:
    # The end of a turn ends also what it has asked for.
    return any(
        one is not None and records.event_subject(one.id) in left_out
        for one in (event, event.asking, event.asking.asking if event.asking is not None else None)
    )


def _picture(bus: Bus, event: Event, left_out: set[str]) -> dict[str, Any]:
    if event.finished:
        return {
            "state": event.state,
            "end": event.end,
            "answer": _answer(bus, event),
            "blob": event.work.answer_blob,
            "asking": None if event.asking is None else event.asking.id,
            # Of others nobody asks.
            "dead": (event.work.cause, event.work.ended_ms, event.work.dead_bytes) if event.state == "dead" else None,
        }
    bus.mailbox.contents.recall(event)
    content = msgspec.structs.asdict(event.content)
    if content.pop("changed"):
        content.pop("reply_to")  # a repeat has named it, and will again
    return {
        **content,
        "payload": bytes(event.content.payload),
        "auth": None if event.content.auth is None else bytes(event.content.auth),
        "unfinished": event.id in bus.mailbox.events,
        "instance": (event.instance.agent, event.instance.key, event.instance.workdir),
        "sender": event.sender,
        "source": event.source,
        "root": event.root,
        "session": event.session,
        "deadline": event.deadline,
        "call": event.call_id,
        "blob": event.blob,
        "asking": None if event.asking is None else event.asking.id,
        "asks for": sorted(
            asked.id for asked in event.work.requests if asked.state != "staged" and not _is_left_out(asked, left_out)
        ),
        "asynchronous": event.asynchronous,
        "answers": event.in_reply_to,
        "attempts": event.work.attempts,
        "cancelled": event.cancelled,
        "since": int(event.since * 1000),
        "size": event.size,
    }


def _answer(bus: Bus, event: Event) -> bytes | None:
    """The bytes of an answer, which may be in the journal only."""
    if event.work.answer is not None:
        return bytes(event.work.answer)
    for data in bus.archive.find_records(records.event_subject(event.id)):
        record = records.decode(data)
        if isinstance(record, records.Finished):
            return bytes(record.answer)
    return None


def _queues(bus: Bus, among: set[str]) -> dict[tuple[str, str], list[str]]:
    """By instance: its unfinished events in the order in which they are worked on."""
    found = {}
    for name, instance in bus.mailbox.instances.items():
        events = ([] if instance.leased is None else [instance.leased]) + [*instance.queue]
        if ids := [event.id for event in events if event.id in among]:
            found[name] = ids
    return found


def _spawned(bus: Bus, left_out: set[str]) -> dict[tuple[str, str], tuple[object, ...]]:
    """The instances that were asked for: who did first, and their working directory."""
    return {
        (agent, key): (instance.spawned.owner_agent, instance.spawned.owner_key, instance.spawned.cwd)
        for (agent, key), instance in bus.mailbox.instances.items()
        if instance.spawned is not None and records.instance_subject(agent, key) not in left_out
    }
