"""Whole turns over a fake link, a scripted model and a real conversation file."""

from __future__ import annotations

import asyncio
import datetime
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.answers import turn_id
from goondan.agentproc.machine.messages import ToolData, UserData, is_presentable
from goondan.agentproc.machine.turn import AskedCall
from goondan.agentproc.providers.base import ModelAnswer, TextDelta, Usage
from goondan.agentproc.turn import run as run_module
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.runner import TurnRunner
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail, tool_error
from goondan.schemas.wire.frames import Blob, Frame, ToolCallPayload, ToolResult
from goondan.schemas.worker.receipts import CallReceipt, JailReceipt, Receipt
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, make_spec, ok, says, wants
from tests.unit.agentproc.turns import Make, code_of, failed, last_results, settle, the_answer, until


def noted(folder: Path, *kinds: str) -> list[str]:
    """The kinds of notes that traces are told from, in their order; only those asked for."""
    with closing(sqlite3.connect(next(folder.rglob("conversation.db")))) as db:
        return [kind for (kind,) in db.execute("SELECT type FROM runtime_events ORDER BY seq") if kind in kinds]


async def test_a_turn_calls_model_and_tools_and_answers_once(make: Make, link: FakeLink) -> None:
    model = FakeModel(wants(("a", "bash__exec", {"command": "ls"}), ("b", "notes__add", {})), says("done"))
    runner = make(link, model, system="Be brief.")
    await runner.run(event_frame("e1", "go"))
    runner.instance.acks.flush()
    answer = the_answer(link)
    assert (answer.status, answer.response, answer.finish_reason, answer.steps) == ("completed", "done", "stop", 2)
    assert answer.turn_id == turn_id("coder", "k", "e1")
    assert link.posted[-1].stage == "done"
    assert [frame.call_id for frame in link.calls] == [f"{answer.turn_id}/a", f"{answer.turn_id}/b"]
    first, second = model.requests
    assert (first.system, [item.name for item in first.tools]) == ("Be brief.", ["bash__exec", "notes__add"])
    assert [type(m.data).__name__ for m in second.messages] == ["UserData", "AssistantData", "ToolData", "ToolData"]
    assert is_presentable(second.messages)
    assert sorted(link.acked()) == [f"{answer.turn_id}/a", f"{answer.turn_id}/b"]


@pytest.mark.requirement("CONTEXT-03")
async def test_the_assistant_message_goes_along_with_the_first_of_its_calls(make: Make, link: FakeLink) -> None:
    await make(link, FakeModel(wants(("a", "notes__add", {}), ("b", "notes__add", {})), says(""))).run(
        event_frame("e1", "go")
    )
    one, two = (from_raw(frame.payload, ToolCallPayload) for frame in link.calls)
    assert one.message is not None
    assert two.message is None
    assert one.message_id == two.message_id
    sent = from_raw(one.message, dict)
    assert (sent["id"], sent["data"]["role"]) == (one.message_id, "assistant")
    assert [part["toolCallId"] for part in sent["data"]["content"]] == ["a", "b"]


@pytest.mark.requirement("CALL-15", "ERROR-08")
async def test_history_is_what_earlier_turns_left(make: Make) -> None:
    link = FakeLink(lambda *_: ToolResult(status="error", error=tool_error("E_TOOL", "no", name="Error")))
    model = FakeModel(wants(("a", "notes__add", {})), says("one"), says("two"))
    runner = make(link, model)
    await runner.run(event_frame("e1", "first"))
    await runner.run(event_frame("e2", "second"))
    messages = model.requests[-1].messages
    assert [m.data.content for m in messages if isinstance(m.data, UserData)] == ["first", "second"]
    assert last_results(messages) == [("a", "error")]
    assert is_presentable(messages)
    (told,) = [m.data.content[0].result for m in messages if isinstance(m.data, ToolData)]
    assert told.error is not None
    assert (told.error.code, told.error.message) == ("E_TOOL", "no")  # and not one that was made up for a lost result


