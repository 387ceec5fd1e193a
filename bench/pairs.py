"""Two trees of this repository: the cost of a change, separated from the noise of the machine.

A pair is one run of a side in both trees, one right after the other; every second pair begins with the other tree. The
result is the median of the pairs' differences: a machine that gets slower during the runs slows both runs of a pair.
The other tree is a worktree with an environment of its own:

    git worktree add ../base COMMIT && make -C ../base setup python -m bench --against ../base --rounds 20 start

A benchmark that the other tree does not have is measured there with this tree's file.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.compare import Benchmark, Metric, Together

HERE = Path(__file__).resolve().parent.parent
ONE_RUN = Path(__file__).with_name("one_run.py")

#: One run: tree, benchmark, side (empty: all together), seconds -> side -> metric -> figure.
Measure = Callable[[Path, str, str, float], Mapping[str, Mapping[str, float]]]
#: Side and metric -> the figures of each pair, this tree's first.
Pairs = dict[tuple[str, str], list[tuple[float, float]]]


def one_run(tree: Path, benchmark: str, side: str, seconds: float) -> Mapping[str, Mapping[str, float]]:
    """A run in a program of that tree."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOONDAN_", "PYTHON"))}
    python = str(tree / ".venv" / "bin" / "python")
    told = subprocess.run(
        [python, "-I", str(ONE_RUN), benchmark, side, str(seconds)],
        env=environment,
        cwd=tree,
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
) -> Pairs:
    """All pairs. Each side first runs once in both trees, which is not counted, because files are read and compiled
    then.
    """
    sides = [""] if isinstance(benchmark.sides, Together) else list(benchmark.sides)
    for tree in (here, there):
        run(tree, benchmark.name, sides[0], seconds)
    pairs: Pairs = {}
    for number in range(rounds):
        for side in sides:
            tell(f"{benchmark.name}: {side or 'all sides'}, pair {number + 1} of {rounds}")
            order = (here, there) if number % 2 else (there, here)
            found = {tree: run(tree, benchmark.name, side, seconds) for tree in order}
            for name, figures in found[here].items():
                for metric, figure in figures.items():
                    other = found[there].get(name, {}).get(metric)
                    if other is not None:
                        pairs.setdefault((name, metric), []).append((figure, other))
    return pairs


def difference(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """By how much this tree's figures are larger: the median of the pairs, and the bounds of their middle half."""
    differences = [here - there for here, there in pairs]
    if len(differences) == 1:
        return (differences[0],) * 3
    low, middle, high = statistics.quantiles(differences, n=4, method="inclusive")
    return middle, low, high


def table(benchmark: Benchmark, pairs: Pairs) -> str:
    """The pairs for a person: a line for each side's metric."""
    lines = [f"{benchmark.name}: {benchmark.what}"]
    units = {metric.name: metric for metric in benchmark.metrics}
    for (side, name), found in pairs.items():
        metric: Metric | None = units.get(name)
        here, there = (statistics.median(figures) for figures in zip(*found, strict=True))
        middle, low, high = difference(found)
        unit = "" if metric is None else metric.unit
        lines.append(
            f"  {side:<28} {name:<22} here {here:>10,.1f}  there {there:>10,.1f} {unit:<4}"
            f"  {middle:>+9,.1f} (middle half {low:+,.1f} to {high:+,.1f})  × {here / there if there else 1:.3f}"
        )
    return "\n".join(lines)


def main(benchmarks: Sequence[Benchmark], there: Path, rounds: int, seconds: float) -> None:
    """Measure and print."""
    for benchmark in benchmarks:
        before = os.getloadavg()[0]
        pairs = measure(
            benchmark, there, rounds, seconds, lambda line: print(line, file=sys.stderr, flush=True), one_run
        )
        print(table(benchmark, pairs))
        print(f"  {rounds} pairs, load {before:.1f} before and {os.getloadavg()[0]:.1f} after", flush=True)
