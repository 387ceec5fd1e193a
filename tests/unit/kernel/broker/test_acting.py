"""Handlers that ask agents, in the broker: who they are, what they may, and what they wait for."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.kernel.broker.routing import directory
from goondan.kernel.broker.state.entities import AGENTS, CONTROL, TOOLS, Connection
from goondan.kernel.broker.state.workdirs import Beneath, Workdir, check_opened, shared
from goondan.schemas.wire.codec import decode, encode, from_raw, to_raw
from goondan.schemas.wire.control import Exited, Principal, Ready, SpawnFailed
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import (
    AgentEvent,
    AgentsList,
    AgentsSpawn,
    Answer,
    ErrorPayload,
    Frame,
    ReplyTo,
    Source,
)
from tests.unit.kernel.broker.actors import Agent
from tests.unit.kernel.broker.world import CALL, World, code, out, request, run, tell, waited_for_by, working


def from_supervisor(world: World, message: object) -> list[Frame]:
    """A message of the supervisor; what the agent `coder` gets."""
    control, agent = world.router.bus.control, world.peer()
    assert control is not None
    world.router.receive(control, encode(Frame("runtime.event", id="s", payload=to_raw(message))), world.now)
    return tell(world, Frame("pong", id="p"), agent)


def answer(world: World, agent: str, key: str) -> None:
    """The agent's turn ends."""
    instance = world.router.bus.mailbox.instances[agent, key]
    assert instance.leased is not None
    assert instance.conn is not None
    done = AgentEvent(id="a", type="agent.response", created_at="2026-01-01T00:00:00Z")
    done.answer = Answer(turn_id="t", status="completed", response="yes")
    frame = Frame("ack", id="d", stage="done", event_id=instance.leased.id, epoch=instance.epoch, payload=to_raw(done))
    world.router.receive(instance.conn, encode(frame), world.now)


# --- who it is


def test_a_request_is_the_agents_whose_call_it_is_whatever_the_frame_says() -> None:
    world = working()
    turn = world.router.bus.mailbox.events["c0e0"]
    held = turn.content
    held.trace_id, held.auth = "trace", to_raw({"user": 1})
    waited_for_by(turn, "boss/b")
    lies: dict[str, Any] = {
        "from_": "boss",
        "source": Source("client", "operator"),
        "chain": [],
        "auth": to_raw({"admin": True}),
    }
    (ack,) = tell(world, request(**lies))
    assert (ack.type, ack.stage, ack.in_reply_to) == ("ack", "accepted", "f-r1")
    event = world.router.bus.mailbox.events["r1"]
    assert (event.sender, event.content.from_, event.source) == (
        "agent/coder/k",
        "coder",
        Source("agent", "coder", "k"),
    )
    assert (event.content.chain, event.content.auth, event.content.trace_id) == (
        ["boss/b", "coder/k"],
        held.auth,
        "trace",
    )
    assert (event.content.reply_to, event.call_id) == (ReplyTo("coder", "corr-r1"), CALL)


def test_a_call_that_is_not_open_is_asked_for_later_and_a_foreign_one_refused() -> None:
    world = working()
    assert code(tell(world, request(call_id="coder/k/other/0"))) == "E_OVERLOADED"
    world.router.bus.calls.open[CALL].host = None
    assert code(tell(world, request())) == "E_OVERLOADED"
    other = world.router.bus.presence.connections[CONTROL]
    world.router.bus.calls.open[CALL].host = next(iter(other.values()))
    assert code(tell(world, request())) == "E_FORBIDDEN"
    assert "r1" not in world.router.bus.mailbox.events


def test_without_a_call_a_tool_host_asks_nobody() -> None:
    world = working()
    assert code(tell(world, request(call_id=None))) == "E_FORBIDDEN"
    for kind in ("agents.catalog", "agents.list", "agents.spawn"):
        assert code(tell(world, Frame(kind, id="x", to="reviewer"))) == "E_FORBIDDEN"


def test_a_tool_without_the_permission_asks_nobody() -> None:
    world = working("reviewer")
    frame = request(to="coder", call_id="reviewer/k/c0e0/0")
    assert code(tell(world, frame)) == "E_FORBIDDEN"
    assert code(tell(world, Frame("agents.catalog", id="x", call_id="reviewer/k/c0e0/0"))) == "E_FORBIDDEN"


