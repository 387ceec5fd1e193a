"""Deleting instances: what is refused, what is cancelled, what is remembered, and a broker that dies in any write."""

from __future__ import annotations

from typing import Literal

import pytest

from goondan.kernel.broker.routing.deletions import CANCEL_S, JAILS_S
from goondan.kernel.broker.state.bus import RETURN_S
from goondan.kernel.broker.state.entities import TOOLS
from goondan.kernel.broker.state.records import InstanceDeleted, decode, deleted_subject
from goondan.schemas.wire.codec import decode as decode_frame
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, AgentsSpawn, ErrorPayload, Frame, ReplyTo
from tests.unit.kernel.broker.actors import Agent, Client
from tests.unit.kernel.broker.world import World, run


def used() -> tuple[World, Client]:
    """A swarm with one instance, `coder/k`, that has had an event and rests."""
    world = World()
    world.now += RETURN_S
    client = world.clients[0]
    client.ask("first", calls=0)
    world.settle()
    assert client.answers["first"]
    return world, client


def deleted(world: World, client: Client, key: str = "k", *, agent: str = "coder") -> str:
    """Have an instance deleted; what was said about it in the end."""
    asked = client.delete(key, agent=agent)
    world.settle()
    return client.deleted[asked]


def test_an_instance_that_rests_goes_with_its_process_and_its_name_begins_anew() -> None:
    world, client = used()
    epoch = world.stores["coder", "k"].epoch
    assert deleted(world, client) == "deleted"
    assert world.disk.gone == [("coder", "k", False)]
    assert not world.agents
    assert not world.router.bus.mailbox.instances

    client.ask("second", calls=1)
    world.settle()
    store = world.stores["coder", "k"]
    assert store.completed == ["second"], "a new instance, without the history of the old one"
    assert store.epoch > epoch


def test_ids_of_a_deleted_instance_stay_known() -> None:
    world, client = used()
    client.delete("k")
    world.settle()
    world.kill_broker()
    world.clients[1].ask("first", calls=0)
    world.settle()
    assert world.clients[1].answers["first"], "it is answered as before"
    assert ("coder", "k") not in world.stores, "and not worked on again"


def test_an_instance_that_nobody_knows_cannot_be_deleted() -> None:
    world, client = used()
    none, odd = client.delete("none"), client.delete("k\x1b[2J")
    outside = client.delete("k", agent="../../etc")
    world.settle()
    assert client.deleted[none].startswith("E_INSTANCE_NOT_FOUND: there is no instance coder/none")
    assert client.deleted[odd].startswith("E_FRAME_INVALID")
    assert client.deleted[outside].startswith("E_AGENT_NOT_FOUND")
    assert not world.disk.gone


@pytest.mark.parametrize("work", ["works", "waits", "starts", "background"])
def test_work_is_named_and_the_instance_stays(work: str) -> None:
    world, client = used()
    if work == "starts":
        world.kill_agent(world.agents["coder", "k"])
        run(world)
        spawn(world, client)
    elif work == "background":
        world.background["coder/k"] = ["bash/build"]
    else:
        client.ask("e1", calls=1)
        client.ask("e2", calls=1)
        if work == "works":
            run(world)
        else:
            world.goes_up(client)
    asked = client.delete("k")
    world.goes_up(client)
    if work == "background":
        run(world)
    else:
        world.goes_down(client)
    said = client.deleted[asked]
    assert said.startswith("E_INSTANCE_BUSY: coder/k has work")
    named = {"works": "it works on 'e1'", "waits": "'e2'", "starts": "being started", "background": "'bash/build'"}
    assert named[work] in said
    assert not world.disk.gone
    world.settle()
    if work in ("works", "waits"):
        assert {"e1", "e2"} <= set(client.answers)
    world.background.clear()
    assert deleted(world, client) == "deleted"


def spawn(world: World, client: Client) -> None:
    """`reviewer/r` spawns `coder/k`; its process is not started before `reconcile`."""
    client.ask("of-the-reviewer", agent="reviewer", key="r", calls=1)
    run(world)
    reviewer = world.agents["reviewer", "r"]
    reviewer.send(Frame("agents.spawn", id="s1", to="coder", instance_key="k", payload=to_raw(AgentsSpawn())))
    world.goes_up(reviewer)


def test_by_force_its_work_ends_and_whoever_waits_is_told_so() -> None:
    world, client = used()
    client.ask("e1", calls=1)
    client.ask("e2", calls=1)
    run(world)
    assert world.host.running
    asked = client.delete("k", force=True)
    run(world)
    world.settle()
    assert client.deleted[asked] == "deleted"
    assert [client.error_of(name) for name in ("e1", "e2")] == ["E_INSTANCE_DELETED"] * 2
    assert [world.state(name) for name in ("e1", "e2")] == ["cancelled"] * 2
    assert not world.host.running
    assert world.disk.gone == [("coder", "k", False)]


