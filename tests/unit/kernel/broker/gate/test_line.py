"""The line before a gate: the order of asking, and fairness between trees."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.broker.gate.line import Ask, Line


def ask(number: int, tree: str, since: float | None = None) -> Ask:
    return Ask(("agent", str(number)), tree, float(number if since is None else since))


def served(line: Line, now: float = 1000.0) -> list[int]:
    """The order in which all asks go out, one each second."""
    order = []
    while (first := line.first(now)) is not None:
        line.serve(first, now)
        order.append(int(first.key[1]))
        now += 1
    return order


@given(st.lists(st.integers(0, 50), unique=True))
def test_trees_with_one_ask_each_are_served_in_the_order_of_asking(numbers: list[int]) -> None:
    line = Line()
    for number in numbers:
        line.add(ask(number, f"t{number}"))
    assert line.places() == {("agent", str(number)): place for place, number in enumerate(sorted(numbers))}
    assert served(line) == sorted(numbers)


def test_a_tree_of_many_asks_holds_nobody_up() -> None:
    line = Line()
    for number in range(100):
        line.add(ask(number, "many"))
    line.add(ask(100, "one"))
    line.add(ask(101, "two"))
    assert served(line)[:5] == [0, 100, 101, 1, 2]


def test_an_ask_that_comes_back_has_its_place() -> None:
    line = Line()
    for number in range(3):
        line.add(ask(number, f"t{number}"))
    first = line.first(10.0)
    assert first is not None
    line.serve(first, 10.0)
    line.add(ask(0, "t0"))
    assert served(line) == [0, 1, 2]


def test_an_ask_with_a_time_of_its_own_is_passed_over_until_then() -> None:
    line = Line()
    late = Ask(("agent", "0"), "t0", 0.0, not_before=20.0)
    line.add(late)
    line.add(ask(1, "t1"))
    first = line.first(10.0)
    assert first is not None
    assert first.key[1] == "1"
    line.remove(first.key)
    assert line.first(10.0) is None
    assert line.first(20.0) is late


@given(st.lists(st.tuples(st.sampled_from(["add", "serve", "remove"]), st.integers(0, 9), st.sampled_from("abc"))))
def test_nothing_is_lost_and_nobody_is_served_twice(steps: list[tuple[str, int, str]]) -> None:
    line, waiting, now = Line(), {}, 0.0
    for step, number, tree in steps:
        now += 1
        if step == "add":
            line.add(ask(number, tree, now))
            waiting[str(number)] = tree
        elif step == "remove":
            assert (line.remove(("agent", str(number))) is not None) == (waiting.pop(str(number), None) is not None)
        else:
            first = line.first(now)
            assert (first is None) == (not waiting)
            if first is not None:
                line.serve(first, now)
                assert waiting.pop(first.key[1]) == first.tree
        assert len(line) == len(waiting) == len(line.places())
    assert {str(number) for number in served(line, now)} == waiting.keys()


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=60))
def test_among_trees_that_wait_no_tree_is_served_twice_before_another(trees: list[str]) -> None:
    line = Line()
    for number, tree in enumerate(trees):
        line.add(ask(number, tree))
    order = [trees[number] for number in served(line)]
    for tree in set(trees):
        turns = [at for at, served_tree in enumerate(order) if served_tree == tree]
        for before, after in pairwise(turns):
            between = order[before + 1 : after]
            assert all(between.count(other) <= 1 for other in between)
