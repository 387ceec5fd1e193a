"""What our adapters send for some conversations, and what they read, against what the vendors' packages send and read
(vendor_requests/, see its record.py): pictures, caching, reasoning and structured answers included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from goondan.agentproc.http import wire_of
from goondan.agentproc.http.connection import parts_of
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
from goondan.agentproc.providers.base import FilesPlace, ModelRequest
from goondan.agentproc.providers.vendor import with_files
from goondan.schemas.bundle.launch import CatalogItem, ModelSpec, OutputSpec
from goondan.schemas.models.model_providers import BY_NAME
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Blob, FilePart, ToolError, ToolResult
from tests.process.model_servers import AT, BASH, question, server

RECORDED = Path(__file__).parent / "vendor_requests"
PNG = b"PNG..."
PDF = b"%PDF."
MARK = "0123456789abcdef" * 2
#: The form of the structured answer.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def recorded_of(provider: str) -> Any:
    return json.loads((RECORDED / f"{provider}.json").read_text(encoding="utf-8"))


def cases() -> list[tuple[str, str]]:
    recorded = {provider: recorded_of(provider)["cases"] for provider in BY_NAME}
    return [(provider, case) for provider, cases in recorded.items() for case in cases]


def said(*data: MessageData) -> list[Message]:
    return [Message(f"t.{number}", part, AT, MessageSource("user")) for number, part in enumerate(data)]


LISTING = ToolCallPart("toolu_1", "bash__exec", {"command": "ls"})
ADDING = ToolCallPart("toolu_2", "notes__add", {})


def found(*files: FilePart, output: str = "a b") -> Message:
    result = ToolResult(status="ok", output=to_raw(output))
    return result_message("r.1", ToolResultPart("toolu_1", "bash__exec", result, list(files)), AT)


def file(folder: Path, data: bytes, media_type: str, name: str | None = None) -> FilePart:
    digest = hashlib.sha256(data).hexdigest()
    (folder / digest[:32]).write_bytes(data)
    return FilePart(Blob(file=digest[:32], digest=digest, size=len(data)), media_type, name)


def tools(folder: Path) -> dict[str, Any]:
    failed = error_result(ToolError(message="no room", name="Full", code="E_FULL"))
    refused = result_message("r.2", ToolResultPart("toolu_2", "notes__add", failed), AT)
    both = said(UserData("Look around."), AssistantData([TextPart("I will."), LISTING, ADDING]))
    return {"messages": [*both, found(), refused], "system": "Be brief."}


def pictures(folder: Path) -> dict[str, Any]:
    picture = file(folder, PNG, "image/png")
    files = [picture, file(folder, PDF, "application/pdf", "a.pdf")]
    asked = said(UserData("What is that?", files), AssistantData([LISTING]))
    return {
        "messages": [*asked, found(picture, output="a picture")],
        "files": FilesPlace(str(folder), MARK),
        "turn_id": "t",
    }


def reasoning(folder: Path) -> dict[str, Any]:
    asked = said(UserData("Look around."), AssistantData([LISTING]))
    return {"messages": [*asked, found()]}


CONVERSATIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "plain": lambda _: {"messages": said(UserData("Hello.")), "system": "Be brief.", "tools": []},
    "tools": tools,
    "pictures": pictures,
    "caching": tools,
    "reasoning": reasoning,
    "structured": lambda _: {"messages": said(UserData("Weather?")), "tools": [], "output": OutputSpec(SCHEMA)},
}
#: What the vendor has given with its reasoning, and the params of a model that reasons.
KEPT: dict[str, dict[str, Any]] = {
    "anthropic": {"blocks": [{"type": "thinking", "thinking": "hm", "signature": "signed"}, 0]},
    "responses": {
        "items": [
            {
                "id": "rs_1",
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "hm"}],
                "encrypted_content": "sealed",
            },
            0,
        ]
    },
}
PARAMS: dict[str, dict[str, Any]] = {
    "anthropic": {"thinking": {"type": "enabled", "budget_tokens": 2048}},
    "responses": {"reasoning": {"effort": "low", "summary": "auto"}},
}


def sent(provider: str, case: str, folder: Path) -> tuple[str, dict[str, str], Any]:
    """The path, the headers and the body of our request."""
    given = CONVERSATIONS[case](folder)
    params: dict[str, Any] = {}
    if case == "reasoning":
        params = PARAMS[provider]
        given["messages"][1].metadata["vendor"] = {"provider": provider, "model": "m", **KEPT[provider]}
    base = "http://model" if provider == "anthropic" else "http://model/v1"
    model = ModelSpec(
        provider=provider, model="m", endpoint=base, api_key="sk-recorded", params=params, caching=case == "caching"
    )
    given = {"tools": [BASH, CatalogItem(name="notes__add")], **given}
    if provider == "openai" and case == "pictures":  # a result has no files there (docs/files.md)
        given |= {"tools": [], "messages": given["messages"][:1]}
    request = ModelRequest(agent="a", model=model, step=1, **given)
    wire = wire_of(provider).VENDOR().request(request)
    data = b"".join(parts_of(wire.body if request.files is None else with_files(wire.body, request.files)))
    return wire.url.removeprefix("http://model"), wire.headers, json.loads(data)


@pytest.mark.requirement("NAME-03", "ERROR-08")
@pytest.mark.parametrize(("provider", "case"), cases())
def test_we_send_what_the_vendors_package_sends(provider: str, case: str, tmp_path: Path) -> None:
    expected = recorded_of(provider)["cases"][case]
    path, headers, body = sent(provider, case, tmp_path)
    assert path == expected["path"]
    named = {name: value for name, value in expected["headers"].items() if name != "content-type"}
    assert headers == named
    assert without_failure(body) == without_failure(expected["body"])


#: The text of the failed result in our own form of an error. The packages were given another one.
FAILURE = '{"status":"error","error":{"message":"no room","name":"Full","code":"E_FULL"}}'


def without_failure(body: Any) -> Any:
    """The body without the text of the failed result."""
    for message in body.get("messages") or body["input"]:
        parts = message["content"] if isinstance(message.get("content"), list) else [message]
        for part in parts:
            if isinstance(part, dict) and "toolu_2" in (
                part.get("tool_use_id"),
                part.get("tool_call_id"),
                part.get("call_id") if part.get("type") == "function_call_output" else None,
            ):
                field = "output" if "output" in part else "content"
                assert part[field] in (FAILURE, "no room")
                part[field] = "(failed)"
    return body


@pytest.mark.parametrize("provider", sorted(BY_NAME))
async def test_we_read_what_the_vendors_package_reads(provider: str) -> None:
    asked = HttpProvider(wire_of(provider).VENDOR())
    with server("fake_llm") as base:
        for expected in recorded_of(provider)["answers"]:
            answer = await asked.complete(question(provider, base, "m", expected["input"]))
            assert answer.text == expected["text"]
            assert [[call.name, call.args] for call in answer.calls] == expected["calls"]
            assert answer.finish_reason == expected["finishReason"]
            usage = None if answer.usage is None else [answer.usage.input_tokens, answer.usage.output_tokens]
            assert usage == expected["usage"]
    await asked.close()


@pytest.mark.parametrize("provider", sorted(BY_NAME))
def test_the_recordings_name_their_packages(provider: str) -> None:
    package, version = recorded_of(provider)["package"].split()
    assert package == ("anthropic" if provider == "anthropic" else "openai")
    assert version.count(".") == 2