async def test_a_receipt_is_noted_for_traces_and_shown_to_no_model(make: Make, tmp_path: Path) -> None:
    jail = JailReceipt(tier="full", walls=["seccomp"], limits={}, denied=["evil.test:443"])
    receipt = to_raw(Receipt(jail=jail, call=CallReceipt(wall_ms=1.5)))

    def handler(tool: str, args: Any) -> ToolResult:
        unreadable = to_raw({"jail": "?"})
        return msgspec.structs.replace(ok("out"), receipt=receipt if tool == "bash__exec" else unreadable)

    model = FakeModel(wants(("a", "bash__exec", {"command": "x"}), ("b", "notes__add", {})), says("one"), says("two"))
    runner = make(FakeLink(handler), model)
    await runner.run(event_frame("e1", "first"))
    await runner.run(event_frame("e2", "second"))
    for request in model.requests:
        assert b"tier" not in msgspec.msgpack.encode(request.messages)
    assert len(last_results(model.requests[-1].messages)) == 2
    with closing(sqlite3.connect(next(tmp_path.rglob("conversation.db")))) as db:
        kept = [json.loads(d) for (d,) in db.execute("SELECT detail FROM runtime_events WHERE type='tool.completed'")]
        assert b"tier" not in b"".join(data for (data,) in db.execute("SELECT message FROM base"))
    assert [note.get("receipt", {}).get("jail", {}).get("denied") for note in kept] == [["evil.test:443"], None]


async def test_an_operator_call_answers_with_the_result_and_calls_no_model(make: Make) -> None:
    link, model = FakeLink(), FakeModel()
    runner = make(link, model, name="_operator")
    await runner.run(event_frame("e1", {"tool": "bash__exec", "args": {"command": "ls"}}, kind="operator.call"))
    answer = the_answer(link)
    assert (answer.status, answer.steps, model.requests) == ("completed", 0, [])
    result = from_raw(answer.output or b"", ToolResult)
    assert (result.status, from_raw(result.output or b"", dict)["tool"]) == ("ok", "bash__exec")


async def test_an_output_that_fits_no_answer_is_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.agentproc.machine.answers.MAX_ANSWER_BYTES", 1000)
    link = FakeLink(lambda *_: ok("x" * 1000))
    await make(link, name="_operator").run(event_frame("e1", {"tool": "notes__add", "args": {}}, kind="operator.call"))
    result = from_raw(the_answer(link).output or b"", ToolResult)
    failed(result, "E_TOOL_LIMIT")


