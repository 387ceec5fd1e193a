"""Answers to requests whose asker goes on: events of their own, which survive what events survive."""

from __future__ import annotations

import random
from collections import Counter
from typing import Final

import pytest

from goondan.kernel.broker.state.entities import CLIENTS
from goondan.kernel.broker.state.records import event_subject
from goondan.schemas.wire.codec import decode, to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame, ReplyTo
from tests.checks import there
from tests.unit.kernel.broker.histories import KILLS, NAMES, SETTLED, check, perform
from tests.unit.kernel.broker.test_durability import subjects
from tests.unit.kernel.broker.world import World, run, said


def ask(
    world: World,
    name: str = "r1",
    target: str = "reviewer",
    deadline_ms: int | None = None,
    *,
    asynchronous: bool = True,
) -> list[Frame]:
    """`coder/k` asks, without waiting if `asynchronous`."""
    event = AgentEvent(id=name, type="agent.request", created_at="2026-01-01T00:00:00Z", input=0)
    frame = Frame("event", id="f", to=target, instance_key="k", event_id=name, payload=to_raw(event))
    frame.reply_to, frame.asynchronous = ReplyTo("coder", f"corr:{name}"), asynchronous
    frame.deadline_ms = deadline_ms
    return said(world, world.router.bus.presence.principals["agent/coder/k"], frame)


def wait_for(world: World, name: str = "r1", *, still: bool = True) -> list[Frame]:
    """`coder/k` asks and waits; not `still`: it waits no more."""
    return ask(world, name, asynchronous=not still)


@pytest.mark.parametrize("killed", ["nobody", "broker", "asker", "both"])
def test_it_is_an_event_of_the_asker_and_survives(world: World, killed: str) -> None:
    ask(world)
    run(world)
    assert world.router.bus.mailbox.events["r1:answer"].state == "accepted"
    assert "r1" not in world.router.bus.mailbox.events
    if killed in ("broker", "both"):
        world.kill_broker()
    if killed in ("asker", "both"):
        world.kill_agent(world.agents["coder", "k"])
    run(world)
    answer = world.router.bus.mailbox.events["r1:answer"]
    assert (answer.in_reply_to, answer.content.from_, answer.instance.address) == ("corr:r1", "reviewer", "coder/k")
    assert (answer.root, answer.session) == ("e1", world.router.bus.mailbox.events["e1"].session)
    world.host.work()
    world.settle()
    assert world.stores["coder", "k"].completed == ["e1", "r1:answer"]
    assert not [subject for subject in subjects(world) if subject.startswith("event:")], "nothing of it is left"


def test_a_question_that_nobody_waits_for_is_one_for_the_next_broker_too(world: World) -> None:
    ask(world)
    world.kill_broker()
    run(world)
    assert world.router.bus.mailbox.events["r1:answer"].in_reply_to == "corr:r1"


def test_one_that_waits_in_the_journal_only_is_told_to_the_turn_that_begins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goondan.kernel.broker.state.mailbox.KEPT_BYTES", 0)
    world.clients[0].ask("e2")
    ask(world)
    run(world)
    assert world.router.bus.mailbox.events["r1:answer"].content_here is None
    world.host.work()
    world.settle()
    assert world.stores["coder", "k"].completed == ["e1", "e2", "r1:answer"]
    assert not world.router.bus.faults


def test_the_end_and_the_answer_are_one_write(world: World) -> None:
    ask(world)
    world.dies = "before"
    run(world)
    left = {subject for subject in subjects(world) if subject.startswith("event:")}
    assert (event_subject("r1") in left) != (event_subject("r1:answer") in left)


def test_a_repeat_is_acknowledged_and_makes_no_second_answer(world: World) -> None:
    ask(world)
    run(world)
    assert [frame.type for frame in ask(world)] == ["ack"]
    run(world)
    assert [name for name in world.router.bus.mailbox.events if name.startswith("r1")] == ["r1:answer"]


def test_it_is_no_wait_and_closes_no_cycle(world: World) -> None:
    assert [frame.type for frame in ask(world)] == ["ack"]
    turn = there(world.router.bus.mailbox.instances["coder", "k"].leased)
    assert turn.work.requests == {}
    request = world.router.bus.mailbox.events["r1"]
    assert (request.content.chain, request.asking) == (None, None)


def test_no_sender_names_an_event_like_an_answer(world: World) -> None:
    client = next(c for c in world.router.bus.presence.connections[CLIENTS].values())
    frame = Frame("event", id="f", to="coder", instance_key="k", event_id="r1:answer", payload=to_raw(None))
    (refusal,) = said(world, client, frame)
    assert refusal.type == "error"
    assert b"E_FRAME_INVALID" in bytes(refusal.payload)


# --- of a turn that waits no more


