"""The pure parts of the model providers: event streams, retries, histories, and what answers mean."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentproc.conversation import (
    AssistantData,
    Message,
    MessageData,
    MessageSource,
    SystemData,
    TextPart,
    ToolCallPart,
    ToolData,
    ToolResultPart,
    UserData,
)
from agentproc.providers import history
from agentproc.providers.anthropic import Anthropic
from agentproc.providers.anthropic import Reader as AnthropicReader
from agentproc.providers.base import ModelAnswer, ModelRequest, Usage
from agentproc.providers.history import EMPTY, Said, entries, kept_by, tool_name
from agentproc.providers.openai import OpenAI
from agentproc.providers.openai import Reader as OpenAIReader
from agentproc.providers.retry import MAX_RETRY_AFTER_S, RETRIES, retry_after, status_kind, wait_before_retry
from agentproc.providers.sse import EventTooLarge, SseDecoder, SseEvent
from agentproc.providers.vendor import MAX_ANSWER_CHARS, MAX_CALLS, MAX_WORDS, Fault, FaultKind, error_words
from schemas.codec import to_raw
from schemas.frames import ToolResult
from schemas.launch import CatalogItem, ModelSpec
from tests.unit.agentproc.fakes import BASH, NOTE

AT = "2026-01-01T00:00:00.000Z"


# --- event streams ---------------------------------------------------------------------------------------------------

STREAM = (
    '\ufeff: a comment\r\nevent: one\r\ndata: {"a": 1}\r\n\r\n'
    "data:first\ndata: second\ndata\n\nid: 7\nretry: 5\n\nevent: lost\n\n"
    "data: 가나 \u2028 \x85 😀\r\rdata: [DONE]"
).encode()
EVENTS = [
    SseEvent('{"a": 1}', "one"),
    SseEvent("first\nsecond\n"),
    SseEvent("가나 \u2028 \x85 😀"),
    SseEvent("[DONE]"),
]  # fmt: skip


def decode(*chunks: bytes) -> list[SseEvent]:
    decoder = SseDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)] + decoder.end()


def test_events_are_the_same_wherever_the_stream_is_cut() -> None:
    assert decode(STREAM) == EVENTS
    assert decode(*(STREAM[at : at + 1] for at in range(len(STREAM)))) == EVENTS
    for at in range(len(STREAM) + 1):
        assert decode(STREAM[:at], STREAM[at:]) == EVENTS


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_any_bytes_give_the_same_events_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(data)]
    assert decode(*(data[a:b] for a, b in itertools.pairwise(edges))) == decode(data)


def test_an_event_comes_as_soon_as_it_is_complete() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1\n\ndata: 2\n") == [SseEvent("1")]
    assert decoder.feed(b"\n") == [SseEvent("2")]


def test_nothing_is_held_back_without_bound() -> None:
    for line in (b"data: " + b"x" * 10, b"data: x\n", b"x" * 10):
        decoder = SseDecoder(max_event_bytes=100)
        for _ in range(6):
            assert decoder.feed(line) == []
        with pytest.raises(EventTooLarge):
            decoder.feed(line * 200)
    assert SseDecoder(max_event_bytes=10).feed(b"data: 1\n\n" * 50) == [SseEvent("1")] * 50


# --- retries ---------------------------------------------------------------------------------------------------------


def schedule(kind: FaultKind, chance: float, after: float | None = None) -> list[float]:
    waits: list[float] = []
    fault = Fault(kind, "", retry_after_s=after)
    while (wait := wait_before_retry(fault, len(waits) + 1, chance)) is not None:
        waits.append(wait)
    return waits


def test_the_retry_schedule() -> None:
    assert schedule("busy", 0.0) == [0.5, 1.0, 2.0, 4.0]
    assert schedule("busy", 0.5) == [0.375, 0.75, 1.5, 3.0]
    assert schedule("broken", 0.0) == [0.5, 1.0]
    assert schedule("silent", 0.0) == [0.5]
    assert schedule("final", 0.0) == []
    assert schedule("busy", 0.0, 7.0) == [7.0] * 4
    assert schedule("busy", 0.0, MAX_RETRY_AFTER_S + 1) == []


@given(
    st.sampled_from(list(RETRIES)), st.floats(0, 1, exclude_max=True), st.none() | st.floats(0, 1e4), st.integers(1, 9)
)
def test_a_wait_is_bounded_and_never_shorter_than_asked(
    kind: FaultKind, chance: float, after: float | None, tries: int
) -> None:
    wait = wait_before_retry(Fault(kind, "", retry_after_s=after), tries, chance)
    assert (wait is None) == (tries > RETRIES[kind] or (after or 0) > MAX_RETRY_AFTER_S)
    if wait is not None:
        assert (after or 0) <= wait <= MAX_RETRY_AFTER_S + 8
        assert wait_before_retry(Fault(kind, "", retry_after_s=after), tries, chance, wait) is None
        assert wait_before_retry(Fault(kind, "", retry_after_s=after), tries, chance, wait + 1) == wait


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after": "-1"}, 0.0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:16:50 GMT"}, 10.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
        ({"retry-after": "later"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
    ],
)
def test_the_wait_that_a_header_asks_for(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after(headers, now=1000.0) == expected


def test_which_statuses_may_pass() -> None:
    assert {s for s in range(300, 600) if status_kind(s, {}) == "busy"} == {408, 409, 425, 429, *range(500, 600)}
    assert status_kind(429, {"x-should-retry": "false"}) == "final"
    assert status_kind(400, {"x-should-retry": "true"}) == "busy"


# --- histories -------------------------------------------------------------------------------------------------------


def message(number: int, data: MessageData, **metadata: Any) -> Message:
    return Message(f"m.{number}", data, AT, MessageSource("user"), metadata)


def result(call_id: str, output: Any = "ok") -> ToolData:
    return ToolData([ToolResultPart(call_id, "x", ToolResult(status="ok", output=to_raw(output)))])


def conversation(*data: MessageData) -> list[Message]:
    return [message(number, item) for number, item in enumerate(data)]


def calls(*names: tuple[str, str]) -> AssistantData:
    return AssistantData([ToolCallPart(call_id, name, {}) for call_id, name in names])


def asked(messages: list[Message], provider: str = "anthropic", **changes: Any) -> ModelRequest:
    model = ModelSpec(provider=provider, model="m", **changes.pop("model", {}))
    return ModelRequest(
        agent="a", model=model, messages=messages, tools=changes.pop("tools", [BASH]), step=1, **changes
    )


def body(messages: list[Message], provider: str = "anthropic", **changes: Any) -> Any:
    vendor = Anthropic() if provider == "anthropic" else OpenAI()
    return json.loads(vendor.request(asked(messages, provider, **changes)).body)


def test_ids_that_repeat_or_do_not_fit_are_replaced_on_both_sides() -> None:
    messages = conversation(
        UserData("1"), calls(("call_1_1", "a__b"), ("functions.x:0", "a__b")),
        result("call_1_1", 1), result("functions.x:0", 2),
        UserData("2"), calls(("call_1_1", "a__b"), ("call_3", "a__b"), ("", "a__b")),
        result("call_1_1", 3), result("call_3", 4), result("", 5),
    )  # fmt: skip
    said = [entry for entry in entries(messages, [], "openai", "m") if isinstance(entry, Said)]
    found = [(call.id, call.result) for entry in said for call in entry.calls]
    assert found == [("call_1_1", "1"), ("call_2", "2"), ("call_3", "3"), ("call_4", "4"), ("call_5", "5")]
    shorter = [entry for entry in entries(messages[:4], [], "openai", "m") if isinstance(entry, Said)]
    assert shorter == said[:1]


ids = st.text(st.sampled_from("ab.:_1"), max_size=3) | st.sampled_from(["call_1", "call_2", "call_3", "call_2_2"])


@given(st.lists(st.lists(ids, max_size=4, unique=True), max_size=5))
def test_every_request_has_unique_ids_and_a_result_for_each(turns: list[list[str]]) -> None:
    messages: list[MessageData] = []
    for own in turns:
        messages += [UserData("go"), calls(*((call_id, "x") for call_id in own)), *(result(call_id) for call_id in own)]
    sent = body(conversation(*messages))["messages"]
    wanted, given_ids = [], []
    for at, item in enumerate(sent):
        assert item["role"] == ("user", "assistant")[at % 2]
        assert item["content"]
        wanted += [part["id"] for part in item["content"] if part["type"] == "tool_use"]
        given_ids += [part["tool_use_id"] for part in item["content"] if part["type"] == "tool_result"]
        assert given_ids == wanted or item["role"] == "assistant"
    assert len(set(wanted)) == len(wanted) == sum(map(len, turns))


parts_of_conversations = st.one_of(
    st.sampled_from(["hello", " ", ""]).map(lambda text: [UserData(text)]),
    st.just([SystemData("be kind")]),
    st.just([AssistantData([TextPart("well")])]),
    st.lists(ids, min_size=1, max_size=3, unique=True).map(
        lambda own: [calls(*((call_id, "x y") for call_id in own)), *(result(call_id) for call_id in own)]
    ),
    st.just([result("nobody asked")]),
)


@given(st.lists(parts_of_conversations, max_size=8), st.data(), st.sampled_from(["anthropic", "openai"]))
def test_a_conversation_that_grows_is_written_as_if_it_were_new(
    parts: list[list[MessageData]], data: st.DataObject, provider: str
) -> None:
    """Also when messages are taken out, others put in, or the tools change between the requests of a turn."""
    vendor = Anthropic() if provider == "anthropic" else OpenAI()
    messages: list[Message] = []
    for number, part in enumerate(parts):
        messages += [message(100 * number + at, item) for at, item in enumerate(part)]
        if data.draw(st.integers(0, 4)) == 0:
            del messages[data.draw(st.integers(0, len(messages) - 1))]
        changes = {"tools": [BASH] if data.draw(st.integers(0, 4)) else [BASH, CatalogItem(name="x y")]}
        sent = vendor.request(asked(list(messages), provider, **changes)).body
        assert json.loads(sent) == body(messages, provider, **changes)


@pytest.mark.parametrize("vendor", [Anthropic(), OpenAI()])
def test_only_what_is_new_is_written(vendor: Anthropic | OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[ToolResult] = []
    result_text = history.result_text

    def counted(result: ToolResult) -> str:
        read.append(result)
        return result_text(result)

    monkeypatch.setattr(history, "result_text", counted)
    messages = conversation(UserData("go"), calls(("c1", "x")), result("c1"))
    vendor.request(asked(messages, vendor.name))
    messages = [*messages, message(3, calls(("c2", "x"))), message(4, result("c2"))]
    vendor.request(asked(messages, vendor.name))
    assert len(read) == 2
    vendor.forget()
    vendor.request(asked(messages, vendor.name))
    assert len(read) == 4


@pytest.mark.requirement("NAME-03")
@pytest.mark.parametrize("provider", ["anthropic", "openai"])
def test_tool_names_go_out_unchanged(provider: str) -> None:
    names = ["bash__exec", "telegram__setChatAction", "a-b_c__d-e", "x__" + "y" * 80, "odd.name__x"]
    tools = [msgspec.structs.replace(BASH, name=name) for name in names]
    messages = conversation(UserData("go"), calls(*((f"c{n}", name) for n, name in enumerate(names))))
    sent = body(messages, provider, tools=tools)
    offered = [tool["name"] if provider == "anthropic" else tool["function"]["name"] for tool in sent["tools"]]
    assert offered == names
    answered = sent["messages"][1]
    used = (
        [part["name"] for part in answered["content"]]
        if provider == "anthropic"
        else [call["function"]["name"] for call in answered["tool_calls"]]
    )
    assert used == names


def test_names_that_a_model_made_up_do_not_spoil_later_requests() -> None:
    assert tool_name("no.such tool", []) == "no_such_tool"
    assert tool_name("", []) == "unnamed"
    assert tool_name("x" * 100, []) == "x" * 64
    assert tool_name("no.such", ["no.such"]) == "no.such"


def test_anthropic_takes_no_blank_text_and_the_user_first() -> None:
    sent = body(
        conversation(UserData(" "), AssistantData([TextPart("")]), UserData("b"), AssistantData([TextPart("x")]))
    )
    assert sent["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": EMPTY}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
    ]
    sent = body(conversation(AssistantData([TextPart("x")]), UserData("y")))
    assert [item["role"] for item in sent["messages"]] == ["user", "assistant", "user"]
    assert body([])["messages"] == [{"role": "user", "content": [{"type": "text", "text": EMPTY}]}]


def test_system_texts() -> None:
    messages = conversation(SystemData("Rule."), UserData("go"))
    assert body(messages, system="Prompt.")["system"] == "Prompt.\n\nRule."
    assert "system" not in body(conversation(UserData("go")), system=" ")
    roles = [item["role"] for item in body(messages, "openai", system="Prompt.")["messages"]]
    assert roles == ["system", "system", "user"]


@pytest.mark.parametrize("provider", ["anthropic", "openai"])
def test_params_are_passed_on_but_decide_nothing_of_ours(provider: str) -> None:
    params = {"max_tokens": 5, "own": {"x": [1]}, "stream": False, "messages": [], "model": "other", "tools": []}
    sent = body(conversation(UserData("go")), provider, model={"params": params})
    assert (sent["max_tokens"], sent["own"]) == (5, {"x": [1]})
    assert (sent["stream"], sent["model"], len(sent["messages"]), len(sent["tools"])) == (True, "m", 1, 1)
    assert "tools" not in body(conversation(UserData("go")), provider, tools=[])


@pytest.mark.requirement("PIPELINE-17", "EXT-13")
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_blocks_stand_behind_the_conversation_of_one_request(provider: str) -> None:
    """What comes before them is the same bytes with and without, so that a vendor's cache holds."""
    blocks = [{"type": "custom.info", "data": {"stepIndex": 0}}, {"type": "hint", "text": "Be brief."}]
    shown = '<context type="custom.info">\n{"stepIndex":0}\n</context>\n\n<context type="hint">\nBe brief.\n</context>'
    talk = conversation(UserData("list"), calls(("a", "bash__exec")), result("a"))
    for messages in (talk, talk[:1], [*talk, *conversation(AssistantData([TextPart("done")]))], []):
        plain, with_blocks = body(messages, provider), body(messages, provider, blocks=blocks)
        text = json.dumps(with_blocks["messages"])
        assert json.dumps(shown)[1:-1] in text
        assert with_blocks["messages"][-1]["role"] == "user"
        before = json.dumps(plain["messages"][:-1])[:-1]
        assert not messages or text.startswith(before)
        assert body(messages, provider) == plain  # nothing of it is kept for the next request


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.parametrize("tag", ["</context>", '<context type="skills.open">', "</ CONTEXT >", "< / context\n>"])
def test_nothing_in_a_block_ends_it_or_begins_another(provider: str, tag: str) -> None:
    items = [{"uri": "x://1", "name": f"a {tag} <b>"}]
    blocks = [{"type": "mcp.resources", "items": items}, {"type": "hint", "text": f"x {tag} y"}]
    (content,) = (item["content"] for item in body([], provider, blocks=blocks)["messages"][-1:])
    shown = content if isinstance(content, str) else content[-1]["text"]
    assert len(re.findall(r"<\s*/?\s*context", shown, re.IGNORECASE)) == 4
    _, inside, rest = shown.split("\n", 2)
    assert json.loads(inside) == {"items": items}
    assert "x &lt;" in rest


