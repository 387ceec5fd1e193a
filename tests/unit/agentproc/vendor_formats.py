"""Conversations as requests, and streams as answers: what the tests of the vendors' formats are made of."""

from __future__ import annotations

import json
from typing import Any

from goondan.agentproc.http import wire_of
from goondan.agentproc.machine.messages import (
    AssistantData,
    Message,
    MessageData,
    MessageSource,
    ToolCallPart,
    ToolData,
    ToolResultPart,
    presentable,
)
from goondan.agentproc.providers.anthropic import Reader as AnthropicReader
from goondan.agentproc.providers.base import ModelAnswer, ModelRequest
from goondan.agentproc.providers.history import Entries, HistoryEntry
from goondan.agentproc.providers.openai import Reader as OpenAIReader
from goondan.agentproc.providers.responses import Reader as ResponsesReader
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import ToolResult
from tests.unit.agentproc.fakes import BASH

AT = "2026-01-01T00:00:00.000Z"


def message(number: int, data: MessageData, **metadata: Any) -> Message:
    return Message(f"m.{number}", data, AT, MessageSource("user"), metadata)


def result(call_id: str, output: Any = "ok") -> ToolData:
    return ToolData([ToolResultPart(call_id, "x", ToolResult(status="ok", output=to_raw(output)))])


def conversation(*data: MessageData) -> list[Message]:
    return [message(number, item) for number, item in enumerate(data)]


def calls(*names: tuple[str, str]) -> AssistantData:
    return AssistantData([ToolCallPart(call_id, name, {}) for call_id, name in names])


def asked(messages: list[Message], provider: str = "anthropic", **changes: Any) -> ModelRequest:
    """A request. Unless `model` says something else, it has no marks for a cache (test_caching.py is about those)."""
    model = ModelSpec(**{"provider": provider, "model": "m", "caching": False, **changes.pop("model", {})})
    return ModelRequest(
        agent="a", model=model, messages=messages, tools=changes.pop("tools", [BASH]), step=1, **changes
    )


def body(messages: list[Message], provider: str = "anthropic", **changes: Any) -> Any:
    vendor = wire_of(provider).VENDOR()
    return json.loads(b"".join(vendor.request(asked(messages, provider, **changes)).body))


def read_anthropic(*events: dict[str, Any]) -> ModelAnswer:
    reader = AnthropicReader("m")
    for event in events:
        reader.read([(b"", json.dumps(event).encode())])
    return reader.answer()


def read_openai(*events: dict[str, Any]) -> ModelAnswer:
    reader = OpenAIReader("m")
    for event in events:
        reader.read([(b"", json.dumps(event).encode())])
    return reader.answer()


def read_responses(*events: dict[str, Any]) -> ModelAnswer:
    reader = ResponsesReader("m")
    for event in events:
        reader.read([(b"", json.dumps(event).encode())])
    return reader.answer()


def entries(messages: list[Message], provider: str, model: str) -> list[HistoryEntry]:
    request = asked(messages, provider, model={"model": model}, tools=[])
    return Entries(provider, request).extend(presentable(messages))


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
