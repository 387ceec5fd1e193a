"""The JavaScript worker under Node and Bun, by the protocol of schemas/WORKER.md; jails are the host's matter."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from goondan.kernel.cli import execute
from tests.javascript_runtimes import RUNTIMES, runtime
from tests.javascript_worker import WORKER, Worker

TOOL: Final = Path(__file__).parent / "javascript_tool.ts"
#: What a tool may do to the language: one line, one tool.
CHANGES: Final = (Path(__file__).parent / "changed_language.js").read_text(encoding="utf-8").splitlines()

pytestmark = pytest.mark.parametrize("name", RUNTIMES)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Worker]]:
    """One worker of each runtime with the tool of these tests, which every test leaves working."""
    made: dict[str, Worker] = {}

    def get(name: str) -> Worker:
        if name not in made:
            made[name] = Worker(name, tmp_path_factory.mktemp(name))
            assert made[name].load(TOOL)["type"] == "ready"
        made[name].logs.clear()
        return made[name]

    yield get
    for worker in made.values():
        worker.close()


@pytest.fixture
def worker(workers: Callable[[str], Worker], name: str) -> Worker:
    return workers(name)


@pytest.fixture
def fresh(name: str, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Makes workers of a test's own, with a tool that it writes; `frame` of one is what its loading came to."""
    made = []

    def get(source: str, file: str = "tool.mjs", **init: Any) -> Worker:
        (tmp_path / file).write_text(source, encoding="utf-8")
        worker = Worker(name, tmp_path)
        made.append(worker)
        worker.loaded = worker.load(tmp_path / file, **init)  # type: ignore[attr-defined]
        return worker

    yield get
    for worker in made:
        worker.close()


# --- values: the rules of WORKER.md section 12

VALUES: Final[list[tuple[str, Any]]] = [
    ("undefined", None),
    ("null", None),
    ("({a: undefined, b: 1})", {"b": 1}),
    ("[undefined, , 1]", [None, None, 1]),
    ("({})", {}),
    (
        "Object.fromEntries(Array.from({length: 20}, (_, i) => ['k' + i, i % 2 ? i : undefined]))",
        {f"k{i}": i for i in range(1, 20, 2)},
    ),
    (
        "[0, -0, 127, 128, -32, -33, 65536, 4294967296, -4294967297, 1.5]",
        [0, 0, 127, 128, -32, -33, 65536, 4294967296, -4294967297, 1.5],
    ),
    ("[2**53 - 1, -(2**53 - 1)]", [2**53 - 1, -(2**53 - 1)]),
    ("[1n, -1n, 2n**63n, 2n**64n - 1n, -(2n**63n)]", [1, -1, 2**63, 2**64 - 1, -(2**63)]),
    ("2n**64n", float(2**64)),
    ("2**60", float(2**60)),
    ("new Date(0)", "1970-01-01T00:00:00.000Z"),
    ("new URL('http://a/b')", "http://a/b"),
    ("({toJSON: () => ({x: 1})})", {"x": 1}),
    ("new (class { toJSON() { return [1] } })()", [1]),
    ("new (class extends Map { toJSON() { return [...this] } })([['a', 1]])", [["a", 1]]),
    ("new (class { constructor() { this.a = 1 } get b() { return 2 } })()", {"a": 1}),
    ("Object.assign(Object.create(null), {a: 1})", {"a": 1}),
    ("[new Number(1), new String('a'), new Boolean(true), Object(2n)]", [1, "a", True, 2]),
    ("({[Symbol('s')]: 1, b: 2})", {"b": 2}),
    ("'\\ud800a\\udc00'", "�a�"),
    ("'\\ud83d\\ude00'", "😀"),
    ("({__proto__: {a: 1}, ['__proto__']: 2})", {"__proto__": 2}),
    (
        "['a'.repeat(31), 'é'.repeat(15), 'é'.repeat(16), '한'.repeat(100), 'x'.repeat(70000)]",
        ["a" * 31, "é" * 15, "é" * 16, "한" * 100, "x" * 70000],
    ),
    ("Array.from({length: 70000}, (_, i) => i % 7)", [i % 7 for i in range(70000)]),
    ("({then: 1})", {"then": 1}),
    ("({then: (ok) => ok(5)})", 5),
]

