"""Wishes for a restart in the broker: granted once, at most three a minute, carried out when the step has ended."""

from __future__ import annotations

import msgspec
import pytest

from goondan.features.restart.broker import (
    MAX_LOOKS,
    MAX_WISHES,
    TOOL,
    WINDOW_S,
    FreshStarts,
    Restarts,
    RestartWished,
)
from goondan.kernel.broker.state.bus import MAX_ASKERS, RETURN_S
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.control import (
    BeginAnew,
    BundleChecked,
    CheckBundle,
    RestartAgents,
    RestartDue,
    RestartUndone,
    Retire,
)
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import ErrorPayload, Frame, RestartAnswer, RestartRequest, Shutdown
from tests.unit.kernel.broker.test_acting import answer, from_supervisor
from tests.unit.kernel.broker.world import World, code, part_of, run, tell, working


def ask(world: World, call_id: str = "t1/c1") -> list[Frame]:
    """The agent whose turn runs wishes a restart; what it is answered at once."""
    conn = world.peer()
    conn.allowed |= {TOOL}
    return tell(
        world, Frame("restart", id=f"f-{call_id}", call_id=call_id, payload=to_raw(RestartRequest("why"))), conn
    )


def checked(world: World, error: ErrorPayload | None = None) -> list[Frame]:
    """The supervisor says what it thinks of the newest wish; what the agent is answered."""
    for actor in world.actors():
        world.goes_down(actor)
    asked = world.supervisor.restarts[-1]
    assert isinstance(asked, CheckBundle)
    return from_supervisor(world, BundleChecked(asked.name, error))


def granted(frames: list[Frame]) -> bool:
    (reply,) = frames
    assert reply.type == "reply", reply
    return from_raw(reply.payload, RestartAnswer).comes


def due(world: World) -> int:
    """How often the supervisor was told to restart."""
    for actor in world.actors():
        world.goes_down(actor)
    return sum(isinstance(message, RestartDue) for message in world.supervisor.restarts)


def release(world: World) -> None:
    """The turn gives its event back at the end of its step."""
    instance = world.router.bus.mailbox.instances["coder", "k"]
    assert instance.leased is not None
    assert instance.conn is not None
    frame = Frame("ack", id="rel", stage="release", event_id=instance.leased.id, epoch=instance.epoch)
    tell(world, frame, instance.conn)


@pytest.mark.requirement("RESTART-03")
def test_a_wish_is_checked_journaled_granted_and_carried_out_at_the_end_of_the_step() -> None:
    world = working()
    assert ask(world) == []
    assert granted(checked(world))
    assert len(part_of(world.router, Restarts)._wishes) == 1
    assert due(world) == 0
    assert not world.router.bus.closing
    release(world)
    assert due(world) == 1
    # Nothing is handed out any more: the turn goes on after the restart.
    assert world.router.bus.closing
    assert world.router.bus.mailbox.instances["coder", "k"].leased is None
    assert world.router.bus.mailbox.events["c0e0"].state == "accepted"


def test_an_end_of_the_turn_is_an_end_of_its_step() -> None:
    world = working()
    ask(world)
    checked(world)
    answer(world, "coder", "k")
    world.after_round()
    assert due(world) == 1


def test_asked_again_under_the_same_call_it_is_the_same_wish() -> None:
    world = working()
    assert ask(world) == ask(world) == []
    frames = checked(world)
    assert [frame.in_reply_to for frame in frames] == ["f-t1/c1"], "the same frame, sent again"
    assert granted(ask(world))
    assert sum(isinstance(message, CheckBundle) for message in world.supervisor.restarts) == 1
    release(world)
    assert due(world) == 1


def test_what_the_bundle_has_against_it_is_the_answer_and_nothing_stays() -> None:
    world = working()
    ask(world)
    assert code(checked(world, error_payload("E_CONFIG_INVALID_VALUE", "wrong"))) == "E_CONFIG_INVALID_VALUE"
    assert part_of(world.router, Restarts)._wishes == {}
    release(world)
    assert due(world) == 0
    assert not world.router.bus.closing


def test_a_full_disk_refuses_a_wish() -> None:
    world = working()
    ask(world)
    world.full = True
    assert code(checked(world)) == "E_DISK_FULL"
    assert part_of(world.router, Restarts)._wishes == {}


