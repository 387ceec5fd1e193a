"""Walks over trees that were written by a hostile hand, and control groups of version 2 as far as they are here."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from goondan.toolhost.launcher.operations import remove_groups
from goondan.toolhost.policy.limits import GroupPlan, Growth, InFlight
from goondan.toolhost.privileges.powers import beside, find_tree
from goondan.toolhost.watch import procfs
from goondan.toolhost.watch.keeper import Group
from goondan.toolhost.watch.procfs import View, unwritten
from goondan.toolhost.watch.watch import MAX_DEPTH, walk
from tests.toolhost_fixture import POWERS

ENOUGH = Growth(1 << 30, 1000)


def test_only_what_is_newer_counts(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"x" * 100_000)
    (tmp_path / "folder").mkdir()
    time.sleep(0.05)
    since = time.time() - 0.02
    assert walk(str(tmp_path), since, ENOUGH) == Growth(0, 0)
    (tmp_path / "new").write_bytes(b"x" * 8192)
    os.link(tmp_path / "new", tmp_path / "same")
    (tmp_path / "folder" / "inner").write_bytes(b"x" * 4096)
    (tmp_path / "link").symlink_to("/usr")
    found = walk(str(tmp_path), since, ENOUGH)
    assert found.entries == 4  # new (once), folder (it was changed), inner, link
    assert 12288 <= found.size <= 12288 + 2 * 4096
    assert walk(str(tmp_path / "new"), since, ENOUGH).entries == 1
    assert walk(str(tmp_path / "gone"), since, ENOUGH) == Growth(0, 0)
    os.utime(tmp_path / "new", (0, 0))  # what a program can set does not matter
    assert walk(str(tmp_path), since, ENOUGH) == found


def test_pages_that_wait_to_be_written_are_counted() -> None:
    """Of some file systems nothing else shows what was written to them."""

    def expected() -> int:
        said = Path("/proc/meminfo").read_text(encoding="ascii")
        return sum(int(kib) << 10 for kib in re.findall(r"^(?:Dirty|Writeback): *(\d+) kB$", said, re.MULTILINE))

    before = expected()
    while not before == (found := unwritten()) == expected():  # somebody writes
        before = expected()
    assert found == before


def test_descriptors_of_a_thread_that_has_its_own_are_seen(tmp_path: Path) -> None:
    """`clone` can make such a thread in a jail; here one leaves the table of its process."""
    view = View("/proc", members=lambda: [os.getpid()])
    done, ready, left = threading.Event(), threading.Event(), []

    def hold() -> None:
        left.append(ctypes.CDLL(None).unshare(0x400))  # CLONE_FILES
        fds = [os.open(tmp_path / "gone", os.O_CREAT | os.O_RDWR), os.memfd_create("held")]
        (tmp_path / "gone").unlink()
        for fd in fds:
            os.write(fd, b"x" * (1 << 20))
        pair = socket.socketpair()
        socket.send_fds(pair[0], [b"x"], fds)
        left.append(os.fstat(pair[1].fileno()).st_ino)
        ready.set()
        done.wait(30)
        for fd in (*fds, pair[0].detach(), pair[1].detach()):
            os.close(fd)

    before = procfs.memory(view, 1 << 50, procfs.processes(view), POWERS.held_by, every_thread=True).shared
    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert ready.wait(30)
        there = procfs.processes(view)
        assert left[0] == 0
        device = os.stat(tmp_path).st_dev
        assert any(file.device == device and file.size >= 1 << 20 for file in procfs.nameless(view))
        assert procfs.memory(view, 1 << 50, there, POWERS.held_by, every_thread=True).shared == before + (1 << 20)
        assert procfs.in_flight(view, there) == {left[1]}
    finally:
        done.set()
        thread.join()


def test_nothing_is_told_of_descriptors_in_flight_while_their_jail_is_not_let_run() -> None:
    """A program that passes descriptors on is not blamed for what others write because a busy machine holds it up."""
    pair = socket.socketpair()
    with open(os.devnull, "rb") as null:
        socket.send_fds(pair[0], [b"x"], [null.fileno()])
    lies_there = frozenset({os.fstat(pair[1].fileno()).st_ino})
    pid = os.fork()
    if pid == 0:
        while True:
            pass
    try:
        running, waiting = View("/proc", members=lambda: [pid]), View("/proc", members=lambda: [os.getpid()])
        times = iter(range(10))
        assert procfs.still_in_flight(running, lambda: 1.0) is None
        assert procfs.still_in_flight(running, lambda: next(times)) == InFlight(lies_there, lies_there), "it has run"
        assert procfs.still_in_flight(running, lambda: None) == InFlight(lies_there, lies_there), "nobody counts"
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # a signal that is sent has not arrived yet
        assert procfs.still_in_flight(running, lambda: 1.0) == InFlight(lies_there, lies_there), "it does not want to"
        pair[1].close()
        pair[0].close()
        assert procfs.still_in_flight(waiting, lambda: 1.0) == InFlight()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_tree_that_is_too_deep_is_enough(tmp_path: Path) -> None:
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(MAX_DEPTH + 5):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    before = len(os.listdir("/proc/self/fd"))
    assert walk(str(tmp_path), 0.0, ENOUGH) == ENOUGH
    assert walk(str(tmp_path), time.time() + 60, ENOUGH) == Growth(0, 0)  # an old one is nobody's
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_walk_ends_when_it_has_seen_enough(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "f").touch()
    assert 30 <= walk(str(tmp_path), 0.0, Growth(1 << 30, 31)).entries < 60


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mark a group as delegated here")
def test_groups_of_version_2(tmp_path: Path) -> None:
    """In a delegated group of its own: everything but the controllers of memory and pids, which this machine may have
    in version 1 only. Processor time needs none.
    """
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    mount = next((at for _, at, kind, *_ in mounts if kind == "cgroup2"), None)
    if mount is None:
        pytest.skip("no control groups of version 2 here")
    scope = f"{mount}/goondan-test-{os.getpid()}"
    try:
        os.mkdir(scope)
        os.setxattr(scope, "trusted.delegate", b"1")
    except OSError as error:
        pytest.skip(f"no group can be made: {error}")
    program = """
