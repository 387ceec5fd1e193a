"""Tools in JavaScript and TypeScript in real jails, under Node and Bun: whatever one does, its call has one result."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from goondan.schemas.bundle.launch import ExportSpec, Limits, SandboxSpec
from goondan.schemas.wire.errors import HELP_BASE
from tests.javascript_runtimes import RUNTIMES
from tests.javascript_tools import found, javascript_tool
from tests.toolhost_fixture import Bench, bench, make_tool, small_outputs

HANDLERS = r"""
import fs from 'node:fs'
import { spawn, spawnSync } from 'node:child_process'

const cyclic = { deep: [] }
cyclic.deep.push(cyclic)

export const handlers = {
  echo: (ctx, input) => input,
  place: (ctx) => [ctx.workdir, process.cwd(), import.meta.url, process.env.SECRET ?? null, process.env.HOME],
  async later(ctx, input) { await new Promise((go) => setTimeout(go, input.ms)); return 'later' },
  thrown: () => { throw new RangeError('no good') },
  text: () => { throw 'just a text' },
  nothing: () => { throw undefined },
  never: () => new Promise(() => {}),
  leaves: () => process.exit(0),
  really: () => process.reallyExit(3),
  dies: () => process.kill(process.pid, 'SIGKILL'),
  rejects: () => { setTimeout(() => Promise.reject(new Error('too late')), 20); return 'first' },
  cyclic: () => cyclic,
  undefined: () => undefined,
  bigint: () => 2n ** 80n,
  nan: () => ({ a: [NaN] }),
  buffer: () => Buffer.from('x'),
  large: () => 'x'.repeat(5 << 20),
  pollutes: () => {
    Object.prototype.polluted = 'yes'
    Object.prototype.then = undefined
    Array.prototype.push = () => { throw new Error('mine') }
    Map.prototype.get = () => 'mine'
    return {}
  },
  rubbish: (ctx, input) => { fs.writeSync(3, Buffer.from(input.hex, 'hex')); return new Promise(() => {}) },
  closes: () => { fs.closeSync(3); return 'closed' },
  spins: () => { for (;;); },
  started: () => {
    const left = spawn('/bin/sleep', ['60'], { stdio: 'ignore', detached: true })
    left.unref()
    return left.pid
  },
  async ends(ctx, input) {
    const ended = () => {
      try {
        return fs.readFileSync(`/proc/${input.pid}/stat`, 'latin1').includes(') Z ')
      } catch {
        return true
      }
    }
    while (!ended()) await new Promise((go) => setTimeout(go, 5))
    return true
  },
  program: () => spawnSync('/bin/echo', ['a program']).stdout.toString(),
  says: () => { console.log('one'); console.error('oops'); process.stdout.write('two\n'); return 1 },
}
"""
EXPORTS = (
    "echo", "place", "later", "thrown", "text", "nothing", "never", "leaves", "really", "dies", "rejects", "cyclic",
    "undefined", "bigint", "nan", "buffer", "large", "pollutes", "rubbish", "closes", "spins", "started", "ends",
    "program", "says",
)  # fmt: skip

pytestmark = pytest.mark.parametrize("name", RUNTIMES)


async def failed(made: Bench, export: str, args: Any = None, **options: Any) -> dict[str, Any]:
    """The error of a call, after which the next call works."""
    result = await made.call(f"t__{export}", args, **options)
    assert result["status"] == "error", (export, result)
    error = result["error"]
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert error["helpUrl"] == HELP_BASE + error["code"]
    assert await made.call("t__echo", {"a": [1]}, **options) == {"status": "ok", "output": {"a": [1]}}, export
    found: dict[str, Any] = error
    return found


async def test_whatever_a_handler_does_the_next_call_works(short_tmp: Path, name: str) -> None:
    tool = small_outputs(javascript_tool(short_tmp, name, HANDLERS, *EXPORTS))
    work = short_tmp / "work"
    work.mkdir()
    async with bench(tool, environment={"SECRET": "x"}) as made:
        place = (await made.call("t__place", workdir=work))["output"]
        assert place[:2] == [str(work), str(work)]
        assert place[2:] == ["file:///run/goondan/tool/handler.mjs", None, "/run/goondan/home"]
        assert (await made.call("t__program"))["output"] == "a program\n"
        for export, code, message in (
            ("thrown", "E_TOOL", "no good"),
            ("text", "E_TOOL", "just a text"),
            ("nothing", "E_TOOL", ""),
            ("leaves", "E_TOOL", "process.exit"),
            ("really", "E_TOOL_CRASHED", "status 3"),
            ("dies", "E_TOOL_CRASHED", "SIGKILL"),
            ("cyclic", "E_TOOL_BAD_OUTPUT", "output['deep'][0]"),
            ("nan", "E_TOOL_BAD_OUTPUT", "output['a'][0]"),
            ("large", "E_TOOL_LIMIT", "outputMb"),
            ("closes", "E_TOOL_CRASHED", ""),
        ):
            error = await failed(made, export)
            assert (error["code"], message in error["message"]) == (code, True), (export, error)
        for export in ("never", "spins"):
            assert (await failed(made, export, deadline_ms=1500))["code"] == "E_TOOL_TIMEOUT"
        for rubbish, code in (
            ("ffffffff00", "E_TOOL_LIMIT"),  # a length over the limit
            ("01000000c1", "E_TOOL_CRASHED"),
            ("0500000081a3666f6f", "E_TOOL_CRASHED"),
        ):
            assert (await failed(made, "rubbish", {"hex": rubbish}))["code"] == code, rubbish
        await made.call("t__says")
        assert {"one", "two", "oops"} <= {line.message for line in made.logs}
        assert (await made.call("t__rejects"))["output"] == "first"
        await made.call("t__later", {"ms": 60})  # whose error the stray one may be
        assert (await made.call("t__later", {"ms": 1}))["output"] == "later"
        for export in ("undefined", "bigint", "buffer"):
            assert (await made.call(f"t__{export}"))["status"] in ("ok", "error")
        assert (await made.call("t__pollutes"))["status"] == "ok"
        assert (await made.call("t__echo", {"b": {"c": [2]}}))["output"] == {"b": {"c": [2]}}


async def test_calls_run_beside_each_other_and_what_one_leaves_behind_ends(short_tmp: Path, name: str) -> None:
    tool = javascript_tool(short_tmp, name, HANDLERS, *EXPORTS)
    async with bench(tool) as made:
        assert (await made.call("t__echo", {}))["output"] == {}
        loop = asyncio.get_running_loop()
        begun = loop.time()
        results = await asyncio.gather(*(made.call("t__later", {"ms": 300}) for _ in range(8)))
        assert [result["output"] for result in results] == ["later"] * 8
        assert loop.time() - begun < 8 * 0.3
        left = (await made.call("t__started"))["output"]
        assert (await made.call("t__ends", {"pid": left}))["output"] is True
        assert made.host.sessions.jail_count == 1


@pytest.mark.parametrize(
    ("suffix", "source", "problem"),
    [
        ("mjs", "export const handlers = {", "xpected"),
        ("ts", "export const handlers: = {}", "handler.ts"),
        ("mjs", "export const other = 1", "handlers"),
        ("mjs", "export const handlers = 7", "handlers"),
        ("mjs", "export const handlers = { echo: 'text' }", "echo"),
        ("mjs", "import 'not-there'; export const handlers = {}", "not-there"),
        ("mjs", "throw new Error('at load'); export const handlers = {}", "at load"),
        ("mjs", "process.exit(4)", "4"),
    ],
)
async def test_a_module_that_cannot_be_loaded_is_one_error(
    short_tmp: Path, name: str, suffix: str, source: str, problem: str
) -> None:
    tool = javascript_tool(short_tmp, name, source, "echo", suffix=suffix)
    async with bench(tool) as made:
        first, second = [(await made.call("t__echo", {}))["error"] for _ in range(2)]
    assert first["code"] == second["code"] == "E_CONFIG_ENTRY"
    assert problem in first["message"]


TYPED = """
import { greet } from './lib/greet.ts'
import { shout } from 'loud'
import data from './data.json' with { type: 'json' }

