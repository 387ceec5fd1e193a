"""Changesets in the broker: who may ask, what a repeat is, and when a worktree is over."""

from __future__ import annotations

import pytest

from goondan.features.changesets.broker import MAX_ASKERS, Changesets
from goondan.features.changesets.wire import (
    FEATURE,
    ChangesetAnswered,
    ChangesetAsked,
    ChangesetDone,
    ChangesetsHeld,
    ChangesetsOver,
    CommitChangeset,
    CommittedChangeset,
    HeldChangeset,
    OpenChangeset,
    OpenedChangeset,
    ToBroker,
    WhichChangesets,
    decode_to_supervisor,
)
from goondan.kernel.broker.state.bus import RETURN_S
from goondan.kernel.broker.state.parts import LISTS_BYTES
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.control import ForFeature
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import ErrorPayload, Frame, Hello
from tests.unit.kernel.broker.test_acting import from_supervisor
from tests.unit.kernel.broker.world import World, code, part_of, tell, working

OPENED = OpenedChangeset("0123456789abcdef", "git:1", "/work")


def ask(world: World, call_id: str | None = "t1/c1.1", frame_id: str = "f1", **more: object) -> list[Frame]:
    """The agent whose turn runs asks for a changeset; what it is answered at once."""
    conn = world.peer()
    given = {"type": "changeset.open", "payload": to_raw(OpenChangeset("why")), **more}
    return tell(world, Frame(id=frame_id, call_id=call_id, **given), conn)  # type: ignore[arg-type]


def heard(world: World) -> list[object]:
    """What the supervisor was told about changesets."""
    conn = world.peer()
    tell(world, Frame("pong", id="p"), conn)  # what the broker has to say leaves with the next frame
    for actor in world.actors():
        world.goes_down(actor)
    return [decode_to_supervisor(one.payload) for one in world.supervisor.for_features if one.feature == FEATURE]


def asked(world: World) -> list[ChangesetAsked]:
    return [message for message in heard(world) if isinstance(message, ChangesetAsked)]


def say(world: World, message: ToBroker) -> list[Frame]:
    """A message of the supervisor's half; what the agent gets."""
    return from_supervisor(world, ForFeature(FEATURE, to_raw(message)))


def test_a_question_reaches_the_supervisor_and_its_answer_the_agent() -> None:
    world = working()
    assert ask(world) == []

    (message,) = asked(world)
    event = world.router.bus.mailbox.instances["coder", "k"].leased
    assert event is not None
    assert (message.wish.agent, message.wish.instance_key, message.wish.event_id) == ("coder", "k", event.id)
    assert message.wish.open == OpenChangeset("why")
    (reply,) = say(world, ChangesetAnswered(ChangesetDone(request=message.wish.request, opened=OPENED)))
    assert (reply.type, reply.in_reply_to) == ("reply", "f1")
    assert from_raw(reply.payload, OpenedChangeset) == OPENED


def test_a_repeat_is_the_same_question_and_everybody_who_waits_is_answered() -> None:
    world = working()
    ask(world)
    ask(world)
    ask(world, frame_id="f2")
    (message,) = asked(world)

    done = ChangesetDone(request=message.wish.request, error=error_payload("E_CHANGESET_IO", "no repository"))
    answers = say(world, ChangesetAnswered(done))

    assert [answer.in_reply_to for answer in answers] == ["f1", "f2"]
    assert {from_raw(answer.payload, ErrorPayload).code for answer in answers} == {"E_CHANGESET_IO"}
    assert say(world, ChangesetAnswered(done)) == []


def test_what_an_agent_says_of_itself_is_not_believed() -> None:
    world = working()
    commit = to_raw(CommitChangeset("0123456789abcdef", "x"))
    ask(world, type="changeset.commit", payload=commit, from_="other", to="other", instance_key="z", event_id="e-9")

    (message,) = asked(world)
    assert (message.wish.agent, message.wish.instance_key) == ("coder", "k")
    assert message.wish.event_id != "e-9"
    assert message.wish.request.startswith("changeset.commit coder/k ")


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ({"call_id": None}, "E_FRAME_INVALID"),
        ({"call_id": "x" * 2000}, "E_FRAME_INVALID"),
        ({"payload": to_raw("no object")}, "E_FRAME_INVALID"),
        ({"payload": to_raw(OpenChangeset("x" * LISTS_BYTES))}, "E_FRAME_TOO_LARGE"),
    ],
)
def test_what_is_no_question_is_refused(more: dict[str, object], refusal: str) -> None:
    world = working()
    assert code(ask(world, **more)) == refusal  # type: ignore[arg-type]
    assert asked(world) == []


