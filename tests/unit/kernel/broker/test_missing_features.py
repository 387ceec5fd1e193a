"""Work of a feature that this kernel does not have: it is not delivered, and nothing of it is lost."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Struct

from goondan.kernel.broker.state.records import Accepted, Item, Put, decode, encode, event_subject, feature_of
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame, ReplyTo
from tests.unit.kernel.broker.world import World, run, said


class Watched(Struct, array_like=True, tag="guards/watched"):
    """A record of a feature that nobody has."""

    #: The event that it concerns.
    event_id: str
    #: Something else.
    how: str = "closely"


def waiting(*names: str) -> World:
    """Messages that nobody has worked on yet."""
    world = World()
    for number, name in enumerate(names):
        world.clients[0].ask(name, key=f"k{number}")
        while world.state(name) != "accepted":
            assert world.pump_up(world.clients[0]) or world.pump_down(world.clients[0])
    return world


@pytest.mark.parametrize("within", ["a record of its own", "the record of the event"])
def test_a_message_that_needs_a_missing_feature_is_a_dead_letter_that_names_it(within: str) -> None:
    world = waiting("e1", "e2")
    if within == "a record of its own":
        world.journal.append([Item((Put("guard:7", encode(Watched("e1"))),))])
    else:
        rows = world.journal._records[event_subject("e1")]
        accepted = decode(rows[0].data)
        assert isinstance(accepted, Accepted)
        kept = msgspec.structs.replace(accepted, parts={"guards": to_raw(["a"])})
        rows[0] = rows[0]._replace(data=encode(kept))
    world.kill_broker()
    run(world)
    world.settle()
    (letter,) = world.router.bus.mailbox.dead.values()
    assert letter.id == "e1"
    assert letter.work.cause.startswith("E_FEATURE_MISSING: ")
    assert "'guards'" in letter.work.cause
    assert len(world.clients[0].answers["e1"]) == 1, "its sender is told"
    assert world.state("e2") == "done", "no other message is held up"
    assert all("e1" not in store.completed for store in world.stores.values())


def test_the_records_of_a_missing_feature_stay_and_are_told_of_at_every_start() -> None:
    world = waiting("e1")
    world.journal.append([Item((Put("guard:7", encode(Watched(""))), Put("guard:8", encode(Watched("gone")))))])
    for _ in range(2):
        world.kill_broker()
        assert world.router.bus.notices == ["E_FEATURE_MISSING: 2 records of guards are kept, and nobody reads them"]
    assert len(world.journal.find_records("guard:7")) == 1
    world.settle()
    assert world.state("e1") == "done"


def test_all_work_that_began_with_the_message_is_held_as_well() -> None:
    world = World()
    world.clients[0].ask("e1")
    run(world)
    connection = world.router.bus.presence.principals["agent/coder/k"]
    event = AgentEvent(id="r1", type="agent.request", created_at="2026-01-01T00:00:00Z", input=0)
    frame = Frame("event", id="f", to="reviewer", instance_key="k", event_id="r1", payload=to_raw(event))
    frame.reply_to = ReplyTo("coder", "corr")
    said(world, connection, frame)
    assert world.router.bus.mailbox.events["r1"].root == "e1"
    world.journal.append([Item((Put("guard:7", encode(Watched("e1"))),))])
    world.kill_broker()
    world.settle()
    assert world.router.bus.mailbox.dead.keys() == {"e1", "r1"}


@pytest.mark.feature("budgets")
def test_a_record_of_a_known_feature_that_cannot_be_read_is_damage_and_not_missing() -> None:
    world = waiting("e1")
    world.journal.append([Item((Put("budget:x", msgspec.msgpack.encode(["budgets/tree", "e1"])),))])
    with pytest.raises(Exception, match=r"record .* of 'budget:x'"):
        world.kill_broker()


def test_the_owner_of_a_record_is_in_its_bytes() -> None:
    assert feature_of(encode(Watched("e1"))) == ("guards", "e1")
    assert feature_of(msgspec.msgpack.encode(["cancel"])) is None
    assert feature_of(msgspec.msgpack.encode(["guards/all"])) == ("guards", "")
    assert feature_of(msgspec.msgpack.encode([])) is None
