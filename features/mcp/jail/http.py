"""A server at an URL: the SDK's transport over tunnels, with the older ways of listing as fallbacks.

The ways, in their order: streamable HTTP; a plain GET of the list, for servers that answer 404 or 405 (MCP-23); the
HTTP with events of the version 2024-11-05.

Source: docs/design/tools.md section 11; requirements MCP-06, MCP-23.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self

import anyio
import anyio.abc
import httpx2
import mcp_types as types
import msgspec
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.dispatcher import CallOptions, Dispatcher, OnNotify, OnNotifyIntercept, OnRequest
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCResponse
from mcp_types.version import LATEST_HANDSHAKE_VERSION

from goondan.features.mcp.jail import bounds
from goondan.features.mcp.jail.bounds import Excess
from goondan.features.mcp.jail.connections import MAX_BODY, Connector, Transport
from goondan.features.mcp.jail.lines import UNASKED_BURST, UNASKED_PER_S
from goondan.features.mcp.jail.login import Login
from goondan.features.mcp.jail.results import Failure, error_of

#: How long a server may keep a request without a byte (seconds). Calls have deadlines of their own, which are shorter.
READ_S: Final = 3600.0
#: How long writing to it, and reaching it, may take (seconds).
WRITE_S: Final = 30.0
#: Answers with which a server says that it does not take what the newer versions send.
_NOT_HERE: Final = (400, 404, 405)


class Http:
    """One server at an URL. Use from the loop's thread only."""

    def __init__(
        self,
        endpoint: str,
        headers: Mapping[str, str],
        connector: socket.socket,
        loop: asyncio.AbstractEventLoop,
        login: Login | None,
        on_lost: Callable[[], None],
    ) -> None:
        """`connector` becomes ours. `headers` go with each request to the endpoint's own origin, and nowhere else.
        Without `login` a server that wants one is an error. `on_lost` is called when the server knows its session no
        more.
        """
        self._endpoint = endpoint
        self._login = login
        self._headers = dict(headers)
        self._loop = loop
        self._connector = Connector(connector, loop)
        self._transport = Transport(self._connector, loop, on_lost)

    def ways(self) -> list[Any]:
        """The ways to the server, the newest first."""
        return [self._streamable, self._plain, self._events]

    @property
    def elsewhere(self) -> bool:
        """Whether the server may know one of the older ways."""
        return self._transport.refused in _NOT_HERE and (self._login is None or self._login.failure is None)

    def explained(self, error: Exception) -> Exception:
        """The error of a connection that was not made, with what the server answered."""
        if self._login is not None and self._login.failure is not None:
            return self._login.failure
        if self._transport.unreached is not None and self._transport.refused is None:
            code = "E_SANDBOX_DENIED" if "E_SANDBOX_DENIED" in self._transport.unreached else "E_MCP_CONNECT"
            return Failure(code, self._transport.unreached)
        if self._transport.refused is not None:
            said = error_of(error).message
            return Failure("E_MCP_CONNECT", f"the server answered with HTTP status {self._transport.refused}: {said}")
        return error

    async def close(self) -> None:
        """End every connection."""
        await self._transport.aclose()
        self._connector.close()

    def _client(self, headers: Mapping[str, str] | None = None) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            transport=_Kept(self._transport),
            auth=self._login,
            headers={**self._headers, **(headers or {})},
            timeout=httpx2.Timeout(WRITE_S, read=READ_S),
            follow_redirects=False,
            trust_env=False,
        )

    @asynccontextmanager
    async def _streamable(self) -> AsyncIterator[Dispatcher[Any]]:
        async with self._client() as client:
            async with streamable_http_client(self._endpoint, http_client=client, max_sse_event_size=MAX_BODY) as (
                reading,
                writing,
            ):
                yield JSONRPCDispatcher(_Counted(reading, self._loop), writing)

    @asynccontextmanager
    async def _events(self) -> AsyncIterator[Dispatcher[Any]]:
        def made(
            headers: dict[str, str] | None = None,
            timeout: httpx2.Timeout | None = None,
            auth: httpx2.Auth | None = None,
        ) -> httpx2.AsyncClient:
            return self._client(headers)

        async with sse_client(self._endpoint, httpx_client_factory=made) as (reading, writing):
            yield JSONRPCDispatcher(_Counted(reading, self._loop), writing)

    @asynccontextmanager
    async def _plain(self) -> AsyncIterator[Dispatcher[Any]]:
        async with self._client() as client:
            plain = _Plain(self._endpoint, client)
            await plain.tools()  # or it is none of these
            yield plain


