"""The plots of docs/performance.md: SVG, drawn by matplotlib from what results.json holds, the same bytes each time.

What is drawn is data first (`drawings`), so that a check needs no matplotlib: the last line of a plot has a digest of
that data with this module's text, and a digest of the lines before.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bench.compare import NATIVE, Goal, Row, number, quartiles, target_of
from bench.records import Entry, row_of, slow_hour

#: Which benchmarks stand in which plot. What stands in none is in the last one.
GROUPS: Final = {
    "bus": ("round_trip", "durable", "queued", "python_client", "node_client", "journal_start"),
    "tools": ("tool_call", "mcp_jailed", "cold_jail", "forked_call", "javascript", "walls", "arguments", "others"),
    "agents": ("turn", "attachments", "asking", "code_mode", "history", "curves", "extensions", "agent", "scale"),
    "commands": ("gdn_call", "start", "trace", "dormant", "recovery"),
}
#: Inches: the width of a plot, the height of a row, and what is above and below all rows.
WIDTH, ROW, MARGIN = 9.0, 0.22, 0.9
#: The colors of this tree's transport, of native, of goals and of what stands beside.
OURS, OTHER, GOAL, GREY = "#1f4e9c", "#7aa6e8", "#c0392b", "#666666"

Data = dict[str, Any]


# --- what is drawn ----------------------------------------------------------------------------------------------------


def drawings(report: Mapping[str, Any]) -> dict[str, Data]:
    """Every plot by the name of its file."""
    known = {name for names in GROUPS.values() for name in names}
    found: dict[str, Data] = {}
    for group, names in GROUPS.items():
        more = [name for name in report["benchmarks"] if name not in known] if group == list(GROUPS)[-1] else []
        panels = [_panel(name, report["benchmarks"][name]) for name in (*names, *more) if name in report["benchmarks"]]
        if panels:
            found[f"{group}.svg"] = {"kind": "rows", "panels": panels}
    if report["soak"]:
        found["soak.svg"] = {"kind": "soak", **report["soak"]["plot"]}
    return found


def _panel(name: str, entry: Entry) -> Data:
    rows = [line for metric, said in entry["rows"].items() for line in _lines(entry, row_of(metric, said))]
    stored = f", durability {entry['durability']}" if entry["durability"] else ""
    return {"title": f"{name} ({entry['transport']}{stored}): {entry['what']}", "rows": rows}


def _lines(entry: Entry, row: Row) -> Iterator[Data]:
    """One line for each baseline of a row, or one with the figure alone. Parts are of the cost: smaller is better."""
    ours, *sides = row.runs
    base = [side for side in sides if side != NATIVE]
    unit = row.metric.unit
    text = f"{number(row.medians[ours])} {unit}"
    if NATIVE in row.runs:
        text += f" (native {number(row.medians[NATIVE])} {unit})"
    if not base:
        yield {"name": row.metric.name, "text": text}
    for side in base:
        line: Data = {"name": row.metric.name, "text": f"{text} : {number(row.medians[side])} {unit} {side}"}
        if slow_hour(entry, row, side):
            line["text"] += " †"
        for which in (ours, NATIVE) if NATIVE in row.runs else (ours,):
            parts = [
                _cost(row, mine, its)
                for mine, its in zip(row.runs[which], row.runs[side], strict=False)
                if mine and its
            ]
            if parts:
                line[NATIVE if which != ours else "ours"] = [round(part, 4) for part in quartiles(parts)]
        goal = row.metric.goal
        if goal is not None and side == (goal.of or base[0]) and row.medians[side]:
            line["goal"] = round(_cost(row, _target(goal, row, side), row.medians[side]), 4)
        yield line


def _target(goal: Goal, row: Row, side: str) -> float:
    return target_of(goal, row.medians[side] if goal.of else None)


def _cost(row: Row, ours: float, its: float) -> float:
    return its / ours if row.metric.better == "higher" else ours / its


# --- what it was drawn from -------------------------------------------------------------------------------------------


def fits(svg: str, data: Data) -> bool:
    """Whether this plot was drawn from that data by this module, and not changed since."""
    body, _, seal = svg.rstrip("\n").rpartition("\n")
    return seal == seal_of(body, data)


def seal_of(body: str, data: Data) -> str:
    """The last line of a plot."""
    source = json.dumps(data, sort_keys=True) + Path(__file__).read_text(encoding="utf-8")
    return f"<!-- drawn from {_digest(source)}, sealed {_digest(body)} -->"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw(data: Data) -> str:
    """The SVG of a drawing."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.hashsalt": "goondan", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 8}
    )
    figure = _rows(data["panels"]) if data["kind"] == "rows" else _soak(data)
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    body = "\n".join(line.rstrip() for line in written.getvalue().splitlines())
    return f"{body}\n{seal_of(body, data)}\n"


