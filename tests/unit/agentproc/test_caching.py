"""What of a request a vendor's cache can know: each request begins as the one before it, and marks say up to where."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.http import wire_of
from goondan.agentproc.machine.messages import AssistantData, MessageData, TextPart, ToolCallPart, UserData
from goondan.agentproc.providers.anthropic import Anthropic
from goondan.agentproc.providers.base import ModelRequest
from goondan.agentproc.providers.openai import OpenAI
from goondan.agentproc.providers.vendor import Vendor
from goondan.schemas.bundle.launch import CatalogItem, ModelSpec
from goondan.schemas.models.model_providers import BY_NAME
from tests.unit.agentproc.fakes import BASH, NOTE
from tests.unit.agentproc.vendor_formats import asked, calls, conversation, result

MARK = {"type": "ephemeral"}
BLOCKS = [{"type": "skills.open", "text": "Read this."}]
ON: dict[str, Any] = {"model": {"caching": True}}


def sent(vendor: Vendor[Any], request: ModelRequest) -> Any:
    return json.loads(b"".join(vendor.request(request).body))


def marks(body: Any) -> list[Any]:
    """The places of the marks: the name of a tool, `system`, and message and block."""
    found: list[Any] = [tool["name"] for tool in body.get("tools", ()) if "cache_control" in tool]
    system = body.get("system", "")
    found += ["system" for block in system if "cache_control" in block] if isinstance(system, list) else []
    for number, message in enumerate(body["messages"]):
        found += [(number, at) for at, block in enumerate(message["content"]) if "cache_control" in block]
    return found


def test_marks_are_behind_tools_system_and_the_last_two_messages_of_the_user() -> None:
    vendor = Anthropic()
    messages = conversation(
        UserData("one"),
        calls(("a", "bash__exec"), ("b", "bash__exec")),
        result("a"),
        result("b"),
        AssistantData([TextPart("so")]),
        UserData("two"),
    )
    options: dict[str, Any] = {"tools": [BASH, NOTE], "system": "Be brief.", **ON}
    body = sent(vendor, asked(messages, blocks=BLOCKS, **options))
    assert marks(body) == [NOTE.name, "system", (2, 1), (4, 0)]
    assert body["system"] == [{"type": "text", "text": "Be brief.", "cache_control": MARK}]
    assert body["messages"][2]["content"][1]["cache_control"] == MARK
    assert [part["type"] for part in body["messages"][4]["content"]] == ["text", "text"], "no mark behind a block"
    half = sent(vendor, asked(messages[:5], blocks=BLOCKS, **options))
    assert marks(half) == [NOTE.name, "system", (2, 1)], "the last message of the user is of blocks only"
    first = sent(vendor, asked(messages[:1], **options))
    assert marks(first) == [NOTE.name, "system", (0, 0)]
    assert list(body)[-3:] == ["tools", "system", "messages"]


def test_a_result_without_content_has_no_mark() -> None:
    both: list[MessageData] = [
        UserData("one"),
        calls(("a", "bash__exec"), ("b", "bash__exec")),
        result("a", 'x"content":""'),
        result("b", ""),
    ]
    assert marks(sent(Anthropic(), asked(conversation(*both), **ON)))[-1] == (2, 0)
    nothing = conversation(both[0], calls(("b", "bash__exec")), both[3])
    assert marks(sent(Anthropic(), asked(nothing, **ON)))[-1] == (0, 0)


def test_no_marks_where_they_are_switched_off_or_nothing_follows() -> None:
    messages = conversation(UserData("one"))
    off = sent(Anthropic(), asked(messages, system="x", model={"caching": False}))
    assert "cache_control" not in json.dumps(off)
    assert off["system"] == "x"
    aside = sent(Anthropic(), asked(messages, tools=[], system="x", **ON))
    assert "cache_control" not in json.dumps(aside), "a question beside the conversation is asked once"


def test_a_server_that_refuses_the_marks_is_sent_none() -> None:
    words = "400 tools.0.cache_control: Extra inputs are not permitted"
    other, own = {"endpoint": "http://127.0.0.1:1", "caching": True}, {"caching": True}
    messages = conversation(UserData("one"))
    vendor = Anthropic()
    assert not vendor.gives_up(asked(messages, model=own), words), "the vendor itself means something else"
    request = asked(messages, model=other)
    assert not vendor.gives_up(request, "400 something else")
    assert "cache_control" in json.dumps(sent(vendor, request))
    assert vendor.gives_up(request, words)
    assert "cache_control" not in json.dumps(sent(vendor, request))
    assert not vendor.gives_up(request, words), "only once"


def test_a_server_that_refuses_reasoning_is_sent_none() -> None:
    kept = {"vendor": {"provider": "openai", "model": "m", "reasoning": "reasoning_content"}, "reasoning": "hm"}
    messages = conversation(UserData("one"), calls(("a", "bash__exec")), result("a"))
    messages[1].metadata.update(kept)
    vendor = OpenAI()
    request, plain = asked(messages, "openai"), asked(conversation(UserData("one")), "openai")
    words = "400 'messages.1': property 'reasoning_content' is unsupported"
    assert not vendor.gives_up(plain, words), "it was sent none"
    assert not vendor.gives_up(request, "400 reasoning_effort is unsupported")
    assert sent(vendor, request)["messages"][1]["reasoning_content"] == "hm"
    assert vendor.gives_up(request, words)
    assert "reasoning_content" not in json.dumps(sent(vendor, request))
    assert not vendor.gives_up(request, words), "only once"


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=30)
turns = st.lists(st.tuples(words, st.integers(0, 3), words, st.booleans()), min_size=1, max_size=5)


@given(turns, st.sampled_from(sorted(BY_NAME)))
def test_each_request_begins_as_the_one_before_it(said: list[tuple[str, int, str, bool]], provider: str) -> None:
    """Whatever is said, and whether or not blocks are at the end and more tools come behind the others."""
    data: list[MessageData] = []
    vendor = wire_of(provider).VENDOR()
    before: list[Any] = []
    tools = [BASH]
    for turn, (text, many, answer, more) in enumerate(said):
        tools = [*tools, CatalogItem(name=f"found__{turn}")] if more else tools
        data.append(UserData(text))
        for ask in (False, True):
            request = asked(conversation(*data), provider, tools=tools, system="x", blocks=BLOCKS * turn, **ON)
            if turn % 2:
                vendor.forget()
            body = sent(vendor, request)
            assert len(marks(body)) <= 4 if provider == "anthropic" else "cache_control" not in json.dumps(body)
            now = [*body["tools"], *_parts(body, bool(turn))]
            assert not more or len(body["tools"]) == len(tools)
            _begins(now if not more else now[len(body["tools"]) :], before if not more else [])
            before = now
            if not ask and many:
                data.append(AssistantData([ToolCallPart(f"c{turn}-{n}", BASH.name, {"n": n}) for n in range(many)]))
                data += [result(f"c{turn}-{n}", answer) for n in range(many)]
            elif not ask:
                break
        data.append(AssistantData([TextPart(answer)]))


def _parts(body: Any, blocks: bool) -> list[Any]:
    """The parts of the conversation without marks and without the blocks at its end."""
    parts: list[Any] = []
    for message in body.get("messages") or body["input"]:
        content = message.get("content")
        parts += [(message["role"], part) for part in content] if isinstance(content, list) else [message]
    parts = json.loads(json.dumps(parts).replace(', "cache_control": {"type": "ephemeral"}', ""))
    return parts[:-1] if blocks else parts


def _begins(now: list[Any], before: list[Any]) -> None:
    now = json.loads(json.dumps(now).replace(', "cache_control": {"type": "ephemeral"}', ""))
    before = json.loads(json.dumps(before).replace(', "cache_control": {"type": "ephemeral"}', ""))
    assert now[: len(before)] == before


@pytest.mark.parametrize("provider", sorted(BY_NAME))
def test_the_bytes_of_a_long_conversation_are_mostly_those_of_the_last_request(provider: str) -> None:
    vendor = wire_of(provider).VENDOR()
    data: list[MessageData] = []
    last = b""
    for turn in range(30):
        data.append(UserData(f"question {turn} " + "word " * 40))
        data += [calls((f"c{turn}", BASH.name)), result(f"c{turn}", "line " * 40)]
        request = asked(conversation(*data), provider, tools=[BASH, NOTE], system="rule " * 200, blocks=BLOCKS, **ON)
        body = b"".join(vendor.request(request).body).replace(b',"cache_control":{"type":"ephemeral"}', b"")
        same = next((at for at, (a, b) in enumerate(zip(body, last, strict=False)) if a != b), len(last))
        if last:
            new = len(body) - len(last)
            assert same >= len(last) - 200, "nothing before the blocks changes"
            assert same + new >= len(body) - 200
        last = body
        data.append(AssistantData([TextPart("done")]))
    assert ModelSpec(provider="anthropic").caching