def test_a_turn_that_does_not_end_is_killed() -> None:
    world, client = used()
    client.ask("e1", calls=1)
    run(world)
    agent = world.agents["coder", "k"]
    agent.on_frame = lambda frame: None  # type: ignore[method-assign]
    asked = client.delete("k", force=True)
    run(world)
    assert asked not in client.deleted
    for _ in range(3):
        world.advance(CANCEL_S)
        run(world)
    world.settle()
    assert client.deleted[asked] == "deleted"
    assert client.error_of("e1") == "E_INSTANCE_DELETED"


def test_two_deletions_at_once_are_one() -> None:
    world, client = used()
    client.ask("e1", calls=1)
    run(world)
    by_force = client.delete("k", force=True)
    joined = world.clients[1].delete("k")
    run(world)
    world.settle()
    assert client.deleted[by_force] == world.clients[1].deleted[joined] == "deleted"
    assert len(world.disk.gone) == 1
    assert deleted(world, client) == "deleted", "asked twice it says the same"
    assert len(world.disk.gone) == 1


def test_a_deletion_while_the_process_is_being_started() -> None:
    world, client = used()
    world.kill_agent(world.agents["coder", "k"])
    run(world)
    spawn(world, client)
    reviewer = world.agents["reviewer", "r"]
    asked = client.delete("k", force=True)
    world.goes_up(client)
    told = [decode_frame(data) for data in reviewer.wire.down if data]
    errors = [from_raw(frame.payload, ErrorPayload).code for frame in told if frame.in_reply_to == "s1"]
    assert errors == ["E_INSTANCE_DELETED"]
    world.settle()
    assert client.deleted[asked] == "deleted"
    assert set(world.agents) == {("reviewer", "r")}
    assert ("coder", "k") not in {(i.agent, i.key) for i in world.router.bus.mailbox.instances.values()}


def test_what_comes_for_it_meanwhile_begins_a_new_one_after_it() -> None:
    world, client = used()
    client.ask("e1", calls=1)
    run(world)
    asked = client.delete("k", force=True)
    world.clients[1].ask("meanwhile", calls=0)
    world.goes_up(client)
    world.goes_up(world.clients[1])
    assert "meanwhile" not in world.router.bus.mailbox.events
    world.settle()
    assert client.deleted[asked] == "deleted"
    assert world.clients[1].answers["meanwhile"]
    assert world.stores["coder", "k"].completed == ["meanwhile"]


def asks_late(world: World, asker: Agent, event_id: str) -> None:
    """The asker asks `reviewer/r` without waiting."""
    event = AgentEvent(id=event_id, type="agent.request", created_at="2026-01-01T00:00:00Z", input=1)
    frame = Frame("event", to="reviewer", instance_key="r", event_id=event_id, payload=to_raw(event))
    frame.reply_to, frame.asynchronous = ReplyTo("coder", f"corr-{event_id}"), True
    asker.submit("post", frame, ("late", event_id))


@pytest.mark.parametrize("restarts", [False, True])
def test_an_answer_that_it_expected_starts_no_new_instance(restarts: bool) -> None:
    world, client = used()
    client.ask("e1", calls=1)
    run(world)
    asks_late(world, world.agents["coder", "k"], "late")
    run(world)
    assert world.state("late") == "leased"
    refused = client.delete("k")
    run(world)
    assert client.deleted[refused].endswith("has work: it works on 'e1'; it expects 1 answer ('late')")
    forced = client.delete("k", force=True)
    for _ in range(4):
        run(world)
        world.advance(0.2)
    assert client.deleted[forced] == "deleted"
    assert world.state("late") not in ("done", "cancelled"), "what was asked goes on"
    if restarts:
        world.kill_broker()
    world.settle()
    assert world.state("late") == "done"
    assert ("coder", "k") not in world.stores


def test_a_workdir_that_somebody_else_works_in_stays() -> None:
    world, client = used()
    client.ask("e1", calls=1)
    run(world)
    agent = world.agents["coder", "k"]
    agent.send(Frame("agents.spawn", id="s1", to="reviewer", instance_key="r", payload=to_raw(AgentsSpawn("."))))
    run(world)
    world.settle()
    assert deleted(world, client) == "deleted"
    assert world.disk.gone == [("coder", "k", True)]
    child = world.router.bus.mailbox.instances["reviewer", "r"]
    assert child.workdir.path == "/state/instances/coder/k/workspace"
    assert child.spawned is not None
    assert child.spawned.owner_agent == "", "a new instance of that name did not spawn it"
    world.kill_broker()
    world.settle()
    child = world.router.bus.mailbox.instances["reviewer", "r"]
    assert (child.workdir.path, child.spawned and child.spawned.owner_agent) == (
        "/state/instances/coder/k/workspace",
        "",
    )
    client.delete("r", agent="reviewer", force=True)
    world.advance(RETURN_S)
    world.settle()
    assert world.disk.gone[1:] == [("reviewer", "r", False)]


