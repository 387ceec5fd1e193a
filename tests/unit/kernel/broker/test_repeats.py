"""Events that have ended and are known to the journal only: a late repeat is told what became of them."""

from __future__ import annotations

import hashlib

import pytest
from msgspec import Raw

from goondan.kernel.broker.state.entities import CLIENTS, Connection
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Blob, Frame, ReplyTo
from tests.unit.kernel.broker.test_completions import from_host
from tests.unit.kernel.broker.world import World, code, outgoing, working


def ended(world: World) -> None:
    """Every event of the world has its end."""
    for _ in range(4):
        world.flow(*world.actors())
        world.host.work()


def asker(world: World) -> Connection:
    return next(iter(world.router.bus.presence.connections[CLIENTS].values()))


def repeat(
    world: World,
    event_id: str,
    *,
    key: str = "k",
    digest: str | None = None,
    text: object = 1,
    blob: Blob | None = None,
) -> list[Frame]:
    """What the client is told when it sends the event that it has asked, or another one, under the same id."""
    frame = Frame("event", id="r", to="coder", instance_key=key, event_id=event_id, reply_to=ReplyTo("client", "r"))
    frame.digest, frame.blob = digest, blob
    if blob is None:
        frame.payload = payload_of(event_id, text)
    return [sent for _, _, sent in outgoing(world, asker(world), frame) if sent.in_reply_to == "r"]


def payload_of(event_id: str, text: object) -> Raw:
    return to_raw(AgentEvent(id=event_id, type="user", created_at="2026-01-01T00:00:00Z", input=text))


def test_a_repeat_of_an_event_that_has_ended_is_not_a_second_event() -> None:
    world = working()
    from_host(world, "event")
    ended(world)
    assert world.router.bus.mailbox.events == {}
    (ack,) = from_host(world, "event")
    assert (ack.type, ack.stage, ack.event_id) == ("ack", "accepted", "e~completed")
    assert world.router.bus.mailbox.events == {}


def test_who_still_wants_the_answer_gets_it_from_a_new_broker() -> None:
    world = working()
    ended(world)
    world.kill_broker()
    ended(world)
    ack, answer = repeat(world, "c0e0")
    assert (ack.type, answer.type, answer.event_id) == ("ack", "event", "c0e0:answer")
    assert from_raw(answer.payload, AgentEvent).answer is not None


def test_who_still_wants_an_answer_that_is_no_longer_kept_is_told() -> None:
    world = working()
    ended(world)
    world.journal._answers.clear()
    assert code(repeat(world, "c0e0")) == "E_ANSWER_GONE"


def test_who_did_not_wait_may_come_back_for_the_answer() -> None:
    world = working()
    payload = payload_of("quiet", 1)
    frame = Frame("event", id="q", to="coder", instance_key="k", event_id="quiet", payload=payload)
    outgoing(world, asker(world), frame)
    ended(world)
    assert world.state("quiet") == "done"
    world.kill_broker()
    ended(world)
    assert [one.type for one in repeat(world, "quiet")] == ["ack", "event"]


def test_another_event_under_a_known_id_is_refused() -> None:
    world = working()
    assert code(repeat(world, "c0e0", digest="other")) == "E_FRAME_INVALID"
    assert code(repeat(world, "c0e0", key="other")) == "E_FRAME_INVALID"
    ended(world)
    assert code(repeat(world, "c0e0", digest="other")) == "E_FRAME_INVALID"
    assert code(repeat(world, "c0e0", key="other")) == "E_FRAME_INVALID"


@pytest.mark.parametrize("over", [False, True], ids=["open", "ended"])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "restarted"])
def test_another_content_under_a_known_id_is_refused_without_a_digest(over: bool, restarted: bool) -> None:
    world = working()
    if over:
        ended(world)
    if restarted:
        world.kill_broker()
        ended(world)
    assert code(repeat(world, "c0e0", text="something else")) == "E_FRAME_INVALID"
    assert repeat(world, "c0e0")[0].type == "ack"


def test_the_same_bytes_in_a_file_are_the_same_content() -> None:
    world = working()
    data = bytes(payload_of("c0e0", 1))
    same = Blob(file="0" * 32, digest=hashlib.sha256(data).hexdigest(), size=len(data))
    assert repeat(world, "c0e0", blob=same)[0].type == "ack"
    other = Blob(file="1" * 32, digest="0" * 64, size=len(data))
    assert code(repeat(world, "c0e0", blob=other)) == "E_FRAME_INVALID"


@pytest.mark.parametrize("bad", ["a\x1b[2J", "a\x9b2J", "a\u202eb", "a\u200bb", "a\tb", "", "x" * 257])
@pytest.mark.parametrize("field", ["id", "event_id", "instance_key", "correlation_id"])
def test_a_name_that_is_not_seen_is_refused(field: str, bad: str) -> None:
    if field == "id" and bad == "":
        return  # a frame may be without an id
    if field == "correlation_id" and len(bad) > 256:
        bad *= 2
    world = working()
    frame = Frame("event", id="r", to="coder", instance_key="k", event_id="new", payload=payload_of("new", 1))
    frame.reply_to = ReplyTo("client", bad if field == "correlation_id" else "r")
    if field != "correlation_id":
        setattr(frame, field, bad)
    told = outgoing(world, asker(world), frame)
    assert code([sent for _, _, sent in told if sent.type == "error"]) == "E_FRAME_INVALID"
    assert "new" not in world.router.bus.mailbox.events
