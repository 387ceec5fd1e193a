"""Ids that outlive their events: late repeats are known as such, in memory that does not grow."""

from __future__ import annotations

import pytest

from kernel.broker import mailbox
from kernel.broker.presence import CLIENTS
from kernel.broker.seen import CAPACITY, Seen
from schemas.codec import decode, encode, from_raw
from schemas.frames import ErrorPayload, Frame, ReplyTo
from tests.unit.kernel.broker.test_completions import from_host, working


def test_the_last_ids_are_known_and_none_that_was_not_added() -> None:
    seen = Seen()
    for number in range(3 * CAPACITY):
        seen.add("client", "coder/k", f"e{number}")
    recent = range(2 * CAPACITY, 3 * CAPACITY)
    assert all(("client", "coder/k", f"e{number}") in seen for number in recent)
    assert not any(("client", "coder/k", f"e{number}") in seen for number in range(CAPACITY))
    assert not any(("client", "other/k", f"e{number}") in seen for number in recent)


def test_adding_twice_takes_one_place() -> None:
    seen = Seen()
    seen.add("a", "b", "first")
    for _ in range(2 * CAPACITY):
        seen.add("a", "b", "same")
    assert ("a", "b", "first") in seen


def test_a_repeat_after_its_answer_is_gone_is_not_a_second_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MAX_FINISHED", 0)
    world, _ = working()
    from_host(world, "event")
    box = world.router.bus.mailbox
    event = box.events["e~completed"]
    box.finish(event, "done", None)
    assert event.id not in box.events
    (ack,) = from_host(world, "event")
    assert (ack.type, ack.stage, ack.event_id) == ("ack", "accepted", event.id)
    assert event.id not in box.events


def test_who_still_wants_the_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MAX_FINISHED", 0)
    world, _ = working()
    box = world.router.bus.mailbox
    event = box.events["c0e0"]
    box.finish(event, "failed", None)
    connection = next(iter(world.router.bus.presence.connections[CLIENTS].values()))
    frame = Frame("event", id="r", to="coder", instance_key="k", event_id=event.id, reply_to=ReplyTo("client", "r"))
    world.router.receive(connection, encode(frame), world.now)
    (answer,) = [decode(data) for _, _, data in world.router.bus.out if decode(data).in_reply_to == "r"]
    assert (answer.type, from_raw(answer.payload, ErrorPayload).code) == ("error", "E_ANSWER_GONE")
