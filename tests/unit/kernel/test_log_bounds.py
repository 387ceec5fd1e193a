"""Room in logs: files are bounded, and who writes much has its own lines suppressed, and nobody else's."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from goondan.kernel.traces import logs
from goondan.kernel.traces.logs import Log
from goondan.schemas.traces.log_admission import (
    GROUP_BURST,
    GROUP_RATE,
    MAX_KNOWN,
    RESUMED,
    SOURCE_BURST,
    SOURCE_RATE,
    Admission,
)

STRANGER = 40_001


def line(number: int, *, agent: str | None = "main", key: str = "k", text: str = "x") -> bytes:
    said = {"time": float(number), "level": "info", "message": f"{number} {text}", "tool": "bash", "agent": agent}
    return json.dumps({**said, "instanceKey": key}).encode()


def test_what_is_rotated_never_goes_through_a_link(tmp_path: Path) -> None:
    log, precious = tmp_path / "toolhost.log", tmp_path / "precious"
    precious.write_text("root's own")
    for suffix in (".1", ".2"):
        (tmp_path / f"toolhost.log{suffix}").symlink_to(precious)
    log.write_bytes(b"line\n" * (logs.MAX_LOG_BYTES // 5 + 1))
    logs.bound_log(str(log))
    assert precious.read_text() == "root's own"
    old = tmp_path / "toolhost.log.1"
    assert stat.S_ISREG(os.lstat(old).st_mode)
    assert stat.S_IMODE(os.lstat(old).st_mode) == 0o600
    assert log.stat().st_size == 0


@pytest.mark.parametrize("kind", ["link", "fifo", "other name"])
def test_a_log_that_is_no_plain_file_of_ours_is_not_written_to(tmp_path: Path, kind: str) -> None:
    log, precious = tmp_path / "toolhost.log", tmp_path / "precious"
    precious.write_text("root's own")
    if kind == "link":
        log.symlink_to(precious)
    elif kind == "fifo":
        os.mkfifo(log)
    else:
        os.link(precious, log)
    with pytest.raises(OSError, match=r"(?i)link|plain file|no such device"):
        logs.open_log(str(log))
    logs.bound_log(str(log))
    assert precious.read_text() == "root's own"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_a_log_of_somebody_else_is_not_written_to(tmp_path: Path) -> None:
    log = tmp_path / "toolhost.log"
    log.touch()
    os.chown(log, STRANGER, STRANGER)
    with pytest.raises(OSError, match="plain file of ours"):
        logs.open_log(str(log))


def test_old_content_is_bounded_however_much_was_written_before_the_look(tmp_path: Path) -> None:
    log = tmp_path / "toolhost.log"
    noise = line(1, text="noise" * 20) + b"\n"
    log.write_bytes(b"the first\n" + noise * ((71 << 20) // len(noise)) + b"the last\n")
    logs.bound_log(str(log))
    old = (tmp_path / "toolhost.log.1").read_bytes()
    assert len(old) <= logs.MAX_OLD_BYTES
    assert old.startswith(b"the first\n")
    assert old.endswith(b"the last\n")
    assert b" bytes suppressed" in old


def test_older_lines_are_kept_through_two_rotations_and_all_files_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_LOG_BYTES", 40_000)
    monkeypatch.setattr(logs, "MAX_OLD_BYTES", 60_000)
    log = tmp_path / "toolhost.log"
    log.write_bytes(line(0, agent="victim", key="v", text="evidence") + b"\n")
    for number in range(1, 12):
        with log.open("ab") as writer:
            flood = range(number * 1000, number * 1000 + 600)
            writer.write(b"".join(line(n, key="loud", text="noise") + b"\n" for n in flood))
        if number % 3:
            logs.bound_log(str(log))
        else:
            os.close(logs.open_log(str(log)))  # as a start does
        total = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert total <= 40_000 + 60_000 + 60_000
        reader = Log("toolhost", str(log))
        shown = reader.tail(100_000)
        reader.close()
        assert ("evidence" in shown[0].text) == (number <= 2)
        assert "11599" in shown[-1].text or number < 11
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toolhost.log", "toolhost.log.1", "toolhost.log.2"]


def test_a_source_needs_more_than_an_hour_and_an_agent_a_quarter_to_fill_the_older_files() -> None:
    room = 2 * logs.MAX_LOG_BYTES
    assert room > SOURCE_BURST + 3600 * SOURCE_RATE
    assert room > GROUP_BURST + 720 * GROUP_RATE


# --- what may be written at once -------------------------------------------------------------------------------------


def test_a_source_that_writes_too_much_waits_for_its_bucket_and_its_lines_are_counted() -> None:
    admission: Admission[str] = Admission()
    admitted = sum(admission.admit("main", "loud", 1024, 0.0) for _ in range(4096))
    assert admitted == SOURCE_BURST // 1024
    assert admission.admit("other", "quiet", 1024, 0.0)
    assert admission.take_suppressed("quiet") == 0
    assert admission.take_suppressed("loud") == 4096 - admitted
    assert not admission.admit("main", "loud", 1024, 0.01)
    assert not admission.admit("main", "loud", 1024, 1.0), "it waits until there is room for many lines"
    later = RESUMED * SOURCE_BURST / SOURCE_RATE + 1.0
    assert admission.admit("main", "loud", 1024, later)
    assert sum(admission.admit("main", "loud", 1024, later) for _ in range(4096)) <= later * SOURCE_RATE // 1024
    assert set(admission.take_all_suppressed()) == {"loud"}
    assert admission.take_all_suppressed() == {}


def test_many_sources_of_one_group_share_its_bucket_and_leave_the_quiet_ones_room() -> None:
    admission: Admission[int] = Admission()
    written = sum(admission.admit("main", n % 10, 1024, 0.0) for n in range(100_000))
    quiet_room = 10 * SOURCE_BURST // 4
    assert written * 1024 <= GROUP_BURST + quiet_room
    assert admission.admit("main", 77, 1024, 0.0), "one that has written nothing is heard"
    assert admission.admit("other", 78, 1024, 0.0)


def test_what_is_remembered_is_bounded() -> None:
    admission: Admission[int] = Admission()
    for number in range(3 * MAX_KNOWN):
        admission.admit(f"g{number}", number, 2 * SOURCE_BURST, 0.0)
    assert len(admission.take_all_suppressed()) == MAX_KNOWN
    assert len(admission._sources) == len(admission._groups) == MAX_KNOWN
