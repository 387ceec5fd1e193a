"""The index of traces: turns are found by trace, turn and event, whatever else is in the files."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.schemas.system import trace_index
from goondan.schemas.system.trace_index import FOLDER, IndexRow, TraceIndex, last, named, of_trace
from goondan.schemas.wire.spans import trace_id_of
from tests.kernel_fixture import ROOT


def entry(number: int, trace: str = "x", **changes: str) -> IndexRow:
    known = {
        "at": f"2026-01-01T00:00:{number:02}.000Z",
        "trace_id": trace_id_of(trace),
        "turn_id": f"t{number}",
        "event_id": f"e{number}",
        "agent": "main",
        "instance_key": "k",
    }
    return IndexRow(**{**known, **changes})


@pytest.fixture
def index(tmp_path: Path) -> Iterator[TraceIndex]:
    with closing(TraceIndex(str(tmp_path))) as made:
        yield made


def test_turns_are_found_by_trace_turn_and_event(tmp_path: Path, index: TraceIndex) -> None:
    state = str(tmp_path)
    assert (of_trace(state, trace_id_of("x")), named(state, "t1"), last(state, 1)) == ([], [], [])
    entries = [entry(number, "xyz"[number % 3]) for number in range(30)]
    for one in reversed(entries):
        index.add(one)
    assert of_trace(state, trace_id_of("y")) == entries[1::3]
    assert named(state, "t7") == named(state, "e7") == [entries[7]]
    assert named(state, "t") == named(state, "2026-01-01T00:00:01.000Z") == named(state, trace_id_of("x")) == []
    assert last(state, 3) == entries[:-4:-1]
    assert of_trace(state, "../../etc/passwd") == []


def test_the_last_of_an_agent_or_an_instance(tmp_path: Path, index: TraceIndex) -> None:
    for number in range(20):
        index.add(entry(number, str(number), agent="ab"[number % 2], instance_key="kl"[number // 10]))
    assert [found.turn_id for found in last(str(tmp_path), 1, "a")] == ["t18"]
    assert [found.turn_id for found in last(str(tmp_path), 2, "b", "k")] == ["t9", "t7"]
    assert last(str(tmp_path), 1, "c") == []


@settings(max_examples=30)  # each makes a folder
@given(st.lists(st.text(max_size=40), max_size=6, unique=True))
def test_any_names_are_found_and_no_others(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    state = str(tmp_path_factory.mktemp("index"))
    for number, name in enumerate(names):
        one = entry(number, f"trace {number}", event_id=name, instance_key=name)
        try:
            with closing(TraceIndex(state)) as index:
                index.add(one)
        except UnicodeEncodeError:
            assert any("\ud800" <= letter <= "\udfff" for letter in name)
            continue
        assert named(state, name) == [one]


def test_a_turn_that_began_twice_is_found_once_with_its_first_beginning(tmp_path: Path, index: TraceIndex) -> None:
    state, one = str(tmp_path), entry(1)
    for row in (one, entry(2), entry(5, turn_id="t1", event_id="e1")):
        index.add(row)
    assert of_trace(state, trace_id_of("x")) == [one, entry(2)]
    assert named(state, "e1") == [one]
    assert last(state, 9) == [entry(2), one]


def test_what_several_processes_add_is_all_there(tmp_path: Path) -> None:
    state = str(tmp_path)
    program = """
import sys
import time
from goondan.schemas.system.trace_index import IndexRow, TraceIndex
index = TraceIndex(sys.argv[1])
for number in range(200):
    index.add(IndexRow("2026-01-01T00:00:00.000Z", sys.argv[2], f"t{number}", "e", sys.argv[2], "k"))