REFUSED: Final[list[tuple[str, str]]] = [
    ("NaN", "output: NaN is no JSON number"),
    ("({a: [1, Infinity]})", "output['a'][1]: Infinity is no JSON number"),
    ("2n**2000n", "output: an integer is larger than any double"),
    ("() => 1", "output: a function is no JSON value"),
    ("({a: Symbol('s')})", "output['a']: a symbol is no JSON value"),
    ("new Date(NaN)", "output: an invalid Date is no JSON value"),
    ("Buffer.from('a')", "output: binary data is no JSON value; say it as text, as buffer.toString('base64')"),
    ("new Uint8Array(3)", "output: binary data is no JSON value; say it as text, as buffer.toString('base64')"),
    ("new ArrayBuffer(3)", "output: binary data is no JSON value; say it as text, as buffer.toString('base64')"),
    ("new Map([['a', 1]])", "output: a Map is no JSON value; return Object.fromEntries(map)"),
    ("({s: new Set([1])})", "output['s']: a Set is no JSON value; return [...set]"),
    ("[Promise.resolve(1)]", "output[0]: a Promise is no JSON value; await it"),
    ("[new Error('x')]", "output[0]: an Error is no JSON value; throw it, or return its message"),
    ("/x/", "output: a RegExp or a weak collection is no JSON value"),
    ("Object(Symbol('s'))", "output: a symbol is no JSON value"),
]


@pytest.mark.parametrize(("expression", "expected"), VALUES, ids=[value[0][:40] for value in VALUES])
def test_what_is_json(worker: Worker, expression: str, expected: Any) -> None:
    value = worker.value("evaluate", {"expression": expression})
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(("expression", "message"), REFUSED, ids=[value[0] for value in REFUSED])
def test_what_is_no_json(worker: Worker, expression: str, message: str) -> None:
    error = worker.error("evaluate", {"expression": expression})
    assert error == {"name": "TypeError", "message": message, "code": "E_TOOL_BAD_OUTPUT"}


def test_cycles_and_depth(worker: Worker) -> None:
    error = worker.error("evaluate", {"expression": "(() => { const a = {}; a.a = a; return a })()"})
    assert error["code"] == "E_TOOL_BAD_OUTPUT"
    assert error["message"].endswith(": nested deeper than 60, or contains itself")
    deep = "Array.from({length: %d}).reduce((inner) => [inner], 1)"
    value = worker.value("evaluate", {"expression": deep % 60})
    for _ in range(60):
        (value,) = value
    assert worker.error("evaluate", {"expression": deep % 61})["code"] == "E_TOOL_BAD_OUTPUT"


def test_what_comes_in(worker: Worker) -> None:
    sent = {
        "a": [1, -1, 300, -300, 70000, -70000, 2**31, 2**53 - 1, 1.5, True, None],
        "text": "é😀" * 100,
        "__proto__": {"x": 1},
        "toString": 1,
    }
    assert worker.value("echo", sent) == sent
    large = {"big": 2**64 - 1, "least": -(2**63), "beyond": 2**53 + 1}
    assert worker.value("echo", large) == large
    assert worker.value("types", large) == {"big": "bigint", "least": "bigint", "beyond": "bigint"}
    assert worker.value("polluted") is False


def test_output_limit(fresh: Callable[..., Worker]) -> None:
    source = """export const handlers = {
        text: (c, {n}) => 'x'.repeat(n), list: (c, {n}) => Array(n).fill('y'.repeat(1000)), ok: () => 1}"""
    worker = fresh(source, outputLimit=100_000)
    assert worker.value("text", {"n": 99_995}) == "x" * 99_995
    for export, n, size in (
        ("text", 99_996, 100_001),
        ("text", 5 << 20, (5 << 20) + 5),
        ("list", 5000, 5000 * 1003 + 3),
    ):
        error = worker.error(export, {"n": n})
        assert error == {
            "name": "OutputTooLarge",
            "message": f"the output has {size} bytes, limit 100000 (outputMb)",
            "code": "E_TOOL_LIMIT",
        }
    assert worker.value("ok") == 1


# --- what a handler gets


