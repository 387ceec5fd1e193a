"""What the SDK template does once, so that its workers need not: sessions of each kind, from the connection to the end.

The SDK, its types and the event loop make much of what they need when it is needed first: checkers of messages,
modules, memory. A worker that finds it made begins some hundred milliseconds earlier, and shares it with the others.
Some of it is files that a worker could not read any more.

The tool host and the server of these sessions are one process that the template forks.

Source: docs/design/sandbox.md section 8.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 # names of servers are written in it
import json
import os
import re
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
from mcp_types.version import LATEST_MODERN_VERSION
from msgspec import Raw

from goondan.features.mcp.jail.worker import serve
from goondan.schemas.worker.servers import ServerInit
from goondan.schemas.worker.worker_frames import (
    WORKER_PROTOCOL,
    Call,
    Exit,
    HostFrame,
    Init,
    List,
    Listed,
    Ready,
    Result,
    WorkerFrame,
)
from goondan.toolhost.inside.wire import Frames, framed

#: The process on the other side ends after this time in any case (seconds). A session takes a quarter of a second.
LIMIT_S: Final = 20
_READ: Final = 65536
_TEXT: Final = {"content": [{"type": "text", "text": "warm"}], "structuredContent": {"warm": True}}
_TOOL: Final = {
    "name": "warm",
    "description": "Nothing.",
    "inputSchema": {"type": "object", "properties": {"a": {"type": "string"}}},
    "outputSchema": {"type": "object"},
    "annotations": {"readOnlyHint": True},
}
_ANSWERS: Final[dict[str, dict[str, Any]]] = {
    "tools/list": {"tools": [_TOOL]},
    "tools/call": _TEXT,
    "resources/list": {"resources": [{"uri": "warm://1", "name": "warm"}]},
    "resources/templates/list": {"resourceTemplates": []},
    "resources/read": {"contents": [{"uri": "warm://1", "text": "warm"}]},
    "prompts/list": {"prompts": [{"name": "warm", "arguments": [{"name": "a"}]}]},
    "prompts/get": {"messages": [{"role": "user", "content": {"type": "text", "text": "warm"}}]},
}
_CAPABILITIES: Final = {
    "tools": {"listChanged": True}, "resources": {"listChanged": True}, "prompts": {"listChanged": True}, "logging": {},
}  # fmt: skip
#: What each result of the modern era has besides.
_OF_MODERN: Final = {"resultType": "complete", "ttlMs": 1000, "cacheScope": "private"}
_CALLS: Final = (("warm", {"a": "x"}), ("read_resource", {"uri": "warm://1"}), ("get_prompt", {"name": "warm"}))


def warm_up() -> None:
    """Be the worker of a server of each era, on a descriptor and at an URL. What fails here is not ours to tell: a
    worker meets it again.
    """
    for at_url in (False, True):
        for modern in (False, True):
            with suppress(Exception):
                _session(modern=modern, at_url=at_url)


def _session(*, modern: bool, at_url: bool) -> None:
    channel, host = socket.socketpair()
    ours, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET if at_url else socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        channel.close()
        ours.close()
        try:
            signal.alarm(LIMIT_S)
            (_AtUrl if at_url else _Other)(host, server, modern=modern).run()
        finally:
            os._exit(0)
    host.close()
    server.close()
    try:
        serve(channel, *((None, ours) if at_url else (ours, None)))
    finally:
        channel.close()  # the other process ends when it finds both closed
        ours.close()
        os.waitpid(pid, 0)


class _Other:
    """Host and server of one session, in turns of a loop."""

    server_init = ServerInit(transport="stdio", tools=True, resources=True, prompts=True, secrets=["warm-warm"])

    def __init__(self, host: socket.socket, server: socket.socket, *, modern: bool) -> None:
        self._host = host
        self._server = server
        self._modern = modern
        self._frames = Frames()
        self._lines = b""
        self._left = list(_CALLS)
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Until the worker is gone."""
        self._send(Init(WORKER_PROTOCOL, "warm", "", {}, server=self.server_init))
        with self._selector as selector:
            selector.register(self._host, selectors.EVENT_READ, self._heard)
            selector.register(self._server, selectors.EVENT_READ, self._asked)
            while selector.get_map():
                for key, _ in selector.select():
                    end: Any = key.fileobj
                    data = end.recv(_READ)
                    if data:
                        key.data(data)
                    else:
                        selector.unregister(end)
                        end.close()

    def _send(self, frame: HostFrame) -> None:
        self._host.sendall(framed(msgspec.msgpack.encode(frame)))

    def _heard(self, data: bytes) -> None:
        """Frames of the worker."""
        for body in self._frames.feed(data):
            frame = msgspec.msgpack.decode(body, type=WorkerFrame)
            if isinstance(frame, Ready):
                self._send(List(1))
            elif isinstance(frame, Listed | Result):
                self._next()

    def _next(self) -> None:
        if not self._left:
            self._send(Exit())
            return
        export, args = self._left.pop(0)
        call = Call(
            call_id=export, export=export, input=Raw(msgspec.msgpack.encode(args)), agent_name="a", instance_key="k",
            turn_id="t", tool_call_id=export, workdir="/", deadline_ms=10_000,
        )  # fmt: skip
        self._send(call)

    def _asked(self, data: bytes) -> None:
        """Lines of the worker to the server."""
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "id" in message and "method" in message:
                answer = {"jsonrpc": "2.0", "id": message["id"], **self._answer(message["method"])}
                self._server.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, method: str) -> dict[str, Any]:
        who = {"name": "warm", "version": "1"}
        if method == "server/discover" and self._modern:
            found = {"supportedVersions": [LATEST_MODERN_VERSION], "capabilities": _CAPABILITIES, "serverInfo": who}
            return {"result": {**_OF_MODERN, **found}}
        if method == "initialize" and not self._modern:
            return {"result": {"protocolVersion": "2025-11-25", "capabilities": _CAPABILITIES, "serverInfo": who}}
        if method in _ANSWERS:
            return {"result": {**_OF_MODERN, **_ANSWERS[method]} if self._modern else _ANSWERS[method]}
        return {"error": {"code": -32601, "message": "no such method"}}


