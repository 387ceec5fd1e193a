"""What is idle costs the broker nothing: no look at the clock walks it, and what was once there leaves nothing."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.broker.state.entities import AGENTS, TOOLS
from goondan.kernel.broker.state.presence import EndedLaunches
from goondan.schemas.wire.codec import decode
from tests.unit.kernel.broker.actors import Agent
from tests.unit.kernel.broker.test_due import Unwalked
from tests.unit.kernel.broker.world import World


def worked_on(world: World, numbers: range) -> None:
    """One event with a tool call for each of these instances."""
    for number in numbers:
        world.clients[0].ask(f"e{number}", key=f"k{number}", calls=1)
    world.settle()


def pinged(agent: Agent) -> bool:
    return any(data and decode(data).type == "ping" for data in agent.wire.down)


def test_a_tick_does_not_walk_the_connections_and_still_pings_who_holds_something() -> None:
    world = World()
    worked_on(world, range(20))
    presence: Any = world.router.bus.presence
    presence.connections = tuple(map(Unwalked, presence.connections))
    world.now += 60
    world.router.tick(world.now)
    world.after_round()
    assert len(world.agents) == 20
    assert not any(pinged(agent) for agent in world.agents.values()), "idle ones are the supervisor's affair"

    world.clients[0].ask("more", key="k7")
    world.pump_up(world.clients[0])
    for _ in range(3):
        world.now += 2.1
        world.router.tick(world.now)
        world.after_round()
    assert [agent.key for agent in world.agents.values() if pinged(agent)] == ["k7"]


def test_a_lost_tool_host_does_not_cost_a_walk_over_the_instances() -> None:
    world = World()
    worked_on(world, range(20))
    mailbox = world.router.bus.mailbox
    everyone = [*mailbox.instances.values()]
    host = everyone[0].host
    assert host is not None
    assert all(instance.host is host for instance in everyone)
    mailbox.instances = Unwalked(mailbox.instances)
    world.kill_host()
    world.settle()
    assert not any(instance.host is host for instance in everyone)
    world.clients[0].ask("again", key="k3")
    world.settle()
    assert world.clients[0].answers["again"]
    assert [instance.key for instance in everyone if instance.host is not None] == ["k3"]


def test_instances_that_have_rested_leave_nothing_in_the_broker() -> None:
    world = World(max_live_agents=40)
    for first in range(0, 400, 20):
        worked_on(world, range(first, first + 20))
        for agent in [*world.agents.values()]:
            agent.ask_to_leave()
        world.settle()
    bus = world.router.bus
    assert bus.counters["hello_agent"] >= 400
    assert not world.agents
    assert not bus.mailbox.instances
    assert not bus.mailbox.events
    assert not bus.presence.connections[AGENTS]
    host = next(iter(bus.presence.connections[TOOLS].values()))
    assert bus.mailbox.hosts.lightest([host]) is host
    assert not bus.mailbox.hosts.served(host.address)
    assert len(bus.presence.agents_ended._first) <= 2


def test_an_idle_agent_leaves_for_one_that_is_wanted_and_the_one_that_was_used_last_stays() -> None:
    world = World(max_live_agents=4)
    capacity = world.router.bus.mailbox.places.capacity
    worked_on(world, range(capacity))
    worked_on(world, range(1, capacity))  # so that the first has rested longest; known ids: nothing runs again
    for number in range(1, capacity):
        world.clients[0].ask(f"again{number}", key=f"k{number}", calls=0)
        world.settle()
    world.clients[0].ask("new", key="new", calls=0)
    world.settle()
    assert {key for _, key in world.agents} == {*(f"k{number}" for number in range(1, capacity)), "new"}


# --- launches that have ended


@given(st.lists(st.integers(1, 40)), st.sets(st.integers(1, 40)))
def test_launches_that_have_ended_are_known_as_a_set_knows_them(ended: list[int], living: set[int]) -> None:
    kept, expected = EndedLaunches(), set[int]()
    for launch in ended:
        kept.add(launch)
        expected.add(launch)
        assert {n for n in range(42) if n in kept} == expected
    runs = sum(1 for n in expected if n - 1 not in expected)
    assert len(kept._first) == runs

    kept.all_but(living)
    top = max([*ended, *living], default=0)
    assert {n for n in range(50) if n in kept} == set(range(1, top + 1)) - living
