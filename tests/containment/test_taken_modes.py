"""A tool that takes the mode of its workdir away: the next jail there is made, or the error says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.containment.ordinary_user import told_as_user
from tests.toolhost_fixture import bench, make_tool

SOURCE = """
import os

def close(ctx, input):
    os.chmod(ctx.workdir, input["mode"])
    return {}

def write(ctx, input):
    with open(f"{ctx.workdir}/{input['name']}", "w") as file:
        file.write("x")
    return sorted(os.listdir(ctx.workdir))

handlers = {"close": close, "write": write}
"""
#: All rights gone, only those to enter, all but that.
MODES = (0, 0o100, 0o600)


async def ours(folder: Path) -> list[Any]:
    """What calls in an instance's own workspace say, each in a jail of its own, of two tools, after each mode."""
    tools = [make_tool(folder, SOURCE, "close", "write", name=name) for name in "ab"]
    workdir = folder / "state" / "instances" / "coder" / "k1" / "workspace"
    found: list[Any] = []
    for mode in MODES:
        async with bench(*tools, state_dir=folder / "state") as made:  # another tool host each time
            found.append(await made.call("a__close", {"mode": mode}, workdir=workdir))
            for number, (tool, key) in enumerate((("a", "k2"), ("b", "k1"))):  # another instance that works there
                name = f"{mode:o}-{number}"
                found.append(await made.call(f"{tool}__write", {"name": name}, workdir=workdir, instance_key=key))
    return found


async def somebodys(folder: Path) -> list[Any]:
    """What calls in a folder that somebody named say, and after the command of the suggestion was run."""
    tool = make_tool(folder, SOURCE, "close", "write")
    workdir = folder / "named folder"
    workdir.mkdir()
    async with bench(tool) as made:
        await made.call("t__close", {"mode": 0}, workdir=workdir)
        refused = await made.call("t__write", {"name": "x"}, workdir=workdir, instance_key="k2")
        command = refused["error"]["suggestion"].split("`")[1]
        subprocess.run(command, shell=True, check=True)
        return [refused["error"], await made.call("t__write", {"name": "x"}, workdir=workdir, instance_key="k3")]


def judge(folder: Path, own: list[Any], named: list[Any]) -> None:
    assert [result["status"] for result in own] == ["ok"] * 9, own
    assert own[-1]["output"] == sorted(f"{mode:o}-{number}" for mode in MODES for number in (0, 1))
    error, after = named
    assert error["code"] == "E_SANDBOX_DENIED"
    assert error["message"] == f"the workdir {folder}/named folder cannot be entered: its mode is 0000"
    assert error["suggestion"] == f"You, its owner, can mend it: `chmod u+rwx '{folder}/named folder'`."
    assert after == {"status": "ok", "output": ["x"]}


async def test_as_whoever_runs_the_tests(short_tmp: Path) -> None:
    judge(short_tmp, await ours(short_tmp), await somebodys(short_tmp))


AS_USER = """
import asyncio, json, sys
from pathlib import Path
from tests.containment.test_taken_modes import both
print(json.dumps(asyncio.run(both(Path(sys.argv[1])))))
"""


async def both(folder: Path) -> list[list[Any]]:
    return [await ours(folder), await somebodys(folder)]


@pytest.mark.skipif(os.geteuid() != 0, reason="as the one who runs the tests it was tried above")
def test_as_an_ordinary_user(short_tmp: Path) -> None:
    judge(short_tmp, *told_as_user(AS_USER, short_tmp))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_the_owner_of_a_folder_of_somebody_elses_is_named(short_tmp: Path) -> None:
    workdir = short_tmp / "theirs"
    workdir.mkdir(mode=0)
    os.chown(workdir, 65534, 65534)
    async with bench(make_tool(short_tmp, SOURCE, "write")) as made:
        error = (await made.call("t__write", {"name": "x"}, workdir=workdir))["error"]
    assert error["suggestion"] == f"Its owner, user 65534, can mend it: `chmod u+rwx {workdir}`."


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a helper that stays root")
def test_by_the_helper_of_a_tool_host_that_is_not_root_any_more(short_tmp: Path) -> None:
    """The real thing: a tool host that has dropped root asks its helper."""
    program = """
import os, sys
from goondan.toolhost.drop_privileges import drop_privileges
powers, _ = drop_privileges()
state, own = sys.argv[1:]
powers.claim_state(state, "toolhosts", "x")
powers.make_workdir(own, state)
"""
    own = short_tmp / "state" / "instances" / "a" / "k" / "workspace"
    own.mkdir(parents=True)
    own.chmod(0)
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", program, str(short_tmp / "state"), str(own)], check=True, cwd=root)
    assert own.stat().st_mode & 0o777 == 0o700
