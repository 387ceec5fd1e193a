"""Writes anthropic.json, openai.json and responses.json: what the vendors' own packages send for one conversation, and
how they read the answers of tests/servers/fake_llm.py. What else requests can have is in ../vendor_requests/.

They are no dependency of this project. Run by hand, in an environment of its own:

    python3 -m venv /tmp/record && /tmp/record/bin/pip install anthropic openai
    /tmp/record/bin/python tests/contract/model_requests/record.py

The conversation is that of tests/contract/test_model_requests.py, written here as a user of the packages writes it.
The bodies are also checked against the packages' own types, so that a field they do not know is noticed here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

HERE = Path(__file__).parent
SERVERS = HERE.parent.parent / "servers"
KEY = "sk-recorded"
SYSTEM = "Be brief."
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
FAILED = (
    '{"status":"error","error":{"message":"Tool \'no__such\' is not available in the current Tool Catalog.",'
    '"name":"ToolNotInCatalogError","code":"E_TOOL_NOT_IN_CATALOG"}}'
)
LISTING = '{"stdout":"a\\nb\\n","exitCode":0}'
#: Headers that decide something; the others name the package and its version.
HEADERS = ("content-type", "x-api-key", "authorization", "anthropic-version")
ANSWERS = ["hello", 'call bash__exec {"command":"id -u; ls /"}', 'callN 3 bash__exec {"command":"echo 가"}']


def main() -> None:
    record("anthropic", anthropic.__version__, ask_anthropic, MessageCreateParamsStreaming, read_anthropic)
    record("openai", openai.__version__, ask_openai, CompletionCreateParamsStreaming, read_openai)
    record("responses", openai.__version__, ask_responses, ResponseCreateParamsStreaming, read_responses)


def ask_anthropic(base: str) -> None:
    client = anthropic.Anthropic(api_key=KEY, base_url=base, max_retries=0)
    with client.messages.stream(
        model="well",
        max_tokens=8192,
        stop_sequences=["END"],
        system=SYSTEM,
        tools=[
            {"name": "bash__exec", "description": "Run a command.", "input_schema": COMMAND},
            {"name": "notes__add", "input_schema": NOTHING},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Look around."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I will."},
                    {"type": "tool_use", "id": "toolu_1", "name": "bash__exec", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "no__such", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": LISTING},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": FAILED, "is_error": True},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "Two files."}]},
            {"role": "user", "content": [{"type": "text", "text": "고마워"}]},
        ],
    ) as stream:
        stream.until_done()


def ask_openai(base: str) -> None:
    client = openai.OpenAI(api_key=KEY, base_url=f"{base}/v1", max_retries=0)
    listed: Any = {
        "id": "toolu_1",
        "type": "function",
        "function": {"name": "bash__exec", "arguments": '{"command":"ls"}'},
    }
    unknown: Any = {"id": "toolu_2", "type": "function", "function": {"name": "no__such", "arguments": "{}"}}
    stream = client.chat.completions.create(
        model="well",
        temperature=0.5,
        stream=True,
        stream_options={"include_usage": True},
        tools=[
            {
                "type": "function",
                "function": {"name": "bash__exec", "description": "Run a command.", "parameters": COMMAND},
            },
            {"type": "function", "function": {"name": "notes__add", "parameters": NOTHING}},
        ],
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "Look around."},
            {"role": "assistant", "content": "I will.", "tool_calls": [listed, unknown]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": LISTING},
            {"role": "tool", "tool_call_id": "toolu_2", "content": FAILED},
            {"role": "assistant", "content": "Two files."},
            {"role": "user", "content": "고마워"},
        ],
    )
    for _ in stream:
        pass


def ask_responses(base: str) -> None:
    client = openai.OpenAI(api_key=KEY, base_url=f"{base}/v1", max_retries=0)

    def message(role: Any, text: str) -> Any:
        return {"type": "message", "role": role, "content": text}

    def output(call_id: str, text: str) -> Any:
        return {"type": "function_call_output", "call_id": call_id, "output": text}

    with client.responses.create(
        model="well",
        temperature=0.5,
        stream=True,
        store=False,
        include=["reasoning.encrypted_content"],
        instructions=SYSTEM,
        tools=[
            {
                "type": "function",
                "name": "bash__exec",
                "description": "Run a command.",
                "parameters": COMMAND,
                "strict": False,
            },
            {"type": "function", "name": "notes__add", "parameters": NOTHING, "strict": False},
        ],
        input=[
            message("user", "Look around."),
            message("assistant", "I will."),
            {"type": "function_call", "call_id": "toolu_1", "name": "bash__exec", "arguments": '{"command":"ls"}'},
            {"type": "function_call", "call_id": "toolu_2", "name": "no__such", "arguments": "{}"},
            output("toolu_1", LISTING),
            output("toolu_2", FAILED),
            message("assistant", "Two files."),
            message("user", "고마워"),
        ],
    ) as stream:
        for _ in stream:
            pass


def read_anthropic(base: str, text: str) -> dict[str, Any]:
    client = anthropic.Anthropic(api_key=KEY, base_url=base, max_retries=0)
    with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": text}]) as stream:
        message = stream.get_final_message()
    calls = [[block.name, block.input] for block in message.content if block.type == "tool_use"]
    said = "".join(block.text for block in message.content if block.type == "text")
    usage = [message.usage.input_tokens, message.usage.output_tokens]
    return {"text": said, "calls": calls, "finishReason": message.stop_reason, "usage": usage}


def read_openai(base: str, text: str) -> dict[str, Any]:
    client = openai.OpenAI(api_key=KEY, base_url=f"{base}/v1", max_retries=0)
    with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": text}]) as stream:
        choice = stream.get_final_completion().choices[0]
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in choice.message.tool_calls or []]
    return {"text": choice.message.content or "", "calls": calls, "finishReason": choice.finish_reason, "usage": None}


def read_responses(base: str, text: str) -> dict[str, Any]:
    client = openai.OpenAI(api_key=KEY, base_url=f"{base}/v1", max_retries=0)
    with client.responses.stream(model="m", input=text) as stream:
        response = stream.get_final_response()
    calls = [[item.name, json.loads(item.arguments)] for item in response.output if item.type == "function_call"]
    assert response.usage is not None
    usage = [response.usage.input_tokens, response.usage.output_tokens]
    return {"text": response.output_text, "calls": calls, "finishReason": response.status, "usage": usage}


def record(
    name: str, version: str, ask: Callable[[str], None], kind: Any, read: Callable[[str, str], dict[str, Any]]
) -> None:
    """One vendor's file."""
    process, base = start("misbehaving_llm")
    try:
        ask(base)
        with urllib.request.urlopen(f"{base}/__seen") as response:
            (request,) = json.load(response)["requests"]
    finally:
        process.kill()
    adapter = pydantic.TypeAdapter(kind)
    known = adapter.validate_python(request["body"])
    assert set(known) == set(request["body"]), "a field that the package's types do not have"
    headers = {header: request["headers"][header] for header in HEADERS if header in request["headers"]}
    process, base = start("fake_llm")
    try:
        answers = [{"input": text, **read(base, text)} for text in ANSWERS]
    finally:
        process.kill()
    recorded = {
        "package": f"{'anthropic' if name == 'anthropic' else 'openai'} {version}",
        "request": {"path": request["path"], "headers": headers, "body": request["body"]},
        "answers": answers,
    }
    (HERE / f"{name}.json").write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def start(server: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, SERVERS / f"{server}.py"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


if __name__ == "__main__":
    main()
