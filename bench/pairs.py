"""Two trees of this repository: the cost of a change, separated from the noise of the machine.

A pair is one run of a side in both trees, one right after the other; every second pair begins with the other tree. The
result is the median of the pairs' quotients: a machine that gets slower during the runs slows both runs of a pair. A
bound is missed if the better quartile of the pairs is beyond it. The other tree is a worktree with an environment of
its own:

    git worktree add ../base COMMIT && make -C ../base setup
    make bench ARGS="--against ../base --rounds 20 start"

What reaches the kernel by `gdn` and the wire is measured with this tree's file, and the other tree has only its `gdn`.
Anything else is measured with the other tree's own file; with ours, if it has none.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.compare import Benchmark, Metric, Together, machine, quartiles
from bench.swarm import TREE
from goondan.schemas.transport import VARIABLE, chosen

HERE = Path(__file__).resolve().parent.parent
ONE_RUN = Path(__file__).with_name("one_run.py")

#: One run: tree, benchmark, side (empty: all together), seconds -> side -> metric -> figure.
Measure = Callable[[Path, Benchmark, str, float], Mapping[str, Mapping[str, float]]]
#: Side and metric -> the figures of each pair, this tree's first.
Pairs = dict[tuple[str, str], list[tuple[float, float]]]


def one_run(tree: Path, benchmark: Benchmark, side: str, seconds: float) -> Mapping[str, Mapping[str, float]]:
    """A run in a program of that tree, or in one of ours that uses that tree's `gdn`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name == VARIABLE or not name.startswith(("GOONDAN_", "PYTHON", TREE))
    }
    at = tree
    if benchmark.by_gdn:
        environment[TREE], at = str(tree), HERE
    told = subprocess.run(
        [str(at / ".venv" / "bin" / "python"), "-I", str(ONE_RUN), benchmark.name, side, str(seconds)],
        env=environment,
        cwd=at,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    figures: Mapping[str, Mapping[str, float]] = json.loads(told)
    return figures


def measure(
    benchmark: Benchmark,
    there: Path,
    rounds: int,
    seconds: float,
    tell: Callable[[str], None],
    run: Measure = one_run,
    here: Path = HERE,
    only: Sequence[str] | None = None,
) -> Pairs:
    """All pairs; `only`: of these sides. Before, one side runs once in both trees, which is not counted, because files
    are read and compiled then.
    """
    known = [""] if isinstance(benchmark.sides, Together) else list(benchmark.sides)
    sides = [side for side in known if not side or only is None or side in only]
    for tree in (here, there):
        run(tree, benchmark, sides[0], seconds)
    pairs: Pairs = {}
    for number in range(rounds):
        for side in sides:
            tell(f"{benchmark.name}: {side or 'all sides'}, pair {number + 1} of {rounds}")
            order = (here, there) if number % 2 else (there, here)
            found = {tree: run(tree, benchmark, side, seconds) for tree in order}
            for name, figures in found[here].items():
                for metric, figure in figures.items():
                    other = found[there].get(name, {}).get(metric)
                    if other is not None:
                        pairs.setdefault((name, metric), []).append((figure, other))
    return pairs


def quotients(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """This tree's figure through the other's: the quartiles of the pairs."""
    return quartiles([here / there if there else 1.0 for here, there in pairs])


def bound_of(metric: Metric | None, commit: str) -> float | None:
    """The goal of a metric beside that state; None when there is none."""
    found = (value for digits, value in (metric.against if metric else {}).items() if commit.startswith(digits))
    return next(found, None)


def kept(metric: Metric, pairs: Sequence[tuple[float, float]], bound: float) -> bool:
    """Whether the better quartile of the pairs keeps the bound."""
    low, _, high = quotients(pairs)
    return high >= bound if metric.better == "higher" else low <= bound


def table(benchmark: Benchmark, pairs: Pairs, commit: str) -> str:
    """The pairs for a person: a line for each side's metric."""
    lines = [f"{benchmark.name}: {benchmark.what}"]
    metrics = {metric.name: metric for metric in benchmark.metrics}
    for (side, name), found in pairs.items():
        metric = metrics.get(name)
        here, there = (statistics.median(figures) for figures in zip(*found, strict=True))
        low, middle, high = quotients(found)
        bound = bound_of(metric, commit)
        goal = ""
        if metric is not None and bound is not None:
            goal = f"  goal × {bound:g} {'met' if kept(metric, found, bound) else 'MISSED'}"
        lines.append(
            f"  {side:<28} {name:<22} here {here:>10,.1f}  there {there:>10,.1f} {metric.unit if metric else '':<4}"
            f"  × {middle:.3f} (middle half {low:.3f} to {high:.3f}){goal}"
        )
    return "\n".join(lines)


def entry_of(benchmark: Benchmark, pairs: Pairs, commit: str, told: Mapping[str, Any]) -> records.Entry:
    """What results.json keeps of the pairs."""
    metrics = {metric.name: metric for metric in benchmark.metrics}
    rows = {}
    for (side, name), found in pairs.items():
        metric = metrics.get(name)
        if metric is not None:
            said = {"unit": metric.unit, "better": metric.better, "bound": bound_of(metric, commit)}
            rows[f"{name}, {side}"] = {**said, "pairs": [[records.rounded(one) for one in pair] for pair in found]}
    return {"what": benchmark.what, **told, "rows": rows}


def commit_of(tree: Path) -> str:
    """The commit that a worktree shows."""
    return subprocess.run(["git", "-C", tree, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout


def main(
    benchmarks: Sequence[Benchmark],
    there: Path,
    rounds: int,
    seconds: float,
    *,
    sides: Sequence[str] | None = None,
    record: bool = False,
) -> None:
    """Measure and print; with `record`, keep the pairs in results.json."""

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    commit = commit_of(there)[:8]
    facts = records.facts(machine(), chosen(), rounds, seconds)
    for benchmark in benchmarks:
        before = os.getloadavg()[0]
        pairs = measure(benchmark, there, rounds, seconds, tell, only=sides)
        print(table(benchmark, pairs, commit))
        print(f"  {rounds} pairs, load {before:.1f} before and {os.getloadavg()[0]:.1f} after", flush=True)
        if record:
            entry = entry_of(benchmark, pairs, commit, {**facts, "load": round(before, 1)})
            report = records.read()
            report["against"].setdefault(commit, {})[benchmark.name] = entry
            records.write(report)
