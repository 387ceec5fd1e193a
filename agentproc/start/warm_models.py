"""Models without a server, for the turns of the warm-up: a provider whose connection gives canned answers.

Only the socket of a model call is replaced. The request, the parser, the stream and the vendor's reader are the real
ones.

Source: docs/design/processes.md section 3; decision 020.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import cycle
from typing import Final

from goondan.agentproc.http import wire_of
from goondan.agentproc.http.connection import Client, Connection
from goondan.agentproc.http.provider import HttpProvider
from goondan.agentproc.http.route import Route
from goondan.schemas.bundle.launch import ModelSpec

_HEAD: Final = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def model(name: str) -> ModelSpec:
    """A model of the provider, without an address."""
    return ModelSpec(provider=name, model="warm-up", endpoint="http://127.0.0.1:1/v1", api_key="none")


def provider(name: str, tool: str) -> HttpProvider:
    """A provider whose model calls `tool` with {"a": "1"} and then says that it is done."""
    wire = wire_of(name)
    answers = [_answer(stream.replace("TOOL", tool)) for stream in wire.REHEARSED]
    return HttpProvider(wire.VENDOR(), client=_Canned(cycle(answers)))


def _answer(stream: str) -> bytes:
    events = [f"{event}\n\n" for event in stream.split("\n\n") if event]
    chunks = "".join([f"{len(event):x}\r\n{event}\r\n" for event in events])
    return f"{_HEAD}{chunks}0\r\n\r\n".encode("ascii")


class _Canned(Client):
    """Makes no connection."""

    def __init__(self, answers: Iterator[bytes]) -> None:
        super().__init__()
        self._answers = answers

    async def connect(self, route: Route, limit_s: float) -> Connection:
        connection = Connection(asyncio.get_running_loop())
        connection.connection_made(_Nothing(connection, self._answers))
        return connection


class _Nothing(asyncio.Transport):
    """Answers each request with the next answer."""

    def __init__(self, connection: Connection, answers: Iterator[bytes]) -> None:
        super().__init__()
        self._connection = connection
        self._answers = answers

    def write(self, data: object) -> None:
        self._connection.loop.call_soon(self._connection.data_received, next(self._answers))

    def abort(self) -> None:
        """There is nothing to close."""
