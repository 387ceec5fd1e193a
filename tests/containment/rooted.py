"""A tool host on a machine without user namespaces: what its jails are and do, as one JSON document. Run as a program.

    python no_user_namespaces.py EPERM python -m tests.containment.rooted FOLDER PORT

`FOLDER` is empty, `PORT` that of a web server on loopback.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from goondan.schemas.bundle.launch import Filesystem, SandboxSpec
from goondan.schemas.system.users import DEFAULT
from goondan.toolhost.lookup.this_host import gather
from goondan.toolhost.privileges.powers import instance_uid
from goondan.toolhost.survey import survey
from goondan.toolhost.watch.procfs import process_status
from tests.containment.test_totals import LIMITS, MET, bombs
from tests.toolhost_fixture import POWERS, Bench, bench, make_tool

SOURCE = """
import errno, os, pwd, signal, subprocess, time
import beside

def run(*argv):
    done = subprocess.run(argv, capture_output=True, text=True)
    return (done.stdout + done.stderr).strip()

def who(ctx, input):
    home = os.environ["HOME"]
    for folder in (home, "/tmp", "/dev/shm", "."):
        with open(f"{folder}/made", "w") as file:
            file.write("x")
    return {
        "ids": [os.getresuid(), os.getresgid(), os.getgroups()], "id": run("id"), "whoami": run("whoami"),
        "account": list(pwd.getpwuid(os.getuid()))[:6], "home": [os.path.expanduser("~"), os.stat(home).st_uid,
        oct(os.stat(home).st_mode)], "cwd": [os.getcwd(), os.stat(".").st_uid],
        "git": run("git", "init", "-q", "repository") + run("git", "-C", "repository", "status", "--short", "-b"),
        "beside": [beside.VALUE, os.access(beside.__file__, os.W_OK), why(".env")],
        "self": [os.stat("/proc/self/fd").st_uid, len(os.listdir("/proc/self/fd")) > 2],
        "first": sorted(os.listdir("/proc/1/fd")) if os.access("/proc/1/fd", os.R_OK) else "closed",
        "root": sorted(os.listdir("/run")),
    }

def why(name):
    try:
        with open(os.path.join(os.path.dirname(beside.__file__), name)) as file: return file.read()
    except OSError as error: return errno.errorcode[error.errno]

def leave(ctx, input):
    # A daemon that nobody waits for, and a child that is dead already.
    if os.fork() == 0:
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        os._exit(0)
    os.wait()
    time.sleep(0.05)
    return len([name for name in os.listdir("/proc") if name.isdigit()])

def count(ctx, input):
    until = time.monotonic() + 10
    while True:  # who was killed is gone when process 1 has seen it
        there = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        if there == [1, 2] or time.monotonic() > until:
            return there
        time.sleep(0.01)

def first(ctx, input):
    # Nothing that reaches process 1 ends it, nor shows what it is.
    out = []
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGINT):
        try: os.kill(1, number); out.append("sent")
        except PermissionError: out.append("refused")
    for path in ("mem", "environ", "root", "cwd"):
        try: os.close(os.open(f"/proc/1/{path}", os.O_RDONLY)); out.append("open")
        except PermissionError: out.append("refused")
    # Who could read this pipe would keep the jail alive when the tool host is gone.
    try: os.close(os.open("/proc/self/fd/2", os.O_RDONLY)); out.append("open")
    except PermissionError: out.append("refused")
    return out

def die(ctx, input): os.kill(os.getpid(), input["signal"])
def fetch(ctx, input): return run("curl", "-sS", "-m", "5", f"http://127.0.0.1:{input['port']}/granted")
def refused(ctx, input): return run("curl", "-sS", "-m", "5", f"http://127.0.0.1:{input['port'] + 1}/")
def slow(ctx, input): time.sleep(60)
def read(ctx, input): return open(input["path"]).read()
def write(ctx, input):
    with open(input["path"], "w") as file: file.write("written")
    return os.stat(input["path"]).st_uid
