"""Shares in the broker: one root, or one session, cannot take what others need; and what it is refused, it is told."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.kernel.broker.routing.intake import MAX_NESTED_BYTES
from goondan.kernel.broker.routing.processes import MAX_STARTING, STARTING_S
from goondan.kernel.broker.state.bus import RETRY_AFTER_MS
from goondan.kernel.broker.state.entities import REFUSED_AT_ONCE, REFUSED_S
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Blob, ErrorPayload, Frame, ReplyTo
from tests.checks import there
from tests.unit.kernel.broker.world import CALL, World, client, host, run, said, waited_for_by, working

MIB = 1 << 20


def event(event_id: str, *, calls: int = 1, size: int = 0, to: str = "reviewer", key: str = "") -> Frame:
    body = AgentEvent(id=event_id, type="user", created_at="2026-01-01T00:00:00Z", input=calls)
    frame = Frame("event", id=f"f-{event_id}", to=to, instance_key=key or event_id, event_id=event_id)
    if size:
        frame.blob = Blob(f"{abs(hash(event_id)):032x}"[-32:], "0" * 64, size)
    else:
        frame.payload = to_raw(body)
    return frame


def asked(event_id: str, **more: Any) -> Frame:
    """The same, asked by the handler of the call, which waits for it."""
    frame = event(event_id, **more)
    frame.call_id, frame.reply_to = CALL, ReplyTo("coder", f"corr-{event_id}")
    return frame


def error(frames: list[Frame]) -> ErrorPayload | None:
    (frame,) = frames
    return from_raw(frame.payload, ErrorPayload) if frame.type == "error" else None


def states(world: World, prefix: str) -> dict[str, int]:
    counted: dict[str, int] = {}
    for name, one in world.router.bus.mailbox.events.items():
        if name.startswith(prefix):
            counted[one.state] = counted.get(one.state, 0) + 1
    return counted


# --- places


def test_one_root_that_asks_four_hundred_leaves_places_for_others() -> None:
    world = working()
    for number in range(400):
        assert error(said(world, host(world), asked(f"r{number}"))) is None
    run(world, 40)
    assert states(world, "r") == {"leased": 127 + 1, "accepted": 400 - 128}, "half with its own turn, and one lent"
    other = client(world, operator=False)
    for number in range(3):
        assert error(said(world, other, event(f"other{number}"))) is None
    run(world)
    assert states(world, "other") == {"leased": 3}, "nobody waits for what another root does"
    assert len(world.agents) <= 256 + 16 + 1


def test_processes_that_are_idle_are_no_way_around_the_shares() -> None:
    world = World(max_live_agents=8)
    for number in range(8):
        world.clients[1].ask(f"c1e{number}", "reviewer", f"idle{number}", calls=0)
    world.settle()
    idle = len(world.agents)
    assert idle >= 5
    world.clients[0].ask("c0e0")
    run(world)
    for number in range(8):
        said(world, host(world), asked(f"r{number}", key=f"idle{number}"))
    run(world)
    assert states(world, "r") == {"leased": 4, "accepted": 4}, "three by its share, one lent"
    assert error(said(world, client(world, operator=False), event("other"))) is None
    world.goes_on(3)
    assert states(world, "other") == {"leased": 1}, "an idle process that waits for a place makes room"


def test_what_an_operator_sends_itself_gets_a_place_when_all_others_are_taken() -> None:
    world = World(max_live_agents=4)
    run(world)
    for number in range(6):
        said(world, client(world, operator=False), event(f"stranger{number}"))
    run(world)
    assert states(world, "stranger") == {"leased": 4, "accepted": 2}
    said(world, client(world), event("person"))
    run(world)
    assert states(world, "person") == {"leased": 1}
    said(world, client(world, operator=False), event("late"))
    run(world)
    assert states(world, "late") == {"accepted": 1}


def test_starts_are_few_at_a_time_and_the_next_session_is_next() -> None:
    world = World()
    run(world)
    flood, other = client(world), client(world)
    for number in range(1500):
        said(world, flood, event(f"flood{number}"))
    told = set(world.supervisor.wanted)
    world.goes_down(world.supervisor)
    assert len(world.supervisor.wanted - told) == MAX_STARTING
    said(world, other, event("other"))
    assert world.router.bus.mailbox.places.waiting == 1500 - MAX_STARTING + 1
    world.supervisor.reconcile()
    first = next(iter(world.agents.values()))
    while first.alive and first.held is None:
        world.pump_up(first)
        world.pump_down(first)
    world.goes_down(world.supervisor)
    assert ("reviewer", "other") in {(p.name, p.instance_key) for p in world.supervisor.wanted}


def test_starts_that_hang_hold_up_nobody_for_longer_than_a_moment() -> None:
    world = World()
    run(world)
    flood, other = client(world), client(world)
    for number in range(MAX_STARTING + 8):
        said(world, flood, event(f"flood{number}"))  # and nobody starts them
    said(world, other, event("other"))
    world.advance(STARTING_S)
    world.goes_down(world.supervisor)
    assert ("reviewer", "other") in {(p.name, p.instance_key) for p in world.supervisor.wanted}


def test_spawned_instances_count_as_what_their_asker_does() -> None:
    world = working(max_live_agents=8)
    for number in range(20):
        frame = Frame("agents.spawn", id=f"s{number}", call_id=CALL, to="reviewer", instance_key=f"s{number}")
        said(world, host(world), frame)
    run(world)
    said(world, client(world, operator=False), event("other"))
    world.goes_on(6)
    assert states(world, "other") == {"leased": 1}
    assert len(world.agents) <= 8 + 1 + 1, "those that are kept for operators, and one that was lent"


def test_a_turn_that_starts_another_instance_lends_it_its_place() -> None:
    world = working(max_live_agents=1)
    frame = Frame("agents.spawn", id="s", call_id=CALL, to="reviewer", instance_key="new")
    assert said(world, host(world), frame) == []
    world.goes_on(3)
    assert ("reviewer", "new") in world.agents
    assert world.router.bus.mailbox.places.lent == 0, "it is idle now"


# --- messages and their bytes


def test_seventeen_large_requests_of_one_root_leave_room_for_others() -> None:
    world = working()
    refused = [error(said(world, host(world), asked(f"r{n}", size=16 * MIB))) for n in range(17)]
    taken = sum(1 for one in refused if one is None)
    assert taken == 7, "half of 256 MiB and of what is kept for operators, as near as 16 MiB fit"
    last = there(refused[-1])
    assert (last.code, last.retry_after_ms) == ("E_OVERLOADED", RETRY_AFTER_MS)
    assert "root 'c0e0'" in last.message and "(quota: root)" in last.message and "268,435,456 in all" in last.message
    assert world.router.bus.refusals["c0e0", "root", "bytes of messages"] == 17 - taken
    assert error(said(world, client(world, operator=False), event("other", size=16 * MIB))) is None


def test_one_sessions_events_leave_room_for_others() -> None:
    world = World(max_open_events=320)
    run(world)
    flood = client(world, operator=False)
    codes = [error(said(world, flood, event(f"flood{number}"))) for number in range(320)]
    assert 195 <= codes.count(None) <= 202, "two thirds of the 300 that are not kept for operators"
    last = there(codes[-1])
    assert "(quota: session)" in last.message
    instances = {key for _, key in world.router.bus.mailbox.instances}
    assert len(instances) == codes.count(None), "what was refused leaves nothing behind"
    assert error(said(world, client(world, operator=False), event("other"))) is None
    for number in range(110):
        said(world, client(world, operator=False), event(f"many{number}"))
    assert error(said(world, client(world, operator=False), event("one more"))) is not None
    assert error(said(world, client(world), event("person"))) is None, "operators have some left"


def test_what_is_not_taken_leaves_no_instance_behind() -> None:
    world = working()
    instances = world.router.bus.mailbox.instances
    before = set(instances)
    mine = client(world)
    assert error(said(world, mine, event("c0e0", key="another"))) is not None, "the id is another sender's"
    waited_for_by(world.router.bus.mailbox.events["c0e0"], *(f"a/{n}" for n in range(32)))
    assert error(said(world, host(world), asked("too deep"))) is not None
    assert error(said(world, mine, event("x" * 300, key="new"))) is not None
    assert set(instances) == before


def test_a_turn_may_ask_one_thing_also_where_its_root_has_used_up_its_share() -> None:
    world = World(max_open_events=320)
    world.clients[0].ask("c0e0")
    run(world)
    sent = [event(f"sent{number}") for number in range(320)]
    for frame in sent:
        frame.call_id = CALL
    refused = [error(said(world, host(world), frame)) for frame in sent]
    assert "(quota: root)" in there(refused[-1]).message
    assert error(said(world, host(world), asked("large", size=MAX_NESTED_BYTES + 1))) is not None
    assert error(said(world, host(world), asked("first"))) is None
    assert error(said(world, host(world), asked("second"))) is not None, "it waits for one already"


def test_a_flood_of_refused_events_is_told_to_come_back_slowly_and_keeps_its_order() -> None:
    world = World(max_open_events=320)
    run(world)
    flood = client(world, operator=False)
    hints = []
    for number in range(320 + 10 * REFUSED_AT_ONCE):
        refused = error(said(world, flood, event(f"flood{number}")))
        if refused is not None:
            hints.append(refused.retry_after_ms or 0)
    assert hints[0] == RETRY_AFTER_MS and hints == sorted(hints) and hints[-1] >= 10 * RETRY_AFTER_MS
    events = world.router.bus.mailbox.events
    for name in [name for name, one in events.items() if one.state == "accepted"]:
        assert world.router._events is not None
        world.router._ends.give_up(events[name], "dead", "E_AGENT_FAILED", "no")
    later = event("later", key="flood319")
    held = error(said(world, flood, later))
    assert held is not None and "has to come first" in held.message
    assert error(said(world, flood, event("flood319"))) is None
    assert error(said(world, flood, later)) is None


@pytest.mark.parametrize("waits", [REFUSED_S + 6, 1.0])
def test_an_event_whose_sender_has_given_it_up_holds_up_no_other(waits: float) -> None:
    world = World(max_open_events=320)
    run(world)
    flood = client(world, operator=False)
    for number in range(320):
        said(world, flood, event(f"flood{number}"))
    events = world.router.bus.mailbox.events
    for name in [name for name, one in events.items() if one.state == "accepted"]:
        world.router._ends.give_up(events[name], "dead", "E_AGENT_FAILED", "no")
    world.commit()
    world.now += waits
    held = error(said(world, flood, event("later", key="flood319")))
    assert (held is None) == (waits > REFUSED_S)


# --- nothing of it is lost


def test_after_a_new_broker_the_shares_are_what_they_were() -> None:
    world = working(max_live_agents=8)
    for number in range(6):
        said(world, host(world), asked(f"r{number}"))
    run(world)
    mailbox = world.router.bus.mailbox
    before = mailbox.places.pool.of_root("c0e0")
    assert before == 4
    world.kill_broker()
    world.goes_on(4)
    mailbox = world.router.bus.mailbox
    leased = [one for one in mailbox.events.values() if one.state == "leased"]
    assert {one.root for one in leased} == {"c0e0"}
    held = mailbox.places.pool.held + mailbox.places.lent
    assert held == len(leased)
    assert mailbox.places.pool.of_root("c0e0") + mailbox.places.lent == held


def test_when_all_is_done_nothing_is_held() -> None:
    world = World(max_live_agents=2, handlers_ask=True)
    for number in range(12):
        world.clients[number % 2].ask(f"c{number % 2}e{number}", "coder", f"k{number % 5}", calls=number % 3)
    world.settle()
    mailbox = world.router.bus.mailbox
    assert (mailbox.open.held, mailbox.held.held) == (0, 0)
    assert (mailbox.places.pool.held, mailbox.places.lent, mailbox.places.waiting) == (0, 0, 0)
    assert all(agent.held is None for agent in world.agents.values())