def test_context(worker: Worker) -> None:
    began = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    message = {
        "id": "m1",
        "data": {"role": "assistant"},
        "metadata": {"a": 1},
        "createdAt": began.isoformat(),
        "source": {"type": "assistant"},
    }
    worker.send({"type": "message", "messageId": "m1", "message": message})
    for _ in range(2):  # each call has a copy of its own
        seen = worker.value("context", messageId="m1", deadlineMs=60_000)
        assert 50_000 < seen.pop("remainingMs") <= 60_000
        assert seen == {
            "agentName": "coder", "instanceKey": "u1", "turnId": "t-1", "toolCallId": "c-1", "workdir": "/tmp",
            "message": {**message, "createdAt": "2026-01-02T03:04:05.000Z"}, "metadata": {"a": 2},
            "outputLimit": 1 << 20, "runtime": None, "aborted": False, "frozen": True, "date": True,
        }  # fmt: skip
    assert worker.value("context")["message"] is None
    assert worker.value("context")["remainingMs"] is None


def test_eight_messages_are_kept(worker: Worker) -> None:
    for i in range(10):
        worker.send(
            {"type": "message", "messageId": f"n{i}", "message": {"id": f"n{i}", "createdAt": "2026-01-02T03:04:05Z"}}
        )
    assert worker.value("context", messageId="n2")["message"]["id"] == "n2"
    assert worker.value("context", messageId="n1")["message"] is None


def test_log_lines(worker: Worker) -> None:
    worker.value("prints")
    levels = [
        ("info", "log 1 { a: 2 }"),
        ("debug", "d"),
        ("warn", "w"),
        ("error", "e"),
        ("info", "logger"),
        ("info", "raw "),
        ("info", "one"),
        ("info", "two"),
        ("warn", "to stderr"),
    ]
    assert [(log["level"], log["message"]) for log in worker.logs] == levels
    assert {log["callId"] for log in worker.logs} == {str(worker._calls)}


def test_two_calls_log_under_their_names(worker: Worker) -> None:
    one, two = worker.begin("logs_twice", {"word": "a"}), worker.begin("logs_twice", {"word": "b"})
    assert {worker.next("result")["callId"], worker.next("result")["callId"]} == {one, two}
    assert sorted((log["callId"], log["message"]) for log in worker.logs) == sorted(
        [(one, "a"), (one, "a"), (two, "b"), (two, "b")]
    )


def test_a_writer_waits_for_who_reads_its_output(fresh: Callable[..., Worker]) -> None:
    worker = fresh("""import fs from 'node:fs'
        import process from 'node:process'
        const flags = (fd) => /flags:\\s*(\\d+)/.exec(fs.readFileSync(`/proc/self/fdinfo/${fd}`, 'latin1'))[1]
        export const handlers = { flags: () => [1, 2].map(flags), streams: () => typeof process.stdout.write }""")
    assert worker.value("streams") == "function"
    assert [int(flags, 8) & os.O_NONBLOCK for flags in worker.value("flags")] == [0, 0]


def test_budget_of_lines(fresh: Callable[..., Worker]) -> None:
    worker = fresh("""export const handlers = {
        flood() { for (let i = 0; i < 5000; i++) console.log('x'.repeat(9000)) }, one: () => console.log('last')}""")
    worker.value("flood")
    assert 1000 <= len(worker.logs) <= 1300
    assert {len(log["message"]) for log in worker.logs if "dropped" not in log["message"]} == {8193}
    worker.logs.clear()
    while not worker.logged():  # 200 lines a second refill
        worker.value("one")
    assert worker.logs[-1]["message"] == "last"
    assert worker.logs[-2]["message"].endswith(" log lines were dropped")


def test_progress(worker: Worker) -> None:
    call = worker.begin("progress")
    frames = [worker.frame() for _ in range(3)]
    assert [(f["type"], f.get("done"), f.get("total"), f.get("message")) for f in frames] == [
        ("progress", 0, 3, "half"), ("progress", 3, 3, None), ("result", None, None, None),
    ]  # fmt: skip
    assert frames[2]["callId"] == call
    assert worker.error("progress_of_text")["name"] == "TypeError"


# --- errors