async def test_a_response_that_fits_no_answer_is_cut(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goondan.agentproc.machine.answers.MAX_ANSWER_BYTES", 1000)
    link = FakeLink()
    await make(link, FakeModel(says("é" * 1000))).run(event_frame("e1", "go"))
    response = str(the_answer(link).response)
    assert response.endswith("é... (truncated)")
    assert len(response.encode()) <= 1000


async def test_an_answer_that_cannot_be_sent_is_a_failed_one(make: Make, link: FakeLink) -> None:
    """The disk is full, so its large payload has no file: whoever asked must hear of it all the same."""
    runner = make(link, FakeModel(says("large")))
    post, refused = link.post, [fail("E_DISK_FULL", "no room")]
    link.post = lambda frame: failing(refused.pop()) if refused else post(frame)  # type: ignore[method-assign]
    await runner.run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert (answer.status, answer.error and answer.error.code) == ("failed", "E_DISK_FULL")
    assert [(f.stage, f.event_id) for f in link.posted] == [("failed", "e1")]


def failing(error: GoondanError) -> asyncio.Future[Frame]:
    future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


async def test_an_event_whose_payload_cannot_be_had_is_answered_with_the_reason(make: Make, link: FakeLink) -> None:
    frame = event_frame("e1", "go")
    frame.blob, frame.payload = Blob("0" * 32, "0" * 64, 9), to_raw(fail("E_BLOB_MISSING", "it is not there").info)
    await make(link, FakeModel()).run(frame)
    answer = the_answer(link)
    assert (answer.status, answer.error and answer.error.code) == ("failed", "E_BLOB_MISSING")


async def test_a_finished_event_is_answered_again_without_its_payload(make: Make, link: FakeLink) -> None:
    """The broker deletes a large payload when the event is done; after a restart it may hand the event over again."""
    await make(link, FakeModel(says("once"))).run(event_frame("e1", "go"))
    frame = event_frame("e1", "go", epoch=2)
    frame.blob, frame.payload = Blob("0" * 32, "0" * 64, 9), to_raw(fail("E_BLOB_MISSING", "it is not there").info)
    await make(link, FakeModel()).run(frame)
    assert [answer.response for answer in link.answers()] == ["once", "once"]


@pytest.mark.parametrize(
    ("agent", "kind", "value", "code"),
    [
        ("_operator", "client.message", "hi", "E_USAGE"),
        ("_operator", "operator.call", "hi", "E_FRAME_INVALID"),
        ("_operator", "operator.call", {"tool": 5}, "E_FRAME_INVALID"),
    ],
)
async def test_events_for_somebody_else_fail(make: Make, agent: str, kind: str, value: Any, code: str) -> None:
    link = FakeLink()
    await make(link, name=agent).run(event_frame("e1", value, kind=kind))
    assert code_of(the_answer(link)) == code
    assert link.posted[-1].stage == "failed"


#: What msgpack can say and JSON cannot.
NOT_JSON = {
    "bytes": b"\x00",
    "ext": msgspec.msgpack.Ext(5, b"x"),
    "timestamp": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    "nan": float("nan"),
    "infinity": [float("-inf")],
    "integer key": {"a": [{1: 2}]},
    "list as key": {"a": {(1, 2): 3}},
}


@pytest.mark.parametrize("part", ["input", "auth", "metadata"])
@pytest.mark.parametrize("name", NOT_JSON)
async def test_an_event_with_what_is_no_json_fails_and_the_agent_goes_on(make: Make, name: str, part: str) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(says("well")))
    event = {"id": "e1", "type": "user.message", "createdAt": "2026-01-01T00:00:00Z", part: {"x": NOT_JSON[name]}}
    auth = to_raw(event.pop(part)) if part == "auth" else None  # it counts in the header
    await runner.run(Frame("event", event_id="e1", epoch=1, payload=to_raw(event), auth=auth))
    await runner.run(event_frame("e2", {"a": [1.5, None, True, -1, 2**64 - 1, "é"]}))
    refused, answered = link.answers()
    assert refused.error is not None
    assert (refused.error.code, refused.error.message.split(" is ")[0]) == ("E_FRAME_INVALID", part)
    assert answered.status == "completed"
    assert [frame.stage for frame in link.posted] == ["failed", "done"]


@pytest.mark.parametrize("name", NOT_JSON)
async def test_an_operator_call_with_what_is_no_json_reaches_no_tool(make: Make, link: FakeLink, name: str) -> None:
    call = {"tool": "notes__add", "args": {"x": NOT_JSON[name]}}
    await make(link, name="_operator").run(event_frame("e1", call, kind="operator.call"))
    assert code_of(the_answer(link)) == "E_FRAME_INVALID"
    assert link.calls == []


@pytest.mark.parametrize("name", NOT_JSON)
async def test_an_output_that_is_no_json_is_an_error_for_the_model(make: Make, name: str) -> None:
    link = FakeLink(lambda *_: ok({"x": NOT_JSON[name]}))
    model = FakeModel(wants(("a", "notes__add", {})), says("done"))
    await make(link, model).run(event_frame("e1", "go"))
    assert last_results(model.requests[-1].messages) == [("a", "error")]
    assert the_answer(link).status == "completed"


async def test_an_output_of_bad_text_is_an_error_for_the_model(make: Make) -> None:
    link = FakeLink(lambda *_: ToolResult(status="ok", output=msgspec.Raw(b"\xa2\xff\xfe")))
    model = FakeModel(wants(("a", "notes__add", {})), says("done"))
    await make(link, model).run(event_frame("e1", "go"))
    assert last_results(model.requests[-1].messages) == [("a", "error")]


