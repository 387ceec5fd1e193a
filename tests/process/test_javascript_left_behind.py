"""What a call of a tool in JavaScript leaves behind in its jail ends with it, unless its export has `background`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from goondan.kernel.bundle.javascript import choose, look
from goondan.schemas.bundle.launch import ExportSpec, JavaScriptRuntime
from tests.javascript_runtimes import RUNTIMES, runtime
from tests.toolhost_fixture import bench, make_tool

TOOL: Final = r"""
import { spawn } from 'node:child_process';
import fs from 'node:fs';

function start(script) {
  const left = spawn('/bin/sh', ['-c', script], { stdio: 'ignore', detached: true });
  left.unref();
  return left.pid;
}

function stateOf(pid) {
  try {
    return fs.readFileSync(`/proc/${pid}/stat`, 'latin1').split(') ').at(-1)[0];
  } catch {
    return 'Z';
  }
}

const alive = (pid) => stateOf(pid) !== 'Z';
const opened = [];

export const handlers = {
  leaves: () => start('sleep 60 & sleep 60'),
  daemon: () => start('while :; do sleep 0.05; done'),
  async namedLikeADeadOne() {
    const left = start('cp "$(command -v sleep)" "/tmp/) Z 1" && exec "/tmp/) Z 1" 60');
    const named = () => fs.readFileSync(`/proc/${left}/stat`, 'latin1').includes('Z 1');
    while (!named()) await new Promise((go) => setTimeout(go, 5));
    return left;
  },
  opensAll() {
    const left = start('sleep 60');
    try {
      for (;;) opened.push(fs.openSync('/dev/null'));
    } catch (error) {
      return [error.code, left];
    }
  },
  closesAll: () => opened.splice(0).forEach((fd) => fs.closeSync(fd)),
  alive: (ctx, { pid }) => alive(pid),
  /** Until nothing of a call is left: init, this process, and the daemon with its child. */
  async only(ctx, { most }) {
    const count = () => fs.readdirSync('/proc').filter((name) => /^\d+$/.test(name) && alive(name)).length;
    while (count() > most) await new Promise((go) => setTimeout(go, 5));
    return count();
  },
};
"""

EXPORTS: Final = ("leaves", "namedLikeADeadOne", "opensAll", "closesAll", "alive", "only")


@pytest.mark.parametrize("name", RUNTIMES)
async def test_what_is_left_behind(short_tmp: Path, name: str) -> None:
    made = make_tool(short_tmp, "", *EXPORTS, ExportSpec(name="daemon", background=True))
    Path(made.root, "tool.mjs").write_text(TOOL)
    found = look("/", {f"GOONDAN_{name.upper()}": runtime(name), "PATH": ""})
    chosen = choose("bun" if name == "bun" else "node", found)
    assert isinstance(chosen, JavaScriptRuntime)
    tool = replace(made, entry=f"{made.root}/tool.mjs", javascript=chosen)
    async with bench(tool) as host:

        async def value(export: str, args: dict[str, Any] | None = None) -> Any:
            result = await host.call(f"t__{export}", args)
            assert result["status"] == "ok", result
            return result["output"]

        for _ in range(3):
            left = await value("leaves")
            assert await value("only", {"most": 2}) == 2
            assert await value("alive", {"pid": left}) is False
        daemon = await value("daemon")
        for _ in range(3):
            left = await value("leaves")
            assert 3 <= await value("only", {"most": 4}) <= 4
            assert await value("alive", {"pid": left}) is False
            assert await value("alive", {"pid": daemon}) is True
        left = await value("namedLikeADeadOne")
        assert await value("alive", {"pid": left}) is False
        # A look for what is left needs descriptors: without one the answer comes all the same, and the next call looks.
        code, left = await value("opensAll")
        assert code == "EMFILE"
        await value("closesAll")
        assert await value("alive", {"pid": left}) is False
        assert await value("alive", {"pid": daemon}) is True
        assert host.host.sessions.jail_count == 1
