"""The service machine and the order of the end: no process, no clock."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.supervisor.lifecycle import (
    HEALTHY_S,
    HURRY_S,
    KILL_WAIT_S,
    MAX_BACKOFF_S,
    MAX_FIRST_DEATHS,
    PROGRAMS,
    START_LIMIT_S,
    STOP_ORDER,
    Begin,
    Down,
    End,
    Finished,
    GiveUp,
    KillGroup,
    KillProcess,
    Later,
    RetryDue,
    Service,
    ServiceAction,
    ServiceEvent,
    StartOverdue,
    StartProcess,
    Steady,
    Stopping,
    TerminateGroup,
    TerminateProcess,
    Up,
    backoff,
    step_service,
    step_stop,
)


def drive(service: Service, *events: ServiceEvent) -> tuple[Service, list[ServiceAction]]:
    done: list[ServiceAction] = []
    for event in events:
        service, actions = step_service(service, event)
        done += actions
    return service, done


def starts(actions: list[ServiceAction]) -> list[int]:
    return [action.run for action in actions if isinstance(action, StartProcess)]


def test_first_restart_is_at_once_and_later_ones_back_off_to_a_second() -> None:
    service, _ = drive(Service("broker"), Begin(), Up(1))
    waits: list[float] = []
    for _ in range(9):
        service, actions = drive(service, Down(service.run, "signal SIGKILL"))
        retries = [a for a in actions if isinstance(a, Later) and isinstance(a.event, RetryDue)]
        assert all(retry.role == "broker" for retry in retries)
        waits.append(retries[0].seconds if retries else 0.0)
        if retries:
            service, _ = drive(service, retries[0].event)
        service, _ = drive(service, Up(service.run))
    assert waits == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert service.restarts == 9
    assert service.last_exit == "signal SIGKILL"


def test_ten_healthy_seconds_forget_the_deaths() -> None:
    service, _ = drive(Service("broker"), Begin(), Up(1), Down(1, "exit 1"), Up(2), Down(2, "exit 1"), RetryDue(2))
    service, actions = drive(service, Up(3))
    assert actions == [Later("broker", HEALTHY_S, Steady(3))]
    service, _ = drive(service, Steady(3))
    service, actions = drive(service, Down(3, "exit 1"))
    assert starts(actions) == [4]


def test_timers_of_an_earlier_run_change_nothing() -> None:
    service, _ = drive(Service("broker"), Begin(), Up(1), Down(1, "exit 1"), Up(2))
    assert drive(service, Steady(1), RetryDue(1), StartOverdue(1), Down(1, "late"), Up(1)) == (service, [])


def test_a_service_that_never_was_ready_gives_up() -> None:
    service, actions = drive(Service("toolhost"), Begin(), *(Down(1, "x"), Down(2, "y"), RetryDue(2), Down(3, "z")))
    assert starts(actions) == [1, 2, 3] == list(range(1, MAX_FIRST_DEATHS + 1))
    assert actions[-1] == GiveUp("toolhost", "z")
    assert service.phase == "stopped"


def test_a_final_death_gives_up_at_once_but_only_before_the_first_ready() -> None:
    _, actions = drive(Service("toolhost"), Begin(), Down(1, "no bubblewrap", final=True))
    assert actions[-1] == GiveUp("toolhost", "no bubblewrap")
    service, actions = drive(Service("toolhost"), Begin(), Up(1), Down(1, "no bubblewrap", final=True))
    assert service.phase == "starting"
    assert starts(actions) == [1, 2]


def test_a_start_that_hangs_is_killed_and_counts() -> None:
    service, actions = drive(Service("broker"), Begin(), StartOverdue(1))
    overdue = Later("broker", START_LIMIT_S, StartOverdue(1))
    assert actions == [StartProcess("broker", 1), overdue, KillProcess("broker")]
    service, _ = drive(service, Down(1, "signal SIGKILL"))
    assert service.deaths == 1


@pytest.mark.parametrize("before", [(Begin(),), (Begin(), Up(1))])
def test_an_ordered_end_restarts_nothing(before: tuple[ServiceEvent, ...]) -> None:
    service, actions = drive(Service("broker"), *before, End())
    assert actions[-1] == TerminateProcess("broker")
    service, actions = drive(service, Down(1, "exit 0"))
    assert (service.phase, service.last_exit, actions) == ("stopped", "exit 0", [])


def test_an_end_during_the_backoff_stops_the_retry() -> None:
    service, _ = drive(Service("b"), Begin(), Up(1), Down(1, "x"), Up(2), Down(2, "x"), End())
    assert service.phase == "stopped"
    assert drive(service, RetryDue(2)) == (service, [])


def test_a_service_that_is_ready_has_no_start_that_hangs() -> None:
    service, _ = drive(Service("b"), Begin(), Up(1))
    assert drive(service, StartOverdue(1)) == (service, [])


@given(st.integers(min_value=0, max_value=10_000))
def test_backoff_never_passes_its_cap(deaths: int) -> None:
    assert 0.0 <= backoff(deaths) <= MAX_BACKOFF_S


runs = st.integers(min_value=0, max_value=6)
events: st.SearchStrategy[ServiceEvent] = st.one_of(
    st.just(Begin()),
    st.just(End()),
    st.builds(Up, runs),
    st.builds(Down, runs, st.just("x"), st.booleans()),
    st.builds(Steady, runs),
    st.builds(RetryDue, runs),
    st.builds(StartOverdue, runs),
)


@given(st.lists(events, max_size=40))
def test_at_most_one_process_lives_at_a_time(history: list[ServiceEvent]) -> None:
    """Whatever comes in whatever order: a start happens only when the earlier process is known to be gone."""
    service, alive = Service("broker"), 0
    for event in history:
        if isinstance(event, Down) and event.run != alive:
            continue  # only a process that was started can be seen to end
        if isinstance(event, Down):
            alive = 0
        service, actions = step_service(service, event)
        for run in starts(actions):
            assert alive == 0
            alive = run
        assert (service.phase in ("starting", "ready", "stopping")) == (alive != 0)


# --- the end


EVERYONE: Final = frozenset(group for groups, _ in STOP_ORDER for group in groups)


def test_turns_end_first_then_all_leave_side_by_side_and_what_does_not_is_killed() -> None:
    state, actions = step_stop(None, EVERYONE, 0.0)
    assert actions == [TerminateGroup("turns")]
    assert step_stop(state, EVERYONE, 1.0) == (state, [])
    assert step_stop(state, EVERYONE - {"forkserver"}, 1.0) == (state, [])  # agents still call tools
    state, actions = step_stop(state, EVERYONE - {"forkserver"}, 3.0)
    assert actions == [KillGroup("turns")]
    assert isinstance(state, Stopping)
    assert state.until == 3.0 + KILL_WAIT_S
    state, actions = step_stop(state, EVERYONE - {"turns"}, 3.1)
    assert actions == [TerminateGroup(group) for group in ("agents", "forkserver", "toolhost", PROGRAMS, "broker")]
    assert step_stop(state, frozenset({"broker"}), 3.2) == (state, [])
    state, actions = step_stop(state, frozenset({"broker"}), 4.6)
    assert actions == [KillGroup("broker")]
    assert step_stop(state, frozenset(), 4.7) == (None, [Finished(())])


def test_a_kernel_without_agents_begins_with_what_is_there() -> None:
    assert step_stop(None, frozenset({"toolhost"}), 0.0)[1] == [TerminateGroup("toolhost")]


def test_in_a_hurry_nobody_gets_much_time() -> None:
    state, _ = step_stop(None, frozenset({"turns"}), 0.0, hurry=True)
    assert isinstance(state, Stopping)
    assert state.until == HURRY_S


def test_what_not_even_a_kill_ends_is_named() -> None:
    left = frozenset({"turns", "agents", "broker"})
    state, now = step_stop(None, left, 0.0)[0], 0.0
    actions: list[object] = []
    while state is not None:
        now = state.until
        state, new = step_stop(state, left, now)
        actions += new
    assert actions[-3:] == [KillGroup("agents"), KillGroup("broker"), Finished(("agents", "broker"))]


@given(st.data())
def test_a_stop_ends_within_ten_seconds_whatever_dies_when(data: st.DataObject) -> None:
    alive = data.draw(st.frozensets(st.sampled_from(sorted(EVERYONE))))
    now = 0.0
    state, _ = step_stop(None, alive, now)
    while state is not None:
        if data.draw(st.booleans()) and alive:
            alive -= {data.draw(st.sampled_from(sorted(alive)))}
        else:
            now = state.until
        state, _ = step_stop(state, alive, now)
    assert now <= 9.0


def test_turns_get_another_time_and_nobody_else_does() -> None:
    state, _ = step_stop(None, EVERYONE, 0.0, turns_s=8.5)
    assert state is not None
    assert state.until == 8.5
    state, _ = step_stop(state, EVERYONE - {"turns"}, 1.0, turns_s=8.5)
    assert state is not None
    assert state.until == 1.0 + STOP_ORDER[1][1]
