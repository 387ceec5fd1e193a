"""What must go on working inside all the walls: Python with threads, processes and asyncio, bash, git, node."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.bundle.launch import SandboxSpec
from tests.toolhost_fixture import bench, make_tool

SOURCE = """
import asyncio, os, subprocess, sys

def run(ctx, input):
    done = subprocess.run(input["argv"], capture_output=True, text=True, timeout=30)
    return [done.returncode, done.stdout, done.stderr[-2000:]]

def threads(ctx, input):
    import queue, threading
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(8) as pool: total = sum(pool.map(lambda n: n * n, range(100)))
    return total

def multiple(ctx, input):
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(2) as pool: return sum(pool.map(abs, range(-9, 0)))

async def loop(ctx, input):
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    out, _ = await process.communicate(b"through a pipe")
    inside = await asyncio.to_thread(lambda: 7)
    reader, writer = os.pipe()
    return [out.decode(), inside, await asyncio.sleep(0.01, "slept")]

def files(ctx, input):
    import mmap, shutil, sqlite3, tempfile
    with tempfile.TemporaryDirectory(dir=ctx.workdir) as folder:
        database = sqlite3.connect(folder + "/d.db"); database.execute("pragma journal_mode=wal")
        database.execute("create table t(x)"); database.execute("insert into t values (1)")
        database.commit(); database.close()
        shutil.copytree(folder, folder + "-2"); shutil.rmtree(folder + "-2")
        with open(folder + "/m", "wb+") as file:
            file.truncate(8192); mapped = mmap.mmap(file.fileno(), 8192); mapped[:3] = b"abc"; mapped.close()
        os.chmod(folder + "/m", 0o755); os.posix_fallocate(os.open(folder + "/m", os.O_RDWR), 0, 10000)
        return sorted(os.listdir(folder))
handlers = {"run": run, "threads": threads, "multiple": multiple, "loop": loop, "files": files}
"""
EXPORTS = ("run", "threads", "multiple", "loop", "files")
PIPELINE = """
printf 'b\\na\\n' | sort | tee o | tr a-z A-Z; wait; mkfifo p; (echo x > p &) ; cat p; trap : TERM; kill -TERM $$
"""
GIT = """
set -e; git init -q r; cd r; git config user.email a@b; git config user.name n
echo one > f; git add f; git commit -qm one; git checkout -qb other; echo two >> f; git commit -qam two
git checkout -q -; git merge -q other; git gc -q; git log --oneline | wc -l; cd ..; git clone -q r copy; ls copy
"""
NODE = """
const {execFileSync, spawn} = require('child_process'); const fs = require('fs');
const {Worker} = require('worker_threads');
fs.writeFileSync('n.txt', 'x'); fs.copyFileSync('n.txt', 'm.txt');
const word = execFileSync('echo', ['child']).toString().trim();
new Worker("require('worker_threads').parentPort.postMessage(6*7)", {eval: true}).on('message', answer =>
  require('zlib').gzip('data', (error, packed) => fs.promises.readdir('.').then(names =>
    console.log([word, answer, packed.length > 10, names.sort().join()].join(' ')))));
"""


async def test_programs_work(short_tmp: Path) -> None:
    """One jail for all of them: what they do to it is part of the test."""
    (short_tmp / "w").mkdir()
    async with bench(make_tool(short_tmp, SOURCE, *EXPORTS)) as made:

        async def call(export: str, args: Any = None) -> Any:
            result = await made.call(f"t__{export}", args, workdir=short_tmp / "w", within_s=40)
            assert result["status"] == "ok", (export, result)
            return result["output"]

        async def run(*argv: str) -> str:
            status, out, err = await call("run", {"argv": list(argv)})
            assert status == 0, (argv, out, err)
            return str(out).strip()

        assert await call("threads") == 328350
        assert await call("multiple") == 45
        assert await call("loop") == ["through a pipe", 7, "slept"]
        assert await call("files") == ["d.db", "m"]
        assert await run("bash", "-c", PIPELINE) == "A\nB\nx"
        assert await run("sh", "-c", "cp -a o q; tar cf t.tar o q; tar xf t.tar; ls -l q | cut -c1-10") == "-rw-r--r--"
        assert await run("find", ".", "-name", "o", "-exec", "stat", "-c", "%s", "{}", ";") == "4"
        assert await run("bash", "-c", "perl -e 'print 6*7' 2>/dev/null || echo 42") == "42"
        if shutil.which("git", path="/usr/bin:/bin:/usr/local/bin"):
            assert (await run("bash", "-c", GIT)).split() == ["2", "f"]
        if shutil.which("node", path="/usr/bin:/bin:/usr/local/bin"):
            out = await run("node", "-e", NODE)
            assert out.startswith("child 42 true ") and "n.txt" in out


@pytest.mark.parametrize("network", ["none", "public"])
async def test_python_finds_its_channel_pair(short_tmp: Path, network: str) -> None:
    """asyncio needs a socketpair and nothing more."""
    tool = make_tool(short_tmp, SOURCE, *EXPORTS, sandbox=SandboxSpec(network=network, isolation="shared"))
    async with bench(tool) as made:
        assert (await made.call("t__loop"))["output"] == ["through a pipe", 7, "slept"]
