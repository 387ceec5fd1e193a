"""`ctx.runtime` in real jails, over a bus that says what the test wants; and workers that lie about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from goondan.schemas.bundle.launch import ExportSpec, SandboxSpec
from goondan.schemas.transport.link import Done
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame
from goondan.schemas.wire.questions import MAX_OPEN
from goondan.toolhost.serving import sessions
from tests.toolhost_fixture import Bench, bench, make_tool

SOURCE = """
import asyncio, os, threading, time
from goondan_tool import AgentError, Pending, wire

def has(ctx, input): return ctx.runtime is not None
def ask(ctx, input): return ctx.runtime.request("helper", **input)["response"]
async def both(ctx, input):
    answers = await asyncio.gather(*(ctx.runtime.request("helper", text) for text in input["texts"]))
    return [answer["response"] for answer in answers]
async def short(ctx, input):
    try: return await asyncio.wait_for(ctx.runtime.request("helper", "never"), 0.05)
    except asyncio.TimeoutError: return "gave up"
def kinds(ctx, input):
    try: ctx.runtime.request(input.pop("target", "helper"), input.pop("input", "x"), **input)
    except AgentError as error: return [error.code, error.suggestion, str(error)]
kept = []
def keep(ctx, input): kept.append(ctx.runtime)
def late(ctx, input):
    try: return kept[0].catalog()
    except AgentError as error: return error.code
def leave(ctx, input):
    threading.Thread(target=lambda: kept.append(_outcome(ctx))).start()
    while not os.path.exists(ctx.workdir + "/asked"): time.sleep(0.005)
def left(ctx, input):
    while not kept: time.sleep(0.005)
    return kept[-1]
def _outcome(ctx):
    try: return ctx.runtime.request("helper", "never")
    except AgentError as error: return error.code
def pends(ctx, input):
    runtime = ctx.runtime
    def work():
        time.sleep(0.05)
        try: return runtime.catalog()
        except AgentError as error: return error.code
    return Pending("h", work)
def raw(ctx, input):
    for fields in input["frames"]:
        body = wire.pack({"type": "ask", "op": "catalog", "askId": 1, "callId": ctx._call.id, **fields})
        os.write(3, len(body).to_bytes(4, "little") + body)
    time.sleep(input.get("s", 30))
    return "alive"
def deaf(ctx, input):
    import _thread
    ctx._call.worker._reader = None
    for number in range(input["n"]):
        body = wire.pack({"type": "ask", "op": "catalog", "askId": number, "callId": ctx._call.id})
        os.write(3, len(body).to_bytes(4, "little") + body)
    time.sleep(30)
def nap(ctx, input): time.sleep(input["s"]); return "slept"
handlers = {f.__name__: f for f in (has, ask, both, short, kinds, keep, late, leave, left, pends, raw, deaf, nap)}
"""
NAMES = (
    "has", "ask", "both", "short", "kinds", "keep", "late", "leave", "left", "pends", "raw", "deaf",
    ExportSpec(name="nap", idempotent=True),
)  # fmt: skip
GRANTED = SandboxSpec(permissions=["agents"])


class Bus:
    """What the host's link is in a kernel: takes frames, and gives the answers that the test names."""

    def __init__(self) -> None:
        self.sent: list[Frame] = []
        self.open: dict[str, asyncio.Future[Frame]] = {}
        self.forgotten: list[str] = []
        self.news = asyncio.Event()
        self.reply: bytes | None = None

    def ask(self, frame: Frame) -> asyncio.Future[Frame]:
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        frame.id = frame.id or f"f{len(self.sent)}"
        self.sent.append(frame)
        self.open[frame.id] = future
        event = from_raw(frame.payload, AgentEvent)
        if event.input != "never":
            self.answer(frame, status="completed", response=f"heard {event.input}")
        else:
            self.news.set()
        return future

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        frame.id = frame.id or f"f{len(self.sent)}"
        self.sent.append(frame)
        future.set_result(Frame("reply", payload=to_raw({"selfAgent": "coder"} if self.reply is None else self.reply)))
        return future

    def ask_caller(self, frame: Frame, done: Done) -> None:
        answer = self.post(frame)
        answer.add_done_callback(lambda future: done(future.result(), None))

    def forget(self, frame_id: str) -> None:
        self.forgotten.append(frame_id)
        if (future := self.open.pop(frame_id, None)) is not None:
            future.cancel()

    def answer(self, frame: Frame, **fields: Any) -> None:
        """The asked agent's turn has ended."""
        answer = Answer(turn_id="t", **fields)
        event = AgentEvent(id="a", type="agent.response", created_at="2026-01-01T00:00:00Z", answer=answer)
        self.open.pop(frame.id).set_result(Frame("event", payload=to_raw(event)))

    async def asked(self) -> Frame:
        """The next request that stays open."""
        await asyncio.wait_for(self.news.wait(), 20)
        self.news.clear()
        return self.sent[-1]