def test_a_request_names_no_workdir_no_operator_agent_and_no_stranger() -> None:
    world = working()
    assert code(tell(world, request(workdir="/"))) == "E_FORBIDDEN"
    assert code(tell(world, request(to="_operator"))) == "E_AGENT_NOT_FOUND"
    assert code(tell(world, request(to="nobody"))) == "E_AGENT_NOT_FOUND"


def test_a_repeat_is_the_same_request_and_is_answered_again() -> None:
    world = working()
    tell(world, request())
    before = len(world.router.bus.mailbox.events)
    (ack,) = tell(world, request(id="again"))
    assert (ack.in_reply_to, len(world.router.bus.mailbox.events)) == ("again", before)
    run(world)
    event = world.router.bus.mailbox.events["r1"]
    assert event.state == "done", "the reviewer has answered"
    ack, again = tell(world, request(id="third"))
    assert (ack.stage, again.event_id, again.in_reply_to, again.call_id) == ("accepted", "r1:answer", "corr-r1", CALL)


def test_what_a_call_waits_for_is_cancelled_when_it_ends_and_what_it_sent_is_done() -> None:
    world = working()
    for frame in (request("r1"), request("r2", key="other"), request("s1", key="third", reply_to=None)):
        assert tell(world, frame)[0].stage == "accepted"
    world.host.work()
    run(world)
    states = [world.state(name) for name in ("r1", "r2", "s1")]
    assert states == ["cancelled", "cancelled", "done"]
    assert world.router.bus.counters["answers_late"] == 2, "the tool host drops them"


# --- circles


def test_asking_oneself_is_a_circle_and_asking_another_instance_of_oneself_is_none() -> None:
    world = working()
    assert code(tell(world, request(to="coder"))) == "E_AGENT_CYCLE"
    (ack,) = tell(world, request("r2", to="coder", key="other"))
    assert ack.stage == "accepted"
    waited_for_by(world.router.bus.mailbox.events["c0e0"], "reviewer/k")
    assert code(tell(world, request("r3"))) == "E_AGENT_CYCLE"
    waited_for_by(world.router.bus.mailbox.events["c0e0"], *(f"a/{n}" for n in range(32)))
    assert code(tell(world, request("r4", key="new"))) == "E_AGENT_CYCLE"


def test_what_nobody_waits_for_closes_no_circle_and_makes_no_chain() -> None:
    world = working()
    (ack,) = tell(world, request(to="coder", reply_to=None))
    assert ack.stage == "accepted"
    assert world.router.bus.mailbox.events["r1"].content.chain is None


def test_two_that_were_asked_by_others_do_not_wait_for_each_other() -> None:
    world = working()
    world.clients[1].ask("c1e0", "coder", "z")
    run(world)
    (ack,) = tell(world, request("r1", to="coder", key="z"))
    assert ack.stage == "accepted", "k waits for z"
    back = request("r2", to="coder", key="k", call_id="coder/z/c1e0/0")
    assert code(tell(world, back)) == "E_AGENT_CYCLE", "z would wait for k, and neither chain shows it"
    world.router.bus.calls.remove(world.router.bus.calls.open[CALL])
    (ack,) = tell(world, back)
    assert ack.stage == "accepted", "the call of k has ended: it waits no more"


def test_one_waits_for_another_by_a_third() -> None:
    world = working()
    for client, key in ((1, "y"), (1, "z")):
        world.clients[client].ask(f"c1{key}", "coder", key)
    run(world)
    assert tell(world, request("r1", to="coder", key="y"))[0].stage == "accepted"
    assert tell(world, request("r2", to="coder", key="z", call_id="coder/y/c1y/0"))[0].stage == "accepted"
    assert code(tell(world, request("r3", to="coder", key="k", call_id="coder/z/c1z/0"))) == "E_AGENT_CYCLE"


