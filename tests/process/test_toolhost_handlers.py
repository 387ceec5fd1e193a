"""What handlers do, in real jails: whatever it is, the caller gets exactly one structured result."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest

from goondan.schemas.bundle.launch import ExportSpec, Limits, SandboxSpec
from goondan.schemas.wire.errors import CODES, HELP_BASE
from goondan.toolhost.inside.worker import LOG_BURST, LOG_PER_S
from goondan.toolhost.jails.worker import Worker
from goondan.toolhost.serving.live import LiveSession
from goondan.toolhost.socket_end import SocketEnd
from tests.toolhost_fixture import POWERS, Bench, bench, error_of, make_tool, until

HANDLERS = """
import os, sys, time, threading
from goondan_tool import Pending, ToolError

def echo(ctx, input): return input
def boom(ctx, input): raise ValueError("no good")
def nameless(ctx, input): raise KeyError
def coded(ctx, input):
    raise ToolError("out of stock", code="E_SHOP", suggestion="Wait.", help_url="https://shop.test/stock")
def missing(ctx, input): return open("/nonexistent/file").read()
def unprintable(ctx, input):
    class Odd(Exception):
        def __str__(self): raise RuntimeError
    raise Odd
def numbered(ctx, input):
    error = RuntimeError("http")
    error.code = 404
    raise error
def leave(ctx, input): sys.exit(input.get("status"))
def die(ctx, input): os._exit(3)
def crash(ctx, input):
    os.write(2, b"about to fall\\n")
    os.kill(os.getpid(), 11)
def talk(ctx, input):
    print("hello"); print("two", "words", end=""); sys.stderr.write("oops\\n"); os.write(1, b"raw\\n")
    ctx.logger.debug("d"); ctx.logger.info("i", 1); ctx.logger.warn("w"); ctx.logger.error("e")
    return "said"
def garbage(ctx, input):
    os.write(3, bytes.fromhex(input["hex"]))
    time.sleep(5)
def forge(ctx, input):
    import goondan_tool.wire as wire
    for call_id in input["ids"]:
        body = wire.pack({"type": "result", "callId": call_id, "status": "ok", "output": "forged"})
        os.write(3, len(body).to_bytes(4, "little") + body)
    time.sleep(5)
def returned(ctx, input):
    loop = []; loop.append(loop)
    deep = 1
    for _ in range(100): deep = [deep]
    return {"bytes": b"x", "nan": float("nan"), "inf": {"a": [1, float("-inf")]}, "set": {1}, "key": {1: 2},
            "cycle": loop, "deep": deep, "object": object(), "function": echo}[input["what"]]
def shapes(ctx, input):
    from collections import OrderedDict, namedtuple
    from enum import Enum, IntEnum
    Point = namedtuple("Point", "x y")
    class Colour(str, Enum): RED = "red"
    class Level(IntEnum): HIGH = 3
    return {"tuple": (1, (2,)), "point": Point(1, 2), "ordered": OrderedDict(a=1), "colour": Colour.RED,
            "level": Level.HIGH, "big": 2**64, "small": -2**63 - 1, "edge": 2**64 - 1, "lone": "a\\ud800b",
            "pair": "\\ud83d\\udc4d", "none": None, "float": 1.5, "true": True}
def pend(ctx, input): return Pending("job-7")
def nap(ctx, input): time.sleep(input["s"]); return "rested"
def forever(ctx, input):
    while True: time.sleep(1)
def spin(ctx, input):
    while True: pass
def big(ctx, input): return "x" * input["bytes"]
def many(ctx, input): return [0] * input["count"]
def flood(ctx, input):
    for i in range(input["lines"]): print("line", i)
    return "flooded"
def context(ctx, input):
    return {"agent": ctx.agent_name, "key": ctx.instance_key, "turn": ctx.turn_id, "call": ctx.tool_call_id,
            "workdir": ctx.workdir, "cwd": os.getcwd(), "remaining": ctx.remaining_ms, "limit": ctx.output_limit,
            "public": sorted(name for name in dir(ctx) if not name.startswith("_"))}
def assign(ctx, input):
    refused = []
    for name in input["names"]:
        try: setattr(ctx, name, "x")
        except AttributeError: refused.append(name)
    return refused