@asynccontextmanager
async def asking(folder: Path, *, sandbox: SandboxSpec = GRANTED) -> AsyncIterator[tuple[Bench, Bus]]:
    bus = Bus()
    async with bench(make_tool(folder, SOURCE, *NAMES, sandbox=sandbox), speaker=bus) as made:
        yield made, bus


@pytest.mark.requirement("CONTEXT-09")
async def test_runtime_is_there_for_tools_with_the_permission_alone(short_tmp: Path, workdir: Path) -> None:
    async with asking(short_tmp) as (host, _):
        assert (await host.call("t__has", workdir=workdir))["output"] is True
    for other in (
        SandboxSpec(),
        SandboxSpec(permissions=["restart"]),
        SandboxSpec(isolation="shared", permissions=["agents"]),
    ):
        async with asking(short_tmp, sandbox=other) as (host, _):
            assert (await host.call("t__has", workdir=workdir))["output"] is False


async def test_plain_handlers_wait_and_coroutines_await(short_tmp: Path, workdir: Path) -> None:
    async with asking(short_tmp) as (host, bus):
        assert (await host.call("t__ask", {"input": "hi"}, workdir=workdir))["output"] == "heard hi"
        answers = await host.call("t__both", {"texts": ["a", "b", "a"]}, workdir=workdir)
        assert answers["output"] == ["heard a", "heard b", "heard a"]
        assert len({frame.event_id for frame in bus.sent}) == 4
        assert (await host.call("t__short", workdir=workdir))["output"] == "gave up"
        assert len(bus.forgotten) == 1, "the call has ended, and its question with it"
        assert host.host.asking._askers == {}


async def test_a_handler_that_waits_holds_up_no_other(short_tmp: Path, workdir: Path) -> None:
    async with asking(short_tmp) as (host, bus):
        _, waiting = host.start("t__ask", {"input": "never"}, workdir=workdir)
        frame = await bus.asked()
        assert (await host.call("t__ask", {"input": "quick"}, workdir=workdir))["output"] == "heard quick"
        bus.answer(frame, status="completed", response="at last")
        assert (await waiting)["output"] == "at last"


async def test_errors_of_the_bus_are_exceptions_with_their_code(short_tmp: Path, workdir: Path) -> None:
    async with asking(short_tmp) as (host, bus):
        _, waiting = host.start("t__ask", {"input": "never"}, workdir=workdir)
        frame = await bus.asked()
        bus.open.pop(frame.id).set_exception(fail("E_AGENT_NOT_FOUND", "no agent 'helper'"))
        error = (await waiting)["error"]
        assert (error["code"], error["name"], error["message"]) == (
            "E_AGENT_NOT_FOUND",
            "AgentError",
            "no agent 'helper'",
        )
        assert error["suggestion"]
        assert error["helpUrl"].endswith("E_AGENT_NOT_FOUND")
        told = await host.call("t__kinds", {"event_type": "tool.completed"}, workdir=workdir)
        assert told["output"][0] == "E_TOOL_INVALID_ARGS"
        big = await host.call("t__ask", {"input": "x" * 300_000}, workdir=workdir)
        assert big["error"]["code"] == "E_TOOL_LIMIT"
        mistakes: list[dict[str, Any]] = [
            {"target": 5}, {"timeout_ms": "soon"}, {"timeout_ms": True}, {"metadata": []}, {"event_type": 1},
        ]  # fmt: skip
        for wrong in mistakes:
            refused = await host.call("t__kinds", wrong, workdir=workdir)
            assert refused["error"]["name"] == "TypeError", wrong
        assert (await host.call("t__kinds", {"timeout_ms": 1e30}, workdir=workdir))["output"] is None
        assert host.host.sessions.jail_count == 1, "a mistake ends no jail"
        odd = await host.call("t__kinds", {"metadata": {"a": 1}, "instance_key": ""}, workdir=workdir)
        assert odd["output"] is None, "an empty key means the caller's own"
        assert bus.sent[-1].instance_key == "k1"


async def test_nothing_is_asked_after_the_call(short_tmp: Path, workdir: Path) -> None:
    async with asking(short_tmp) as (host, bus):
        await host.call("t__keep", workdir=workdir)
        assert (await host.call("t__late", workdir=workdir))["output"] == "E_CALL_ENDED"
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        host.host.answers._announce = lambda event, done: told.set_result(from_raw(event.payload, AgentEvent))
        assert (await host.call("t__pends", workdir=workdir))["status"] == "pending"
        assert (await told).input["result"]["output"] == "E_CALL_ENDED"
        assert bus.sent == []


async def test_what_is_open_when_a_call_ends_is_dropped_and_told(short_tmp: Path, workdir: Path) -> None:
    async with asking(short_tmp) as (host, bus):
        call_id, returned = host.start("t__leave", workdir=workdir)
        frame = await bus.asked()
        (workdir / "asked").touch()
        await returned
        assert bus.forgotten == [frame.id]
        assert (await host.call("t__left", workdir=workdir))["output"] == "E_CALL_ENDED"
        (line,) = [line for line in host.logs if "questions were open" in line.message]
        assert (line.call_id, str(frame.event_id) in line.message) == (call_id, True)


