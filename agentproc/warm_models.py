"""Models without a server, for turns that lead nowhere: a provider whose connection gives canned answers.

Everything of a model call is real but the socket: the request, the parser, the stream, the vendor's reader.

Source: docs/design/processes.md section 3; decision 020.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import cycle
from typing import Final, Literal

from agentproc.providers.anthropic import Anthropic
from agentproc.providers.connection import Client, Connection
from agentproc.providers.http import HttpProvider
from agentproc.providers.openai import OpenAI
from agentproc.providers.route import Route
from schemas.launch import ModelSpec

#: Streams of a call and of a text, as the vendors write them; TOOL stands for the tool's name.
_ANTHROPIC: Final = (
    """\
event: message_start
data: {"type":"message_start","message":{"content":[],"usage":{"input_tokens":1,"output_tokens":1}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"c1","name":"TOOL","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"{\\"a\\":\\"1\\"}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"tool_use"},"usage":{"output_tokens":1}}

event: message_stop
data: {"type":"message_stop"}

""",
    """\
event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"done"}}

event: message_stop
data: {"type":"message_stop"}

""",
)
_OPENAI: Final = (
    """\
data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c1","function":{"name":"TOOL","arguments":""}}]}}]}

data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\":\\"1\\"}"}}]}}]}

data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}

data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}

data: [DONE]

""",
    """\
data: {"choices":[{"index":0,"delta":{"content":"done"}}]}

data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}

data: [DONE]

""",
)
_HEAD: Final = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def model(name: Literal["anthropic", "openai"]) -> ModelSpec:
    """A model of the provider, at no address."""
    return ModelSpec(provider=name, model="warm-up", endpoint="http://127.0.0.1:1/v1", api_key="none")


def provider(name: Literal["anthropic", "openai"], tool: str) -> HttpProvider:
    """A provider whose model calls `tool` with {"a": "1"} and then says that it is done."""
    streams = _ANTHROPIC if name == "anthropic" else _OPENAI
    answers = [_answer(stream.replace("TOOL", tool)) for stream in streams]
    return HttpProvider(Anthropic() if name == "anthropic" else OpenAI(), client=_Canned(cycle(answers)))


def _answer(stream: str) -> bytes:
    events = [f"{event}\n\n" for event in stream.split("\n\n") if event]
    chunks = "".join([f"{len(event):x}\r\n{event}\r\n" for event in events])
    return f"{_HEAD}{chunks}0\r\n\r\n".encode("ascii")


class _Canned(Client):
    """Connects to nothing."""

    def __init__(self, answers: Iterator[bytes]) -> None:
        super().__init__()
        self._answers = answers

    async def connect(self, route: Route, limit_s: float) -> Connection:
        connection = Connection(asyncio.get_running_loop())
        connection.connection_made(_Nothing(connection, self._answers))
        return connection


class _Nothing(asyncio.Transport):
    """Answers everything that is written with the next answer."""

    def __init__(self, connection: Connection, answers: Iterator[bytes]) -> None:
        super().__init__()
        self._connection = connection
        self._answers = answers

    def write(self, data: object) -> None:
        self._connection.loop.call_soon(self._connection.data_received, next(self._answers))

    def abort(self) -> None:
        """There is nothing to close."""