def test_errors(worker: Worker) -> None:
    assert worker.error("fails", {"how": "tool"}) == {
        "name": "ToolError", "message": "we do not sell gold", "code": "E_SHOP_GOLD", "suggestion": "Ask for tea.",
        "helpUrl": "https://shop.example",
    }  # fmt: skip
    assert worker.logs[-1]["message"].startswith(f"ToolError at {TOOL}:")
    for how, expected in (
        ("string", {"name": "Error", "message": "only a text"}),
        ("undefined", {"name": "Error", "message": "undefined was thrown"}),
        ("null", {"name": "Error", "message": "null was thrown"}),
        ("plain", {"name": "Error", "message": "plain", "code": "E_PLAIN"}),
        ("class", {"name": "OwnError", "message": "own"}),
        ("empty", {"name": "RangeError", "message": "RangeError"}),
        ("hostile", {"name": "Error", "message": "{}"}),
    ):
        assert worker.error("fails", {"how": how}) == expected, how
        assert worker.error("fails_later", {"how": how}) == expected, how
    error = worker.error("fails", {"how": "missing"})
    assert (error["code"], "no-such-file" in error["message"]) == ("ENOENT", True)
    assert len(worker.error("fails", {"how": "long"})["message"]) == 16384


def test_no_such_handler(worker: Worker) -> None:
    for export in ("price", "constructor", "__proto__", "toString"):
        error = worker.error(export)
        assert (error["code"], error["name"]) == ("E_TOOL_NOT_FOUND", "LookupError")
        assert error["message"].startswith(f"the tool has no handler '{export}'; it has: ")


@pytest.mark.parametrize("how", ["timer", "promise", "microtask"])
def test_what_nobody_waits_for(name: str, tmp_path: Path, how: str) -> None:
    """Exceptions of timers and rejections are the error of their call."""
    worker = Worker(name, tmp_path)
    worker.load(TOOL)
    assert worker.error("strays", {"how": how}) == {"name": "Error", "message": how}
    assert worker.value("echo", {"a": 1}) == {"a": 1}
    worker.close()


def test_what_nobody_waits_for_after_its_call(worker: Worker) -> None:
    """It is a line of the log, and no error of another call."""
    assert worker.value("strays_after") == 1
    other = worker.begin("waits", {"ms": 100})
    assert worker.result(other)["output"] == "waited"
    assert [level for level, _ in worker.logged()] == ["error"]
    assert worker.logged()[0][1].startswith(f"uncaught Error: after at {TOOL}:")


def test_process_exit(worker: Worker) -> None:
    """It ends the call, also where what it throws is caught, and neither the worker nor the other call."""
    other = worker.begin("waits", {"ms": 300})
    for how in ("plain", "caught", "timer", "named"):
        expected = {"name": "ExitError", "message": "process.exit(3) was called", "code": "E_TOOL"}
        assert worker.error("exits", {"how": how}) == expected, how
    assert worker.result(other) == {"status": "ok", "output": "waited"}


def test_a_worker_that_really_ends(fresh: Callable[..., Worker]) -> None:
    worker = fresh(
        "export const handlers = {end() { process.reallyExit(7) }, kill() { process.kill(process.pid, 'SIGKILL') }}"
    )
    worker.begin("kill")
    with pytest.raises(EOFError):
        worker.next("result")
    assert worker.ended() == -9


# --- calls beside each other, cancelling, pending


def test_calls_interleave(worker: Worker) -> None:
    never = worker.begin("never")
    slow = worker.begin("waits", {"ms": 100})
    assert worker.value("echo", {"a": 1}) == {"a": 1}
    assert worker.result(slow)["output"] == "waited"
    worker.send({"type": "cancel", "callId": never})
    assert worker.result(never)["error"] == {"name": "Error", "message": "told: AbortError"}


def test_a_call_that_is_cancelled_before_it_looks(worker: Worker) -> None:
    call = worker.begin("looks_late")
    worker.send({"type": "cancel", "callId": call}, {"type": "cancel", "callId": "no such call"})
    worker.value("release")
    assert worker.result(call)["output"] is True


