"""Which JavaScript runtimes are found on a machine, what a plan says of them, and who may not change them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from goondan.kernel.bundle.javascript import Found, look
from goondan.kernel.bundle.loader import open_bundle
from goondan.kernel.trust.private_copy import with_private_copy
from goondan.schemas.bundle.launch import JavaScriptRuntime, KernelPlan
from tests.bundles import documents
from tests.javascript_runtimes import BUN_VERSION, runtime
from tests.javascript_tools import javascript_tool
from tests.toolhost_fixture import bench

BUNDLE = documents(
    "Tool one {entry: one/tool.ts, sandbox: {javascript: bun}, exports: [{name: run}]}",
    "Tool two {entry: two/tool.mjs, exports: [{name: run}]}",
)


def says(path: Path, version: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ -n "$LD_TRACE_LOADED_OBJECTS" ] || echo {version}\n')
    path.chmod(0o755)
    return str(path)


def test_a_variable_excludes_what_is_on_the_path(tmp_path: Path) -> None:
    named = says(tmp_path / "named" / "node", "v20.0.0")
    says(tmp_path / "bin" / "node", "v22.19.0")
    bun = says(tmp_path / "bin" / "bun", "1.4.5")
    path = str(tmp_path / "bin")
    root = str(tmp_path / "bundle")
    found = look(root, {"GOONDAN_NODE": named, "PATH": path})
    assert [(one.program, one.place) for one in found] == [(named, "GOONDAN_NODE"), (bun, "PATH")]
    assert found[0].problem == "version 20.0.0, needed 22.18"
    assert look(root, {"PATH": path})[0].version == "22.19.0"
    missing = look(root, {"GOONDAN_BUN": "/nonexistent/bun", "PATH": ""})
    assert "cannot be run" in missing[-1].problem
    assert "no absolute path" in look("/", {"GOONDAN_NODE": "node", "PATH": ""})[0].problem


def test_no_more_programs_are_run_than_are_needed(tmp_path: Path) -> None:
    def path(name: str, *versions: str) -> str:
        programs = [says(tmp_path / f"{name}{at}" / name, version) for at, version in enumerate(versions)]
        return ":".join(os.path.dirname(program) for program in programs)

    root, mixed = str(tmp_path / "bundle"), path("node", "v20.0.0", "v24.0.0", "v22.19.0", "v22.20.0")
    buns = path("bun", "1.4.5", "1.4.6")
    found = look(root, {"PATH": f"{mixed}:{buns}"}, every=False)
    assert [one.version for one in found] == ["20.0.0", "24.0.0", "22.19.0", "1.4.5"]
    found = [one for one in look(root, {"PATH": f"{mixed}:{buns}"}) if one.place == "PATH"]
    assert [one.version for one in found] == ["20.0.0", "24.0.0", "22.19.0", "22.20.0", "1.4.5", "1.4.6"]
    many = path("node", *["v20.0.0"] * 12)
    assert len([one for one in look(root, {"PATH": many}) if one.place == "PATH"]) == 8


def test_what_path_finds_in_the_bundle_is_not_started(tmp_path: Path) -> None:
    root, started = tmp_path / "bundle", tmp_path / "started"
    says(root / "bin" / "node", f"v22.19.0; touch {started}")
    outside = says(tmp_path / "outside" / "node", f"v22.19.0; touch {started}")
    (root / "links").mkdir()
    (root / "links" / "node").symlink_to(outside)
    (root / "folder").symlink_to(tmp_path / "outside")
    (tmp_path / "other").symlink_to(root)
    (tmp_path / "leads").symlink_to(root / "bin")
    for folder in ("bundle/bin", "bundle/links", "bundle/folder", "other/bin", "other/folder", "leads"):
        found = [one for one in look(str(tmp_path / "other"), {"PATH": str(tmp_path / folder)}) if one.place == "PATH"]
        assert [one.problem for one in found] == ["it lies in the bundle, and is not run outside of a jail"], folder
    assert not started.exists()
    path = f"{root / 'links'}:{tmp_path / 'outside'}"
    assert [one.problem for one in look(str(root), {"PATH": path}) if one.place == "PATH"][1:] == [""]
    assert look("/", {"PATH": str(root / "bin")})[0].problem == ""


def test_a_bun_of_the_bundle_is_never_started_here(tmp_path: Path) -> None:
    folder = tmp_path / "node_modules" / "@oven" / "bun-linux-x64"
    program = folder / "bin" / "bun"
    says(program, "9.9.9; touch " + str(tmp_path / "started"))
    (folder / "package.json").write_text('{"version": "1.4.5"}')
    found = [one for one in look(str(tmp_path), {"PATH": ""}) if one.name == "bun"]
    assert found == [Found("bun", os.path.realpath(program), "node_modules", "1.4.5", package=os.path.realpath(folder))]
    assert not (tmp_path / "started").exists()
    for wrong in (
        b"no JSON",
        b'{"version": "\xff"}',
        b'{"version": ' + b"[" * 60_000,
        b'{"version": "1.4.5\\u001b[2J"}',
        None,
    ):
        (folder / "package.json").unlink()
        if wrong is None:
            os.mkfifo(folder / "package.json")
        else:
            (folder / "package.json").write_bytes(wrong)
        buns = [one for one in look(str(tmp_path), {"PATH": ""}) if one.name == "bun"]
        assert [one.problem for one in buns] == ["it does not say its version"], wrong


@pytest.mark.parametrize("link", ["node_modules", "node_modules/@oven/bun-linux-x64"])
def test_a_bun_that_a_link_leads_to_is_no_bun_of_the_bundle(tmp_path: Path, link: str) -> None:
    """Who guards the bundle's folder does not guard what lies elsewhere."""
    root, elsewhere = tmp_path / "bundle", tmp_path / "elsewhere"
    folder = elsewhere / "node_modules" / "@oven" / "bun-linux-x64"
    says(folder / "bin" / "bun", "1.4.5")
    (folder / "package.json").write_text('{"version": "1.4.5"}')
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(elsewhere / link)
    (found,) = [one for one in look(str(root), {"PATH": ""}) if one.name == "bun"]
    assert found.problem == "a link leads out of the bundle"


