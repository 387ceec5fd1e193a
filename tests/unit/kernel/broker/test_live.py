"""News of running turns in the broker: who may speak, who hears it, and that it costs nobody else anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.broker.routing.clients import MAX_LIVE_BYTES
from goondan.kernel.broker.state.bus import Lossy
from goondan.kernel.broker.state.entities import CLIENTS, LIVE_BURST, LIVE_PER_S, Allowance
from goondan.schemas.wire.codec import decode, encode, to_raw
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.runtime_events import RuntimeEvent
from tests.unit.kernel.broker.actors import Agent
from tests.unit.kernel.broker.world import World, run


def working(*, live: bool = True, client: int = 0) -> tuple[World, Agent]:
    """An agent in the middle of its first tool call, its news so far heard."""
    world = World()
    world.clients[client].ask(f"c{client}e0", live=live)
    run(world)
    (agent,) = world.agents.values()
    assert world.host.running, "the call is out"
    return world, agent


def say(world: World, agent: Agent, frame: Frame) -> list[bytes]:
    """What leaves the broker because of a frame."""
    bus = world.router.bus
    (connection,) = [c for c in bus.presence.connections[1].values() if c.ident == agent.wire.ident]
    frame.id = "x"
    world.router.receive(connection, encode(frame), world.now)
    out = [data for _, _, data in bus.out]
    bus.out.clear()
    return out


def news(agent: Agent, text: str = "t") -> Frame:
    held = agent.held
    assert held is not None
    payload = to_raw(RuntimeEvent(kind="text", text=text))
    return Frame("runtime.event", event_id=held.event_id, epoch=held.epoch, payload=payload)


def test_the_asker_hears_the_holder() -> None:
    world, agent = working()
    epoch = agent.held.epoch if agent.held else None
    assert world.clients[0].heard == {"c0e0": [epoch]}
    (data,) = say(world, agent, news(agent))
    assert isinstance(data, Lossy)
    frame = decode(data)
    assert (frame.from_, frame.instance_key, frame.event_id, frame.in_reply_to) == ("coder", "k", "c0e0", "corr-c0e0")
    assert (frame.epoch, frame.chain, frame.source) == (None, None, None)
    assert world.router.bus.counters["live"] == 2


@pytest.mark.parametrize("live", [True, False])
def test_what_a_turn_waits_for_is_kept_whoever_listens_until_it_goes_on(live: bool) -> None:
    world, agent = working(live=live)
    event, wait = world.router.bus.mailbox.events["c0e0"], news(agent)
    wait.stage = "waits"
    assert len(say(world, agent, wait)) == live
    assert event.work.wait == (world.now, wait.payload)
    say(world, agent, news(agent))
    assert event.work.wait is not None
    over = news(agent)
    over.stage = "over"
    say(world, agent, over)
    assert event.work.wait is None


def test_only_the_holder_says_what_a_turn_waits_for() -> None:
    world, agent = working()
    wait = news(agent)
    wait.stage, wait.epoch = "waits", (wait.epoch or 0) + 1
    say(world, agent, wait)
    assert world.router.bus.mailbox.events["c0e0"].work.wait is None


def test_what_an_agent_writes_into_the_header_reaches_nobody() -> None:
    world, agent = working()
    frame = news(agent)
    frame.from_, frame.to, frame.in_reply_to, frame.workdir = "orchestrator", "client/2", "corr-other", "/etc"
    frame.calls, frame.trace_id, frame.span_id, frame.parent_span_id = ["x"] * 1000, "t", "1" * 16, "../etc"
    (data,) = say(world, agent, frame)
    relayed = decode(data)
    assert (relayed.from_, relayed.in_reply_to, relayed.to) == ("coder", "corr-c0e0", None)
    assert (relayed.workdir, relayed.calls) == (None, None)
    trace = world.router.bus.mailbox.events["c0e0"].content.trace_id
    assert (relayed.trace_id, relayed.span_id, relayed.parent_span_id) == (trace, "1" * 16, None)


@pytest.mark.parametrize("wrong", ["event", "none", "epoch", "size", "idle"])
def test_hostile_news_are_counted_and_not_answered(wrong: str) -> None:
    world, agent = working()
    frame = news(agent, "x" * MAX_LIVE_BYTES if wrong == "size" else "t")
    if wrong in ("event", "none"):
        frame.event_id = "c0e1" if wrong == "event" else None
    elif wrong == "epoch":
        frame.epoch = (frame.epoch or 0) + 1
    elif wrong == "idle":
        world.settle()
    before = world.router.bus.counters["live_refused"]
    assert say(world, agent, frame) == []
    assert world.router.bus.counters["live_refused"] == before + 1


def test_who_did_not_ask_hears_nothing() -> None:
    world, agent = working(live=False)
    assert world.clients[0].heard == {}
    assert agent.held is not None and agent.held.live is False
    assert say(world, agent, news(agent)) == []
    assert world.router.bus.counters["live_unheard"] == 2


def test_a_client_that_went_away_is_spoken_to_no_more() -> None:
    world, agent = working()
    world.router.unreachable(CLIENTS, world.clients[0].wire.ident, world.now)
    assert say(world, agent, news(agent)) == []
    assert world.router.bus.counters["live_unheard"] == 1


def test_after_a_reconnect_the_news_go_on_over_the_new_connection() -> None:
    world, agent = working()
    world.cut(world.clients[0])
    world.router.unreachable(CLIENTS, b"nobody", world.now)
    for _ in range(6):
        world.flow(*world.actors())
    assert len(say(world, agent, news(agent))) == 1


def test_a_flood_is_cut_to_what_one_client_may_get() -> None:
    world, agent = working()
    sent = sum(len(say(world, agent, news(agent))) for _ in range(3 * LIVE_BURST))
    assert sent == LIVE_BURST - 1  # one before
    assert world.router.bus.counters["live_dropped"] == 2 * LIVE_BURST + 1
    world.now += 1.0
    assert sum(len(say(world, agent, news(agent))) for _ in range(3 * LIVE_BURST)) == LIVE_BURST
    world.settle()
    assert len(world.clients[0].answers["c0e0"]) == 1


def test_an_agent_that_asks_another_gets_no_news() -> None:
    world, agent = working()
    event = Frame("event", to="reviewer", instance_key="k", event_id="a-1", live=True, payload=to_raw({}))
    say(world, agent, event)
    bus = world.router.bus
    bus.staged.clear()
    assert bus.mailbox.events["a-1"].live is False


@given(st.lists(st.floats(-1.0, 2.0), max_size=300))
def test_an_allowance_gives_no_more_than_its_burst_and_rate(pauses: list[float]) -> None:
    now = start = 10.0
    allowance = Allowance(now)
    taken = 0
    for pause in pauses:
        now += pause
        for _ in range(40):
            taken += allowance.take(now)
    latest = max([start, *[start + sum(pauses[: n + 1]) for n in range(len(pauses))]])
    assert taken <= LIVE_BURST + (latest - start) * LIVE_PER_S + 1
