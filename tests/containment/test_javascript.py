"""What a JavaScript runtime itself reaches in its jail, from each of its threads: nothing of the host."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from goondan.schemas.bundle.launch import Limits, SandboxSpec
from goondan.toolhost.lookup.this_host import landlock_abi
from tests.javascript_runtimes import RUNTIMES, runtime
from tests.javascript_tools import javascript_tool
from tests.toolhost_fixture import bench, make_tool

SOURCE = r"""
import dgram from 'node:dgram'
import fs from 'node:fs'
import http from 'node:http'
import net from 'node:net'
import os from 'node:os'
import path from 'node:path'
import v8 from 'node:v8'
import { spawnSync } from 'node:child_process'
import { Worker, isMainThread, parentPort, workerData } from 'node:worker_threads'

const once = (source, good) => new Promise((go, no) => source.on(good, () => go(good)).on('error', no))

// What is in a folder of homes besides what the jail was given in one (a runtime) and the ways to it.
const besideTheWays = (folder) => {
  const mounts = fs.readFileSync('/proc/self/mountinfo', 'latin1').trim().split('\n')
    .map((line) => line.split(' ')[4]).filter((mount) => mount.split('/').length > 3)
  return fs.readdirSync(folder).map((name) => `${folder}/${name}`).flatMap((path) => {
    if (mounts.some((mount) => mount.startsWith(`${path}/`))) return besideTheWays(path)
    return mounts.includes(path) ? [] : [path]
  })
}

const attempts = (host) => ({
  shadow: () => fs.readFileSync('/etc/shadow'),
  secret: () => fs.readFileSync(host.secret),
  secretByDots: () => fs.readFileSync(`${process.cwd()}/../secret`),
  secretThroughInit: () => fs.readFileSync(`/proc/1/root${host.secret}`),
  otherTool: () => fs.readFileSync(`${host.other}/handler.py`),
  homes: () => {
    const found = besideTheWays('/home')
    if (found.length === 0) throw new Error('EMPTY: not there')
    return found
  },
  intoUsr: () => fs.writeFileSync('/usr/new', 'x'),
  intoItsCode: () => fs.writeFileSync(new URL(import.meta.url).pathname, 'x'),
  intoTheWorker: () => fs.writeFileSync('/run/goondan/goondan_tool/javascript/worker.mjs', 'x'),
  intoItsMemory: () => fs.writeFileSync('/sys/fs/cgroup/memory.max', 'max'),
  intoTheRuntime: () => fs.openSync(process.execPath, 'r+'),
  besideTheRuntime: () => fs.writeFileSync(path.join(path.dirname(process.execPath), 'new'), 'x'),
  intoGit: () => fs.writeFileSync('.git/hooks/post-checkout', 'x'),
  setUserId: () => { fs.writeFileSync('made', 'x'); fs.chmodSync('made', 0o4755) },
  becomesRoot: () => process.setuid(0),
  tcp: () => once(net.connect(host.port, '127.0.0.1'), 'connect'),
  unixSocket: () => once(net.connect(host.socket), 'connect'),
  listens: () => once(net.createServer().listen(0, '127.0.0.1'), 'listening'),
  datagram: () => new Promise((go, no) => dgram.createSocket('udp4').on('error', no)
    .send('x', host.port, '127.0.0.1', (error) => error ? no(error) : go('sent'))),
  http: () => new Promise((go, no) => http.get(`http://127.0.0.1:${host.port}/`, go).on('error', no)),
  fetches: () => fetch(`http://127.0.0.1:${host.port}/`),
  signals: () => process.kill(host.victim, 'SIGTERM'),
  signalsTheHost: () => process.kill(host.pid, 0),
  signalsInit: () => { if (host.scopes) process.kill(1, 0); else throw new Error('EMPTY: not there') },
  environmentOfTheHost: () => { if (process.env.HOST_SECRET === undefined) throw new Error('EMPTY: not there') },
  memoryOfInit: () => fs.openSync('/proc/1/mem', 'r'),
  nameOfTheHost: () => { if (os.hostname() === 'tool') throw new Error('EMPTY: its own') },
  userOfTheHost: () => {
    if (spawnSync('/usr/bin/id', ['-u']).stdout.toString().trim() !== '0') throw new Error('EMPTY: no root')
  },
})

async function tried(host) {
  const found = {}
  for (const [name, attempt] of Object.entries(attempts(host))) {
    try {
      found[name] = `through: ${String(await attempt()).slice(0, 100)}`
    } catch (error) {
      found[name] = `refused: ${error.cause?.code ?? error.code ?? error.message}`
    }
  }
  return found
}

if (!isMainThread && workerData?.host) parentPort.postMessage(await tried(workerData.host))

