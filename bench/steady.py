"""What a soak is judged by: pure rules over what was measured.

A series is flat when the median of its last third is not above that of its first third by more than GROWTH and a
margin. Before, the first WARM of it is left out: pools fill, caches warm up, conversations get their usual length. So
what grows with the work, and not with its kinds, is found.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

#: The part of a series that is left out.
WARM: Final = 0.2
#: How much more the end may have than the beginning.
GROWTH: Final = 0.1
#: How much more in any case, so that small figures may move: MiB, descriptors.
MEMORY_MARGIN, DESCRIPTORS_MARGIN = 3.0, 4.0
#: By how much the p99 of the windows may grow: a few messages decide it.
SLOWER: Final = 1.5
#: How long after the overload everything accepted may take to be answered (seconds).
BACK_S: Final = 30.0


@dataclass(frozen=True)
class Verdict:
    """One thing that was looked at."""

    #: What it is.
    what: str
    #: What was measured, and its bound, for a person.
    measured: str
    bound: str
    #: Whether the bound is kept.
    kept: bool


def ends(series: Sequence[float]) -> tuple[float, float]:
    """The medians of the first and of the last third after the warm-up. Raises ValueError for fewer than 3 values."""
    rest = series[int(len(series) * WARM) :]
    if len(rest) < 3:
        raise ValueError(f"{len(series)} values are too few")
    third = len(rest) // 3
    return statistics.median(rest[:third]), statistics.median(rest[-third:])


def flat(what: str, unit: str, series: Sequence[float], margin: float) -> Verdict:
    """Whether a series does not grow."""
    first, last = ends(series)
    most = first * (1 + GROWTH) + margin
    return Verdict(what, f"{first:.1f}, then {last:.1f} {unit}", f"≤ {most:.1f} {unit}", last <= most)


def all_flat(what: str, unit: str, by_name: Mapping[str, Sequence[float | None]], margin: float) -> list[Verdict]:
    """The same for each process. One that was there too seldom (it ended early, say) says nothing."""
    found = []
    for name, values in by_name.items():
        known = [value for value in values if value is not None]
        if len(known) >= max(6, len(values) // 2):
            found.append(flat(f"{what}, {name}", unit, known, margin))
    return found


def stable(p99: Sequence[float | None]) -> Verdict:
    """Whether the p99 of the windows does not grow (milliseconds)."""
    known = [value for value in p99 if value is not None]
    if len(known) < 6:
        return Verdict("p99 of an answer", "too few answers", f"≤ {SLOWER:g} ×", False)
    first, last = ends(known)
    measured = f"{first:.0f}, then {last:.0f} ms"
    return Verdict("p99 of an answer", measured, f"≤ {SLOWER:g} ×", last <= SLOWER * first)


def once(accepted: Iterable[str], turns: Mapping[str, set[str]]) -> Verdict:
    """Whether each accepted message has exactly one answer: those of one turn."""
    events = set(accepted)
    none = sum(not turns.get(event) for event in events)
    many = sum(len(turns.get(event, ())) > 1 for event in events)
    measured = f"{len(events):,} accepted, {none} unanswered, {many} answered by two turns"
    return Verdict("accepted messages, each answered once", measured, "0, 0", none == many == 0)


def bounded(most: int, limit: int) -> Verdict:
    """Whether no more messages were open than the policy allows."""
    return Verdict("messages open at once, under three times the capacity", f"{most:,}", f"≤ {limit:,}", most <= limit)


def refused(count: int) -> Verdict:
    """Whether overload is said."""
    return Verdict("E_OVERLOADED, under three times the capacity", f"{count:,}", "≥ 1", count > 0)


def back(seconds: float) -> Verdict:
    """How long after the overload the last accepted message was answered, and a new one as usual."""
    return Verdict(
        "after the overload, until all is answered", f"{seconds:.1f} s", f"≤ {BACK_S:g} s", seconds <= BACK_S
    )


def few_failed(failed: Mapping[str, int], answered: int) -> Verdict:
    """Whether nearly everything went well. A message whose agent is killed again and again may fail."""
    count = sum(failed.values())
    codes = "".join(f", {code} {number}" for code, number in sorted(failed.items()))
    measured = f"{count} of {answered:,}{codes}"
    return Verdict("answers that are a failure", measured, "≤ 0.5 %", count <= 0.005 * answered)