def _rows(panels: list[Data]) -> Any:
    """A line for each row: ours by its baseline as a point, its middle half as a bar, the goal as a tick."""
    from matplotlib.figure import Figure

    lines = sum(len(panel["rows"]) + 1.6 for panel in panels)
    height = lines * ROW + MARGIN
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0.2, 0.5 / height, 0.36, 1 - MARGIN / height))
    at = 0.0
    for panel in panels:
        axes.text(-0.55, at, panel["title"], transform=axes.get_yaxis_transform(), weight="bold", va="center")
        at += 1
        named = ""
        for row in panel["rows"]:
            name, named = ("" if row["name"] == named else row["name"]), row["name"]
            axes.text(-0.02, at, name, transform=axes.get_yaxis_transform(), ha="right", va="center")
            axes.text(1.02, at, row["text"], transform=axes.get_yaxis_transform(), va="center", color=GREY)
            for which, color in (("ours", OURS), (NATIVE, OTHER)):
                if which in row:
                    low, middle, high = row[which]
                    axes.plot([low, high], [at, at], color=color, linewidth=2)
                    axes.plot([middle], [at], "o", color=color, markersize=4)
            if "goal" in row:
                axes.plot([row["goal"]], [at], "|", color=GOAL, markersize=9, markeredgewidth=1.6)
            at += 1
        at += 0.6
    axes.set_xscale("log")
    axes.grid(axis="x", linewidth=0.3)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set_ylim(at - 0.4, -0.8)
    axes.set_yticks([])
    axes.set_xlabel("times the cost of the baseline: left is better; | goal, dark libzmq, light native")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} ×")
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    return figure


def _soak(data: Data) -> Any:
    """Memory, descriptors and times over the minutes, with the kills and the overload."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 7))
    minutes = data["minutes"]
    panels = [
        ("memory of the processes (MiB)", data["memory"]),
        ("open descriptors", data["descriptors"]),
        ("p99 of an answer (ms)", {"all kinds": data["p99"]}),
    ]
    for place, (title, curves) in enumerate(panels, 1):
        axes = figure.add_subplot(len(panels), 1, place)
        for name, values in curves.items():
            each = minutes[-1] / len(values)  # of windows, which are as many as there are p99
            places = minutes if len(values) == len(minutes) else [(at + 0.5) * each for at in range(len(values))]
            points = [(at, value) for at, value in zip(places, values, strict=True) if value is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, linewidth=1)
        for kill in data["kills"]:
            axes.axvline(kill, color=GREY, linewidth=0.2)
        axes.axvspan(*data["overload"], color=GOAL, alpha=0.12)
        axes.set_title(title, loc="left")
        axes.set_yscale("log")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        axes.set_xlabel("minutes; thin lines: kills, red: three times the capacity" if place == len(panels) else "")
    figure.subplots_adjust(left=0.07, right=0.84, top=0.95, bottom=0.07, hspace=0.35)
    return figure
