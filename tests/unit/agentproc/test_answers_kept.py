"""What of a model's answer besides its text is stored, noted and told: its reasoning, and that it was cut off."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.machine.answers import MAX_ANSWER_BYTES, answer_payload
from goondan.agentproc.machine.estimate import message_size
from goondan.agentproc.machine.messages import (
    MAX_REASONING,
    AssistantData,
    Message,
    MessageSource,
    TextPart,
    decode_message,
)
from goondan.agentproc.machine.turn import AskedCall, End, Resume, Turn
from goondan.agentproc.providers.base import ModelAnswer, ModelFailure, Usage
from goondan.schemas.wire.blobs import MAX_BLOB_BYTES
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import CUT_MARK
from goondan.schemas.wire.frames import AgentEvent, ToolCallPayload
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame
from tests.unit.agentproc.turns import Make, the_answer

HALF = ModelAnswer(
    text="half",
    finish_reason="length",
    reasoning="a secret thought",
    cut_off=True,
    usage=Usage(90, 20, 60, 10, 15),
    metadata={"vendor": {"n": 1}},
)


async def test_the_answer_says_that_it_was_cut_off_and_has_the_reasoning_beside_the_text(
    make: Make, link: FakeLink, tmp_path: Path
) -> None:
    call = ModelAnswer(calls=[AskedCall("a", "notes__add", {})], reasoning="first a note", cut_off=True)
    runner = make(link, FakeModel(call, HALF))
    await runner.run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert (answer.status, answer.response, answer.finish_reason) == ("completed", "half", "length")
    assert (answer.cut_off, answer.reasoning) == (True, "a secret thought")
    said = [m for m in runner.instance.store.load_messages() if isinstance(m.data, AssistantData)]
    assert [message.metadata for message in said] == [
        {"reasoning": "first a note", "cutOff": True},
        {"vendor": {"n": 1}, "reasoning": "a secret thought", "cutOff": True},
    ]
    with closing(sqlite3.connect(next(tmp_path.rglob("conversation.db")))) as db:
        rows = db.execute("SELECT detail FROM runtime_events WHERE type = 'model.answered' ORDER BY seq").fetchall()
    noted = json.loads(rows[-1][0])
    counts = {"inputTokens": 90, "outputTokens": 20, "cachedTokens": 60, "cacheWriteTokens": 10, "reasoningTokens": 15}
    assert noted == {"step": 2, "model": "embedded", "finishReason": "length", "cutOff": True, **counts}
    assert not any("thought" in row[0] for row in rows), "a trace holds no text"


async def test_tools_see_neither_the_reasoning_nor_what_is_for_the_vendor(make: Make, link: FakeLink) -> None:
    kept = {"vendor": {"provider": "p", "model": "m", "blocks": ["sealed"]}, "other": 1}
    call = ModelAnswer(calls=[AskedCall("a", "notes__add", {})], reasoning="a thought", metadata=kept)
    await make(link, FakeModel(call, ModelAnswer(text="done"))).run(event_frame("e1", "go"))
    (frame,) = link.calls
    message = from_raw(frame.payload, ToolCallPayload).message
    assert message is not None
    assert decode_message(message).metadata == {"other": 1}


def test_reasoning_that_goes_back_counts_as_a_part_of_the_request() -> None:
    said = AssistantData([TextPart("x")])
    sizes = []
    for kept in ({}, {"reasoning": "reasoning_content"}):
        metadata = {"reasoning": "y" * 1000, "vendor": {"provider": "p", "model": "m", **kept}}
        sizes.append(message_size(Message("m", said, "", MessageSource("assistant"), metadata)))
    assert sizes[1] - sizes[0] > 1000


async def test_only_the_last_message_decides(make: Make, link: FakeLink) -> None:
    call = ModelAnswer(calls=[AskedCall("a", "notes__add", {})], reasoning="first a note", cut_off=True)
    await make(link, FakeModel(call, ModelAnswer(text="done"))).run(event_frame("e1", "go"))
    assert (the_answer(link).cut_off, the_answer(link).reasoning) == (False, None)


async def test_an_answer_that_is_none_is_noted_with_its_tokens(make: Make, link: FakeLink, tmp_path: Path) -> None:
    class Silent(FakeModel):
        async def complete(self, request: Any, on_delta: Any = None, on_news: Any = None) -> ModelAnswer:
            raise ModelFailure("reasoning only", suggestion="Raise it.", usage=Usage(5, 900, reasoning_tokens=890))

    await make(link, Silent()).run(event_frame("e1", "go"))
    error = the_answer(link).error
    assert error is not None
    assert (error.code, error.suggestion) == ("E_MODEL_FAILED", "Raise it.")
    with closing(sqlite3.connect(next(tmp_path.rglob("conversation.db")))) as db:
        (row,) = db.execute("SELECT detail FROM runtime_events WHERE type = 'model.failed'").fetchone()
    noted = json.loads(row)
    assert (noted["inputTokens"], noted["outputTokens"], noted["reasoningTokens"]) == (5, 900, 890)


def test_a_turn_that_goes_on_elsewhere_still_knows_it() -> None:
    said = AssistantData([TextPart("half")])
    stored = Message("t.1", said, "2026-01-01T00:00:00.000Z", MessageSource("assistant"))
    for metadata, told in (({"cutOff": True, "reasoning": "hm"}, (True, "hm")), ({"reasoning": 5}, (False, None))):
        turn = Turn("t", max_steps=4)
        message = Message(stored.id, said, stored.created_at, stored.source, metadata)
        end = turn.handle(Resume([(1, message)]), stored.created_at)[-1]
        assert isinstance(end, End)
        assert (end.response, end.cut_off, end.reasoning) == ("half", *told)


async def test_long_reasoning_is_cut(make: Make, link: FakeLink) -> None:
    runner = make(link, FakeModel(ModelAnswer(text="x", reasoning="y" * (MAX_REASONING + 1))))
    await runner.run(event_frame("e1", "go"))
    kept = the_answer(link).reasoning or ""
    assert len(kept) == MAX_REASONING
    assert kept.endswith(CUT_MARK)


def test_reasoning_and_response_fit_into_an_answer_together() -> None:
    end = End(
        status="completed", steps=1, response="\U0001f600" * (MAX_ANSWER_BYTES // 4), reasoning="\u3042" * MAX_REASONING
    )
    payload = answer_payload(end, "t", "e", "2026-01-01T00:00:00.000Z")
    assert len(payload) <= MAX_BLOB_BYTES
    answer = from_raw(payload, AgentEvent).answer
    assert answer is not None
    assert (answer.reasoning, (answer.response or "").endswith(CUT_MARK)) == (end.reasoning, True)


@pytest.mark.parametrize("where", ["turn", "step.llmCall"])
async def test_a_layer_that_changes_the_text_takes_the_reasoning_away(make: Make, link: FakeLink, where: str) -> None:
    async def turn(ctx: Any) -> Any:
        result = await ctx.next()
        result.response = "***"
        return result

    async def call(ctx: Any, proceed: Any) -> Any:
        result = await proceed(ctx)
        result.llm_result.text = "***"
        return result

    runner = make(link, FakeModel(HALF))
    if where == "turn":
        runner.instance.pipeline.register("turn", turn, extension="ext", priority=0)
    else:
        runner.instance.pipeline.add_to_point("wrap", where, call, extension="ext", priority=0)
    await runner.run(event_frame("e1", "go"))
    answer = the_answer(link)
    assert (answer.response, answer.cut_off, answer.reasoning) == ("***", True, None)