async def test_a_payload_that_is_no_event_fails(make: Make, link: FakeLink) -> None:
    await make(link).run(Frame("event", event_id="e1", epoch=1, payload=to_raw([1, 2])))
    assert code_of(the_answer(link)) == "E_FRAME_INVALID"


# --- models that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [fail("E_MODEL_FAILED", "key sk-secret refused"), KeyError("sk-secret")])
async def test_a_failing_model_fails_the_turn_and_tells_no_secret(
    make: Make, link: FakeLink, error: Exception, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model = ModelSpec(provider="openai", api_key="sk-secret")
    runner = make(link, FakeModel(error, says("better")), model=model)
    await runner.run(event_frame("e1", "go"))
    await runner.run(event_frame("e2", "again"))
    first, completed = link.answers()
    assert "sk-secret" not in failed(first, "E_MODEL_FAILED", "***").message
    assert "sk-secret" not in caplog.text
    assert completed.response == "better"
    ends = ("model.failed", "model.answered", "turn.failed", "turn.completed")
    assert noted(tmp_path, *ends) == ["model.failed", "turn.failed", "model.answered", "turn.completed"]


async def test_a_model_that_cannot_be_asked_is_a_failed_turn(make: Make, link: FakeLink) -> None:
    model = ModelSpec(provider="anthropic", model="m", endpoint="nonsense", api_key="sk-secret")
    await make(link, model=model).run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert code_of(answer) == "E_MODEL_FAILED"
    assert "no http or https URL" in str(answer.error)


async def test_what_a_model_call_took_is_noted_and_what_the_vendor_wants_back_is_kept(
    make: Make, link: FakeLink, tmp_path: Path
) -> None:
    first = ModelAnswer(
        calls=[AskedCall("a", "notes__add", {})],
        finish_reason="tool_use",
        usage=Usage(7, 3),
        metadata={"vendor": {"n": 1}},
    )
    model = FakeModel(first, says("done"))
    await make(link, model).run(event_frame("e1", "go"))
    assistant = model.requests[-1].messages[1]
    assert assistant.metadata == {"vendor": {"n": 1}}
    with closing(sqlite3.connect(next(tmp_path.rglob("conversation.db")))) as db:
        notes = db.execute("SELECT detail FROM runtime_events WHERE type = 'model.answered'").fetchall()
    assert [json.loads(note) for (note,) in notes] == [
        {"step": 1, "model": "embedded", "finishReason": "tool_use", "inputTokens": 7, "outputTokens": 3},
        {"step": 2, "model": "embedded", "finishReason": "stop"},
    ]


# --- time -------------------------------------------------------------------------------------------------------------


async def test_the_deadline_of_the_event_ends_the_turn(make: Make) -> None:
    link = FakeLink(lambda *_: None)
    model = FakeModel(wants(("a", "notes__add", {})), says("next"))
    runner = make(link, model)
    await runner.run(event_frame("e1", "go", deadline_ms=400))  # its call has begun by then
    assert code_of(the_answer(link)) == "E_AGENT_TIMEOUT"
    assert [frame.type for frame in link.sent if frame.type == "tool.cancel"] == ["tool.cancel"]
    await runner.run(event_frame("e2", "on"))
    assert last_results(model.requests[-1].messages) == [("a", "error")]


async def test_a_running_turn_renews_its_lease(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "RENEW_S", 0.01)
    link = FakeLink(lambda *_: None)
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("")))
    task = asyncio.create_task(runner.run(event_frame("e1", "go", epoch=4, root_event="e0")))
    await until(lambda: sum(frame.stage == "renew" for frame in link.posted) >= 3)
    renew = next(frame for frame in link.posted if frame.stage == "renew")
    assert (renew.event_id, renew.epoch) == ("e1", 4)
    assert [(lease.event_id, lease.root_event) for lease in runner.leases()] == [("e1", "e0")]
    link.finish(link.open_calls()[0], ok(1))
    await task
    assert runner.leases() == []


