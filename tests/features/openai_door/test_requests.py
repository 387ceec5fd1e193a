"""What OpenAI's requests ask for: every parameter, every form of a message, and everything that is wrong with one."""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import encode

from goondan.features.openai_door.door import TABLES, told
from goondan.features.openai_door.door.rules import parameters, requests
from goondan.features.openai_door.door.rules.faults import RefusedError, fault_of
from goondan.schemas.wire import blobs
from goondan.schemas.wire.errors import CODES, GoondanError
from goondan.schemas.wire.frames import ErrorPayload

PNG = b"\x89PNG\r\n\x1a\n" + bytes(24)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
PDF = base64.b64encode(b"%PDF-1.7\n").decode()
HI = {"role": "user", "content": "hi"}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def chat(**given: Any) -> requests.Asked:
    return requests.read(encode({"model": "main", "messages": [HI], **given}), TABLES["chat"])


def response(**given: Any) -> requests.Asked:
    return requests.read(encode({"model": "main", "input": "hi", **given}), TABLES["responses"])


def refused(read: Any, **given: Any) -> Any:
    with pytest.raises(RefusedError) as caught:
        read(**given)
    fault = caught.value.fault
    assert fault.status == 400
    assert fault.message
    return fault


def test_both_doors_read_the_same_conversation() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]},
        {"role": "assistant", "content": "A dot.", "refusal": None, "annotations": []},
        {
            "role": "user",
            "content": [{"type": "text", "text": "And this?"}, {"type": "image_url", "image_url": {"url": URL}}],
        },
    ]
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "What is"}, {"type": "input_text", "text": "this?"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "A dot.", "annotations": []}],
        },
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "And this?"}, {"type": "input_image", "image_url": URL}],
        },
    ]
    said = chat(messages=messages).said
    assert said == response(input=items, instructions="Be brief.").said
    assert [(one.role, one.text, len(one.files)) for one in said] == [
        ("system", "Be brief.", 0),
        ("user", "What is\nthis?", 0),
        ("assistant", "A dot.", 0),
        ("user", "And this?", 1),
    ]
    assert said[-1].files[0].data == PNG


def test_messages_of_the_agent_that_follow_each_other_are_one() -> None:
    messages = [HI, *({"role": "assistant", "content": text} for text in ("Let me look.", "It is 4.")), HI]
    assert [one.text for one in chat(messages=messages).said] == ["hi", "Let me look.\n\nIt is 4.", "hi"]


def test_files_have_a_name_without_folders() -> None:
    file = {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PDF}", "filename": "../a\x1b/b.pdf"}}
    assert chat(messages=[{"role": "user", "content": [file]}]).said[0].files[0].name == ".._a_b.pdf"
    bare = {"type": "input_file", "file_data": PDF, "filename": "b.pdf"}
    assert response(input=[{"role": "user", "content": [bare]}]).said[0].files[0].name == "b.pdf"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "/etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "data:image/png,raw"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,***"}},
        {"type": "image_url", "image_url": {"url": URL[:-5]}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(b'#!/bin/sh').decode()}"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "image_url"},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "input_image"},
        {"type": "input_file", "file_url": "http://127.0.0.1/"},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "video"},
        {"text": "no type"},
        7,
    ],
)
def test_files_that_are_refused(part: Any) -> None:
    refused(chat, messages=[{"role": "user", "content": [part]}])
    refused(response, input=[{"role": "user", "content": [part]}])


