"""The Responses format: requests without a memory at the vendor, and streams of items."""

from __future__ import annotations

import json
from typing import Any

import pytest

from goondan.agentproc.machine.messages import AssistantData, SystemData, TextPart, UserData
from goondan.agentproc.providers.base import Usage
from goondan.agentproc.providers.faults import Fault
from goondan.agentproc.providers.history import EMPTY
from goondan.agentproc.providers.reader import MAX_ANSWER_CHARS, MAX_CALLS
from goondan.agentproc.providers.responses import Reader, Responses
from goondan.schemas.bundle.launch import CatalogItem
from tests.unit.agentproc.fakes import BASH
from tests.unit.agentproc.vendor_formats import asked, body, calls, conversation, message, read_responses, result


def added(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.added", "output_index": index, "item": {"type": kind, **fields}}


def done(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "response.output_item.done", "output_index": index, "item": {"type": kind, **fields}}


def delta(kind: str, index: int, piece: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}.delta", "output_index": index, "delta": piece}


def ended(status: str = "completed", **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{status}", "response": {"status": status, **fields}}


CUT = {"incomplete_details": {"reason": "max_output_tokens"}}
THOUGHT = {"id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "sealed"}


# --- requests


def test_a_request_stores_nothing_and_has_the_whole_conversation() -> None:
    messages = conversation(
        UserData("go"),
        AssistantData([TextPart("So."), *calls(("c1", "x")).content]),
        result("c1"),
        SystemData("Rule."),
        UserData("on"),
    )
    sent = body(messages, "responses", system="Be brief.", tools=[BASH, CatalogItem(name="bare")])
    assert list(sent) == ["store", "include", "model", "stream", "tools", "instructions", "input"]
    assert (sent["store"], sent["include"]) == (False, ["reasoning.encrypted_content"])
    assert (sent["model"], sent["stream"], sent["instructions"]) == ("m", True, "Be brief.")
    parameters = {"type": "object", "properties": {}}
    assert sent["tools"][1] == {"type": "function", "name": "bare", "parameters": parameters, "strict": False}
    assert sent["tools"][0]["description"] == BASH.description
    assert sent["input"] == [
        {"type": "message", "role": "user", "content": "go"},
        {"type": "message", "role": "assistant", "content": "So."},
        {"type": "function_call", "call_id": "c1", "name": "x", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        {"type": "message", "role": "system", "content": "Rule."},
        {"type": "message", "role": "user", "content": "on"},
    ]
    assert "instructions" not in body(messages, "responses", system=" ")
    assert body([], "responses")["input"] == [{"type": "message", "role": "user", "content": EMPTY}]


def test_params_decide_nothing_of_ours() -> None:
    params = {"input": [], "model": "other", "stream": False, "store": True, "reasoning": {"effort": "low"}}
    sent = body(conversation(UserData("go")), "responses", model={"params": params})
    assert (sent["model"], sent["stream"], len(sent["input"])) == ("m", True, 1)
    assert (sent["store"], sent["reasoning"]) == (True, {"effort": "low"})


def test_blocks_stand_at_the_end() -> None:
    messages = conversation(UserData("go"), calls(("c1", "x")), result("c1"))
    plain = body(messages, "responses")["input"]
    shown = body(messages, "responses", blocks=[{"type": "hint", "text": "Be brief."}])["input"]
    assert shown[:-1] == plain
    text = '<context type="hint">\nBe brief.\n</context>'
    assert shown[-1] == {"type": "message", "role": "user", "content": text}


def test_reasoning_items_go_back_whole_and_where_they_were() -> None:
    answer = read_responses(
        added(0, "reasoning", id="rs_1", summary=[]),
        {"type": "response.reasoning_summary_part.added", "output_index": 0},
        delta("reasoning_summary_text", 0, "hm"),
        done(0, "reasoning", **THOUGHT, status="completed", content=None),
        added(1, "message", id="m", phase="commentary"),
        delta("output_text", 1, "So."),
        done(1, "message", phase="commentary", content=[{"type": "output_text", "text": "So."}]),
        added(2, "function_call", call_id="c1", name="x", id="fc"),
        delta("function_call_arguments", 2, "{}"),
        done(3, "reasoning", id="rs_2", summary=[]),
        ended(),
    )
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("So.", "hm", "completed")
    said = AssistantData([TextPart("So."), *calls(("c1", "x")).content])
    messages = [message(0, UserData("go")), message(1, said, **(answer.metadata or {}))]
    sent = body(messages, "responses")["input"]
    assert sent[1:] == [
        {"type": "reasoning", **THOUGHT},
        {"type": "message", "role": "assistant", "content": "So.", "phase": "commentary"},
        {"type": "function_call", "call_id": "c1", "name": "x", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": sent[-1]["output"]},
    ], "what the vendor has not stored is not named"
    other = body(messages, "responses", model={"model": "another"})["input"]
    assert [item["type"] for item in other[1:]] == ["message", "function_call", "function_call_output"]
    edited = [messages[0], message(1, AssistantData([TextPart("Edited.")]), **(answer.metadata or {}))]
    assert [item["type"] for item in body(edited, "responses")["input"]] == ["message", "message"]


def test_a_server_that_knows_nothing_of_encrypted_reasoning() -> None:
    vendor = Responses()
    own, other = asked([], "responses"), asked([], "responses", model={"endpoint": "http://127.0.0.1:1/v1"})
    assert not vendor.gives_up(own, "400 Unknown parameter: 'include'")
    assert not vendor.gives_up(other, "400 Unknown parameter: 'store'")
    assert vendor.gives_up(other, "400 Unknown parameter: 'include'")
    assert "include" not in json.loads(b"".join(vendor.request(other).body))
    assert not vendor.gives_up(other, "400 Unknown parameter: 'include'")


# --- answers


def test_an_answer_with_parallel_calls_and_usage() -> None:
    counts = {
        "input_tokens": 9,
        "output_tokens": 8,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 1},
        "output_tokens_details": {"reasoning_tokens": 5},
    }
    answer = read_responses(
        {"type": "response.created", "response": {"model": "m-2026", "status": "in_progress"}},
        {"type": "response.some_new_event", "output_index": "no number"} | {"output_index": 0},
        added(0, "web_search_call"),
        added(1, "function_call", call_id="c1", name="a"),
        added(2, "function_call", call_id="c2", name="b"),
        delta("function_call_arguments", 2, '{"n":'),
        delta("function_call_arguments", 1, '{"n":1}'),
        delta("function_call_arguments", 2, "2}"),
        done(2, "function_call", call_id="c2", name="b", arguments="not what was streamed"),
        done(3, "function_call", call_id="c3", name="c", arguments='{"n":3}'),
        ended(usage=counts),
    )
    assert [(call.id, call.name, call.args) for call in answer.calls] == [
        ("c1", "a", {"n": 1}),
        ("c2", "b", {"n": 2}),
        ("c3", "c", {"n": 3}),
    ]
    assert (answer.usage, answer.model, answer.metadata) == (Usage(9, 8, 4, 1, 5), "m-2026", None)


def test_servers_that_number_nothing_or_stream_nothing() -> None:
    numberless = read_responses(
        {"type": "response.reasoning_text.delta", "delta": "hm"},
        {"type": "response.output_text.delta", "delta": "So"},
        {"type": "response.refusal.delta", "delta": "."},
        {"type": "response.function_call_arguments.delta", "delta": "{}"},
        done(0, "function_call", call_id="c1", name="x"),
        ended(),
    )
    assert (numberless.text, numberless.reasoning) == ("So.", "hm")
    assert [(call.id, call.name) for call in numberless.calls] == [("c1", "x")]
    output = [
        {"type": "reasoning", "content": [{"text": "hm"}, {"text": "ah"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "So"}, {"type": "refusal", "refusal": "."}]},
    ]
    late = read_responses(ended(output=output))
    whole = Reader("m")
    assert whole.read_whole(json.dumps({"status": "completed", "output": output, "model": "x"}).encode()) == "So."
    for answer in (late, whole.answer()):
        assert (answer.text, answer.reasoning) == ("So.", "hm\n\nah")


def test_an_item_that_never_ends_is_taken_as_far_as_it_came() -> None:
    answer = read_responses(added(0, "message"), delta("output_text", 0, "half"), ended("incomplete", **CUT))
    assert (answer.text, answer.cut_off, answer.finish_reason) == ("half", True, "max_output_tokens")
    filtered = {"incomplete_details": {"reason": "content_filter"}}
    answer = read_responses(delta("output_text", 0, "half"), ended("incomplete", **filtered))
    assert (answer.cut_off, answer.finish_reason) == (False, "content_filter")
    call = [added(0, "function_call", call_id="c", name="x"), delta("function_call_arguments", 0, '{"a"')]
    (cut,) = read_responses(*call, ended("incomplete", **CUT)).calls
    assert (cut.broken or "").startswith("they were cut off")


@pytest.mark.parametrize(("tokens", "cut"), [(23, False), (24, True)])
def test_an_answer_of_all_the_tokens_that_were_asked_for_is_cut_off(tokens: int, cut: bool) -> None:
    reader = Reader("m", 24)
    usage = {"input_tokens": 9, "output_tokens": tokens}
    message = {"type": "message", "content": [{"type": "output_text", "text": "So"}]}
    reader.read_whole(json.dumps({"status": "completed", "output": [message], "usage": usage}).encode())
    assert reader.answer().cut_off == cut


@pytest.mark.parametrize(
    ("events", "kind", "words"),
    [
        ([], "broken", "half an answer"),
        ([delta("output_text", 0, "x")], "broken", "half an answer"),
        ([ended()], "broken", "an empty answer"),
        ([done(0, "reasoning", **THOUGHT), ended()], "broken", "reasoning only"),
        ([done(0, "reasoning", **THOUGHT), ended("incomplete", **CUT)], "final", "reasoning only; it was cut off"),
        ([ended("incomplete", incomplete_details={"reason": "content_filter"})], "final", "content_filter"),
        ([ended("failed", error={"code": "server_error", "message": "Oops"})], "busy", "Oops"),
        ([ended("failed", error={"code": "rate_limit_exceeded", "message": "Slow"})], "limited", "Slow"),
        ([ended("failed", error={"code": "invalid_prompt", "message": "Bad"})], "final", "Bad"),
        ([ended("failed")], "final", "failed"),
        ([ended("cancelled")], "final", "cancelled"),
        ([{"type": "error", "code": "server_error", "message": "Oops"}], "busy", "Oops"),
        ([{"type": "error", "error": {"type": "invalid_request_error", "message": "Bad"}}], "final", "Bad"),
        ([{"type": "error"}], "final", ""),
        ([delta("output_text", 0, "x" * (MAX_ANSWER_CHARS + 1))], "final", "more than"),
        ([delta("reasoning_text", 0, "x" * (MAX_ANSWER_CHARS + 1))], "final", "more than"),
        ([done(0, "reasoning", encrypted_content="x" * (MAX_ANSWER_CHARS + 1))], "final", "more than"),
        ([added(n, "message") for n in range(MAX_CALLS + 1)], "final", "more than"),
        ([{"type": "response.output_text.delta", "output_index": "0"}], "broken", "unexpected form"),
    ],
)
def test_answers_that_are_none(events: list[dict[str, Any]], kind: str, words: str) -> None:
    with pytest.raises(Fault) as caught:
        read_responses(*events)
    assert caught.value.kind == kind
    assert words in caught.value.message