def said_so(link: FakeLink, count: int) -> bool:
    return any(frame.position == count for frame in link.posted)


async def test_what_a_turn_has_stored_is_counted_in_whatever_order_results_come(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "RENEW_S", 0.01)
    link = FakeLink(lambda *_: None)
    calls: list[tuple[str, str, Any]] = [(name, "notes__add", {}) for name in "abc"]
    task = asyncio.create_task(make(link, FakeModel(wants(*calls), says(""))).run(event_frame("e1", "go")))
    await until(lambda: len(link.open_calls()) == 3)
    positions: list[int] = []
    for count in (2, 3, 4):  # the question and the model's wish, then a result, then two
        await until(partial(said_so, link, count))
        positions.append(count)
        link.finish(link.open_calls()[-1], ok(1))  # the last one first
    await task
    said = [frame.position for frame in link.posted if frame.stage == "renew" and frame.position is not None]
    assert said == sorted(said)
    assert set(said) >= set(positions)


async def test_the_first_call_tells_how_much_is_stored(make: Make, link: FakeLink) -> None:
    both: list[tuple[str, str, Any]] = [("a", "notes__add", {}), ("b", "notes__add", {})]
    await make(link, FakeModel(wants(*both), wants(("c", "notes__add", {})), says(""))).run(event_frame("e1", "go"))
    assert [frame.position for frame in link.calls] == [2, None, None]
    assert [frame.stage for frame in link.posted] == ["done"]


async def test_a_frame_of_its_own_tells_it_when_no_call_leaves(make: Make, link: FakeLink) -> None:
    await make(link, FakeModel(wants(("a", "no__such", {})), says(""))).run(event_frame("e1", "go"))
    assert [(frame.stage, frame.position) for frame in link.posted] == [("renew", 2), ("done", None)]


