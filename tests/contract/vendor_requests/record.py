"""Writes anthropic.json, openai.json and responses.json: what the vendors' own packages send for some conversations,
and how they read the answers of tests/servers/fake_llm.py.

They are no dependency of this project. Run by hand, in an environment of its own, which needs no network but loopback:

    python3 -m venv /tmp/record && /tmp/record/bin/pip install anthropic openai
    /tmp/record/bin/python tests/contract/vendor_requests/record.py

Each case is written here as a user of the packages writes it. tests/contract/test_vendor_requests.py has the same
conversations in our form. Every body is also checked against the packages' own types.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

HERE = Path(__file__).parent
KEY = "sk-recorded"
SYSTEM = "Be brief."
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
#: What stands for the base64 of a picture and of a PDF. The packages pass it on as it is.
PNG, PDF = "UE5HLi4u", "JVBERi4="
MARK = {"type": "ephemeral"}
#: The names of fields that decide something about the connection only.
HEADERS = ("content-type", "x-api-key", "authorization", "anthropic-version")

Ask = Callable[[Any], None]


# --- Anthropic


def anthropic_cases() -> dict[str, Ask]:
    tools: list[Any] = [
        {"name": "bash__exec", "description": "Run a command.", "input_schema": COMMAND},
        {"name": "notes__add", "input_schema": NOTHING},
    ]
    used: list[Any] = [
        {"type": "text", "text": "I will."},
        {"type": "tool_use", "id": "toolu_1", "name": "bash__exec", "input": {"command": "ls"}},
        {"type": "tool_use", "id": "toolu_2", "name": "notes__add", "input": {}},
    ]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a b"},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no room", "is_error": True},
    ]

    def user(*blocks: Any) -> Any:
        return {"role": "user", "content": list(blocks)}

    def text(words: str, **more: Any) -> Any:
        return {"type": "text", "text": words, **more}

    def send(client: anthropic.Anthropic, **body: Any) -> None:
        with client.messages.stream(model="m", max_tokens=8192, **body) as stream:
            stream.until_done()

    asked = user(text("Look around."))
    thought = {"type": "thinking", "thinking": "hm", "signature": "signed"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    document = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}}
    seen = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("a picture"), image]}
    marked_tools = [tools[0], {**tools[1], "cache_control": MARK}]
    calls = {"role": "assistant", "content": used}
    return {
        "plain": lambda c: send(c, system=SYSTEM, messages=[user(text("Hello."))]),
        "tools": lambda c: send(c, system=SYSTEM, tools=tools, messages=[asked, calls, user(*results)]),
        "pictures": lambda c: send(
            c,
            tools=tools,
            messages=[
                user(image, document, text("What is that?")),
                {"role": "assistant", "content": [used[1]]},
                user(seen),
            ],
        ),
        "caching": lambda c: send(
            c,
            system=[text(SYSTEM, cache_control=MARK)],
            tools=marked_tools,
            messages=[
                user(text("Look around.", cache_control=MARK)),
                calls,
                user(results[0], {**results[1], "cache_control": MARK}),
            ],
        ),
        "reasoning": lambda c: send(
            c,
            tools=tools,
            thinking={"type": "enabled", "budget_tokens": 2048},
            messages=[asked, {"role": "assistant", "content": [thought, used[1]]}, user(results[0])],
        ),
        "structured": lambda c: send(
            c,
            output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
            messages=[user(text("Weather?"))],
        ),
    }


# --- OpenAI, chat completions


def openai_cases() -> dict[str, Ask]:
    tools: list[Any] = [
        {
            "type": "function",
            "function": {"name": "bash__exec", "description": "Run a command.", "parameters": COMMAND},
        },
        {"type": "function", "function": {"name": "notes__add", "parameters": NOTHING}},
    ]

    def call(call_id: str, name: str, arguments: str) -> Any:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    both = [call("toolu_1", "bash__exec", '{"command":"ls"}'), call("toolu_2", "notes__add", "{}")]
    used = {"role": "assistant", "content": "I will.", "tool_calls": both}
    results = [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a b"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "no room"},
    ]
    system = {"role": "system", "content": SYSTEM}
    asked = {"role": "user", "content": "Look around."}
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    document = {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}}
    what = {"type": "text", "text": "What is that?"}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}

    def send(client: openai.OpenAI, **body: Any) -> None:
        stream = client.chat.completions.create(model="m", stream=True, stream_options={"include_usage": True}, **body)
        for _ in stream:
            pass

    return {
        "plain": lambda c: send(c, messages=[system, {"role": "user", "content": "Hello."}]),
        "tools": lambda c: send(c, tools=tools, messages=[system, asked, used, *results]),
        "pictures": lambda c: send(c, messages=[{"role": "user", "content": [what, image, document]}]),
        "structured": lambda c: send(c, response_format=wanted, messages=[{"role": "user", "content": "Weather?"}]),
    }


# --- OpenAI, Responses


def responses_cases() -> dict[str, Ask]:
    tools: list[Any] = [
        {
            "type": "function",
            "name": "bash__exec",
            "description": "Run a command.",
            "parameters": COMMAND,
            "strict": False,
        },
        {"type": "function", "name": "notes__add", "parameters": NOTHING, "strict": False},
    ]

    def user(content: Any) -> Any:
        return {"type": "message", "role": "user", "content": content}

    def call(call_id: str, name: str, arguments: str) -> Any:
        return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}

    def output(call_id: str, content: Any) -> Any:
        return {"type": "function_call_output", "call_id": call_id, "output": content}

    said = {"type": "message", "role": "assistant", "content": "I will."}
    listing, adding = call("toolu_1", "bash__exec", '{"command":"ls"}'), call("toolu_2", "notes__add", "{}")
    summary = [{"type": "summary_text", "text": "hm"}]
    thought = {"id": "rs_1", "type": "reasoning", "summary": summary, "encrypted_content": "sealed"}
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"}
    document = {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
    seen = [{"type": "input_text", "text": "a picture"}, image]
    asked = user("Look around.")
    wanted = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}

    def send(client: openai.OpenAI, **body: Any) -> None:
        stream = client.responses.create(
            model="m", stream=True, store=False, include=["reasoning.encrypted_content"], **body
        )
        for _ in stream:
            pass

    return {
        "plain": lambda c: send(c, instructions=SYSTEM, input=[user("Hello.")]),
        "tools": lambda c: send(
            c,
            instructions=SYSTEM,
            tools=tools,
            input=[asked, said, listing, adding, output("toolu_1", "a b"), output("toolu_2", "no room")],
        ),
        "pictures": lambda c: send(
            c,
            tools=tools,
            input=[
                user([{"type": "input_text", "text": "What is that?"}, image, document]),
                listing,
                output("toolu_1", seen),
            ],
        ),
        "reasoning": lambda c: send(
            c,
            tools=tools,
            reasoning={"effort": "low", "summary": "auto"},
            input=[asked, thought, listing, output("toolu_1", "a b")],
        ),
        "structured": lambda c: send(c, text=wanted, input=[user("Weather?")]),
    }


# --- what they read

#: What fake_llm is asked.
INPUTS = ("hello", 'call bash__exec {"command":"id -u; ls /"}', 'callN 3 bash__exec {"command":"echo 가"}')
Read = Callable[[Any, str], dict[str, Any]]


def read_anthropic(client: anthropic.Anthropic, text: str) -> dict[str, Any]:
    with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": text}]) as stream:
        message = stream.get_final_message()
    calls = [[block.name, block.input] for block in message.content if block.type == "tool_use"]
    said = "".join(block.text for block in message.content if block.type == "text")
    usage = [message.usage.input_tokens, message.usage.output_tokens]
    return {"text": said, "calls": calls, "finishReason": message.stop_reason, "usage": usage}


def read_openai(client: openai.OpenAI, text: str) -> dict[str, Any]:
    with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": text}]) as stream:
        choice = stream.get_final_completion().choices[0]
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in choice.message.tool_calls or []]
    return {"text": choice.message.content or "", "calls": calls, "finishReason": choice.finish_reason, "usage": None}


def read_responses(client: openai.OpenAI, text: str) -> dict[str, Any]:
    with client.responses.stream(model="m", input=text) as stream:
        response = stream.get_final_response()
    calls = [[item.name, json.loads(item.arguments)] for item in response.output if item.type == "function_call"]
    assert response.usage is not None
    usage = [response.usage.input_tokens, response.usage.output_tokens]
    return {"text": response.output_text, "calls": calls, "finishReason": response.status, "usage": usage}


# --- recording

#: Answers that the packages accept, by the end of the path.
ANSWERS: dict[str, list[Any]] = {
    "/messages": [
        {"type": "message_start", "message": {"id": "m", "type": "message", "role": "assistant", "model": "m",
         "content": [], "usage": {"input_tokens": 1, "output_tokens": 1}}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ],
    "/chat/completions": [
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
         "choices": [{"index": 0, "delta": {"content": "fine"}, "finish_reason": "stop"}]},
    ],
    "/responses": [
        {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "item_id": "m", "delta": "fine",
         "logprobs": [], "sequence_number": 0},
    ],
}  # fmt: skip


@contextmanager
def server(seen: list[Any]) -> Iterator[str]:
    """A server on loopback that keeps what it is sent. Its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            headers = {name: self.headers[name] for name in HEADERS if name in self.headers}
            seen.append({"path": self.path, "headers": headers, "body": body})
            events = next(events for end, events in ANSWERS.items() if self.path.endswith(end))
            named = [f"event: {event.get('type', 'message')}\ndata: {json.dumps(event)}\n\n" for event in events]
            data = "".join(named).encode()
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()


