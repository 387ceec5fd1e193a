"""The description of a benchmark, the order in which its sides run, and the summary of the figures.

A machine gets slower and faster over minutes, so sides never run in blocks one after the other. Every round runs each
side once, and the medians over the rounds are compared. Where a difference of a few percent must be found in a busy
machine's noise, that is too coarse: then the sides run together and take turns call by call. Figures of one machine say
little about another; ratios within one run do.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

#: One run of one side: metric name -> figure. The argument is how long to measure, in seconds.
Side = Callable[[float], Mapping[str, float]]


@dataclass(frozen=True)
class Together:
    """Sides that are measured together. `measure` gets the seconds for all of them, and returns the figures of each
    side by its name.
    """

    names: Sequence[str]
    measure: Callable[[float], Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Goal:
    """The goal of a metric."""

    #: The figure to reach, or a factor of the baseline.
    value: float
    #: The baseline in the same run; None: `value` is the figure itself.
    of: str | None = None
    #: `value` is added to the baseline instead of multiplied by it.
    plus: bool = False


@dataclass(frozen=True)
class Metric:
    """One figure that every side of a benchmark returns."""

    #: The name of the figure.
    name: str
    #: The unit, for the table.
    unit: str
    #: Whether a higher or a lower figure is better.
    better: Literal["higher", "lower"]
    #: The goal; None when there is none.
    goal: Goal | None = None


@dataclass(frozen=True)
class Benchmark:
    """One benchmark."""

    #: Its name on the command line.
    name: str
    #: What it measures, for the table.
    what: str
    #: The sides by name: ours first, then the baselines.
    sides: Mapping[str, Side] | Together
    #: The figures that each side returns.
    metrics: Sequence[Metric]

    @property
    def names(self) -> Sequence[str]:
        """The names of the sides, in their order."""
        return self.sides.names if isinstance(self.sides, Together) else list(self.sides)


@dataclass(frozen=True)
class Row:
    """One metric over all rounds."""

    #: The metric.
    metric: Metric
    #: The figures of each side.
    runs: Mapping[str, Sequence[float]]
    #: The median of each side.
    medians: Mapping[str, float]
    #: The goal as a number; None when there is none.
    target: float | None
    #: Whether our figure reaches the goal; None when there is no goal.
    met: bool | None


def run(benchmark: Benchmark, rounds: int, seconds: float, tell: Callable[[str], None]) -> list[Row]:
    """Run every side `rounds` times, alternately. `tell` gets a line of progress before each run."""
    figures: dict[str, list[Mapping[str, float]]] = {side: [] for side in benchmark.names}
    for number in range(rounds):
        if isinstance(benchmark.sides, Together):
            tell(f"{benchmark.name}: round {number + 1} of {rounds}")
            for name, measured in benchmark.sides.measure(seconds * len(benchmark.names)).items():
                figures[name].append(measured)
            continue
        for name, side in benchmark.sides.items():
            tell(f"{benchmark.name}: {name}, round {number + 1} of {rounds}")
            figures[name].append(side(seconds))
    return [summarize(metric, figures) for metric in benchmark.metrics]


def summarize(metric: Metric, figures: Mapping[str, Sequence[Mapping[str, float]]]) -> Row:
    """Medians, and whether ours (the first side) reaches the goal. A side that lacks the metric is left out."""
    runs = {side: [one[metric.name] for one in many if metric.name in one] for side, many in figures.items()}
    medians = {side: statistics.median(values) for side, values in runs.items() if values}
    ours = medians[next(iter(figures))]
    target = None
    if metric.goal is not None:
        baseline = None if metric.goal.of is None else medians[metric.goal.of]
        target = metric.goal.value
        if baseline is not None:
            target = target + baseline if metric.goal.plus else target * baseline
    met = None if target is None else (ours >= target if metric.better == "higher" else ours <= target)
    return Row(metric, runs, medians, target, met)


def table(benchmark: Benchmark, rows: Sequence[Row]) -> str:
    """The rows for a person: one line each, ours, the goal, and every baseline with its ratio."""
    ours, *baselines = benchmark.names
    lines = [f"{benchmark.name}: {benchmark.what}"]
    for row in rows:
        cells = [f"  {row.metric.name:<22} {row.medians[ours]:>12,.1f} {row.metric.unit:<6}"]
        if row.target is not None:
            sign = "≥" if row.metric.better == "higher" else "≤"
            cells.append(f"goal {sign} {row.target:,.1f} {'met' if row.met else 'MISSED'}".ljust(26))
        cells += [
            f"{side} {row.medians[side]:,.1f} (× {row.medians[ours] / row.medians[side]:.2f})"
            for side in baselines
            if row.medians.get(side)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Facts about the machine, without which a figure has no meaning."""
    return {
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def field(path: str, name: str) -> str:
    """The first `name: value` line of a file of /proc, or "unknown"."""
    try:
        with open(path, encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")
    except OSError:
        return "unknown"
