"""Cancelling in the broker: who may, what waits, what is held, what was asked for in its turn."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.kernel.broker.state.bus import MAX_ASKERS, RETURN_S
from goondan.kernel.broker.state.entities import AGENTS, Connection
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, ErrorPayload, Frame, ReplyTo
from tests.unit.kernel.broker.actors import Agent
from tests.unit.kernel.broker.world import World, client, outgoing, run


def working() -> tuple[World, Agent]:
    """An agent in the middle of a tool call for `e1`, with `e2` behind it."""
    world = World()
    world.advance(RETURN_S)
    world.clients[0].ask("e1")
    world.clients[0].ask("e2")
    run(world)
    (agent,) = world.agents.values()
    assert list(world.host.running) == ["coder/k/e1/0"]
    return world, agent


def connection_of(world: World, cls: int, ident: bytes) -> Connection:
    return world.router.bus.presence.connections[cls][ident]


def say(world: World, connection: Connection, frame: Frame) -> list[tuple[bytes, Frame]]:
    """What leaves the broker because of a frame: to whom, and what."""
    frame.id = frame.id or f"x{world.now}"
    return [(ident, sent) for _, ident, sent in outgoing(world, connection, frame)]


def admin(**body: Any) -> Frame:
    return Frame("admin", payload=to_raw(body))


def codes(out: list[tuple[bytes, Frame]]) -> list[str]:
    return [from_raw(frame.payload, ErrorPayload).code for _, frame in out if frame.type == "error"]


def test_a_leased_event_ends_by_its_holder_and_its_call_in_the_tool_host() -> None:
    world, _ = working()
    world.clients[1].cancel("e1")
    run(world)
    assert world.clients[1].ended == {"e1": ["cancelled"]}
    assert (world.clients[0].error_of("e1"), len(world.clients[0].answers["e1"])) == ("E_CANCELLED", 1)
    assert list(world.host.running) == ["coder/k/e2/0"], "the call of e1 is over, and the next event has its turn"


def test_a_queued_event_ends_at_once_and_what_runs_goes_on() -> None:
    world, agent = working()
    world.clients[0].cancel("e2")
    run(world)
    assert world.clients[0].ended == {"e2": ["cancelled"]}
    assert (agent.held.event_id if agent.held else None) == "e1"
    world.settle()
    assert agent.store.completed == ["e1"]
    assert [a.answer.status for a in world.clients[0].answers["e1"] if a.answer] == ["completed"]


def test_an_event_without_a_process_ends_at_once_and_frees_its_place() -> None:
    world = World(max_live_agents=1)
    world.advance(RETURN_S)
    for key in ("k1", "k2"):
        world.clients[0].ask(f"e-{key}", key=key)
    run(world)
    world.clients[0].cancel("e-k2")  # it waits for a place
    run(world)
    assert world.clients[0].ended == {"e-k2": ["cancelled"]}
    assert set(world.router.bus.mailbox.instances) == {("coder", "k1")}


def test_asking_twice_or_late_says_the_same_and_unknown_events_are_said_to_be() -> None:
    world, _ = working()
    for _ in range(2):
        world.clients[0].cancel("e1")
    run(world)
    world.clients[1].cancel("e1")
    world.clients[1].cancel("e9")
    run(world)
    assert world.clients[0].ended == {"e1": ["cancelled", "cancelled"]}
    assert world.clients[1].ended == {"e1": ["cancelled"], "e9": ["E_EVENT_NOT_FOUND"]}
    world.settle()
    world.clients[1].cancel("e2")
    run(world)
    assert world.clients[1].ended["e2"] == ["done"]


def test_a_new_broker_asks_to_be_asked_again_before_it_calls_an_event_unknown() -> None:
    world = World()
    operator = client(world, operator=True)
    assert codes(say(world, operator, admin(op="cancel", eventId="e1"))) == ["E_OVERLOADED"]
    assert codes(say(world, operator, admin(op="events", agent="coder", instanceKey="k"))) == ["E_OVERLOADED"]
    world.now += RETURN_S
    assert codes(say(world, operator, admin(op="cancel", eventId="e1"))) == ["E_EVENT_NOT_FOUND"]
    ((_, reply),) = say(world, operator, admin(op="events", agent="coder", instanceKey="k"))
    assert from_raw(reply.payload, dict) == {"events": [], "more": 0}


def test_operators_may_cancel_everything_and_others_only_what_was_sent_without_that_right() -> None:
    world, _ = working()
    operator, other = client(world, operator=True), client(world, operator=False)
    assert codes(say(world, other, admin(op="cancel", eventId="e2"))) == ["E_EVENT_NOT_FOUND"]
    assert codes(say(world, other, admin(op="events", agent="coder", instanceKey="k"))) == ["E_FRAME_INVALID"]
    event = AgentEvent(id="e3", type="user", created_at="2026-01-01T00:00:00Z", input=0)
    say(world, other, Frame("event", to="coder", instance_key="k", event_id="e3", payload=to_raw(event)))
    ((_, listed),) = say(world, operator, admin(op="events", agent="coder", instanceKey="k"))
    assert from_raw(listed.payload, dict)["events"] == [
        {"eventId": "e1", "state": "leased"},
        {"eventId": "e2", "state": "accepted"},
        {"eventId": "e3", "state": "accepted"},
    ]
    for who, event_id in ((other, "e3"), (operator, "e2")):
        replies = [frame for _, frame in say(world, who, admin(op="cancel", eventId=event_id)) if frame.type == "reply"]
        assert from_raw(replies[0].payload, dict) == {"eventId": event_id, "state": "cancelled"}


@pytest.mark.parametrize("wrong", [{}, {"eventId": 7}, {"eventId": None}])
def test_a_question_without_an_event_is_refused(wrong: dict[str, Any]) -> None:
    world, _ = working()
    assert codes(say(world, client(world, operator=True), admin(op="cancel", **wrong))) == ["E_FRAME_INVALID"]


def test_questions_that_wait_are_bounded() -> None:
    world, _ = working()
    operator = client(world, operator=True)
    for number in range(MAX_ASKERS):
        frame = admin(op="cancel", eventId="e1")
        frame.id = f"q{number}"
        assert codes(say(world, operator, frame)) == []
    assert codes(say(world, operator, admin(op="cancel", eventId="e1"))) == ["E_OVERLOADED"]


def test_what_the_turn_asked_other_agents_for_is_cancelled_with_it_and_what_it_only_sent_is_not() -> None:
    world, agent = working()
    coder = connection_of(world, AGENTS, agent.wire.ident)

    def request(event_id: str, *, waits: bool) -> None:
        event = AgentEvent(id=event_id, type="user", created_at="2026-01-01T00:00:00Z", input=1)
        frame = Frame("event", to="reviewer", instance_key=event_id, event_id=event_id, payload=to_raw(event))
        frame.reply_to = ReplyTo("coder", f"corr-{event_id}") if waits else None
        say(world, coder, frame)

    request("asked", waits=True)
    request("sent", waits=False)
    say(world, client(world, operator=True), admin(op="cancel", eventId="e1"))
    request("late", waits=True)  # before it has heard
    events = world.router.bus.mailbox.events
    assert (events["asked"].state, events["late"].state) == ("cancelled", "accepted")
    failed = Frame("ack", stage="failed", event_id="e1", epoch=agent.held.epoch if agent.held else None)
    say(world, coder, failed)
    assert [world.state(name) for name in ("e1", "asked", "late", "sent")] == ["cancelled"] * 3 + ["accepted"]


@pytest.mark.parametrize("harm", ["kill_agent", "cut", "kill_broker"])
def test_whatever_breaks_while_the_holder_is_told_the_event_ends_as_cancelled_once(harm: str) -> None:
    world, agent = working()
    world.clients[0].cancel("e1")
    world.pump_up(world.clients[0])  # the broker has told the holder, which has not heard
    if harm == "kill_broker":
        world.kill_broker()
    else:
        getattr(world, harm)(agent)
    world.settle()
    assert world.clients[0].ended == {"e1": ["cancelled"]}
    assert len(world.clients[0].answers["e1"]) == len(world.clients[0].answers["e2"]) == 1


def test_a_call_that_waits_for_its_host_to_come_back_ends_there_too() -> None:
    """The agent is back with its call before the host is, and the turn is cancelled in between."""
    world, agent = working()
    world.kill_broker()
    for _ in range(8):
        world.flow(agent, world.clients[0])
        world.supervisor.reconcile()
    world.clients[0].cancel("e1")
    for _ in range(8):
        world.flow(agent, world.clients[0])
    assert (world.clients[0].ended, list(world.host.running)) == ({"e1": ["cancelled"]}, ["coder/k/e1/0"])
    world.flow(world.host)
    world.flow(world.host)
    assert "coder/k/e1/0" not in world.host.running