handlers = {name: value for name, value in list(globals().items()) if callable(value)}
"""
EXPORTS = ("who", "leave", "count", "first", "die", "fetch", "refused", "slow", "read", "write")
#: One of each mechanism; the others are those of every jail.
BOMBS = ("forks", "memory_of_many", "private_files", "many_files")


async def main(place: Path, port: int) -> dict[str, Any]:
    """Everything, in one tool host."""
    found = await survey(POWERS, gather(POWERS))
    assert found.facts is not None and not found.facts.user_namespaces, found
    state, grants = place / "state", place / "grants"
    grants.mkdir()
    own = state / "instances" / "coder" / "k1" / "workspace"
    for name in ("open", "closed", "mine"):
        (grants / name).write_text(f"{name} grant")
    (grants / "closed").chmod(0o600)
    os.chown(grants / "mine", *[instance_uid(str(own), DEFAULT)] * 2)
    (own / ".git").mkdir(parents=True)  # mounted read-only, in a folder that is closed to root without powers
    own.chmod(0o700)
    given = place / "given"
    given.mkdir()
    os.chown(given, *[instance_uid(str(given), DEFAULT)] * 2)

    def tool(name: str, *, network: Any = "none", isolation: Any = "instance", **files: list[str]) -> Any:
        sandbox = SandboxSpec(network=network, isolation=isolation, filesystem=Filesystem(**files))
        made = make_tool(place, SOURCE, *EXPORTS, name=name, sandbox=sandbox)
        (Path(made.root) / "beside.py").write_text("VALUE = 7\n")
        (Path(made.root) / ".env").write_text("KEY=secret\n")
        return made

    tools = [
        tool("plain", read=[str(grants / "open")], write=[str(grants / "mine")]),
        tool("private"),
        tool("once", isolation="call"),
        tool("net", network={"allow": [f"127.0.0.1:{port}"]}),
        tool("closed_read", read=[str(grants / "closed")]),
        tool("foreign_write", write=[str(grants)]),
    ]
    for path in [Path(tools[1].root), *Path(tools[1].root).iterdir()]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    bomb = bombs(place, replace(LIMITS, wall_seconds=30))
    out: dict[str, Any] = {"walls": found.walls, "uid": instance_uid(str(own), DEFAULT)}
    facts = replace(found.facts, groups=None)  # where there are no namespaces there are mostly no groups either
    async with bench(*tools, bomb, state_dir=state, facts=lambda _: facts) as made:
        for name in ("plain", "private", "once"):
            out[name] = await made.call(f"{name}__who", workdir=own)
            out[f"{name} processes"] = processes(made, name)
        out["receipt"] = list(made.receipts.values())[-1]["jail"]
        for name in ("leave", "count", "first"):
            out[name] = await made.call(f"plain__{name}", workdir=own)
        out["grants"] = [
            await made.call("plain__read", {"path": str(grants / "open")}, workdir=own),
            await made.call("plain__write", {"path": str(grants / "mine")}, workdir=own),
            await made.call("closed_read__count", workdir=own),
            await made.call("foreign_write__count", workdir=own),
            await made.call("private__count", workdir=grants),
            await made.call("private__write", {"path": "made"}, workdir=given),
        ]
        out["given"] = instance_uid(str(given), DEFAULT)
        out["signals"] = [await made.call("plain__die", {"signal": number}, workdir=own) for number in (15, 11, 9)]
        out["slow"] = await made.call("plain__slow", workdir=own, deadline_ms=300)
        for name in ("fetch", "refused"):
            out[name] = await made.call(f"net__{name}", {"port": port}, workdir=own)
        out["reached"] = list(made.receipts.values())[-1]["jail"]
        out["bombs"] = {}
        for name, args, limit in MET:
            if name in BOMBS and name not in out["bombs"]:
                workdir = state / "instances" / "coder" / name / "workspace"
                result = await made.call(f"bomb__{name}", args, workdir=workdir)
                after = await made.call("bomb__quiet", workdir=workdir)
                out["bombs"][name] = [limit, result.get("error"), after.get("output")]
        pids = [pid for slot in made.host.sessions.pool.sessions() for pid in made.live_of(slot).jail.processes()]
        assert pids
    out["left"] = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return out


def processes(made: Bench, name: str) -> list[dict[str, str]]:
    """/proc/PID/status of every process of the jails of a tool."""
    fields = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    return [
        {field: process_status(pid).get(field, "") for field in fields}
        for slot in made.host.sessions.pool.sessions()
        if made.live_of(slot).jail.name == name
        for pid in made.live_of(slot).jail.processes()
    ]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))))
