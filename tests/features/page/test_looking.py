"""Lists of runs, of some hundred thousand turns too; lines of logs; each of the caller's agents alone."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from goondan.features.page.door.looking import Details, Lines, Runs, details, lines, runs, swarm
from goondan.kernel.cli.operations import Asked
from goondan.kernel.cli.rules.callers import Caller
from goondan.kernel.traces.rules.turn import ModelCall, Step, Trace
from goondan.kernel.traces.search import MAX_ADDED
from goondan.schemas.system import trace_index
from goondan.schemas.wire.spans import trace_id_of
from tests.checks import refuses

ALL, MAIN = Caller("all", "look", ("*",)), Caller("main", "look", ("main", "help-?"))


def fill(state: Path, rows: list[tuple[str, str]], since: int = 0) -> None:
    """Turns in the index, each by its trace and its agent."""
    with closing(trace_index._opened(f"{state}/{trace_index.FOLDER}")) as db:
        db.execute("BEGIN")
        for number, (trace, agent) in enumerate(rows, since):
            at = f"2026-01-01T{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}.000Z"
            db.execute(trace_index._ADD, (at, trace_id_of(trace), f"t{number}", f"e{number}", agent, "k"))
        db.execute("COMMIT")


def asked(state: Path, caller: Caller, query: Any = None, body: Any = None) -> Any:
    return Asked(caller, SimpleNamespace(state_dir=str(state)), {}, query, body)


def listed(state: Path, caller: Caller = ALL, **wanted: Any) -> dict[str, Any]:
    return runs(asked(state, caller, Runs(**wanted)))


def turns(found: dict[str, Any]) -> list[str]:
    return [row[3] for row in found["rows"]]


def test_a_run_is_the_first_turn_of_a_trace_and_the_newest_comes_first(tmp_path: Path) -> None:
    assert listed(tmp_path) == {"rows": [], "before": None, "total": 0}
    fill(tmp_path, [("x", "main"), ("y", "main"), ("x", "helper"), ("z", "helper"), ("z", "main")])
    found = listed(tmp_path)
    assert (turns(found), found["before"], found["total"]) == (["t3", "t1", "t0"], None, 3)
    assert found["rows"][0] == (4, "2026-01-01T00:00:03.000Z", trace_id_of("z"), "t3", "e3", "helper", "k")
    fill(tmp_path, [("y", "main"), ("w", "main")], since=5)
    assert turns(listed(tmp_path)) == ["t6", "t3", "t1", "t0"], "what was added since is there"


def test_pages_follow_each_other_without_a_gap(tmp_path: Path) -> None:
    fill(tmp_path, [(str(number // 2), "main") for number in range(20)])
    found, before = [], (1 << 62) - 1
    while before is not None:
        page = listed(tmp_path, limit=3, before=before)
        assert page["total"] == 10
        found += turns(page)
        before = page["before"]
    assert found == [f"t{number}" for number in range(18, -1, -2)]


def test_agents_of_others_are_in_no_row_and_hide_no_run(tmp_path: Path) -> None:
    fill(tmp_path, [("x", "secret"), ("x", "main"), ("y", "secret"), ("z", "help-a"), ("v", "no name"), ("w", "*")])
    found = listed(tmp_path, MAIN)
    assert (turns(found), found["total"]) == (["t3", "t1"], 2)
    assert turns(listed(tmp_path, MAIN, agent="main")) == ["t1"]
    assert listed(tmp_path, MAIN, agent="secret") == {"rows": [], "before": None, "total": 0}
    assert turns(listed(tmp_path, agent="secret")) == ["t2", "t0"], "another caller has another list"


def test_an_index_that_was_made_anew_is_read_anew(tmp_path: Path) -> None:
    fill(tmp_path, [(str(number), "main") for number in range(5)])
    assert listed(tmp_path)["total"] == 5
    for path in (tmp_path / trace_index.FOLDER).iterdir():
        path.unlink()
    fill(tmp_path, [("new", "main"), ("newer", "main")], since=10)
    found = listed(tmp_path)
    assert (turns(found), found["total"]) == (["t11", "t10"], 2)


def test_a_hundred_thousand_are_read_once(tmp_path: Path) -> None:
    fill(tmp_path, [(str(number // 2), ("main", "helper")[number % 2]) for number in range(200_000)])
    began = time.process_time()
    assert listed(tmp_path)["total"] == 100_000
    whole, began = time.process_time() - began, time.process_time()
    page = listed(tmp_path, limit=5000, before=100_000)
    assert len(page["rows"]) == 5000 and page["before"]
    later = time.process_time() - began
    assert whole < 4.0 and later < 0.4, (whole, later)


def test_details_are_of_the_callers_agents_and_of_whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, [("x", "main"), ("x", "secret"), ("y", "main"), ("x", "help-a"), ("z", "main")])
    fill(tmp_path, [("many", "main")] * 300, since=5)

    def of_file(place: Any, which: Any, since: str | None) -> list[Trace]:
        known = {"attempt": 1, "status": "completed", "started_at": "", "instance_key": "k", "agent": place.agent}
        call = ModelCall(status="answered", started_at="", input_tokens=1, costs={"USD": 0.5})
        rows = {row.event_id: row for row in trace_index.last(str(tmp_path), 1000)}
        return [
            Trace(turn_id=f"t{event[1:]}", event_id=event, trace_id=rows[event].trace_id, steps=[step], **known)
            for event in which.events
            for step in [Step(step=1, started_at="", model=call)]
        ]

    monkeypatch.setattr("goondan.kernel.traces.search.read_turns", of_file)

    def used(caller: Caller, *names: str, alone: bool = False) -> dict[str, Any]:
        found = details(asked(tmp_path, caller, body=Details(list(names), alone)))["turns"]
        assert not any(turn.steps for turn in found)
        totals = {turn.turn_id: turn.total for turn in found}
        return {name: (one.input_tokens, one.costs["USD"], one.agents) for name, one in totals.items() if one}

    assert used(MAIN, "t1", "t0", "nothing", "t2") == {"t0": (2, 1.0, ["help-a", "main"]), "t2": (1, 0.5, ["main"])}
    assert used(ALL, "t0") == {"t0": (3, 1.5, ["help-a", "main", "secret"])}
    assert used(ALL, "t0", "t3", alone=True) == {"t0": (1, 0.5, ["main"]), "t3": (1, 0.5, ["help-a"])}
    assert used(ALL, "t5")["t5"][0] == MAX_ADDED < 300


def test_lines_are_of_the_agent_and_of_the_tools_of_its_instance(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()

    def tool(second: float, agent: str, message: str) -> str:
        said = {"time": second, "level": "info", "message": message, "tool": "bash", "agent": agent, "instanceKey": "k"}
        return json.dumps(said) + "\n"

    (tmp_path / "logs" / "toolhost.log").write_text(
        tool(100.0, "main", "before")
        + tool(101.0, "main", "mine \x1b[2J")
        + tool(101.5, "secret", "x (main/k): not mine")
        + json.dumps({"time": 101.6, "level": "info", "message": "the host itself"})
        + "\n"
    )
    (tmp_path / "logs" / "agent-main.log").write_text(json.dumps({"time": 101.7, "message": "own"}) + "\n")
    (tmp_path / "logs" / "agent-secret.log").write_text(json.dumps({"time": 101.7, "message": "other"}) + "\n")
    (tmp_path / "logs" / "broker.log").write_text(json.dumps({"time": 101.7, "message": "main/k"}) + "\n")
    found = lines(asked(tmp_path, MAIN, Lines("main", "k", 100_500, 102_000)))
    assert [(line["role"], line["text"]) for line in found] == [
        ("toolhost", "bash (main/k): mine \x1b[2J"),
        ("agent-main", "own"),
    ]
    assert found[0]["at"] == 101_000
    assert lines(asked(tmp_path, MAIN, Lines("main", "other", 0, 1e15)))[0]["text"] == "own"
    with refuses("E_FORBIDDEN"):
        lines(asked(tmp_path, MAIN, Lines("secret", "k", 0, 1e15)))


def test_who_sees_some_agents_only_does_not_hear_where_the_bundle_is() -> None:
    there: Any = SimpleNamespace(place=SimpleNamespace(bundle="/home/ann/work/shop/goondan.yaml"))
    told = [swarm(Asked(caller, there, {}, None, None)) for caller in (ALL, MAIN)]
    assert told == [{"bundle": "/home/ann/work/shop/goondan.yaml"}, {"bundle": "shop/goondan.yaml"}]
