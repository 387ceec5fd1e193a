"""Streams of any server: wherever the bytes are cut, and whatever is in them, the answer is the same, or a fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.http import wire_of
from goondan.agentproc.providers.base import ModelAnswer
from goondan.agentproc.providers.faults import Fault
from goondan.agentproc.providers.reader import MAX_ANSWER_CHARS, MAX_NAME, SseDecoder
from goondan.schemas.models.model_providers import BY_NAME
from goondan.schemas.wire.codec import encode_value
from tests.unit.agentproc.vendor_formats import asked

PROVIDERS = sorted(BY_NAME)
ALL = pytest.mark.parametrize("provider", PROVIDERS)

Heard = tuple[ModelAnswer | str, str, str]


def hear(provider: str, chunks: list[bytes]) -> Heard:
    """The answer or the words of the fault, and the text and the reasoning as they were streamed."""
    reader, decoder = wire_of(provider).VENDOR().reader(asked([], provider)), SseDecoder()
    text = reasoning = ""
    try:
        for chunk in chunks:
            for event in decoder.feed(chunk):
                text += reader.read([event])
                reasoning += reader.take_reasoning()
        for event in decoder.end():
            text += reader.read([event])
            reasoning += reader.take_reasoning()
        answer = reader.answer()
    except Fault as fault:
        return f"{fault.kind}: {fault.message}", text, reasoning
    encode_value([answer.text, [call.args for call in answer.calls], answer.metadata, answer.reasoning])
    assert answer.reasoning == reasoning
    return answer, text, reasoning


words = st.text(max_size=6)
numbers = st.integers(0, 3)


def _anthropic() -> st.SearchStrategy[dict[str, Any]]:
    kinds = st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "new"])
    block = st.fixed_dictionaries(
        {"type": kinds}, optional={"text": words, "thinking": words, "id": words, "name": words}
    )
    delta = st.fixed_dictionaries(
        {"type": words}, optional={"text": words, "thinking": words, "partial_json": words, "signature": words}
    )
    return st.one_of(
        st.builds(lambda i, b: {"type": "content_block_start", "index": i, "content_block": b}, numbers, block),
        st.builds(lambda i, d: {"type": "content_block_delta", "index": i, "delta": d}, numbers, delta),
        st.sampled_from(["end_turn", "max_tokens", "refusal"]).map(
            lambda why: {"type": "message_delta", "delta": {"stop_reason": why}, "usage": {"output_tokens": 5}}
        ),
    )


def _openai() -> st.SearchStrategy[dict[str, Any]]:
    call = st.fixed_dictionaries(
        {"index": st.none() | numbers}, optional={"id": words, "function": st.fixed_dictionaries({"name": words})}
    )
    delta = st.fixed_dictionaries(
        {},
        optional={
            "content": words,
            "reasoning": words,
            "reasoning_content": words,
            "tool_calls": st.lists(call, max_size=2),
        },
    )
    why = st.sampled_from([None, None, "stop", "length", "tool_calls", "content_filter"])
    return st.builds(lambda d, w: {"choices": [{"index": 0, "delta": d, "finish_reason": w}]}, delta, why)


def _responses() -> st.SearchStrategy[dict[str, Any]]:
    kinds = st.sampled_from(["message", "reasoning", "function_call", "new"])
    texts = st.lists(st.fixed_dictionaries({"text": words}), max_size=2)
    item = st.fixed_dictionaries(
        {"type": kinds},
        optional={"call_id": words, "name": words, "content": texts, "summary": texts, "encrypted_content": words},
    )
    begins = st.sampled_from(["response.output_item.added", "response.output_item.done"])
    pieces = ["output_text", "refusal", "function_call_arguments", "reasoning_summary_text", "reasoning_text", "new"]
    statuses = st.sampled_from(["completed", "incomplete", "failed"])
    return st.one_of(
        st.builds(lambda t, i, x: {"type": t, "output_index": i, "item": x}, begins, numbers, item),
        st.builds(
            lambda t, i, d: {"type": f"response.{t}.delta", "output_index": i, "delta": d},
            st.sampled_from(pieces), numbers, words,
        ),
        st.builds(
            lambda s, o: {"type": f"response.{s}", "response": {"status": s, "output": o}},
            statuses, st.lists(item, max_size=2),
        ),
    )  # fmt: skip


EVENTS = {"anthropic": _anthropic(), "openai": _openai(), "responses": _responses()}
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


def encoded(events: list[Any]) -> bytes:
    named = [f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else "" for event in events]
    return "".join(
        f"{name}data: {json.dumps(event)}\n\n" for name, event in zip(named, events, strict=True)
    ).encode("utf-8", "replace")  # fmt: skip


@ALL
@given(data=st.data(), cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_the_answer_is_the_same_wherever_the_stream_is_cut(provider: str, data: st.DataObject, cuts: list[int]) -> None:
    events: list[Any] = data.draw(st.lists(EVENTS[provider], max_size=8))
    if data.draw(st.integers(0, 5)) == 0:
        events.insert(data.draw(st.integers(0, len(events))), data.draw(junk))
    stream = encoded(events)
    places = sorted({min(cut, len(stream)) for cut in cuts})
    pieces = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]
    assert hear(provider, pieces) == hear(provider, [stream])


@ALL
def test_every_provider_reads_its_own_rehearsed_streams(provider: str) -> None:
    called, done = wire_of(provider).REHEARSED
    answer, _, _ = hear(provider, [called.encode()])
    assert isinstance(answer, ModelAnswer)
    assert [(call.name, call.args) for call in answer.calls] == [("TOOL", {"a": "1"})]
    answer, text, _ = hear(provider, [bytes([byte]) for byte in done.encode()])
    assert isinstance(answer, ModelAnswer)
    assert (answer.text, text) == ("done", "done")


#: An answer in each format that says why it stops.
STOPPED: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "anthropic": lambda why: [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "hi"}},
        {"type": "message_delta", "delta": {"stop_reason": why}},
        {"type": "message_stop"},
    ],
    "openai": lambda why: [{"choices": [{"delta": {"content": "hi"}, "finish_reason": why}]}],
    "responses": lambda why: [
        {"type": "response.output_text.delta", "output_index": 0, "delta": "hi"},
        {
            "type": "response.incomplete",
            "response": {"status": "incomplete", "incomplete_details": {"reason": why}},
        },
    ],
}


@ALL
def test_why_a_model_stopped_is_a_short_line(provider: str) -> None:
    answer, _, _ = hear(provider, [encoded(STOPPED[provider]("\x1b[2J" + "x" * 1_000_000))])
    assert isinstance(answer, ModelAnswer)
    assert answer.finish_reason == "[2J" + "x" * (MAX_NAME - 3)


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999", b'["\\ud83d", 1e999]'])
def test_a_number_that_is_none_is_no_answer(number: bytes) -> None:
    tool = b'{"type": "tool_use", "id": "c1", "name": "t", "input": {"a": %s}}' % number
    with pytest.raises(Fault, match=r"no JSON|out of range"):
        wire_of("anthropic").VENDOR().reader(asked([], "anthropic")).read_whole(b'{"content": [%s]}' % tool)


#: A piece of reasoning in each format.
THOUGHTS: dict[str, list[dict[str, Any]]] = {
    "anthropic": [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}},
        {"type": "content_block_delta", "index": 0, "delta": {"thinking": "x" * 4096}},
    ],
    "openai": [{"choices": [{"delta": {"reasoning_content": "x" * 4096}}]}],
    "responses": [{"type": "response.reasoning_text.delta", "output_index": 0, "delta": "x" * 4096}],
}


@ALL
def test_reasoning_without_end_is_bounded(provider: str) -> None:
    *first, piece = THOUGHTS[provider]
    events = [*first, *[piece] * (MAX_ANSWER_CHARS // 4096 + 1)]
    heard, _, reasoning = hear(provider, [encoded(events)])
    assert heard == f"final: an answer of more than {MAX_ANSWER_CHARS} characters"
    assert len(reasoning) <= MAX_ANSWER_CHARS