def test_only_a_turn_that_runs_may_ask() -> None:
    world = working()
    instance = world.router.bus.mailbox.instances["coder", "k"]
    assert instance.conn is not None and instance.leased is not None
    tell(
        world,
        Frame("ack", id="rel", stage="release", event_id=instance.leased.id, epoch=instance.epoch),
        instance.conn,
    )
    instance.leased = None

    assert code(ask(world)) == "E_LEASE_LOST"
    assert asked(world) == []


def test_without_a_supervisor_nobody_can_change_the_bundle() -> None:
    world = working()
    world.router.bus.control = None
    world.now = world.router.bus.started_ms / 1000 + RETURN_S + 1

    assert code(ask(world)) == "E_CHANGESET_IO"


def test_one_question_has_so_many_askers() -> None:
    world = working()
    for number in range(MAX_ASKERS):
        assert ask(world, frame_id=f"f{number}") == []
    assert code(ask(world, frame_id="more")) == "E_OVERLOADED"


def test_a_supervisor_that_comes_back_is_asked_again() -> None:
    world = working()
    ask(world)
    control = world.router.bus.control
    assert control is not None
    part_of(world.router, Changesets).here(control, Hello("", ""), world.now)
    assert [type(message) for message in heard(world)].count(ChangesetAsked) == 2
    assert any(isinstance(message, WhichChangesets) for message in heard(world))


@pytest.mark.requirement("BUNDLE-08")
def test_a_worktree_is_over_with_its_event_and_not_before() -> None:
    world = working()
    ask(world)
    (message,) = asked(world)
    say(world, ChangesetAnswered(ChangesetDone(request=message.wish.request, opened=OPENED)))

    world.router.tick(world.now)
    assert not any(isinstance(message, ChangesetsOver) for message in heard(world))

    # What another broker was told: one of an event that nobody knows.
    held = [HeldChangeset("0123456789abcdef", message.wish.event_id), HeldChangeset("fedcba9876543210", "gone")]
    say(world, ChangesetsHeld(held))
    world.router.tick(world.now)
    world.router.tick(world.now)
    assert [one for one in heard(world) if isinstance(one, ChangesetsOver)] == [ChangesetsOver(["fedcba9876543210"])]


def test_a_worktree_for_a_question_of_an_earlier_broker_is_asked_about_and_over_as_well() -> None:
    """The earlier one was killed, then the agent; this one had asked which worktrees there are before it was made."""
    world = working()
    say(world, ChangesetsHeld([]))
    before = heard(world).count(WhichChangesets())
    say(world, ChangesetAnswered(ChangesetDone(request="changeset.open coder/z t0/c1.1", opened=OPENED)))
    assert heard(world).count(WhichChangesets()) == before + 1

    say(world, ChangesetsHeld([HeldChangeset(OPENED.changeset_id, "gone")]))
    world.router.tick(world.now)
    assert [one for one in heard(world) if isinstance(one, ChangesetsOver)] == [ChangesetsOver([OPENED.changeset_id])]


def test_a_committed_one_is_not_held_any_more() -> None:
    world = working()
    ask(world)
    (opening,) = asked(world)
    say(world, ChangesetAnswered(ChangesetDone(request=opening.wish.request, opened=OPENED)))
    ask(world, "t1/c1.2", "f2", type="changeset.commit", payload=to_raw(CommitChangeset(OPENED.changeset_id)))
    committed = CommittedChangeset(status="ok", changeset_id=OPENED.changeset_id, base_ref="git:1", new_ref="git:2")
    (reply,) = say(world, ChangesetAnswered(ChangesetDone(request=asked(world)[-1].wish.request, committed=committed)))

    assert from_raw(reply.payload, CommittedChangeset) == committed
    assert part_of(world.router, Changesets)._held == {}
