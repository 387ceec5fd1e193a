"""The queue before a gate: the order of asking, and fairness between trees."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from goondan.features.gates.broker.gate import Ask, Queue


def ask(number: int, tree: str, since: float | None = None) -> Ask:
    return Ask(("agent", str(number)), tree, float(number if since is None else since))


def served(queue: Queue, now: float = 1000.0) -> list[int]:
    """The order in which all asks go out, one each second."""
    order = []
    while (first := queue.first(now)) is not None:
        queue.serve(first, now)
        order.append(int(first.key[1]))
        now += 1
    return order


@given(st.lists(st.integers(0, 50), unique=True))
def test_trees_with_one_ask_each_are_served_in_the_order_of_asking(numbers: list[int]) -> None:
    queue = Queue()
    for number in numbers:
        queue.add(ask(number, f"t{number}"))
    assert queue.places() == {("agent", str(number)): place for place, number in enumerate(sorted(numbers))}
    assert served(queue) == sorted(numbers)


def test_a_tree_of_many_asks_holds_nobody_up() -> None:
    queue = Queue()
    for number in range(100):
        queue.add(ask(number, "many"))
    queue.add(ask(100, "one"))
    queue.add(ask(101, "two"))
    assert served(queue)[:5] == [0, 100, 101, 1, 2]


def test_an_ask_that_comes_back_has_its_place() -> None:
    queue = Queue()
    for number in range(3):
        queue.add(ask(number, f"t{number}"))
    first = queue.first(10.0)
    assert first is not None
    queue.serve(first, 10.0)
    queue.add(ask(0, "t0"))
    assert served(queue) == [0, 1, 2]


def test_an_ask_with_a_time_of_its_own_is_passed_over_until_then() -> None:
    queue = Queue()
    late = Ask(("agent", "0"), "t0", 0.0, not_before=20.0)
    queue.add(late)
    queue.add(ask(1, "t1"))
    first = queue.first(10.0)
    assert first is not None
    assert first.key[1] == "1"
    queue.remove(first.key)
    assert queue.first(10.0) is None
    assert queue.first(20.0) is late


@given(st.lists(st.tuples(st.sampled_from(["add", "serve", "remove"]), st.integers(0, 9), st.sampled_from("abc"))))
def test_nothing_is_lost_and_nobody_is_served_twice(steps: list[tuple[str, int, str]]) -> None:
    queue, waiting, now = Queue(), {}, 0.0
    for step, number, tree in steps:
        now += 1
        if step == "add":
            queue.add(ask(number, tree, now))
            waiting[str(number)] = tree
        elif step == "remove":
            assert (queue.remove(("agent", str(number))) is not None) == (waiting.pop(str(number), None) is not None)
        else:
            first = queue.first(now)
            assert (first is None) == (not waiting)
            if first is not None:
                queue.serve(first, now)
                assert waiting.pop(first.key[1]) == first.tree
        assert len(queue) == len(waiting) == len(queue.places())
    assert {str(number) for number in served(queue, now)} == waiting.keys()


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=60))
def test_among_trees_that_wait_no_tree_is_served_twice_before_another(trees: list[str]) -> None:
    queue = Queue()
    for number, tree in enumerate(trees):
        queue.add(ask(number, tree))
    order = [trees[number] for number in served(queue)]
    for tree in set(trees):
        turns = [at for at, served_tree in enumerate(order) if served_tree == tree]
        for before, after in pairwise(turns):
            between = order[before + 1 : after]
            assert all(between.count(other) <= 1 for other in between)
