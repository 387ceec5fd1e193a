"""Which directories an operator may give to tools."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from goondan.kernel import lock
from goondan.kernel.cli.state import BundleTarget, absolute_workdir
from goondan.schemas.bundle.address import instance_workdir
from goondan.schemas.wire.errors import GoondanError
from tests.checks import refuses


@pytest.fixture
def place(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> BundleTarget:
    tmp_path = short_tmp  # the usual runtime directory is none where its sockets would have too long paths
    state = tmp_path / "state"
    monkeypatch.setenv("GOONDAN_STATE_ROOT", str(state))
    (state / "workspaces" / "d" / "instances").mkdir(parents=True)
    (tmp_path / "r" / "goondan" / "d").mkdir(parents=True)
    (tmp_path / "r").chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "r"))
    (tmp_path / "link").symlink_to("state/workspaces")
    (tmp_path / "stateful").mkdir()
    monkeypatch.chdir(tmp_path)
    return BundleTarget("b", str(state / "workspaces" / "d"))


@pytest.mark.parametrize(
    "folder", ["state", "state/workspaces/d", "link", "link/d/instances", "r/goondan", "r/goondan/d"]
)
def test_the_kernels_own_are_refused(place: BundleTarget, folder: str) -> None:
    with refuses("E_SANDBOX_DENIED") as caught:
        absolute_workdir(folder, place)
    assert caught.value.info.suggestion


def test_a_runtime_directory_that_is_another_one_than_usual_is_refused(place: BundleTarget, short_tmp: Path) -> None:
    for number, path in enumerate(("goondan-0-12ab/d", "by-hand")):
        (short_tmp / path).mkdir(parents=True)
        locks = lock.lock(place.state_dir)
        record = lock.KernelRecord(
            pid=1, bundle="b", run_dir=str(short_tmp / path), state_dir=place.state_dir, started_at=str(number)
        )
        lock.write_record(locks, record)
        locks.close()
        with refuses("E_SANDBOX_DENIED"):
            absolute_workdir(path.split("/")[0], place)


@pytest.mark.parametrize("folder", ["", "nowhere", "a\0b", "x" * 5000])
def test_what_is_no_directory_is_a_mistake(place: BundleTarget, folder: str) -> None:
    with refuses("E_USAGE"):
        absolute_workdir(folder, place)


@pytest.mark.parametrize("folder", [".", "stateful", "r"])
def test_others_are_taken_as_they_are_named(place: BundleTarget, folder: str, short_tmp: Path) -> None:
    assert absolute_workdir(folder, place) == str((short_tmp / folder).resolve())


def test_an_instances_workspace_is_no_secret(place: BundleTarget) -> None:
    workspace = Path(instance_workdir(place.state_dir, "assistant", "u/1"))
    (workspace / "below").mkdir(parents=True)
    for folder in (workspace, workspace / "below"):
        assert absolute_workdir(str(folder), place) == str(folder)
    with pytest.raises(GoondanError):
        absolute_workdir(str(workspace.parent), place)


def test_a_name_that_cannot_be_sent_is_a_mistake(place: BundleTarget, short_tmp: Path) -> None:
    strange = os.fsdecode(os.fsencode(short_tmp) + b"/\xff\xfe")
    os.mkdir(strange)
    with refuses("E_USAGE", match="cannot be sent"):
        absolute_workdir(strange, place)