def test_a_file_that_is_too_large_is_not_decoded() -> None:
    large = "data:image/png;base64," + "A" * (blobs.MAX_FILE_BYTES * 4 // 3 + 8)
    fault = refused(chat, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": large}]}])
    assert str(blobs.MAX_FILE_BYTES) in fault.message


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        {"role": "user"},
        [[]],
        [{"content": "hi"}],
        [{"role": "robot", "content": "hi"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": {"type": "text"}}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "system", "content": "only this"}],
        [HI, {"role": "assistant", "content": "I go on with"}],
        [HI, {"role": "tool", "content": "4", "tool_call_id": "c1"}],
        [HI, {"role": "function", "content": "4", "name": "f"}, HI],
        [HI, {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}, HI],
        [HI, {"role": "assistant", "content": None, "function_call": {"name": "f"}}, HI],
        [{"role": "system", "content": [{"type": "image_url", "image_url": URL}]}, HI],
        [HI] * (requests.MAX_MESSAGES + 1),
    ],
)
def test_messages_that_are_refused(messages: Any) -> None:
    fault = refused(chat, messages=messages)
    assert fault.param is not None
    assert fault.param.startswith("messages")


@pytest.mark.parametrize(
    "items",
    [
        [],
        7,
        [{"type": "function_call_output", "call_id": "c", "output": "4"}],
        [{"type": "item_reference", "id": "msg_1"}],
        [{"type": "message", "content": "of nobody"}],
        [{"role": "tool", "content": "4"}],
        [{"type": "reasoning"}],
    ],
)
def test_items_that_are_refused(items: Any) -> None:
    assert refused(response, input=items).param.startswith("input")


@pytest.mark.parametrize(("read", "table"), [(chat, TABLES["chat"]), (response, TABLES["responses"])])
def test_every_parameter_does_what_its_row_says(read: Any, table: Any) -> None:
    meant: dict[str, Any] = {
        "n": 2, "stop": ["\n"], "logprobs": True, "top_logprobs": 3, "logit_bias": {"50256": -100}, "tools": [{}],
        "tool_choice": "required", "functions": [{}], "function_call": {"name": "f"}, "modalities": ["audio"],
        "audio": {"voice": "alloy"}, "web_search_options": {}, "moderation": {"model": "m"}, "include": ["logprobs"],
        "max_tool_calls": 3, "conversation": "conv_1", "context_management": [{}], "prompt": {"id": "p"},
    }  # fmt: skip
    for name, row in table.items():
        if row.does == "refused":
            fault = refused(read, **{name: meant[name]})
            assert (fault.param, fault.code) == (name, "unsupported_parameter")
            assert row.why in fault.message
            for value in (None, *row.same):
                read(**{name: value})
        elif row.does == "ignored":
            assert row.why
            assert read(**{name: None}).said == read().said


def test_tools_of_the_caller_are_refused_with_a_sentence() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert "calls no tools of the program" in refused(chat, tools=[tool]).message


@pytest.mark.parametrize(("read", "table"), [(chat, TABLES["chat"]), (response, TABLES["responses"])])
@pytest.mark.parametrize("wrong", [7, -1.5, "hot", True, [7], {"a": 7}, [None], {}], ids=repr)
def test_every_field_of_a_wrong_type(read: Any, table: Any, wrong: Any) -> None:
    for name, row in table.items():
        if not parameters._fits(wrong, row.form):
            assert refused(read, **{name: wrong}).param == name
        else:
            with suppress(RefusedError):  # of its form: it is taken, or refused with a sentence
                read(**{name: wrong})


def test_what_is_missing_or_unknown() -> None:
    for door, whole in (("chat", ("model", "messages")), ("responses", ("model", "input"))):
        for name in whole:
            given = {other: "x" if other != "messages" else [HI] for other in whole if other != name}
            with pytest.raises(RefusedError) as caught:
                requests.read(encode(given), TABLES[door])
            assert caught.value.fault.code == "missing_required_parameter"
    assert refused(chat, **{"a\x1b" * 200: 1}).code == "unknown_parameter"
    assert len(refused(chat, **{"a" * 2000: 1}).message) < 200


@given(st.dictionaries(st.sampled_from(sorted({*TABLES["chat"], *TABLES["responses"]})), JUNK, max_size=5))
def test_any_request_is_read_or_refused(junk: dict[str, Any]) -> None:
    for table in TABLES.values():
        for base in ({}, {"model": "main", "messages": [HI]}, {"model": "main", "input": "hi"}):
            with suppress(RefusedError):
                assert requests.read(encode(base | junk), table).said


@given(st.lists(JUNK, max_size=4))
def test_any_messages_are_read_or_refused(junk: list[Any]) -> None:
    for read, name in ((chat, "messages"), (response, "input")):
        for role in ("user", "assistant", "system"):
            messages = [*junk, *({"role": role, "content": one} for one in junk), HI]
            with suppress(RefusedError):
                assert read(**{name: messages}).said[-1].text == "hi"


def test_the_form_of_an_answer() -> None:
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string", "description": "what it is called"}, "at": {"$ref": "#/$defs/at"}},
        "required": ["title", "at"],
        "$defs": {"at": {"type": "number"}},
        "title": "Thing",
    }
    same = {
        "type": "object",
        "required": ["at", "title"],
        "properties": {"title": {"type": "string"}, "at": {"$ref": "#/$defs/at", "title": "At"}},
        "$defs": {"at": {"type": "number"}},
    }
    other = {**same, "properties": {"at": {"type": "number"}}}
    plain: list[Any] = [None, {"type": "text"}]
    for wanted in plain:
        parameters.check_format(wanted, "response_format", None)
        parameters.check_format(wanted, "response_format", schema)
    parameters.check_format({"type": "json_object"}, "response_format", schema)
    parameters.check_format({"type": "json_schema", "json_schema": {"name": "t", "schema": same}}, "p", schema)
    parameters.check_format({"type": "json_schema", "name": "t", "schema": same}, "text.format", schema)
    wrong: list[tuple[Any, Any]] = [
        ({"type": "json_object"}, None),
        ({"type": "json_schema", "json_schema": {"schema": same}}, None),
        ({"type": "json_schema", "json_schema": {"schema": other}}, schema),
        ({"type": "json_schema", "json_schema": 7}, schema),
        ({"type": "xml"}, schema),
        ({}, schema),
        ("text", schema),
    ]
    for wanted, own in wrong:
        with pytest.raises(RefusedError):
            parameters.check_format(wanted, "response_format", own)


def test_every_error_of_ours_has_a_form_of_openai() -> None:
    for code in CODES:
        fault = fault_of(ErrorPayload(code, "it is so", "do this"))
        assert 400 <= fault.status < 600
        assert fault.message == "it is so do this"
        assert fault.again == (code in ("E_OVERLOADED", "E_KERNEL_NOT_RUNNING"))
        assert not fault_of(ErrorPayload(code, "it is so"), begun=True).again
    waits = told(GoondanError(ErrorPayload("E_OVERLOADED", "full", retry_after_ms=1500)), 503)
    assert (waits.headers["retry-after"], waits.headers["retry-after-ms"]) == ("2", "1500")
    assert waits.headers["x-should-retry"] == "true"
    assert fault_of(ErrorPayload("E_AGENT_NOT_FOUND", "no")).code == "model_not_found"
