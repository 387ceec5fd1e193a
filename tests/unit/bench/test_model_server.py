"""The benchmarks' model server against our own adapters: a turn of it is a turn."""

from __future__ import annotations

from typing import Any

import pytest

from bench import model_server
from goondan.agentproc.machine.messages import (
    AssistantData,
    Message,
    MessageSource,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    UserData,
    result_message,
)
from goondan.agentproc.providers.anthropic import Anthropic
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from goondan.agentproc.providers.openai import OpenAI
from goondan.agentproc.providers.reader import SseDecoder
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import ToolResult

VENDORS: list[tuple[Any, Any]] = [(Anthropic, model_server.anthropic), (OpenAI, model_server.openai)]


@pytest.mark.parametrize(("vendor", "stream"), VENDORS)
@pytest.mark.parametrize(
    ("asked", "calls"),
    [("hello", [0]), ('call t {"a": "b"}', [1, 0]), ('steps 3 t {"a": "b"}', [1, 1, 1, 0]), ("callN 5 t {}", [5, 0])],
)
def test_a_turn_with_it_takes_the_asked_number_of_calls(vendor: Any, stream: Any, asked: str, calls: list[int]) -> None:
    messages = [Message("m0", UserData(asked), "2026-01-01T00:00:00Z", MessageSource("user"))]
    said = ""
    for number in calls:
        answer = ask(vendor(), stream, messages)
        assert len(answer.calls) == number
        name = f"m{len(messages)}"
        parts = [ToolCallPart(call.id, call.name, call.args) for call in answer.calls]
        said = answer.text
        content = AssistantData([TextPart(said), *parts])
        messages.append(Message(name, content, "2026-01-01T00:00:00Z", MessageSource("assistant")))
        for part in parts:
            result = ToolResultPart(part.tool_call_id, part.tool_name, ToolResult(status="ok", output=to_raw("x")))
            messages.append(result_message(f"{name}.{part.tool_call_id}", result, "2026-01-01T00:00:00Z"))
    assert said == ("echo: hello" if asked == "hello" else f"done after {sum(calls)} results")


def ask(vendor: Any, stream: Any, messages: list[Message]) -> ModelAnswer:
    request = ModelRequest(
        agent="a", model=ModelSpec(provider=vendor.name, model="m"), messages=messages, tools=[], step=1
    )
    body = model_server.decode_request(b"".join(vendor.request(request).body))
    reader = vendor.reader(request)
    reader.read(SseDecoder().feed(b"".join(stream(model_server.decide(body.messages), body.model))))
    return reader.answer()  # type: ignore[no-any-return]


def test_a_request_is_complete_when_its_length_says_so() -> None:
    assert model_server.content_length(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 12") == 12
    assert model_server.content_length(b"GET /stats HTTP/1.1\r\nhost: x") == 0
