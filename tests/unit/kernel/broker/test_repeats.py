"""Events that have ended and are known to the journal only: a late repeat is told what became of them."""

from __future__ import annotations

from kernel.broker.entities import CLIENTS
from schemas.codec import decode, encode, from_raw, to_raw
from schemas.frames import AgentEvent, ErrorPayload, Frame, ReplyTo
from tests.unit.kernel.broker.test_completions import from_host, working
from tests.unit.kernel.broker.world import World


def ended(world: World) -> None:
    """Every event of the world has its end."""
    for _ in range(4):
        for actor in world.actors():
            while world.pump_up(actor) or world.pump_down(actor):
                pass
        world.host.work()


def repeat(world: World, event_id: str, *, key: str = "k", digest: str | None = None) -> list[Frame]:
    connection = next(iter(world.router.bus.presence.connections[CLIENTS].values()))
    frame = Frame("event", id="r", to="coder", instance_key=key, event_id=event_id, reply_to=ReplyTo("client", "r"))
    frame.digest = digest
    world.router.receive(connection, encode(frame), world.now)
    world.commit()
    told = [decode(data) for _, _, data in world.router.bus.out]
    world.router.bus.out.clear()
    return [frame for frame in told if frame.in_reply_to == "r"]


def code(frames: list[Frame]) -> str:
    (frame,) = frames
    assert frame.type == "error"
    return from_raw(frame.payload, ErrorPayload).code


def test_a_repeat_of_an_event_that_has_ended_is_not_a_second_event() -> None:
    world, _ = working()
    from_host(world, "event")
    ended(world)
    assert world.router.bus.mailbox.events == {}
    (ack,) = from_host(world, "event")
    assert (ack.type, ack.stage, ack.event_id) == ("ack", "accepted", "e~completed")
    assert world.router.bus.mailbox.events == {}


def test_who_still_wants_the_answer_gets_it_from_a_new_broker() -> None:
    world, _ = working()
    ended(world)
    world.kill_broker()
    ended(world)
    ack, answer = repeat(world, "c0e0")
    assert (ack.type, answer.type, answer.event_id) == ("ack", "event", "c0e0:answer")
    assert from_raw(answer.payload, AgentEvent).answer is not None


def test_who_still_wants_an_answer_that_is_no_longer_kept_is_told() -> None:
    world, _ = working()
    ended(world)
    world.journal._answers.clear()
    assert code(repeat(world, "c0e0")) == "E_ANSWER_GONE"


def test_who_did_not_wait_may_come_back_for_the_answer() -> None:
    world, _ = working()
    client = next(iter(world.router.bus.presence.connections[CLIENTS].values()))
    payload = to_raw(AgentEvent(id="quiet", type="user", created_at="2026-01-01T00:00:00Z", input=0))
    frame = Frame("event", id="q", to="coder", instance_key="k", event_id="quiet", payload=payload)
    world.router.receive(client, encode(frame), world.now)
    ended(world)
    assert world.state("quiet") == "done"
    world.kill_broker()
    ended(world)
    assert [one.type for one in repeat(world, "quiet")] == ["ack", "event"]


def test_another_event_under_a_known_id_is_refused() -> None:
    world, _ = working()
    assert code(repeat(world, "c0e0", digest="other")) == "E_FRAME_INVALID"
    assert code(repeat(world, "c0e0", key="other")) == "E_FRAME_INVALID"
    ended(world)
    assert code(repeat(world, "c0e0", digest="other")) == "E_FRAME_INVALID"
    assert code(repeat(world, "c0e0", key="other")) == "E_FRAME_INVALID"
