"""Two trees by turns: who runs when, and what is made of the figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.compare import Benchmark, Metric, Together
from bench.pairs import Pairs, bound_of, kept, measure, quotients, table

HERE, THERE = Path("/here"), Path("/there")
METRICS = [Metric("time", "ms", "lower")]


def quiet(line: str) -> None:
    """Nobody looks at the progress of a test."""


def test_every_second_pair_begins_with_the_other_tree_and_the_first_run_of_each_does_not_count() -> None:
    ran: list[Path] = []

    def run(tree: Path, benchmark: Benchmark, side: str, seconds: float) -> Mapping[str, Mapping[str, float]]:
        ran.append(tree)
        return {side: {"time": float(len(ran))}}

    benchmark = Benchmark("demo", "one side", {"ours": lambda seconds: {}}, METRICS)
    pairs = measure(benchmark, THERE, 3, 1.0, quiet, run, HERE)
    assert ran == [HERE, THERE, THERE, HERE, HERE, THERE, THERE, HERE]
    assert pairs == {("ours", "time"): [(4, 3), (5, 6), (8, 7)]}


def test_sides_that_run_together_are_one_run_of_a_tree() -> None:
    asked: list[str] = []

    def run(tree: Path, benchmark: Benchmark, side: str, seconds: float) -> Mapping[str, Mapping[str, float]]:
        asked.append(side)
        return {"ours": {"time": 2.0}, "theirs": {"time": 1.0}}

    benchmark = Benchmark("demo", "two sides", Together(("ours", "theirs"), lambda seconds: {}), METRICS)
    pairs = measure(benchmark, THERE, 1, 1.0, quiet, run, HERE)
    assert asked == [""] * 4
    assert pairs == {("ours", "time"): [(2, 2)], ("theirs", "time"): [(1, 1)]}


def test_a_figure_that_the_other_tree_does_not_have_is_left_out() -> None:
    def run(tree: Path, benchmark: Benchmark, side: str, seconds: float) -> Mapping[str, Mapping[str, float]]:
        return {side: {"time": 1.0, "new": 1.0} if tree == HERE else {"time": 1.0}}

    benchmark = Benchmark("demo", "one side", {"ours": lambda seconds: {}}, METRICS)
    assert list(measure(benchmark, THERE, 1, 1.0, quiet, run, HERE)) == [("ours", "time")]


def test_only_the_sides_that_were_asked_for_are_measured() -> None:
    asked: list[str] = []

    def run(tree: Path, benchmark: Benchmark, side: str, seconds: float) -> Mapping[str, Mapping[str, float]]:
        asked.append(side)
        return {side: {"time": 1.0}}

    benchmark = Benchmark("demo", "two", {"ours": lambda seconds: {}, "bare": lambda seconds: {}}, METRICS)
    measure(benchmark, THERE, 1, 1.0, quiet, run, HERE, only=["ours"])
    assert asked == ["ours"] * 4


def test_a_machine_that_gets_slower_does_not_hide_a_difference() -> None:
    assert quotients([(120.0, 100.0), (240.0, 200.0), (390.0, 300.0)]) == (1.2, 1.2, 1.25)
    assert quotients([(1.0, 2.0)]) == (0.5, 0.5, 0.5)
    assert quotients([(1.0, 0.0)]) == (1.0, 1.0, 1.0)


def test_a_bound_is_missed_when_the_better_quartile_of_the_pairs_is_beyond_it() -> None:
    pairs = [(70.0, 100.0), (70.0, 100.0), (100.0, 100.0), (130.0, 100.0)]
    time, rate = Metric("time", "ms", "lower"), Metric("rate", "/s", "higher")
    assert (kept(time, pairs, 0.7), kept(time, pairs, 0.69)) == (True, False)
    assert (kept(rate, pairs, 1.05), kept(rate, pairs, 1.2)) == (True, False)


def test_a_bound_is_of_one_state() -> None:
    metric = Metric("time", "ms", "lower", against={"b827878": 0.9})
    assert bound_of(metric, "b827878b") == 0.9
    assert bound_of(metric, "cacb0f6e") is None
    assert bound_of(None, "b827878b") is None


@pytest.mark.parametrize(("here", "said"), [(110.0, "× 1.100"), (90.0, "× 0.900")])
def test_the_table_says_both_and_their_quotient(here: float, said: str) -> None:
    pairs: Pairs = {("ours", "time"): [(here, 100.0)]}
    metrics = [Metric("time", "ms", "lower", against={"abc": 1.0})]
    text = table(Benchmark("demo", "one side", {}, metrics), pairs, "abcdef12")
    assert said in text
    assert f"here {here:>10,.1f}  there      100.0 ms" in text
    assert ("MISSED" in text) is (here > 100)