async def test_a_frame_of_its_own_tells_it_when_the_first_call_cannot_leave(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FakeLink()

    def unsent(*_: Any) -> None:
        raise fail("E_FRAME_TOO_LARGE", "a frame of 9 MiB")

    monkeypatch.setattr(link, "start_call", unsent)
    await make(link, FakeModel(wants(("a", "notes__add", {})), says(""))).run(event_frame("e1", "go"))
    assert [(frame.stage, frame.position) for frame in link.posted] == [("renew", 3), ("done", None)]


async def test_a_lost_lease_ends_the_turn_without_a_word(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "RENEW_S", 0.01)
    link = FakeLink(lambda *_: None)
    link.refuse_post["renew"] = "E_LEASE_LOST"
    runner = make(link, FakeModel(wants(("a", "notes__add", {}))))
    async with asyncio.timeout(5):
        await runner.run(event_frame("e1", "go"))
    assert link.answers() == []
    assert not any(frame.type == "tool.cancel" for frame in link.sent), "another incarnation may wait for this call"


async def test_a_call_refused_for_its_lease_ends_the_turn(make: Make) -> None:
    link = FakeLink(lambda *_: fail("E_LEASE_LOST", "gone"))
    async with asyncio.timeout(5):
        await make(link, FakeModel(wants(("a", "notes__add", {})))).run(event_frame("e1", "go"))
    assert link.answers() == []


async def test_many_results_are_acknowledged_in_batches(make: Make, link: FakeLink) -> None:
    calls = [(f"c{n}", "notes__add", {"n": n}) for n in range(200)]
    runner = make(link, FakeModel(wants(*calls), says("done")))
    await runner.run(event_frame("e1", "go"))
    await runner.close()  # at the latest then
    assert len(link.acked()) == 200
    assert sum(frame.stage == "result" for frame in link.sent) <= 3


async def test_results_that_cannot_be_acknowledged_now_are_later(make: Make, link: FakeLink) -> None:
    link.connected = False
    await make(link, FakeModel(wants(("a", "notes__add", {})), says(""))).run(event_frame("e1", "go"))
    assert link.acked() == []
    link.connected = True
    async with asyncio.timeout(5):
        while not link.acked():
            await asyncio.sleep(0.01)


# --- crashes and redelivery -------------------------------------------------------------------------------------------


async def test_a_finished_event_is_answered_again_and_not_run_again(make: Make, link: FakeLink) -> None:
    await make(link, FakeModel(says("once"))).run(event_frame("e1", "go", epoch=1))
    again, model = FakeLink(), FakeModel()
    await make(again, model).run(event_frame("e1", "go", epoch=2))
    assert bytes(again.posted[-1].payload) == bytes(link.posted[-1].payload)
    assert again.posted[-1].epoch == 2
    assert model.requests == []


async def crash(
    make: Make, link: FakeLink, model: FakeModel, when: Callable[[], object], *, live: bool = False
) -> None:
    """Run an event until `when`, then lose the process: nothing more of it is heard or written. `live`: somebody sees
    the text of its model as it comes.
    """
    runner = make(link, model)
    task = asyncio.create_task(runner.run(event_frame("e1", "go", live=live)))
    await until(when)
    runner.abandon()
    await task


async def test_a_turn_goes_on_after_the_last_stored_message(make: Make) -> None:
    before = FakeLink(lambda _, args: ok("early") if args["n"] == 1 else None)
    model = FakeModel(wants(("a", "notes__add", {"n": 1}), ("b", "notes__add", {"n": 2})))
    await crash(make, before, model, lambda: len(before.open_calls()) == 1 and before.calls)
    await settle()
    after, fresh = FakeLink(), FakeModel(says("done"))
    await make(after, fresh).run(event_frame("e1", "go", epoch=2))
    assert the_answer(after).response == "done"
    results = last_results(fresh.requests[0].messages)
    assert results == [("a", "ok"), ("b", "ok")]
    repeated = [frame.call_id for frame in after.calls]
    assert repeated
    assert set(repeated) <= {frame.call_id for frame in before.calls}
    assert all(frame.first_sent_ms is not None for frame in after.calls)
    assert all(frame.epoch == 2 for frame in after.calls)


async def test_a_stored_result_is_not_asked_for_again_but_acknowledged(make: Make) -> None:
    before = FakeLink(lambda _, args: ok("early") if args["n"] == 1 else None)
    model = FakeModel(wants(("a", "notes__add", {"n": 1}), ("b", "notes__add", {"n": 2})))
    runner = make(before, model)
    task = asyncio.create_task(runner.run(event_frame("e1", "go")))
    turn = turn_id("coder", "k", "e1")
    await until(lambda: len(runner.instance.store.turn_events(turn)) == 3)
    runner.abandon()
    await task
    after = FakeLink()
    later = make(after, FakeModel(says("done")))
    await later.run(event_frame("e1", "go", epoch=2))
    later.instance.acks.flush()
    assert [frame.call_id for frame in after.calls] == [f"{turn}/b"]
    assert sorted(after.acked()) == [f"{turn}/a", f"{turn}/b"]


async def test_a_crash_before_the_model_answered_asks_it_again(make: Make, tmp_path: Path) -> None:
    class Slow(FakeModel):
        async def complete(self, request: Any, on_delta: Any = None, on_news: Any = None) -> ModelAnswer:
            self.requests.append(request)
            on_delta(TextDelta("What it had said already, "))
            await asyncio.sleep(60)
            raise AssertionError

    slow = Slow()
    await crash(make, FakeLink(), slow, lambda: slow.requests, live=True)
    link, model = FakeLink(), FakeModel(says("done"))
    await make(link, model).run(event_frame("e1", "go", epoch=2))
    assert (the_answer(link).response, the_answer(link).steps) == ("done", 1)
    assert len(model.requests[0].messages) == 1, "what it had said is not used"
    story = ["step.started", "turn.resumed", "model.answered"]
    assert noted(tmp_path, *story) == story


async def test_an_event_taken_away_for_good_leaves_a_valid_history(make: Make) -> None:
    before = FakeLink(lambda *_: None)
    await crash(make, before, FakeModel(wants(("a", "notes__add", {}))), lambda: before.calls)
    link, model = FakeLink(), FakeModel(says("other"), says("back"))
    runner = make(link, model)
    await runner.run(event_frame("e2", "another", epoch=2))
    assert is_presentable(model.requests[0].messages)
    assert last_results(model.requests[0].messages) == [("a", "error")]
    # the event comes back from the dead letters: a new attempt, with callIds of its own
    await runner.run(event_frame("e1", "go", epoch=3))
    assert link.answers()[-1].turn_id == turn_id("coder", "k", "e1", 2)


async def test_a_stale_holder_writes_and_says_nothing(make: Make) -> None:
    old = FakeLink(lambda *_: None)
    runner = make(old, FakeModel(wants(("a", "notes__add", {})), says("stale")))
    task = asyncio.create_task(runner.run(event_frame("e1", "go", epoch=1)))
    await until(lambda: old.calls)
    new = FakeLink()
    await make(new, FakeModel(says("fresh"))).run(event_frame("e1", "go", epoch=2))
    old.finish(old.open_calls()[0], ok("late"))
    await task
    assert old.answers() == []
    assert the_answer(new).response == "fresh"


async def test_an_event_with_an_old_epoch_is_left_alone(make: Make) -> None:
    await make(FakeLink(), FakeModel(says("x"))).run(event_frame("e1", "go", epoch=5))
    link, model = FakeLink(), FakeModel()
    await make(link, model).run(event_frame("e2", "go", epoch=4))
    assert (link.answers(), model.requests) == ([], [])


async def test_an_event_that_is_given_back_is_not_held_any_more_and_may_come_again_at_once(make: Make) -> None:
    class Unheard(FakeLink):
        def post(self, frame: Frame) -> asyncio.Future[Frame]:
            answered = super().post(frame)
            return answered if frame.stage != "release" else asyncio.get_running_loop().create_future()

    link = Unheard()
    runner = make(link, FakeModel())
    runner.pause()
    frame = event_frame("e1", "go")
    task = asyncio.create_task(runner.run(frame))
    await until(lambda: any(sent.stage == "release" for sent in link.posted))
    assert [lease.event_id for lease in runner.leases()] == ["e1"], "the broker has not said that it has it"
    assert not runner.holds(frame), "handed over again, it is no repeat"
    task.cancel()


async def test_a_paused_runner_gives_turns_back(make: Make) -> None:
    link = FakeLink(lambda *_: None)
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("never")))
    task = asyncio.create_task(runner.run(event_frame("e1", "go")))
    await until(lambda: link.calls)
    runner.pause()
    link.finish(link.open_calls()[0], ok(1))
    await task
    await runner.run(event_frame("e2", "go"))
    posted = [(frame.stage, frame.event_id) for frame in link.posted]
    assert posted == [("release", "e1"), ("release", "e2")]
    assert link.sent[-1].calls == [link.calls[0].call_id]  # while the broker knows the call
    after = FakeLink()
    await make(after, FakeModel(says("done"))).run(event_frame("e1", "go", epoch=2))
    assert the_answer(after).response == "done"
    assert after.calls == []