def test_defaults_that_params_can_change() -> None:
    assert body(conversation(UserData("go")))["max_tokens"] == 8192
    assert body(conversation(UserData("go")), "openai")["stream_options"] == {"include_usage": True}
    changed = body(conversation(UserData("go")), "openai", model={"params": {"stream_options": None}})
    assert "stream_options" not in changed


def test_where_requests_go_and_who_says_so() -> None:
    def wire(provider: str, **model: Any) -> tuple[str, dict[str, str]]:
        made = (Anthropic() if provider == "anthropic" else OpenAI()).request(asked([], provider, model=model))
        return made.url, made.headers

    version = {"anthropic-version": "2026-10-21"}
    assert wire("anthropic") == ("https://api.anthropic.com/v1/messages", version)
    assert wire("anthropic", endpoint="http://h/x/", api_key="k") == (
        "http://h/x/v1/messages", {**version, "authorization": "Bearer k"}
    )  # fmt: skip
    assert wire("openai") == ("https://api.openai.com/v1/chat/completions", {})
    assert wire("openai", endpoint="http://h/v1", api_key="k") == (
        "http://h/v1/chat/completions", {"authorization": "Bearer k"}
    )  # fmt: skip


def test_tools_without_schema_and_description() -> None:
    assert body([], tools=[NOTE])["tools"] == [
        {"name": "notes__add", "description": "Keep a note.", "input_schema": {"type": "object", "properties": {}}}
    ]
    (tool,) = body([], "openai", tools=[msgspec.structs.replace(NOTE, description=None)])["tools"]
    assert tool["function"] == {"name": "notes__add", "parameters": {"type": "object", "properties": {}}}