def test_who_is_asked_by_one_that_waits_gets_a_process_beyond_the_limit() -> None:
    world = working(max_live_agents=1)
    tell(world, request("r1"))
    tell(world, request("r2", key="second"))
    world.goes_on(3)
    states = [world.state(name) for name in ("r1", "r2")]
    assert states == ["done", "done"], "one after the other"
    for name in ("c1e0", "c1e1"):
        world.clients[1].ask(name, "coder", name)
    run(world)
    states = [world.router.bus.mailbox.events[name].state for name in ("c1e0", "c1e1")]
    assert states == ["leased", "accepted"], "in the place that is kept for operators; nobody lends one to the other"


# --- who there is


def ask(kind: str, payload: object = None, **header: Any) -> Frame:
    frame = Frame(kind, id="q", call_id=CALL)
    if payload is not None:
        frame.payload = to_raw(payload)
    for name, value in header.items():
        setattr(frame, name, value)
    return frame


def test_the_catalog_names_the_swarm_and_leaves_the_asker_out() -> None:
    world = working()
    (reply,) = tell(world, ask("agents.catalog"))
    assert (reply.type, reply.in_reply_to) == ("reply", "q")
    assert from_raw(reply.payload, dict) == {
        "swarmName": "pair",
        "entryAgent": "coder",
        "selfAgent": "coder",
        "availableCount": 2,
        "callableCount": 1,
        "availableAgents": ["coder", "reviewer"],
        "callableAgents": ["reviewer"],
    }


def spawn(
    world: World, key: str | None = "s", *, id: str = "q", to: str = "reviewer", cwd: str | None = None
) -> list[Frame]:
    return tell(world, ask("agents.spawn", AgentsSpawn(cwd), to=to, instance_key=key, id=id))


def listed(world: World, *, all_: bool = False, connection: Connection | None = None) -> list[dict[str, Any]]:
    (reply,) = tell(world, ask("agents.list", AgentsList(all_)), connection)
    body = from_raw(reply.payload, dict)
    assert body["count"] == len(body["agents"])
    agents: list[dict[str, Any]] = body["agents"]
    return agents


def replies(world: World) -> list[dict[str, Any]]:
    """Replies on their way to the tool host, delivered by nobody."""
    found = []
    while world.host.wire.down:
        frame = decode(world.host.wire.down.popleft())
        if frame.type in ("reply", "error"):
            found.append({"type": frame.type, "to": frame.in_reply_to, **from_raw(frame.payload, dict)})
    return found


def start_wanted(world: World) -> None:
    """Like `run`, but what the tool host is sent stays on its wire."""
    for _ in range(6):
        for actor in world.actors():
            while world.pump_up(actor) or (actor is not world.host and world.pump_down(actor)):
                pass
        world.supervisor.reconcile()


def test_a_spawned_instance_is_told_when_it_is_there_and_listed_by_its_owner() -> None:
    world = working()
    assert spawn(world) == []
    start_wanted(world)
    told = {"type": "reply", "to": "q", "target": "reviewer", "instanceKey": "s", "spawned": True, "cwd": None}
    assert replies(world) == [told]
    (repeat,) = spawn(world)
    assert from_raw(repeat.payload, dict)["spawned"], "the same request is told the same"
    (second,) = spawn(world, id="other")
    assert not from_raw(second.payload, dict)["spawned"], "it ran already"
    (entry,) = listed(world)
    assert entry == {
        "target": "reviewer",
        "instanceKey": "s",
        "ownerAgent": "coder",
        "ownerInstanceKey": "k",
        "createdAt": "1970-01-01T00:16:40.000Z",
        "cwd": None,
    }
    every = listed(world, all_=True)
    assert {(item["target"], item["instanceKey"]) for item in every} == {("coder", "k"), ("reviewer", "s")}
    assert [item["ownerAgent"] for item in every if item["target"] == "coder"] == [None]


def test_the_key_of_a_spawn_is_the_askers_unless_it_says_another() -> None:
    world = working()
    spawn(world, key=None)
    assert ("reviewer", "k") in world.router.bus.mailbox.instances


@pytest.mark.parametrize("to", ["nobody", "_operator", ""])
def test_only_declared_agents_are_spawned(to: str) -> None:
    world = working()
    assert code(spawn(world, to=to)) == "E_AGENT_NOT_FOUND"


HOME = "/state/instances/coder/k/workspace"