def message(ctx, input):
    m = ctx.message
    if m is None: return None
    m.metadata["seen"] = m.metadata.get("seen", 0) + 1
    try: m.id = "other"
    except AttributeError: pass
    return {"id": m.id, "data": m.data, "metadata": m.metadata, "created": m.created_at, "source": m.source}
def report(ctx, input):
    for i in range(50): ctx.progress(i // 10, 5, f"step {i // 10}"); time.sleep(0.006)
    return "done"
def waits(ctx, input):
    while not ctx.cancelled: time.sleep(0.01)
    return "stopped"
def daemon(ctx, input):
    if os.fork() == 0:
        os.setpgid(0, 0)
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    os.wait()
    return "left"
def silent(ctx, input):
    import ctypes
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    if ctypes.CDLL(None).syscall(number, 0, 0, 0, 0, 0) == 0:  # clone: its end is no signal to anybody
        time.sleep(60)
        os._exit(0)
    return "left"
def fork(ctx, input):
    pid = os.fork()
    if pid == 0: return "from the child"
    os.waitpid(pid, 0)
    return "from the parent"
def hops(ctx, input):
    for _ in range(8):
        if os.fork() == 0:
            try:
                for _ in range(60):  # each is gone soon after it has begun the next one
                    if os.fork(): os._exit(0)
                time.sleep(60)
            finally:
                os._exit(0)
    return "left"
def alive(ctx, input):
    # On a busy machine what was killed, or exits by itself, has to wait for a processor to die.
    deadline = time.monotonic() + 10
    while True:
        time.sleep(0.05)
        found = []
        for n in filter(str.isdigit, os.listdir("/proc")):
            try:
                state = open(f"/proc/{n}/stat").read().rpartition(") ")[2][0]
            except OSError:  # it is reaped just now
                continue
            if state != "Z": found.append(int(n))
        if sorted(found) == input["left"] or time.monotonic() > deadline:
            return sorted(found)
def processes(ctx, input):
    time.sleep(0.05)
    return sorted(int(n) for n in os.listdir("/proc") if n.isdigit())
def thread(ctx, input):
    threading.Thread(target=lambda: (time.sleep(0.2), print("late")), daemon=True).start()
    return "started"
async def later(ctx, input):
    import asyncio
    print("in the loop")
    await asyncio.sleep(input.get("s", 0.01))
    return ctx.tool_call_id
async def alater(ctx, input): raise LookupError("async")
async def aexit(ctx, input): sys.exit(4)
async def never(ctx, input):
    import asyncio
    await asyncio.sleep(60)
def environment(ctx, input): return dict(os.environ)

handlers = {name: value for name, value in list(globals().items())
            if callable(value) and name not in ("Pending", "ToolError")}
"""
NAMES = [
    "echo", "boom", "nameless", "coded", "missing", "unprintable", "numbered", "leave", "die", "crash", "talk",
    "garbage", "forge", "returned", "shapes", "pend", "nap", "forever", "spin", "big", "many", "flood", "context",
    "assign", "message", "report", "waits", "daemon", "fork", "silent", "processes", "thread", "later", "alater",
    "aexit", "never", "environment",
]  # fmt: skip


def tool(folder: Path, **options: Any) -> Any:
    return make_tool(folder, HANDLERS, *NAMES, ExportSpec(name="unknown"), **options)


# --- errors and outputs


async def test_a_tool_may_be_called_like_a_module_of_python(short_tmp: Path, workdir: Path) -> None:
    """The worker has all that it needs before it loads a tool."""
    named = make_tool(short_tmp, "handlers = {'echo': lambda ctx, input: input}", "echo", name="t", file="select.py")
    async with bench(named) as made:
        for n in range(3):
            assert (await made.call("t__echo", {"n": n}, workdir=workdir))["output"] == {"n": n}
        assert len(made.workers) == 1, made.workers


@pytest.mark.requirement("ERROR-01", "ERROR-02", "ERROR-06", "ERROR-07", "RESULT-01", "RESULT-05")
async def test_an_exception_is_an_error_result(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        assert error_of(await made.call("t__boom", workdir=workdir)) == {
            "name": "ValueError",
            "message": "no good",
            "code": "E_TOOL",
            "suggestion": CODES["E_TOOL"],
            "helpUrl": HELP_BASE + "E_TOOL",
        }
        assert error_of(await made.call("t__coded", workdir=workdir)) == {
            "name": "ToolError",
            "message": "out of stock",
            "code": "E_SHOP",
            "suggestion": "Wait.",
            "helpUrl": "https://shop.test/stock",
        }
        assert error_of(await made.call("t__missing", workdir=workdir))["code"] == "ENOENT"
        assert error_of(await made.call("t__nameless", workdir=workdir))["message"] == "KeyError"
        assert error_of(await made.call("t__unprintable", workdir=workdir))["message"] == "Odd"
        assert error_of(await made.call("t__numbered", workdir=workdir))["code"] == "E_TOOL"
        assert error_of(await made.call("t__unknown", workdir=workdir))["code"] == "E_TOOL_NOT_FOUND"
        assert made.host.sessions.jail_count == 1
        assert any(line.level == "debug" and "in boom" in line.message for line in made.logs)


@pytest.mark.requirement("ERROR-03", "ERROR-05")
async def test_a_message_is_cut_to_the_tools_limit(short_tmp: Path, workdir: Path) -> None:
    source = "def fail(ctx, input): raise ValueError('한' * 50)\nhandlers = {'fail': fail}\n"
    async with bench(make_tool(short_tmp, source, "fail", error_message_limit=20)) as made:
        message = error_of(await made.call("t__fail", workdir=workdir))["message"]
        assert message == "한" * 5 + "... (truncated)"


@pytest.mark.requirement("HANDLER-07")
async def test_what_is_no_json_is_an_error(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        for what in ("bytes", "nan", "inf", "set", "key", "cycle", "deep", "object", "function"):
            error = error_of(await made.call("t__returned", {"what": what}, workdir=workdir))
            assert error["code"] == "E_TOOL_BAD_OUTPUT", what
            if what == "inf":
                assert error["message"] == "output['a'][1]: -inf is no JSON number"
        assert (await made.call("t__echo", {"a": 1}, workdir=workdir))["output"] == {"a": 1}
        assert len([news for news in made.workers if news.op == "start"]) == 1


@pytest.mark.requirement("HANDLER-01", "RESULT-02", "RESULT-03")
async def test_json_values_arrive_as_they_are(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        value = {"a": [1, -1, 2**63, -(2**63), 1.5, "한", None, True, {"": {}}]}
        assert (await made.call("t__echo", value, workdir=workdir))["output"] == value
        output = (await made.call("t__shapes", workdir=workdir))["output"]
        assert output == {
            "tuple": [1, [2]], "point": [1, 2], "ordered": {"a": 1}, "colour": "red", "level": 3, "big": 2.0**64,
            "small": -(2.0**63), "edge": 2**64 - 1, "lone": "a\ufffdb", "pair": "\U0001f44d", "none": None,
            "float": 1.5, "true": True,
        }  # fmt: skip
        assert await made.call("t__pend", workdir=workdir) == {"status": "pending", "handle": "t/job-7"}


# --- ends of all kinds


async def test_sys_exit_is_an_error_and_the_worker_lives_on(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        error = error_of(await made.call("t__leave", {"status": 3}, workdir=workdir))
        assert (error["name"], error["message"]) == ("SystemExit", "sys.exit(3) was called")
        assert error_of(await made.call("t__aexit", workdir=workdir))["message"] == "sys.exit(4) was called"
        assert (await made.call("t__echo", {}, workdir=workdir))["status"] == "ok"
        assert len([news for news in made.workers if news.op == "start"]) == 1


async def test_a_dead_worker_is_named_with_its_end(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        for export, cause in (
            ("die", "exited with status 3"),
            ("crash", "ended by SIGSEGV during the call; it said last: about"),
        ):
            error = error_of(await made.call(f"t__{export}", workdir=workdir))
            assert error["code"] == "E_TOOL_CRASHED"
            assert cause in error["message"]
            assert (await made.call("t__echo", {"next": 1}, workdir=workdir))["output"] == {"next": 1}
        _, waiter = made.start("t__forever", workdir=workdir)
        await made.call("t__echo", {}, workdir=workdir)
        pid = [news for news in made.workers if news.op == "start"][-1].pid
        assert b"boot.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        os.kill(pid, 9)
        error = error_of(await asyncio.wait_for(waiter, 20))
        assert error["code"] == "E_TOOL_CRASHED"
        assert "SIGKILL" in error["message"]
        assert (await made.call("t__echo", {}, workdir=workdir))["status"] == "ok"


#: What is no frame of a worker, and the code that ends its jail.
GARBAGE = {
    "ffffffff00": "E_TOOL_LIMIT",  # a frame of 4 GiB
    "0100000000": "E_TOOL_CRASHED",  # not a frame
    "05000000a4ffffffff": "E_TOOL_CRASHED",  # bad UTF-8
    "0a00000091919191919191919191": "E_TOOL_CRASHED",  # nothing but nesting
    "0100000081": "E_TOOL_CRASHED",  # ends too early
    "1f00000083a474797065a57265616479a870726f746f636f6c01a76578706f72747390": "E_TOOL_CRASHED",  # ready, once more
}


async def test_garbage_on_the_channel_ends_the_jail(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        for data, code in GARBAGE.items():
            sibling_id, sibling = made.start("t__nap", {"s": 60}, workdir=workdir)
            error = error_of(await made.call("t__garbage", {"hex": data}, workdir=workdir, within_s=20))
            assert error["code"] == code, data
            assert error_of(await asyncio.wait_for(sibling, 20))["code"] == code
            assert [call_id for call_id, _ in made.results].count(sibling_id) == 1
            assert (await made.call("t__echo", {}, workdir=workdir))["status"] == "ok"


async def test_results_for_other_calls_end_the_jail(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        error = error_of(await made.call("t__forge", {"ids": ["999"]}, workdir=workdir, within_s=20))
        assert "does not run" in error["message"]
        # the forger's own first result counts, its second one ends the jail
        result = await made.call("t__forge", {"ids": ["2", "2"]}, workdir=workdir, within_s=20)
        assert result == {"status": "ok", "output": "forged"}
        await until(lambda: made.host.sessions.jail_count == 0)
        assert (await made.call("t__echo", {}, workdir=workdir))["status"] == "ok"
        assert len([news for news in made.workers if news.op == "start"]) == 3


async def test_a_tool_that_cannot_be_loaded(short_tmp: Path, workdir: Path) -> None:
    sources = {
        "broken": "def f(:\n",
        "raises": "raise RuntimeError('at import')\n",
        "exits": "import sys; sys.exit(2)\n",
        "none": "x = 1\n",
        "list": "handlers = ['f']\n",
        "dies": "import os; os._exit(7)\n",
    }
    tools = [make_tool(short_tmp, source, "f", name=name) for name, source in sources.items()]
    async with bench(*tools) as made:
        errors = {name: error_of(await made.call(f"{name}__f", workdir=workdir)) for name in sources}
        assert {name: error["code"] for name, error in errors.items()} == {
            **dict.fromkeys(sources, "E_CONFIG_ENTRY"),
            "dies": "E_TOOL_CRASHED",
        }
        assert "SyntaxError" in errors["broken"]["message"]
        assert "RuntimeError: at import" in errors["raises"]["message"]
        assert "exposes no `handlers`" in errors["none"]["message"]
        assert "while the tool was being loaded" in errors["dies"]["message"]


# --- time, cancelling, siblings


async def test_a_deadline_ends_the_jail(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        await made.call("t__echo", {}, workdir=workdir)
        for export in ("forever", "spin"):
            began = made.loop.time()
            error = error_of(await made.call(f"t__{export}", workdir=workdir, deadline_ms=300))
            assert 0.29 <= made.loop.time() - began < 2
            assert error["code"] == "E_TOOL_TIMEOUT"
            assert "300 ms" in error["message"]
        await until(lambda: made.host.sessions.jail_count == 0)
        assert (await made.call("t__echo", {}, workdir=workdir))["status"] == "ok"


async def test_the_tools_own_wall_clock_limit_counts_too(short_tmp: Path, workdir: Path) -> None:
    limited = tool(short_tmp, sandbox=SandboxSpec(limits=Limits(wall_seconds=1)))
    async with bench(limited) as made:
        error = error_of(await made.call("t__forever", workdir=workdir, deadline_ms=None))
        assert error["code"] == "E_TOOL_TIMEOUT"
        assert "1000 ms" in error["message"]


async def test_siblings_of_a_call_out_of_time(short_tmp: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.toolhost.calls.machine.SIBLING_GRACE_S", 1.0)
    source = (
        "import os, time\n"
        "def nap(ctx, input): time.sleep(input['s']); return 'rested'\n"
        "def once(ctx, input):\n"
        "    if os.path.exists('ran'): return 'again'\n"
        "    open('ran', 'w').close(); time.sleep(30)\n"
        "handlers = {'nap': nap, 'safe': once}\n"
    )
    napping = make_tool(short_tmp, source, "nap", ExportSpec(name="safe", idempotent=True))
    async with bench(napping) as made:
        _, slow = made.start("t__nap", {"s": 30}, workdir=workdir)
        again_id, again = made.start("t__safe", {"s": 30}, workdir=workdir)
        await until((workdir / "ran").exists)
        _, quick = made.start("t__nap", {"s": 0.4}, workdir=workdir)
        error = error_of(await made.call("t__nap", {"s": 30}, workdir=workdir, deadline_ms=200))
        assert error["code"] == "E_TOOL_TIMEOUT"
        # new calls go to a fresh jail, without waiting for the old one
        assert (await made.call("t__nap", {"s": 0}, workdir=workdir))["status"] == "ok"
        assert made.host.sessions.jail_count == 2
        assert (await quick)["output"] == "rested"
        assert error_of(await slow)["code"] == "E_TOOL_OUTCOME_UNKNOWN"
        assert (await again)["output"] == "again"  # idempotent: it ran a second time
        assert [call for call, _ in made.results].count(again_id) == 1


async def test_cancelling(short_tmp: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.toolhost.calls.machine.CANCEL_GRACE_S", 0.3)
    other = short_tmp / "other"
    other.mkdir()
    async with bench(tool(short_tmp)) as made:
        # ctx.cancelled is looked at, a coroutine is cancelled, and the last handler does not look
        for name, place in (("waits", workdir), ("never", workdir), ("forever", other)):
            call_id, waiter = made.start(f"t__{name}", workdir=place, instance_key=place.name)
            await made.call("t__later", {}, workdir=place, instance_key=place.name)
            made.cancel(call_id)
            assert error_of(await waiter)["code"] == "E_CANCELLED"
        kept = made.workers[0].pid
        assert made.host.sessions.jail_count == 2
        # Who does not look is ended with its jail; the time of the others was over before that.
        await until(lambda: made.host.sessions.jail_count == 1)
        assert (await made.call("t__echo", {}, workdir=workdir, instance_key=workdir.name))["status"] == "ok"
        assert [news.pid for news in made.workers if Path(f"/proc/{news.pid}").exists()] == [kept]
        made.cancel("turn-1/unknown")
        assert len(made.results) == len({call for call, _ in made.results})


# --- calls beside each other


@pytest.mark.requirement("HANDLER-02")
async def test_async_handlers_run_beside_each_other(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        await made.call("t__later", {}, workdir=workdir)  # asyncio is imported now
        began = made.loop.time()
        results = await asyncio.gather(*(made.call("t__later", {"s": 0.4}, workdir=workdir) for _ in range(10)))
        assert made.loop.time() - began < 2
        assert [result["output"] for result in results] == [f"call-{n}" for n in range(2, 12)]
        assert error_of(await made.call("t__alater", workdir=workdir))["name"] == "LookupError"
        assert {line.call_id for line in made.logs if line.message == "in the loop"} == {
            f"turn-1/call-{n}" for n in range(1, 12)
        }


async def test_a_slow_handler_holds_up_nothing(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        await made.call("t__echo", {}, workdir=workdir)
        waiters = [made.start("t__nap", {"s": 0.5}, workdir=workdir)[1] for _ in range(8)]
        began = made.loop.time()
        await asyncio.gather(*(made.call("t__echo", {"n": n}, workdir=workdir) for n in range(20)))
        assert made.loop.time() - began < 0.4
        await asyncio.gather(*waiters)
        assert made.loop.time() - began < 2
        assert made.host.sessions.jail_count == 1


async def test_more_slow_calls_than_threads(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        await asyncio.gather(*(made.call("t__nap", {"s": 0.01}, workdir=workdir) for _ in range(200)))
        assert {result["output"] for _, result in made.results} == {"rested"}
        assert len(made.results) == 200


# --- what is left


async def test_processes_left_behind_end_with_the_call(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        assert (await made.call("t__daemon", workdir=workdir))["output"] == "left"
        assert (await made.call("t__processes", workdir=workdir))["output"] == [1, 2]
        assert (await made.call("t__fork", workdir=workdir))["output"] == "from the parent"
        assert (await made.call("t__processes", workdir=workdir))["output"] == [1, 2]
        assert (await made.call("t__silent", workdir=workdir))["output"] == "left"
        await made.call("t__nap", {"s": 0.1}, workdir=workdir)  # dead by then, and the worker takes leave of it
        assert (await made.call("t__processes", workdir=workdir))["output"] == [1, 2]
        assert len(made.results) == 7


async def test_background_exports_may_leave_processes(short_tmp: Path, workdir: Path) -> None:
    exports = (ExportSpec(name="daemon", background=True), "processes", "fork", "nap", "hops", "alive")
    # What is dead counts until it is reaped, and a busy machine is slow to do that.
    many = SandboxSpec(limits=Limits(processes=2000))
    marked = make_tool(short_tmp, HANDLERS, *exports, sandbox=many)
    async with bench(marked) as made:
        await made.call("t__daemon", workdir=workdir)
        left = (await made.call("t__processes", workdir=workdir))["output"]
        assert len(left) == 3
        await made.call("t__fork", workdir=workdir)
        assert (await made.call("t__processes", workdir=workdir))["output"] == left
        for _ in range(3):  # what runs ahead of the one that kills is found
            assert await made.call("t__hops", workdir=workdir) == {"status": "ok", "output": "left"}
            assert await made.call("t__alive", {"left": left}, workdir=workdir) == {"status": "ok", "output": left}


async def test_a_look_for_what_is_left_that_fails_loses_no_answer(short_tmp: Path, workdir: Path) -> None:
    """It needs a descriptor where something may stay."""
    source = HANDLERS + (
        "\nopened = []\n"
        "def opens_all(ctx, input):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60); os._exit(0)\n"
        "    try:\n"
        "        while True: opened.append(os.open('/dev/null', os.O_RDONLY))\n"
        "    except OSError as error: return error.strerror\n"
        "def closes_all(ctx, input):\n"
        "    while opened: os.close(opened.pop())\n"
        "handlers.update(opens_all=opens_all, closes_all=closes_all)\n"
    )
    exports = (ExportSpec(name="daemon", background=True), "processes", "alive", "opens_all", "closes_all")
    async with bench(make_tool(short_tmp, source, *exports)) as made:
        await made.call("t__daemon", workdir=workdir)
        left = (await made.call("t__processes", workdir=workdir))["output"]
        assert (await made.call("t__opens_all", workdir=workdir))["output"] == "Too many open files"
        assert (await made.call("t__closes_all", workdir=workdir))["status"] == "ok"
        assert (await made.call("t__alive", {"left": left}, workdir=workdir))["output"] == left


async def test_what_was_printed_before_the_call_is_not_why_its_jail_ended(short_tmp: Path, workdir: Path) -> None:
    source = HANDLERS + (
        "\ndef says(ctx, input):\n"
        "    os.write(2, input['text'].encode())\n"
        "    if input.get('dies'): os._exit(3)\n"
        "handlers['says'] = says\n"
    )
    async with bench(make_tool(short_tmp, source, "says")) as made:
        await made.call("t__says", {"text": "FATAL ERROR: old\n"}, workdir=workdir)
        await until(lambda: "FATAL ERROR: old" in str(made.logs))
        for text, ending in (("", "during the call"), ("panic(mine)\nreason\n", "it said last: reason")):
            result = await made.call("t__says", {"text": text, "dies": True}, workdir=workdir)
            assert result["error"]["message"].endswith(ending), result


async def test_a_worker_that_does_not_sweep_is_swept_from_outside(short_tmp: Path, workdir: Path) -> None:
    source = HANDLERS + (
        "\ndef disarm(ctx, input):\n"
        "    ctx._call.worker._orphans.enabled = False\n"
        "    if os.fork() == 0:\n"
        "        os.setpgid(0, 0); time.sleep(60); os._exit(0)\n"
        "    return 'left'\n"
        "handlers['disarm'] = disarm\n"
    )
    async with bench(make_tool(short_tmp, source, "disarm", "processes", "nap")) as made:
        await made.call("t__disarm", workdir=workdir)
        assert len((await made.call("t__processes", workdir=workdir))["output"]) == 3
        assert states_below(made) == ["S"]
        await until(lambda: states_below(made) in ([], ["Z"]))  # looked for once a second while idle
        await made.call("t__nap", {"s": 0}, workdir=workdir)
        pids = (await made.call("t__processes", workdir=workdir))["output"]
        assert len(pids) == 2 + len(states_below(made)), "a zombie that is not reaped runs nothing"


def states_below(made: Bench) -> list[str]:
    """The states of the worker's children."""
    worker = made.workers[0].pid
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in children]


