"""What a look at the clock costs, and that nothing due is missed."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.broker.state.mailbox import Due
from tests.unit.kernel.broker.world import World, run


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=60), st.lists(st.integers(0, 50), max_size=8))
def test_everything_that_still_waits_is_given_out_once_and_in_order(
    things: list[tuple[int, bool]], looks: list[int]
) -> None:
    gone = {number for number, (_, waits) in enumerate(things) if not waits}
    due: Due[int] = Due(lambda number: number not in gone)
    for number, (moment, _) in enumerate(things):
        due.add(moment, number)
    taken: list[int] = []
    for now in sorted(looks):
        taken += due.take(now)
        assert sorted(taken) == [n for n, (moment, waits) in enumerate(things) if waits and moment <= now]
    assert [things[number][0] for number in taken] == sorted(things[number][0] for number in taken)


def test_what_has_ended_does_not_stay_until_its_deadline() -> None:
    waiting: set[int] = set()
    due: Due[int] = Due(waiting.__contains__)
    for number in range(100_000):
        waiting.add(number)
        due.add(1e9, number)
        waiting.discard(number - 10)
    assert len(due._heap) < 100


class Unwalked(dict[Any, Any]):
    """A mapping that nobody may walk."""

    def __iter__(self) -> Any:
        raise AssertionError("somebody walks all instances")

    values = keys = items = __iter__


def test_a_tick_does_not_walk_the_instances() -> None:
    world = World()
    for number in range(100):
        world.clients[0].ask(f"e{number}", key=f"k{number}", calls=1)
    world.flow(world.clients[0])
    mailbox = world.router.bus.mailbox
    assert len(mailbox.instances) == 100
    mailbox.instances = Unwalked(mailbox.instances)
    world.advance(1.0)
    assert len(mailbox.holding) == sum(i.leased is not None for i in dict.values(mailbox.instances))


def test_an_event_that_comes_back_ends_at_its_deadline() -> None:
    world = World()
    world.clients[0].ask("e1", calls=1)
    run(world, 6)
    mailbox = world.router.bus.mailbox
    event = mailbox.events["e1"]
    assert event.state == "leased"
    event.deadline = world.now + 1
    instance = event.instance
    assert list(mailbox.holding) == [instance]
    mailbox.give_back(instance)
    assert not mailbox.holding
    world.now += 2
    world.router.tick(world.now)
    assert event.end == "expired"
