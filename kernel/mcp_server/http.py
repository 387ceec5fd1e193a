"""MCP clients over HTTP on loopback. The gate judges each request before its body is read (kernel/mcp/http_gate.py).

Half a request holds a connection for some seconds only. Connections and sessions are bounded, and an idle session ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final

import uvicorn
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from uvicorn.protocols.http.h11_impl import H11Protocol

from goondan.kernel.mcp.http_gate import MAX_BODY, Gate, Refusal

#: How long the head of a request may take (seconds); a client on the same machine needs milliseconds.
HEAD_S: Final = 5.0
#: How long a body may take (seconds): 9 MiB on a busy machine take less than one.
BODY_S: Final = 30.0
#: Connections at once. Clients keep one or two each.
MAX_CONNECTIONS: Final = 256
#: Sessions of the handshake versions at once, and after how long an unused one ends (seconds).
MAX_SESSIONS: Final = 64
SESSION_IDLE_S: Final = 1800.0
#: How long requests under way have when the server ends (seconds).
GOODBYE_S: Final = 3
#: The longest head of a request (bytes).
MAX_HEAD: Final = 32 << 10

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


class _Impatient(H11Protocol):
    """HTTP of one connection, closed when the head of a request does not come, or when there are too many."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._between:
            self._wait_for_head()
        super().data_received(data)
        if not self._between:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _between(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Quiet(uvicorn.Server):
    """Signals are the command's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpService:
    """The server on a socket that listens."""

    def __init__(self, server: Server[Any], listening: socket.socket, gate: Gate) -> None:
        self._manager = StreamableHTTPSessionManager(
            server, session_idle_timeout=SESSION_IDLE_S, max_sessions=MAX_SESSIONS, max_request_body_size=MAX_BODY
        )
        self._listening = listening
        self._uvicorn = _Quiet(
            uvicorn.Config(
                guarded(self._manager.asgi_app, gate),
                http=_Impatient,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEAD,
                timeout_graceful_shutdown=GOODBYE_S,
            )
        )

    async def serve(self) -> None:
        """Serve until `stop`."""
        async with self._manager.run():
            await self._uvicorn.serve(sockets=[self._listening])

    def stop(self) -> None:
        """End: what is under way has some seconds."""
        self._uvicorn.should_exit = True


def guarded(app: _App, gate: Gate) -> _App:
    """An application behind the gate."""

    async def guard(scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        refusal = gate.judge(scope["path"], scope["headers"])
        if refusal is not None:
            await _refuse(refusal, send)
            return

        async def patient() -> _Message:
            async with asyncio.timeout_at(until) if not complete else contextlib.nullcontext():
                message = await receive()
            note(message)
            return message

        complete = False
        until = asyncio.get_running_loop().time() + BODY_S

        def note(message: _Message) -> None:
            nonlocal complete
            complete = complete or message["type"] != "http.request" or not message.get("more_body", False)

        try:
            await app(scope, patient, send)
        except TimeoutError:
            if complete:
                raise
            await _refuse(Refusal(408, f"the body did not come within {BODY_S:g} s"), send)

    return guard


async def _refuse(refusal: Refusal, send: _Send) -> None:
    """Answer, and close the connection: what comes behind a refused head is not read."""
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    if refusal.wants_token:
        headers.append((b"www-authenticate", b'Bearer realm="goondan"'))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.reason.encode() + b"\n"})


def listen(port: int) -> socket.socket:
    """A socket on loopback, and nowhere else. Raises OSError."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(MAX_CONNECTIONS)
    except OSError:
        listening.close()
        raise
    return listening
