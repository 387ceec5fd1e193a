"""What the answers of model servers mean, in each vendor's format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.http import wire_of
from goondan.agentproc.machine.messages import (
    AssistantData,
    TextPart,
    ToolCallPart,
    UserData,
)
from goondan.agentproc.providers.anthropic import Reader as AnthropicReader
from goondan.agentproc.providers.base import Usage
from goondan.agentproc.providers.faults import MAX_WORDS, Fault, error_words
from goondan.agentproc.providers.history import Said, kept_by
from goondan.agentproc.providers.openai import Reader as OpenAIReader
from goondan.agentproc.providers.reader import MAX_ANSWER_CHARS, MAX_CALLS
from goondan.schemas.models.model_providers import BY_NAME
from tests.unit.agentproc.vendor_formats import (
    asked,
    begin,
    body,
    calls,
    chunk,
    delta,
    entries,
    message,
    read_anthropic,
    read_openai,
    result,
    stop,
    tool,
)


def test_an_answer_of_anthropic() -> None:
    answer = read_anthropic(
        {
            "type": "message_start",
            "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 2}, "new": 1, "model": "m-2026"},
        },
        {"type": "ping"},
        {"type": "some_new_event", "index": 0, "delta": {"type": "x"}},
        begin(0, type="text", text="", citations=None),
        delta(0, type="text_delta", text="안"),
        delta(0, type="citations_delta", citation={"a": 1}),
        delta(0, type="text_delta", text="녕"),
        begin(1, type="some_new_block", data=[1]),
        delta(1, type="text_delta", text="unknown"),
        begin(2, type="tool_use", id="t1", name="a__b", input={}),
        delta(2, type="input_json_delta", partial_json=""),
        delta(2, type="input_json_delta", partial_json='{"x": "\\ud55c'),
        delta(2, type="input_json_delta", partial_json='"}'),
        begin(3, type="tool_use", id="t2", name="c__d", input={"whole": True}),
        delta(7, type="text_delta", text="of no block"),
        stop("tool_use"),
        {"type": "message_stop"},
    )
    assert answer.text == "안녕"
    assert [(c.id, c.name, c.args, c.broken) for c in answer.calls] == [
        ("t1", "a__b", {"x": "한"}, None),
        ("t2", "c__d", {"whole": True}, None),
    ]
    assert (answer.finish_reason, answer.usage, answer.metadata) == ("tool_use", Usage(7, 4, 2), None)
    assert (answer.reasoning, answer.cut_off, answer.model) == ("", False, "m-2026")


@pytest.mark.parametrize("provider", sorted(BY_NAME))
def test_an_error_that_a_server_tells_counts_more_than_rubbish_behind_it(provider: str) -> None:
    told = {"type": "error", "error": {"code": "insufficient_quota", "type": "insufficient_quota", "message": "spent"}}
    reader = wire_of(provider).VENDOR().reader(asked([], provider))
    with pytest.raises(Fault) as caught:
        reader.read([(b"error", json.dumps(told).encode()), (b"", b"oops")])
    assert (caught.value.kind, "spent" in caught.value.message) == ("quota", True)


def test_thinking_goes_back_as_it_came_and_where_it_was() -> None:
    answer = read_anthropic(
        begin(0, type="thinking", thinking="", signature=""),
        delta(0, type="thinking_delta", thinking="hm"),
        delta(0, type="signature_delta", signature="s1"),
        begin(1, type="text", text="So."),
        begin(2, type="tool_use", id="t1", name="a__b", input={}),
        begin(3, type="redacted_thinking", data="xyz"),
        begin(4, type="tool_use", id="t2", name="a__b", input={}),
        begin(5, type="thinking", thinking="aha", signature="s2"),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use"},
            "usage": {"output_tokens": 9, "output_tokens_details": {"thinking_tokens": 6}},
        },
    )
    assert (answer.reasoning, answer.usage) == ("hm\n\naha", Usage(0, 9, reasoning_tokens=6))
    said = AssistantData([TextPart(answer.text), *(ToolCallPart(c.id, c.name, c.args) for c in answer.calls)])
    messages = [message(0, UserData("go")), message(1, said, **(answer.metadata or {}))]
    expected: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "hm", "signature": "s1"},
        {"type": "text", "text": "So."},
        {"type": "tool_use", "id": "t1", "name": "a__b", "input": {}},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "tool_use", "id": "t2", "name": "a__b", "input": {}},
        {"type": "thinking", "thinking": "aha", "signature": "s2"},
    ]
    assert body(messages)["messages"][1]["content"] == expected
    plain = [part for part in expected if "thinking" not in part["type"]]
    other = entries(messages, "anthropic", "another-model")[1]
    assert isinstance(other, Said)
    assert other.kept == {}
    changed = [messages[0], message(1, AssistantData([TextPart("Edited."), *said.calls]), **(answer.metadata or {}))]
    assert body(changed)["messages"][1]["content"] == [{"type": "text", "text": "Edited."}, *plain[1:]]


def test_what_cannot_be_stored_is_not_kept() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    assert kept_by("p", "m", x=deep) is None
    assert kept_by("p", "m", x=10**400) is None
    assert kept_by("p", "m", x=2**70) == {"vendor": {"provider": "p", "model": "m", "x": float(2**70)}}


def test_an_answer_of_openai() -> None:
    answer = read_openai(
        chunk(role="assistant", content="", new_field={"x": 1}),
        {"choices": [{"index": 1, "delta": {"content": "another choice"}}]},
        chunk(content="안", reasoning_content="hm"),
        chunk(content=[{"type": "text", "text": "녕"}, {"type": "thinking", "thinking": []}]),
        chunk(tool_calls=[tool(0, "c1", "a__b", "")]),
        chunk(tool_calls=[tool(0, None, None, '{"x":')]),
        chunk(tool_calls=[tool(1, "c2", "c__d", "{}"), tool(0, None, "a__b", " 1}")]),
        chunk("tool_calls"),
        {
            "choices": [],
            "model": "m\n2026",
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 1},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
        },
    )
    assert answer.text == "안녕"
    assert [(c.id, c.name, c.args) for c in answer.calls] == [("c1", "a__b", {"x": 1}), ("c2", "c__d", {})]
    assert (answer.finish_reason, answer.usage) == ("tool_calls", Usage(5, 4, 3, 1, 2))
    assert answer.metadata == kept_by("openai", "m", reasoning="reasoning_content")
    assert (answer.reasoning, answer.cut_off, answer.model) == ("hm", False, "m 2026")


@pytest.mark.parametrize(("total", "written"), [(17, 12), (15, 10), (None, 10), (99, 10)])
def test_reasoning_is_a_part_of_the_output_whether_the_server_counts_it_in_or_beside(
    total: int | None, written: int
) -> None:
    counted = {
        "prompt_tokens": 5,
        "completion_tokens": 10,
        "completion_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": total,
    }
    answer = read_openai(chunk(content="x"), chunk("stop"), {"choices": [], "usage": counted})
    assert answer.usage == Usage(5, written, reasoning_tokens=2)


@pytest.mark.parametrize(
    ("deltas", "reasoning"),
    [
        ([{"reasoning_content": "a"}, {"reasoning_content": "b", "reasoning": "b"}, {"content": "x"}], "ab"),
        ([{"reasoning": "a"}, {"reasoning": {"not": "text"}}, {"reasoning": "b", "content": "x"}], "ab"),
    ],
)
def test_reasoning_is_kept_under_either_name_and_is_no_text(deltas: list[dict[str, Any]], reasoning: str) -> None:
    answer = read_openai(*(chunk(**fields) for fields in deltas), chunk("length"))
    assert (answer.text, answer.reasoning, answer.cut_off) == ("x", reasoning, True)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_goes_back_in_a_turn_that_calls_tools_under_the_name_that_it_came_with(name: str) -> None:
    kept = kept_by("openai", "m", reasoning=name) or {}
    said = AssistantData([TextPart("So.")])
    messages = [
        message(0, UserData("hi")),
        message(1, said, reasoning="of no use", **kept),
        message(2, UserData("go")),
        message(3, calls(("c1", "x")), reasoning="hm", **kept),
        message(4, result("c1")),
        message(5, calls(("c2", "x"))),
        message(6, result("c2")),
        message(7, said, reasoning="aha", **kept),
        message(8, UserData("on")),
        message(9, said, reasoning="of no use", **kept),
    ]
    sent = body(messages, "openai")["messages"]
    thoughts = [(number, part[name]) for number, part in enumerate(sent) if name in part]
    assert thoughts == [(3, "hm"), (5, ""), (7, "aha")], "the answer without reasoning says so"
    bare = [message(number, part.data) for number, part in enumerate(messages)]
    assert not any(name in part for part in body(bare, "openai")["messages"])


@pytest.mark.parametrize("reason", ["max_tokens", "model_context_window_exceeded"])
def test_an_answer_of_anthropic_that_was_cut_off_says_so(reason: str) -> None:
    assert read_anthropic(begin(0, type="text", text="half"), stop(reason)).cut_off
    assert not read_anthropic(begin(0, type="text", text="whole"), stop("end_turn")).cut_off


@pytest.mark.parametrize(
    "deltas",
    [
        [tool(None, "c1", "a", '{"n":1}'), tool(None, "c2", "a", '{"n":2}')],
        [tool(None, "c1", "a", '{"n"'), tool(None, "c1", None, ":1}"), tool(None, "c2", "a", '{"n":2}')],
        [tool(0, "c1", "a", '{"n":1}'), tool(0, "c2", "a", '{"n":2}')],
        [tool(0, "c1", "a", {"n": 1}), tool(1, "c2", "a", {"n": 2})],
        [tool(1, "c1", "a", '{"n":1}'), tool(2, "c2", "a", '{"n":'), tool(2, None, None, "2}")],
    ],
)
def test_servers_number_their_calls_in_many_ways(deltas: list[dict[str, Any]]) -> None:
    answer = read_openai(*(chunk(tool_calls=[item]) for item in deltas), chunk("tool_calls"))
    assert [(c.id, c.args) for c in answer.calls] == [("c1", {"n": 1}), ("c2", {"n": 2})]


def test_calls_without_ids_stay_apart() -> None:
    answer = read_openai(chunk("stop", tool_calls=[tool(None, None, "a", "{}"), tool(None, None, "b", "{}")]))
    assert [c.name for c in answer.calls] == ["a", "b"]


def test_what_a_vendor_writes_into_a_call_goes_back_with_it() -> None:
    extra = {"google": {"thought_signature": "xyz"}}
    answer = read_openai(
        chunk("tool_calls", tool_calls=[tool(0, "c1", "a", "{}"), {**tool(1, "c2", "b", "{}"), "extra_content": extra}])
    )
    said = calls(("c1", "a"), ("c2", "b"))
    messages = [message(0, UserData("go")), message(1, said, **(answer.metadata or {}))]
    sent = body(messages, "openai")["messages"][1]["tool_calls"]
    assert [call.get("extra_content") for call in sent] == [None, extra]
    assert [call["id"] for call in sent] == ["c1", "c2"]


@pytest.mark.parametrize(
    ("written", "why"),
    [('{"a": ', "they were cut off"), ("", "they were cut off"), ('{"a": 1}', None)],
)
def test_a_call_at_the_token_limit_is_made_only_when_it_is_whole(written: str, why: str | None) -> None:
    answers = [
        read_anthropic(
            begin(0, type="tool_use", id="t", name="a__b", input={}),
            delta(0, type="input_json_delta", partial_json=written),
            stop("max_tokens"),
        ),
        read_openai(
            chunk(tool_calls=[tool(0, "t", "a__b")]), chunk(tool_calls=[tool(0, args=written)]), chunk("length")
        ),
    ]
    for answer in answers:
        (call,) = answer.calls
        assert (call.broken or "").startswith(why or "") and bool(call.broken) == bool(why)


@pytest.mark.parametrize(
    ("events", "kind", "words"),
    [
        ([], "broken", "half an answer"),
        ([begin(0, type="text", text="x")], "broken", "half an answer"),
        ([stop("end_turn")], "broken", "an empty answer"),
        ([begin(0, type="text", text=" \n"), stop("end_turn")], "broken", "an empty answer"),
        ([stop("refusal")], "final", "refusal"),
        ([stop("max_tokens")], "final", "max_tokens"),
        ([{"type": "error", "error": {"type": "overloaded_error", "message": "Over"}}], "limited", "Over"),
        ([{"type": "error", "error": {"type": ["odd"], "message": "Bad"}}], "final", "Bad"),
        ([{"type": "error"}], "final", "no reason"),
        ([begin(0, type="text", text="x" * (MAX_ANSWER_CHARS + 1))], "final", "more than"),
        ([begin(n, type="tool_use") for n in range(MAX_CALLS + 1)], "final", "more than"),
        ([{"type": "content_block_delta", "index": "0"}], "broken", "unexpected form"),
    ],
)
def test_answers_of_anthropic_that_are_none(events: list[dict[str, Any]], kind: str, words: str) -> None:
    with pytest.raises(Fault) as caught:
        read_anthropic(*events)
    assert caught.value.kind == kind
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("events", "kind", "words"),
    [
        ([], "broken", "half an answer"),
        ([chunk(content="x")], "broken", "half an answer"),
        ([chunk("stop")], "broken", "an empty answer"),
        ([chunk("content_filter")], "final", "content_filter"),
        ([chunk("length")], "final", "length"),
        ([{"error": {"message": "Busy", "type": "server_error"}}], "busy", "Busy"),
        ([{"error": {"message": "Busy", "code": 503}}], "busy", "Busy"),
        ([{"error": {"message": "Bad", "code": {"odd": 1}, "type": []}}], "final", "Bad"),
        ([{"error": "Bad"}], "final", "Bad"),
        ([{"object": "error", "message": "Bad", "code": 400}], "final", "Bad"),
        ([chunk(content="x" * (MAX_ANSWER_CHARS + 1))], "final", "more than"),
        ([chunk(tool_calls=[tool(n, f"c{n}", "a")]) for n in range(MAX_CALLS + 1)], "final", "more than"),
        ([{"choices": 1}], "broken", "unexpected form"),
    ],
)
def test_answers_of_openai_that_are_none(events: list[dict[str, Any]], kind: str, words: str) -> None:
    with pytest.raises(Fault) as caught:
        read_openai(*events)
    assert caught.value.kind == kind
    assert words in caught.value.message


def thinking(reason: str) -> list[dict[str, Any]]:
    counts = {"output_tokens": 900, "output_tokens_details": {"thinking_tokens": 890}}
    end = {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": counts}
    return [begin(0, type="thinking", thinking="hm", signature="s"), end]


def reasoning(reason: str, **fields: Any) -> list[dict[str, Any]]:
    counts = {"completion_tokens": 900, "completion_tokens_details": {"reasoning_tokens": 890}}
    return [chunk(reason, **fields), {"choices": [], "usage": {"prompt_tokens": 5, **counts}}]


@pytest.mark.parametrize(
    ("read", "events", "kind", "words", "advice"),
    [
        (read_anthropic, thinking("end_turn"), "broken", "reasoning only (900 tokens)", "ask for less reasoning"),
        (read_anthropic, thinking("max_tokens"), "final", "only (900 tokens); it was cut off", "max_tokens"),
        (read_openai, reasoning("stop", reasoning="hm"), "broken", "only (900 tokens)", "ask for less reasoning"),
        (read_openai, reasoning("length", reasoning_content="hm"), "final", "it was cut off", "max_tokens"),
        (read_openai, reasoning("length"), "final", "reasoning only (900 tokens); it was cut", "max_tokens"),
    ],
)
def test_an_answer_of_reasoning_only_says_so_with_its_tokens(
    read: Any, events: list[dict[str, Any]], kind: str, words: str, advice: str
) -> None:
    with pytest.raises(Fault) as caught:
        read(*events)
    fault = caught.value
    assert fault.kind == kind
    assert words in fault.message
    assert advice in (fault.suggestion or "")
    assert fault.usage is not None
    assert (fault.usage.output_tokens, fault.usage.reasoning_tokens) == (900, 890)


@pytest.mark.parametrize("reader", [AnthropicReader("m"), OpenAIReader("m")])
def test_data_that_is_no_json(reader: AnthropicReader | OpenAIReader) -> None:
    for data in ('{"a": ', "nonsense", "[" * 100_000, "\ufffd"):
        with pytest.raises(Fault) as caught:
            reader.read([(b"", data.encode())])
        assert caught.value.kind == "broken"
        assert len(caught.value.message) < 500
    assert reader.read([(b"", b"")]) == ""


def test_half_a_surrogate_pair_is_not_the_end_of_an_answer() -> None:
    reader = OpenAIReader("m")
    assert reader.read([(b"", b'{"choices": [{"index": 0, "delta": {"content": "a\\ud83d"}}]}')]) == "a\ufffd"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "index", "delta", "content_block", "message", "choices", "tool_calls", "function",
                         "arguments", "id", "name", "usage", "error", "text", "content", "stop_reason", "input"]),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
kinds = st.sampled_from(["message_start", "content_block_start", "content_block_delta", "message_delta", "error", "x"])


@given(st.lists(st.tuples(kinds, json_values), max_size=4))
def test_whatever_a_server_sends_is_an_answer_or_a_fault(said: list[tuple[str, Any]]) -> None:
    for reader in (AnthropicReader("m"), OpenAIReader("m")):
        try:
            for kind, value in said:
                event = {"type": kind, **value} if isinstance(value, dict) else value
                reader.read([(b"", json.dumps(event).encode())])
            reader.answer()
        except Fault:
            continue  # anything else that is raised ends the test


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"error": {"type": "x", "message": "Say\nso\x00 \u2028now"}}, "Say so now"),
        ({"error": "plain"}, "plain"),
        ({"message": "m"}, "m"),
        ({"detail": [{"msg": "field required"}]}, "field required"),
        ([{"error": {"message": "in a list"}}], "in a list"),
        ({"error": {"error": {"error": {"error": {"error": {"message": "too deep"}}}}}}, ""),
        ({"error": {"message": "x" * 5000}}, "x" * MAX_WORDS),
        (None, ""),
        (7, ""),
    ],
)
def test_the_vendors_words(document: Any, words: str) -> None:
    assert error_words(document) == words
