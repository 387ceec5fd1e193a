"""Which calls of an event the broker remembers: those whose results the agent has not stored, and a bounded number."""

from __future__ import annotations

import pytest

from goondan.kernel.broker.state.entities import AGENTS, TOOLS, Event
from goondan.schemas.wire.codec import decode, encode, to_raw
from goondan.schemas.wire.frames import Frame
from tests.unit.kernel.broker.swarm import TOOL
from tests.unit.kernel.broker.world import World, working


def turn(world: World) -> Event:
    (instance,) = world.router.bus.mailbox.instances.values()
    assert instance.leased is not None
    return instance.leased


def from_agent(world: World, frame: Frame) -> None:
    (connection,) = world.router.bus.presence.connections[AGENTS].values()
    world.router.receive(connection, encode(frame), world.now)


def call(world: World, call_id: str) -> None:
    """Made by the agent, and answered by the tool host."""
    event = turn(world)
    payload = to_raw({"args": {}, "turnId": event.id, "toolCallId": call_id})
    made = Frame("tool.call", id="f", call_id=call_id, tool=TOOL, event_id=event.id, epoch=event.instance.epoch)
    made.payload = payload
    from_agent(world, made)
    (host,) = world.router.bus.presence.connections[TOOLS].values()
    result = Frame("tool.result", id="r", call_id=call_id, payload=to_raw({"status": "ok", "output": 1}))
    world.router.receive(host, encode(result), world.now)


def test_a_call_whose_result_is_stored_is_forgotten() -> None:
    world = working()
    running = set(turn(world).work.calls)
    call(world, "a")
    call(world, "b")
    assert set(turn(world).work.calls) == {"a", "b"} | running
    from_agent(world, Frame("ack", id="s", stage="result", calls=["a", *running]))
    assert set(turn(world).work.calls) == {"b"} | running, "one that runs is remembered, whatever its agent says"


@pytest.mark.parametrize(("most", "made", "first"), [(10, 30, 20), (32, 33, 2)])
def test_of_an_agent_that_says_nothing_the_oldest_are_forgotten_several_at_a_time(
    monkeypatch: pytest.MonkeyPatch, most: int, made: int, first: int
) -> None:
    monkeypatch.setattr("goondan.kernel.broker.routing.calls.MAX_REMEMBERED", most)
    world = working()
    running = set(turn(world).work.calls)
    for number in range(made):
        call(world, f"call{number}")
    assert set(turn(world).work.calls) == running | {f"call{number}" for number in range(first, made)}


def test_a_call_that_is_remembered_does_not_run_in_another_host() -> None:
    world = working()
    turn(world).work.calls["gone"] = "an earlier tool host"
    world.router.bus.out.clear()
    event = turn(world)
    again = Frame("tool.call", id="f", call_id="gone", tool=TOOL, event_id=event.id, epoch=event.instance.epoch)
    from_agent(world, again)
    (told,) = [decode(data) for _, _, data in world.router.bus.out]
    assert told.type == "tool.result"
    assert b"E_TOOL_OUTCOME_UNKNOWN" in bytes(told.payload)
