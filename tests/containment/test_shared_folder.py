"""Agents that work in one folder: jails of different users, whose files are each other's, and whose disk is one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.bundle.launch import Limits, SandboxSpec
from goondan.schemas.system.users import DEFAULT
from goondan.toolhost.privileges.powers import instance_uid
from goondan.toolhost.watch.procfs import process_status
from tests.containment.ordinary_user import told_as_user
from tests.toolhost_fixture import Bench, bench, make_tool

#: MiB.
DISK = 100
SOURCE = """
import os

def write(ctx, input):
    with open(input["name"], "ab", buffering=0) as out:
        for _ in range(input.get("mb", 0)):
            out.write(b"x" * (1 << 20))
        out.write(input.get("text", "").encode())
    os.chmod(input["name"], 0o600)
    return {"files": sorted(os.listdir(".")), "mine": os.stat(input["name"]).st_uid == os.getuid()}

def change(ctx, input):
    with open(input["name"]) as file:
        text = file.read()
    os.makedirs("done", exist_ok=True)
    with open("done/" + input["name"], "w") as out:
        out.write(text.upper())
    os.unlink(input["name"])
    return text

handlers = {"write": write, "change": change}
"""


def tool(folder: Path) -> Any:
    limits = Limits(disk_mb=DISK, file_mb=256)
    return make_tool(folder, SOURCE, "write", "change", sandbox=SandboxSpec(limits=limits))


def as_host(state: Path) -> Path:
    return state / "instances" / "planner" / "k" / "workspace"


async def said(made: Bench, agent: str, export: str, workdir: Path, **args: Any) -> Any:
    result = await made.call(f"t__{export}", args, workdir=workdir, agent=agent, instance_key="k")
    return result["output"] if result["status"] == "ok" else result["error"]


async def each_others(folder: Path, workdir: Path) -> list[Any]:
    """Three agents write, extend, change and remove each other's files; and which users their jails were."""
    async with bench(tool(folder), state_dir=folder / "state") as made:
        found = [
            await said(made, "planner", "write", workdir, name="plan", text="a"),
            await said(made, "coder", "write", workdir, name="plan", text="b"),
            await said(made, "reviewer", "change", workdir, name="plan"),
            await said(made, "planner", "write", workdir, name="done/plan", text="c"),
            (workdir / "done" / "plan").read_text(),
        ]
        jails = [made.live_of(session).jail for session in made.host.sessions.pool.sessions()]
        users = {process_status(pid)["Uid"].split()[0] for jail in jails for pid in jail.processes()}
        return [found, sorted(users), len(jails)]


EACH_OTHERS = [{"files": ["plan"], "mine": True}, {"files": ["plan"], "mine": True}, "ab",
               {"files": ["done"], "mine": True}, "ABc"]  # fmt: skip


@pytest.mark.parametrize("named", [False, True])
async def test_files_are_each_others_under_root_and_as_whoever_runs_the_tests(short_tmp: Path, named: bool) -> None:
    """In a workspace of the state, and in a folder that somebody named."""
    workdir = short_tmp / "named" if named else as_host(short_tmp / "state")
    workdir.mkdir(parents=True)
    found, users, jails = await each_others(short_tmp, workdir)
    assert (found, jails) == (EACH_OTHERS, 3)
    if os.geteuid() == 0:
        assert len(users) == 3 and "0" not in users
        assert {path.stat().st_uid for path in workdir.rglob("*")} == {0}


AS_USER = """
import asyncio, json, sys
from pathlib import Path
from tests.containment.test_shared_folder import as_host, each_others
folder = Path(sys.argv[1])
as_host(folder / "state").mkdir(parents=True)
print(json.dumps(asyncio.run(each_others(folder, as_host(folder / "state")))))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="as the one who runs the tests it was tried above")
def test_files_are_each_others_as_an_ordinary_user(short_tmp: Path) -> None:
    found, users, jails = told_as_user(AS_USER, short_tmp)
    assert (found, len(users), jails) == (EACH_OTHERS, 1, 3)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount, and has jails of other users")
async def test_files_are_each_others_without_idmapped_mounts(unmappable: Path) -> None:
    """The folder belongs to one user then, and the jails of all who share it are that one."""
    workdir = as_host(unmappable / "state")
    workdir.mkdir(parents=True)
    found, users, jails = await each_others(unmappable, workdir)
    assert (found, jails) == (EACH_OTHERS, 3)
    assert users == [str(instance_uid(str(workdir), DEFAULT))]
    named = unmappable / "named"
    named.mkdir()
    owner = instance_uid(str(named), DEFAULT)
    os.chown(named, owner, owner)  # as the message of a refusal says
    assert (await each_others(unmappable, named))[:2] == [EACH_OTHERS, [str(owner)]]


async def test_what_all_write_counts_once_and_ends_one_of_them(short_tmp: Path) -> None:
    workdir = as_host(short_tmp / "state")
    async with bench(tool(short_tmp), state_dir=short_tmp / "state") as made:
        for agent in ("planner", "coder", "reviewer"):  # their jails are there before anything is written
            assert "files" in await said(made, agent, "write", workdir, name=agent)
        assert "files" in await said(made, "coder", "write", workdir, name="first", mb=60)
        over = await said(made, "reviewer", "write", workdir, name="second", mb=60)
        assert "the limit diskMb was reached" in over["message"]
        assert sum(path.stat().st_size for path in workdir.iterdir()) < 2 * DISK << 20
        for agent in ("planner", "coder"):
            assert "files" in await said(made, agent, "write", workdir, name=agent, mb=20)