async def test_a_cancelled_call_drops_what_it_asked(short_tmp: Path, workdir: Path) -> None:
    async with asking(short_tmp) as (host, bus):
        call_id, waiting = host.start("t__ask", {"input": "never"}, workdir=workdir)
        frame = await bus.asked()
        host.cancel(call_id)
        assert (await waiting)["error"]["code"] == "E_CANCELLED"
        assert bus.forgotten == [frame.id]
        assert (await host.call("t__has", workdir=workdir))["output"] is True
        assert host.host.sessions.jail_count == 1, "the handler heard of it and has ended"


async def test_a_call_that_runs_again_asks_under_the_same_names(short_tmp: Path, workdir: Path) -> None:
    async with asking(short_tmp) as (host, bus):
        tool = host.host.spec.tools[0]
        again = [msgspec.structs.replace(e, idempotent=e.name == "ask") for e in tool.exports]
        host.host.configure(
            msgspec.structs.replace(host.host.spec, tools=[msgspec.structs.replace(tool, exports=again)])
        )
        _, waiting = host.start("t__ask", {"input": "never"}, workdir=workdir)
        first = await bus.asked()
        session = host.host.sessions.pool.sessions()[0]
        session.rerun = True
        host.live_of(session).jail.kill("another call did not end")
        second = await bus.asked()
        assert first.event_id == second.event_id
        assert bus.forgotten == [first.id]
        bus.answer(second, status="completed", response="once")
        assert (await waiting)["output"] == "once"


async def test_a_forked_call_asks_too_and_in_its_own_name_alone(short_tmp: Path, workdir: Path) -> None:
    forked = SandboxSpec(isolation="call", permissions=["agents"])
    async with asking(short_tmp, sandbox=forked) as (host, bus):
        assert (await host.call("t__ask", {"input": "hi"}, workdir=workdir))["output"] == "heard hi"
        assert (await host.call("t__both", {"texts": ["a", "b"]}, workdir=workdir))["output"] == ["heard a", "heard b"]
        _, waiting = host.start("t__ask", {"input": "never"}, workdir=workdir)
        frame = await bus.asked()
        running = next(call for slot in host.host.sessions.pool.sessions() for call in slot.calls)
        lie = await host.call("t__raw", {"frames": [{"callId": running}]}, workdir=workdir)
        assert lie["error"]["code"] == "E_TOOL_CRASHED"
        bus.answer(frame, status="completed", response="untouched")
        assert (await waiting)["output"] == "untouched", "the call beside the liar goes on"
    async with asking(short_tmp, sandbox=SandboxSpec(isolation="call")) as (host, _):
        assert (await host.call("t__has", workdir=workdir))["output"] is False


# --- liars


#: What a worker may say that lies, one after the other.
LIES: dict[str, list[dict[str, Any]]] = {
    "a call of another jail": [{"callId": "999"}],
    "no call": [{"callId": ""}],
    "one number twice": [
        {"op": "request", "target": "helper", "input": "never"},
        {"op": "request", "target": "helper", "input": "x"},
    ],
    "an operation that is none": [{"op": "restart"}],
    "a foreign call": [{"op": "send", "target": "helper", "input": "78", "metadata": [1]}, {"callId": "foreign"}],
}


async def test_a_worker_that_lies_ends_with_its_jail(short_tmp: Path, workdir: Path) -> None:
    async with asking(short_tmp) as (host, bus):
        for lie, frames in LIES.items():
            result = await host.call("t__raw", {"frames": frames}, workdir=workdir)
            assert result["error"]["code"] == "E_TOOL_CRASHED", lie
            assert "its jail was ended" in result["error"]["message"]
            assert bus.open == {}


async def test_a_worker_without_the_permission_that_asks_ends_with_its_jail(short_tmp: Path, workdir: Path) -> None:
    async with asking(short_tmp, sandbox=SandboxSpec()) as (host, bus):
        result = await host.call("t__raw", {"frames": [{}]}, workdir=workdir)
        assert result["error"]["code"] == "E_TOOL_CRASHED"
        assert bus.sent == []


async def test_more_questions_than_may_be_open_are_refused(short_tmp: Path, workdir: Path) -> None:
    async with asking(short_tmp) as (host, bus):
        many = [
            {"op": "request", "target": "helper", "input": "never", "askId": number} for number in range(MAX_OPEN + 9)
        ]
        result = await host.call("t__raw", {"frames": many, "s": 0.1}, workdir=workdir)
        assert result["output"] == "alive"
        assert len(bus.sent) == MAX_OPEN


async def test_a_worker_that_does_not_read_its_answers_ends(
    short_tmp: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_UNREAD", 1 << 20)
    async with asking(short_tmp) as (host, bus):
        bus.reply = {"x": "y" * 200_000}  # type: ignore[assignment]
        result = await host.call("t__deaf", {"n": 15}, workdir=workdir)
        assert result["error"]["code"] == "E_TOOL_CRASHED"
        assert "does not read" in result["error"]["message"]
