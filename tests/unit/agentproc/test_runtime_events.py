"""Runtime events of turns: stored with what they tell of, each once, under ids that last; and told to who listens."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.machine.answers import turn_id
from goondan.agentproc.providers.base import ModelAnswer, Usage
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.system.trace_index import of_trace
from goondan.schemas.text.redaction import Redactor
from goondan.schemas.traces.turn_notes import MAX_NOTED_MESSAGE, SHORT_CHARS, WHOLE_CHARS, in_short
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import ToolResult
from goondan.schemas.wire.runtime_events import RuntimeEvent
from goondan.schemas.wire.spans import call_span, model_span, step_span, turn_span
from goondan.schemas.worker.receipts import CallReceipt, JailReceipt, Receipt
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, the_answer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TURN = turn_id("coder", "k", "e1")


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(next(folder.rglob("conversation.db")))) as db:
        return db.execute(query).fetchall()


def notes(folder: Path) -> list[tuple[Any, ...]]:
    """Kind, span and parent of all that is stored."""
    return rows(folder, "SELECT type, span_id, parent_span_id FROM runtime_events ORDER BY seq")


def details(folder: Path, kind: str) -> list[Any]:
    found = rows(folder, f"SELECT detail FROM runtime_events WHERE type = '{kind}' ORDER BY seq")
    return [None if detail is None else msgspec.json.decode(detail) for (detail,) in found]


async def test_what_a_turn_does_is_stored_with_its_place_in_the_trace(make: Make, tmp_path: Path) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(wants(("a", "bash__exec", {"command": "x"})), says("done")))
    await runner.run(
        event_frame("e1", "go", trace_id=TRACE, parent_span_id=SPAN, waited_ms=12, place_ms=5, chain=["a/k"])
    )
    turn, first, second = turn_span(TURN), step_span(TURN, 1), step_span(TURN, 2)
    call = call_span(f"{TURN}/a")
    assert notes(tmp_path) == [
        ("turn.started", turn, SPAN),
        ("step.started", first, turn),
        ("model.answered", model_span(TURN, 1), first),
        ("tool.called", call, first),
        ("tool.completed", call, first),
        ("step.completed", first, turn),
        ("step.started", second, turn),
        ("model.answered", model_span(TURN, 2), second),
        ("step.completed", second, turn),
        ("turn.completed", turn, SPAN),
    ]
    assert details(tmp_path, "turn.started") == [{"traceId": TRACE, "waitedMs": 12, "awaited": True, "placeMs": 5}]
    columns = "turn_id, trace_id, parent_span_id, waited_ms, first_note"
    assert rows(tmp_path, f"SELECT {columns} FROM turns") == [(TURN, TRACE, SPAN, 12, 1)]
    assert the_answer(link).trace_id == TRACE
    assert [(frame.span_id, frame.parent_span_id) for frame in link.calls] == [(call, first)]


@pytest.mark.parametrize("trace", [None, "no trace id", "0" * 32])
async def test_a_turn_without_a_trace_has_one_of_its_own(make: Make, tmp_path: Path, trace: str | None) -> None:
    await make(FakeLink(), FakeModel(says("done"))).run(event_frame("e1", "go", trace_id=trace))
    ((made,),) = rows(tmp_path, "SELECT trace_id FROM turns")
    assert len(made) == 32
    assert made != trace


@pytest.mark.parametrize("live", [False, True])
async def test_a_failure_has_its_error_without_secrets(make: Make, link: FakeLink, tmp_path: Path, live: bool) -> None:
    secret = "sk-0123456789abcdef"
    spec = ModelSpec(provider="openai", model="m", api_key=secret)
    words = f"401 for {secret} " + "x" * 5000
    runner = make(link, FakeModel(fail("E_MODEL_FAILED", words)), model=spec)
    await runner.run(event_frame("e1", "go", live=live))
    ((step,), (turn,)) = details(tmp_path, "step.failed"), details(tmp_path, "turn.failed")
    assert (step["step"], step["error"]["code"], turn["error"]["code"]) == (1, "E_MODEL_FAILED", "E_MODEL_FAILED")
    assert step["error"]["message"].startswith("401 for ***")
    assert len(step["error"]["message"]) == len(turn["error"]["message"]) == MAX_NOTED_MESSAGE
    told = [from_raw(f.payload, RuntimeEvent) for f in link.sent if f.type == "runtime.event"]
    failed = [event for event in told if event.kind in ("step.failed", "turn.failed")]
    assert [(event.kind, event.step) for event in failed] == ([("step.failed", 1), ("turn.failed", 0)] if live else [])
    for event in failed:
        assert event.error is not None
        assert event.error.message.startswith("401 for ***")
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("conversation.db*"))
    assert secret.encode() not in stored
    assert not any(secret.encode() in bytes(frame.payload) for frame in (*link.sent, *link.posted))


async def test_a_failed_call_has_its_error(make: Make, tmp_path: Path) -> None:
    def handler(tool: str, args: Any) -> ToolResult | GoondanError:
        return fail("E_TOOL_TIMEOUT", "too late for sk-0123456789abcdef")

    spec = ModelSpec(provider="openai", model="m", api_key="sk-0123456789abcdef")
    model = FakeModel(wants(("a", "bash__exec", {"command": "x"})), says("done"))
    runner = make(FakeLink(handler), model, model=spec)
    await runner.run(event_frame("e1", "go"))
    (failed,) = details(tmp_path, "tool.failed")
    assert (failed["code"], failed["message"]) == ("E_TOOL_TIMEOUT", "too late for ***")
    assert details(tmp_path, "step.completed") == [1, 2], "the step dealt with it"


async def test_a_refused_call_is_noted_with_its_arguments_in_short_and_the_others_are_not(
    make: Make, tmp_path: Path
) -> None:
    secret = "sk-0123456789abcdef"
    spec = ModelSpec(provider="openai", model="m", api_key=secret)
    calls = wants(("a", "bash__exec", {"command": "x"}), ("b", "no__such", {"key": secret, "more": "y" * 500}))
    await make(FakeLink(), FakeModel(calls, says("done")), model=spec).run(event_frame("e1", "go"))
    (refused,) = details(tmp_path, "call.refused")
    assert (refused["by"], refused["toolName"], refused["toolCallId"]) == ("catalog", "no__such", "b")
    assert refused["args"].startswith('{"key":"***","more":"yyy')
    assert len(refused["args"]) <= SHORT_CHARS
    cut = in_short({"text": "x" * (SHORT_CHARS - 34) + secret + "y" * 50}, SHORT_CHARS, Redactor(secret))
    assert "sk-0" not in cut, "one that the cut goes through"
    for kind, key in (("tool.called", "args"), ("tool.completed", "output")):
        assert not any(key in detail for detail in details(tmp_path, kind)), "a message has them"


async def test_an_agent_that_keeps_its_traces_whole_notes_arguments_and_results_within_bounds(
    make: Make, tmp_path: Path
) -> None:
    def handler(tool: str, args: Any) -> ToolResult | GoondanError:
        return ToolResult(status="ok", output=to_raw({"text": "z" * 20_000}))

    calls = wants(("a", "bash__exec", {"command": "x" * 1000}))
    await make(FakeLink(handler), FakeModel(calls, says("done")), traces="whole").run(event_frame("e1", "go"))
    (called,), (ended,) = details(tmp_path, "tool.called"), details(tmp_path, "tool.completed")
    assert msgspec.json.decode(called["args"]) == {"command": "x" * 1000}
    assert ended["output"].startswith('{"text":"zzz')
    assert len(ended["output"]) == WHOLE_CHARS


async def test_a_call_that_succeeds_without_its_network_is_a_refused_one(make: Make, tmp_path: Path) -> None:
    receipt = Receipt(
        jail=JailReceipt(tier="full", walls=[], limits={}), call=CallReceipt(wall_ms=1.0, denied=["evil.example:80"])
    )

    def handler(tool: str, args: Any) -> ToolResult | GoondanError:
        return ToolResult(status="ok", output=to_raw({}), receipt=to_raw(receipt))

    calls = wants(("a", "bash__exec", {"command": "curl evil.example"}))
    await make(FakeLink(handler), FakeModel(calls, says("done"))).run(event_frame("e1", "go"))
    (refused,) = details(tmp_path, "call.refused")
    assert (refused["by"], refused["allow"]) == ("grant", "Tool/bash: spec.sandbox.network: {allow: [evil.example:80]}")
    assert refused["args"] == '{"command":"curl evil.example"}'


@pytest.mark.feature("budgets")
async def test_a_turn_that_is_refused_is_noted(make: Make, tmp_path: Path) -> None:
    await make(FakeLink(), FakeModel(fail("E_BUDGET_SPENT", "the budget is spent"))).run(event_frame("e1", "go"))
    (refused,) = details(tmp_path, "call.refused")
    assert (refused["by"], refused.get("toolName"), refused["message"]) == ("budget", None, "the budget is spent")


async def test_a_turn_out_of_steps_fails_and_its_last_step_does_not(make: Make, tmp_path: Path) -> None:
    runner = make(FakeLink(), FakeModel(wants(("a", "notes__add", {}))), max_steps_per_turn=1)
    await runner.run(event_frame("e1", "go"))
    assert [kind for kind, _, _ in notes(tmp_path)][-2:] == ["step.completed", "turn.failed"]


async def test_a_listener_is_told_with_the_same_ids(make: Make, link: FakeLink, tmp_path: Path) -> None:
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("done")))
    await runner.run(event_frame("e1", "go", live=True, parent_span_id=SPAN))
    told = [frame for frame in link.sent if frame.type == "runtime.event"]
    kinds = [from_raw(frame.payload, RuntimeEvent).kind for frame in told]
    heard = [(kind, frame.span_id, frame.parent_span_id) for kind, frame in zip(kinds, told, strict=True)]
    assert heard == [note for note in notes(tmp_path) if not note[0].startswith("model.")]


async def test_steps_with_middleware_are_noted_too(make: Make, tmp_path: Path) -> None:
    async def step(ctx: Any) -> Any:
        result = await ctx.next()
        if ctx.step_index == 0:
            result.should_continue = True  # the model is asked once more
        return result

    async def turn(ctx: Any) -> Any:
        return await ctx.next()

    runner = make(FakeLink(), FakeModel(fail("E_MODEL_FAILED", "busy"), says("done")))
    runner.instance.pipeline.register("step", step, extension="ext")
    runner.instance.pipeline.register("turn", turn, extension="ext")
    await runner.run(event_frame("e1", "go"))
    assert [kind for kind, _, _ in notes(tmp_path)] == [
        *("turn.started", "step.started", "model.failed", "step.failed"),
        *("step.started", "model.answered", "step.completed", "turn.completed"),
    ]


async def test_tries_and_pauses_of_a_model_call_are_noted(make: Make, tmp_path: Path) -> None:
    class Busy(FakeModel):
        async def complete(self, request: Any, on_delta: Any = None, on_news: Any = None) -> ModelAnswer:
            for news in ("asking", "content", "waiting", "asking"):
                on_news(news)
            return ModelAnswer(text="done", usage=Usage(3, 4))

    await make(FakeLink(), Busy()).run(event_frame("e1", "go"))
    (answered,) = details(tmp_path, "model.answered")
    assert (answered["attempts"], answered["inputTokens"], answered["outputTokens"]) == (2, 3, 4)


async def test_a_bug_does_not_leave_a_turn_running(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = FakeLink()
    runner = make(link, FakeModel(wants(("a", "notes__add", {})), says("b")))
    with monkeypatch.context() as patch:
        patch.setattr(runner.instance.caller, "start", lambda *_, **__: 1 / 0)
        await runner.run(event_frame("e1", "go"))
    ((status,),) = rows(tmp_path, "SELECT status FROM turns")
    (failed,) = details(tmp_path, "turn.failed")
    assert (status, failed["error"]["code"], the_answer(link).status) == ("failed", "E_INTERNAL", "failed")


async def test_a_turn_is_in_the_index_and_goes_on_without_one(make: Make, link: FakeLink, tmp_path: Path) -> None:
    await make(link, FakeModel(says("one"))).run(event_frame("e1", "go", trace_id=TRACE))
    ((found,),) = [of_trace(str(tmp_path), TRACE)]
    assert (found.turn_id, found.event_id, found.agent, found.instance_key) == (TURN, "e1", "coder", "k")
    with closing(sqlite3.connect(tmp_path / "traces/index.db", isolation_level=None)) as somebody:
        somebody.execute("BEGIN IMMEDIATE")
        await make(link, FakeModel(says("two"))).run(event_frame("e2", "go", trace_id=TRACE))
    assert of_trace(str(tmp_path), TRACE) == [found]
    assert [answer.response for answer in link.answers()] == ["one", "two"]


async def test_a_turn_that_fails_in_its_first_moment_is_in_the_index(
    make: Make, link: FakeLink, tmp_path: Path
) -> None:
    runner = make(link, FakeModel(), [], parts={"unclaimed": to_raw(1)})
    await runner.run(event_frame("e1", "go", trace_id=TRACE))
    assert rows(tmp_path, "SELECT status FROM turns") == [("failed",)]
    assert [row.event_id for row in of_trace(str(tmp_path), TRACE)] == ["e1"]


def test_a_later_attempt_begins_anew(tmp_path: Path) -> None:
    store = ConversationStore(str(tmp_path), durability="process")
    store.adopt(1)
    for attempt in (1, 2):
        with store.write():
            store.begin_turn("e1", f"t-{attempt}", attempt, "now", trace_id=TRACE, waited_ms=attempt)
            store.note(f"t-{attempt}", "turn.started", "now")
    store.close()
    assert rows(tmp_path, "SELECT turn_id, waited_ms, first_note FROM turns") == [("t-2", 2, 2)]
