"""The description of a benchmark, the order in which its sides run, and the summary of the figures.

A machine gets slower and faster over minutes, so sides never run in blocks one after the other. Every round runs each
side once, every second round in the opposite order, and ours is compared with its baseline round by round. Where a
difference of a few percent must be found in a busy machine's noise, that is too coarse: then the sides run together and
take turns call by call. Figures of one machine say little about another; ratios within one run do.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import zmq

from goondan.schemas.transport import TRANSPORTS, VARIABLE, chosen

#: One run of one side: metric name -> figure. The argument is how long to measure, in seconds.
Side = Callable[[float], Mapping[str, float]]

#: The transport that has a column of its own, and the name of that column.
NATIVE: Final = "native"


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
    #: The goal on the transport native; None when there is none.
    native: Goal | None = None
    #: Goals as factors of what an older state has, by the first digits of its commit (bench/pairs.py).
    against: Mapping[str, float] = field(default_factory=dict)


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
    #: Whether the first side is also measured on the transport native.
    native: bool = False
    #: Whether it reaches the kernel by `gdn` and the wire alone, and so any state of the tree (bench/swarm.py).
    by_gdn: bool = False
    #: The most rounds that are worth their time.
    rounds: int = 99
    #: What is stored before an action goes on: the durability of the plan or the bundle; "": it does not matter.
    durability: str = ""

    @property
    def names(self) -> Sequence[str]:
        """The names of the sides, in their order."""
        if isinstance(self.sides, Together):
            return self.sides.names
        ours, *baselines = self.sides
        both = self.native and NATIVE in TRANSPORTS and chosen() != NATIVE
        return [ours, *([NATIVE] if both else []), *baselines]


@dataclass(frozen=True)
class Row:
    """One metric over all rounds."""

    #: The metric.
    metric: Metric
    #: The figures of each side, round by round.
    runs: Mapping[str, Sequence[float]]

    @property
    def medians(self) -> Mapping[str, float]:
        """The median of each side that has the metric."""
        return {side: statistics.median(values) for side, values in self.runs.items() if values}

    @property
    def target(self) -> float | None:
        """The goal as a number; None when there is none."""
        goal = self.metric.goal
        return None if goal is None else target_of(goal, None if goal.of is None else self.medians[goal.of])

    @property
    def met(self) -> bool | None:
        """Whether ours, the first side, reaches the goal; None when there is no goal."""
        return None if self.metric.goal is None else reached(self, next(iter(self.runs)), self.metric.goal)


def target_of(goal: Goal, baseline: float | None) -> float:
    """The figure to reach beside this figure of the baseline."""
    if baseline is None:
        return goal.value
    return goal.value + baseline if goal.plus else goal.value * baseline


def reached(row: Row, side: str, goal: Goal) -> bool:
    """Whether the better quartile of the rounds reaches the goal: a slow minute alone does not fail a row."""
    ours = row.runs[side]
    targets = [target_of(goal, None if goal.of is None else figure) for figure in row.runs[goal.of or side]]
    parts = [figure / target for figure, target in zip(ours, targets, strict=True)]
    low, _, high = quartiles(parts)
    return high >= 1 if row.metric.better == "higher" else low <= 1


def quartiles(figures: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile; of one figure, that figure."""
    if len(figures) == 1:
        return (figures[0],) * 3
    low, middle, high = statistics.quantiles(figures, n=4, method="inclusive")
    return low, middle, high


def run(benchmark: Benchmark, rounds: int, seconds: float, tell: Callable[[str], None]) -> list[Row]:
    """Run every side `rounds` times, alternately. `tell` gets a line of progress before each run."""
    figures: dict[str, list[Mapping[str, float]]] = {side: [] for side in benchmark.names}
    for number in range(rounds):
        if isinstance(benchmark.sides, Together):
            tell(f"{benchmark.name}: round {number + 1} of {rounds}")
            for name, measured in benchmark.sides.measure(seconds * len(benchmark.names)).items():
                figures[name].append(measured)
            continue
        for name in figures if number % 2 == 0 else reversed(figures):
            tell(f"{benchmark.name}: {name}, round {number + 1} of {rounds}")
            side = benchmark.sides.get(name)
            if side is not None:
                figures[name].append(side(seconds))
                continue
            with on_native():
                figures[name].append(next(iter(benchmark.sides.values()))(seconds))
    return [summarize(metric, figures) for metric in benchmark.metrics]


@contextmanager
def on_native() -> Iterator[None]:
    """Within the block, this process and the programs that it starts speak by the transport native."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = NATIVE
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def summarize(metric: Metric, figures: Mapping[str, Sequence[Mapping[str, float]]]) -> Row:
    """The figures of one metric. A side that lacks it has none."""
    return Row(
        metric, {side: [one[metric.name] for one in many if metric.name in one] for side, many in figures.items()}
    )


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


def number(figure: float) -> str:
    """A figure for a person: three digits."""
    rounded = float(f"{figure:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:g}"


def machine() -> dict[str, Any]:
    """Facts about the machine, without which a figure has no meaning."""
    return {
        "cpu": field_of("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": field_of("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "libzmq": zmq.zmq_version(),
    }


def field_of(path: str, name: str) -> str:
    """The first `name: value` line of a file of /proc, or "unknown"."""
    try:
        with open(path, encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")
    except OSError:
        return "unknown"
