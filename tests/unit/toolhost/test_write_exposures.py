"""The record of when jails could write where, and what is kept from them meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.worker.tool_host_reports import MAX_SILENCE_S, GuardedPlace, WriteExposure
from goondan.toolhost.jails import write_exposures as module
from goondan.toolhost.jails.write_exposures import WriteExposures, joined
from goondan.toolhost.lookup.folders import MADE_NAMES
from tests.checks import refuses, there
from tests.toolhost_fixture import POWERS


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "tools").mkdir(parents=True)
    (folder / "goondan.yaml").write_text("a")
    return folder


def record(tmp_path: Path) -> list[WriteExposure]:
    return msgspec.json.decode((tmp_path / "record").read_bytes(), type=list[WriteExposure])


def names(stay: WriteExposure) -> list[str]:
    return sorted(os.path.basename(kept.path) for kept in stay.kept)


def test_a_stay_is_on_disk_before_its_jail_and_ends_with_the_last(tmp_path: Path, work: Path) -> None:
    stays = WriteExposures(str(tmp_path / "record"), POWERS)
    before = time.time_ns()
    guarded = [str(work / "goondan.yaml"), str(work / "tools"), "/elsewhere"]
    stays.begin([str(work)], guarded, [])
    stays.begin([str(work)], guarded, [])
    (present,) = record(tmp_path)
    assert (present.folder, present.ended, names(present)) == (str(work), None, ["goondan.yaml", "tools"])
    assert before - 10**9 < present.began < before
    stays.end([str(work)])
    assert record(tmp_path) == [present]
    (work / "at-the-last-moment").write_text("x")
    stays.end([str(work)])
    (past,) = record(tmp_path)
    # Whoever writes from now on is none of its tools.
    assert (work / "at-the-last-moment").stat().st_ctime_ns <= there(past.ended) <= time.time_ns()
    assert names(past) == ["goondan.yaml", "tools"]
    stays.end([str(work)])  # again does nothing


def test_what_was_replaced_was_not_kept(tmp_path: Path, work: Path) -> None:
    stays = WriteExposures(str(tmp_path / "record"), POWERS)
    document = work / "goondan.yaml"
    stays.begin([str(work)], [str(document), str(work / "tools")], [])
    document.write_text("written in place")
    assert stays.intact([str(work)])
    (work / "new").write_text("b")
    (work / "new").rename(document)
    assert not stays.intact([str(work)])
    assert stays.intact([str(work)])  # said once
    stays.begin([str(work)], [str(document), str(work / "tools")], [])
    stays.end([str(work)])
    stays.end([str(work)])
    assert names(record(tmp_path)[0]) == ["tools"]


def test_a_file_with_another_name_is_not_kept(tmp_path: Path, work: Path) -> None:
    os.link(work / "goondan.yaml", work / "tools" / "same.yaml")
    stays = WriteExposures(str(tmp_path / "record"), POWERS)
    stays.begin([str(work)], [str(work / "goondan.yaml"), str(work / "tools")], [])
    stays.end([str(work)])
    assert names(record(tmp_path)[0]) == ["tools"]


def test_only_what_every_jail_of_a_stay_keeps_is_kept(tmp_path: Path, work: Path) -> None:
    stays = WriteExposures(str(tmp_path / "record"), POWERS)
    stays.begin([str(work)], [str(work / "tools")], [])
    stays.begin([str(work)], [str(work / "goondan.yaml"), str(work / "tools")], [])
    stays.end([str(work)])
    stays.end([str(work)])
    assert names(record(tmp_path)[0]) == ["tools"]


def test_what_was_made_is_removed_unless_it_is_used(tmp_path: Path, work: Path) -> None:
    one, other = WriteExposures(str(tmp_path / "record"), POWERS), WriteExposures(None, POWERS)
    made = POWERS.make_placeholders(str(work), MADE_NAMES)
    assert [os.path.basename(path) for path in made] == [".git", ".venv", ".goondan"]
    assert POWERS.make_placeholders(str(work), MADE_NAMES) == []
    one.begin([str(work)], made, made)
    assert record(tmp_path)[0].made == made
    other.begin([str(work)], made, [])  # of another tool host, for which they were there
    one.end([str(work)])
    assert (work / ".git").is_dir()
    other.end([str(work)])
    one.begin([str(work)], made, made)
    (work / ".venv" / "pyvenv.cfg").write_text("a person's")
    one.end([str(work)])
    assert sorted(os.listdir(work)) == [".venv", "goondan.yaml", "tools"]


def test_a_host_that_was_killed_is_tidied_up_after(tmp_path: Path, work: Path) -> None:
    killed = WriteExposures(str(tmp_path / "record"), POWERS)
    made = POWERS.make_placeholders(str(work), MADE_NAMES)
    killed.begin([str(work)], [*made, str(work / "tools"), str(work / "goondan.yaml")], made)
    (work / "other").write_text("")
    (work / "other").rename(work / "goondan.yaml")
    for fd, _ in killed._present[str(work)].pins.values():
        os.close(fd)  # as the system does
    os.utime(tmp_path / "record", (1_000_000_000, 1_700_000_000))
    WriteExposures(str(tmp_path / "record"), POWERS)
    (past,) = record(tmp_path)
    assert past.ended == int((1_700_000_000 + MAX_SILENCE_S) * 1e9)
    assert names(past) == ["tools"]
    assert sorted(os.listdir(work)) == ["goondan.yaml", "tools"]
    heir = WriteExposures(str(tmp_path / "heirs"), POWERS)
    heir.take_over(str(tmp_path / "record"))
    assert not (tmp_path / "record").exists()
    assert msgspec.json.decode((tmp_path / "heirs").read_bytes(), type=list[WriteExposure]) == [past]


def test_a_clock_that_is_set_hides_nothing(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stays = WriteExposures(str(tmp_path / "record"), POWERS)
    stays.begin([str(work)], [], [])
    began = record(tmp_path)[0].began
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 3600 * 10**9)
    stays.end([str(work)])
    (past,) = record(tmp_path)
    assert past.began < began - 3500 * 10**9 and (past.ended or 0) > now() - 10**9


def test_without_a_record_no_jail_begins(work: Path) -> None:
    stays = WriteExposures("/proc/no/such/place", POWERS)
    made = POWERS.make_placeholders(str(work), MADE_NAMES)
    with refuses("E_SANDBOX_DENIED"):
        stays.begin([str(work)], made, made)
    assert sorted(os.listdir(work)) == ["goondan.yaml", "tools"]
    assert stays.intact([str(work)])


def test_a_place_that_is_gone_stops_the_start(tmp_path: Path, work: Path) -> None:
    stays = WriteExposures(str(tmp_path / "record"), POWERS)
    with pytest.raises(GoondanError):
        stays.begin([str(work)], [str(work / "gone")], [])
    assert not stays._present


def test_many_stays_become_fewer(tmp_path: Path) -> None:
    folder = str(tmp_path)
    a, b = GuardedPlace(f"{folder}/a", 1, 1), GuardedPlace(f"{folder}/b", 1, 2)
    many = [WriteExposure(folder, n * 100, n * 100 + 50, [a, b]) for n in range(module.MAX_EXPOSURES)]
    gone = WriteExposure("/no/such/folder", 1, 2)
    assert joined([*many, gone]) == many
    close = WriteExposure(folder, 5051, 5052, [b])
    made = joined([*many, close])
    assert len(made) == module.MAX_EXPOSURES
    assert WriteExposure(folder, 5000, 5052, [b]) in made
