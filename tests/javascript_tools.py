"""Tools in JavaScript for tests of the tool host: the runtime that a test is for, and a tool of a source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from goondan.kernel.bundle.javascript import choose, look
from goondan.schemas.bundle.launch import ExportSpec, JavaScriptRuntime, SandboxSpec, ToolSpec
from tests.javascript_runtimes import runtime
from tests.toolhost_fixture import make_tool


def found(name: str) -> JavaScriptRuntime:
    """The runtime as the kernel finds it by its variable. Skips the test where it cannot be had."""
    chosen = choose(
        "bun" if name == "bun" else "node", look("/", {f"GOONDAN_{name.upper()}": runtime(name), "PATH": ""})
    )
    assert isinstance(chosen, JavaScriptRuntime), chosen
    return chosen


def javascript_tool(
    folder: Path,
    name: str,
    source: str,
    *exports: str | ExportSpec,
    tool: str = "t",
    suffix: str = "mjs",
    sandbox: SandboxSpec | None = None,
    files: Mapping[str, str] | None = None,
) -> ToolSpec:
    """A tool with that source for the runtime `name`; `files` lie beside it."""
    made = make_tool(folder, "", *exports, name=tool, sandbox=sandbox)
    for path, text in {f"handler.{suffix}": source, **(files or {})}.items():
        (Path(made.root) / path).parent.mkdir(parents=True, exist_ok=True)
        (Path(made.root) / path).write_text(text, encoding="utf-8")
    Path(made.entry).unlink()
    return replace(made, entry=f"{made.root}/handler.{suffix}", javascript=found(name))