async def test_nothing_is_left_of_many_jails(short_tmp: Path, workdir: Path) -> None:
    def mounts() -> int:
        return len(Path("/proc/self/mountinfo").read_text().splitlines())

    served = tool(short_tmp)
    POWERS.launcher.start()  # one for all tests of this process
    before = (mounts(), sorted(os.listdir(short_tmp)), len(os.listdir("/proc/self/fd")))
    async with bench(served, max_jails=8) as made:
        calls = [
            made.call("t__daemon" if n % 2 else "t__echo", {}, workdir=workdir, instance_key=f"k{n}") for n in range(24)
        ]
        assert {result["status"] for result in await asyncio.gather(*calls)} == {"ok"}
        assert made.host.sessions.jail_count <= 8
        pids = {news.pid for news in made.workers}
        assert len(pids) == 24
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert (mounts(), sorted(os.listdir(short_tmp)), len(os.listdir("/proc/self/fd"))) == before
    assert os.listdir(workdir) == []


async def test_an_ended_jail_needs_no_collection(short_tmp: Path, workdir: Path) -> None:
    """A tool host collects seldom: objects of jails that keep each other would pile up for hours."""

    def kept() -> list[str]:
        return [type(each).__name__ for each in gc.get_objects() if isinstance(each, Worker | LiveSession | SocketEnd)]

    gc.collect()
    gc.disable()
    try:
        before = kept()
        forked = tool(short_tmp, name="forked", sandbox=SandboxSpec(isolation="call"))
        async with bench(tool(short_tmp), forked) as made:
            for name in ("t", "forked"):
                await made.call(f"{name}__echo", {}, workdir=workdir)
            assert {"Jail", "CallSandbox", "LiveSession"} <= {*kept()}
        await asyncio.sleep(0)
        assert kept() == before
    finally:
        gc.enable()


