"""What a kernel makes for itself is closed to others, whatever the umask of whoever starts it."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel_fixture import Sandbox, sandbox


def made(top: Path) -> dict[str, int]:
    """Every folder and file below `top`, not of a workdir, with its mode."""
    found = {}
    for folder, folders, files in os.walk(top):
        if os.path.basename(folder) == "workspace":
            folders.clear()
            continue
        for name in [*folders, *files]:
            state = os.lstat(f"{folder}/{name}")
            if not stat.S_ISLNK(state.st_mode):
                found[os.path.relpath(f"{folder}/{name}", top)] = stat.S_IMODE(state.st_mode)
    return found


@pytest.fixture(scope="module")
def open_handed() -> Iterator[Sandbox]:
    """A kernel that was started under umask 0, with a turn and a tool call behind it."""
    with sandbox() as kernel:
        before = os.umask(0)
        try:
            started = kernel.gdn("run", "--detach")
            assert started.status == 0, started.err
            called = kernel.call("umask; touch ours; mkdir folder; stat -c %a ours folder")
            assert called["output"]["stdout"].split() == ["0000", "666", "777"], called
            assert kernel.gdn("send", "hello").status == 0
        finally:
            os.umask(before)
        yield kernel


def test_under_umask_0_no_folder_and_no_file_of_the_state_is_open_to_others(open_handed: Sandbox) -> None:
    state = made(open_handed.home / "state")
    assert {name.split("/")[2] for name in state if name.count("/") == 2} >= {"blobs", "instances", "logs", "toolhosts"}
    assert any(name.endswith("conversation.db") for name in state)
    assert {name: f"{mode:o}" for name, mode in state.items() if mode & 0o077} == {}
    assert stat.S_IMODE((open_handed.home / "state").stat().st_mode) == 0o700


def test_under_umask_0_nothing_of_the_runtime_directory_is_open_to_others(open_handed: Sandbox) -> None:
    runtime = made(open_handed.home / "r")
    assert any(name.endswith("clients.sock") for name in runtime)
    assert {name: f"{mode:o}" for name, mode in runtime.items() if mode & 0o077} == {}


@pytest.mark.parametrize("role", ["supervisor", "broker", "toolhost", "forkserver", "agent"])
def test_every_process_of_a_kernel_makes_files_that_are_closed(open_handed: Sandbox, role: str) -> None:
    status = Path(f"/proc/{open_handed.pid(role)}/status").read_text()
    (umask,) = (line.split()[1] for line in status.splitlines() if line.startswith("Umask:"))
    assert umask == "0077"


def test_validate_makes_its_state_closed_also_under_umask_0() -> None:
    with sandbox() as alone:
        (alone.home / "words.py").write_text("handlers = {'count': lambda ctx, input: {}}\n")
        spec = "{entry: ./words.py, exports: [{name: count}]}"
        tool = f"apiVersion: goondan.ai/v1\nkind: Tool\nmetadata: {{name: words}}\nspec: {spec}"
        alone.bundle.write_text(alone.bundle.read_text().replace("Tool/bash", "Tool/words") + f"---\n{tool}\n")
        before = os.umask(0)
        try:
            checked = alone.gdn("validate")
        finally:
            os.umask(before)
        assert checked.status == 0, checked.err + checked.out
        state = made(alone.home / "state")
        assert state, "nothing was remembered"
        assert {name: f"{mode:o}" for name, mode in state.items() if mode & 0o077} == {}


def test_jails_write_under_the_umask_of_whoever_starts_the_kernel() -> None:
    with sandbox() as kernel:
        before = os.umask(0o027)
        try:
            said = kernel.call("umask; touch ours; stat -c %a ours")["output"]["stdout"].split()
        finally:
            os.umask(before)
        assert said == ["0027", "640"]