def test_calls_and_their_cancelling_may_come_before_the_module_is_loaded(name: str, tmp_path: Path) -> None:
    (tmp_path / "slow.mjs").write_text(
        "await new Promise((go) => setTimeout(go, 100));\nexport const handlers = {a: (ctx) => ctx.signal.aborted}"
    )
    worker = Worker(name, tmp_path)
    worker.init(tmp_path / "slow.mjs")
    one, two = worker.begin("a"), worker.begin("a")
    worker.send({"type": "cancel", "callId": two})
    assert worker.next("ready")["exports"] == ["a"]
    assert [worker.result(call)["output"] for call in (one, two)] == [False, True]
    worker.close()


@pytest.mark.parametrize(
    ("how", "last"), [("promise", 5), ("function", 6), ("throws", "E_LATE"), ("nested", "E_TOOL_BAD_OUTPUT")]
)
def test_pending(worker: Worker, how: str, last: Any) -> None:
    call = worker.begin("pend", {"how": how})
    assert worker.result(call) == {"status": "pending", "handle": "h-1", "continues": True}
    assert worker.value("echo", {"a": 1}) == {"a": 1}
    worker.value("release")
    result = worker.result(call)
    assert result.get("output", result.get("error", {}).get("code")) == last


def test_pending_that_goes_on_elsewhere(worker: Worker) -> None:
    assert worker.call("pend", {"how": "elsewhere"}) == {"status": "pending", "handle": "h-1", "continues": False}
    for handle in ("", "a\nb", "x" * 1025):
        assert worker.error("pend_with", {"handle": handle})["name"] == "TypeError"


# --- questions to the bus

ASKS: Final = """
export const handlers = {
  async request(ctx) {
    return ctx.runtime.request("helper", {a: 1}, {timeoutMs: 5.5, metadata: {m: 1}, instanceKey: "k"});
  },
  async all({runtime}) {
    return Promise.all([runtime.request("h", null, {async: true}), runtime.send("h", "x", {eventType: "e"}),
      runtime.spawn("h", {cwd: "."}), runtime.list({includeAll: true}), runtime.catalog()]);
  },
  bad: (ctx, {how}) => ({
    target: () => ctx.runtime.send(5, "x"), metadata: () => ctx.runtime.send("h", "x", {metadata: [1]}),
    nan: () => ctx.runtime.request("h", "x", {timeoutMs: NaN}),
    value: () => ctx.runtime.send("h", {a: [1n, new Map()]}),
    large: () => ctx.runtime.send("h", "x".repeat(300000)),
  })[how](),
  late(ctx) { setTimeout(() => ctx.runtime.send("h", "x").catch((e) => console.log(e.name, e.code)), 10); return 1 },
  none: (ctx) => ctx.runtime,
}
"""


def test_questions(fresh: Callable[..., Worker]) -> None:
    worker = fresh(ASKS, permissions=["agents"])
    call = worker.begin("request")
    ask = worker.next("ask")
    number = ask.pop("askId")
    assert ask == {
        "type": "ask", "callId": call, "op": "request", "target": "helper", "input": {"a": 1}, "timeoutMs": 5,
        "metadata": {"m": 1}, "instanceKey": "k",
    }  # fmt: skip
    worker.send({"type": "answer", "callId": call, "askId": number + 100, "value": 1})  # nobody waits for it
    worker.send({"type": "answer", "callId": call, "askId": number, "value": {"response": "hi"}})
    assert worker.result(call)["output"] == {"response": "hi"}

    call = worker.begin("all")
    asks = [worker.next("ask") for _ in range(5)]
    assert [{k: v for k, v in ask.items() if k not in ("type", "callId", "askId")} for ask in asks] == [
        {"op": "request", "target": "h", "input": None, "async": True},
        {"op": "send", "target": "h", "input": "x", "eventType": "e"},
        {"op": "spawn", "target": "h", "cwd": "."},
        {"op": "list", "includeAll": True},
        {"op": "catalog"},
    ]
    error = {"name": "AgentError", "message": "no", "code": "E_FORBIDDEN", "suggestion": "s"}
    worker.send(*({"type": "answer", "callId": call, "askId": ask["askId"], "error": error} for ask in asks))
    assert worker.result(call)["error"] == error


