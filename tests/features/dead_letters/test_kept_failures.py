"""Messages that failed by no fault of their own: dead letters, which a person sends again."""

from __future__ import annotations

import pytest

from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AgentEvent, Answer, ErrorPayload, Frame
from tests.unit.kernel.broker.test_durability import admin, agent
from tests.unit.kernel.broker.world import World, request, run, said


def fail_held(world: World, name: str, cause: str | None) -> None:
    """The holder of this agent's event ends it as failed, and says why."""
    instance = world.router.bus.mailbox.instances[name, "k"]
    assert instance.leased is not None
    assert instance.conn is not None
    answer = Answer(turn_id="t", status="failed", error=ErrorPayload("E_X", "no"))
    told = AgentEvent(id="a", type="agent.response", created_at="2026-01-01T00:00:00Z", answer=answer)
    frame = Frame("ack", id="d", stage="failed", event_id=instance.leased.id, epoch=instance.epoch, cause=cause)
    frame.payload = to_raw(told)
    assert next(iter(said(world, instance.conn, frame))).type == "ack"


def test_what_fails_by_a_cause_outside_of_it_is_a_dead_letter_that_can_be_sent_again() -> None:
    world = World()
    client = world.clients[0]
    client.ask("e1")
    run(world)
    fail_held(world, "coder", "E_DISK_FULL: no room")
    run(world)
    assert len(client.answers["e1"]) == 1, "its sender is told all the same"
    world.kill_broker()
    run(world)
    (line,) = admin(world, "dead.list")["events"]
    assert (line["eventId"], line["cause"]) == ("e1", "E_DISK_FULL: no room")
    assert admin(world, "dead.requeue", eventId="e1")["newEventId"] == "e1~requeued"
    world.kill_agent(agent(world))
    world.host.work()
    world.settle()
    assert world.state("e1~requeued") == "done"


@pytest.mark.parametrize("why", ["no cause", "cancelled", "no room"])
def test_what_fails_for_another_reason_is_none(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.clients[0].ask("e1")
    run(world)
    event = world.router.bus.mailbox.events["e1"]
    event.cancelled = why == "cancelled"
    if why == "no room":
        monkeypatch.setattr(world.router.bus.mailbox, "may_die", lambda event: False)
    fail_held(world, "coder", None if why == "no cause" else "E_DISK_FULL: no room")
    assert world.state("e1") == ("cancelled" if why == "cancelled" else "failed")
    assert admin(world, "dead.list")["events"] == []


def test_what_a_turn_waits_for_is_none_because_that_turn_is_told() -> None:
    world = World()
    world.clients[0].ask("e1")
    run(world)
    said(world, world.router.bus.presence.principals["agent/coder/k"], request("r1", call_id=None, calls=1))
    run(world)
    fail_held(world, "reviewer", "E_MODEL_FAILED: gone")
    assert world.router.bus.mailbox.events["r1"].state == "failed"
    assert admin(world, "dead.list")["events"] == []
