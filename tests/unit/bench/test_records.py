"""What is kept of a run, and which rows are of a slow hour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import records
from bench.compare import Benchmark, Goal, Metric, Row

MACHINE = {"cpu": "one", "cores": 2}
METRIC = Metric("x", "ms", "lower", Goal(2, of="bare"))
BENCHMARK = Benchmark("demo", "what it is", {"ours": lambda seconds: {}, "bare": lambda seconds: {}}, [METRIC])


def recorded(report: dict[str, Any], bare: list[float], machine: dict[str, Any] = MACHINE) -> records.Entry:
    told = {"at": "2026-01-01", "machine": machine, "transport": "libzmq", "rounds": 3, "seconds": 1.0, "load": 0.0}
    records.put(report, BENCHMARK, [Row(METRIC, {"ours": [2.0, 2.0, 2.0], "bare": bare})], told)
    entry: records.Entry = report["benchmarks"]["demo"]
    return entry


def slow(entry: records.Entry) -> bool:
    return records.slow_hour(entry, records.row_of("x", entry["rows"]["x"]), "bare")


def test_a_run_replaces_its_own_entries_and_leaves_the_others(tmp_path: Path) -> None:
    report = records.read(tmp_path / "none.json")
    report["benchmarks"]["other"] = {"what": "stays"}
    recorded(report, [1.0, 1.0, 1.0])
    recorded(report, [1.23456, 1.0, 1.0])
    records.write(report, tmp_path / "r.json")
    read = records.read(tmp_path / "r.json")
    assert list(read["benchmarks"]) == ["other", "demo"]
    assert read["benchmarks"]["demo"]["rows"]["x"]["runs"]["bare"] == [1.235, 1.0, 1.0]
    assert records.row_of("x", read["benchmarks"]["demo"]["rows"]["x"]).metric == METRIC


def test_what_is_written_is_json_with_short_things_in_one_line() -> None:
    value = {"a": {"b": [1.0] * 3, "c": "x" * 120}, "d": [{"e": "y" * 60}, {"e": "z" * 60}]}
    text = records.shown(value)
    assert json.loads(text) == value
    assert '"b": [1.0, 1.0, 1.0]' in text


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ([1.0, 1.0, 1.0], [1.14, 1.14, 1.14], False),
        ([1.0, 1.0, 1.0], [1.16, 1.16, 1.16], True),
        ([1.0, 1.0, 1.0], [0.5, 0.5, 0.5], False),
        ([1.0, 1.0, 1.0], [0.8, 1.0, 1.4], True),  # its own rounds differ
    ],
)
def test_a_baseline_slower_than_its_best_here_shows_a_slow_hour(
    before: list[float], now: list[float], found: bool
) -> None:
    report = records.read(Path("/none"))
    assert not slow(recorded(report, before))
    assert slow(recorded(report, now)) is found


def test_the_best_lasts_over_slow_runs_and_is_of_one_machine() -> None:
    report = records.read(Path("/none"))
    for bare in ([1.0] * 3, [1.3] * 3):
        recorded(report, bare)
    assert slow(recorded(report, [1.3] * 3))
    assert not slow(recorded(report, [1.3] * 3, {"cpu": "another", "cores": 2}))