def test_a_plan_says_what_runs_and_no_jail_may_write_it(tmp_path: Path) -> None:
    for entry in ("one/tool.ts", "two/tool.mjs"):
        (tmp_path / entry).parent.mkdir()
        (tmp_path / entry).write_text("")
    (tmp_path / "goondan.yaml").write_text(BUNDLE)
    node = says(tmp_path / "bin" / "node", "v22.19.0")
    package = tmp_path / "node_modules" / "@oven" / "bun-linux-x64"
    bun = os.path.realpath(says(package / "bin" / "bun", "1.4.5"))
    (package / "package.json").write_text('{"version": "1.4.5"}')

    def opened(**env: str) -> KernelPlan:
        return open_bundle(
            str(tmp_path / "goondan.yaml"), state_dir=str(tmp_path / "state"), env=env, handlers=False, runs=False
        ).plan

    plan = opened(GOONDAN_NODE=node, PATH="")
    tools = {tool.name: tool for tool in plan.toolhost.tools}
    folder = os.path.realpath(package)
    bun_found = JavaScriptRuntime(name="bun", program=bun, version="1.4.5", package=folder)
    node_found = JavaScriptRuntime(name="node", program=node, version="22.19.0")
    assert [tools[name].javascript for name in ("one", "two")] == [bun_found, node_found]
    assert {node, folder} <= set(plan.protected)
    assert {node, folder} <= set(plan.toolhost.protected)
    lacking = {tool.name: tool for tool in opened(GOONDAN_NODE="/nonexistent", PATH="").toolhost.tools}["two"]
    assert lacking.javascript == bun_found
    copied = {tool.name: tool for tool in with_private_copy(plan, str(tmp_path)).toolhost.tools}["one"]
    assert copied.javascript is None
    assert "others can write" in copied.lack


async def test_a_bun_in_the_workdir_runs_and_nothing_of_its_package_can_be_written(short_tmp: Path) -> None:
    workdir = short_tmp / "work"
    package = workdir / "node_modules" / "@oven" / "bun"
    shutil.copytree(Path(runtime("bun")).parent.parent, package)
    source = """import fs from 'node:fs'
    const tried = (change) => { try { change(); return 'done' } catch (error) { return error.code } }
    export const handlers = { echo: (ctx) => {
      fs.writeFileSync('written', '')
      const folder = `${ctx.workdir}/node_modules/@oven/bun`
      return ['package.json', 'bin/new'].map((name) => tried(() => fs.writeFileSync(`${folder}/${name}`, '')))
        .concat(tried(() => fs.renameSync(`${ctx.workdir}/node_modules`, `${ctx.workdir}/moved`)))
    } }"""
    tool = javascript_tool(short_tmp, "bun", source, "echo")
    own = JavaScriptRuntime(name="bun", program=str(package / "bin" / "bun"), version=BUN_VERSION, package=str(package))
    async with bench(replace(tool, javascript=own), protected=[str(package)]) as made:
        result = await made.call("t__echo", workdir=workdir)
    assert result.get("output") == ["EROFS", "EROFS", "EBUSY"], result
    assert (workdir / "written").exists()
