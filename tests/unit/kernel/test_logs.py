"""Lines of logs to entries, their order, and logs that move away while they are read."""

from __future__ import annotations

import io
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.cli.commands.logs import log_lines
from goondan.kernel.cli.output import Style
from goondan.kernel.traces import logs
from goondan.kernel.traces.logs import MAX_LINE, Log, LogLine, Reader, is_wanted, last_lines, merge, parse, role_of


def texts(entries: list[LogLine]) -> list[str]:
    return [entry.text for entry in entries]


def test_the_kinds_of_lines() -> None:
    time, level, text = parse(b"2026-01-31 09:30:00,250 WARNING broker ended: exit status 1\r")
    assert time is not None
    assert (time % 60, level, text) == (0.25, "WARNING", "broker ended: exit status 1")
    assert parse(b"2026-01-31 09:30:00,250 main/k hello")[1:] == (None, "main/k hello")
    said = {"time": 12.5, "level": "error", "message": "boom", "tool": "t", "agent": "a", "instanceKey": "k"}
    assert parse(msgspec.json.encode(said)) == (12.5, "ERROR", "t (a/k): boom")
    assert parse(b'{"level":"error","message":"broken","code":"E_INTERNAL"}') == (None, "ERROR", "broken [E_INTERNAL]")
    assert parse(b'{"other": 1}') == (None, None, '{"other": 1}')
    assert parse(b"  File x, line 1") == (None, None, "  File x, line 1")
    assert parse(b"2026-99-99 09:30:00,250 INFO x")[0] is None
    assert len(parse(b"x" * 100_000)[2]) == MAX_LINE + 1


@given(st.binary() | st.text().map(str.encode) | st.binary().map(lambda b: b"2026-01-31 09:30:00,250 " + b))
def test_any_bytes_are_a_line_that_steers_no_terminal(line: bytes) -> None:
    entries = Reader("toolhost", 0.0).read([line])
    (shown,) = log_lines(entries, Style())
    assert shown.replace("\t", " ").isprintable()


@pytest.mark.parametrize("time", [1e308, -1e308, 0.0])
def test_a_time_that_is_none_is_shown_as_none(time: float) -> None:
    line = msgspec.json.encode({"time": time, "level": "info", "message": "x"})
    assert log_lines(Reader("toolhost", 0.0).read([line]), Style())[0].endswith("x")


def test_a_line_without_time_belongs_to_the_one_above_and_leading_ones_to_the_next() -> None:
    lines = [
        b"  tail of something",
        b"2026-01-31 09:30:00,000 ERROR bad",
        b"Traceback",
        b"2026-01-31 09:30:05,000 INFO ok",
    ]
    first, bad, below, good = Reader("broker", 99.0).read(lines)
    assert first.time == bad.time == below.time
    assert (below.level, good.level) == ("ERROR", "INFO")
    assert Reader("broker", 99.0).read([b"x"])[0].time == 99.0


def test_logs_are_merged_by_time_and_each_keeps_its_order() -> None:
    a = [LogLine(1, "a", "INFO", "1"), LogLine(3, "a", "INFO", "3"), LogLine(3, "a", "INFO", "3b")]
    b = [LogLine(2, "b", "INFO", "2"), LogLine(3, "b", "INFO", "3c")]
    assert texts(merge([a, b])) == ["1", "2", "3", "3b", "3c"]
    assert texts(merge([a, b], 2)) == ["3b", "3c"]
    assert merge([a, b], 0) == []


def test_roles_and_their_files() -> None:
    names = (
        "broker.log",
        "broker.log.1",
        "agent-a%2Fb.log",
        ".log",
        "x.txt",
        "broker.log.2",
        "broker.log.3",
        "broker.log.1.log",
    )
    assert [role_of(name) for name in names] == [
        "broker",
        "broker",
        "agent-a%2Fb",
        None,
        None,
        "broker",
        None,
        "broker.log.1",
    ]
    assert is_wanted("agent-a", "agent")
    assert not is_wanted("toolhost", "agent")
    assert is_wanted("toolhost", None)


