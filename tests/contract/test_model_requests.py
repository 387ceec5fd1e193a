"""What our adapters send and read, against what the vendors' own packages did (model_requests/, see its record.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.http import wire_of
from goondan.agentproc.http.provider import HttpProvider
from goondan.agentproc.machine.messages import (
    AssistantData,
    Message,
    MessageData,
    MessageSource,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    UserData,
    error_result,
    result_message,
)
from goondan.agentproc.providers.base import ModelRequest
from goondan.schemas.bundle.launch import CatalogItem, ModelSpec
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import ToolError, ToolResult
from tests.process.model_servers import AT, BASH, endpoint, question, seen, server

RECORDED = Path(__file__).parent / "model_requests"
ALL = pytest.mark.parametrize("provider", ["anthropic", "openai", "responses"])
#: Parameters of the recorded conversation, as a bundle would give them.
PARAMS: dict[str, dict[str, Any]] = {"anthropic": {"stop_sequences": ["END"]}, "openai": {"temperature": 0.5}}
PARAMS["responses"] = PARAMS["openai"]


def recorded(provider: str) -> Any:
    return json.loads((RECORDED / f"{provider}.json").read_text(encoding="utf-8"))


def model(provider: str) -> HttpProvider:
    return HttpProvider(wire_of(provider).VENDOR())


def conversation() -> list[Message]:
    """One turn with two calls, of which one failed, and the next question."""
    ids = iter(range(9))

    def message(data: MessageData) -> Message:
        return Message(f"t.{next(ids)}", data, AT, MessageSource("user"))

    unknown = ToolError(
        message="Tool 'no__such' is not available in the current Tool Catalog.",
        name="ToolNotInCatalogError",
        code="E_TOOL_NOT_IN_CATALOG",
    )
    listing = ToolResult(status="ok", output=to_raw({"stdout": "a\nb\n", "exitCode": 0}))
    first, second = ToolCallPart("toolu_1", "bash__exec", {"command": "ls"}), ToolCallPart("toolu_2", "no__such", {})
    return [
        message(UserData("Look around.")),
        message(AssistantData([TextPart("I will."), first, second])),
        result_message("r.1", ToolResultPart("toolu_1", "bash__exec", listing), AT),
        result_message("r.2", ToolResultPart("toolu_2", "no__such", error_result(unknown)), AT),
        message(AssistantData([TextPart("Two files.")])),
        message(UserData("고마워")),
    ]


@ALL
@pytest.mark.requirement("NAME-03", "ERROR-08")
async def test_we_send_what_the_vendors_package_sends(provider: str) -> None:
    expected = recorded(provider)["request"]
    with server("misbehaving_llm") as base:
        spec = ModelSpec(
            provider=provider,
            model="well",
            endpoint=endpoint(provider, base),
            api_key="sk-recorded",
            params=PARAMS[provider],
            caching=False,
        )
        request = ModelRequest(
            agent="a",
            model=spec,
            messages=conversation(),
            tools=[BASH, CatalogItem(name="notes__add")],
            step=2,
            system="Be brief.",
        )
        asked = model(provider)
        await asked.complete(request)
        await asked.close()
        (sent,) = seen(base)["requests"]
    assert sent["path"] == expected["path"]
    assert {name: sent["headers"].get(name) for name in expected["headers"]} == expected["headers"]
    assert "x-api-key" not in sent["headers"]
    assert sent["body"] == expected["body"]


@ALL
async def test_we_read_what_the_vendors_package_reads(provider: str) -> None:
    asked = model(provider)
    with server("fake_llm") as base:
        for expected in recorded(provider)["answers"]:
            answer = await asked.complete(question(provider, base, "m", expected["input"]))
            assert answer.text == expected["text"]
            assert [[call.name, call.args] for call in answer.calls] == expected["calls"]
            assert answer.finish_reason == expected["finishReason"]
            usage = None if answer.usage is None else [answer.usage.input_tokens, answer.usage.output_tokens]
            assert usage == expected["usage"]
    await asked.close()
