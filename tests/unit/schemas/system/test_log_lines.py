"""Standard error as JSON lines, and how `gdn logs` reads them."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from goondan.kernel.traces.logs import parse
from goondan.schemas.system.log_lines import MAX_PARTIAL, VARIABLE, JsonLines, begin_log


class Lines:
    """A stream, and what was written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.stream = JsonLines(self.fd, "agent", "main/k")

    @property
    def raw(self) -> list[bytes]:
        return self.path.read_bytes().splitlines()

    @property
    def written(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.raw]


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    made = Lines(tmp_path / "log")
    yield made
    os.close(made.fd)


def test_a_record_of_a_logger_is_one_line_without_its_own_time_level_and_name(lines: Lines) -> None:
    handler = logging.StreamHandler(lines.stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s main/k %(message)s"))
    record = logging.makeLogRecord({"msg": "two\nlines \x1b[2J \u202e", "levelno": 30, "levelname": "WARNING"})
    record.created, record.msecs = 1_700_000_000.25, 250.0
    handler.emit(record)
    (line,) = lines.written
    assert line == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "role": "agent",
        "name": "main/k",
        "message": "two\nlines \x1b[2J \u202e",
        "fields": {},
    }
    at, level, text = parse(lines.raw[0])
    assert (at, level, text) == (1_700_000_000.25, "WARNING", line["message"])


def test_what_is_printed_is_a_line_and_broken_text_is_no_end(lines: Lines) -> None:
    print("E_STATE: it broke", file=lines.stream)
    print("half \udc80", end="", file=lines.stream)
    lines.stream.flush()
    lines.stream.write("x" * (MAX_PARTIAL + 1))
    said = [(line["level"], line["message"]) for line in lines.written]
    assert said[:2] == [("info", "E_STATE: it broke"), ("info", "half ?")]
    assert len(said[2][1]) == MAX_PARTIAL + 1


def test_a_line_of_the_tool_host_keeps_whose_it_is(lines: Lines) -> None:
    told = {"time": 1.5, "level": "warn", "message": "slow", "tool": "bash", "agent": "main", "instanceKey": "k"}
    lines.stream.put_object(json.dumps({**told, "code": None}).encode())
    (line,) = lines.written
    assert line["level"] == "warning"
    assert line["fields"] == {"tool": "bash", "agent": "main", "instanceKey": "k"}
    assert parse(lines.raw[0]) == (1.5, "WARNING", "bash (main/k): slow")
    assert parse(json.dumps(told).encode()) == (1.5, "WARN", "bash (main/k): slow")


def test_only_the_one_value_changes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stderr
    monkeypatch.setattr(sys, "stderr", before)
    monkeypatch.setenv(VARIABLE, "text")
    begin_log("broker")
    assert sys.stderr is before
    monkeypatch.setenv(VARIABLE, "json")
    begin_log("forkserver")
    begin_log("agent", "main/k")
    made: Any = sys.stderr
    assert isinstance(made, JsonLines)
    assert (made.role, made.name, made.fileno()) == ("agent", "main/k", 2)


def test_a_write_that_was_cut_short_goes_on(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    print("whole", file=lines.stream)
    assert [line["message"] for line in lines.written] == ["whole"]


def test_the_name_of_a_program_stands_in_a_line_once(lines: Lines) -> None:
    lines.stream.role, lines.stream.name = "telemetry", ""
    print("2026-01-01 00:00:00,000 ERROR telemetry nothing is exported", file=lines.stream)
    assert [(line["level"], line["message"]) for line in lines.written] == [("error", "nothing is exported")]