def test_at_most_three_a_minute() -> None:
    world = working()
    for number in range(MAX_WISHES):
        ask(world, f"t1/c{number}")
        assert granted(checked(world))
    (refused,) = ask(world, "t1/more")
    error = from_raw(refused.payload, ErrorPayload)
    assert (error.code, error.suggestion) == ("E_RESTART_REFUSED", f"Ask again in {WINDOW_S:.0f} s.")
    assert granted(ask(world, "t1/c0"))  # which is no new one
    world.now += WINDOW_S
    assert ask(world, "t1/more") == []
    assert granted(checked(world))


def test_a_bundle_that_may_not_run_is_not_read_without_end() -> None:
    """A wish that was refused was forgotten, so a model in a loop kept a processor busy with reading the bundle."""
    world = working()
    for number in range(MAX_LOOKS):
        assert ask(world, f"t1/c{number}") == []
        assert code(checked(world, error_payload("E_CONFIG_SYNTAX", "no YAML"))) == "E_CONFIG_SYNTAX"
    assert code(ask(world, "t1/more")) == "E_RESTART_REFUSED"
    world.now += WINDOW_S + 1
    assert ask(world, "t1/later") == []


def test_frames_that_wait_for_one_wish_have_a_bound() -> None:
    world = working()
    conn = world.peer()
    ask(world)
    for number in range(2 * MAX_ASKERS):
        frame = Frame("restart", id=f"again{number % MAX_ASKERS}", call_id="t1/c1", payload=to_raw(RestartRequest("y")))
        told = tell(world, frame, conn)
        assert [code([one]) for one in told] == (["E_OVERLOADED"] if number % MAX_ASKERS == MAX_ASKERS - 1 else [])
    assert len(part_of(world.router, Restarts)._wishes.popitem()[1].askers) == MAX_ASKERS


def test_who_may_not_call_the_tool_may_not_wish() -> None:
    world = working()
    conn = world.peer()
    frame = Frame("restart", id="f", call_id="t1/c1", payload=to_raw(RestartRequest("why")))
    assert code(tell(world, frame, conn)) == "E_FORBIDDEN"
    conn.allowed |= {TOOL}
    assert code(tell(world, Frame("restart", id="f", payload=frame.payload), conn)) == "E_FRAME_INVALID"
    world.router.bus.control = None
    assert code(tell(world, frame, conn)) == "E_OVERLOADED"  # the supervisor may be on its way
    world.now += 10
    assert code(tell(world, frame, conn)) == "E_RESTART_REFUSED"


def test_a_restart_that_was_not_done_lets_everything_go_on() -> None:
    world = working()
    ask(world)
    checked(world)
    release(world)
    assert due(world) == 1
    from_supervisor(world, RestartUndone(error_payload("E_RESTART_REFUSED", "no")))
    assert not world.router.bus.closing
    leased = world.router.bus.mailbox.instances["coder", "k"].leased
    assert leased is not None
    assert leased.id == "c0e0"
    assert not granted(ask(world))  # it came to nothing: the turn need not leave for it


def test_a_broker_that_comes_before_the_step_has_ended_knows_the_wish() -> None:
    world = working()
    ask(world)
    checked(world)
    world.kill_broker()
    run(world)  # the holder says hello with its event
    world.now += RETURN_S + 1
    world.router.tick(world.now)
    world.after_round()
    assert due(world) == 0
    release(world)
    assert due(world) == 1


def test_a_broker_that_comes_after_the_step_has_ended_carries_the_wish_out() -> None:
    world = working()
    ask(world)
    checked(world)
    release(world)
    assert due(world) == 1
    world.kill_agent(world.agents["coder", "k"])
    world.kill_broker()
    world.now += RETURN_S + 1
    world.flow(world.supervisor, world.host)
    world.router.tick(world.now)
    world.after_round()
    assert due(world) == 2


def test_a_new_kernel_has_fulfilled_it_and_forgets_it_after_a_while_but_not_its_id() -> None:
    world = working()
    ask(world)
    checked(world)
    restarts = part_of(world.router, Restarts)
    (subject,) = restarts._wishes
    (written,) = world.journal.find_records(subject)
    world.router.bus.new_kernel = True
    restarts._restore(subject, msgspec.msgpack.decode(written, type=RestartWished))
    assert not granted(ask(world))
    assert due(world) == 0
    world.now += WINDOW_S
    world.router.tick(world.now)
    world.commit()
    assert part_of(world.router, Restarts)._wishes == {}
    assert world.journal.find_ended(subject) is not None
    assert not granted(ask(world))