def test_a_folder_that_cannot_be_moved_stays_and_so_does_the_instance() -> None:
    world, client = used()
    world.disk.full = True
    assert deleted(world, client).startswith("E_STATE: the folder of coder/k cannot be moved away: no space")
    assert not world.journal.find_records(deleted_subject("coder", "k"))
    client.ask("e1", calls=0)
    world.settle()
    assert world.stores["coder", "k"].completed == ["first", "e1"]
    world.disk.full = False
    assert deleted(world, client) == "deleted"


def test_jails_that_do_not_end_keep_the_instance() -> None:
    world, client = used()
    world.jails_hang = True
    asked = client.delete("k")
    run(world)
    world.advance(JAILS_S)
    run(world)
    world.advance(0.2)
    run(world)
    assert client.deleted[asked].startswith("E_INSTANCE_BUSY: the jails of coder/k do not end")
    assert not world.disk.gone


def test_a_refusal_that_comes_late_is_one_answer() -> None:
    world, client = used()
    world.background["coder/k"] = ["bash/build"]
    asked = client.delete("k")
    for actor in (client, *world.agents.values(), world.supervisor, world.host):
        while world.pump_up(actor) or (actor is not world.host and world.pump_down(actor)):
            pass
    while not world.host.wire.up:
        assert world.pump_down(world.host)
    world.now += JAILS_S
    world.goes_up(world.host)
    run(world)
    assert "goes on in the background" in client.deleted[asked]
    assert not world.disk.gone


def test_a_tool_host_that_is_away_is_waited_for() -> None:
    world, client = used()
    world.host.wire.cut(reconnect=False)
    world.router.unreachable(TOOLS, world.host.wire.ident, world.now)
    asked = client.delete("k")
    run(world)
    world.advance(1.0)
    run(world)
    assert asked not in client.deleted
    world.host.wire.connect()
    world.settle()
    assert client.deleted[asked] == "deleted"


def test_a_tool_host_that_ends_meanwhile_took_its_jails_with_it() -> None:
    world, client = used()
    world.jails_hang = True
    asked = client.delete("k")
    run(world)
    world.kill_host()
    world.jails_hang = False
    world.settle()
    assert client.deleted[asked] == "deleted"


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("write", range(1, 9))
def test_a_broker_that_dies_in_any_write_of_it(moment: Literal["before", "after"], write: int) -> None:
    world, client = used()
    client.ask("e1", calls=1)
    client.ask("e2", calls=1)
    run(world)
    asked = client.delete("k", force=True)
    world.dies, world.dies_in = moment, write
    for _ in range(8):
        run(world)
        world.advance(0.2)
    world.settle()
    world.advance(RETURN_S)
    world.settle()
    assert client.deleted[asked] == "deleted"
    for name in ("e1", "e2"):
        state = world.state(name)  # where the wish itself was lost, the question came again after their ends
        assert state == "cancelled" or (state, moment, write) == ("done", "before", 1)
        assert len(client.answers[name]) == 1
        assert state == "done" or client.error_of(name) in ("E_INSTANCE_DELETED", "E_CANCELLED")
    assert ("coder", "k") not in world.stores
    assert not [row for row in world.journal.rows() if isinstance(decode(row.data), InstanceDeleted)]
    assert not world.router.bus.mailbox.instances
    client.ask("new", calls=0)
    world.settle()
    assert world.stores["coder", "k"].completed == ["new"]


def test_a_deletion_that_was_decided_is_finished_without_whoever_asked() -> None:
    world, client = used()
    client.delete("k")
    for _ in range(8):
        run(world)
        if world.journal.find_records(deleted_subject("coder", "k")):
            break
        world.now += 0.2
        world.router.tick(world.now)
        world.commit()
    else:
        raise AssertionError("no tombstone")
    world.clients.remove(client)
    client.wire.cut(reconnect=False)
    world.disk.gone.clear()
    world.kill_broker()
    world.clients[0].ask("second", calls=0)
    world.settle()
    assert world.disk.gone == [("coder", "k", False)]
    assert world.stores["coder", "k"].completed == ["second"]