import os, sys, time
from pathlib import Path
scope = sys.argv[1]
Path(scope, "cgroup.procs").write_text("0")
own, starting = os.getpid(), []
for _ in range(4):
    pid = os.fork()
    if pid == 0:  # as a supervisor that starts one process after the other
        while os.getppid() == own:
            if os.fork() == 0: time.sleep(0.02); os._exit(0)
            time.sleep(0.001)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]: pass
            except ChildProcessError: pass
        os._exit(0)
    starting.append(pid)
time.sleep(0.02)
from goondan.toolhost.watch.keeper import Group
from goondan.toolhost.launcher.operations import remove_groups
from goondan.toolhost.privileges.powers import beside, find_tree
from goondan.toolhost.policy.limits import GroupPlan
from goondan.toolhost.privileges.powers import Ordinary
tree = find_tree(controllers=())
assert tree.version == 2 and tree.cpuacct == f"{scope}/goondan.{os.getpid()}", tree
assert Path("/proc/self/cgroup").read_text().splitlines()[-1].endswith("/goondan-host")
assert Path(scope, "cgroup.procs").read_text() == "", "with processes in it, it could hand no controller on"
for pid in starting: os.kill(pid, 9); os.waitpid(pid, 0)
while Path(scope, "goondan-host/cgroup.procs").read_text().split() != [str(own)]: time.sleep(0.001)
group = Group(GroupPlan(tree, []), Ordinary())
pid = os.fork()
if pid == 0:
    for path in group.joins: Path(path).write_text("0")
    x = 0
    while os.times().user < 0.2: x += 1
    os._exit(0)
os.waitpid(pid, 0)
assert 0.15 < group.cpu_s() < 2, group.cpu_s()
assert not group.refused() and not group.out_of_memory()
pid = os.fork()
if pid == 0:
    for path in group.joins: Path(path).write_text("0")
    while True: x += 1