def test_questions_that_cannot_be_asked(fresh: Callable[..., Worker]) -> None:
    worker = fresh(ASKS, permissions=["agents"])
    for how, message in (
        ("target", "ctx.runtime: target is no string"),
        ("metadata", "ctx.runtime: metadata is no object"),
        ("nan", "ctx.runtime: timeoutMs is no number"),
        ("value", "ctx.runtime: input['a'][1]: a Map is no JSON value; return Object.fromEntries(map)"),
    ):
        assert worker.error("bad", {"how": how}) == {"name": "TypeError", "message": message}
    error = worker.error("bad", {"how": "large"})
    assert (error["name"], error["code"]) == ("AgentError", "E_TOOL_LIMIT")
    assert worker.value("late") == 1
    assert worker.next("log")["message"] == "AgentError E_CALL_ENDED"


# --- loading


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("a.mjs", "export const handlers = {a: () => 1}"),
        ("a.js", "export const handlers = {a: () => 1}"),
        ("a.js", "module.exports.handlers = {a: () => 1}"),
        ("a.js", "const {ToolError} = require('@goondan/core'); exports.handlers = {a: () => ToolError.length}"),
        ("a.ts", "import type {X} from '@goondan/core';\nexport const handlers: Record<string, X> = {a: () => 1}"),
        ("a.mts", "import {ToolError as E} from '@goondan/core';\nexport const handlers = {a: (): number => E.length}"),
        ("a.ts", "import {ToolHandler as H} from '@goondan/core';\nexport const handlers = {a: (() => 1) as H}"),
        ("a.mjs", "const handlers = {a: () => 1}; export default {handlers}"),
    ],
)  # fmt: skip
def test_entries(fresh: Callable[..., Worker], file: str, source: str) -> None:
    worker = fresh(source, file, env={"SHOP": "tea"}, importPaths=["/nowhere"])
    assert worker.loaded == {"type": "ready", "protocol": 1, "exports": ["a"]}  # type: ignore[attr-defined]
    assert worker.value("a") == 1
    worker.send({"type": "exit"})
    assert worker.ended() == 0
    assert worker.said() == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("export const handlers = {", "SyntaxError"),
        ("export const x = 1", "exports no `handlers`, an object from export names to functions"),
        ("export const handlers = 5", "exports no `handlers`, an object from export names to functions"),
        ("export const handlers = {a: () => 1, b: 2}", "handlers['b'] is no function"),
        ("throw new TypeError('at import')", "TypeError: at import at "),
        ("throw 'a text'", "Error: a text"),
        ("process.exit(4)", "ExitError: process.exit(4) was called"),
        ("import './missing.mjs'", "missing.mjs"),
        ("import 'no-such-package'", "no-such-package"),
    ],
)  # fmt: skip
def test_modules_that_are_no_tool(fresh: Callable[..., Worker], name: str, source: str, message: str) -> None:
    worker = fresh(source)
    loaded = worker.loaded  # type: ignore[attr-defined]
    assert loaded["type"] == "load_failed"
    assert message in loaded["message"] or (
        name == "bun" and message == "SyntaxError" and "BuildMessage" in loaded["message"]
    )
    assert "\n" not in loaded["message"]
    assert worker.ended() == 0
    assert worker.said() == ""


def test_what_only_a_compiler_knows(fresh: Callable[..., Worker], name: str) -> None:
    source = """enum Color { Red = 'r' }
    class P { constructor(public x: number) {} }
    export const handlers = {a: () => [Color.Red, new P(1).x]}"""
    worker = fresh(source, "tool.ts")
    if name == "bun":
        assert worker.value("a") == ["r", 1]
        return
    loaded = worker.loaded  # type: ignore[attr-defined]
    assert loaded["type"] == "load_failed"
    assert "enum" in loaded["message"]
    assert loaded["message"].endswith("Node only strips types: sandbox.javascript: bun runs it")


def test_another_protocol(name: str, tmp_path: Path) -> None:
    worker = Worker(name, tmp_path)
    worker.init(tmp_path / "none.mjs", protocol=2)
    assert worker.next("load_failed")["message"] == "this worker speaks protocol 1"
    assert worker.ended() == 0
    worker.close()


# --- frames


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\1\0\0\0\xc1", b"\2\0\0\0\1\1", b"\4\0\0\0\xd9\x50ab"]
)
def test_rubbish_from_the_host(name: str, tmp_path: Path, data: bytes) -> None:
    worker = Worker(name, tmp_path)
    worker.write(data)
    assert worker.ended() == 1
    assert worker.said().startswith("worker: ")
    worker.close()


