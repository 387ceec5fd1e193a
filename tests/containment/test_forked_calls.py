"""Calls that share a jail (`isolation: call`): each alone with fresh memory and files, none the worse for another.

One tool host for all of it, as root and as an ordinary user.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from goondan.schemas.bundle.launch import ExportSpec, Limits, SandboxSpec
from goondan.toolhost.calls.session import JailSession
from goondan.toolhost.watch import procfs
from goondan.toolhost.watch.procfs import process_status
from tests.containment.ordinary_user import run_as_user
from tests.toolhost_fixture import Bench, bench, code_of, make_tool, until

SOURCE = """
import os, resource, sys, time
from goondan_tool import Pending
PLACES = ("/tmp", "/dev/shm", os.environ["HOME"])
seen = []

def fresh(ctx, input):
    'What is there from others, and then something for others to find.'
    found = [list(seen), *([name for name in os.listdir(place) if name.startswith("mine")] for place in PLACES)]
    found.append(os.listdir("/dev/pts"))
    seen.append(1)
    for place in PLACES: open(place + "/mine", "w").close()
    master, slave = os.openpty()
    time.sleep(input.get("s", 0))
    return found

def waits(ctx, input):
    open(input["file"], "w").close()
    while not os.path.exists(input["until"]): time.sleep(0.02)
    return [os.getpid(), os.getppid(), sorted(int(name) for name in os.listdir("/proc") if name.isdigit())]

def signals(ctx, input):
    os.kill(input["pid"], 9)
    time.sleep(5)

def leaves(ctx, input):
    for _ in range(2):
        if os.fork() == 0:
            os.setpgid(0, 0)
            if os.fork() == 0: time.sleep(60)
            os._exit(0)
    return os.path.exists("/proc/1")

def exits(ctx, input): os._exit(3)
def raw(ctx, input): os.write(3, bytes.fromhex(input["hex"])); time.sleep(input.get("s", 5))
def sleeps(ctx, input): time.sleep(30)
def stops(ctx, input):
    while not ctx.cancelled: time.sleep(0.01)
def work(ctx, input): return Pending("job", lambda: [os.getpid(), len(seen)])
def says(ctx, input):
    print("printed"); os.write(1, b"stray\\n"); ctx.logger.info("logged"); ctx.progress(1, 2, "half")
    limits = [resource.getrlimit(name)[1] for name in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)]
    return [ctx.message.data, ctx.remaining_ms > 0, ctx.output_limit, limits, sorted(os.listdir("/proc/self/fd"))]
def large(ctx, input): return "x" * (3 << 20)
def fills(ctx, input):
    with open("/tmp/f", "wb") as file:
        for _ in range(input["mb"]): file.write(bytes(1 << 20))
    time.sleep(5)