def answers(world: World, name: str = "r1") -> list[str]:
    """Where an answer is: in the lane of the turn that waits, or among the events."""
    lane, events = world.router.bus.mailbox.instances["coder", "k"].answers, world.router.bus.mailbox.events
    return [place for place, there in (("lane", {*lane}), ("event", {*events})) if f"{name}:answer" in there]


@pytest.mark.parametrize("killed", ["nobody", "broker", "asker", "both"])
def test_who_waits_no_more_gets_the_answer_as_an_event_exactly_once(world: World, killed: str) -> None:
    (first,) = wait_for(world)
    (told,) = wait_for(world, still=False)
    assert (first.asynchronous, told.type, told.stage, told.asynchronous) == (False, "ack", "accepted", True)
    turn = there(world.router.bus.mailbox.instances["coder", "k"].leased)
    assert turn.work.requests == {}, "it closes no circle, and is not cancelled with the turn"
    if killed in ("broker", "both"):
        world.kill_broker()
    if killed in ("asker", "both"):
        world.kill_agent(world.agents["coder", "k"])
    run(world)
    assert answers(world) == ["event"]
    (again,) = wait_for(world)
    assert again.asynchronous, "the turn that asks again is told at once, and does not wait"
    world.host.work()
    world.settle()
    assert world.stores["coder", "k"].completed == ["e1", "r1:answer"]
    assert not [subject for subject in subjects(world) if subject.startswith("event:")], "nothing of it is left"


def test_before_the_journal_has_it_nobody_is_told(world: World) -> None:
    wait_for(world)
    world.slow_disk = True
    assert wait_for(world, still=False) == []
    assert wait_for(world) == [], "nor a repeat"
    world.settle_next()
    told = [decode(data) for _, _, data in world.router.bus.out]
    assert [frame.asynchronous for frame in told if frame.event_id == "r1" and frame.type == "ack"] == [True, True]


def test_what_the_journal_does_not_have_the_next_broker_does_not_know(world: World) -> None:
    wait_for(world)
    world.dies = "before"
    wait_for(world, still=False)
    assert world.brokers_killed == 1
    run(world)
    assert [frame.asynchronous for frame in wait_for(world)] == [False, False], "a turn waits, and here is its answer"
    assert answers(world) == ["lane"]


def test_an_answer_that_is_there_is_the_one_of_the_turn_that_waits(world: World) -> None:
    wait_for(world)
    run(world)
    assert [(frame.type, frame.asynchronous) for frame in wait_for(world, still=False)] == [
        ("ack", False),
        ("event", False),
    ]
    assert answers(world) == ["lane"]


def test_who_waits_no_more_can_be_asked_by_those_that_it_asked(world: World) -> None:
    wait_for(world)
    asked = world.router.bus.mailbox.instances["reviewer", "k"]
    while asked.leased is None:
        assert any(world.pump_up(actor) or world.pump_down(actor) for actor in world.actors())
        world.supervisor.reconcile()
    assert asked.conn is not None
    back = Frame("event", id="f", to="coder", instance_key="k", event_id="r2", payload=to_raw(None))
    back.reply_to = ReplyTo("reviewer", "corr:r2")
    (refusal,) = said(world, asked.conn, back)
    assert b"E_AGENT_CYCLE" in bytes(refusal.payload)
    wait_for(world, still=False)
    assert [frame.type for frame in said(world, asked.conn, back)] == ["ack"]


def test_too_many_answers_on_the_way_leave_no_room_to_lose_patience(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goondan.kernel.broker.routing.intake.MAX_LATE", 1)
    wait_for(world)
    wait_for(world, still=False)
    (refusal,) = wait_for(world, "r2")
    assert b"E_TOOL_LIMIT" in bytes(refusal.payload)


QUIET: Final = tuple(name for name in (*NAMES, *KILLS, *SETTLED, "advance", "advance") if name != "cancel")


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_a_turn_that_asks_has_its_answer_once_in_one_of_both_ways_whatever_breaks(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    if first % 40 == 0:
        monkeypatch.setattr("goondan.kernel.broker.state.mailbox.KEPT_BYTES", 0)
    ways: Counter[str] = Counter()
    for number in range(first, first + 20):
        dice = random.Random(number)
        world = World(max_live_agents=dice.choice([1, 2, 256]))
        world.patience_s, world.slow_disk = dice.choice([0.2, 1.0, 9.0]), number % 3 == 1
        for _ in range(dice.randrange(40, 200)):
            perform(world, dice.choice(QUIET), dice.randrange(8) or 1)
        world.settle(1200)
        check(world)
        for (agent, _), store in world.stores.items():
            for event_id in store.completed if agent == "coder" else ():
                if not event_id.endswith(":answer"):
                    way = store.asked[event_id]
                    later = store.completed.count(f"{event_id}~q:answer")
                    assert later == (way == "later"), (
                        f"history {number}: {event_id} has its answer {way}, and {later} events"
                    )
                    ways[way] += 1
    assert min(ways["answer"], ways["later"]) > 0, ways