@pytest.mark.parametrize("cwd", ["/", "..", f"{HOME}/../../other", "./x/../../y", f"{HOME}2", "//etc", "/srv/project"])
def test_a_spawn_hands_on_no_folder_outside_of_the_askers_own(cwd: str) -> None:
    world = working()
    frames = spawn(world, cwd=cwd)
    assert code(frames) == "E_FORBIDDEN"
    refused = from_raw(frames[0].payload, ErrorPayload)
    assert "spawn.workdirs" in str(refused.suggestion), "a refusal names the setting"


@pytest.mark.parametrize("cwd", ["a\0b", "x" * 5000])
def test_a_cwd_that_is_no_path_is_refused(cwd: str) -> None:
    assert code(spawn(working(), cwd=cwd)) == "E_TOOL_INVALID_ARGS"


@pytest.mark.parametrize(
    ("cwd", "path"),
    [(".", HOME), (HOME, HOME), ("x/..", HOME), ("sub", f"{HOME}/sub"), (f"{HOME}/a/./b", f"{HOME}/a/b")],
)
def test_a_spawn_may_share_the_askers_working_directory_or_a_folder_below(cwd: str, path: str) -> None:
    world = working()
    spawn(world, cwd=cwd)
    start_wanted(world)
    (reply,) = replies(world)
    assert reply["cwd"] == path
    assert world.router.bus.mailbox.instances["reviewer", "s"].workdir == Workdir(path, Beneath(HOME))


def test_what_the_policy_opens_may_be_handed_on_until_it_is_closed() -> None:
    world = working()
    world.router.bus.plan.spawn_workdirs.append("/srv/project")
    spawn(world, cwd="/srv/project/docs")
    start_wanted(world)
    (reply,) = replies(world)
    assert reply["cwd"] == "/srv/project/docs"
    place = world.router.bus.mailbox.instances["reviewer", "s"].workdir
    assert place == Workdir("/srv/project/docs", Beneath("/srv/project", by_policy=True))
    inner = shared(place, "en", [])
    assert inner == Workdir("/srv/project/docs/en", Beneath("/srv/project", by_policy=True)), "the base is handed on"
    check_opened(inner, ["/srv/project"])
    with pytest.raises(GoondanError, match="any more"):
        check_opened(inner, ["/srv"])


def test_a_tool_host_hears_where_no_link_is_followed_and_nothing_once_the_policy_has_closed_it() -> None:
    world = working()
    bus = world.router.bus
    me = bus.mailbox.instances["coder", "k"]
    assert me.conn is not None and me.leased is not None
    bus.plan.spawn_workdirs.append("/srv/project")
    me.workdir = Workdir("/srv/project/docs", Beneath("/srv/project", by_policy=True))
    call = Frame("tool.call", id="q", tool=next(iter(me.conn.allowed)), call_id="c0e0/9", event_id=me.leased.id)
    call.epoch, call.workdir_base = me.epoch, "/"
    world.router.receive(me.conn, encode(call), world.now)
    (sent,) = [frame for frame in out(world, TOOLS) if frame.call_id == "c0e0/9"]
    assert (sent.workdir, sent.workdir_base) == ("/srv/project/docs", "/srv/project"), (
        "the broker's word, not the agent's"
    )
    bus.plan.spawn_workdirs.clear()
    call.call_id = "c0e0/10"
    assert code(tell(world, call, me.conn)) == "E_FORBIDDEN"


def test_an_instance_that_runs_keeps_its_working_directory() -> None:
    world = working()
    spawn(world)
    start_wanted(world)
    replies(world)
    assert code(spawn(world, id="x", cwd=".")) == "E_AGENT_SPAWN_FAILED"


