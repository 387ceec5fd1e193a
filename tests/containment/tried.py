"""Makes every attempt of attempts.py in real jails of one tool host, as whoever runs this process."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from goondan.schemas.bundle.launch import ExportSpec, Limits, SandboxSpec, ToolSpec
from goondan.toolhost.policy.subject import HostFacts
from tests.containment import attempts
from tests.javascript_tools import javascript_tool
from tests.toolhost_fixture import bench, make_tool

#: What the jails are tried as: a worker that runs all calls, and a call that was forked.
TOOLS: dict[Literal["instance", "call"], str] = {"instance": "t", "call": "c"}
#: What gets through in the reduced tier and not in the full one: nothing of the host is reached by it.
HARMLESS = {
    "user_of_the_host",  # it is that user, and stays what it was
    "bundle_document",  # a new file in a workdir without one; in a workdir that holds one, no jail is made
}


def source() -> str:
    """The module of a tool that makes the attempts."""
    folder = Path(__file__).parent
    first, second = ((folder / f"{name}.py").read_text("utf-8") for name in ("attempts", "attempts_on_the_kernel"))
    kept = [
        line for line in second.splitlines(keepends=True) if not line.startswith(("from __future__", "from tests."))
    ]
    return first + "".join(kept)


#: The program reads and writes files: pipes of a runtime are sockets, which would look like another's channel.
STARTER = """
import fs from 'node:fs'
import { spawn } from 'node:child_process'

export const handlers = {
  async run(ctx, input) {
    const answer = `${process.env.HOME}/answer`
    const argv = ['-I', new URL('attempts.py', import.meta.url).pathname, JSON.stringify(input), answer]
    const python = spawn('PYTHON', argv, { stdio: 'ignore' })
    await new Promise((go, no) => python.on('exit', go).on('error', no))
    return JSON.parse(fs.readFileSync(answer, 'utf8'))
  },
}
"""
PROGRAM = """
import json, sys
found = json.dumps(run(None, json.loads(sys.argv[1])))
with open(sys.argv[2], "w", encoding="utf-8") as answer:
    answer.write(found)
"""


def starter(place: Path, runtime: str, name: str, sandbox: SandboxSpec) -> ToolSpec:
    """A tool in JavaScript that makes the attempts: as a child of the runtime, behind the walls that it has."""
    starts = STARTER.replace("PYTHON", os.path.realpath(sys.executable))
    files = {"attempts.py": source() + PROGRAM}
    return javascript_tool(place, runtime, starts, "run", tool=name, sandbox=sandbox, files=files)


async def every_attempt(
    place: Path,
    *,
    only: Literal["instance", "call"] | None = None,
    ours: bool = False,
    facts: Callable[[HostFacts], HostFacts] = lambda facts: facts,
    runtime: str | None = None,
) -> dict[str, Any]:
    """{isolation: {attempt: [group, "done" or "refused", detail]}}. `place` is an empty folder. Checks what is left.

    `ours`: the workdir is one that the tool host has made. `facts` changes what it knows of this machine. `runtime`:
    the tool is JavaScript for that runtime, and starts the attempts as a program.
    """
    wanted = {how: name for how, name in TOOLS.items() if only in (None, how)}
    work = place / "instances" / "a" / "k" / "workspace" if ours else place / "work"
    for folder in (".git/hooks", ".venv/lib"):
        (work / folder).mkdir(parents=True)
    (work / ".git" / "config").write_text("[core]\n")
    (work / "goondan.yaml").write_text("kind: Swarm\n")
    (place / "secret").write_text("host secret")
    other = make_tool(place, "handlers = {}\n", name="other")
    limits = Limits(processes=64, wall_seconds=110)
    tools = [
        make_tool(place, source(), ExportSpec(name="run"), name=name, sandbox=SandboxSpec(limits=limits, isolation=how))
        if runtime is None
        else starter(place, runtime, name, SandboxSpec(limits=limits, isolation=how))
        for how, name in wanted.items()
    ]
    servers = {
        "tcp": socket.create_server(("127.0.0.1", 0)),
        "stream": socket.socket(socket.AF_UNIX),
        "datagram": socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    }
    found: dict[str, Any] = {}
    victim = subprocess.Popen(["/bin/sleep", "1000"], process_group=0)
    # In the user's keyring, under a name of its own: another test that runs meanwhile takes its own away.
    described = f"a key of the host {os.getpid()}".encode()
    key = attempts.call("add_key", b"user", described, b"x", ctypes.c_size_t(1), -4)
    try:
        servers["stream"].bind(str(work / "stream.sock"))
        servers["stream"].listen()
        servers["datagram"].bind(str(work / "datagram.sock"))
        servers["datagram"].setblocking(False)
        told = {
            "secret": str(place / "secret"),
            "other_tool": other.root,
            "uid": os.getuid(),
            "pid": os.getpid(),
            "victim": victim.pid,
            "port": servers["tcp"].getsockname()[1],
            "socket": str(work / "stream.sock"),
        }
        before = len(os.listdir("/proc/self/fd"))
        documents, state = [str(work / "goondan.yaml")], place if ours else "/nonexistent/state"
        async with bench(*tools, protected=documents, state_dir=state, facts=facts) as made:
            for how, name in wanted.items():  # one after the other: they write the same files
                result = await made.call(f"{name}__run", told, workdir=work, deadline_ms=100_000, within_s=110)
                assert result["status"] == "ok", result
                found[how] = result["output"]
                assert not [path for path in work.rglob("*") if path.lstat().st_mode & 0o6000]
                for path in work.iterdir():
                    if path.is_symlink() or (path.is_file() and path.suffix != ".yaml"):
                        path.unlink()
        assert victim.poll() is None
        assert len(os.listdir("/proc/self/fd")) <= before + 2  # the launcher's socket may be new
        try:
            raise AssertionError(f"somebody wrote to the host's socket: {servers['datagram'].recv(10)!r}")
        except BlockingIOError:
            return found
    finally:
        victim.kill()
        victim.wait()
        attempts.call("keyctl", 9, key, -4)  # unlinked
        for server in servers.values():
            server.close()
