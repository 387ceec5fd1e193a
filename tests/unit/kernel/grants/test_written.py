"""Which files of a bundle a tool may have written, by the times that tool hosts have recorded."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import msgspec
import pytest

from goondan.kernel.bundle.loader import inspect_bundle, open_bundle
from goondan.kernel.bundle.rules.problems import BundleError
from goondan.kernel.trust import written
from goondan.kernel.trust.written import Written, accept, find_written
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.worker.tool_host_reports import EXPOSURES, LOCK, MAX_SILENCE_S, GuardedPlace, WriteExposure

HOUR = 3600 * 10**9
BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: m}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: a}
spec: {modelConfig: {modelRef: Model/m}, prompt: {systemRef: prompt.md}, extensions: [Extension/e]}
---
apiVersion: goondan.ai/v1
kind: Extension
metadata: {name: e}
spec: {entry: ext/e.py}
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    host = tmp_path / "state" / "workspaces" / "0" / "toolhosts" / "1"
    host.mkdir(parents=True)
    (host / LOCK).write_text("")
    return tmp_path / "state"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "ext").mkdir(parents=True)
    (folder / "goondan.yaml").write_text(BUNDLE)
    (folder / "prompt.md").write_text("You help.")
    (folder / "ext" / "e.py").write_text("register = print")
    return folder


def exposures(state: Path, *told: WriteExposure) -> Path:
    path = state / "workspaces" / "0" / "toolhosts" / "1" / EXPOSURES
    path.write_bytes(msgspec.json.encode(told))
    return path


def around_now(folder: Path, **more: object) -> WriteExposure:
    now = time.time_ns()
    return WriteExposure(str(folder), now - HOUR, now + HOUR, **more)  # type: ignore[arg-type]


def names(found: list[Written], folder: Path) -> list[str]:
    return sorted(os.path.relpath(file.path, folder) for file in found)


def test_what_changed_in_a_stay_is_found_and_nothing_else(state: Path, work: Path) -> None:
    every = [str(work / "goondan.yaml"), str(work / "prompt.md"), str(work / "ext")]
    assert find_written(every, str(state)) == []
    now = time.time_ns()
    for other in (
        WriteExposure(str(work), now - 2 * HOUR, now - HOUR),
        WriteExposure(str(work), now + HOUR, now + 2 * HOUR),
        around_now(work / "elsewhere"),
        WriteExposure(str(work)[:-1], now - HOUR, now + HOUR),
    ):
        exposures(state, other)
        assert find_written(every, str(state)) == []
    exposures(state, around_now(work))
    assert names(find_written(every, str(state)), work) == ["ext/e.py", "goondan.yaml", "prompt.md"]
    assert {file.folder for file in find_written(every, str(state))} == {str(work)}
    exposures(
        state,
        around_now(work, kept=[GuardedPlace(str(work / "ext"), 0, 0), GuardedPlace(str(work / "prompt.md"), 0, 0)]),
    )
    assert names(find_written(every, str(state)), work) == ["goondan.yaml"]
    exposures(state, around_now(work.parent))
    assert len(find_written(every, str(state))) == 3


def test_a_time_that_a_program_sets_hides_nothing(state: Path, work: Path) -> None:
    exposures(state, around_now(work))
    os.utime(work / "goondan.yaml", (0, 0))
    assert names(find_written([str(work / "goondan.yaml")], str(state)), work) == ["goondan.yaml"]


def test_a_link_counts_by_itself_and_by_what_it_leads_to(state: Path, work: Path, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("x")
    (work / "link.yaml").symlink_to(tmp_path / "old.yaml")
    (tmp_path / "link.yaml").symlink_to(work / "prompt.md")
    exposures(state, around_now(work))
    links = [str(work / "link.yaml"), str(tmp_path / "link.yaml"), str(tmp_path / "old.yaml")]
    assert [file.path for file in find_written(links, str(state))] == links[:2]


def test_a_stay_without_an_end(state: Path, work: Path) -> None:
    """Its tool host lives, or was killed: then it ended soon after its last sign of life."""
    began, document = time.time_ns() - HOUR, work / "goondan.yaml"
    status = document.stat()
    path = exposures(state, WriteExposure(str(work), began))
    lock = os.open(path.parent / LOCK, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.utime(path, (0, 0))
    (found,) = find_written([str(document)], str(state))
    assert found.open
    with pytest.raises(GoondanError, match="tools can still write"):
        accept([found], str(state))
    os.close(lock)
    assert find_written([str(document)], str(state)) == []  # it has been dead since 1970
    os.utime(path, (time.time(), time.time() - MAX_SILENCE_S + 5))
    (found,) = find_written([str(document)], str(state))
    assert not found.open
    exposures(state, WriteExposure(str(work), began, kept=[GuardedPlace(str(document), status.st_dev, status.st_ino)]))
    assert find_written([str(document)], str(state)) == []
    exposures(
        state, WriteExposure(str(work), began, kept=[GuardedPlace(str(document), status.st_dev, status.st_ino + 1)])
    )
    assert len(find_written([str(document)], str(state))) == 1


def test_an_instances_own_workdir_is_always_a_tools(state: Path) -> None:
    own = state / "workspaces" / "0" / "instances" / "a" / "k" / "workspace"
    own.mkdir(parents=True)
    (own / "goondan.yaml").write_text(BUNDLE)
    assert len(find_written([str(own / "goondan.yaml")], str(state))) == 1


def test_what_was_accepted_is_pinned_to_its_bytes(state: Path, work: Path) -> None:
    exposures(state, around_now(work))
    document = str(work / "goondan.yaml")
    found = find_written([document], str(state))
    os.link(document, work / "other name")
    with pytest.raises(GoondanError, match="has another name"):
        accept(found, str(state))
    (work / "other name").unlink()
    accept(found, str(state))
    assert find_written([document], str(state)) == []
    assert find_written([document], str(state), accepted=True) == found
    assert len(find_written([document], str(state), read={document: b"what was really read"})) == 1
    (work / "goondan.yaml").write_text("other")
    assert len(find_written([document], str(state))) == 1
    os.unlink(document)
    assert find_written([document], str(state)) == []


def test_a_bundle_does_not_load_before_its_files_are_accepted(state: Path, work: Path) -> None:
    own = str(state / "workspaces" / "1")

    def look() -> list[tuple[str, str]]:
        found = inspect_bundle(str(work), state_dir=own, env={}, handlers=False)
        return sorted((problem.code, os.path.relpath(problem.file, work)) for problem in found.errors)

    assert look() == []
    exposures(
        state,
        around_now(work, kept=[GuardedPlace(str(work / "goondan.yaml"), 0, 0), GuardedPlace(str(work / "ext"), 0, 0)]),
    )
    assert look() == [("E_CONFIG_WRITTEN", "prompt.md")]
    (work / "more.yaml").write_text(
        "apiVersion: goondan.ai/v1\nkind: Model\nmetadata: {name: n}\nspec: {provider: embedded}"
    )
    assert look() == [("E_CONFIG_WRITTEN", "more.yaml"), ("E_CONFIG_WRITTEN", "prompt.md")]
    with pytest.raises(BundleError):
        open_bundle(str(work), state_dir=own, env={}, handlers=False)
    accept(inspect_bundle(str(work), state_dir=own, env={}, handlers=False).written, str(state))
    assert look() == []
    exposures(state, around_now(work))
    assert ("E_CONFIG_WRITTEN", "ext/e.py") in look()


def test_a_program_as_large_as_a_runtime_is_accepted_and_one_without_bounds_is_not(
    state: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exposures(state, around_now(work))
    program = work / "node"
    program.touch()
    os.truncate(program, 130 << 20)
    found = find_written([str(program)], str(state))
    accept(found, str(state))
    assert find_written([str(program)], str(state)) == []
    monkeypatch.setattr(written, "_MAX_BYTES", 4096)
    assert [one.digest for one in find_written([str(program)], str(state))] == [""]
