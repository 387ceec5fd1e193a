"""Workdirs with file systems of their own: what is taken, what is kept, and what happens when anything goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.launch import Limits, SandboxSpec, ToolSpec
from goondan.toolhost.jails.sized_workdirs import SizedWorkdirs
from goondan.toolhost.launcher import sized
from goondan.toolhost.launcher.sizes import GIB, IMAGE, MIB
from tests.containment.ordinary_user import run_as_user
from tests.containment.test_totals import LIMITS, bombs, taken
from tests.sized_fixture import folder_of, instance, is_released, loops, mounts, sized_host, small_disk, state
from tests.toolhost_fixture import POWERS, Bench, bench, make_tool

__all__ = ["sized_host", "small_disk", "state"]

#: What a file system takes beside what is in files: folders, extents, bitmaps (MiB).
METADATA = 2
SOURCE = """
import os, shutil
def run(ctx, input):
    return {name: actions[name](*arguments) for name, arguments in input.items()}
def files(count):
    for number in range(count):
        if number % 500 == 0: os.mkdir(f"{number}")
        os.close(os.open(f"{number // 500 * 500}/{number}", os.O_CREAT | os.O_WRONLY))
    return sum(len(names) for _, _, names in os.walk("."))
def write(name, size):
    with open(name, "wb", buffering=0) as out:
        while out.tell() < size: out.write(b"x" * (1 << 20))
def above():
    found = {}
    for name in ("..", "../workspace.ext4", "../../../..", "/dev/loop0", "/dev/loop-control", "/sys/fs/ext4"):
        try: found[name] = sorted(os.listdir(name)) if os.path.isdir(name) else open(name, "rb").read(10)
        except OSError as error: found[name] = type(error).__name__
    return found
actions = {"files": files, "write": write, "above": above, "list": lambda: sorted(os.listdir(".")),
           "remove": os.unlink, "free": lambda: os.statvfs(".").f_bavail * os.statvfs(".").f_frsize,
           "owner": lambda: [os.stat(".").st_uid, os.getuid()]}
