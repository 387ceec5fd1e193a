"""The MCP server over HTTP: the SDK's sessions behind the gate of doors.

Its bounds are smaller than a door's: clients keep one connection or two. Sessions are bounded as well, and an idle one
ends.

Source: docs/mcp.md, "Our tools for MCP clients".
"""

from __future__ import annotations

import socket
from typing import Any, Final

from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from goondan.features.mcp_serve.command.rules.offering import MAX_BODY, PATH
from goondan.features.serve.api.gate import Gate, Way
from goondan.features.serve.api.http import Bounds, HttpService
from goondan.features.serve.api.rules.callers import Caller, Tokens
from goondan.features.serve.api.rules.heads import Names

#: Sessions of the handshake versions at once, and after how long an unused one ends (seconds).
MAX_SESSIONS: Final = 64
SESSION_IDLE_S: Final = 1800.0
#: Connections: who has the token may have all but those of strangers.
BOUNDS: Final = Bounds(connections=256, strangers=64, open=192)


class HttpServer:
    """The server on a socket that listens on loopback, for whoever has the token."""

    def __init__(self, server: Server[Any], listening: socket.socket, token: str) -> None:
        self._manager = StreamableHTTPSessionManager(
            server, session_idle_timeout=SESSION_IDLE_S, max_sessions=MAX_SESSIONS, max_request_body_size=MAX_BODY
        )
        app: Any = _App(self._manager)
        way = Way(PATH, app, ("GET", "POST", "DELETE"), max_body=MAX_BODY)
        tokens = Tokens.single(token, Caller("mcp", "operate"))
        gate = Gate([way], Names(listening.getsockname()[1]), tokens, BOUNDS)
        self._service = HttpService(gate.begin, listening, BOUNDS)

    async def serve(self) -> None:
        """Serve until cancelled."""
        async with self._manager.run():
            await self._service.serve()


class _App:
    """An object, as Starlette's routes know applications from functions that answer requests."""

    def __init__(self, manager: StreamableHTTPSessionManager) -> None:
        self._app = manager.asgi_app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)
