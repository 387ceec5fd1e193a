"""What a person does with messages that were given up, and what becomes of it after a crash."""

from __future__ import annotations

import pytest

from goondan.features.dead_letters.broker import new_id
from goondan.kernel.broker.state.mailbox import MAX_ATTEMPTS
from goondan.schemas.wire.codec import encode, to_raw
from goondan.schemas.wire.frames import Frame
from tests.unit.kernel.broker.test_durability import admin, crash, subjects, without_sender
from tests.unit.kernel.broker.world import World, client, run


def dead(world: World) -> World:
    """`e1` was given up."""
    world.clients[0].ask("e1")
    run(world)
    for _ in range(MAX_ATTEMPTS):
        crash(world)
    return world


def test_a_dead_letter_is_listed_and_shown_by_every_later_broker() -> None:
    world = dead(World())
    for _ in range(2):
        (line,) = admin(world, "dead.list")["events"]
        assert (line["eventId"], line["agent"], line["instanceKey"], line["attempts"]) == ("e1", "coder", "k", 5)
        assert "E_AGENT_FAILED" in line["cause"]
        assert admin(world, "dead.show", eventId="e1")["event"]["id"] == "e1"
        world.kill_broker()


def test_a_requeued_dead_letter_is_a_new_event_that_names_the_old_one() -> None:
    world = dead(World())
    without_sender(world)
    answer = admin(world, "dead.requeue", eventId="e1")
    assert answer == {"eventId": "e1", "state": "requeued", "newEventId": "e1~requeued"}
    assert admin(world, "dead.requeue", eventId="e1") == answer, "asked twice, done once"
    world.kill_broker()
    world.settle()
    assert world.state("e1~requeued") == "done"
    assert world.stores["coder", "k"].completed == ["e1~requeued"]
    assert admin(world, "dead.list") == {"events": [], "more": 0}
    assert admin(world, "dead.requeue", eventId="e1") == answer


def test_a_dropped_dead_letter_is_gone_for_good() -> None:
    world = dead(World())
    assert admin(world, "dead.drop", eventId="e1") == {"eventId": "e1", "state": "dropped"}
    world.kill_broker()
    assert admin(world, "dead.list") == {"events": [], "more": 0}
    assert admin(world, "dead.drop", eventId="e1")["state"] == "dropped"
    assert admin(world, "dead.drop", eventId="e2") == {"error": "E_EVENT_NOT_FOUND"}
    assert admin(world, "dead.show", eventId="e1") == {"error": "E_EVENT_NOT_FOUND"}
    assert not [subject for subject in subjects(world) if subject.startswith("event:")]


def test_the_id_of_a_requeued_event_has_room_for_the_longest_ids() -> None:
    long = "x" * 256
    assert len(new_id(long)) <= 256
    assert new_id(long) != new_id("x" * 255 + "y")


def test_no_peer_can_take_the_id_that_a_requeued_event_will_have() -> None:
    world = dead(World())
    world.clients[0].ask("e1~requeued", key="other")
    run(world)
    assert world.clients[0].errors == {"e1~requeued": "E_FRAME_INVALID"}
    assert admin(world, "dead.requeue", eventId="e1")["newEventId"] == "e1~requeued"
    world.kill_broker()  # two events of one id would end the next start
    world.settle()
    assert world.stores["coder", "k"].completed == ["e1~requeued"]


def test_a_dead_letter_stays_one_when_the_disk_is_full() -> None:
    world = dead(World())
    world.full = True
    assert admin(world, "dead.requeue", eventId="e1") == {"error": "E_DISK_FULL"}
    assert [line["eventId"] for line in admin(world, "dead.list")["events"]] == ["e1"]
    world.full = False
    assert admin(world, "dead.requeue", eventId="e1")["state"] == "requeued"
    world.settle()
    assert world.stores["coder", "k"].completed == ["e1~requeued"]


@pytest.mark.parametrize("op", ["dead.requeue", "dead.drop"])
def test_what_becomes_of_a_dead_letter_is_said_when_the_journal_has_it(op: str) -> None:
    world = dead(World())
    connection = client(world)
    question = encode(Frame("admin", id="q", payload=to_raw({"op": op, "eventId": "e1"})))
    for _ in range(2):
        world.router.receive(connection, question, world.now)
    assert [ident for _, ident, _ in world.router.bus.out if ident == connection.ident] == []
    world.commit()
    assert [ident for _, ident, _ in world.router.bus.out if ident == connection.ident] == [connection.ident] * 2
    assert admin(world, "dead.list") == {"events": [], "more": 0}