class Crash(BaseException):
    """The process is gone."""


class CrashingStore(ConversationStore):
    """Loses the process at its n-th transaction, just before it is committed or just after."""

    def __init__(self, directory: str, crash_at: int, committed: bool) -> None:
        super().__init__(directory, durability="process")
        self._left = crash_at
        self._committed = committed

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._left -= error is None
        lost = Crash() if error is None and self._left == 0 else None
        super().__exit__(kind, error if self._committed else error or lost, trace)
        if lost is not None:
            raise lost


class SteadyModel(FakeModel):
    """Says the same in the same step, whoever asks: two steps with three calls each, then text."""

    async def complete(self, request: Any, on_delta: Any = None, on_news: Any = None) -> ModelAnswer:
        self.requests.append(request)
        if request.step > 2:
            return says(f"{len(last_results(request.messages))} results")
        return wants(*((f"s{request.step}c{n}", "notes__add", {"n": n}) for n in range(3)))


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("crash_at", range(1, 9))
async def test_a_crash_at_any_write_changes_nothing_but_time(tmp_path: Path, crash_at: int, committed: bool) -> None:
    spec, folder = make_spec(str(tmp_path)), instance_dir(str(tmp_path), "coder", "k")
    links: list[FakeLink] = []
    for epoch in range(1, 20):
        links.append(FakeLink())
        # every second incarnation crashes as well, one transaction later each time
        at = crash_at + epoch if epoch % 2 else 0
        store = CrashingStore(folder, crash_at if epoch == 1 else at, committed)
        runner = TurnRunner(Instance(spec, "k", links[-1], store, provider=SteadyModel()))
        try:
            await runner.run(event_frame("e1", "go", epoch=epoch))
            break
        except Crash:
            pass
        finally:
            await runner.close()
    turn = turn_id("coder", "k", "e1")
    answer = the_answer(links[-1])
    assert (answer.status, answer.response, answer.turn_id, answer.steps) == ("completed", "6 results", turn, 3)
    called = {str(frame.call_id) for link in links for frame in link.calls}
    assert called == {f"{turn}/s{step}c{n}" for step in (1, 2) for n in range(3)}
    assert sum(len(link.answers()) for link in links) == 1
    story = noted(tmp_path, "turn.started", "turn.completed", "step.started", "step.completed", "tool.called")
    step = ["step.started", *["tool.called"] * 3, "step.completed"]
    assert story == ["turn.started", *step, *step, "step.started", "step.completed", "turn.completed"]
    with closing(ConversationStore(folder)) as after:
        messages = after.load_messages()
        assert is_presentable(messages)
        assert last_results(messages) == [(f"s{step}c{n}", "ok") for step in (1, 2) for n in range(3)]
        assert after.running_turns() == []