# --- agents, and conversations that begin anew


def test_a_busy_agent_gives_its_event_back_first_and_an_idle_one_leaves_at_once() -> None:
    world = working()
    world.clients[0].ask("r0e0", "reviewer")
    run(world)
    busy = world.router.bus.mailbox.instances["coder", "k"]
    assert busy.conn is not None
    told = from_supervisor(world, RestartAgents(["coder"], 8000, "config_change"))
    shutdown = next(from_raw(frame.payload, Shutdown) for frame in told if frame.type == "shutdown")
    assert (shutdown.grace_period_ms, shutdown.reason) == (8000, "config_change")
    assert busy.leased is not None  # its turn has its time
    assert busy.leaving
    frame = Frame("ack", id="rel", stage="release", event_id=busy.leased.id, epoch=busy.epoch)
    tell(world, frame, busy.conn)
    assert busy.leased is None
    assert [event.id for event in busy.queue] == ["c0e0"]  # for its next process
    reviewer = world.router.bus.mailbox.instances["reviewer", "k"]
    assert not reviewer.leaving


def retired(world: World) -> list[Retire]:
    """The processes that the supervisor was told to follow to their ends."""
    world.goes_down(world.supervisor)
    return world.supervisor.retired


def test_a_step_that_takes_its_time_is_not_cut_off_and_its_process_is_followed_once_it_is_over() -> None:
    world = working()
    busy = world.router.bus.mailbox.instances["coder", "k"]
    assert busy.conn is not None and busy.leased is not None
    launch = busy.conn.claims.launch
    told = from_supervisor(world, RestartAgents(["coder"], None, "config_change", [launch + 1]))
    assert not told and not busy.leaving  # another launch was meant
    told = from_supervisor(world, RestartAgents(["coder"], None, "config_change", [launch]))
    (shutdown,) = [from_raw(frame.payload, Shutdown) for frame in told if frame.type == "shutdown"]
    assert shutdown.grace_period_ms is None
    assert busy.leaving and not retired(world), "the supervisor kills what it was told of after ten seconds"
    assert not from_supervisor(world, RestartAgents(["coder"], None, "config_change")), "it knows"
    world.now += 30
    world.router.tick(world.now)
    world.after_round()
    assert not retired(world)
    tell(world, Frame("ack", id="rel", stage="release", event_id=busy.leased.id, epoch=busy.epoch), busy.conn)
    tell(world, Frame("shutdown_ack", id="bye"), busy.conn)
    (order,) = retired(world)
    assert order.launch == launch


@pytest.mark.parametrize("how", ["a limit is set after all", "it says nothing more"])
def test_a_process_that_leaves_without_a_limit_is_followed_in_any_case(how: str) -> None:
    world = working()
    busy = world.router.bus.mailbox.instances["coder", "k"]
    assert busy.conn is not None and busy.leased is not None
    from_supervisor(world, RestartAgents(["coder"], None, "config_change"))
    if how == "a limit is set after all":
        told = from_supervisor(world, RestartAgents(["coder"], 8000))
        (shutdown,) = [from_raw(frame.payload, Shutdown) for frame in told if frame.type == "shutdown"]
        assert shutdown.grace_period_ms == 8000
    else:
        tell(world, Frame("ack", id="rel", stage="release", event_id=busy.leased.id, epoch=busy.epoch), busy.conn)
        world.router.tick(world.now)
        world.after_round()
    assert len(retired(world)) == 1


def test_a_fresh_start_is_journaled_told_at_welcome_and_never_goes_back() -> None:
    world = working()
    assert part_of(world.router, FreshStarts).of("coder") == 0
    from_supervisor(world, BeginAnew("coder"))
    world.commit()
    first = part_of(world.router, FreshStarts).of("coder")
    assert first > 0
    assert part_of(world.router, FreshStarts).of("reviewer") == 0
    world.now -= 500  # a clock that was set back
    from_supervisor(world, BeginAnew(""))
    world.commit()
    every = part_of(world.router, FreshStarts).of("reviewer")
    world.now += 500
    from_supervisor(world, BeginAnew("coder"))
    world.commit()
    assert part_of(world.router, FreshStarts).of("coder") > max(first, every)
    world.kill_broker()
    assert part_of(world.router, FreshStarts).of("reviewer") == every