while group.processes() != [pid]: pass
assert group.freeze()
while "frozen 1" not in Path(f"{tree.freezer}/1/cgroup.events").read_text(): pass
used = group.cpu_s()
os.kill(pid, 9)
os.waitpid(pid, 0)
assert group.cpu_s() - used < 0.02
group.thaw()
group.remove()
remove_groups(tree.folders, beside(tree))
assert not os.path.exists(tree.cpuacct)
"""
    root = str(Path(__file__).parents[2])
    try:
        done = subprocess.run([sys.executable, "-c", program, scope], cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    finally:
        for folder in [*Path(scope).glob("*/"), Path(scope)]:
            folder.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="groups of version 1 are root's")
def test_what_a_killed_tool_host_left_behind_is_removed() -> None:
    tree = find_tree()
    if tree is None or tree.version != 1 or tree.pids is None:
        pytest.skip("no control groups of version 1 here")
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = f"{os.path.dirname(tree.pids)}/goondan.{gone.pid}"
    os.makedirs(f"{left}/7")
    beside = f"{os.path.dirname(tree.pids)}/goondan-jail.{gone.pid}.8"  # as where processors are shared out
    os.makedirs(beside)
    again = find_tree()
    assert again == tree
    assert not os.path.exists(left)
    assert not os.path.exists(beside)


@pytest.mark.skipif(os.geteuid() != 0, reason="groups of version 1 are root's")
def test_a_frozen_group_runs_nothing_and_one_that_a_killed_tool_host_left_can_end() -> None:
    """What was killed while it was frozen runs nothing more of its own when it is let go."""
    tree = find_tree()
    if tree is None or tree.version != 1 or tree.freezer is None:
        pytest.skip("no freezer of version 1 here")
    group = Group(GroupPlan(tree, []), POWERS)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        for path in group.joins:
            Path(path).write_text(str(busy.pid), encoding="ascii")
        assert group.processes() == [busy.pid]
        assert group.freeze()
        state = Path(tree.freezer, group.name, "freezer.state")
        while state.read_text(encoding="ascii") != "FROZEN\n":
            time.sleep(0.001)
        used = group.cpu_s()
        time.sleep(0.05)
        assert group.cpu_s() == used
        group.thaw()
        while group.cpu_s() == used:
            time.sleep(0.001)
        gone = subprocess.Popen(["true"])
        gone.wait()
        left = f"{os.path.dirname(tree.freezer)}/goondan.{gone.pid}"
        os.makedirs(f"{left}/1")
        Path(left, "1", "tasks").write_text(str(busy.pid), encoding="ascii")
        state = Path(left, "1", "freezer.state")
        state.write_text("FROZEN", encoding="ascii")
        while state.read_text(encoding="ascii") != "FROZEN\n":
            time.sleep(0.001)
        os.kill(busy.pid, signal.SIGKILL)
        assert busy.poll() is None, "it ends when it is let go"
        find_tree()
        assert busy.wait(30) == -signal.SIGKILL
    find_tree()
    assert not os.path.exists(left)
    group.remove()


def test_a_group_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    tree = find_tree()
    if tree is None:
        pytest.skip("no control groups here")
    before = {folder: sorted(os.listdir(folder)) for folder in tree.folders}
    with pytest.raises(OSError):
        Group(GroupPlan(tree, [(tree.folders[0], "no.such.file", "1")]), POWERS)
    assert {folder: sorted(os.listdir(folder)) for folder in tree.folders} == before
    Group(GroupPlan(tree, [(tree.folders[0], "no.such.file", "1")], optional=("no.such.file",)), POWERS).remove()
    assert {folder: sorted(os.listdir(folder)) for folder in tree.folders} == before


def test_removing_a_tree_twice_is_no_error() -> None:
    tree = find_tree()
    if tree is None:
        pytest.skip("no control groups here")
    remove_groups(tree.folders, beside(tree))
    remove_groups(tree.folders, beside(tree))
    assert find_tree() == tree