# --- a file that fails ------------------------------------------------------------------------------------------------


async def test_a_broken_file_fails_the_turn_and_the_process_serves_on(make: Make, tmp_path: Path) -> None:
    folder = Path(instance_dir(str(tmp_path), "coder", "k"))
    folder.mkdir(parents=True)
    (folder / "conversation.db").write_bytes(b"garbage" * 1000)
    link = FakeLink()
    runner = make(link, FakeModel(says("fine")))
    await runner.run(event_frame("e1", "go"))
    (folder / "conversation.db").unlink()
    await runner.run(event_frame("e2", "go"))
    first, second = link.answers()
    assert (first.status, code_of(first)) == ("failed", "E_STATE")
    assert second.response == "fine"


async def test_a_disk_that_fills_up_during_a_turn_fails_it_once(make: Make) -> None:
    link = FakeLink(lambda *_: None)
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("fine")))
    task = asyncio.create_task(runner.run(event_frame("e1", "go")))
    await until(lambda: link.calls)
    assert runner.instance.store._db is not None
    runner.instance.store._db.execute("PRAGMA max_page_count = 1")
    link.finish(link.open_calls()[0], ok("x" * 100_000))
    await task
    assert code_of(the_answer(link)) == "E_DISK_FULL"
    assert (link.posted[-1].cause or "").startswith("E_DISK_FULL: "), "the message is not to blame"
    await runner.run(event_frame("e2", "go"))
    assert link.answers()[-1].response == "fine"


async def test_a_bug_fails_the_turn_with_one_error(make: Make, link: FakeLink, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(link, FakeModel(says("a"), says("b")))
    with monkeypatch.context() as patch:
        patch.setattr(runner.instance.store, "begin_turn", lambda *_: 1 / 0)
        await runner.run(event_frame("e1", "go"))
    await runner.run(event_frame("e2", "go"))
    first, second = link.answers()
    assert code_of(first) == "E_INTERNAL"
    assert "division" not in str(first.error)
    assert second.status == "completed"
