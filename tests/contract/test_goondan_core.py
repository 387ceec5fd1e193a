"""The types of `@goondan/core`: the specification's modules and a tool that uses all of it compile, mistakes do not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from tests.javascript_runtimes import ROOT
from tests.node_fixture import node, node_client

CORE: Final = ROOT / "toolhost" / "inside" / "javascript" / "core"
TOOLS: Final = (
    ROOT / "tests" / "contract" / "spec_tools" / "bash.ts",
    ROOT / "tests" / "contract" / "spec_tools" / "file-system.ts",
    ROOT / "tests" / "process" / "javascript_tool.ts",
)
#: Each line is a mistake that the types have to see.
MISTAKES: Final = """\
import { AgentError, Pending, ToolError, type ToolContext, type ToolHandler } from "@goondan/core";
export const a: ToolHandler = (ctx) => { ctx.workdir = "/"; };
export const b: ToolHandler = (ctx) => ctx.runtime.list();
export const c: ToolHandler = () => new Map();
export const d: ToolHandler = () => Buffer.from("a");
export const e: ToolHandler = () => { throw new ToolError("m", { code: 5 }); };
export const f: ToolHandler = () => new Pending(5);
export const g = async (ctx: ToolContext) => (await ctx.runtime!.request("a", new Date())).response;
export const h: ToolHandler = (ctx) => ctx.message.id;
export const i: string = new AgentError("m").code;
"""


def test_tools_compile_and_mistakes_do_not(tmp_path: Path) -> None:
    """The compiler takes seconds to start, so it is given all of them at once."""
    client = node_client()
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "mistakes.ts").write_text(MISTAKES)
    for tool in TOOLS:
        (tmp_path / tool.name).write_bytes(tool.read_bytes().replace(b"declare const Bun: any;\n", b""))
    (tmp_path / "bun.d.ts").write_text("declare const Bun: any;\n")
    options = {
        "strict": True, "noEmit": True, "target": "es2024", "module": "nodenext", "types": ["node"],
        "typeRoots": [str(client / "node_modules" / "@types")], "paths": {"@goondan/core": [str(CORE / "index.d.ts")]},
        "erasableSyntaxOnly": True, "skipLibCheck": True,
    }  # fmt: skip
    files = ["bun.d.ts", "mistakes.ts", *(tool.name for tool in TOOLS)]
    (tmp_path / "tsconfig.json").write_text(json.dumps({"compilerOptions": options, "files": files}))
    compiler = client / "node_modules" / "typescript" / "bin" / "tsc"
    done = node(compiler, "--pretty", "false", "--project", tmp_path, cwd=tmp_path)
    errors = [line for line in done.stdout.splitlines() if ": error " in line]
    assert [line for line in errors if not line.startswith("mistakes.ts")] == []
    lines = {int(found[1]) for line in errors if (found := re.match(r"mistakes.ts\((\d+),", line))}
    assert sorted(lines) == list(range(2, MISTAKES.count("\n") + 1))


def test_what_is_declared_is_there() -> None:
    """Classes, and under the names of the types nothing: without `type` in an import Node looks for those as well."""
    declared = (CORE / "index.d.ts").read_text(encoding="utf-8")
    exported = (CORE / "index.mjs").read_text(encoding="utf-8")
    classes, made = (re.findall(r"^export class (\w+)", text, re.MULTILINE) for text in (declared, exported))
    assert classes == made == ["ToolError", "AgentError", "Pending"]
    types = re.findall(r"^export (?:type|interface) (\w+)", declared, re.MULTILINE)
    found = re.search(r"^export let\s+([\w\s,]+);", exported, re.MULTILINE)
    assert found is not None
    assert sorted(re.findall(r"\w+", found[1])) == sorted(types)
