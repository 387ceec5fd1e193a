"""Wanted agents against running ones: no process, no clock."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from goondan.kernel.supervisor.lifecycle import (
    FIRST_BACKOFF_S,
    HEALTHY_S,
    LEAVE_LIMIT_S,
    MAX_START_FAILURES,
    MAX_STARTING,
    START_LIMIT_S,
    STARTING_S,
    AgentAction,
    History,
    KillAgent,
    Roster,
    Spawn,
    Tell,
    TerminateAgent,
)
from goondan.schemas.wire.control import Exited, Principal, Ready, Running, SpawnFailed

A = Principal("agent", "coder", "u1")
B = Principal("agent", "coder", "u2")


def roster(*wanted: Principal) -> Roster:
    made = Roster()
    made.fork_server(up=True, now=0.0)
    made.want(list(wanted), full=True, now=0.0)
    return made


def run(made: Roster, launch: int) -> None:
    made.spawned(launch, 0.0)
    made.ready(launch, 0.0)


def test_what_is_wanted_is_spawned_once_in_the_order_asked() -> None:
    made = Roster()
    made.fork_server(up=True, now=0.0)
    assert made.want([B, A], full=True, now=0.0) == [Spawn(B, 1), Spawn(A, 2)]
    assert made.want([A, B], full=False, now=0.0) == []


def test_an_agent_that_is_ready_before_its_pid_is_known_runs() -> None:
    made = roster(A)
    assert made.ready(1, 0.1) == [Tell(Ready(A, 1))]
    assert made.spawned(1, 0.2) == []
    assert made.live[A].phase == "ready"
    assert not made.live[A].starting
    assert made.tick(0.2 + START_LIMIT_S) == [], "its start has not failed"


def test_tool_hosts_in_the_wanted_set_are_not_agents() -> None:
    assert roster(Principal("toolhost", "toolhost/1")).live == {}


def test_an_agent_that_cannot_start_is_given_up_after_five() -> None:
    made, now, spawns = roster(A), 0.0, 1
    last: list[AgentAction] = []
    while made.wanted:
        launch = made.live[A].launch
        made.spawned(launch, now)
        last = made.exited(launch, "exit 1", now)
        due = made.next_due()
        if due is not None:
            now = due
            made.tick(now)
        spawns += A in made.live
    assert spawns == MAX_START_FAILURES
    assert last == [
        Tell(SpawnFailed(A, MAX_START_FAILURES, "exit 1")),
        Tell(Exited(A, MAX_START_FAILURES, "exit 1", started=False)),
    ]
    assert made.histories == {}
    assert made.want([A], full=False, now=now) == [Spawn(A, MAX_START_FAILURES + 1)]


@pytest.mark.parametrize("ordered", [True, False])
def test_kills_that_the_broker_ordered_never_count(ordered: bool) -> None:
    made = roster(A)
    for _ in range(MAX_START_FAILURES * 2):
        launch = made.live[A].launch
        run(made, launch)
        if ordered:
            assert made.kill(A, launch, 0.0) == [KillAgent(launch)]
        actions = made.exited(launch, "signal SIGKILL", 0.0)
        assert actions[0] == Tell(Exited(A, launch, "signal SIGKILL", ordered))
        if not ordered:
            made.tick(made.next_due() or 0.0)
        else:
            assert actions[1] == Spawn(A, launch + 1)  # no delay either
    assert A in made.wanted


def test_a_killed_launch_that_is_gone_already_is_reported_again() -> None:
    assert roster().kill(A, 7, 0.0) == [Tell(Exited(A, 7, "was not running", True))]


def test_retired_agents_are_not_replaced() -> None:
    made = roster(A)
    run(made, 1)
    made.retire(A, 1, 1.0)
    assert made.exited(1, "exit 0", 1.1, clean=True) == [Tell(Exited(A, 1, "exit 0", True))]
    assert made.histories == {}


def test_an_agent_that_says_goodbye_is_done_and_one_that_was_let_go_is_not() -> None:
    made = roster(A)
    run(made, 1)
    made.stop(2.0, told=True)
    made.retire(A, 1, 2.1)  # after its step, which may go on; the broker had not heard of the stop
    assert not made.live[A].is_done
    made.retire(A, 1, 2.2, done=True)
    assert made.live[A].is_done
    assert made.kill_all(5.0) == [KillAgent(1)]  # as long as its process lives


def test_an_event_during_the_retirement_brings_the_agent_back_after_it() -> None:
    made = roster(A)
    run(made, 1)
    made.retire(A, 1, 1.0)
    assert made.want([A], full=False, now=1.0) == []
    assert made.exited(1, "exit 0", 1.1, clean=True) == [Tell(Exited(A, 1, "exit 0", True)), Spawn(A, 2)]


def test_an_exit_that_overtakes_its_retirement_starts_nobody() -> None:
    made = roster(A)
    run(made, 1)
    assert made.exited(1, "exit 0", 1.0, clean=True) == [Tell(Exited(A, 1, "exit 0", False))]
    assert made.retire(A, 1, 1.01) == []
    assert made.tick(5.0) == []


def test_a_start_that_hangs_is_killed_and_counts() -> None:
    made = roster(A)
    made.spawned(1, 0.0)
    assert made.tick(100.0) == [KillAgent(1)]
    made.exited(1, "signal SIGKILL", 100.0)
    assert made.histories[A].failures == 1


def test_a_lost_fork_server_counts_nothing_and_its_requests_are_asked_again() -> None:
    made = roster(A, B)
    run(made, 2)
    assert made.fork_server(up=False, now=1.0) == [Tell(Exited(A, 1, "the fork server was lost", True, False))]
    assert made.spawned(1, 1.0) == []  # too late: that launch is over
    assert made.fork_server(up=True, now=2.0) == [Spawn(A, 3)]
    assert made.histories[A].failures == 0


def test_what_was_ordered_before_the_pid_was_known_is_done_then() -> None:
    made = roster(A, B)
    assert made.kill(A, 1, 0.0) == []
    assert made.spawned(1, 0.1) == [KillAgent(1)]
    assert made.stop(0.2) == []
    assert made.spawned(2, 0.3) == [TerminateAgent(2)]


def test_a_stop_asks_everyone_and_starts_nobody() -> None:
    made = roster(A, B)
    run(made, 1)
    run(made, 2)
    assert made.stop(1.0) == [TerminateAgent(1), TerminateAgent(2)]
    assert made.want([Principal("agent", "x", "y")], full=False, now=1.0) == []
    assert made.exited(1, "exit 0", 1.1) == [Tell(Exited(A, 1, "exit 0", True))]
    assert made.kill_all(2.0) == [KillAgent(2)]
    assert made.kill_all(2.1) == []


def test_starts_are_bounded_and_go_on_as_agents_get_ready() -> None:
    everyone = [Principal("agent", "coder", str(n)) for n in range(MAX_STARTING + 5)]
    made = Roster()
    made.fork_server(up=True, now=0.0)
    assert len(made.want(everyone, full=True, now=0.0)) == MAX_STARTING
    made.spawned(1, 0.0)
    told = Tell(Ready(everyone[0], 1))
    assert made.ready(1, 0.0) == [told, Spawn(everyone[MAX_STARTING], MAX_STARTING + 1)]


def test_starts_that_take_long_keep_nobody_else_from_starting() -> None:
    everyone = [Principal("agent", "coder", str(n)) for n in range(MAX_STARTING + 5)]
    made = Roster()
    made.fork_server(up=True, now=0.0)
    made.want(everyone, full=True, now=0.0)
    for launch in range(1, MAX_STARTING + 1):
        made.spawned(launch, 0.1)
    assert made.next_due() == 0.1 + STARTING_S
    assert made.tick(1.0) == []
    assert len(made.tick(0.1 + STARTING_S)) == 5
    assert made.next_due() is None
    assert [made.ready(launch, 2.0) for launch in (1, 2)] == [
        [Tell(Ready(everyone[launch - 1], launch))] for launch in (1, 2)
    ]
    assert made.tick(START_LIMIT_S + 0.1)[:1] == [KillAgent(3)], "one that hangs is ended all the same"
    hung, ready = made.find(3), made.find(1)
    assert hung is not None and hung.why_ended("signal SIGKILL") == "it was not ready within 15 s, and was killed"
    assert ready is not None and ready.why_ended("signal SIGKILL") == "signal SIGKILL"


def test_a_fork_server_that_does_not_answer_is_noticed() -> None:
    made = roster(A)
    assert not made.overdue(START_LIMIT_S - 1)
    assert made.overdue(START_LIMIT_S)
    made.spawned(1, START_LIMIT_S)
    assert not made.overdue(START_LIMIT_S)


def test_a_start_that_the_fork_server_refuses_counts_and_is_tried_again() -> None:
    made = roster(A)
    refused = Tell(Exited(A, 1, "no memory", ordered=False, started=False))
    assert made.refused(1, "no memory", 1.0) == [refused, Spawn(A, 2)]
    assert made.histories[A] == History(failures=1, restarts=1, last_exit="no memory")
    assert made.refused(2, "no memory", 2.0)[1:] == []
    assert made.next_due() == 2.0 + FIRST_BACKOFF_S
    assert made.waits(A) and not made.waits(B)
    assert made.refused(2, "no memory", 3.0) == [], "its launch is over"


def test_crashes_back_off_until_the_agent_was_healthy() -> None:
    made = roster(A)
    run(made, 1)
    assert made.exited(1, "signal SIGSEGV", 20.0)[1:] == [Spawn(A, 2)]
    run(made, 2)
    assert made.exited(2, "exit 1", 21.0)[1:] == []
    assert made.histories[A] == History(crashes=2, restarts=2, last_exit="exit 1")
    assert made.next_due() == 21.0 + FIRST_BACKOFF_S
    assert made.tick(22.0) == [Spawn(A, 3)]
    made.spawned(3, 23.0)
    assert made.tick(24.0 + HEALTHY_S) == [], "it is not ready"
    assert made.ready(3, 40.0) == [Tell(Ready(A, 3))]
    made.tick(39.9 + HEALTHY_S)
    assert made.histories[A].crashes == 2
    made.tick(40.0 + HEALTHY_S)
    assert made.histories[A].crashes == 0


def test_a_clean_exit_waits_for_the_order_that_may_follow_it() -> None:
    made = roster(A)
    run(made, 1)
    made.exited(1, "exit 0", 7.0, clean=True)
    assert made.next_due() == 7.0 + FIRST_BACKOFF_S
    assert made.waits(A)


def test_ready_is_told_once_and_forgets_failures() -> None:
    made = roster(A)
    made.refused(1, "no memory", 0.0)
    made.spawned(2, 1.0)
    assert made.ready(2, 1.0) == [Tell(Ready(A, 2))]
    assert made.ready(2, 1.0) == made.ready(9, 1.0) == []
    assert made.histories[A] == History(restarts=1, last_exit="no memory")


def test_each_phase_has_its_time_from_its_own_beginning() -> None:
    made = roster(A, B)
    made.spawned(1, 50.0)
    made.spawned(2, 50.0)
    assert made.tick(49.9 + START_LIMIT_S) == []
    made.ready(1, 60.0)
    made.retire(A, 1, 70.0)
    assert made.tick(69.9 + LEAVE_LIMIT_S) == [KillAgent(2)]
    assert made.tick(70.0 + LEAVE_LIMIT_S) == [KillAgent(1)]
    assert made.exited(1, "signal SIGKILL", 81.0) == [Tell(Exited(A, 1, "signal SIGKILL", ordered=True))]


def test_who_is_not_wanted_any_more_waits_no_longer() -> None:
    made = Roster()
    made.want([A, B], full=True, now=0.0)
    assert made.waits(A) and made.waits(B)
    made.want([B], full=True, now=0.0)
    assert not made.waits(A)
    assert made.fork_server(up=True, now=1.0) == [Spawn(B, 1)]


def test_a_principal_that_was_forgotten_is_found_and_started() -> None:
    made = roster(A)
    made.wanted.add(B)
    assert made.audit(1.0) == ([B], [Spawn(B, 2)])
    found = made.find(2)
    assert found is not None and (found.principal, found.since) == (B, 1.0)
    assert made.find(3) is None


def test_the_broker_asks_those_that_are_ready_to_leave_and_the_supervisor_the_others() -> None:
    made = roster(A, B)
    run(made, 1)
    made.spawned(2, 0.0)
    assert made.stop(1.0, told=True) == [TerminateAgent(2)]
    assert made.wanted == set()
    assert made.tick(1.0 + LEAVE_LIMIT_S * 2) == [], "a stop has times of its own"
    assert made.terminate_all() == [TerminateAgent(1), TerminateAgent(2)]
    assert made.kill_all(30.0) == [KillAgent(1), KillAgent(2)]
    assert made.terminate_all() == []


def test_what_has_no_pid_is_sent_no_signal() -> None:
    assert roster(A).terminate_all() == []


def test_restarts_that_are_due_are_waited_for_beside_starts_that_take_long() -> None:
    everyone = [Principal("agent", "coder", str(n)) for n in range(MAX_STARTING + 2)]
    made = Roster()
    made.fork_server(up=True, now=5.0)
    made.want(everyone[:1], full=False, now=5.0)
    made.refused(1, "no memory", 5.0)
    made.refused(2, "no memory", 5.0)
    made.want(everyone[1:], full=False, now=5.0)
    assert made.next_due() == 5.0 + FIRST_BACKOFF_S
    assert made.tick(5.0 + FIRST_BACKOFF_S) == []
    assert made.next_due() == 5.0 + STARTING_S


def test_the_inventory_names_every_launch() -> None:
    made = roster(A, B)
    run(made, 1)
    assert made.inventory().running == [Running(A, 1), Running(B, 2, ready=False)]


PRINCIPALS = [Principal("agent", "coder", key) for key in ("a", "b", "c")]


class World(RuleBasedStateMachine):
    """A roster in a world of processes: whatever happens, one process per principal, and nobody is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.roster = Roster()
        self.up = False
        self.asked: set[int] = set()  # spawn requests at the fork server
        self.processes: set[int] = set()  # launches with a living process
        self.told: list[Exited] = []
        self.owner: dict[int, Principal] = {}

    def act(self, actions: list[AgentAction]) -> None:
        for action in actions:
            match action:
                case Spawn(principal, launch):
                    assert self.up
                    assert launch not in self.owner, "a launch number was used twice"
                    self.owner[launch] = principal
                    self.asked.add(launch)
                case KillAgent(launch) | TerminateAgent(launch):
                    assert launch in self.processes
                case Tell(Exited() as message):
                    if message.cause != "was not running":
                        self.told.append(message)
                case Tell():
                    pass

    @rule(principals=st.lists(st.sampled_from(PRINCIPALS)), full=st.booleans())
    def want(self, principals: list[Principal], full: bool) -> None:
        self.act(self.roster.want(principals, full=full, now=self.now))

    @rule(principal=st.sampled_from(PRINCIPALS), launch=st.integers(1, 12))
    def retire(self, principal: Principal, launch: int) -> None:
        self.act(self.roster.retire(principal, launch, self.now))

    @rule(principal=st.sampled_from(PRINCIPALS), launch=st.integers(1, 12))
    def kill(self, principal: Principal, launch: int) -> None:
        self.act(self.roster.kill(principal, launch, self.now))

    @rule(up=st.booleans())
    def fork_server(self, up: bool) -> None:
        self.up = up
        if not up:
            self.asked.clear()
        self.act(self.roster.fork_server(up=up, now=self.now))

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if not self.asked:
            return
        launch = data.draw(st.sampled_from(sorted(self.asked)))
        self.asked.discard(launch)
        if data.draw(st.booleans()):
            self.processes.add(launch)
            self.act(self.roster.spawned(launch, self.now))
        else:
            self.act(self.roster.refused(launch, "no memory", self.now))

    @rule(launch=st.integers(1, 12))
    def ready(self, launch: int) -> None:
        if launch in self.processes:
            self.act(self.roster.ready(launch, self.now))

    @rule(data=st.data(), clean=st.booleans())
    def exit(self, data: st.DataObject, clean: bool) -> None:
        if self.processes:
            launch = data.draw(st.sampled_from(sorted(self.processes)))
            self.processes.discard(launch)
            self.act(self.roster.exited(launch, "exit", self.now, clean=clean))

    @rule(seconds=st.sampled_from([0.01, 1.0, 20.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.roster.tick(self.now))

    @rule()
    def stop(self) -> None:
        self.act(self.roster.stop(self.now))

    @invariant()
    def one_process_each(self) -> None:
        launches = sorted(self.asked | self.processes)
        owners = [self.owner[launch] for launch in launches]
        assert len(set(owners)) == len(owners)
        assert sorted(agent.launch for agent in self.roster.live.values()) == launches

    @invariant()
    def nobody_is_forgotten(self) -> None:
        missed, _ = self.roster.audit(self.now)
        assert missed == []
        if self.up:
            for principal in self.roster.wanted - self.roster.live.keys():
                assert self.roster.waits(principal)

    @invariant()
    def every_end_is_told_once(self) -> None:
        launches = [message.launch for message in self.told]
        assert len(set(launches)) == len(launches)
        assert set(launches) == self.owner.keys() - self.asked - self.processes

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.roster.histories.keys() <= self.roster.wanted | self.roster.live.keys()


World.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestRoster = World.TestCase
