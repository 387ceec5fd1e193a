"""A server at an URL: the SDK's transport over tunnels, with the older ways of listing as fallbacks.

The worker can make no sockets: each connection comes from the tool host, connected to the egress proxy. The worker asks
the proxy for a tunnel (CONNECT) to wherever the HTTP client wants to go, and does TLS in it. So the proxy judges every
address: the endpoint that was granted, and nothing that a server or a redirect names.

The ways to the server, in their order: streamable HTTP; a plain GET of the list, for servers that answer 404 or 405
(MCP-23); the HTTP with events of the version 2024-11-05.

Source: docs/design/sandbox.md section 6; docs/design/tools.md section 11; requirements MCP-06, MCP-23.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any, Final, Self

import anyio
import anyio.abc
import httpcore2
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

from goondan.features.mcp.jail.login import Login
from goondan.features.mcp.jail.protocol import bounds, results
from goondan.features.mcp.jail.protocol.bounds import NOT_REACHED, UNASKED_BURST, UNASKED_PER_S, Excess
from goondan.schemas.system.authorities import tls_context
from goondan.toolhost.calls.untrusted import Allowance

#: What is sent for one connection.
REQUEST: Final = b"connect"
#: An answer: a descriptor, or a sentence (bytes).
MAX_ANSWER: Final = 1024
#: The text of the proxy's refusal (bytes).
MAX_REFUSAL: Final = 2048
#: How long the proxy may take to reach a server (seconds). It gives up after 10 itself.
TUNNEL_S: Final = 20.0
#: Bytes of one answer that is no stream of events. A line over a descriptor has as many.
MAX_BODY: Final = 16 << 20
#: The field that names the session of a server of the handshake era.
SESSION: Final = "mcp-session-id"
#: Bytes of events, at once and per second after that.
EVENT_BYTES_BURST: Final = 128 << 20
EVENT_BYTES_PER_S: Final = 16 << 20


class Connector:
    """Asks the host for connections, one after another. Use from the loop's thread only."""

    def __init__(self, connector: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """`connector`, a socket of datagrams, becomes ours."""
        connector.setblocking(False)
        self._socket = connector
        self._loop = loop
        self._waiting: deque[asyncio.Future[socket.socket]] = deque()
        loop.add_reader(connector.fileno(), self._readable)

    async def connect(self) -> socket.socket:
        """A stream socket that is connected to the proxy. Raises OSError."""
        if self._socket.fileno() < 0:
            raise OSError(errno.ENETDOWN, "the tool host hands over no more connections")
        waiter: asyncio.Future[socket.socket] = self._loop.create_future()
        self._socket.send(REQUEST)
        self._waiting.append(waiter)
        return await waiter

    def close(self) -> None:
        """Nobody asks any more. Safe to call again."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(OSError(errno.ENETDOWN, "the tool host hands over no more connections"))

    def _readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MAX_ANSWER, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, fds = b"", []
        if not data and not fds:
            self.close()
            return
        waiter = self._waiting.popleft() if self._waiting else None
        if waiter is None or waiter.done():
            for fd in fds:
                os.close(fd)
        elif fds:
            waiter.set_result(socket.socket(fileno=fds[0]))
        else:
            waiter.set_exception(OSError(errno.ECONNREFUSED, bounds.line(data.decode("utf-8", "replace"), 300)))


class _Stream(httpcore2.AsyncNetworkStream):
    """One connection of the HTTP client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._reader.read(max_bytes)
        except TimeoutError:
            raise httpcore2.ReadTimeout from None
        except OSError as error:
            raise httpcore2.ReadError(str(error)) from None

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout):
                self._writer.write(buffer)
                await self._writer.drain()
        except TimeoutError:
            raise httpcore2.WriteTimeout from None
        except OSError as error:
            raise httpcore2.WriteError(str(error)) from None

    async def aclose(self) -> None:
        self._writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except TimeoutError:
            await self.aclose()
            raise httpcore2.ConnectTimeout from None
        except (ssl.SSLError, OSError) as error:
            await self.aclose()
            raise httpcore2.ConnectError(str(error)) from None
        return self

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # asked of an idle connection: its server has closed it
            return self._reader.at_eof()
        return self._writer.get_extra_info(info)


