"""bench/results.json: what was measured, with the facts without which a figure says nothing.

    benchmarks  NAME -> an entry: what was measured when, on what machine, and every row
    against     COMMIT -> NAME -> an entry whose rows are pairs of this tree's figure and that state's
    soak        the last soak

A run replaces the entries that it measured, so that several runs make one file. Each entry has its own facts.

A slow hour shows in the baseline, whose code does not change. Each entry keeps the best median that every baseline ever
had here. A row is of a slow hour when its baseline was more than SLOW times worse than that, or when its own rounds
differ: the quartiles are further apart than SPREAD of the median.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.compare import Benchmark, Goal, Metric, Row, quartiles

RESULTS: Final = Path(__file__).with_name("results.json")
SLOW: Final = 1.15
SPREAD: Final = 0.25
#: The digits of a figure that are kept.
DIGITS: Final = 4

#: One entry, as it stands in the file.
Entry = dict[str, Any]


def read(path: Path = RESULTS) -> dict[str, Any]:
    """The file, or what an empty one holds."""
    empty: dict[str, Any] = {"benchmarks": {}, "against": {}, "soak": {}}
    return empty | (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})


def write(report: Mapping[str, Any], path: Path = RESULTS) -> None:
    """The file, with each row's figures in one line."""
    path.write_text(shown(report) + "\n", encoding="utf-8")


def shown(value: Any, indent: str = "") -> str:
    """JSON in which whatever fits stands in one line."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + len(indent) <= 110 or not isinstance(value, dict | list):
        return line
    deeper = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(deeper + shown(each, deeper) for each in value) + f"\n{indent}]"
    parts = [f"{deeper}{json.dumps(name, ensure_ascii=False)}: {shown(each, deeper)}" for name, each in value.items()]
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"


def facts(machine: Mapping[str, Any], transport: str, rounds: int, seconds: float) -> Entry:
    """What every entry says of its run."""
    load = round(os.getloadavg()[0], 1)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"at": now, "machine": dict(machine), "transport": transport, "rounds": rounds, "seconds": seconds} | {
        "load": load
    }


def put(report: dict[str, Any], benchmark: Benchmark, rows: Sequence[Row], told: Entry) -> Entry:
    """Store what a run of one benchmark has measured, in place of what stood there. Returns its entry."""
    before = report["benchmarks"].get(benchmark.name, {})
    best = before.get("best", {}) if before.get("machine") == told["machine"] else {}
    entry = {"what": benchmark.what, **told, "durability": benchmark.durability, "rows": {}, "best": {}}
    for row in rows:
        metric = row.metric
        runs = {side: [rounded(figure) for figure in figures] for side, figures in row.runs.items() if figures}
        said: Entry = {"unit": metric.unit, "better": metric.better, "runs": runs}
        for name, goal in (("goal", metric.goal), ("native", metric.native)):
            if goal is not None:
                said[name] = {"value": goal.value, "of": goal.of, "plus": goal.plus}
        entry["rows"][metric.name] = said
        pick = max if metric.better == "higher" else min
        for side in list(runs)[1:]:
            name = f"{metric.name}, {side}"
            entry["best"][name] = rounded(pick(row.medians[side], best.get(name, row.medians[side])))
    report["benchmarks"][benchmark.name] = entry
    return entry


def rounded(figure: float) -> float:
    """With DIGITS digits."""
    return float(f"{figure:.{DIGITS}g}")


def row_of(name: str, said: Mapping[str, Any]) -> Row:
    """A row of an entry, as it was measured."""
    goals = {which: Goal(**said[which]) for which in ("goal", "native") if which in said}
    return Row(Metric(name, said["unit"], said["better"], goals.get("goal"), goals.get("native")), said["runs"])


def slow_hour(entry: Entry, row: Row, side: str) -> bool:
    """Whether this baseline of the row shows a slow hour."""
    figures = row.runs[side]
    low, middle, high = quartiles(figures)
    if middle == 0:
        return False
    best = entry["best"].get(f"{row.metric.name}, {side}", middle)
    worse = best / middle if row.metric.better == "higher" else middle / best
    return worse > SLOW or (high - low) / middle > SPREAD
