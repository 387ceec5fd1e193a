"""`python -m bench.model_server`: a model server for benchmarks, which streams as the vendors do and costs little.

It speaks Anthropic's Messages and OpenAI's chat completions, both streaming, chunked, one chunk an event. The last text
of the user decides: `call NAME JSON` is one tool call and then a text, `callN K NAME JSON` are K calls in one answer,
`steps K NAME JSON` is one call in each of K answers, `each [[NAME, JSON], …]` one of these in each answer; anything
else is repeated.

A benchmark of turns must know this program's part of their time. So it adds up the time from a request's last byte to
the answer's last write. `GET /stats` says {requests, seconds, received} since the last time it was asked
(`received`: bytes of the requests), and with the argument `--tokens` the tokens in them. With `--pause` an answer comes
PAUSE_S behind its request, however long it was to read: those who wait come back to the same caches. The first line on
stdout is the base URL.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from typing import Any, Final, cast

import msgspec
import uvloop

_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_END: Final = b"0\r\n\r\n"
#: A larger request is not decoded, and answered with its size (bytes).
MAX_READ: Final = 1 << 20

#: The time from a request to its answer, if there is a pause (seconds). A request of 600 KiB is read in half of it.
PAUSE_S: Final = 0.005
#: Words, numbers of three digits, and signs: near to what vendors count as tokens of such texts.
_TOKEN: Final = re.compile(rb"[A-Za-z]+|[0-9]{1,3}|[^\sA-Za-z0-9]{1,2}")

encode = msgspec.json.encode
decode = msgspec.json.decode
ids = itertools.count(1)

#: A tool call: name and arguments.
Asked = tuple[str, Any]


class Part(msgspec.Struct, gc=False):
    """A part of a message."""

    #: `text`, or another.
    type: str
    #: Of a text.
    text: str = ""


class Said(msgspec.Struct, gc=False):
    """A message."""

    #: Who says it.
    role: str
    #: What.
    content: str | list[Part] | None = None


class Request(msgspec.Struct):
    """What is read of a request. All of its JSON as objects would be made in 7 ms for 1,500 calls, and would leave the
    agent's processor without its memory in the caches.
    """

    #: The name of the model.
    model: str = "bench"
    #: The conversation.
    messages: list[Said] = []


decode_request = msgspec.json.Decoder(Request).decode


# --- what to answer ---------------------------------------------------------------------------------------------------


def decide(messages: list[Said]) -> str | list[Asked]:
    """A text, or the calls to make."""
    results = 0
    asked = ""
    for message in reversed(messages):
        content = message.content
        if message.role == "tool":
            results += 1
        elif message.role == "user":
            parts = content if isinstance(content, list) else [Part("text", content or "")]
            results += sum(part.type == "tool_result" for part in parts)
            asked = next((part.text for part in reversed(parts) if part.type == "text"), "")
            if asked:
                break
    word, _, rest = asked.partition(" ")
    if word == "each":
        each = decode(rest)
        return [tuple(each[results])] if results < len(each) else f"done after {results} results"
    if word == "call":
        word, rest = "steps", f"1 {rest}"
    if word not in ("steps", "callN"):
        return f"echo: {asked}"
    count, name, arguments = (*rest.split(" ", 2), "{}")[:3]
    call = (name, decode(arguments))
    if word == "callN":
        return [call] * int(count) if results == 0 else f"done after {results} results"
    return [call] if results < int(count) else f"done after {results} results"


def anthropic(answer: str | list[Asked], model: str) -> list[bytes]:
    """The events of the Messages API."""
    events: list[bytes] = []

    def event(kind: str, **fields: Any) -> None:
        events.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **fields})))

    start = {"id": f"msg_{next(ids)}", "type": "message", "role": "assistant", "model": model, "content": []}
    usage = {"input_tokens": 10, "output_tokens": 1}
    event("message_start", message={**start, "stop_reason": None, "stop_sequence": None, "usage": usage})
    if isinstance(answer, str):
        event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        for piece in pieces(answer):
            event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
        event("content_block_stop", index=0)
    else:
        for index, (name, arguments) in enumerate(answer):
            block = {"type": "tool_use", "id": f"toolu_{next(ids)}", "name": name, "input": {}}
            event("content_block_start", index=index, content_block=block)
            for piece in pieces(encode(arguments).decode()):
                event("content_block_delta", index=index, delta={"type": "input_json_delta", "partial_json": piece})
            event("content_block_stop", index=index)
    stop = "end_turn" if isinstance(answer, str) else "tool_use"
    event("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage={"output_tokens": 5})
    event("message_stop")
    return events


def openai(answer: str | list[Asked], model: str) -> list[bytes]:
    """The chunks of chat completions."""
    chunks: list[bytes] = []
    base = {"id": f"chatcmpl-{next(ids)}", "object": "chat.completion.chunk", "created": 1, "model": model}

    def chunk(delta: dict[str, Any], reason: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        chunks.append(b"data: %s\n\n" % encode({**base, "choices": [choice]}))

    if isinstance(answer, str):
        chunk({"role": "assistant", "content": ""})
        for piece in pieces(answer):
            chunk({"content": piece})
        chunk({}, "stop")
    else:
        chunk({"role": "assistant", "content": None})
        for index, (name, arguments) in enumerate(answer):
            call = {"index": index, "id": f"call_{next(ids)}", "type": "function"}
            chunk({"tool_calls": [{**call, "function": {"name": name, "arguments": ""}}]})
            for piece in pieces(encode(arguments).decode()):
                chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        chunk({}, "tool_calls")
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    chunks.append(b"data: %s\n\n" % encode({**base, "choices": [], "usage": usage}))
    chunks.append(b"data: [DONE]\n\n")
    return chunks


def pieces(text: str) -> list[str]:
    """The text in pieces as a vendor would send them: about twenty letters each."""
    return [text[at : at + 20] for at in range(0, len(text), 20)]


# --- how to answer ----------------------------------------------------------------------------------------------------


class Server(asyncio.Protocol):
    """One connection, kept open."""

    requests = 0
    seconds = 0.0
    received = 0
    tokens = 0
    counts_tokens = False
    pause_s = 0.0

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        #: How many bytes of the request are still to come, as far as it is known.
        self._missing = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        """asyncio's: answer when a request is complete; clients here send the next one after the answer."""
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        data = b"".join(self._parts)
        ended = data.find(b"\r\n\r\n")
        head, body = data[: max(ended, 0)], memoryview(data)[ended + 4 :]
        missing = content_length(head) - len(body) if ended >= 0 else 1
        if missing > 0:
            self._parts, self._missing = [data], missing
            return
        self._parts, self._missing = [], 0
        before = time.perf_counter()
        if head.startswith(b"GET"):
            known = ("requests", "seconds", "received", "tokens")
            said = encode({name: getattr(Server, name) for name in known})
            Server.requests, Server.seconds, Server.received, Server.tokens = 0, 0.0, 0, 0
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(said), said))
            return
        if len(body) > MAX_READ:  # a message with files: to decode it would take longer than the turn
            request = Request()
            answer: str | list[Asked] = f"echo: {len(body)} bytes"
        else:
            request = decode_request(body)
            answer = decide(request.messages)
        vendor = openai if b"/chat/completions " in head.partition(b"\r\n")[0] else anthropic
        chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in vendor(answer, request.model)]
        said = b"".join([_HEAD, *chunks, _END])
        if Server.pause_s:
            left = Server.pause_s - (time.perf_counter() - before)
            asyncio.get_running_loop().call_later(max(0.0, left), self._transport.write, said)
        else:
            self._transport.write(said)
        Server.requests += 1
        Server.received += len(body)
        if Server.counts_tokens:
            Server.tokens += sum(1 for _ in _TOKEN.finditer(body))
        Server.seconds += time.perf_counter() - before


def content_length(head: bytes) -> int:
    """The content length of the request that begins with `head`."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def main() -> None:
    """Listen on a port of the system's choice until killed."""
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    Server.counts_tokens = "--tokens" in sys.argv
    Server.pause_s = PAUSE_S if "--pause" in sys.argv else 0.0
    uvloop.run(main())