# --- limits


async def test_an_output_that_is_too_large(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        for arguments, export in (({"bytes": 50 << 20}, "big"), ({"bytes": 4 << 20}, "big")):
            error = error_of(await made.call(f"t__{export}", arguments, workdir=workdir))
            assert error["code"] == "E_TOOL_LIMIT"
            assert f"limit {4 << 20} (outputMb)" in error["message"]
        assert (await made.call("t__big", {"bytes": 900_000}, workdir=workdir))["status"] == "ok"
        error = error_of(await made.call("t__many", {"count": 250_000}, workdir=workdir))
        assert error["code"] == "E_TOOL_LIMIT"
        assert "more than 200000 values" in error["message"]
        assert (await made.call("t__echo", {}, workdir=workdir))["status"] == "ok"


async def test_prints_are_log_lines_of_their_call(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        assert (await made.call("t__talk", workdir=workdir, call_id="turn-1/x"))["output"] == "said"
        await until(lambda: any(line.message == "raw" for line in made.logs))
        lines = [(line.level, line.message) for line in made.logs if line.call_id == "turn-1/x"]
        assert lines[:6] == [
            ("info", "hello"), ("warn", "oops"), ("debug", "d"), ("info", "i 1"), ("warn", "w"), ("error", "e"),
        ]  # fmt: skip
        assert {line.agent for line in made.logs if line.call_id} == {"coder"}


async def test_a_flood_of_prints_is_cut_and_harmless(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        began = time.monotonic()
        assert (await made.call("t__flood", {"lines": 100_000}, workdir=workdir))["output"] == "flooded"
        # A burst, then so many a second, each with a line about those that were dropped before it.
        assert len(made.logs) <= LOG_BURST + 2 * LOG_PER_S * (time.monotonic() - began) + 2
        await asyncio.sleep(0.05)
        await made.call("t__talk", workdir=workdir)
        assert any("log lines were dropped" in line.message for line in made.logs)


async def test_progress_is_passed_on(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        call_id, waiter = made.start("t__report", workdir=workdir)
        started = time.monotonic()
        assert (await waiter)["output"] == "done"
        assert 2 <= len(made.progress) <= 1 + (time.monotonic() - started) * 20
        assert made.progress[0] == (call_id, {"done": 0.0, "total": 5.0, "message": "step 0"})


# --- context


@pytest.mark.requirement(
    "CONTEXT-01", "CONTEXT-02", "CONTEXT-04", "CONTEXT-05", "CONTEXT-06", "CONTEXT-07", "CONTEXT-08"
)
async def test_the_context(short_tmp: Path, workdir: Path) -> None:
    async with bench(tool(short_tmp)) as made:
        output = (await made.call("t__context", workdir=workdir, agent="writer", instance_key="키", call_id="t9/c7"))[
            "output"
        ]
        public = output.pop("public")
        assert 0 < output.pop("remaining") <= 20_000
        assert output == {
            "agent": "writer", "key": "키", "turn": "turn-1", "call": "c7", "workdir": str(workdir),
            "cwd": str(workdir), "limit": 4 << 20,
        }  # fmt: skip
        assert not {"swarm_bundle", "swarmBundle", "oauth", "instance", "swarm", "agent"} & set(public)
        names = ["agent_name", "instance_key", "turn_id", "tool_call_id", "message", "workdir", "logger", "other"]
        assert (await made.call("t__assign", {"names": names}, workdir=workdir))["output"] == names


@pytest.mark.requirement("CONTEXT-03", "CONTEXT-10")
async def test_the_message_is_sent_once_and_each_call_has_its_own_copy(short_tmp: Path, workdir: Path) -> None:
    message = {
        "id": "m1", "data": {"role": "assistant", "content": []}, "metadata": {"a": 1},
        "createdAt": "2026-01-01T00:00:00Z", "source": {"type": "assistant"},
    }  # fmt: skip
    seen = {
        "id": "m1", "data": message["data"], "metadata": {"a": 1, "seen": 1}, "created": message["createdAt"],
        "source": {"type": "assistant"},
    }  # fmt: skip
    async with bench(tool(short_tmp)) as made:
        first = await made.call("t__message", workdir=workdir, message_id="m1", message=message)
        assert first["output"] == seen
        for _ in range(3):
            assert (await made.call("t__message", workdir=workdir, message_id="m1"))["output"] == seen
        # other instances and agents do not see it by its id
        assert (await made.call("t__message", workdir=workdir, message_id="m1", instance_key="k2"))["output"] is None
        assert (await made.call("t__message", workdir=workdir))["output"] is None
        for number in range(20):  # more than a host keeps of one instance
            own = {**message, "id": f"n{number}"}
            result = await made.call("t__message", workdir=workdir, message_id=f"n{number}", message=own)
            assert result["output"]["id"] == f"n{number}"
        assert (await made.call("t__message", workdir=workdir, message_id="n19"))["output"]["id"] == "n19"
        assert (await made.call("t__message", workdir=workdir, message_id="m1"))["output"] is None


async def test_granted_variables_join_the_environment(short_tmp: Path, workdir: Path) -> None:
    granted = tool(short_tmp, sandbox=SandboxSpec(env=["SHOP_KEY", "ABSENT"]))
    async with bench(granted, environment={"SHOP_KEY": "s3cret", "OTHER": "x"}) as made:
        output = (await made.call("t__environment", workdir=workdir))["output"]
        assert output.pop("SHOP_KEY") == "s3cret"
        assert set(output) - {"PWD"} == {"PATH", "HOME", "TMPDIR", "LANG"}
        (slot,) = made.host.sessions.pool.sessions()
        # They come in a frame: whoever can read a process's arguments or first environment finds none of them.
        for pid in (made.live_of(slot).jail.pid, *made.live_of(slot).jail.processes()):
            for name in ("cmdline", "environ"):
                assert b"s3cret" not in Path(f"/proc/{pid}/{name}").read_bytes()
