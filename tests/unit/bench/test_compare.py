"""How sides take turns, and how their figures are summed up."""

from __future__ import annotations

import os

import pytest

from bench.compare import Benchmark, Goal, Metric, Together, run, summarize, table


def test_sides_take_turns_so_that_a_slow_minute_hits_all_of_them() -> None:
    order: list[str] = []

    def side(name: str, figure: float) -> dict[str, float]:
        order.append(name)
        return {"rate": figure}

    benchmark = Benchmark(
        "demo",
        "two sides",
        {"ours": lambda s: side("ours", 120), "theirs": lambda s: side("theirs", 100)},
        [Metric("rate", "/s", "higher", Goal(1.2, of="theirs"))],
    )
    (row,) = run(benchmark, rounds=3, seconds=0, tell=lambda line: None)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert row.runs == {"ours": [120] * 3, "theirs": [100] * 3}
    assert row.met
    assert "theirs 100.0 (× 1.20)" in table(benchmark, [row])


def test_sides_that_run_together_have_the_time_of_all_of_them() -> None:
    given: list[float] = []

    def measure(seconds: float) -> dict[str, dict[str, float]]:
        given.append(seconds)
        return {"ours": {"time": 110 + len(given)}, "theirs": {"time": 100 + len(given)}}

    metrics = [Metric("time", "µs", "lower", Goal(1.1, of="theirs"))]
    benchmark = Benchmark("demo", "two sides", Together(("ours", "theirs"), measure), metrics)
    (row,) = run(benchmark, rounds=3, seconds=2, tell=lambda line: None)
    assert given == [4, 4, 4]
    assert row.runs == {"ours": [111, 112, 113], "theirs": [101, 102, 103]}
    assert row.met
    assert "theirs 102.0 (× 1.10)" in table(benchmark, [row])


@pytest.mark.parametrize(
    ("better", "ours", "met"),
    [("lower", 350, True), ("lower", 351, False), ("higher", 350, True), ("higher", 349, False)],
)
def test_a_goal_is_met_from_its_own_value_on(better: str, ours: float, met: bool) -> None:
    metric = Metric("x", "µs", "lower" if better == "lower" else "higher", Goal(350))
    assert summarize(metric, {"ours": [{"x": ours}]}).met is met


def test_the_better_quartile_decides_not_the_luckiest_run_and_not_a_slow_minute() -> None:
    metric = Metric("x", "µs", "lower", Goal(100))
    assert summarize(metric, {"ours": [{"x": x} for x in (10, 200, 300)]}).met is False
    assert summarize(metric, {"ours": [{"x": x} for x in (90, 95, 180, 300)]}).met is True
    rate = Metric("x", "/s", "higher", Goal(100))
    assert summarize(rate, {"ours": [{"x": x} for x in (50, 60, 105, 110)]}).met is True
    assert summarize(rate, {"ours": [{"x": x} for x in (50, 60, 110)]}).met is False


def test_a_goal_beside_a_baseline_is_judged_round_by_round() -> None:
    metric = Metric("x", "µs", "lower", Goal(2, of="theirs"))
    slower = {"ours": [{"x": 20.0}, {"x": 200.0}, {"x": 2000.0}], "theirs": [{"x": 10.0}, {"x": 100.0}, {"x": 1000.0}]}
    assert summarize(metric, slower).met is True
    assert summarize(Metric("x", "µs", "lower", Goal(1.9, of="theirs")), slower).met is False


def test_native_is_a_side_after_ours_where_it_is_not_the_transport_already(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str | None] = []

    def side(seconds: float) -> dict[str, float]:
        said.append(os.environ.get("GOONDAN_TRANSPORT"))
        return {"x": 1.0}

    monkeypatch.delenv("GOONDAN_TRANSPORT", raising=False)
    benchmark = Benchmark("demo", "both", {"ours": side, "theirs": side}, [Metric("x", "µs", "lower")], native=True)
    assert benchmark.names == ["ours", "native", "theirs"]
    (row,) = run(benchmark, rounds=1, seconds=0, tell=lambda line: None)
    assert (list(row.runs), said) == (["ours", "native", "theirs"], [None, "native", None])
    monkeypatch.setenv("GOONDAN_TRANSPORT", "native")
    assert benchmark.names == ["ours", "theirs"]


def test_without_a_goal_nothing_is_met_or_missed_and_a_side_may_lack_a_metric() -> None:
    row = summarize(Metric("p99", "µs", "lower"), {"ours": [{"p99": 5.0}], "theirs": [{"p50": 1.0}]})
    assert (row.target, row.met) == (None, None)
    assert row.medians == {"ours": 5.0}
