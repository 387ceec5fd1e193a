"""Answers to requests whose asker goes on: events of their own, which survive what events survive."""

from __future__ import annotations

import pytest

from kernel.broker.entities import CLIENTS
from kernel.broker.journal.records import event_subject
from schemas.codec import to_raw
from schemas.frames import AgentEvent, Frame, ReplyTo
from tests.unit.kernel.broker.test_durability import run, said, subjects
from tests.unit.kernel.broker.world import World


def ask(world: World, name: str = "r1", target: str = "reviewer", deadline_ms: int | None = None) -> list[Frame]:
    """`coder/k` asks without waiting."""
    event = AgentEvent(id=name, type="agent.request", created_at="2026-01-01T00:00:00Z", input=0)
    frame = Frame("event", id="f", to=target, instance_key="k", event_id=name, payload=to_raw(event))
    frame.reply_to, frame.asynchronous, frame.deadline_ms = ReplyTo("coder", f"corr:{name}"), True, deadline_ms
    return said(world, world.router.bus.presence.principals["agent/coder/k"], frame)


@pytest.fixture
def world() -> World:
    """`coder/k` works on `e1`."""
    made = World()
    made.clients[0].ask("e1")
    run(made)
    return made


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
    monkeypatch.setattr("kernel.broker.contents.KEPT_BYTES", 0)
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
    turn = world.router.bus.mailbox.instances["coder", "k"].leased
    assert turn is not None
    assert turn.work.requests == {}
    request = world.router.bus.mailbox.events["r1"]
    assert (request.content.chain, request.asking) == (None, None)


def test_no_sender_names_an_event_like_an_answer(world: World) -> None:
    client = next(c for c in world.router.bus.presence.connections[CLIENTS].values())
    frame = Frame("event", id="f", to="coder", instance_key="k", event_id="r1:answer", payload=to_raw(None))
    (refusal,) = said(world, client, frame)
    assert refusal.type == "error"
    assert b"E_FRAME_INVALID" in bytes(refusal.payload)