@given(
    st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"")), max_size=30), st.integers(0, 40), st.booleans()
)
def test_the_last_lines_of_a_file(lines: list[bytes], count: int, ended: bool) -> None:
    data = b"".join(line + b"\n" for line in lines)
    if not ended and data:
        data = data[:-1]
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    block, logs.BLOCK = logs.BLOCK, 7  # type: ignore[misc]
    try:
        source = io.BytesIO(data)
        assert last_lines(source, count) == (expected[-count:] if count else [])
        assert source.tell() == len(data)
    finally:
        logs.BLOCK = block  # type: ignore[misc]


def test_a_reader_follows_a_log_through_everything_that_bounds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 10)
    path = tmp_path / "broker.log"
    log = Log("broker", str(path))
    assert log.tail(5) == []
    assert log.look() == []
    writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    other = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(writer, b"one\ntw")
    assert texts(log.look()) == ["one"]
    os.write(other, b"o\n")
    assert texts(log.look()) == ["two"]
    os.write(writer, b"three, which makes it too large\n")
    logs.bound_log(str(path))  # copied and emptied while it is written
    os.write(other, b"four\n")
    assert texts(log.look()) == ["three, which makes it too large", "four"]
    os.write(writer, b"five, too large again\n")
    os.close(logs.open_log(str(path)))  # the same by the next start
    os.write(writer, b"end\n")
    assert texts(log.look()) == ["five, too large again", "end"]
    path.rename(tmp_path / "elsewhere")  # moved away by somebody
    path.write_bytes(b"six\n")
    assert texts(log.look()) == ["six"]
    path.unlink()
    assert log.look() == []
    os.write(writer, b"x" * (logs.MAX_PARTIAL + 1))
    os.close(writer)
    os.close(other)
    log.close()


def test_the_tail_takes_from_the_old_content_what_the_new_lacks(tmp_path: Path) -> None:
    (tmp_path / "broker.log.1").write_bytes(b"1\n2\n3\n")
    (tmp_path / "broker.log").write_bytes(b"4\n5\n")
    log = Log("broker", str(tmp_path / "broker.log"))
    assert texts(log.tail(3)) == ["3", "4", "5"]
    assert log.look() == []
    log.close()
    only_old = Log("broker", str(tmp_path / "broker.log"))
    (tmp_path / "broker.log").unlink()
    assert texts(only_old.tail(9)) == ["1", "2", "3"]


def test_a_line_without_end_is_shown_when_it_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "broker.log").write_bytes(b"x" * (logs.MAX_PARTIAL + 1))
    log = Log("broker", str(tmp_path / "broker.log"))
    (entry,) = log.look()
    assert len(entry.text) == MAX_LINE + 1
    log.close()


def test_the_lines_of_an_instance_are_its_agents_and_its_tools(tmp_path: Path) -> None:
    def of_tool(second: float, agent: str, message: str) -> bytes:
        said = {"time": second, "message": message, "tool": "bash", "agent": agent, "instanceKey": "k"}
        return msgspec.json.encode(said) + b"\n"

    host = of_tool(3.0, "main", "later") + of_tool(1.0, "other", "x (main/k): not its") + of_tool(1.0, "main", "first")
    (tmp_path / "toolhost.log").write_bytes(host + b'{"time": 1.0, "message": "of the host itself"}\n')
    (tmp_path / "agent-main.log").write_bytes(b'{"time": 2.0, "message": "own"}\n')
    (tmp_path / "agent-other.log").write_bytes(b'{"time": 2.0, "message": "of another"}\n')
    told = [line.text for line in logs.of_instance(str(tmp_path), "main", "k", 100)]
    assert told == ["bash (main/k): first", "own", "bash (main/k): later"]
    assert [line.text for line in logs.of_instance(str(tmp_path), "main", "else", 100)] == ["own"]