def test_it_ends_with_the_channel_or_at_exit(fresh: Callable[..., Worker]) -> None:
    one = fresh("export const handlers = {never: () => new Promise(() => {})}")
    two = fresh(
        "import {writeSync} from 'node:fs';\nprocess.on('exit', () => writeSync(1, 'bye'));\nexport const handlers = {}"
    )
    one.begin("never")
    one.socket.close()
    assert one.ended() in (0, 1)
    two.send({"type": "exit"})
    assert (two.ended(), two.said()) == (0, "bye")


def test_programs_do_not_inherit_the_channel(worker: Worker) -> None:
    own = os.readlink(f"/proc/{worker.pid}/fd/3")
    assert own.startswith("socket:")
    for how in ("child_process", "Bun"):
        assert own not in worker.value("descriptors", {"how": how})


def test_outside_of_a_jail_nothing_is_killed(fresh: Callable[..., Worker]) -> None:
    """Whatever `init` says: the worker's process ids have to be those of a jail."""
    source = """import { spawn } from 'node:child_process';
    export const handlers = {
      leaves() {
        const left = spawn('/bin/sleep', ['60'], {stdio: 'ignore', detached: true});
        left.unref();
        return left.pid;
      }
    }"""
    worker = fresh(source, jailed=True)
    left = [worker.value("leaves"), worker.value("leaves")]
    try:
        for pid in left:
            assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)


# --- tools that change the language


@pytest.mark.parametrize("change", CHANGES, ids=[line[:40] for line in CHANGES])
def test_changed_prototypes_change_no_frame(fresh: Callable[..., Worker], change: str) -> None:
    source = f"""
    {change};
    const thrown = new TypeError('no');
    export const handlers = {{
      echo: (ctx, input) => input, fails() {{ throw thrown }},
      log(ctx) {{ ctx.logger.info('line'); return {{a: 1.5, b: 'x'.repeat(30), c: 12345678901n, d: [1, 2]}} }},
    }};"""
    worker = fresh(source)
    assert worker.loaded["type"] == "ready", worker.loaded  # type: ignore[attr-defined]
    sent = {
        "a": [1, {"b": None}],
        "text": "é" * 40,
        "wide": 2**60,
        "f": 1.5,
        "x": {},
        "toJSON": "mine",
        "callId": "mine",
    }
    for _ in range(2):
        assert worker.call("echo", sent) == {"status": "ok", "output": sent}
        assert worker.call("log") == {
            "status": "ok",
            "output": {"a": 1.5, "b": "x" * 30, "c": 12345678901, "d": [1, 2]},
        }
        assert worker.logs[-1] == {"type": "log", "level": "info", "message": "line", "callId": str(worker._calls)}
        assert worker.call("fails") == {"status": "error", "error": {"name": "TypeError", "message": "no"}}
    assert worker.error("missing")["code"] == "E_TOOL_NOT_FOUND"


def test_code_of_a_value_may_log_while_the_result_is_made(worker: Worker) -> None:
    worker.logs.clear()
    assert worker.value("logs_in_getters") == {"a": "x" * 100, "b": [1, "y" * 100]}
    assert [log["message"] for log in worker.logs] == ["getter", "toJSON"]
    assert worker.error("exits_in_getter")["name"] == "ExitError"
    assert worker.error("throws_in_getter") == {"name": "RangeError", "message": "in the getter"}


def test_a_promise_of_a_value_that_throws_when_it_is_looked_at(worker: Worker) -> None:
    """Beside another call: the runtime does not tell which of the two an exception belongs to."""
    beside = worker.begin("waits", {"ms": 100})
    assert worker.error("hostile_later") == {"name": "Error", "message": "no look"}
    assert worker.result(beside)["output"] == "waited"


@pytest.mark.feature("certify")
def test_it_is_certified(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = execute(["certify", "worker", "--entry", "javascript", "--", runtime(name), str(WORKER)])
    shown = capsys.readouterr().out
    assert (status, [line for line in shown.splitlines() if "broken " in line]) == (0, [])