class _AtUrl(_Other):
    """The same with a server at an URL: the other side of the connector is the proxy and the server at once."""

    server_init = ServerInit(
        transport="http", endpoint="http://warm.invalid/mcp", tools=True, resources=True, prompts=True
    )

    def _asked(self, data: bytes) -> None:
        """The worker wants a connection."""
        near, far = socket.socketpair()
        socket.send_fds(self._server, [b"warm"], [far.fileno()])
        far.close()
        self._selector.register(near, selectors.EVENT_READ, _Connection(near, self._answer).heard)


class _Connection:
    """One connection: a tunnel, and requests in it."""

    def __init__(self, near: socket.socket, answer: Callable[[str], dict[str, Any]]) -> None:
        self._near = near
        self._answer = answer
        self._data = b""

    def heard(self, data: bytes) -> None:
        """Bytes of the worker."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            found = re.search(rb"content-length: (\d+)", head)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._data) < size:
                return
            body, self._data = self._data[end + 4 : size], self._data[size:]
            self._near.sendall(self._reply(head, body))

    def _reply(self, head: bytes, body: bytes) -> bytes:
        if head.startswith(b"connect"):
            return b"HTTP/1.1 200 Warm\r\n\r\n"
        message = json.loads(body) if body else {}
        if "id" not in message:
            return b"HTTP/1.1 405 Warm\r\nContent-Length: 0\r\n\r\n"
        answer = json.dumps({"jsonrpc": "2.0", "id": message["id"], **self._answer(message["method"])}).encode()
        kind = b"application/json"
        if message["method"] == "tools/call":
            kind, answer = b"text/event-stream", b"event: message\ndata: " + answer + b"\n\n"
        return b"HTTP/1.1 200 Warm\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind, len(answer)) + answer
