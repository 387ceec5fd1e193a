"""What an event began with: set by the broker, passed on to all that follows, there again after a restart."""

from __future__ import annotations

import pytest

from goondan.kernel.broker.state.entities import Connection
from goondan.schemas.wire.codec import decode, encode, to_raw
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame
from tests.checks import there
from tests.unit.kernel.broker.actors import Actor, Agent
from tests.unit.kernel.broker.world import CALL, World, run, working
from tests.unit.kernel.broker.world import request as asked_by


def connection(world: World, actor: Actor) -> Connection:
    return world.router.bus.presence.connections[actor.wire.cls][actor.wire.ident]


def tell(world: World, actor: Actor, frame: Frame) -> list[Frame]:
    """A frame of an actor, and all that leaves the broker because of it."""
    bus = world.router.bus
    world.router.receive(connection(world, actor), encode(frame), world.now)
    world.commit()
    sent = [decode(data) for _, _, data in bus.out]
    world.after_round()
    assert not [frame for frame in sent if frame.type == "error"]
    return sent


def request(event_id: str, *, call_id: str | None = None, to: str = "reviewer", root: str | None = "a-lie") -> Frame:
    return asked_by(event_id, to, "asked", call_id, calls=1, root_event=root)


def agent(world: World, name: str = "coder", key: str = "k") -> Agent:
    return world.agents[name, key]


def test_a_clients_event_is_its_own_root_whatever_it_says() -> None:
    world = World()
    run(world)
    frame = request("e1", to="coder")
    frame.reply_to = None
    tell(world, world.clients[0], frame)
    run(world)
    event = world.router.bus.mailbox.events["e1"]
    assert (event.root, event.session) == ("e1", f"client/{world.clients[0].peer.incarnation}")
    held = there(agent(world, key="asked").held)
    assert held.root_event == "e1"


def test_what_an_agent_and_its_handlers_ask_belongs_to_the_root_of_the_turn() -> None:
    world = working()
    tell(world, world.host, request("by-call", call_id=CALL))
    tell(world, agent(world), request("by-agent", to="coder"))
    sent = request("sent", to="coder")
    sent.reply_to = None
    tell(world, agent(world), sent)
    client = f"client/{world.clients[0].peer.incarnation}"
    for name in ("by-call", "by-agent", "sent"):
        event = world.router.bus.mailbox.events[name]
        assert (event.root, event.session) == ("c0e0", client)
    run(world)
    call = next(frame for call_id, frame in world.host.running.items() if "by-call" in call_id)
    assert call.root_event == "c0e0", "the tool host hears of it with every call"


def test_an_answer_belongs_to_what_the_question_began_with() -> None:
    world = working()
    asked = request("r1", call_id=CALL)
    tell(world, world.host, asked)
    run(world)
    answered = Answer(turn_id="t", status="completed", response="yes")
    event = AgentEvent(id="a", type="agent.response", created_at="2026-01-01T00:00:00Z", answer=answered)
    other = agent(world, "reviewer", "asked")
    done = Frame("ack", id="d", stage="done", event_id="r1", epoch=there(other.held).epoch, payload=to_raw(event))
    (answer,) = [frame for frame in tell(world, other, done) if frame.in_reply_to == "corr-r1"]
    assert (answer.type, answer.root_event) == ("event", "c0e0")


def test_the_end_of_pending_work_belongs_to_the_call_that_promised_it() -> None:
    world = working()
    event = AgentEvent(id=f"{CALL}~completed", type="tool.completed", created_at="2026-01-01T00:00:00Z")
    told = Frame("event", id="p", to="coder", instance_key="k", event_id=event.id, payload=to_raw(event))
    told.root_event = world.host.running[CALL].root_event
    tell(world, world.host, told)
    kept = world.router.bus.mailbox.events[event.id]
    assert (kept.root, kept.session) == ("c0e0", f"client/{world.clients[0].peer.incarnation}")
    told.event_id = "later"
    told.root_event = "ended long ago"
    tell(world, world.host, told)
    kept = world.router.bus.mailbox.events["later"]
    assert (kept.root, kept.session) == ("ended long ago", "root/ended long ago")


def test_what_an_agent_does_between_turns_is_its_own() -> None:
    world = World()
    world.clients[0].ask("c0e0", calls=0)
    run(world)
    assert agent(world).held is None
    tell(world, agent(world), request("own", root="c0e0"))
    event = world.router.bus.mailbox.events["own"]
    assert (event.root, event.session) == ("own", "agent/coder/k")


@pytest.mark.parametrize("first", ["agents", "client"])
def test_a_new_broker_knows_the_roots_of_what_is_held_and_of_what_its_holders_ask(first: str) -> None:
    world = working()
    tell(world, world.host, request("r1", call_id=CALL))
    run(world)
    assert agent(world, "reviewer", "asked").held is not None
    world.kill_broker()
    order = [world.supervisor, *world.agents.values()] if first == "agents" else [world.clients[0], world.supervisor]
    for _ in range(4):
        world.flow(*order)
    events = world.router.bus.mailbox.events
    if first == "agents":
        assert {name: event.root for name, event in events.items()} == {"c0e0": "c0e0", "r1": "c0e0"}
        assert len({event.session for event in events.values()}) == 1, "as the client that is not back yet"
        tell(world, agent(world, "reviewer", "asked"), request("r2", to="coder"))
        assert events["r2"].root == "c0e0"
    world.goes_on(3)
    assert world.router.bus.calls.open[CALL].event.root == "c0e0"
    tell(world, world.host, request("r1", call_id=CALL))
    run(world)
    tell(world, world.host, request("r3", call_id=CALL))
    client = f"client/{world.clients[0].peer.incarnation}"
    assert {(events[name].root, events[name].session) for name in ("c0e0", "r1", "r3")} == {("c0e0", client)}
    world.host.peer.forget("f-r1")
    mailbox = world.router.bus.mailbox
    assert mailbox.held.held == sum(event.size for event in events.values() if not event.finished)
