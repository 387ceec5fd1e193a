"""What sessions decide: every call ends in exactly one result, and so does all work that goes on after one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import Raw
from msgspec.structs import replace

from goondan.schemas.bundle.launch import SandboxSpec
from goondan.schemas.wire.errors import tool_error
from goondan.schemas.worker.worker_frames import Result
from goondan.toolhost.calls import machine
from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.calls.machine import (
    CANCEL_GRACE_S,
    MAX_MADE,
    SIBLING_GRACE_S,
    Action,
    Assign,
    End,
    Machine,
    Start,
)
from goondan.toolhost.calls.results import Promise, Work
from goondan.toolhost.calls.session import JailSession, key_of
from goondan.toolhost.calls.untrusted import Violation
from tests.unit.toolhost.test_calls import call
from tests.unit.toolhost.test_pool import calls_without_a_place

ERROR = tool_error("E_TOOL_CRASHED", "it ended", name="ToolCrashed")
PAYLOAD = Raw(b"\x80")


class Shell:
    """Performs actions like sessions.py, on jails that are only numbers. `done` counts results of calls and of work."""

    def __init__(self, max_jails: int = 3) -> None:
        self.machine = Machine(max_jails)
        self.done: Counter[str] = Counter()
        self.ended: Counter[int] = Counter()
        self.errors: dict[str, str] = {}
        self.launching: list[JailSession] = []
        self.there: list[JailSession] = []
        self.dying: set[int] = set()
        self.told: list[Action] = []
        self.now = 0.0

    def place(self, made: Call) -> None:
        key = made.key = key_of(made, forks=made.tool.name == "forking")
        session = self.machine.pool.find(key)
        if session is not None and session.number not in self.dying:
            self.machine.enter(session, made, self.now)
        else:
            if session is not None:
                self.perform(self.machine.pool.close(session))
            self.perform(self.machine.pool.place(key, made))

    def launched(self, session: JailSession) -> None:
        self.launching.remove(session)
        self.there.append(session)
        session.forks = session.key[0] == "forking"
        session.permissions = ("agents",)
        self.perform(self.machine.pool.launched(session, self.now))

    def gone(self, session: JailSession, *, replaced: bool = False) -> None:
        self.there.remove(session)
        self.dying.add(session.number)
        self.perform(self.machine.gone(session, ERROR, replaced=replaced))

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self.launching.append(action.session)
            elif isinstance(action, Assign):
                if action.call.state == "done":
                    continue
                if action.session.closed or action.session.number in self.dying:
                    self.place(action.call)
                else:
                    self.machine.enter(action.session, action.call, self.now)
            elif isinstance(action, End):
                if action.session.number not in self.dying:
                    self.perform(self.machine.end(action.session))
            elif isinstance(action, machine.Again):
                self.place(action.call)
            elif isinstance(action, machine.Answer | machine.Finish):
                self.finish(action)
            else:
                if isinstance(action, machine.Kill):
                    self.dying.add(action.session.number)
                self.told.append(action)

    def finish(self, action: machine.Answer | machine.Conclude | machine.Finish) -> None:
        work = None if isinstance(action, machine.Finish) else action.work
        if work is not None:
            self.ended[id(work)] += 1
            return
        assert action.call.state != "done", "a call has one result"
        action.call.state = "done"
        self.done[action.call.id] += 1
        if isinstance(action, machine.Answer):
            self.errors[action.call.id] = action.error.code or ""

    def take_told(self) -> list[Action]:
        told, self.told = self.told, []
        return told


def made(name: str, tool: str = "t", *, agent: str = "a", idempotent: bool = False) -> Call:
    one = call(name, agent=agent)
    sandbox = SandboxSpec(isolation="call") if tool == "forking" else one.tool.sandbox
    one.tool = replace(one.tool, name=tool, sandbox=sandbox)
    one.export = replace(one.export, idempotent=idempotent)
    return one


def running(*calls: Call) -> tuple[Shell, JailSession]:
    """These calls in one session whose worker is ready."""
    shell = Shell()
    for one in calls:
        shell.place(one)
    (session,) = shell.launching
    shell.launched(session)
    shell.machine.ready(session)
    return shell, session


def result(shell: Shell, session: JailSession, one: Call, *, spent: bool = False) -> None:
    said = Result(call_id=one.worker_call_id, status="ok")
    concluded, freed = shell.machine.result(session, one, said, PAYLOAD, spent=spent, now=shell.now)
    shell.finish(concluded)
    shell.perform(freed)


def kinds(actions: Sequence[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


# --- the rules ------------------------------------------------------------------------------------------------------


def test_a_call_that_runs_out_of_time_ends_its_jail_after_its_siblings_had_a_chance() -> None:
    late, sibling, other = made("1"), made("2", idempotent=True), made("3")
    shell, session = running(late, sibling, other)
    shell.perform(shell.machine.run_out(late, 1.0))
    assert shell.errors == {"1": "E_TOOL_TIMEOUT"}
    assert [(wait.seconds, wait.then) for wait in shell.take_told() if isinstance(wait, machine.Wait)] == [
        (SIBLING_GRACE_S, "siblings")
    ]
    assert session.closed and session.number not in shell.dying
    shell.perform(shell.machine.waited(session, "siblings", "t"))
    assert session.number in shell.dying
    shell.gone(session)
    assert shell.errors == {"1": "E_TOOL_TIMEOUT", "3": "E_TOOL_OUTCOME_UNKNOWN"}
    (another,) = shell.launching
    shell.launched(another)
    assert sibling.session == another.number and sibling.attempts == 2, "it may run again, so it does"


def test_a_jail_that_is_ending_anyway_is_given_up_for_nobody() -> None:
    late, sibling = made("1"), made("2", idempotent=True)
    shell, session = running(late, sibling)
    shell.perform(shell.machine.run_out(late, 1.0, dying=True))
    shell.gone(session)
    assert shell.errors == {"1": "E_TOOL_TIMEOUT", "2": "E_TOOL_CRASHED"}


def test_a_cancelled_call_is_answered_at_once_and_its_handler_asked_first() -> None:
    one = made("1")
    shell, session = running(one)
    shell.perform(shell.machine.cancel(one, 1.0))
    assert shell.errors == {"1": "E_CANCELLED"}
    told = shell.take_told()
    assert kinds(told) == ["AskToStop", "WaitForStop"]
    assert isinstance(told[1], machine.WaitForStop) and told[1].seconds == CANCEL_GRACE_S
    shell.perform(shell.machine.late_result(session, one.worker_call_id))  # it has stopped
    shell.perform(shell.machine.did_not_stop(session, one))
    assert shell.take_told() == []
    two = made("2")
    shell.place(two)
    shell.perform(shell.machine.cancel(two, 2.0))
    shell.perform(shell.machine.did_not_stop(session, two))
    assert session.number in shell.dying


def test_a_call_that_waits_is_withdrawn_for_nothing() -> None:
    shell = Shell()
    one, two = made("1"), made("2")
    shell.place(one)
    shell.place(two)
    shell.perform([*shell.machine.cancel(one, 0.0), *shell.machine.run_out(two, 0.0)])
    assert shell.errors == {"1": "E_CANCELLED", "2": "E_TOOL_TIMEOUT"}
    shell.launched(shell.launching[0])
    assert shell.there[0].calls == {} and shell.told == []


def test_a_call_with_processes_of_its_own_ends_alone() -> None:
    late, sibling = made("1", "forking"), made("2", "forking")
    shell, session = running(late, sibling)
    shell.perform(shell.machine.run_out(late, 1.0))
    assert kinds(shell.take_told()) == ["EndCall"]
    assert not session.closed and sibling.worker_call_id in session.calls
    shell.perform(shell.machine.call_failed(session, sibling, ERROR, "crashed", 2.0))
    assert shell.errors == {"1": "E_TOOL_TIMEOUT", "2": "E_TOOL_CRASHED"}
    assert session.number not in shell.dying


def test_a_jail_that_met_a_limit_takes_no_more_calls() -> None:
    one = made("1")
    shell, session = running(one)
    result(shell, session, one, spent=True)
    assert session.closed and kinds(shell.take_told()) == ["Leave", "Wait"]


def test_an_idle_jail_is_asked_to_leave_and_one_that_still_works_is_killed() -> None:
    one = made("1")
    shell, session = running(one)
    assert kinds(shell.machine.end(session)) == ["Leave", "Wait"]
    shell.perform(shell.machine.cancel(one, 1.0))
    assert kinds(shell.machine.end(session)) == ["Kill"]


def test_a_jail_whose_place_was_replaced_is_made_again_so_often() -> None:
    one = made("1")
    shell, session = running(one)
    for _ in range(MAX_MADE - 1):
        shell.gone(session, replaced=True)
        assert shell.errors == {}
        (session,) = shell.launching
        shell.launched(session)
    shell.gone(session, replaced=True)
    assert shell.errors == {"1": "E_TOOL_CRASHED"}


def test_a_tool_host_that_ends_answers_nobody() -> None:
    one = made("1", idempotent=True)
    shell, session = running(one)
    session.calls.clear()
    assert shell.machine.gone(session, ERROR, closing=True) == []


def test_what_a_worker_may_say_of_calls() -> None:
    one, two = made("1"), made("2")
    shell, session = running(one, two)
    decide = shell.machine
    assert decide.asker(session, "send", one.worker_call_id, None) is one
    for name, own in (("99", None), (one.worker_call_id, two)):
        with pytest.raises(Violation, match="in the name of a call"):
            decide.asker(session, "send", name, own)
    result(shell, session, one)
    assert decide.asker(session, "send", one.worker_call_id, None) is None, "by mistake, just after its end"
    with pytest.raises(Violation, match="does not run"):
        decide.late_result(session, one.worker_call_id)
    session.permissions = ()
    with pytest.raises(Violation, match="permission"):
        decide.asker(session, "send", two.worker_call_id, None)
    with pytest.raises(Violation, match="continues"):
        decide.check_continues(session, two, Result(call_id=two.worker_call_id, status="ok", continues=True))


def test_work_goes_on_once() -> None:
    one = made("1")
    shell, session = running(one)
    pending = Result(call_id=one.worker_call_id, status="pending", handle="h", continues=True)
    shell.machine.check_continues(session, one, pending)
    shell.perform(shell.machine.goes_on(session, one, work_of(one), PAYLOAD, 0.0))
    assert shell.done == {"1": 1} and session.room == session.most
    with pytest.raises(Violation, match="continues"):
        shell.machine.check_continues(session, one, pending)
    with pytest.raises(Violation, match="twice"):
        shell.machine.result(session, one, pending, PAYLOAD, spent=False, now=0.0)
    result(shell, session, one)
    assert list(shell.ended.values()) == [1] and session.works == {}


def test_work_that_meets_a_limit_ends_with_it() -> None:
    one = made("1")
    shell, session = running(one)
    work = work_of(one)
    shell.perform(shell.machine.goes_on(session, one, work, PAYLOAD, 0.0))
    shell.perform(shell.machine.calls_over_limit(session, ERROR, [one.worker_call_id, "99"], 1.0))
    assert (shell.done, shell.ended) == ({"1": 1}, {id(work): 1})
    assert session.number in shell.dying


def work_of(one: Call) -> Work:
    return Work(Promise("a", "k", "t/h", "t__f", one.id, "turn", one.id), 0.0)


# --- any history ----------------------------------------------------------------------------------------------------


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens in whatever order, each call has one result in the end, and each piece of work, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shell = Shell()
        self.calls: list[Call] = []
        self.begun: list[Work] = []

    def pick(self, data: Any, what: Sequence[Any]) -> Any:
        return what[data.draw(st.integers(0, len(what) - 1))]

    def at(self) -> list[JailSession]:
        return [session for session in self.shell.there if session.number not in self.shell.dying]

    @rule(tool=st.sampled_from(["t", "u", "forking"]), agent=st.sampled_from("ab"), idempotent=st.booleans())
    def a_call_comes(self, tool: str, agent: str, idempotent: bool) -> None:
        one = made(str(len(self.calls)), tool, agent=agent, idempotent=idempotent)
        self.calls.append(one)
        self.shell.place(one)

    @precondition(lambda self: self.shell.launching)
    @rule(data=st.data(), ready=st.booleans())
    def a_jail_is_there(self, data: Any, ready: bool) -> None:
        session = self.pick(data, self.shell.launching)
        self.shell.launched(session)
        if ready:
            self.shell.machine.ready(session)

    @precondition(lambda self: self.shell.launching)
    @rule(data=st.data())
    def a_jail_cannot_be_made(self, data: Any) -> None:
        session = self.pick(data, self.shell.launching)
        self.shell.launching.remove(session)
        calls, actions = self.shell.machine.pool.failed(session)
        self.shell.perform([*(machine.Answer(None, one, ERROR) for one in calls), *actions])

    @precondition(lambda self: any(session.calls for session in self.at()))
    @rule(data=st.data(), how=st.sampled_from(["ends", "spent", "goes on", "refused"]))
    def a_worker_answers(self, data: Any, how: str) -> None:
        session = self.pick(data, [session for session in self.at() if session.calls])
        one = self.pick(data, list(session.calls.values()))
        if how in ("ends", "spent") or one.worker_call_id in session.works:
            result(self.shell, session, one, spent=how == "spent")
            return
        begun = work_of(one) if how == "goes on" else ERROR
        if isinstance(begun, Work):
            self.begun.append(begun)
        self.shell.perform(self.shell.machine.goes_on(session, one, begun, PAYLOAD, self.shell.now))

    @precondition(lambda self: any(session.abandoned for session in self.at()))
    @rule(data=st.data())
    def a_handler_stops_late(self, data: Any) -> None:
        session = self.pick(data, [session for session in self.at() if session.abandoned])
        name = self.pick(data, sorted(session.abandoned))
        self.shell.perform(self.shell.machine.late_result(session, name))

    @precondition(lambda self: any(one.state != "done" for one in self.calls))
    @rule(data=st.data(), how=st.sampled_from(["late", "cancelled"]))
    def a_call_is_given_up(self, data: Any, how: str) -> None:
        one = self.pick(data, [one for one in self.calls if one.state != "done"])
        session = self.shell.machine.session_of(one)
        dying = session is not None and session.number in self.shell.dying
        if how == "late":
            self.shell.perform(self.shell.machine.run_out(one, self.shell.now, dying=dying))
        else:
            self.shell.perform(self.shell.machine.cancel(one, self.shell.now))

    @precondition(lambda self: self.at())
    @rule(data=st.data(), how=st.sampled_from(["broken", "limit", "load", "leave", "siblings", "stop", "fails"]))
    def something_happens_to_a_jail(self, data: Any, how: str) -> None:
        session, decide = self.pick(data, self.at()), self.shell.machine
        some = list(session.calls.values())[:2]
        if how == "broken":
            self.shell.perform(decide.break_off(session, ERROR, "broken"))
        elif how == "limit":
            names = [one.worker_call_id for one in some]
            self.shell.perform(decide.calls_over_limit(session, ERROR, names, self.shell.now))
        elif how == "fails":
            for one in some if session.forks else ():
                self.shell.perform(decide.call_failed(session, one, ERROR, "ended", self.shell.now))
        elif how == "stop":
            for one in self.calls:
                if one.worker_call_id in session.abandoned:
                    self.shell.perform(decide.did_not_stop(session, one))
        else:
            self.shell.perform(decide.waited(session, how, "t"))  # type: ignore[arg-type] # the three that there are

    @precondition(lambda self: self.shell.there)
    @rule(data=st.data(), replaced=st.booleans())
    def a_jail_ends(self, data: Any, replaced: bool) -> None:
        self.shell.gone(self.pick(data, self.shell.there), replaced=replaced)

    @invariant()
    def no_two_results(self) -> None:
        assert all(count == 1 for count in self.shell.done.values())
        assert all(count == 1 for count in self.shell.ended.values())

    @invariant()
    def what_was_ended_runs_nothing_new(self) -> None:
        for session in self.shell.there:
            assert all(one.session == session.number for one in session.calls.values())
            assert set(session.works) <= set(session.calls)

    def teardown(self) -> None:
        for _ in range(4 * (len(self.calls) + 1) * MAX_MADE):
            for session in list(self.shell.launching):
                self.shell.launched(session)
            for session in list(self.shell.there):
                self.shell.gone(session)
        assert self.shell.launching == [] and self.shell.there == []
        assert calls_without_a_place(self.shell.machine.pool) == 0
        assert self.shell.done == {one.id: 1 for one in self.calls}, "each call has a result"
        assert self.shell.ended == {id(work): 1 for work in self.begun}, "and each piece of work"


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
