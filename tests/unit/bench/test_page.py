"""Figures as text, and plots that say what they were drawn from."""

from __future__ import annotations

from typing import Any

import pytest

from bench import page, plots
from bench.compare import Goal, Metric, Row


def report(x: float = 2.0) -> dict[str, Any]:
    """One benchmark, whose goal is twice its baseline."""
    row = {"unit": "µs", "better": "lower", "runs": {"ours": [x, x], "native": [1.0, 1.0], "bare": [1.0, 1.0]}}
    goal = {"value": 2.0, "of": "bare", "plus": False}
    machine = {"cpu": "one", "cores": 2, "memory": "1", "kernel": "6", "python": "3.11", "libzmq": "4.3"}
    entry = {"what": "it", "at": "2026-01-02T", "machine": machine, "transport": "libzmq", "rounds": 2, "load": 0.5}
    entry |= {"durability": "", "rows": {"x": {**row, "goal": goal}}, "best": {"x, bare": 1.0}}
    return {"benchmarks": {"demo": entry}, "against": {}, "soak": {}}


@pytest.mark.parametrize(
    ("figure", "unit", "text"),
    [
        (121_456.0, "/s", "121,000/s"),
        (0.12345, "ms", "0.123 ms"),
        (4321.0, "µs", "4.32 ms"),
        (999.4, "µs", "999 µs"),
        (33.0, "MiB", "33 MiB"),
        (0.0, "ms", "0 ms"),
    ],
)
def test_a_figure_has_three_digits(figure: float, unit: str, text: str) -> None:
    assert page.text_of(figure, unit) == text


@pytest.mark.parametrize(("x", "shown"), [(2.0, "≤2×"), (2.1, "**≤2×**")])
def test_a_missed_goal_is_bold(x: float, shown: str) -> None:
    assert f"|`demo` x, µs|{x:g}|1|bare 1|{x:.2g}|{shown}|" in page.goals_block(report(x))


def test_a_goal_that_is_added_says_so() -> None:
    row = Row(Metric("x", "µs", "lower"), {"ours": [150.0], "bare": [100.0]})
    assert page.goal_text(Goal(60, of="bare", plus=True), row, "ours") == "≤+60 µs"


def test_what_stands_between_marks_is_written_anew_and_nothing_else() -> None:
    text = "before\n<!-- figures: machine -->\nold\n<!-- figures end -->\nafter\n"
    new = page.filled(text, report())
    assert new.startswith("before\n<!-- figures: machine -->\none, 2 cores, Linux 6, Python 3.11, libzmq 4.3.")
    assert new.endswith("<!-- figures end -->\nafter\n")
    assert page.filled(new, report()) == new
    with pytest.raises(KeyError):
        page.filled(text.replace("machine", "nothing"), report())


def test_a_plot_fits_what_it_was_drawn_from_until_either_changes() -> None:
    (data,) = plots.drawings(report()).values()
    (changed,) = plots.drawings(report(3.0)).values()
    body = "<svg>\n</svg>"
    drawn = f"{body}\n{plots.seal_of(body, data)}\n"
    assert plots.fits(drawn, data)
    assert not plots.fits(drawn, changed)
    assert not plots.fits(drawn.replace("<svg>", "<svg >"), data)


def test_a_plot_shows_the_cost_beside_each_baseline() -> None:
    (data,) = plots.drawings(report(3.0)).values()
    (line,) = data["panels"][0]["rows"]
    assert (line["ours"], line["native"], line["goal"]) == ([3.0, 3.0, 3.0], [1.0, 1.0, 1.0], 2.0)
    assert line["text"] == "3 µs (native 1 µs) : 1 µs bare"