"""
    traces = [trace_id_of(str(number)) for number in range(4)]
    writers = [subprocess.Popen([sys.executable, "-c", program, state, trace], cwd=ROOT) for trace in traces]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    assert [len(of_trace(state, trace)) for trace in traces] == [200, 200, 200, 200]


def test_a_damaged_file_is_empty_and_is_made_anew(tmp_path: Path, index: TraceIndex) -> None:
    state = str(tmp_path)
    (tmp_path / FOLDER).mkdir()
    path = tmp_path / FOLDER / "index.db"
    path.write_bytes(b"no database" * 1000)
    assert (of_trace(state, trace_id_of("x")), named(state, "t1"), last(state, 9)) == ([], [], [])
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        index.add(entry(1))
    index.add(entry(2))
    assert last(state, 9) == [entry(2)]
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE turns SET agent = x'c1ff'")
        db.commit()
    assert last(state, 9) == []


def test_it_is_bounded_and_forgets_the_oldest(
    tmp_path: Path, index: TraceIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_index, "MAX_TURNS", 20)
    monkeypatch.setattr(trace_index, "_SWEEP", 5)
    state = str(tmp_path)
    for number in range(58):
        index.add(entry(number))
    found = of_trace(state, trace_id_of("x"))
    assert 20 <= len(found) <= 25
    assert found[-1] == entry(57)
    assert last(state, 3) == [entry(57), entry(56), entry(55)]


def test_it_is_closed_to_others_and_follows_no_link(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    index = TraceIndex(str(state))
    index.add(entry(1))
    path = state / FOLDER / "index.db"
    assert os.stat(state / FOLDER).st_mode & 0o777 == 0o700
    assert {os.stat(one).st_mode & 0o777 for one in path.parent.iterdir()} == {0o600}
    index.close()
    path.rename(tmp_path / "target")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        index.add(entry(2))
    assert of_trace(str(state), trace_id_of("x")) == []


def test_who_follows_reads_only_what_is_new_of_a_large_index(tmp_path: Path) -> None:
    index = TraceIndex(str(tmp_path))
    index.add(entry(1))
    with closing(sqlite3.connect(f"{tmp_path}/traces/index.db")) as db:
        db.execute("INSERT INTO turns (at, trace_id, turn_id, event_id, agent, instance_key) "
                   "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000) "
                   "SELECT '2026-01-01T00:00:00.000Z', 't', 'turn' || i, 'e', 'main', 'k' FROM n")  # fmt: skip
        db.commit()
        last = db.execute("SELECT max(seq) FROM turns").fetchone()[0]

    def took(seq: int, turn_id: str) -> float:
        began = time.thread_time()
        assert trace_index.behind(str(tmp_path), seq, turn_id, "2027", 256) == []
        return time.thread_time() - began

    began = time.thread_time()
    trace_index.named(str(tmp_path), "none")  # all rows
    every = time.thread_time() - began
    for seq, turn_id in ((last, "turn200000"), (0, ""), (last, "another")):
        assert min(took(seq, turn_id) for _ in range(5)) < every / 5
    index.close()


def test_the_first_turns_of_traces_are_kept_and_the_index_is_read_on(tmp_path: Path, index: TraceIndex) -> None:
    state = str(tmp_path)
    shown = trace_index.Firsts(lambda agent: agent != "hidden")
    assert shown.numbers(state) == []
    for number, (trace, agent) in enumerate([("x", "hidden"), ("x", "main"), ("y", "main"), ("x", "main")]):
        index.add(entry(number, trace, agent=agent))
    assert shown.numbers(state) == [2, 3]
    index.add(entry(4, "y"))
    index.add(entry(5, "z"))
    assert shown.numbers(state) == [2, 3, 6]
    assert [row.turn_id for row in trace_index.numbered(state, [2, 6, 77])] == ["t5", "t1"]
    assert [row.turn_id for row in trace_index.of_runs(state, ["t5", "t2", "nothing"])] == ["t2", "t4", "t5"]


def test_the_first_turns_of_an_index_that_was_made_anew(tmp_path: Path) -> None:
    state, every = str(tmp_path), trace_index.Firsts(lambda agent: True)
    for trace in ("a", "b"):
        with closing(TraceIndex(state)) as made:
            made.add(entry(1, trace))
            made.add(entry(2, trace + trace))
        assert every.numbers(state) == [1, 2]
        for path in (tmp_path / FOLDER).iterdir():
            path.unlink()
    with closing(TraceIndex(state)) as made:
        made.add(entry(9, "c"))
    assert every.numbers(state) == [1]
