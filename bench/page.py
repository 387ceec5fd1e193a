"""`python -m bench.page`: the figures of docs/performance.md and of the READMEs, and their plots, from results.json.

Each document has pairs of marks, `<!-- figures: NAME -->` and `<!-- figures end -->`; what stands between them is
written here, everything else by hand. `--check` says what does not fit results.json, without matplotlib: a plot ends
with a digest of what it was drawn from and one of itself.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import MODULES, pairs, plots, records
from bench.compare import NATIVE, Goal, Metric, Row, number, reached
from bench.records import Entry, row_of, slow_hour
from goondan.schemas.transport import TRANSPORTS

ROOT: Final = Path(__file__).resolve().parent.parent
DOCUMENTS: Final = ("docs/performance.md", "README.md", "README.ko.md")
#: Where the plots are.
PLOTS: Final = ROOT / "docs" / "plots"
_BLOCK: Final = re.compile(r"(<!-- figures: ([a-z-]+) -->\n)(.*?)(<!-- figures end -->)", re.DOTALL)

Report = Mapping[str, Any]


class Shown(NamedTuple):
    """A row of the READMEs."""

    #: Where it stands in results.json, and the baseline that stands beside it.
    benchmark: str
    metric: str
    beside: str
    #: What it is, and what the baseline is, in English and in Korean.
    english: tuple[str, str]
    korean: tuple[str, str]


TEN: Final = (
    Shown(
        *("round_trip", "rate", "zmq.proxy"),
        ("broker, round trips with 64 in flight, every check on", "`zmq.proxy`"),
        ("브로커 왕복, 동시 64건, 모든 검사 포함", "`zmq.proxy`"),
    ),
    Shown(
        *("durable", "rate", "memory"),
        ("requests to agents and their answers, journaled", "the journal in memory"),
        ("저널에 적는 요청과 응답", "메모리에만 적으면"),
    ),
    Shown(
        *("tool_call", "p50", "MCP SDK"),
        ("tool call through bus and jail, p50", "the MCP SDK over stdio, no sandbox"),
        ("버스와 격리 환경을 지나는 도구 호출, p50", "샌드박스 없는 MCP SDK(stdio)"),
    ),
    Shown(
        *("tool_call", "rate", "MCP SDK"),
        ("tool calls with 64 in flight", "the MCP SDK"),
        ("도구 호출, 동시 64건", "MCP SDK"),
    ),
    Shown(
        *("cold_jail", "first result", "bwrap and python"),
        ("cold jail with every wall, to its first result", "bare bubblewrap and Python"),
        ("모든 벽을 갖춘 새 격리 환경에서 첫 결과까지", "bubblewrap과 Python만"),
    ),
    Shown(
        *("forked_call", "whole call", "a jail of its own"),
        ("`isolation: call`, to the result", "a jail of its own"),
        ("`isolation: call`, 결과까지", "호출마다 새 격리 환경"),
    ),
    Shown(
        *("turn", "1 call", "bare loop"),
        ("turn of 2 model calls and 1 tool call", "a bare loop, nothing stored, no jail"),
        ("모델 호출 2번과 도구 호출 1번의 턴", "저장도 격리도 없는 반복문"),
    ),
    Shown(*("turn", "50 steps", "bare loop"), ("turn of 50 steps", "the bare loop"), ("50단계의 턴", "같은 반복문")),
    Shown(
        *("agent", "start", "exec"),
        ("agent process, request to welcome", "started by exec"),
        ("에이전트 프로세스, 요청에서 welcome까지", "exec로 시작하면"),
    ),
    Shown(
        *("agent", "after a turn", "exec"),
        ("agent process, private memory after a turn", "started by exec"),
        ("에이전트 프로세스의 전용 메모리, 턴 하나 뒤", "exec로 시작하면"),
    ),
)


# --- figures as text --------------------------------------------------------------------------------------------------


def text_of(figure: float, unit: str) -> str:
    """A figure for a person: three digits, microseconds from a thousand on as milliseconds."""
    if unit == "µs" and figure >= 1000:
        figure, unit = figure / 1000, "ms"
    return f"{number(figure)}{'' if unit == '/s' else ' '}{unit}"


def bare(figure: float, unit: str) -> str:
    """The figure alone, where the unit stands in the row."""
    return number(figure)


def goal_text(goal: Goal, row: Row, side: str, write: Callable[[float, str], str] = text_of) -> str:
    """A goal, in bold letters when it is missed, in slanted ones when only the median misses it. `write` gets a figure
    and its unit.
    """
    sign = "≥" if row.metric.better == "higher" else "≤"
    text = f"{goal.value:.3g}×" if goal.of and not goal.plus else write(goal.value, row.metric.unit)
    text = f"{sign}{'+' if goal.plus else ''}{text}"
    if not reached(row, side, goal):
        return f"**{text}**"
    middle = Row(row.metric, {each: [median] for each, median in row.medians.items()})
    return text if reached(middle, side, goal) else f"*{text}*"


def slow(entry: Entry, row: Row, side: str) -> str:
    """A mark, when this baseline shows a slow hour."""
    return "†" if slow_hour(entry, row, side) else ""


# --- blocks -----------------------------------------------------------------------------------------------------------


def machine_block(report: Report) -> str:
    """What was measured on, and when."""
    entries = report["benchmarks"].values()
    machines = {_machine_text(entry["machine"]): None for entry in entries}
    days = sorted(entry["at"][:10] for entry in entries)
    loads = sorted(entry["load"] for entry in entries)
    rounds = sorted({entry["rounds"] for entry in entries})
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    told = f"{'; '.join(machines)}. {when}, {rounds[0]} to {rounds[-1]} rounds, load {loads[0]:g} to {loads[-1]:g}."
    missing = ", ".join(f"`{name}`" for name in MODULES if name not in report["benchmarks"])
    return f"{told} Not measured: {missing}.\n" if missing else f"{told}\n"


def _machine_text(told: Mapping[str, Any]) -> str:
    named = (
        ("cpu", "{}"),
        ("cores", "{} cores"),
        ("kernel", "Linux {}"),
        ("python", "Python {}"),
        ("libzmq", "libzmq {}"),
    )
    return ", ".join(text.format(told[name]) for name, text in named)


def goals_block(report: Report) -> str:
    """Every row that has a goal."""
    lines = ["|what|measured|native|beside it|×|goal|", "|---|---|---|---|---|---|"]
    for name, entry in report["benchmarks"].items():
        for metric, said in entry["rows"].items():
            row = row_of(metric, said)
            if row.metric.goal is not None:
                lines.append(_goal_line(name, entry, row, row.metric.goal))
    return "\n".join(lines) + "\n"


def _goal_line(name: str, entry: Entry, row: Row, goal: Goal) -> str:
    ours, *others = row.runs
    side = goal.of or next((each for each in others if each != NATIVE), None)
    native = number(row.medians[NATIVE]) if NATIVE in row.runs else ""
    with_baseline = side is not None and row.medians[side] > 0
    ratio = f"{row.medians[ours] / row.medians[side]:.3g}" if side is not None and with_baseline else ""
    told = f"{side} {number(row.medians[side])}{slow(entry, row, side)}" if side is not None else ""
    goals = goal_text(goal, row, ours, bare)
    if row.metric.native is not None and NATIVE in row.runs:
        goals += f", native {goal_text(row.metric.native, row, NATIVE, bare)}"
    measured = number(row.medians[ours])
    return f"|`{name}` {row.metric.name}, {row.metric.unit}|{measured}|{native}|{told}|{ratio}|{goals}|"


def states_block(report: Report) -> str:
    """The pairs that have a bound."""
    lines = ["|what|state|now|then|× (middle half)|goal|", "|---|---|---|---|---|---|"]
    for commit, entries in report["against"].items():
        for name, entry in entries.items():
            for metric, said in entry["rows"].items():
                if said["bound"] is None:
                    continue
                low, middle, high = pairs.quotients(said["pairs"])
                goal = f"{'≥' if said['better'] == 'higher' else '≤'}{said['bound']:g}×"
                kept = pairs.kept(Metric(metric, said["unit"], said["better"]), said["pairs"], said["bound"])
                now, then = (number(statistics.median(figures)) for figures in zip(*said["pairs"], strict=True))
                lines.append(
                    f"|`{name}` {metric}, {said['unit']}|`{commit}`, {entry['transport']}|{now}|{then}"
                    f"|{middle:.2f} ({low:.2f}–{high:.2f})|{goal if kept else f'**{goal}**'}|"
                )
    return "\n".join(lines) + "\n"


def ten_block(report: Report, *, korean: bool = False) -> str:
    """The rows of a README."""
    head = (
        "|항목|측정값|같은 실행에서 잰 비교 대상|목표|" if korean else "|what|measured|beside it, in the same run|goal|"
    )
    lines = [head, "|---|---|---|---|"]
    for shown in TEN:
        entry = report["benchmarks"].get(shown.benchmark)
        if entry is None or shown.metric not in entry["rows"]:
            continue
        row = row_of(shown.metric, entry["rows"][shown.metric])
        ours = next(iter(row.runs))
        what, baseline = shown.korean if korean else shown.english
        goal = goal_text(row.metric.goal, row, ours) if row.metric.goal is not None else ""
        measured = text_of(row.medians[ours], row.metric.unit)
        its = text_of(row.medians[shown.beside], row.metric.unit) + slow(entry, row, shown.beside)
        lines.append(f"|{what}|{measured}|{baseline} {its}|{goal}|")
    return "\n".join(lines) + "\n"


def soak_block(report: Report) -> str:
    """What the last soak came to."""
    soak = report["soak"]
    if not soak:
        return "No soak was recorded yet.\n"
    lines = ["|what|measured|bound|", "|---|---|---|"]
    alike = Counter(each["what"].partition(",")[0] for each in soak["verdicts"] if each["kept"])
    for each in soak["verdicts"]:
        what, many = each["what"].partition(",")[0], alike[each["what"].partition(",")[0]]
        if each["kept"] and many > 1:  # one line for all processes that are flat
            lines.append(f"|{what} of {many} kinds of processes|flat|flat|")
            alike[what] = 0
        elif not each["kept"] or many == 1:
            bound = each["bound"] if each["kept"] else f"**{each['bound']}**"
            lines.append(f"|{each['what']}|{each['measured']}|{bound}|")
    head = f"{_machine_text(soak['machine'])}; {soak['at'][:10]}, {soak['minutes']:g} minutes, {soak['transport']}, "
    head += f"{soak['kills']} kills, capacity {number(soak['capacity'])} messages a second."
    return "\n".join((head, "", *lines, "", "![Its minutes](plots/soak.svg)", ""))


BLOCKS: Final[Mapping[str, Callable[[Report], str]]] = {
    "machine": machine_block,
    "goals": goals_block,
    "states": states_block,
    "ten": ten_block,
    "ten-korean": lambda report: ten_block(report, korean=True),
    "soak": soak_block,
}


# --- documents --------------------------------------------------------------------------------------------------------


def filled(text: str, report: Report) -> str:
    """A document with its blocks written anew. Raises KeyError for the name of no block."""
    return _BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]](report) + found[4], text)


def problems(report: Report) -> Iterator[str]:
    """What does not fit results.json."""
    for name, entry in report["benchmarks"].items():
        if entry["transport"] != TRANSPORTS[0]:
            yield f"bench/results.json: {name} was measured on {entry['transport']}"
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        if text != filled(text, report):
            yield f"{name}: its figures are not those of bench/results.json"
    drawn = plots.drawings(report)
    found = {path.name for path in PLOTS.glob("*.svg")}
    for name in sorted(found - set(drawn)):
        yield f"docs/plots/{name}: nothing draws it"
    for name, data in drawn.items():
        path = PLOTS / name
        if not path.exists() or not plots.fits(path.read_text(encoding="utf-8"), data):
            yield f"docs/plots/{name}: it was not drawn from bench/results.json"


def main(arguments: list[str]) -> int:
    """Write, or with `--check` look."""
    report = records.read()
    if arguments == ["--check"]:
        found = list(problems(report))
        for line in found:
            print(f"{line}; make bench-page writes it")
        return 1 if found else 0
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8"), report), encoding="utf-8")
    PLOTS.mkdir(exist_ok=True)
    drawn = plots.drawings(report)
    for path in PLOTS.glob("*.svg"):
        if path.name not in drawn:
            path.unlink()
    for name, data in drawn.items():
        if not (PLOTS / name).exists() or not plots.fits((PLOTS / name).read_text(encoding="utf-8"), data):
            (PLOTS / name).write_text(plots.draw(data), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
