"""Processors to spare: the rule, and where the system does not tell."""

from __future__ import annotations

import pytest

from goondan.agentproc.start.forkserver import SpareTime, idle_time, is_spare


@pytest.mark.parametrize(
    ("processors", "free", "spare"),
    [
        (1, 1.0, True),
        (1, 0.7, False),
        (2, 2.0, True),
        (2, 1.6, True),
        (2, 1.4, False),
        (2, 1.0, False),
        (64, 40.0, True),
        (64, 2.0, True),
        (64, 1.0, False),
    ],
)
@pytest.mark.parametrize("elapsed_s", [0.05, 0.8])
def test_one_processor_for_the_work_and_one_for_a_turn(
    processors: int, free: float, spare: bool, elapsed_s: float
) -> None:
    assert is_spare(free * elapsed_s, elapsed_s, processors) is spare


def test_a_look_is_at_the_time_since_it_began() -> None:
    times, idle = iter([100.0, 100.1, 100.2]), iter([5000.0, 5000.2, 5000.2])
    look = SpareTime(lambda: next(idle), lambda: next(times), processors=2)
    assert look.found()
    assert not look.found()


@pytest.mark.parametrize("told", [[None, 7.0], [7.0, None]])
def test_where_the_system_does_not_tell_there_is_time(told: list[float | None]) -> None:
    idle, times = iter(told), iter([1.0, 2.0])
    assert SpareTime(lambda: next(idle), lambda: next(times), processors=2).found()


def test_the_system_tells_how_long_its_processors_had_nothing_to_do() -> None:
    told = idle_time()
    assert told is None or told > 0