interface Input { name: string }

export const handlers = {
  echo: async (ctx: unknown, input: Input): Promise<string> => shout(greet(input.name)) + data.end,
}
"""
PACKAGE = {
    "lib/greet.ts": "export const greet = (name: string): string => `hello ${name}`",
    "node_modules/loud/package.json": '{"name": "loud", "type": "module", "exports": "./index.js"}',
    "node_modules/loud/index.js": "export const shout = (text) => text.toUpperCase()",
    "data.json": '{"end": "!"}',
    "tsconfig.json": "{ this is no JSON",
    "package.json": '{"type": "module"}',
}


@pytest.mark.parametrize("suffix", ["ts", "mts"])
async def test_typescript_with_packages_beside_it(short_tmp: Path, name: str, suffix: str) -> None:
    files = {**PACKAGE, "tsconfig.json": '{"compilerOptions": {"target": "es5", "paths": {"loud": ["./nowhere"]}}}'}
    if name == "bun":
        del files["tsconfig.json"]  # Bun obeys one in the tool's own folder
    tool = javascript_tool(short_tmp, name, TYPED, "echo", suffix=suffix, files=files)
    async with bench(tool) as made:
        assert await made.call("t__echo", {"name": "you"}) == {"status": "ok", "output": "HELLO YOU!"}


async def test_nothing_in_a_workdir_is_loaded(short_tmp: Path, name: str) -> None:
    """The tool's folder lies in the workdir, where other tools write: packages, settings and variables."""
    work = short_tmp / "bundle"
    work.mkdir()
    source = """
    const tried = await import('planted').then(() => 'loaded', () => 'refused')
    export const handlers = { echo: () => [tried, process.env.PLANTED ?? null, globalThis.planted ?? null] }
    """
    tool = javascript_tool(work, name, source, "echo", suffix="js", files={"package.json": '{"type": "module"}'})
    for path, text in {
        "node_modules/planted/index.js": "globalThis.planted = true",
        "node_modules/planted/package.json": '{"name": "planted", "type": "module"}',
        "package.json": '{"type": "commonjs"}',
        "bunfig.toml": 'preload = ["./planted.js"]',
        "planted.js": "globalThis.planted = true",
        ".env": "PLANTED=1",
        "tsconfig.json": '{"compilerOptions": {"paths": {"planted": ["./planted.js"]}}}',
    }.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(text)
    async with bench(tool) as made:
        assert (await made.call("t__echo", {}, workdir=work))["output"] == ["refused", None, None]


