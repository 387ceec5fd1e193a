"""Sessions of MCP servers: who shares one, how long it is held, how many there are, how it ends."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from goondan.schemas.bundle.launch import ExportSpec, SandboxSpec, ServerSpec, ToolHostSpec, ToolSpec
from goondan.schemas.worker.servers import ServerListing, ServerTool
from goondan.toolhost.calls import machine
from goondan.toolhost.calls.call_registry import Call, CallRegistry
from goondan.toolhost.calls.machine import SERVER_EXIT_S, SERVER_TERM_S, Assign, End, JailPool, Machine, Start
from goondan.toolhost.calls.session import JailSession, key_of
from goondan.toolhost.calls.untrusted import Violation
from goondan.toolhost.host import Host
from goondan.toolhost.privileges.powers import Ordinary
from tests.unit.toolhost.test_calls import call


def server(
    name: str = "srv",
    *,
    scope: Literal["instance", "agent"] = "instance",
    mode: Literal["stateful", "stateless"] = "stateful",
) -> ToolSpec:
    spec = ServerSpec(extension=name, transport="stdio", scope=scope, mode=mode)
    return ToolSpec(name=name, entry="", root="", exports=[], sandbox=SandboxSpec(), server=spec)


def made(name: str, tool: ToolSpec | None = None, *, agent: str = "a", key: str = "k", workdir: str = "/w") -> Call:
    """A call of a server; without `tool` one of an ordinary tool."""
    found = call(name, agent=agent)
    found.instance_key, found.generation, found.export = key, "g", ExportSpec(name="f")
    if tool is not None:
        found.tool = tool
        found.workdir = workdir if tool.server is not None and tool.server.scope == "agent" else None
    found.key = key_of(found, forks=False)
    return found


NAMES = st.sampled_from(["x", "y"])


@given(NAMES, NAMES, NAMES, NAMES, NAMES, NAMES, st.sampled_from(["instance", "agent"]))
def test_one_scope_shares_one_session_and_two_never_do(
    agent: str, key: str, workdir: str, agent2: str, key2: str, workdir2: str, scope: Literal["instance", "agent"]
) -> None:
    tool = server(scope=scope)
    one = made("1", tool, agent=agent, key=key, workdir=workdir)
    two = made("2", tool, agent=agent2, key=key2, workdir=workdir2)
    same = key == key2 if scope == "instance" else (agent, key, workdir) == (agent2, key2, workdir2)
    assert (one.key == two.key) == same
    less = replace(tool, server=replace(tool.server, mode="stateless"))  # type: ignore[type-var]
    assert made("1", less, agent=agent, key=key).key != made("2", less, agent=agent, key=key).key
    # A session of another configuration is not used.
    two.generation = "h"
    assert key_of(one, forks=False) != key_of(two, forks=False)


def test_a_session_of_all_agents_is_no_instances() -> None:
    pool = JailPool(4)
    (start,) = pool.place(made("1", server()).key, made("1", server()))
    assert isinstance(start, Start)
    assert (start.session.instance, start.session.agent, start.session.server) == (None, "", True)
    own = made("2", server("own", scope="agent"))
    assert [action.session.instance for action in pool.place(own.key, own) if isinstance(action, Start)] == [("a", "k")]


def begun(pool: JailPool, wanted: Call) -> JailSession:
    """The session of a call that has been run and is over."""
    (start,) = pool.place(wanted.key, wanted)
    (assign,) = pool.launched(start.session, 0.0)
    assert isinstance(assign, Assign)
    pool.enter(start.session, wanted.id, wanted)
    pool.leave(start.session, wanted.id, 0.0)
    return start.session


def test_a_held_session_does_not_retire_and_makes_no_room() -> None:
    pool = JailPool(4, max_servers=1)
    session = begun(pool, made("1", server("one")))
    pool.attach(session, ("a", "k"))
    pool.attach(session, ("b", "k"))
    assert pool.idle() == []
    assert pool.retire(1e9) == []
    other = made("2", server("two"))
    assert pool.place(other.key, other) == []  # it waits
    assert pool.detach(session, ("a", "k"), 1.0) == []
    assert pool.detach(session, ("b", "k"), 2.0) == [End(session)]  # now it makes room
    (start,) = pool.gone(session)
    assert isinstance(start, Start)


def test_the_two_kinds_of_sessions_are_counted_apart() -> None:
    pool = JailPool(1, max_servers=1)
    begun(pool, made("1", server()))
    plain = made("2")
    (start,) = pool.place(plain.key, plain)
    assert isinstance(start, Start)
    assert not start.session.server
    # A server that waits closes no idle jail of a tool.
    (assign,) = pool.launched(start.session, 0.0)
    pool.enter(start.session, "2", plain)
    pool.leave(start.session, "2", 0.0)
    other = made("3", server("other"))
    assert [action.session.server for action in pool.place(other.key, other)] == [True]


class Attachments(RuleBasedStateMachine):
    """Agents attach, detach and call in any order; servers end in any order."""

    MOST = 2

    def __init__(self) -> None:
        super().__init__()
        self.pool = JailPool(1, max_servers=self.MOST)
        self.now = 0.0
        self.ended: list[JailSession] = []
        self.count = 0

    def perform(self, actions: list[Start | Assign | End]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self.perform(self.pool.launched(action.session, self.now))
            elif isinstance(action, Assign):
                self.pool.enter(action.session, action.call.id, action.call)
            else:
                assert not action.session.calls
                self.ended.append(action.session)

    @rule(number=st.integers(0, 3))
    def calls(self, number: int) -> None:
        self.count += 1
        wanted = made(str(self.count), server(f"s{number}"))
        session = self.pool.find(wanted.key)
        if session is None:
            self.perform(self.pool.place(wanted.key, wanted))
        else:
            self.pool.enter(session, wanted.id, wanted)

    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        running = [(session, name) for session in self.pool.sessions() for name in session.calls]
        if running:
            session, name = data.draw(st.sampled_from(running))
            self.now += 1
            self.perform(self.pool.leave(session, name, self.now))

    @rule(data=st.data(), agent=NAMES, stays=st.booleans())
    def attaches(self, data: st.DataObject, agent: str, stays: bool) -> None:
        there = [session for session in self.pool.sessions() if not session.closed]
        if there:
            session = data.draw(st.sampled_from(there))
            if stays:
                self.pool.attach(session, (agent, "k"))
            else:
                self.now += 1
                self.perform(self.pool.detach(session, (agent, "k"), self.now))

    @rule(before=st.integers(0, 60))
    def retires(self, before: int) -> None:
        held = [session for session in self.pool.sessions() if session.attached]
        self.perform(self.pool.retire(float(before)))
        assert not any(session.closed for session in held)

    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        if self.pool.sessions():
            session = data.draw(st.sampled_from(self.pool.sessions()))
            session.calls.clear()
            self.perform(self.pool.gone(session))

    @invariant()
    def held_or_idle(self) -> None:
        sessions = self.pool.sessions()
        assert len(sessions) <= self.MOST
        for session in sessions:
            idle = session in self.pool.idle()
            assert not (idle and (session.attached or session.calls or session.closed))
            if not session.closed and not session.attached and not session.calls:
                assert idle


TestAttachments = Attachments.TestCase
TestAttachments.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def serving(tool: ToolSpec) -> tuple[Machine, JailSession, Call]:
    decide = Machine(4)
    wanted = made("1", tool)
    (start,) = decide.pool.place(wanted.key, wanted)
    decide.pool.launched(start.session, 0.0)
    decide.ready(start.session)
    decide.enter(start.session, wanted, 0.0)
    return decide, start.session, wanted


def test_a_server_is_asked_to_end_in_three_ways() -> None:
    decide, session, wanted = serving(server())
    decide.pool.leave(session, wanted.worker_call_id, 0.0)
    assert decide.end(session) == [machine.Leave(session), machine.Wait(session, SERVER_EXIT_S, "server")]
    assert decide.waited(session, "server", "srv") == [
        machine.Terminate(session),
        machine.Wait(session, SERVER_TERM_S, "signal"),
    ]
    (kill,) = decide.waited(session, "signal", "srv")
    assert kill == machine.Kill(session, "not needed any more")


def test_a_call_out_of_time_does_not_end_a_server() -> None:
    decide, session, wanted = serving(server())
    told = decide.run_out(wanted, 1.0)
    assert [type(action) for action in told] == [machine.Answer, machine.AskToStop, machine.WaitForStop]
    assert not session.closed
    # Its worker says that it has stopped: nothing more happens. If it does not, the server ends.
    decide.late_result(session, wanted.worker_call_id)
    assert decide.did_not_stop(session, wanted) == []
    decide, session, wanted = serving(server())
    decide.run_out(wanted, 1.0)
    assert any(isinstance(action, machine.Kill) for action in decide.did_not_stop(session, wanted))


@pytest.mark.parametrize("how", ["call", "listing"])
def test_a_stateless_server_ends_after_one(how: str) -> None:
    decide, session, wanted = serving(server(mode="stateless"))
    if how == "listing":
        actions = decide.listed(session, wanted, 1.0)
    else:
        from msgspec import Raw

        from goondan.schemas.worker.worker_frames import Result

        result = Result(call_id=wanted.worker_call_id, status="ok")
        _, actions = decide.result(session, wanted, result, Raw(b"\x80"), spent=False, now=1.0)
    assert End(session) in actions


def test_silence_and_the_whole_time_are_two_bounds() -> None:
    calls = CallRegistry()
    wanted = made("1", server())
    wanted.idle_s, wanted.total, wanted.deadline = 10.0, 25.0, 10.0
    calls.open(wanted)
    calls.heard_of(wanted, 0.4)  # too little to move a timer for
    assert calls.next_deadline() == 10.0
    calls.heard_of(wanted, 8.0)
    assert (calls.next_deadline(), calls.due(17.0)) == (18.0, [])
    calls.heard_of(wanted, 17.0)
    assert calls.next_deadline() == 25.0  # not longer, whatever its news
    # Time that stands still counts for neither.
    calls.hold(wanted, 20.0)
    calls.heard_of(wanted, 21.0)
    assert calls.next_deadline() is None
    calls.go_on(wanted, 50.0)
    assert calls.next_deadline() == 55.0
    calls.heard_of(wanted, 54.0)
    assert calls.due(55.0) == [wanted]


@pytest.mark.parametrize("value", [b"bytes", float("nan"), {"deep": [[[[[[[[]]]]]]]]}])
async def test_a_listing_whose_schemas_are_not_json_breaks_the_protocol(value: object) -> None:
    host = Host(ToolHostSpec(tools=[], state_dir="/nonexistent", revision="1"), Ordinary(), send=lambda frame: True)
    _, session, _ = serving(server())
    listing = ServerListing(tools=[ServerTool(export="x", name="x", input_schema={"default": value})])
    if isinstance(value, dict):
        assert host.sessions.servers.heard(session, listing).session == session.number
    else:
        with pytest.raises(Violation):
            host.sessions.servers.heard(session, listing)