def record(name: str, package: str, client: Callable[[str], Any], cases: dict[str, Ask], kind: Any, read: Read) -> None:
    """One format's file."""
    adapter, recorded = pydantic.TypeAdapter(kind), {}
    for case, ask in cases.items():
        seen: list[Any] = []
        with server(seen) as base:
            ask(client(base))
        (request,) = seen
        known = adapter.validate_python(request["body"])
        assert set(known) == set(request["body"]), "a field that the package's types do not have"
        recorded[case] = request
    command = [sys.executable, str(HERE.parent.parent / "servers" / "fake_llm.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        asked = client(process.stdout.readline().strip())
        answers = [{"input": text, **read(asked, text)} for text in INPUTS]
        process.kill()
    document = {"package": package, "cases": recorded, "answers": answers}
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    def of_openai(base: str) -> openai.OpenAI:
        return openai.OpenAI(api_key=KEY, base_url=f"{base}/v1", max_retries=0)

    def of_anthropic(base: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(auth_token=KEY, base_url=base, max_retries=0)

    chat, answers = CompletionCreateParamsStreaming, ResponseCreateParamsStreaming
    version = f"openai {openai.__version__}"
    record("openai", version, of_openai, openai_cases(), chat, read_openai)
    record("responses", version, of_openai, responses_cases(), answers, read_responses)
    kind = MessageCreateParamsStreaming
    version = f"anthropic {anthropic.__version__}"
    record("anthropic", version, of_anthropic, anthropic_cases(), kind, read_anthropic)


if __name__ == "__main__":
    main()
