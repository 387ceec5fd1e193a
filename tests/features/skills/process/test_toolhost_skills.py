"""Commands in the directories of skills: the jail, the folder that a caller may name, and what a pin gives."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from goondan.kernel.bundle.documents import brought_tools
from goondan.kernel.bundle.rules.plan import tool_spec
from goondan.schemas.bundle.launch import Filesystem, FolderGrants, SandboxSpec, ToolSpec
from goondan.schemas.system.digests import MAX_PINNED_BYTES, MAX_PINNED_FILES, folder_digest
from goondan.toolhost.lookup.folders import FolderCopies, folder_of_call
from tests.toolhost_fixture import bench

BASH = """\
#!/bin/bash
echo "bash $1 in $PWD"
touch "$SKILL_DIR/left" 2>/dev/null && echo "wrote to the skill"
echo made > "$WORKDIR/by-bash"
"""
PYTHON = """\
#!/usr/bin/env python3
import os, sys
print("python", sys.argv[1:], open("data.txt").read().strip())
open(os.path.join(os.environ["WORKDIR"], "by-python"), "w").write("made")
"""
NODE = """\
#!/usr/bin/env node
const fs = require("fs");
console.log("node", process.argv.slice(2).join(","), fs.readFileSync("data.txt", "utf8").trim());
fs.writeFileSync(process.env.WORKDIR + "/by-node", "made");
"""


def make_skill(folder: Path) -> Path:
    """A skill in the public format, with scripts in three languages."""
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(f"---\nname: {folder.name}\ndescription: Runs.\n---\n# Run\n")
    (folder / "data.txt").write_text("known\n")
    (folder / "scripts").mkdir()
    for name, text in (("run.sh", BASH), ("run.py", PYTHON), ("run.mjs", "")):
        (folder / "scripts" / name).write_text(text)
    (folder / "scripts" / "run.js").write_text(NODE)
    for script in (folder / "scripts").iterdir():
        script.chmod(0o755)
    return folder


@pytest.fixture
def skill(workdir: Path) -> Path:
    return make_skill(workdir / ".claude/skills/deploy")


def skills_tool(*, granted: SandboxSpec | None = None, pinned: dict[str, SandboxSpec] | None = None) -> ToolSpec:
    """The bundled tool as the kernel hands it to the tool host, for the agent `coder`."""
    (tool,) = brought_tools(["skills"])
    grants = FolderGrants(workdir=SandboxSpec(), pinned=pinned or {})
    return replace(tool_spec(tool), sandbox=granted or SandboxSpec(), folders={"coder": grants})


def ok(result: dict[str, Any]) -> dict[str, Any]:
    assert result["status"] == "ok", result
    found: dict[str, Any] = result["output"]
    return found


def digest_of(folder: Path) -> str:
    return folder_digest(str(folder), max_files=MAX_PINNED_FILES, max_bytes=MAX_PINNED_BYTES)


@pytest.mark.requirement("SKILL-13", "SKILL-14")
async def test_scripts_in_three_languages_run_and_stay_in_their_jail(workdir: Path, skill: Path) -> None:
    secret = workdir.parent / "secret"
    secret.write_text("s")
    async with bench(skills_tool()) as made:

        async def run(command: str, *args: str, **more: Any) -> dict[str, Any]:
            given = {"name": "deploy", "command": command, **({"args": list(args)} if args else {}), **more}
            return ok(await made.call("skills__run", given, workdir=workdir, folder=skill))

        assert await run("./scripts/run.sh production; exit 3") == {
            "code": 3, "stdout": f"bash production in {skill}", "stderr": "", "skill": "deploy",
            "command": "./scripts/run.sh production; exit 3", "args": [],
        }  # fmt: skip
        found = await run("./scripts/run.py", "it's", "$HOME", "a b")
        assert found["stdout"] == """python ["it's", '$HOME', 'a b'] known"""
        assert found["args"] == ["it's", "$HOME", "a b"]
        if shutil.which("node"):
            assert (await run("scripts/run.js x", "y"))["stdout"] == "node x,y known"
            assert (workdir / "by-node").exists()
        assert (workdir / "by-bash").exists()
        assert (workdir / "by-python").exists()
        assert not (skill / "left").exists()
        # Neither the folder nor one above it can be written to, moved away or exchanged.
        for command in (
            "echo x > new", "echo x >> SKILL.md", "rm -f data.txt && ls data.txt", "mkdir x",
            f"mv {workdir}/.claude {workdir}/gone", f"mv {workdir}/.claude/skills {workdir}/gone", f"rm -r {skill}",
            f"cat {secret}", "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 9), 1)'",
        ):  # fmt: skip
            found = await run(command)
            assert (command, found["code"] == 0) == (command, False), found
        assert sorted(path.name for path in skill.iterdir()) == ["SKILL.md", "data.txt", "scripts"]
        assert (await run("no-such-program"))["code"] == 127


@pytest.mark.requirement("SKILL-15")
async def test_a_command_that_takes_too_long_is_killed(workdir: Path, skill: Path) -> None:
    async with bench(skills_tool()) as made:
        given = {"name": "deploy", "command": "echo before; sleep 30", "timeout": 200}
        found = ok(await made.call("skills__run", given, workdir=workdir, folder=skill))
        assert (found["code"], found["stdout"], found["timedOut"]) == (None, "before", True)


async def test_a_folder_that_the_caller_may_not_name_is_refused(workdir: Path, skill: Path) -> None:
    outside = make_skill(workdir.parent / "outside")
    (workdir / "link").symlink_to(outside)
    (skill.parent / "linked").symlink_to(outside)
    (workdir / "above").symlink_to(workdir.parent)
    async with bench(skills_tool()) as made:

        async def refused(folder: Path | str | None, **more: Any) -> str:
            given = {"name": "deploy", "command": "cat SKILL.md"}
            result = await made.call("skills__run", given, **{"workdir": workdir, **more}, folder=folder)
            assert result["status"] == "error", result
            assert result["error"]["code"] in ("E_SANDBOX_DENIED", "E_FRAME_INVALID"), result
            message: str = result["error"]["message"]
            return message

        assert "neither in the workdir" in await refused(outside)
        assert "leads through a link" in await refused(workdir / "link")
        assert "leads through a link" in await refused(skill.parent / "linked")
        assert "leads through a link" in await refused(workdir / "above/outside")
        assert "without `.` and `..`" in await refused(f"{workdir}/../outside")
        assert "without `.` and `..`" in await refused("outside")
        assert "there is no" in await refused(workdir / "nothing")
        assert "neither in the workdir" in await refused(workdir)
        assert "neither in the workdir" in await refused("/etc")
        assert "Not a directory" in await refused(skill / "SKILL.md")
        assert "names no folder" in await refused(None)
        assert "name no folder" in await refused(skill, agent="another")


async def test_a_granted_place_holds_skills_too_and_gets_what_was_granted(workdir: Path) -> None:
    skill = make_skill(workdir.parent / "elsewhere/deploy")
    granted = SandboxSpec(filesystem=Filesystem(read=[str(skill.parent)]), env=["TOKEN"])
    async with bench(skills_tool(granted=granted), environment={"TOKEN": "t"}) as made:
        given = {"name": "deploy", "command": "./scripts/run.sh x; echo token $TOKEN"}
        found = ok(await made.call("skills__run", given, workdir=workdir, folder=skill))
        assert found["stdout"] == f"bash x in {skill}\ntoken t"
        # Beneath the workdir there are the defaults, whatever the tool was granted.
        mine = make_skill(workdir / "skills/deploy")
        found = ok(await made.call("skills__run", given, workdir=workdir, folder=mine))
        assert found["stdout"] == f"bash x in {mine}\ntoken"


async def test_a_place_that_a_tool_may_write_to_gives_the_defaults(workdir: Path) -> None:
    skill = make_skill(workdir.parent / "shared/deploy")
    granted = SandboxSpec(filesystem=Filesystem(read=[str(skill.parent)]), env=["TOKEN"])
    writer = replace(
        skills_tool(granted=SandboxSpec(filesystem=Filesystem(write=[str(skill.parent)]))), name="writer", folders={}
    )
    async with bench(skills_tool(granted=granted), writer, environment={"TOKEN": "t"}) as made:
        given = {"name": "deploy", "command": "echo token $TOKEN"}
        assert ok(await made.call("skills__run", given, workdir=workdir, folder=skill))["stdout"] == "token"


async def test_a_pinned_skill_runs_with_its_grant_and_with_just_the_pinned_bytes(workdir: Path, skill: Path) -> None:
    pinned = {digest_of(skill): SandboxSpec(env=["TOKEN"])}
    async with bench(skills_tool(pinned=pinned), environment={"TOKEN": "t"}) as made:

        async def run(command: str) -> str:
            given = {"name": "deploy", "command": command}
            found: str = ok(await made.call("skills__run", given, workdir=workdir, folder=skill))["stdout"]
            return found

        assert await run("./scripts/run.sh x; echo token $TOKEN") == f"bash x in {skill}\ntoken t"
        assert "wrote" not in await run("./scripts/run.sh x")
        # While it runs, another tool changes the skill: the jail keeps what was pinned.
        waiting = 'touch "$WORKDIR/began"; until [ -e "$WORKDIR/go" ]; do sleep 0.02; done; cat data.txt; echo $TOKEN'
        given = {"name": "deploy", "command": waiting}
        _, running = made.start("skills__run", given, workdir=workdir, folder=skill)
        async with asyncio.timeout(20):
            while not (workdir / "began").exists():
                await asyncio.sleep(0.02)
        (skill / "data.txt").write_text("stolen\n")
        (workdir / "go").touch()
        assert ok(await running)["stdout"] == "known\nt"
        # Another byte, and it has the defaults.
        assert await run("cat data.txt; echo token $TOKEN") == "stolen\ntoken"
        (skill / "data.txt").write_text("known\n")
        assert await run("cat data.txt; echo token $TOKEN") == "known\ntoken t"


def test_a_granted_place_in_the_workdir_is_written_to_by_tools_whatever_it_is_called(workdir: Path) -> None:
    place = workdir / "skills"
    skill = make_skill(place / "deploy")
    other = workdir.parent / "by-a-link"
    other.symlink_to(workdir)
    granted = SandboxSpec(filesystem=Filesystem(read=[str(place)]), env=["TOKEN"])
    tool = skills_tool(granted=granted)

    def env_of(named: Path) -> list[str]:
        with closing(FolderCopies()) as copies:
            return folder_of_call(str(skill), tool, "coder", str(named), None, [], copies).sandbox.env

    assert env_of(workdir.parent / "elsewhere") == ["TOKEN"]
    assert env_of(workdir) == []
    assert env_of(other) == []
