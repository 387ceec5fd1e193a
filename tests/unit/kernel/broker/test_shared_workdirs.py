"""Agents that share the entry agent's working directory, and where each of them works when another one asks it."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.kernel.broker.state.workdirs import Beneath, Workdir, passed_on
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame, ReplyTo
from tests.unit.kernel.broker.test_acting import spawn, start_wanted
from tests.unit.kernel.broker.world import World, request, run, tell, working

ENTRY = "/state/instances/coder/{key}/workspace"
NAMED = "/srv/work"


def sharing(world: World) -> World:
    world.router.bus.plan.sharing_agents.extend(["coder", "reviewer"])
    return world


def place(world: World, event_id: str) -> str:
    """Where the turn of an event works."""
    event = world.router.bus.mailbox.events[event_id]
    return event.content.workdir or event.instance.workdir.path


def with_a_call(event_id: str = "r1") -> Frame:
    """A request whose turn makes one call."""
    event = AgentEvent(id=event_id, type="agent.request", created_at="2026-01-01T00:00:00Z", input=1)
    return request(event_id, payload=to_raw(event))


def named(world: World) -> World:
    """The running turn came with a working directory of the operator's."""
    world.router.bus.mailbox.events["c0e0"].content.workdir = NAMED
    return world


@pytest.mark.parametrize(("asker", "name", "target", "path"), [
    (Workdir("/a"), None, Workdir("/a"), None),
    (Workdir("/a"), None, Workdir("/b"), "/a"),
    (Workdir("/a"), "/w", Workdir("/a"), "/w"),
    (Workdir("/a"), "/w", Workdir("/w"), None),
    (Workdir("/a"), "/w", Workdir("/a/sub", Beneath("/a")), None),
    (Workdir("/a/sub", Beneath("/a")), None, Workdir("/b"), None),
    (Workdir("/a/sub", Beneath("/a")), "/w", Workdir("/b"), None),
])  # fmt: skip
def test_a_directory_that_a_spawn_gave_stays_and_is_not_passed_on(
    asker: Workdir, name: str | None, target: Workdir, path: str | None
) -> None:
    """Jails could exchange it for a link, and an event has no base that says how it is reached."""
    assert passed_on(asker, name, target) == path


def test_all_work_in_the_folder_of_the_entry_agents_instance_of_the_same_key() -> None:
    world = sharing(World())
    for agent in ("coder", "reviewer"):
        assert world.router.bus.instance(agent, "k7", 0).workdir == Workdir(ENTRY.format(key="k7"))
    apart = World()
    assert apart.router.bus.instance("reviewer", "k7", 0).workdir.path == "/state/instances/reviewer/k7/workspace"


@pytest.mark.parametrize("key", ["k", "other"])
def test_what_an_agent_asks_is_done_where_it_works(key: str) -> None:
    world = sharing(working())
    tell(world, request(key=key))
    assert place(world, "r1") == ENTRY.format(key="k"), "the asker's, whatever the key"
    world = named(sharing(working()))
    tell(world, request(key=key))
    assert place(world, "r1") == NAMED
    apart = named(working())
    tell(apart, request(key=key))
    assert place(apart, "r1") == f"/state/instances/reviewer/{key}/workspace"


def test_it_is_so_over_several_agents_and_after_a_restart() -> None:
    world = named(sharing(working()))
    tell(world, with_a_call())
    run(world)
    asked = world.router.bus.mailbox.instances["reviewer", "k"]
    assert asked.leased is not None and asked.conn is not None
    tell(world, request("r2", to="coder", key="third", call_id=None), asked.conn)
    assert place(world, "r2") == NAMED
    world.router.bus.mailbox.events["c0e0"].content.workdir = None  # the journal was not told of this one
    world.kill_broker()
    run(world)
    assert (place(world, "r1"), place(world, "r2")) == (NAMED, NAMED)


def test_an_answer_that_comes_later_begins_its_turn_there() -> None:
    world = named(sharing(working()))
    frame = request(asynchronous=True)
    frame.reply_to = ReplyTo("coder", "corr-r1")
    tell(world, frame)
    run(world)  # the reviewer answers at once
    assert place(world, "r1:answer") == NAMED


def test_a_spawned_agent_with_a_cwd_keeps_it() -> None:
    world = sharing(working())
    spawn(world, cwd="sub")
    start_wanted(world)
    tell(world, request(key="s"))
    assert place(world, "r1") == ENTRY.format(key="k") + "/sub"
    assert world.router.bus.mailbox.events["r1"].content.workdir is None


def test_calls_of_the_asked_agent_go_to_that_folder() -> None:
    world = named(sharing(working()))
    tell(world, with_a_call())
    run(world)
    calls: list[Any] = [frame for frame in world.host.running.values() if frame.from_ == "reviewer"]
    assert [(frame.workdir, frame.workdir_base) for frame in calls] == [(NAMED, None)]
