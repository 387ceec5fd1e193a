"""What the router does for a short turn: counted in calls of functions, as in test_wake_up.py."""

from __future__ import annotations

import sys

from goondan.kernel.broker.state.entities import CLIENTS, Connection
from goondan.schemas.wire.codec import decode, encode, to_raw
from goondan.schemas.wire.frames import Frame, ReplyTo
from tests.python_calls import python_calls
from tests.unit.kernel.broker.swarm import TOOL
from tests.unit.kernel.broker.world import World, host, run

#: From the client's event to its word that it has the answer, without the transport and the journal. It was 241.
MOST = 141
#: What an observer adds to it that reads nothing. The whole kernel makes some thousand calls in a turn.
BEHIND = 40
#: What is sent meanwhile.
TOLD = ["ack", "event", "tool.call", "tool.result", "ack", "event", "ack"]


def frames_of_a_turn(world: World, asker: Connection, event_id: str) -> list[tuple[Connection, bytes]]:
    """Each frame of a turn with one call, and who sends it."""
    agent, call = world.peer(), f"{event_id}/1"
    assert agent.instance is not None
    epoch = agent.instance.epoch
    event = Frame("event", id=f"f{event_id}", to="coder", instance_key="k", event_id=event_id, payload=to_raw("go"))
    event.reply_to = ReplyTo("client", event_id)
    made = Frame("tool.call", id="c", call_id=call, tool=TOOL, event_id=event_id, epoch=epoch, payload=to_raw({}))
    made.position = 2
    return [
        (asker, encode(event)),
        (agent, encode(made)),
        (host(world), encode(Frame("tool.result", id="r", call_id=call, payload=to_raw({"status": "ok"})))),
        (agent, encode(Frame("ack", id="s", stage="result", calls=[call]))),
        (agent, encode(Frame("ack", id="d", stage="done", event_id=event_id, epoch=epoch, payload=to_raw("done")))),
        (asker, encode(Frame("ack", id="a", stage="done", event_id=f"{event_id}!answer"))),
    ]


def run_turn(world: World, frames: list[tuple[Connection, bytes]]) -> list[tuple[int, bytes, bytes]]:
    """What is sent because of them."""
    bus, router = world.router.bus, world.router
    for connection, data in frames:
        router.receive(connection, data, world.now)
        while bus.staged:
            staged, bus.staged = bus.staged, []
            world.journal.append([one.item for one in staged])
            router.settle(staged, world.now)
    left, bus.out[:] = [*bus.out], []
    return left


def test_a_turn_calls_few_functions(world: World) -> None:
    world.host.work()
    run(world)  # its first turn is over
    (asker, *_) = world.router.bus.presence.connections[CLIENTS].values()
    run_turn(world, frames_of_a_turn(world, asker, "e2"))  # from here on all is remembered
    frames = frames_of_a_turn(world, asker, "e3")
    beside = (__file__, sys.modules[type(world.journal).__module__].__file__)
    with python_calls(lambda code: code.co_filename not in beside) as called:
        told = run_turn(world, frames)
    assert [decode(data).type for _, _, data in told] == TOLD
    assert len(called) <= MOST, f"{len(called)} calls of a turn; what was added is needed in each turn?"


def test_an_observer_that_is_behind_costs_a_turn_few_calls(world: World) -> None:
    world.host.work()
    run(world)
    (asker, observer, *_) = world.router.bus.presence.connections[CLIENTS].values()
    beside = (__file__, sys.modules[type(world.journal).__module__].__file__)
    counts = []
    for number in range(1, 5):
        frames = frames_of_a_turn(world, asker, f"e{number + 1}")
        with python_calls(lambda code: code.co_filename not in beside) as called:
            told = run_turn(world, frames)
        counts.append(len(called))
        assert [decode(data).type for _, _, data in told if decode(data).type != "observed"] == TOLD
        if number == 2:  # it reads nothing: the news of the next turn fill its window
            wish = Frame("admin", id="o1", payload=to_raw({"op": "observe", "events": 1, "bytes": 1 << 20}))
            run_turn(world, [(observer, encode(wish))])
    assert counts[3] - counts[1] <= BEHIND, counts
