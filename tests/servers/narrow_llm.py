"""A chat-completions server on loopback whose model has a small context, and which counts honestly. Prints its base URL first.

A token is up to four letters, or one other character, of what the model would read: the system prompt, the messages, the
calls and the definitions of tools. A request with more tokens than the context is refused as llama.cpp does.

The last words of the user decide: "run COMMAND" calls bash__exec with it and then says how many characters it read,
anything else is said again with some words. `/__seen` says what came: the tokens of each request that was answered, how
many were refused, and what was wrong with the messages of any.

Arguments: the tokens of the context (4096), and `listed` to say them in the list of models.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Lock
from typing import Any

WINDOW = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
LISTED = "listed" in sys.argv[2:]
TOKEN = re.compile(r"[^\W\d_]{1,4}|\d{1,3}|[^\w]|_")

lock = Lock()
ids = count(1)
answered: list[int] = []
refused: list[int] = []
faults: list[str] = []
limits: list[int | None] = []


def tokens_of(text: str) -> int:
    return len(TOKEN.findall(text))


def text_of(message: dict[str, Any]) -> str:
    """The words of a message: a text, or a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def tokens_in(body: dict[str, Any]) -> int:
    texts = [json.dumps(body.get("tools", []))]
    for message in body["messages"]:
        texts.append(f"<{message['role']}>\n{text_of(message)}")
        texts += [json.dumps(call) for call in message.get("tool_calls", [])]
    return tokens_of("\n".join(texts))


def faults_in(messages: list[dict[str, Any]]) -> list[str]:
    """What a vendor would refuse: a call without its result behind it, a result without its call."""
    found: list[str] = []
    owed: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if not owed or owed.pop(0) != message["tool_call_id"]:
                found.append(f"a result without its call: {message['tool_call_id']}")
        else:
            found += [f"a call without its result: {call}" for call in owed]
            owed = [call["id"] for call in message.get("tool_calls", [])]
    return found + [f"a call without its result: {call}" for call in owed]


def said(messages: list[dict[str, Any]]) -> tuple[str, int | None]:
    """The last words of the user, and the length of the results behind them."""
    read = None
    for message in reversed(messages):
        if message["role"] == "tool":
            read = (read or 0) + len(text_of(message))
        elif message["role"] == "user":
            return text_of(message).rpartition("\n\n")[2], read
    return "", read


def answer(body: dict[str, Any]) -> dict[str, Any]:
    text, read = said(body["messages"])
    command = text.removeprefix("run ")
    if command != text and read is None:
        function = {"name": "bash__exec", "arguments": json.dumps({"command": command})}
        return {"tool_calls": [{"index": 0, "id": f"call_{next(ids)}", "type": "function", "function": function}]}
    words = f"read {read} characters" if read is not None else f"you said {text[:40]}, " + "and so on " * 20
    return {"content": words}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tokens = tokens_in(body)
        with lock:
            limits.append(body.get("max_tokens"))
            faults.extend(faults_in(body["messages"]))
            (refused if tokens > WINDOW else answered).append(tokens)
        if tokens > WINDOW:
            words = f"request ({tokens} tokens) exceeds the available context size ({WINDOW} tokens), try increasing it"
            error = {"code": 400, "message": words, "type": "exceed_context_size_error"}
            self.say(400, {"error": {**error, "n_prompt_tokens": tokens, "n_ctx": WINDOW}})
            return
        delta = answer(body)
        finish = "tool_calls" if "tool_calls" in delta else "stop"
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "narrow"}
        usage = {"prompt_tokens": tokens, "completion_tokens": tokens_of(json.dumps(delta))}
        events = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
            {**head, "choices": [], "usage": usage},
        ]
        data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.send("text/event-stream", 200, data)

    def do_GET(self) -> None:
        if self.path == "/__seen":
            with lock:
                self.say(200, {"answered": answered, "refused": refused, "faults": faults, "limits": limits})
        elif self.path == "/v1/models":
            model = {"id": "narrow", "object": "model", **({"max_model_len": WINDOW} if LISTED else {})}
            self.say(200, {"object": "list", "data": [model]})
        else:
            self.say(404, {"error": {"message": "not found"}})

    def say(self, status: int, document: Any) -> None:
        self.send("application/json", status, json.dumps(document))

    def send(self, kind: str, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
