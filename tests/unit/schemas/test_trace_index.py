"""The index of traces: turns are found by trace, turn and event, whatever else is in the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.schemas import trace_index
from goondan.schemas.spans import trace_id_of
from goondan.schemas.trace_index import FOLDER, IndexLine, add, last, named, of_trace


def entry(number: int, trace: str = "x", **changes: str) -> IndexLine:
    known = {
        "at": f"2026-01-01T00:00:{number:02}.000Z",
        "trace_id": trace_id_of(trace),
        "turn_id": f"t{number}",
        "event_id": f"e{number}",
        "agent": "main",
        "instance_key": "k",
    }
    return IndexLine(**{**known, **changes})


def test_turns_are_found_by_trace_turn_and_event(tmp_path: Path) -> None:
    state = str(tmp_path)
    assert (of_trace(state, trace_id_of("x")), named(state, "t1"), last(state, 1)) == ([], [], [])
    entries = [entry(number, "xyz"[number % 3]) for number in range(30)]
    for one in reversed(entries):
        add(state, one)
    assert of_trace(state, trace_id_of("y")) == entries[1::3]
    assert named(state, "t7") == named(state, "e7") == [entries[7]]
    assert named(state, "t") == named(state, "2026-01-01T00:00:01.000Z") == named(state, trace_id_of("x")) == []
    assert last(state, 3) == entries[:-4:-1]
    assert of_trace(state, "../../etc/passwd") == []


def test_the_last_of_an_agent_or_an_instance(tmp_path: Path) -> None:
    for number in range(20):
        add(str(tmp_path), entry(number, str(number), agent="ab"[number % 2], instance_key="kl"[number // 10]))
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
            add(state, one)
        except UnicodeEncodeError:
            assert any("\ud800" <= letter <= "\udfff" for letter in name)
            continue
        assert named(state, name) == [one]


def test_what_is_no_line_is_passed_over(tmp_path: Path) -> None:
    state, one, two = str(tmp_path), entry(1), entry(2)
    add(state, one)
    (path,) = (tmp_path / FOLDER).iterdir()
    with path.open("ab") as file:
        file.write(b'["2026-01-01T00:00:01.500Z","' + trace_id_of("x").encode() + b'","t1')  # power was lost here
    add(state, two)
    with path.open("ab") as file:
        file.write(b"\xff\xfe" + trace_id_of("x").encode() + b'\n["t1","t1","t1","t1","t1","t1"]\n[]\n"t1"\n')
    assert of_trace(state, trace_id_of("x")) == [one, two]
    assert (named(state, "t1"), named(state, "t2")) == ([one], [two])
    assert last(state, 9) == [two, one]


def test_the_folder_is_bounded_and_forgets_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_index, "FILE_BYTES", 1000)
    state = str(tmp_path)
    for number in range(58):
        add(state, entry(number))
    files = sorted((tmp_path / FOLDER).iterdir())
    assert [path.name for path in files] == [trace_id_of("x")[0], f"{trace_id_of('x')[0]}.1"]
    assert all(path.stat().st_size < 1300 for path in files)
    found = of_trace(state, trace_id_of("x"))
    assert 8 < len(found) < 25
    assert found[-1] == entry(57)
    assert last(state, 3) == [entry(57), entry(56), entry(55)]


def test_it_is_closed_to_others_and_follows_no_link(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    add(str(state), entry(1))
    (path,) = (state / FOLDER).iterdir()
    assert (os.stat(state / FOLDER).st_mode & 0o777, os.stat(path).st_mode & 0o777) == (0o700, 0o600)
    target = tmp_path / "target"
    target.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        add(str(state), entry(2))
    assert of_trace(str(state), trace_id_of("x")) == []


def test_a_grown_file_that_another_process_has_replaced_is_left_alone(tmp_path: Path) -> None:
    state = str(tmp_path)
    add(state, entry(1))
    (path,) = (tmp_path / FOLDER).iterdir()
    held = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.replace(path, f"{path}.1")
    add(state, entry(2))
    trace_index._replace(held, str(path))
    os.close(held)
    assert of_trace(state, trace_id_of("x")) == [entry(1), entry(2)]
