"""Tool calls: frames, deadlines, refusals without a frame, and exactly one result whatever the bus does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from goondan.agentproc.calls.caller import DEFAULT_CALL_S, MAX_REPEATS, UNHEARD_S, CallContext
from goondan.agentproc.machine.catalog import Catalog, StepCatalog
from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire.blobs import MAX_ARGS_BYTES
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import fail, tool_error
from goondan.schemas.wire.frames import Frame, ToolCallPayload, ToolResult
from tests.unit.agentproc.fakes import BASH, Caller, FakeLink, catalog_of, make_spec, ok
from tests.unit.agentproc.turns import failed

CONTEXT = CallContext("t1", "e1", 7)
UNKNOWN = ToolResult(status="error", error=tool_error("E_TOOL_OUTCOME_UNKNOWN", "host lost", name="ToolHostLost"))


def catalog(*items: CatalogItem) -> StepCatalog:
    if not items:
        return Catalog(make_spec("/nowhere")).for_step()
    return catalog_of(*items, initial=items).for_step()


def caller(link: FakeLink) -> Caller:
    return Caller(link, asyncio.get_running_loop())


async def test_a_call_is_one_frame_with_everything_in_it() -> None:
    link = FakeLink()
    result = await caller(link).call(
        catalog(), "bash__exec", {"command": "ls"}, call_id="t1/c1", context=CallContext("t1", "e1", 7)
    )
    (frame,) = link.calls
    payload = from_raw(frame.payload, ToolCallPayload)
    assert (frame.type, frame.tool, frame.call_id, frame.event_id, frame.epoch) == (
        "tool.call", "bash__exec", "t1/c1", "e1", 7)  # fmt: skip
    assert frame.deadline_ms == int(DEFAULT_CALL_S * 1000)
    assert frame.first_sent_ms is None
    assert (payload.turn_id, payload.tool_call_id, payload.message) == ("t1", "c1", None)
    assert from_raw(payload.args, object) == {"command": "ls"}
    assert result.output is not None
    assert from_raw(result.output, object) == {"tool": "bash__exec", "args": {"command": "ls"}}


@pytest.mark.requirement("CALL-07")
@pytest.mark.parametrize(
    ("name", "args", "code"),
    [
        ("hidden__run", {}, "E_TOOL_NOT_IN_CATALOG"),
        ("bash__exec", {}, "E_TOOL_INVALID_ARGS"),
        ("bash__exec", {"command": "\ud800"}, "E_TOOL_INVALID_ARGS"),
        ("bash__exec", {"command": "x" * MAX_ARGS_BYTES}, "E_FRAME_TOO_LARGE"),
        ("notes__add", {"n": 2**70}, "E_TOOL_INVALID_ARGS"),
        ("notes__add", {"n": object()}, "E_TOOL_INVALID_ARGS"),
        ("notes__add", [1], "E_TOOL_INVALID_ARGS"),
    ],
)
async def test_a_refused_call_causes_no_frame(name: str, args: Any, code: str) -> None:
    link = FakeLink()
    result = await caller(link).call(catalog(), name, args, call_id="t1/c1", context=CONTEXT)
    assert result.error is not None
    assert result.error.code == code
    assert link.calls == []


async def test_arguments_nested_too_deep_are_refused() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    link = FakeLink()
    result = await caller(link).call(catalog(), "notes__add", deep, call_id="t1/c1", context=CONTEXT)
    failed(result, "E_TOOL_INVALID_ARGS")
    assert link.calls == []


@pytest.mark.requirement("ERROR-03")
async def test_every_message_is_within_the_tools_limit() -> None:
    item = CatalogItem(name="a__b", error_message_limit=40, parameters={"type": "object", "required": ["x" * 200]})
    link = FakeLink(lambda *_: ToolResult(status="error", error=tool_error("E_TOOL", "y" * 500, name="Error")))
    for args in ({}, {"x" * 200: 1}):
        result = await caller(link).call(catalog(item), "a__b", args, call_id="t1/c1", context=CONTEXT)
        assert result.error is not None
        assert len(result.error.message) == 40
        assert result.error.message.endswith("... (truncated)")


async def test_a_call_ends_before_its_turn() -> None:
    link = FakeLink()
    now = asyncio.get_running_loop().time()
    for left, at_most, at_least in ((10.0, 9500, 9000), (0.4, 200, 100), (500.0, 120_000, 119_000)):
        context = CallContext("t1", "e1", 1, now + left)
        await caller(link).call(catalog(), "notes__add", {}, call_id="t1/c1", context=context)
        deadline = link.calls[-1].deadline_ms
        assert deadline is not None
        assert at_least <= deadline <= at_most


async def test_a_call_without_time_left_is_not_sent() -> None:
    link = FakeLink()
    context = CallContext("t1", "e1", 1, asyncio.get_running_loop().time() - 1)
    result = await caller(link).call(catalog(), "notes__add", {}, call_id="t1/c1", context=context)
    failed(result, "E_TOOL_TIMEOUT")
    assert link.calls == []


async def test_an_unknown_outcome_is_the_result_unless_twice_is_as_good_as_once() -> None:
    link = FakeLink(lambda *_: UNKNOWN)
    result = await caller(link).call(catalog(), "bash__exec", {"command": "x"}, call_id="t1/c1", context=CONTEXT)
    assert result == UNKNOWN
    assert len(link.calls) == 1


async def test_an_idempotent_call_is_repeated_under_new_ids() -> None:
    outcomes = [UNKNOWN, ok("second")]
    link = FakeLink(lambda *_: outcomes.pop(0))
    result = await caller(link).call(catalog(), "notes__add", {"a": 1}, call_id="t1/c1", context=CONTEXT)
    assert result.status == "ok"
    assert [frame.call_id for frame in link.calls] == ["t1/c1", "t1/c1~2"]
    assert bytes(link.calls[0].payload) == bytes(link.calls[1].payload)
    outcomes += [UNKNOWN] * (MAX_REPEATS + 1)
    result = await caller(link).call(catalog(), "notes__add", {"a": 1}, call_id="t1/c2", context=CONTEXT)
    assert result == UNKNOWN
    repeats = [f"t1/c2~{number}" for number in range(2, MAX_REPEATS + 2)]
    assert [frame.call_id for frame in link.calls[2:]] == ["t1/c2", *repeats]


async def test_the_repeats_of_a_call_share_its_time() -> None:
    clock = asyncio.get_running_loop().time
    link = FakeLink(lambda *_: None)
    passed, results = 0.0, list[Any]()
    calling, now = Caller(link, cast(Any, SimpleNamespace(time=lambda: clock() + passed))), clock()
    context = CallContext("t1", "e1", 7, now + 1000)
    calling.start(
        catalog(),
        "notes__add",
        {"a": 1},
        call_id="t1/c1",
        context=context,
        done=lambda result, _: results.append(result),
    )
    passed = DEFAULT_CALL_S - 10
    link.finish("t1/c1", UNKNOWN)
    again = link.calls[1].deadline_ms
    assert again is not None
    assert 9000 <= again <= 10_000
    passed = DEFAULT_CALL_S + 1
    link.finish("t1/c1~2", UNKNOWN)
    assert results == [UNKNOWN]
    assert len(link.calls) == 2


async def test_an_idempotent_call_whose_process_was_killed_is_repeated_once() -> None:
    crashed = ToolResult(status="error", error=tool_error("E_TOOL_CRASHED", "killed", name="ToolCrashed"))
    outcomes = [crashed, ok("second"), crashed, crashed]
    link = FakeLink(lambda *_: outcomes.pop(0))
    calling = caller(link)
    result = await calling.call(catalog(), "notes__add", {"a": 1}, call_id="t1/c1", context=CONTEXT)
    assert result.status == "ok"
    assert await calling.call(catalog(), "notes__add", {"a": 1}, call_id="t1/c2", context=CONTEXT) == crashed
    assert [frame.call_id for frame in link.calls] == ["t1/c1", "t1/c1~2", "t1/c2", "t1/c2~2"]
    outcomes += [UNKNOWN, crashed, ok("third")]
    result = await calling.call(catalog(), "notes__add", {"a": 1}, call_id="t1/c4", context=CONTEXT)
    assert result.status == "ok"
    outcomes += [crashed]
    assert await calling.call(catalog(), "bash__exec", {"command": "x"}, call_id="t1/c3", context=CONTEXT) == crashed
    assert len(link.calls) == 8


async def test_a_repeat_is_taken_back_by_the_id_of_its_call() -> None:
    outcomes: list[Any] = [UNKNOWN, UNKNOWN, None]
    link = FakeLink(lambda *_: outcomes.pop(0))
    calling = caller(link)
    waiting = asyncio.create_task(calling.call(catalog(), "notes__add", {"a": 1}, call_id="t1/c1", context=CONTEXT))
    while len(link.calls) < 3:
        await asyncio.sleep(0)
    calling.cancel(["t1/c1"])
    assert calling.open_call_ids == []
    assert [frame.call_id for frame in link.sent] == ["t1/c1~3"]
    waiting.cancel()


async def test_a_call_that_the_bus_refuses_has_an_error_result() -> None:
    link = FakeLink(lambda *_: fail("E_FORBIDDEN", "not declared"))
    result = await caller(link).call(catalog(), "notes__add", {}, call_id="t1/c1", context=CONTEXT)
    assert result.error is not None
    assert (result.error.code, result.error.name) == ("E_FORBIDDEN", "BusError")


@pytest.mark.parametrize("payload", [{"status": "great"}, "text", {"status": "ok", "error": 5}, None])
async def test_a_result_that_is_none_is_an_error(payload: Any) -> None:
    class OddLink(FakeLink):
        def finish(self, call_id: str, outcome: Any, stage: str | None = None) -> None:
            self._open.pop(call_id)[1](Frame("tool.result", call_id=call_id, payload=to_raw(payload)), None)

    result = await caller(OddLink()).call(catalog(), "notes__add", {}, call_id="t1/c1", context=CONTEXT)
    failed(result, "E_TOOL_BAD_OUTPUT")


async def test_cancelled_calls_are_taken_back_and_abandoned_ones_left_alone() -> None:
    link = FakeLink(lambda *_: None)
    results: list[Any] = []
    for call_id in ("t1/c1", "t1/c2"):
        one = caller(link)
        one.start(catalog(), "notes__add", {}, call_id=call_id, context=CONTEXT, done=lambda r, _: results.append(r))
        assert one.open_call_ids == [call_id]
        if call_id == "t1/c1":
            one.cancel([call_id, "t1/unknown"])
        else:
            one.abandon()
        assert one.open_call_ids == []
        link.finish(call_id, ok("late"))
        await asyncio.sleep(0)
    assert [(frame.type, frame.call_id) for frame in link.sent] == [("tool.cancel", "t1/c1")]
    assert link.forgotten == [link.calls[0].id, link.calls[1].id]
    assert results == []


async def test_the_next_broker_hears_what_was_cancelled_while_none_was_there_or_just_before_one_was_lost() -> None:
    now, link = 0.0, FakeLink(lambda *_: None)
    one = Caller(link, cast(Any, SimpleNamespace(time=lambda: now)))

    def cancelled(call_id: str) -> None:
        one.start(catalog(), "notes__add", {}, call_id=call_id, context=CONTEXT, done=lambda *_: None)
        one.cancel([call_id])

    cancelled("t1/long-ago")
    now = UNHEARD_S + 1
    cancelled("t1/just-before")
    cancelled("t1/made-again")
    link.connected = False
    cancelled("t1/in-between")
    now += UNHEARD_S - 1
    link.connected = True
    one.start(catalog(), "notes__add", {}, call_id="t1/made-again", context=CONTEXT, done=lambda *_: None)
    link.sent.clear()
    one.welcomed()
    assert [(frame.type, frame.call_id) for frame in link.sent] == [
        ("tool.cancel", "t1/just-before"),
        ("tool.cancel", "t1/in-between"),
    ]
    now += UNHEARD_S + 1
    one.welcomed()
    assert len(link.sent) == 2


async def test_a_message_too_large_to_send_along_is_left_out(tmp_path: Path) -> None:
    link = FakeLink()
    one, done = caller(link), asyncio.Event()
    one.start(
        catalog(), "bash__exec", {"command": "x" * 600_000}, call_id="t1/c1", context=CONTEXT,
        done=lambda *_: done.set(), message_id="m1", message=b"\xc4" + b"y" * MAX_ARGS_BYTES,
    )  # fmt: skip
    await done.wait()
    payload = from_raw(link.calls[0].payload, ToolCallPayload)
    assert (payload.message, payload.message_id) == (None, None)
    assert BASH.name == link.calls[0].tool