def test_a_spawn_that_fails_or_takes_too_long_says_so() -> None:
    world = working()
    spawn(world, "a")
    control = world.router.bus.control
    assert control is not None
    failed = Frame("runtime.event", payload=to_raw(SpawnFailed(Principal("agent", "reviewer", "a"), 5, "no memory")))
    (error,) = [f for f in tell(world, failed, control, TOOLS) if f.type == "error"]
    told = from_raw(error.payload, ErrorPayload)
    assert (error.in_reply_to, told.code) == ("q", "E_AGENT_SPAWN_FAILED")
    assert "no memory" in told.message
    tell(world, ask("agents.spawn", to="reviewer", instance_key="b", deadline_ms=50))
    world.now += 1
    world.router.tick(world.now)
    assert code(out(world, TOOLS)) == "E_AGENT_TIMEOUT"


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_that_still_loads_is_not_there_yet(ends: bool) -> None:
    """It has said hello, and an extension may end it."""
    world = working()
    world.supervisor.loading = True
    spawn(world)
    start_wanted(world)
    conn = world.router.bus.mailbox.instances["reviewer", "s"].conn
    assert conn is not None, "it is connected"
    assert replies(world) == []
    assert spawn(world, id="other") == [], "who asks later waits as well"
    reviewer, control = Principal("agent", "reviewer", "s"), world.router.bus.control
    assert control is not None
    if not ends:
        told = tell(world, Frame("runtime.event", payload=to_raw(Ready(reviewer, conn.claims.launch))), control, TOOLS)
        assert [from_raw(frame.payload, dict)["spawned"] for frame in told if frame.type == "reply"] == [True, True]
        return
    gone = Exited(reviewer, conn.claims.launch, "exit status 3", started=False)
    assert not tell(world, Frame("runtime.event", payload=to_raw(gone)), control, TOOLS)
    failed = Frame("runtime.event", payload=to_raw(SpawnFailed(reviewer, 5, "exit status 3")))
    assert [code([frame]) for frame in tell(world, failed, control, TOOLS)] == ["E_AGENT_SPAWN_FAILED"] * 2


def test_a_process_that_ends_before_its_hello_is_wanted_again() -> None:
    world = working()
    spawn(world)
    wanted = Principal("agent", "reviewer", "s")
    for _ in range(4):
        world.pump_down(world.supervisor)
    assert wanted in world.supervisor.wanted
    world.launches += 1
    world.supervisor.exited(wanted, world.launches)
    start_wanted(world)
    assert [reply["spawned"] for reply in replies(world)] == [True]


def test_what_is_remembered_of_spawned_instances_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_OWNED", 2)
    world = working()
    for key in ("a", "b"):
        spawn(world, key, id=key)
    assert code(spawn(world, "c", id="c")) == "E_AGENT_SPAWN_FAILED", "both have work"
    start_wanted(world)
    replies(world)
    (gone,) = [agent for agent in world.agents.values() if agent.key == "a"]
    world.kill_agent(gone)
    start_wanted(world)
    spawn(world, "c", id="c")
    assert [entry["instanceKey"] for entry in listed(world)] == ["b", "c"]


def test_a_new_broker_knows_who_spawned_what_and_where_it_works() -> None:
    world = working()
    spawn(world, "a", id="a", cwd="sub")
    spawn(world, "b", id="b")
    world.kill_broker()
    known = world.router.bus.mailbox.instances["reviewer", "a"]
    assert known.workdir == Workdir(f"{HOME}/sub", Beneath(HOME))
    assert known.spawned is not None
    assert (known.spawned.owner_agent, known.spawned.owner_key) == ("coder", "k")
    assert known.spawned.created == 1000.0
    assert ("reviewer", "b") in world.router.bus.mailbox.instances


def test_agents_ask_the_same_for_themselves() -> None:
    world = working()
    (agent,) = world.agents.values()
    assert isinstance(agent, Agent)
    connection = world.router.bus.presence.connections[AGENTS][agent.wire.ident]
    (reply,) = tell(world, ask("agents.catalog", call_id=None), connection)
    assert from_raw(reply.payload, dict)["selfAgent"] == "coder"
    assert tell(world, ask("agents.spawn", to="reviewer", instance_key="s", call_id=None), connection) == []
    (entry,) = listed(world, connection=connection)
    assert (entry["instanceKey"], entry["ownerAgent"]) == ("s", "coder")
    (ack,) = tell(world, request(call_id=None), connection)
    assert ack.stage == "accepted"
    assert world.router.bus.mailbox.events["r1"].content.chain == ["coder/k"]
    assert code(tell(world, request("r2", to="coder", call_id=None), connection)) == "E_AGENT_CYCLE"