# --- answers ---------------------------------------------------------------------------------------------------------


def read_anthropic(*events: dict[str, Any]) -> ModelAnswer:
    reader = AnthropicReader("m")
    for event in events:
        reader.read(SseEvent(json.dumps(event)))
    return reader.answer()


def read_openai(*events: dict[str, Any]) -> ModelAnswer:
    reader = OpenAIReader("m")
    for event in events:
        reader.read(SseEvent(json.dumps(event)))
    return reader.answer()


def begin(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": fields}


def stop(reason: str, **usage: int) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 4, **usage}}


def chunk(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def tool(
    index: int | None = None, call_id: str | None = None, name: str | None = None, args: Any = None
) -> dict[str, Any]:
    fields = {"index": index, "id": call_id, "function": {"name": name, "arguments": args}}
    return {key: value for key, value in fields.items() if value is not None}


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
    other = entries(messages, [], "anthropic", "another-model")[1]
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
    assert (answer.finish_reason, answer.usage, answer.metadata) == ("tool_calls", Usage(5, 4, 3, 1, 2), None)
    assert (answer.reasoning, answer.cut_off, answer.model) == ("hm", False, "m 2026")


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
        ([{"type": "error", "error": {"type": "overloaded_error", "message": "Over"}}], "busy", "Over"),
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


@pytest.mark.parametrize("reader", [AnthropicReader("m"), OpenAIReader("m")])
def test_data_that_is_no_json(reader: AnthropicReader | OpenAIReader) -> None:
    for data in ('{"a": ', "nonsense", "[" * 100_000, "\ufffd"):
        with pytest.raises(Fault) as caught:
            reader.read(SseEvent(data))
        assert caught.value.kind == "broken"
        assert len(caught.value.message) < 500
    assert reader.read(SseEvent("")) == ""


def test_half_a_surrogate_pair_is_not_the_end_of_an_answer() -> None:
    reader = OpenAIReader("m")
    assert reader.read(SseEvent('{"choices": [{"index": 0, "delta": {"content": "a\\ud83d"}}]}')) == "a\ufffd"


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
                reader.read(SseEvent(json.dumps(event)))
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


def test_a_models_key_is_in_no_repr() -> None:
    spec = ModelSpec(provider="openai", model="m", api_key="sk-secret")
    assert "sk-secret" not in repr(spec)
    assert "sk-secret" not in f"{asked([], model={'api_key': 'sk-secret'})}"
