"""Accepted is never lost, answered exactly once: the real machines under cuts, kills and every order of delivery."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.kernel.broker.histories import TESTED, check, history, perform
from tests.unit.kernel.broker.world import World

ACTIONS = st.one_of(
    st.tuples(st.just("up"), st.integers(0, 7)),
    st.tuples(st.just("up"), st.integers(0, 7)),
    st.tuples(st.just("down"), st.integers(0, 7)),
    st.tuples(st.just("down"), st.integers(0, 7)),
    st.tuples(st.just("round"), st.integers(1, 4)),
    st.tuples(st.just("ask"), st.integers(0, 7)),
    st.tuples(st.just("cancel"), st.integers(0, 7)),
    st.tuples(st.just("work"), st.just(0)),
    st.tuples(st.just("reconcile"), st.just(0)),
    st.tuples(st.just("advance"), st.integers(1, 30)),
    st.tuples(st.just("cut"), st.integers(0, 7)),
    st.tuples(st.just("kill_agent"), st.integers(0, 3)),
    st.tuples(st.just("kill_host"), st.just(0)),
    st.tuples(st.just("kill_broker"), st.just(0)),
    st.tuples(st.just("leave"), st.integers(0, 3)),
    st.tuples(st.just("again"), st.integers(0, 7)),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ACTIONS, max_size=120), st.sampled_from([1, 2, 256]), st.booleans())
@example([("ask", 2), ("round", 4), ("kill_broker", 0), ("round", 3), ("kill_agent", 0), ("round", 4)], 256, False)
@example([("ask", 1), ("round", 4), ("round", 4), ("kill_host", 0), ("kill_broker", 0)], 256, False)
def test_every_event_is_answered_once_whatever_breaks(
    actions: list[tuple[str, int]], max_live: int, handlers_ask: bool
) -> None:
    world = World(max_live_agents=max_live, handlers_ask=handlers_ask)
    for action, number in actions:
        perform(world, action, number)
    world.settle()
    check(world)


@pytest.mark.parametrize(
    "victim", ["kill_broker", "kill_host", "kill_agent", "cut", "die_before_write", "die_after_write"]
)
@pytest.mark.parametrize("after", range(0, 40, 3))
def test_one_failure_at_every_step(victim: str, after: int) -> None:
    world = World(handlers_ask=after % 2 == 1)
    for number in (2, 3, 6):
        perform(world, "ask", number)
    for step in range(after):
        perform(world, "up", step)
        perform(world, "down", step)
        if step % 4 == 3:
            perform(world, "reconcile", 0)
        if step % 6 == 5:
            perform(world, "work", 0)
    perform(world, victim, after % 4)
    world.settle()
    check(world)


@pytest.mark.parametrize("first", range(0, TESTED, 25))
def test_histories(first: int) -> None:
    """Longer worlds than hypothesis draws: what takes several failures in a row is found here. The first ones of those
    that `make simulate` lives through.
    """
    for number in range(first, first + 25):
        try:
            history(number)
        except Exception as error:
            raise AssertionError(f"history {number}: {error}") from error


def test_histories_have_what_they_are_made_for() -> None:
    """Enough of each kind among some hundred: large payloads, dead brokers, answers, tool calls, cancelled events."""
    worlds = [history(number) for number in range(TESTED, TESTED + 20)]
    assert sum(world.written > 0 for world in worlds) > 3
    assert sum(world.brokers_killed > 1 for world in worlds) > 3
    assert sum(len(client.answers) for world in worlds for client in world.clients) > 60
    assert sum(len(world.ran) for world in worlds) > 15
    assert sum(len(client.cancels) for world in worlds for client in world.clients) > 15
