"""Room in logs: who writes much loses lines of its own, and nobody else's."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel import log_bounds
from goondan.kernel.log_files import Log
from goondan.kernel.log_shares import allot, sources_of, thin
from goondan.schemas.system.log_admission import GROUP_BURST, MAX_KNOWN, SOURCE_BURST, SOURCE_RATE, Admission

STRANGER = 40_001


def line(number: int, *, agent: str | None = "main", key: str = "k", text: str = "x") -> bytes:
    said = {"time": float(number), "level": "info", "message": f"{number} {text}", "tool": "bash", "agent": agent}
    return json.dumps({**said, "instanceKey": key}).encode()


def size(lines: list[bytes]) -> int:
    return sum(len(one) + 1 for one in lines)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 10_000), max_size=9), st.integers(0, 20_000))
def test_shares_add_up_to_no_more_than_there_is_and_the_modest_get_all(sizes: dict[str, int], room: int) -> None:
    found = allot(sizes, room)  # type: ignore[arg-type]
    assert sum(found.values()) <= room
    assert all(found[name] <= sizes[name] for name in sizes)
    even = room // len(sizes) if sizes else 0
    assert all(found[name] == sizes[name] for name in sizes if sizes[name] <= even)
    if sum(sizes.values()) <= room:
        assert found == sizes


SOURCES = st.tuples(st.sampled_from(["main", "other", None]), st.sampled_from(["a", "b"]), st.integers(0, 400))


@given(st.lists(SOURCES, max_size=80), st.integers(2_000, 12_000))
def test_what_is_kept_fits_stays_in_order_and_is_the_oldest_and_the_newest_of_each(
    written: list[tuple[str | None, str, int]], room: int
) -> None:
    lines = [line(n, agent=agent, key=key, text="x" * more) for n, (agent, key, more) in enumerate(written)]
    kept = thin("toolhost", lines, room)
    assert size(kept) <= room
    if size(lines) <= room:
        assert kept == lines
    remaining = [one for one in kept if b'"suppressed":' not in one]
    assert remaining == [one for one in lines if one in set(remaining)]
    gone = sum(json.loads(one).get("suppressed", 0) for one in kept)
    assert gone <= len(lines) - len(remaining)


def test_a_flood_takes_lines_only_from_its_own_source() -> None:
    before = [line(n, agent="victim", key="v", text="evidence") for n in range(50)]
    own = [line(50, key="loud", text="what it did before")]
    flood = [line(n, key="loud", text="noise " * 20) for n in range(51, 5_051)]
    after = [line(6_000, agent="main", key="quiet", text="evidence, too"), b"2026-01-01 00:00:00,000 INFO host"]
    kept = thin("toolhost", [*before, *own, *flood, *after], 100_000)
    assert kept[:51] == [*before, *own]
    assert kept[-2:] == after
    (note,) = (json.loads(one) for one in kept if b'"suppressed":' in one)
    assert (note["agent"], note["instanceKey"], note["tool"]) == ("main", "loud", "bash")
    assert note["message"] == f"{note['suppressed']} lines suppressed: too many at once"
    assert note["suppressed"] + len(kept) - 1 == 50 + 1 + 5_000 + 2
    again = thin("toolhost", [*kept, *flood], 100_000)  # the next flood: the count goes on
    notes = [json.loads(one)["suppressed"] for one in again if b'"suppressed":' in one]
    assert sum(notes) + len(again) - len(notes) == note["suppressed"] + len(kept) - 1 + 5_000
    assert again[:51] == kept[:51]


def test_many_instances_of_one_agent_get_no_more_than_its_share() -> None:
    quiet = [line(n, agent="victim", key="v", text="evidence" * 10) for n in range(200)]
    many = [line(n, key=f"i{n % 400}", text="noise" * 10) for n in range(200, 8_200)]
    kept = thin("toolhost", [*quiet, *many], 80_000)
    assert [one for one in kept if b"victim" in one] == quiet


def test_whose_lines_they_are() -> None:
    lines = [
        b"2026-01-01 00:00:00,000 INFO main/a asked",
        b"Traceback (most recent call last):",
        b"2026-01-01 00:00:00,001 ERROR main/b broke",
        b"  a line of its traceback",
        b'{"not": "ours"',
    ]
    found = [(source.agent, source.instance_key) for source in sources_of("agent-main", lines)]
    assert found == [("main", "a"), ("main", "a"), ("main", "b"), ("main", "b"), ("main", "b")]
    assert {source.group for source in sources_of("supervisor", lines)} == {""}


# --- files ----------------------------------------------------------------------------------------------------------


def test_what_is_rotated_never_goes_through_a_link(tmp_path: Path) -> None:
    log, precious = tmp_path / "toolhost.log", tmp_path / "precious"
    precious.write_text("root's own")
    for suffix in (".1", ".2"):
        (tmp_path / f"toolhost.log{suffix}").symlink_to(precious)
    log.write_bytes(b"line\n" * (log_bounds.MAX_LOG_BYTES // 5 + 1))
    log_bounds.bound_log(str(log))
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
        log_bounds.open_log(str(log))
    log_bounds.bound_log(str(log))
    assert precious.read_text() == "root's own"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_a_log_of_somebody_else_is_not_written_to(tmp_path: Path) -> None:
    log = tmp_path / "toolhost.log"
    log.touch()
    os.chown(log, STRANGER, STRANGER)
    with pytest.raises(OSError, match="plain file of ours"):
        log_bounds.open_log(str(log))


def test_old_content_is_bounded_however_much_was_written_before_the_look(tmp_path: Path) -> None:
    log = tmp_path / "toolhost.log"
    noise = line(1, text="noise" * 20) + b"\n"
    log.write_bytes(b"the first\n" + noise * ((71 << 20) // len(noise)) + b"the last\n")
    log_bounds.bound_log(str(log))
    old = (tmp_path / "toolhost.log.1").read_bytes()
    assert len(old) <= log_bounds.MAX_OLD_BYTES
    assert old.startswith(b"the first\n")
    assert old.endswith(b"the last\n")
    assert b" bytes suppressed" in old


def test_evidence_outlives_every_flood_and_all_files_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_bounds, "MAX_LOG_BYTES", 40_000)
    monkeypatch.setattr(log_bounds, "MAX_OLD_BYTES", 60_000)
    log = tmp_path / "toolhost.log"
    evidence = line(0, agent="victim", key="v", text="evidence")
    log.write_bytes(evidence + b"\n")
    for number in range(1, 12):
        with log.open("ab") as writer:
            flood = range(number * 1000, number * 1000 + 600)
            writer.write(b"".join(line(n, key="loud", text="noise") + b"\n" for n in flood))
        if number % 3:
            log_bounds.bound_log(str(log))
        else:
            os.close(log_bounds.open_log(str(log)))  # as a start does
        total = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert total <= 40_000 + 60_000 + 40_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toolhost.log", "toolhost.log.1", "toolhost.log.2"]
    reader = Log("toolhost", str(log))
    shown = reader.tail(100_000)
    reader.close()
    assert sum("evidence" in entry.text for entry in shown) == 1
    assert "evidence" in shown[0].text
    assert any("lines suppressed" in entry.text for entry in shown)


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
    assert admission.admit("main", "loud", 1024, 5.0)
    assert sum(admission.admit("main", "loud", 1024, 5.0) for _ in range(4096)) <= 5 * SOURCE_RATE // 1024
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