handlers = {name: value for name, value in list(globals().items()) if callable(value) and name != "Pending"}
"""
NAMES: list[str | ExportSpec] = [
    "fresh", "waits", "signals", "exits", "raw", "sleeps", "stops", "work", "says", "large", "fills",
    ExportSpec(name="leaves", background=True),
]  # fmt: skip


async def scenario(place: Path, *, grouped: bool = True) -> None:
    """Everything, in one jail but for what ends it."""
    work = place / "work"
    work.mkdir()
    sandbox = SandboxSpec(isolation="call", limits=Limits(output_mb=1, memory_mb=100, open_files=12))
    broken = make_tool(place, "raise ValueError('no')", "f", name="broken", sandbox=sandbox)
    async with bench(make_tool(place, SOURCE, *NAMES, sandbox=sandbox), broken, grouped=grouped) as made:

        async def call(name: str, args: Any = None, **options: Any) -> dict[str, Any]:
            return await made.call(f"t__{name}", args, workdir=work, **options)

        await fresh_for_every_call(call)
        (slot,) = made.host.sessions.pool.sessions()
        results = await asyncio.gather(*(made.call("broken__f", workdir=work) for _ in range(2)))
        assert [code_of(result) for result in results] == ["E_CONFIG_ENTRY"] * 2
        assert "ValueError: no" in results[0]["error"]["message"]
        jail = made.live_of(slot).jail
        await until(lambda: len(jail.processes()) == 4)  # two of bubblewrap and the server, two of what is made ahead
        check_processes(jail)
        before = jail.pid

        # A neighbour that must live through all that follows.
        args = {"file": str(work / "there"), "until": str(work / "go")}
        _, neighbour = made.start("t__waits", args, workdir=work)
        await until((work / "there").exists)
        await nobody_elses(made, call)
        await endings(made, call, work)
        await whose_is_what(made, slot, work)
        assert not neighbour.done()
        (work / "go").touch()
        assert (await neighbour)["output"] == [2, 1, [1, 2]]
        # What was left behind went with its call: the first process, the server, and what is made ahead remain.
        await until(lambda: len(jail.processes()) == 4)
        assert (jail.pid, made.host.sessions.jail_count) == (before, 2)

        # A limit of the whole jail ends all of it; private files are memory, whoever's they are.
        result = await call("fills", {"mb": 200})
        assert code_of(result) in ("E_TOOL_LIMIT", "ENOSPC"), result
        assert "memoryMb" in result["error"]["message"], result


async def fresh_for_every_call(call: Any) -> None:
    found = [(await call("fresh"))["output"] for _ in range(2)]
    found += [result["output"] for result in await asyncio.gather(*(call("fresh", {"s": 0.1}) for _ in range(3)))]
    assert found == [[[], [], [], [], ["ptmx"]]] * 5


def check_processes(jail: Any) -> None:
    """The server keeps what it needs and cannot be looked into; the other processes have nothing at all."""
    held = {}
    for pid in jail.processes():
        status = process_status(pid)
        assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
        held[pid] = {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    server = jail.worker_pid
    assert held.pop(server) == {1 << 21 | 1 << 8}
    assert os.stat(f"/proc/{server}/environ").st_uid == 0  # not dumpable
    init = held.pop(jail.processes()[0])
    assert init <= {0, 1 << 21 | 1 << 8}  # bubblewrap's own leaves its bounding set, and can gain nothing from it
    assert all(values == {0} for values in held.values())


async def nobody_elses(made: Bench, call: Any) -> None:
    """Neither signals nor frames reach another call."""
    for pid, outcomes in ((0, ["E_TOOL_CRASHED"]), (-1, ["ESRCH"]), (1, ["EPERM", "E_TOOL_TIMEOUT"])):
        assert code_of(await call("signals", {"pid": pid}, deadline_ms=1000)) in outcomes, pid
    assert code_of(await call("sleeps", deadline_ms=200)) == "E_TOOL_TIMEOUT"
    receipt = list(made.receipts.values())[-1]
    assert receipt["jail"]["calls"] == "forked"
    assert "exit" not in receipt["jail"]
    assert receipt["call"]["exit"] == "it ran out of time"
    results = [b"\x83\xa4type\xa6result\xa6callId\xa1%d\xa6status\xa2ok" % number for number in range(1, 8)]
    ended = b"\x83\xa4type\xa5ended\xa4cell\x01\xa6status\x00"
    ready = b"\x83\xa4type\xa5ready\xa8protocol\x01\xa7exports\x90"
    frames = [b"".join(len(r).to_bytes(4, "little") + r for r in results)]
    frames += [len(frame).to_bytes(4, "little") + frame for frame in (ended, ready, b"\xc1")]
    frames.append((1 << 30).to_bytes(4, "little"))
    said = await asyncio.gather(*(call("raw", {"hex": frame.hex()}) for frame in frames))
    assert [code_of(result) for result in said] == ["E_TOOL_CRASHED"] * 4 + ["E_TOOL_LIMIT"]
    assert all("its processes were ended" in result["error"]["message"] for result in said)


async def endings(made: Bench, call: Any, work: Path) -> None:
    result = await call("exits")
    assert code_of(result) == "E_TOOL_CRASHED"
    assert "exited with status 3 during the call" in result["error"]["message"]
    assert (await call("leaves"))["output"] is True
    call_id, waiter = made.start("t__stops", workdir=work)
    await asyncio.sleep(0.05)
    made.cancel(call_id)
    assert code_of(await waiter) == "E_CANCELLED"
    assert (await call("work")) == {"status": "pending", "handle": "t/job"}
    await until(lambda: made.host.answers.pending.get(("coder", "k1"), "t/job").done)  # type: ignore[union-attr]
    said = await call("says", message_id="m", message={"id": "m", "data": {"role": "assistant"}})
    assert said["output"] == [{"role": "assistant"}, True, 1 << 20, [12, 256 << 20], ["0", "1", "2", "3", "4", "5"]]
    await until(lambda: {"printed", "stray", "logged"} <= {line.message for line in made.logs})
    lines = {line.message: line for line in made.logs}
    assert lines["stray"].call_id == lines["printed"].call_id == lines["logged"].call_id is not None
    assert [told["message"] for _, told in made.progress] == ["half"]
    result = await call("large")
    assert code_of(result) == "E_TOOL_LIMIT"


async def whose_is_what(made: Bench, slot: JailSession, work: Path) -> None:
    """Processor time is charged to the call whose processes have used it, though another one runs beside it."""
    (work / "there").unlink()
    made.start("t__waits", {"file": str(work / "there"), "until": str(work / "go")}, workdir=work)
    await until((work / "there").exists)
    usage = made.live_of(slot).jail.usage
    there = procfs.trees(usage.processes(), usage.sandboxes())
    trees = {name: {process.pid for process in tree} for name, tree in there.items() if name in slot.calls}
    assert [len(tree) for tree in trees.values()] == [2, 2]  # an init and a worker each
    assert len(set.union(*trees.values())) == 4


async def test_forked_calls(short_tmp: Path) -> None:
    await scenario(short_tmp)


def test_forked_calls_of_an_ordinary_user_without_control_groups(short_tmp: Path) -> None:
    program = """
import asyncio, sys
from pathlib import Path
from tests.containment.test_forked_calls import scenario
asyncio.run(scenario(Path(sys.argv[1]), grouped=False))
"""
    done = run_as_user(program, short_tmp)
    assert done.returncode == 0, done.stderr[-3000:]