class _Backend(httpcore2.AsyncNetworkBackend):
    """The network of the HTTP client: tunnels."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        try:
            async with asyncio.timeout(min(TUNNEL_S, timeout or TUNNEL_S)):
                return await self._tunnel(host, port)
        except TimeoutError:
            raise httpcore2.ConnectTimeout("the egress proxy did not answer in time") from None
        except OSError as error:
            raise httpcore2.ConnectError(error.strerror or str(error)) from None

    async def _tunnel(self, host: str, port: int) -> httpcore2.AsyncNetworkStream:
        made = await self._connector.connect()
        reader, writer = await asyncio.open_connection(sock=made)
        try:
            place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            writer.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode("ascii"))
            await writer.drain()
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                raise httpcore2.ConnectError("the egress proxy gave no answer") from None
            status = head[9:12]
            if status != b"200":
                text = bounds.line((await reader.read(MAX_REFUSAL)).decode("utf-8", "replace"), 500)
                raise httpcore2.ConnectError(text or f"the egress proxy answered with {status!r}")
        except BaseException:
            writer.close()
            raise
        return _Stream(reader, writer)

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore2.AsyncNetworkStream:
        raise httpcore2.ConnectError("there are no sockets in the file system here")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Events(httpx2.AsyncByteStream):
    """An answer that is a stream of events, as much as a server may send."""

    def __init__(self, inner: Any, transport: Transport) -> None:
        self._inner = inner
        self._transport = transport

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._inner:
                self._transport.count_events(len(part))
                yield part
        except _BROKEN as error:
            raise httpx2.ReadError(_said(error)) from None

    async def aclose(self) -> None:
        await self._inner.aclose()


class Transport(httpx2.AsyncBaseTransport):
    """The transport of the HTTP client: tunnels, bounded answers, and what the server answered with.

    An exchange that fails is answered here, with an error of JSON-RPC: the SDK's client would end all of its requests
    for the exception of one.
    """

    def __init__(self, connector: Connector, loop: asyncio.AbstractEventLoop, on_lost: Callable[[], None]) -> None:
        """`on_lost` is called when the server knows its session no more."""
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=certificates(),
            max_connections=64,
            max_keepalive_connections=8,
            keepalive_expiry=30.0,
            http1=True,
            network_backend=_Backend(connector),
        )
        self._loop = loop
        self._on_lost = on_lost
        self._events = Allowance(EVENT_BYTES_BURST, EVENT_BYTES_PER_S, loop.time())
        #: The status of the last answer of 400 and above; None: there was none.
        self.refused: int | None = None
        #: Why the last connection could not be made.
        self.unreached: str | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """One exchange."""
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        request.headers["Accept-Encoding"] = "identity"  # of a packed answer nobody knows how large it will be
        asked = httpcore2.Request(
            method=request.method,
            url=httpcore2.URL(
                scheme=request.url.raw_scheme,
                host=request.url.raw_host,
                port=request.url.port,
                target=request.url.raw_path,
            ),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        try:
            answer = await self._pool.handle_async_request(asked)
        except _BROKEN as error:
            self.unreached = _said(error)
            return _failed(self.unreached)
        self.unreached = None
        if answer.status >= 400:
            self.refused = answer.status
            if answer.status == httpx2.codes.NOT_FOUND and SESSION in request.headers:
                self._on_lost()
        return await self._response(answer, streams="text/event-stream" in request.headers.get("accept", ""))

    async def _response(self, answer: httpcore2.Response, *, streams: bool) -> httpx2.Response:
        """`streams`: who asked takes events one by one. Anybody else reads the answer whole, so that it is bounded."""
        headers = httpx2.Headers(answer.headers)
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            await answer.aclose()
            return _failed("the server packed its answer, although that was not asked for")
        body: Any = answer.stream
        if streams and headers.get("content-type", "").lower().startswith("text/event-stream"):
            stream: httpx2.AsyncByteStream = _Events(body, self)
            return httpx2.Response(answer.status, headers=headers, stream=stream, extensions=answer.extensions)
        parts: list[bytes] = []
        size = 0
        try:
            async for part in body:
                size += len(part)
                if size > MAX_BODY:
                    return _failed(f"the server sent an answer of more than {MAX_BODY} bytes")
                parts.append(part)
        except _BROKEN as error:
            return _failed(_said(error))
        finally:
            await answer.aclose()
        return httpx2.Response(answer.status, headers=headers, content=b"".join(parts))

    def count_events(self, size: int) -> None:
        """Take bytes of events from the allowance. Raises httpx2.ReadError when there are too many."""
        if not self._events.take(self._loop.time(), size):
            raise httpx2.ReadError(f"the server sent more than {EVENT_BYTES_PER_S >> 20} MiB of events a second")

    async def end(self) -> None:
        """Close every connection. A client that is closed (`aclose`) closes none: several have this transport."""
        await self._pool.aclose()


#: What an exchange can fail with.
_BROKEN: Final = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException)


def _said(error: Exception) -> str:
    return bounds.line(str(error), 500) or type(error).__name__


def _failed(reason: str) -> httpx2.Response:
    """The answer to a request that has none."""
    error = {"code": NOT_REACHED, "message": reason}
    return httpx2.Response(httpx2.codes.BAD_GATEWAY, json={"jsonrpc": "2.0", "id": None, "error": error})


@cache
def certificates() -> ssl.SSLContext:
    """What servers are checked against. Made once, in the template: its workers share it."""
    return tls_context()


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
            return results.Failure(code, self._transport.unreached)
        if self._transport.refused is not None:
            said = results.error_of(error).message
            return results.Failure(
                "E_MCP_CONNECT", f"the server answered with HTTP status {self._transport.refused}: {said}"
            )
        return error

    async def close(self) -> None:
        """End every connection."""
        await self._transport.end()
        self._connector.close()

    def _client(self, headers: Mapping[str, str] | None = None) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            transport=self._transport,
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


class _Counted:
    """The messages of a server, as many as it may send without being asked. Then the connection is at its end."""

    def __init__(self, inner: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop
        self._messages = Allowance(UNASKED_BURST, UNASKED_PER_S, loop.time())

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

    async def __aexit__(self, *raised: object) -> bool | None:
        done: bool | None = await self._inner.__aexit__(*raised)
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
