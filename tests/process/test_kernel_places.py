"""A kernel is found by the record in its state, wherever its sockets are, and jails see neither."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from goondan.kernel import lock
from goondan.kernel.supervisor_client import STOP_S
from tests.kernel_fixture import Sandbox, sandbox, wait_until


@pytest.fixture(scope="module")
def running() -> Iterator[Sandbox]:
    with sandbox() as made:
        made.detach()
        yield made


def other_shell(kernel: Sandbox, **changes: str) -> Sandbox:
    """The same bundle and state in a shell with another environment."""
    return Sandbox(kernel.home, {**kernel.env, **changes}, kernel.bundle, kernel.running, since=kernel.since)


def record(kernel: Sandbox) -> lock.KernelRecord:
    (state_dir,) = kernel.state_dirs
    found = lock.read_record(str(state_dir))
    assert found is not None
    return found


@pytest.mark.feature("doctor")
def test_every_command_finds_the_kernel_from_a_shell_with_another_runtime_directory(running: Sandbox) -> None:
    pid = running.pid("supervisor")
    elsewhere = running.home / "r2"
    elsewhere.mkdir(mode=0o700)
    for xdg in (str(elsewhere), "/nonexistent", ""):
        other = other_shell(running, XDG_RUNTIME_DIR=xdg)
        assert {row["pid"] for row in other.gdn("ps", "--json").json if row["role"] == "supervisor"} == {pid}
        assert record(other).pid == pid
        if xdg:
            continue
        assert other.call("echo here")["output"]["stdout"] == "here\n"
        sent = other.gdn("send", "--json", '/bash__exec {"command": "echo here"}')
        assert sent.status == 0 and "here" in sent.out
        refused = other.gdn("run", "--detach", "--json")
        assert (refused.status, refused.json["error"]["code"]) == (1, "E_KERNEL_RUNNING")
        found = {item["check"]: item for item in other.gdn("doctor", "--json").json["findings"]}
        assert f"pid {pid}" in found["running"]["message"]
        assert record(running).run_dir in found["runDir"]["message"]
        assert found["lock"]["level"] == "ok" and "/kernel" in found["lock"]["message"]
    assert list(elsewhere.iterdir()) == []


def test_jails_see_neither_the_record_nor_the_locks_nor_the_sockets(running: Sandbox) -> None:
    """Also in a workdir that holds the state and the runtime directory."""
    (state_dir,) = running.state_dirs
    places = [str(state_dir / "kernel"), record(running).run_dir]
    looks = [f"ls -A {place}; cat {place}/*; : > {place}/planted; mv {place} {place}.gone" for place in places]
    # From where it is, and from the workdir.
    looks += [look.replace(f"{running.home}/", "./") for look in looks]
    result = running.call("; ".join(looks), "--workdir", str(running.home))
    assert result["output"]["stdout"] == ""
    assert sorted(os.listdir(places[0])) == ["alive", "journal", "kernel.json", "lock"]
    assert "planted" not in os.listdir(places[1])
    # A jail in whose workdir neither lies, for which nothing had to be hidden.
    assert running.call("; ".join(looks[:2]))["output"]["stdout"] == ""


def remove(run_dir: str | Path) -> None:
    """Remove a runtime directory at once, although the fork server may still write there while it gets warm."""
    gone = Path(run_dir).parents[2] / "gone"  # goes with the kernel's folder, whatever is still written there
    os.rename(run_dir, gone)
    shutil.rmtree(gone, ignore_errors=True)


def test_a_runtime_directory_that_was_removed_comes_back_by_itself_and_a_stop_does_without(kernel: Sandbox) -> None:
    kernel.detach()
    pid = kernel.pid("supervisor")
    assert kernel.call("echo before")["output"]["stdout"] == "before\n"
    run_dir = record(kernel).run_dir
    remove(run_dir)
    refused = kernel.gdn("run", "--detach", "--json")
    assert refused.json["error"]["code"] == "E_KERNEL_RUNNING"
    assert kernel.pid("supervisor") == pid  # asked at once: it waits until the kernel can be reached again
    assert kernel.call("echo after")["output"]["stdout"] == "after\n"
    assert sorted(os.listdir(run_dir)) == [
        *("agents.sock", "client.token", "clients.sock", "control.sock", "supervisor.sock", "tools.sock")
    ]
    # It hangs, and its runtime directory is gone: who holds the lock is known all the same.
    os.kill(pid, signal.SIGSTOP)
    remove(run_dir)
    begun = time.monotonic()
    stopped = kernel.gdn("stop", "--json", timeout=40)
    assert (stopped.status, stopped.json) == (0, {"stopped": True, "killed": True})
    assert time.monotonic() - begun < STOP_S - 1.0, "it was waited for, although it takes no signal"
    kernel.wait_for_nothing()


def test_a_kernel_that_cannot_have_its_runtime_directory_back_stops_in_order(kernel: Sandbox) -> None:
    kernel.detach()
    run_dir = Path(record(kernel).run_dir)
    remove(run_dir)
    run_dir.symlink_to("/")
    wait_until(lambda: not kernel.processes(), 20)
    assert "cannot be made again" in kernel.log("supervisor")
    assert os.readlink(run_dir) == "/"
    run_dir.unlink()
    run_dir.parent.rmdir()


def test_a_record_that_a_killed_kernel_has_left_leads_to_nobody(kernel: Sandbox) -> None:
    """Not even to another kernel that uses the same runtime directory now."""
    kernel.detach()
    left = record(kernel)
    os.kill(left.pid, signal.SIGKILL)
    kernel.wait_for_nothing()
    (kernel.home / "b2").mkdir()
    (kernel.home / "b2/goondan.yaml").write_text(kernel.bundle.read_text())
    other = kernel.popen(
        "run", "--bundle", str(kernel.home / "b2"), stdin=-1
    )  # another kernel, of another bundle, whose socket is put where ours was
    wait_until(lambda: [row for row in kernel.ps() if row["status"] == "running" and row["role"] == "broker"])
    shutil.rmtree(left.run_dir)
    theirs = next(found for found in kernel.run_dirs if str(found) != left.run_dir)
    shutil.copytree(theirs, left.run_dir, copy_function=os.link, ignore=shutil.ignore_patterns("warm-up"))
    os.chmod(left.run_dir, 0o700)
    assert kernel.gdn("ps", "--json").json == []
    assert json.loads(kernel.gdn("stop", "--json").out) == {"stopped": False}
    assert not os.path.exists(left.run_dir)
    other.communicate(b"", timeout=30)
    assert other.returncode == 0