class _Kept(httpx2.AsyncBaseTransport):
    """The transport for one client: a client closes its own, and there are several."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return await self._transport.handle_async_request(request)


class _Counted:
    """The messages of a server, as many as it may send without being asked. Then the connection is at its end."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop
        self._messages = bounds.Allowance(UNASKED_BURST, UNASKED_PER_S, loop.time())

    @property
    def last_context(self) -> Any:
        return self._inner.last_context

    async def receive(self) -> SessionMessage | Exception:
        item: SessionMessage | Exception = await self._inner.receive()
        return self._let_through(item)

    def _let_through(self, item: SessionMessage | Exception) -> SessionMessage | Exception:
        answer = isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCResponse | JSONRPCError)
        if not answer and not self._messages.take(self._loop.time()):
            raise anyio.ClosedResourceError
        if isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCResponse):
            try:
                bounds.check(item.message.result)
            except Excess as error:
                fault = types.ErrorData(code=types.PARSE_ERROR, message=f"the answer was not let through: {error}")
                return SessionMessage(JSONRPCError(jsonrpc="2.0", id=item.message.id, error=fault))
        return item

    async def aclose(self) -> None:
        await self._inner.aclose()

    def __aiter__(self) -> _Counted:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return self._let_through(await self._inner.__anext__())

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        done: bool | None = await self._inner.__aexit__(exc_type, exc_val, exc_tb)
        return done


class _Plain:
    """A server that lists its tools to a plain GET of `{endpoint}/tools/list`, and takes calls as JSON-RPC by POST."""

    def __init__(self, endpoint: str, client: httpx2.AsyncClient) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._client = client
        self._number = 0

    async def run(
        self,
        on_request: OnRequest,
        on_notify: OnNotify,
        on_notify_intercept: OnNotifyIntercept | None = None,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """There is nothing to read: it speaks only when it is asked."""
        task_status.started()
        await asyncio.Event().wait()

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        """The answer to a request. Raises MCPError."""
        match method:
            case "initialize":
                return {
                    "protocolVersion": LATEST_HANDSHAKE_VERSION,
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": httpx2.URL(self._endpoint).host, "version": ""},
                }
            case "tools/list":
                return {"tools": await self.tools()}
            case "tools/call":
                return await self._call(params)
        raise MCPError(code=types.METHOD_NOT_FOUND, message=f"the server has no {method}")

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """It is told nothing."""

    async def tools(self) -> list[dict[str, Any]]:
        """Its tools; those that declare no arguments take any. Raises MCPError."""
        found = (await self._exchange("GET", f"{self._endpoint}/tools/list")).get("tools")
        listed = found if isinstance(found, list) else []
        return [{"inputSchema": {"type": "object"}, **item} for item in listed if isinstance(item, dict)]

    async def _call(self, params: Mapping[str, Any] | None) -> dict[str, Any]:
        self._number += 1
        request = {"jsonrpc": "2.0", "id": self._number, "method": "tools/call", "params": dict(params or {})}
        answer = await self._exchange("POST", self._endpoint, msgspec.json.encode(request))
        error, result = answer.get("error"), answer.get("result")
        if isinstance(error, dict):
            code = error.get("code")
            text = bounds.text(error.get("message"), 2000) or "no message"
            raise MCPError(code if type(code) is int else types.INTERNAL_ERROR, text)
        if not isinstance(result, dict):
            raise MCPError(code=types.PARSE_ERROR, message="the server's answer has no result")
        return result

    async def _exchange(self, method: str, url: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        response = await self._client.request(method, url, content=body, headers=headers)
        if response.status_code >= 300:
            raise MCPError(code=types.METHOD_NOT_FOUND, message=f"the server answered with HTTP {response.status_code}")
        try:
            value = msgspec.json.decode(response.content)
            bounds.check(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError, Excess):
            raise MCPError(code=types.PARSE_ERROR, message="the server's answer is no JSON") from None
        return value if isinstance(value, dict) else {}
