"""A chat-completions server that says what a test tells it to, and keeps every request as it came."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

#: One answer of the model: a text, or the calls (id, name, arguments) of one step.
Answer = str | list[tuple[str, str, dict[str, Any]]]


class ScriptedModel:
    """`scripts`: what the person says -> the answers of that turn, in order. `requests`: the same -> request bodies.
    `headers`: of all requests.

    `otherwise` is said where no script has an answer. `by_first`: a message that has no script belongs to the turn of
    the one before it.
    """

    def __init__(self) -> None:
        self.base = ""
        self.scripts: dict[str, list[Answer]] = {}
        self.requests: dict[str, list[dict[str, Any]]] = {}
        self.headers: list[dict[str, str]] = []
        self.otherwise: str | None = None
        self.by_first = False

    def answer(self, body: dict[str, Any]) -> Answer:
        """The next answer of the turn that the last user message began."""
        messages = body["messages"]
        # What extensions say beside the conversation is no message of a person.
        said_by_a_person = [m["role"] == "user" and not _text(m).startswith("<context ") for m in messages]
        users = [number for number, is_one in enumerate(said_by_a_person) if is_one]
        known = [number for number in users if _text(messages[number]) in self.scripts] if self.by_first else []
        at = max(known or users)
        said = _text(messages[at])
        self.requests.setdefault(said, []).append(body)
        step = sum(1 for message in messages[at:] if message["role"] == "assistant")
        script = self.scripts.get(said, []) if self.otherwise is not None else self.scripts[said]
        return script[step] if step < len(script) or self.otherwise is None else self.otherwise

    def offered(self, said: str, step: int = 0) -> dict[str, dict[str, Any]]:
        """The tools that the model was shown in a step, by name."""
        return {tool["function"]["name"]: tool["function"] for tool in self.requests[said][step]["tools"]}

    def results(self, said: str) -> dict[str, Any]:
        """What the model was told about each call of a turn, by the call's id."""
        messages = self.requests[said][-1]["messages"]
        return {m["tool_call_id"]: _value(m["content"]) for m in messages if m["role"] == "tool"}


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


def _value(content: str) -> Any:
    """A result as the model reads it: JSON, or a text by itself."""
    try:
        return json.loads(content)
    except json.JSONDecodeError:
        return content


@contextmanager
def scripted_model(port: int = 0) -> Iterator[ScriptedModel]:
    """The server while it runs, on loopback; 0: on any port."""
    model = ScriptedModel()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            model.headers.append({name.lower(): value for name, value in self.headers.items()})
            answer = model.answer(body)
            delta: dict[str, Any] = {"role": "assistant"}
            if isinstance(answer, str):
                delta["content"] = answer
            else:
                delta["tool_calls"] = [
                    {
                        "index": number,
                        "id": id_,
                        "type": "function",
                        "function": {"name": name, "arguments": json.dumps(args)},
                    }
                    for number, (id_, name, args) in enumerate(answer)
                ]
            finish = "stop" if isinstance(answer, str) else "tool_calls"
            head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            events = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}]
            events.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
            data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("content-length", str(len(data.encode())))
            self.end_headers()
            self.wfile.write(data.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    model.base = f"http://127.0.0.1:{server.server_port}/v1"
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield model
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