handlers = {"run": run}
"""


def tool(place: Path, name: str = "t", **limits: int) -> ToolSpec:
    return make_tool(place, SOURCE, "run", name=name, sandbox=SandboxSpec(limits=Limits(**limits)))


def host(state: Path, *tools: ToolSpec) -> AbstractAsyncContextManager[Bench]:
    return bench(*tools, state_dir=state, hidden=[str(state)], sized=SizedWorkdirs(POWERS, str(state / "check")))


async def run(made: Bench, workdir: Path, name: str = "t", **actions: Any) -> Any:
    result = await made.call(f"{name}__run", actions, workdir=workdir)
    return result["output"] if result["status"] == "ok" else result["error"]


def space(workdir: Path) -> int:
    at = os.statvfs(workdir)
    return at.f_bavail * at.f_frsize


async def test_a_disk_bomb_is_kept_to_its_limit_and_the_next_jail_has_its_own(state: Path, tmp_path: Path) -> None:
    workdir = instance(state) / "workspace"
    async with host(state, bombs(tmp_path), tool(tmp_path / "other", disk_mb=50)) as made:
        for count, name in enumerate(("many_files", "allocated", "many_files"), 1):
            made.receipts.clear()
            result = await made.call(f"bomb__{name}", {"writers": 8}, workdir=workdir)
            assert result["error"]["code"] == "E_TOOL_LIMIT"
            assert re.search("the limit diskMb was reached: (90 of )?100 MiB", result["error"]["message"])
            (receipt,) = made.receipts.values()
            assert receipt["jail"]["limits"]["diskMb"] == "sized"
            assert 30 * count < taken(workdir) <= count * (LIMITS.disk_mb + METADATA)
            assert (await made.call("bomb__quiet", workdir=workdir))["output"] == "here"
        # What is removed is not for the next jail to take besides: it has what is its own.
        for path in workdir.iterdir():
            path.unlink()
        assert (await run(made, workdir, free=[]))["free"] >= 50 * MIB
        await made.call("bomb__many_files", {"writers": 8}, workdir=workdir)
        assert taken(workdir) <= LIMITS.disk_mb + METADATA, "two jails live there, and share the larger limit"
    assert mounts(state) == [str(workdir)]
    assert loops(state) == [str(instance(state) / IMAGE)]


async def test_a_tool_that_asks_what_is_left_is_told(state: Path, tmp_path: Path) -> None:
    """Who meets the end of the file system by itself, and says so, is told which limit it was; operators have more."""
    workdir = instance(state) / "workspace"
    async with host(state, tool(tmp_path, disk_mb=40, file_mb=256)) as made:
        first = await run(made, workdir, free=[], owner=[], list=[])
        assert first["list"] == []
        assert 39 * MIB < first["free"] <= 40 * MIB
        assert first["owner"][0] == first["owner"][1] != 0
        error = await run(made, workdir, write=["big", 64 * MIB])
        assert error["code"] == "E_TOOL_LIMIT"
        assert re.search("the limit diskMb was reached: (36 of )?40 MiB", error["message"])
        assert os.stat(workdir / "big").st_uid == os.geteuid()
        (workdir / "note").write_bytes(b"x" * 20 * MIB)  # beyond what jails can take
        assert space(workdir) == 0
        again = await run(made, workdir, free=[], list=[])
        assert again["list"] == ["big", "note"]
        assert again["free"] > 39 * MIB


async def test_twenty_thousand_files_and_nothing_of_the_image(state: Path, tmp_path: Path) -> None:
    workdir = instance(state) / "workspace"
    async with host(state, tool(tmp_path, files=25_000, disk_mb=64)) as made:
        found = await run(made, workdir, above=[])
        files = await run(made, workdir, files=[20_000])
    assert files == {"files": 20_000}
    assert found["above"][".."] == ["workspace"]
    assert found["above"]["../../../.."] == ["instances"]
    for name in ("../workspace.ext4", "/dev/loop0", "/dev/loop-control", "/sys/fs/ext4"):
        assert found["above"][name] == "FileNotFoundError"
    image = os.stat(instance(state) / IMAGE)
    assert image.st_mode & 0o777 == 0o600
    assert image.st_size >= 64 * GIB > image.st_blocks * 512


async def test_after_a_restart_the_same_files_are_there(state: Path, tmp_path: Path) -> None:
    workdir, other = instance(state) / "workspace", instance(state, "k2") / "workspace"
    async with host(state, tool(tmp_path)) as made:
        await run(made, workdir, write=["kept", MIB])
        assert await run(made, other, list=[]) == {"list": []}
    assert (workdir / "kept").exists(), "it stays mounted for whoever looks"
    for key in ("k1", "k2"):
        fd = folder_of(instance(state, key))
        sized.unmount(fd)
        os.close(fd)
    assert mounts(state) == []
    assert is_released(state)
    (note,) = workdir.iterdir()
    (command,) = [line for line in note.read_text().splitlines() if line.startswith("    mount ")]
    subprocess.run(["sh", "-c", command], check=True)  # by hand, as it says there
    async with bench(tool(tmp_path), state_dir=state) as made:  # the operator does not want it any more
        assert await run(made, workdir, list=[]) == {"list": ["kept"]}
        assert await run(made, other, list=[]) == {"list": []}
        receipts = [receipt["jail"]["limits"]["diskMb"] for receipt in made.receipts.values()]
    assert receipts == ["sized", "sized"]
    assert sorted(mounts(state)) == sorted(map(str, (workdir, other)))
    assert len(loops(state)) == 2


async def test_nothing_that_is_there_is_covered(state: Path, tmp_path: Path) -> None:
    """A workdir of before stays as it is; an image is not mounted over files, nor passed over."""
    before, after = instance(state) / "workspace", instance(state, "k2") / "workspace"
    before.mkdir(parents=True)
    (before / "old").write_text("work")
    async with host(state, tool(tmp_path)) as made:
        assert await run(made, before, list=[]) == {"list": ["old"]}
        (receipt,) = made.receipts.values()
        assert receipt["jail"]["limits"]["diskMb"] == "watched"
        assert await run(made, after, list=[]) == {"list": []}
    fd = folder_of(after.parent)
    sized.unmount(fd)
    os.close(fd)
    (after / "new").write_text("somebody's")
    async with host(state, tool(tmp_path)) as made:
        error = await run(made, after, list=[])
        assert error["code"] == "E_SANDBOX_UNAVAILABLE"
        assert "files lie in its place: NOT-MOUNTED.txt, new" in error["message"]
        (after / "new").unlink()
        assert await run(made, after, list=[]) == {"list": []}


async def test_two_first_calls_share_one_file_system(state: Path, tmp_path: Path) -> None:
    workdir = instance(state) / "workspace"
    tools = [tool(tmp_path / name, name, disk_mb=40) for name in ("one", "two")]
    async with host(state, *tools) as made:
        await asyncio.gather(run(made, workdir, "one", write=["a", MIB]), run(made, workdir, "two", write=["b", MIB]))
        assert sorted(os.listdir(workdir)) == ["a", "b"]
        assert 35 * MIB < space(workdir) <= 40 * MIB, "together they can take 40"
    assert mounts(state) == [str(workdir)]


def test_programs_that_mount_at_the_same_time_mount_once(state: Path) -> None:
    """As several tool hosts would, each with its launcher."""
    folder = instance(state)
    (folder / "workspace").mkdir(parents=True)
    racing = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            fd = folder_of(folder)
            os._exit(0 if sized.mount(fd, 10 * MIB, make=True)["state"] == "sized" else 1)
        racing.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in racing] == [0] * 4
    assert mounts(state) == [str(folder / "workspace")]
    assert loops(state) == [str(folder / IMAGE)]


def test_an_image_that_is_still_in_use_somewhere_gets_no_second_device(state: Path) -> None:
    """Another mount namespace keeps what was unmounted here."""
    folder = instance(state)
    (folder / "workspace").mkdir(parents=True)
    fd = folder_of(folder)
    sized.mount(fd, 10 * MIB, make=True)
    elsewhere = subprocess.Popen(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", "echo; read end"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with elsewhere:
        assert elsewhere.stdout is not None
        elsewhere.stdout.readline()
        sized.unmount(fd)
        assert (len(mounts(state)), len(loops(state))) == (0, 1)
        assert sized.mount(fd, 10 * MIB, make=True)["state"] == "sized"
        assert (len(mounts(state)), len(loops(state))) == (1, 1)
        elsewhere.communicate(b"\n", timeout=10)
    os.close(fd)


async def test_a_launcher_that_is_lost_while_it_mounts_costs_no_call(state: Path, tmp_path: Path) -> None:
    """It may have mounted or not: the next one finds out."""
    async with host(state, tool(tmp_path)) as made:
        await run(made, instance(state) / "workspace", list=[])
        for number in range(3):
            workdir = instance(state, f"lost-{number}") / "workspace"
            _, call = made.start("t__run", {"list": []}, workdir=workdir)
            await asyncio.sleep(0.004 * number)
            os.kill(POWERS.launcher.pid, signal.SIGKILL)
            assert (await call)["output"] == {"list": []}
            assert str(workdir) in mounts(state)
    assert len(mounts(state)) == 4


def test_an_ordinary_user_is_told_that_root_mounts(short_tmp: Path) -> None:
    program = "import json, sys; from goondan.toolhost.disk import check; print(json.dumps(check(sys.argv[1])))"
    done = run_as_user(program, short_tmp)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"state": "unable", "allowed": 0, "why": "only root can mount one"}
    assert list(short_tmp.iterdir()) == []


@pytest.mark.parametrize("lack", ["no program", "a program that fails"])
def test_a_host_that_cannot_says_why_and_nothing_is_left(
    lack: str, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    if lack == "a program that fails":
        (programs / "mkfs.ext4").write_text("#!/bin/sh\necho it cannot >&2; exit 1\n")
        (programs / "mkfs.ext4").chmod(0o755)
    monkeypatch.setattr(sized, "PROGRAMS", (str(programs),))
    fd = folder_of(state)
    held = sized.check(fd)
    os.close(fd)
    assert held["state"] == "unable"
    assert held["why"] == ("there is no program mkfs.ext4" if lack == "no program" else "mkfs.ext4: it cannot")
    assert os.listdir(state) == []


async def test_a_host_that_cannot_watches_and_warns_once(tmp_path: Path) -> None:
    said: list[str] = []
    state = tmp_path / "state"
    async with bench(
        tool(tmp_path), state_dir=state, sized=SizedWorkdirs(POWERS, "/proc/nowhere", said.append)
    ) as made:
        for key in ("k1", "k2"):
            assert await run(made, instance(state, key) / "workspace", list=[]) == {"list": []}
        limits = {receipt["jail"]["limits"]["diskMb"] for receipt in made.receipts.values()}
    assert limits == {"watched"}
    assert len(said) == 1
    assert "what is written is watched instead" in said[0]


async def test_a_damaged_image_is_refused_with_the_reason(state: Path, tmp_path: Path) -> None:
    workdir = instance(state) / "workspace"
    workdir.mkdir(parents=True)
    (workdir.parent / IMAGE).write_bytes(b"no file system" * 1000)
    (workdir.parent / IMAGE).chmod(0o600)
    async with host(state, tool(tmp_path)) as made:
        error = await run(made, workdir, list=[])
    assert error["code"] == "E_SANDBOX_UNAVAILABLE"
    assert "it holds no ext4 file system" in error["message"]
    assert list(workdir.iterdir()) == []


async def test_a_disk_that_is_nearly_full_ends_before_the_image_breaks(small_disk: Path, tmp_path: Path) -> None:
    """Writes that the file system has promised must find room; so jails meet its end first, and it lives on."""
    workdir = instance(small_disk) / "workspace"
    async with host(small_disk, tool(tmp_path, disk_mb=1024)) as made:
        assert (await run(made, workdir, free=[]))["free"] <= 64 * MIB
        error = await run(made, workdir, write=["big", 128 * MIB])
        assert error["code"] == "ENOSPC", "not a limit of its own"
        assert await run(made, workdir, remove=["big"], write=["small", MIB]) == {"remove": None, "write": None}
    subprocess.run(["sync", "-f", str(workdir)], check=True)
    assert not os.statvfs(workdir).f_flag & os.ST_RDONLY


async def test_who_comes_after_the_last_jail_has_all_the_room(state: Path, tmp_path: Path) -> None:
    """The bound is for jails; a person who puts files there when none lives has what the disk has."""
    workdir = instance(state) / "workspace"
    async with host(state, tool(tmp_path, disk_mb=40)) as made:
        assert (await run(made, workdir, free=[]))["free"] <= 40 * MIB
    assert space(workdir) > 100 * MIB
    async with host(state, tool(tmp_path, disk_mb=40)) as made:
        assert (await run(made, workdir, free=[]))["free"] <= 40 * MIB
        fd = folder_of(workdir.parent)
        sized.unmount(fd)
        os.close(fd)
    assert mounts(state) == [], "whoever unmounts has it unmounted"


BUNDLE = """\
apiVersion: goondan.ai/v1
kind: Agent
metadata: {name: main}
spec: {modelConfig: {modelRef: Model/console}, tools: [Tool/bash]}
---
apiVersion: goondan.ai/v1
kind: Model
metadata: {name: console}
spec: {provider: embedded}
---
apiVersion: goondan.ai/v1
kind: Swarm
metadata: {name: swarm}
spec: {entryAgent: Agent/main, agents: [{ref: Agent/main}]}
"""


def test_the_operator_chooses_it_in_the_policy(state: Path, short_tmp: Path) -> None:
    (short_tmp / "goondan.yaml").write_text(BUNDLE)
    environment = {"PATH": os.environ["PATH"], "HOME": str(short_tmp), "GOONDAN_STATE_ROOT": str(state)}
    environment |= {"XDG_RUNTIME_DIR": str(short_tmp), "GOONDAN_TRUST": "1"}

    def gdn(*arguments: str) -> tuple[int, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "goondan.kernel.cli", *arguments, "--json"],
            cwd=short_tmp,
            env=environment | {"PYTHONPATH": os.getcwd()},
            capture_output=True,
            timeout=60,
        )
        return done.returncode, json.loads(done.stdout)

    policy = state / "policy.yaml"
    policy.write_text("disk: {sized: true}\n")
    policy.chmod(0o600)
    status, result = gdn("call", "bash__exec", json.dumps({"command": "echo kept > file"}))
    assert status == 0, result
    assert result["receipt"]["jail"]["limits"]["diskMb"] == "sized"
    status, (row,) = gdn("disk", "list")
    assert (status, row["mounted"], row["problem"]) == (0, True, "")
    assert mounts(state) == [row["workdir"]], "it stays mounted"
    assert (Path(row["workdir"]) / "file").read_text() == "kept\n"
    _, found = gdn("doctor")
    (finding,) = [finding for finding in found["findings"] if finding["check"] == "disk"]
    assert finding["level"] == "ok"
    with (Path(row["workdir"]) / "file").open():
        status, (busy,) = gdn("disk", "unmount")
    assert (status, busy["mounted"]) == (1, True)
    assert "busy" in busy["problem"]
    assert [gdn("disk", action)[1][0]["mounted"] for action in ("unmount", "mount", "unmount")] == [False, True, False]
    assert mounts(state) == []