async def test_hidden_files_of_the_tool_show_nowhere(short_tmp: Path, name: str) -> None:
    source = """
    import fs from 'node:fs'
    const look = (path) => { try { return fs.readFileSync(path, 'utf8') } catch (error) { return error.code } }
    export const handlers = { echo: (ctx, input) => input.paths.map(look) }
    """
    work = short_tmp / "bundle"
    work.mkdir()
    tool = javascript_tool(work, name, source, "echo", files={".env": "SECRET", ".keys/one": "SECRET", "shown": "yes"})
    paths = [f"{root}/{path}" for root in ("/run/goondan/tool", tool.root) for path in (".env", ".keys/one", "shown")]
    async with bench(tool) as made:
        seen = (await made.call("t__echo", {"paths": paths}, workdir=work))["output"]
    assert "SECRET" not in seen
    assert (seen[2], seen[5]) == ("yes", "yes")


async def test_a_call_of_its_own_is_a_cold_jail_each_time(short_tmp: Path, name: str) -> None:
    source = "let count = 0; export const handlers = { echo: () => ++count }"
    tool = javascript_tool(short_tmp, name, source, "echo", sandbox=SandboxSpec(isolation="call"))
    async with bench(tool) as made:
        assert [(await made.call("t__echo", {}))["output"] for _ in range(2)] == [1, 1]


async def test_an_entry_alone_in_the_bundles_root(short_tmp: Path, name: str) -> None:
    tool = javascript_tool(short_tmp, name, "export const handlers = { echo: () => import.meta.url }", "echo")
    async with bench(replace(tool, root=tool.entry)) as made:
        assert (await made.call("t__echo", {}))["output"] == "file:///run/goondan/tool/handler.mjs"


async def test_without_its_runtime_a_call_is_one_error(short_tmp: Path, name: str) -> None:
    tool = javascript_tool(short_tmp, name, HANDLERS, "echo")
    lacking = replace(tool, javascript=None, lack=f"there is no {name}", lack_fix="Install it.")
    gone = replace(tool, name="g", javascript=replace(found(name), program="/nonexistent/runtime"))
    async with bench(lacking, gone, make_tool(short_tmp, "handlers = {'f': lambda ctx, i: 1}", "f", name="p")) as made:
        error = (await made.call("t__echo", {}))["error"]
        assert (error["code"], error["suggestion"]) == ("E_SANDBOX_UNAVAILABLE", "Install it.")
        assert f"there is no {name}" in error["message"]
        error = (await made.call("g__echo", {}))["error"]
        assert (error["code"], "/nonexistent/runtime" in error["message"]) == ("E_SANDBOX_UNAVAILABLE", True)
        assert (await made.call("p__f", {}))["output"] == 1


async def test_a_runtime_that_gets_no_memory_to_start_with_names_the_limit(short_tmp: Path, name: str) -> None:
    """What Bun takes ahead counts where no control group does."""
    if name == "node":
        pytest.skip("Node 22 takes nothing ahead")
    source = "export const handlers = { echo: (ctx, input) => input }"
    tool = javascript_tool(short_tmp, name, source, "echo", sandbox=SandboxSpec(limits=Limits(memory_mb=128)))
    async with bench(tool, grouped=False) as made:
        error = (await made.call("t__echo", {}))["error"]
    assert (error["code"], "memoryMb" in error["message"]) == ("E_TOOL_LIMIT", True), error
    assert "control group" in error["suggestion"]


@pytest.mark.parametrize("grouped", [True, False])
async def test_a_limit_that_is_met_is_named(short_tmp: Path, name: str, grouped: bool) -> None:
    source = """
    import { spawn } from 'node:child_process'
    const kept = []
    export const handlers = {
      echo: (ctx, input) => input,
      memory: () => { for (;;) kept.push(Buffer.alloc(4 << 20, 1)) },
      objects: () => { for (;;) kept.push(new Array(100000).fill(1.5)) },
      processes: async () => {
        for (;;) await new Promise((go, no) => spawn('/bin/sleep', ['60']).on('spawn', go).on('error', no))
      },
    }
    """
    limits = Limits(memory_mb=384, processes=48, wall_seconds=20)
    exports = [ExportSpec(name=export) for export in ("echo", "memory", "objects", "processes")]
    tool = javascript_tool(short_tmp, name, source, *exports, sandbox=SandboxSpec(limits=limits))
    async with bench(tool, grouped=grouped) as made:
        for export, limit in (("memory", "memoryMb"), ("objects", "memoryMb"), ("processes", "processes")):
            error = await failed(made, export)
            assert (error["code"], limit in error["message"]) == ("E_TOOL_LIMIT", True), (export, error)