export const handlers = {
  main: (ctx, input) => tried(input),
  thread: (ctx, input) => new Promise((go, no) => {
    const worker = new Worker(new URL(import.meta.url), { workerData: { host: input } })
    worker.on('message', go).on('error', no)
  }),
  walls: () => Object.fromEntries(fs.readdirSync('/proc/self/task').flatMap((task) => {
    let status
    try { status = fs.readFileSync(`/proc/self/task/${task}/status`, 'latin1') } catch { return [] } // it has ended
    const field = (name) => status.match(new RegExp(`^${name}:\\s*(\\S+)`, 'm'))[1]
    return [[task, ['Seccomp', 'NoNewPrivs', 'CapEff', 'CapPrm', 'CapBnd'].map(field)]]
  })),
  limits: () => Object.fromEntries(fs.readFileSync('/proc/self/limits', 'latin1').split('\n')
    .map((line) => line.split(/\s{2,}/)).map(([name, soft, hard]) => [name, [soft, hard]])),
  memory: () => [process.constrainedMemory?.(), v8.getHeapStatistics().heap_size_limit],
  descriptors: () => fs.readdirSync('/proc/self/fd').map((fd) => {
    try { return fs.readlinkSync(`/proc/self/fd/${fd}`) } catch { return 'closed' }
  }),
  arguments: () => [process.argv, process.env, fs.readFileSync('/proc/1/cmdline', 'latin1')],
}
"""
#: How the system refuses, as the codes of errors.
REFUSALS = {
    "ENOENT", "EACCES", "EPERM", "EROFS", "ESRCH", "EINVAL", "EBUSY", "ETXTBSY", "EMPTY: not there", "EMPTY: its own",
    "EMPTY: no root", "ECONNREFUSED", "ERR_WORKER_UNSUPPORTED_OPERATION", "FailedToOpenSocket",
    "Failed to listen at 127.0.0.1",
}  # fmt: skip


@pytest.mark.parametrize(("name", "perl"), [*((name, True) for name in RUNTIMES), ("node", False)])
async def test_nothing_of_the_host_is_reached(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, name: str, perl: bool
) -> None:
    """Whichever boot stage puts up the walls."""
    monkeypatch.setenv("HOST_SECRET", "x")
    work = short_tmp / "work"
    (work / ".git" / "hooks").mkdir(parents=True)
    (short_tmp / "secret").write_text("host secret")
    other = make_tool(short_tmp, "handlers = {}\n", name="other")
    exports = ("main", "thread", "walls", "limits", "memory", "descriptors", "arguments")
    sandbox = SandboxSpec(limits=Limits(wall_seconds=50))
    tool = javascript_tool(short_tmp, name, SOURCE, *exports, sandbox=sandbox)
    victim = subprocess.Popen(["/bin/sleep", "100"])
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(work / "s"))
        unix.listen()
        told = {
            "secret": str(short_tmp / "secret"),
            "other": other.root,
            "victim": victim.pid,
            "pid": os.getpid(),
            "port": tcp.getsockname()[1],
            "socket": str(work / "s"),
            "scopes": landlock_abi() >= 6,
        }
        try:
            async with bench(tool, facts=lambda facts: facts if perl else replace(facts, perl="")) as made:

                async def call(export: str) -> Any:
                    result = await made.call(f"t__{export}", told, workdir=work)
                    assert result["status"] == "ok", result
                    return result["output"]

                for export in ("main", "thread"):
                    outcomes = await call(export)
                    assert len(outcomes) == 28
                    # Of a runtime below /tmp this is the jail's own memory: what counts is that the host has none.
                    del outcomes["besideTheRuntime"]
                    strange = {a: o for a, o in outcomes.items() if o.removeprefix("refused: ") not in REFUSALS}
                    assert strange == {}, export
                walls = await call("walls")
                assert len(walls) > 1
                assert {tuple(wall) for wall in walls.values()} == {("2", "1", *("0000000000000000",) * 3)}
                kept = await call("limits")
                assert kept["Max open files"] == [str(sandbox.limits.open_files)] * 2
                assert kept["Max file size"] == [str(sandbox.limits.file_mb << 20)] * 2
                assert kept["Max core file size"] == ["0", "0"]
                has, heap = await call("memory")
                if name == "node":  # the heap is half of it, and some room for what is new
                    assert has == sandbox.limits.memory_mb << 20
                    assert 0.45 < heap / has < 0.6
                opened = await call("descriptors")
                assert not [
                    path for path in opened if path.startswith("/") and not path.startswith(("/dev/", "/proc/"))
                ]
                assert told["secret"] not in str(await call("arguments"))
            assert victim.poll() is None
            assert not Path(runtime(name)).resolve().with_name("new").exists()
            for server in (tcp, unix):  # nobody knocked, whatever the runtime calls its refusal
                server.setblocking(False)
                with pytest.raises(BlockingIOError):
                    server.accept()
        finally:
            victim.kill()
            victim.wait()


KNOCKS = """
import { spawnSync } from 'node:child_process'
import { setTimeout } from 'node:timers/promises'

export const handlers = {
  async knock() {
    spawnSync('/bin/sh', ['-c', `kill -USR1 ${process.pid}`])
    for (let i = 0; i < 20; i++, await setTimeout(25)) {
      const opened = await fetch('http://127.0.0.1:9229/json').then((found) => found.text(), () => undefined)
      if (opened) return opened
    }
    return 'closed'
  },
}
"""


async def test_no_program_in_the_jail_opens_nodes_inspector(short_tmp: Path) -> None:
    """Where there is a loopback, it would let any program of a call run code in the worker."""
    tool = javascript_tool(short_tmp, "node", KNOCKS, "knock", sandbox=SandboxSpec(network="public"))
    async with bench(tool) as made:
        result = await made.call("t__knock", {}, workdir=short_tmp)
        assert result.get("output") == "closed", result
