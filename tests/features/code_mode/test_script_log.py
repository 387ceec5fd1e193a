"""What the calls of a script have come to, for a process that finds the script without its agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from goondan.features.code_mode import agent
from goondan.features.code_mode.agent import FILE, ScriptLog
from goondan.features.code_mode.agent.scripts import Record

ONE, TWO = Record(1, "began", "a__b", '{"x":1}'), Record(1, "ok")


def test_another_process_reads_what_was_written_and_nothing_of_another_script(tmp_path: Path) -> None:
    log = ScriptLog(tmp_path)
    assert log.read("t/c1") == []
    log.add("t/c1", ONE)
    log.add("t/c2", Record(7, "began", "c__d", "{}"))
    log.add("t/c1", TWO)
    assert ScriptLog(tmp_path).read("t/c1") == [ONE, TWO]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_it_survives_the_end_of_its_process(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from goondan.features.code_mode.agent import ScriptLog\n"
        "from goondan.features.code_mode.agent.scripts import Record\n"
        "log = ScriptLog(sys.argv[1])\n"
        "for number in range(2000): log.add('t/c1', Record(number, 'began', 'a__b', 'x' * 200))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[3])
    assert done.returncode == -9
    assert [record.number for record in ScriptLog(tmp_path).read("t/c1")] == list(range(2000))


def test_it_goes_on_behind_what_is_there_and_is_empty_after_clear(tmp_path: Path) -> None:
    first = ScriptLog(tmp_path)
    first.add("t/c1", ONE)
    first.close()
    second = ScriptLog(tmp_path)
    second.add("t/c1", TWO)
    assert second.read("t/c1") == [ONE, TWO]
    second.clear()
    assert second.read("t/c1") == []
    second.add("t/c1", ONE)
    assert second.read("t/c1") == [ONE]
    third = ScriptLog(tmp_path)
    third.clear()
    assert third.read("t/c1") == []


def test_a_line_that_was_cut_or_spoilt_costs_that_line(tmp_path: Path) -> None:
    log = ScriptLog(tmp_path)
    log.add("t/c1", ONE)
    log.close()
    path = tmp_path / FILE
    written = path.read_bytes().rstrip(b"\0")
    path.write_bytes(written + b"\xff\xfe\n[1,2]\n" + written[:10])
    assert ScriptLog(tmp_path).read("t/c1") == [ONE]


def test_a_disk_without_room_costs_the_notes_and_not_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    log = ScriptLog(tmp_path)
    log.add("t/c1", ONE)
    log.add("t/c1", TWO)
    assert log.read("t/c1") == []
    assert caplog.text.count("No space left") == 1
    monkeypatch.undo()
    monkeypatch.setattr(agent, "MAX_SIZE", 10)
    ScriptLog(tmp_path).add("t/c1", ONE)
    assert caplog.text.count("cannot be written down") == 2
