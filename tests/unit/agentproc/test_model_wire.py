"""The pure parts of the model providers: event streams, retries, histories."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.http import wire_of
from goondan.agentproc.machine.messages import (
    AssistantData,
    Message,
    MessageData,
    SystemData,
    TextPart,
    UserData,
)
from goondan.agentproc.providers import history
from goondan.agentproc.providers.anthropic import Anthropic
from goondan.agentproc.providers.faults import Fault, FaultKind, Retries, page_title, retry_after
from goondan.agentproc.providers.history import EMPTY, Said, tool_name
from goondan.agentproc.providers.openai import OpenAI
from goondan.agentproc.providers.reader import EventTooLarge, SseDecoder, SseEvent
from goondan.agentproc.providers.responses import Responses
from goondan.schemas.bundle.launch import CatalogItem, ModelSpec
from goondan.schemas.models.model_providers import BY_NAME, ModelRetry
from goondan.schemas.wire.frames import ToolResult
from tests.unit.agentproc.fakes import BASH, NOTE
from tests.unit.agentproc.vendor_formats import asked, body, calls, conversation, entries, message, result

# --- event streams ---------------------------------------------------------------------------------------------------

STREAM = (
    '\ufeff: a comment\r\nevent: one\r\ndata: {"a": 1}\r\n\r\n'
    "data:first\ndata: second\ndata\n\nid: 7\nretry: 5\n\nevent: lost\n\n"
    "data: 가나 \u2028 \x85 😀\r\rdata: [DONE]"
).encode()
EVENTS = [
    (b"one", b'{"a": 1}'),
    (b"", b"first\nsecond\n"),
    (b"", "가나 \u2028 \x85 😀".encode()),
    (b"", b"[DONE]"),
]


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
    assert decoder.feed(b"data: 1\n\ndata: 2\n") == [(b"", b"1")]
    assert decoder.feed(b"\n") == [(b"", b"2")]


def test_nothing_is_held_back_without_bound() -> None:
    for line in (b"data: " + b"x" * 10, b"data: x\n", b"x" * 10):
        decoder = SseDecoder(max_event_bytes=100)
        for _ in range(6):
            assert decoder.feed(line) == []
        with pytest.raises(EventTooLarge):
            decoder.feed(line * 200)
    assert SseDecoder(max_event_bytes=10).feed(b"data: 1\n\n" * 50) == [(b"", b"1")] * 50


# --- retries ---------------------------------------------------------------------------------------------------------


def schedule(kind: FaultKind, chance: float, after: float | None = None, **patience: float) -> list[float]:
    waits: list[float] = []
    retries = Retries(ModelRetry(**patience))
    while (wait := retries.next_wait(Fault(kind, "", retry_after_s=after), chance, 0.0)) is not None:
        waits.append(wait)
    return waits


def test_the_retry_schedule() -> None:
    assert schedule("busy", 0.0) == [0.5, 1.0, 2.0, 4.0, *[8.0] * 6]
    assert schedule("limited", 0.5)[:4] == [0.375, 0.75, 1.5, 3.0]
    assert schedule("broken", 0.0) == [0.5, 1.0]
    assert schedule("silent", 0.0) == [0.5]
    assert schedule("final", 0.0) == schedule("quota", 0.0) == []
    assert schedule("busy", 0.0, 7.0) == [7.0] * 8
    assert schedule("busy", 0.0, 60.0) == [60.0]
    assert schedule("busy", 0.0, 61.0) == []
    assert schedule("loading", 0.0, 61.0) == [61.0] * 4
    assert schedule("busy", 0.0, busy_s=0.4) == schedule("busy", 0.0, busy_s=0) == []


def test_a_call_with_faults_of_several_kinds_counts_each_kind_for_itself() -> None:
    retries = Retries(ModelRetry())
    faults: list[FaultKind] = ["busy", "busy", "broken", "silent", "broken"]
    assert all(retries.next_wait(Fault(kind, ""), 0.0, 0.0) is not None for kind in faults)
    assert retries.next_wait(Fault("silent", ""), 0.0, 0.0) is None
    assert retries.count == 6


def test_the_time_of_slow_tries_counts() -> None:
    retries = Retries(ModelRetry())
    assert retries.next_wait(Fault("busy", ""), 0.0, 59.5) == 0.5
    assert retries.next_wait(Fault("busy", ""), 0.0, 59.5) is None


@given(
    st.sampled_from(["busy", "limited", "loading", "broken", "silent", "quota", "final"]),
    st.floats(0, 1, exclude_max=True),
    st.none() | st.floats(0, 1e4),
    st.floats(0, 400),
    st.floats(0, 100),
)
def test_a_wait_is_bounded_and_never_shorter_than_asked(
    kind: FaultKind, chance: float, after: float | None, patience_s: float, left_s: float
) -> None:
    retry = ModelRetry(busy_s=patience_s, loading_s=patience_s)
    fault = Fault(kind, "", retry_after_s=after)
    waits: list[float] = []
    retries = Retries(retry)
    while len(waits) < 100 and (wait := retries.next_wait(fault, chance, 0.0)) is not None:
        waits.append(wait)
    assert all((after or 0) <= wait <= (after or 0) + 8 for wait in waits)
    assert sum(waits) <= patience_s + 8 * len(waits) * (after is not None)
    if waits:
        bounded = Retries(retry).next_wait(fault, chance, 0.0, left_s)
        assert bounded == (waits[0] if waits[0] < left_s else None)


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


# --- histories -------------------------------------------------------------------------------------------------------


def test_ids_that_repeat_or_do_not_fit_are_replaced_on_both_sides() -> None:
    messages = conversation(
        UserData("1"), calls(("call_1_1", "a__b"), ("functions.x:0", "a__b")),
        result("call_1_1", 1), result("functions.x:0", 2),
        UserData("2"), calls(("call_1_1", "a__b"), ("call_3", "a__b"), ("", "a__b")),
        result("call_1_1", 3), result("call_3", 4), result("", 5),
    )  # fmt: skip
    said = [entry for entry in entries(messages, "openai", "m") if isinstance(entry, Said)]
    found = [(call.id, call.result) for entry in said for call in entry.calls]
    assert found == [("call_1_1", "1"), ("call_2", "2"), ("call_3", "3"), ("call_4", "4"), ("call_5", "5")]
    shorter = [entry for entry in entries(messages[:4], "openai", "m") if isinstance(entry, Said)]
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


@given(st.lists(parts_of_conversations, max_size=8), st.data(), st.sampled_from(sorted(BY_NAME)))
def test_a_conversation_that_grows_is_written_as_if_it_were_new(
    parts: list[list[MessageData]], data: st.DataObject, provider: str
) -> None:
    """Also when messages are taken out, others put in, or the tools change between the requests of a turn."""
    vendor = wire_of(provider).VENDOR()
    messages: list[Message] = []
    for number, part in enumerate(parts):
        messages += [message(100 * number + at, item) for at, item in enumerate(part)]
        if data.draw(st.integers(0, 4)) == 0:
            del messages[data.draw(st.integers(0, len(messages) - 1))]
        changes = {"tools": [BASH] if data.draw(st.integers(0, 4)) else [BASH, CatalogItem(name="x y")]}
        sent = b"".join(vendor.request(asked(list(messages), provider, **changes)).body)
        assert json.loads(sent) == body(messages, provider, **changes)


@pytest.mark.parametrize("vendor", [Anthropic(), OpenAI(), Responses()])
def test_only_what_is_new_is_written(vendor: Anthropic | OpenAI | Responses, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for provider in ("anthropic", "openai"):
        _, sent = wire(provider, endpoint="http://h", api_key="k", auth="x-api-key", headers={"x-team": "core"})
        assert (sent["x-api-key"], sent["x-team"], "authorization" in sent) == ("k", "core", False)
    _, sent = wire("anthropic", api_version="2023-06-01", headers={"anthropic-version": "1", "authorization": "x"})
    assert sent["anthropic-version"] == "2023-06-01"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!DOCTYPE html>\n<html><head><title>\n Sign in &amp;\n go </title>", "an HTML page, “Sign in & go”"),
        (" <HTML><title lang='en'>404 Not Found</title>", "an HTML page, “404 Not Found”"),
        ("<!-- proxy --><html><body>no title", "an HTML page"),
        ("<html><title>a" + "b" * 5000, "an HTML page, “a" + "b" * 119 + "”"),
        ("not <html>", ""),
        ("<htmlx>", ""),
    ],
)
def test_a_page_in_place_of_an_answer_is_one_line(text: str, words: str) -> None:
    assert page_title(text) == words


def test_tools_without_schema_and_description() -> None:
    assert body([], tools=[NOTE])["tools"] == [
        {"name": "notes__add", "description": "Keep a note.", "input_schema": {"type": "object", "properties": {}}}
    ]
    (tool,) = body([], "openai", tools=[msgspec.structs.replace(NOTE, description=None)])["tools"]
    assert tool["function"] == {"name": "notes__add", "parameters": {"type": "object", "properties": {}}}


def test_a_models_key_is_in_no_repr() -> None:
    spec = ModelSpec(provider="openai", model="m", api_key="sk-secret")
    assert "sk-secret" not in repr(spec)
    assert "sk-secret" not in f"{asked([], model={'api_key': 'sk-secret'})}"
