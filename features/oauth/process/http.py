"""HTTP of this process: its requests to OAuth servers, and its listener, to which a browser brings their answers.

Requests go over https, or over plain http to this machine. No redirects are followed, and the time and size are
bounded. No error and no log contains a part of a request: forms have codes, refresh tokens and secrets.

The listener listens only while a person is being asked. It reads the first line of a request and the Host, and nothing
else. Every other path than that of the redirect gets a 404. Its pages contain nothing of the request, and load nothing.

Source: RFC 8252.
"""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import httpx2

from goondan.features.oauth.process.rules import is_here, may_contact
from goondan.schemas.system.authorities import skips_proxy, tls_context
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import GoondanError, fail

#: How long one request with its answer may take (seconds). An agent waits for it, and then makes an API call that has a
#: time limit of its own.
TOTAL_S: Final = 20.0
#: How long connecting may take (seconds).
CONNECT_S: Final = 10.0
#: The longest answer (bytes). The metadata of large directories take tens of thousands.
MAX_BODY: Final = 256 * 1024
#: The most requests at the same time. More wait. The agents of a swarm start together, and a server bans clients that
#: send a hundred requests at once.
MAX_AT_ONCE: Final = 16


class Response(NamedTuple):
    """The answer of a server."""

    status: int
    body: bytes


class Http:
    """The connections of this process. `limit_s` is for tests."""

    def __init__(self, limit_s: float = TOTAL_S) -> None:
        self._limit_s = limit_s
        self._outside: httpx2.AsyncClient | None = None
        self._here: httpx2.AsyncClient | None = None
        self._room = asyncio.Semaphore(MAX_AT_ONCE)

    async def get(self, url: str) -> Response:
        """Get a document. Raises GoondanError E_OAUTH_SERVER."""
        return await self._request("GET", url, None, {})

    async def post(self, url: str, form: Mapping[str, str], headers: Mapping[str, str]) -> Response:
        """Send a form. Raises GoondanError E_OAUTH_SERVER. Then it is not known whether the form has arrived."""
        return await self._request("POST", url, form, headers)

    async def close(self) -> None:
        """End all connections."""
        for client in (self._outside, self._here):
            if client is not None:
                await client.aclose()

    # --- inside

    async def _request(
        self, method: str, url: str, form: Mapping[str, str] | None, headers: Mapping[str, str]
    ) -> Response:
        if not may_contact(url):
            raise fail("E_OAUTH_SERVER", "an OAuth server is reached over https, or on this machine")
        # The size of a compressed answer is not known in advance.
        given = {"Accept": "application/json", "Accept-Encoding": "identity", **headers}
        async with self._room:
            try:
                async with asyncio.timeout(self._limit_s):
                    response = await self._exchange(method, url, form, given)
            except TimeoutError:
                raise _failed(url, f"no answer within {self._limit_s:g} s") from None
            except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
                raise _failed(url, type(error).__name__) from None
        if 300 <= response.status < 400:
            raise _failed(url, "the server wants to redirect, which is not followed")
        return response

    async def _exchange(
        self, method: str, url: str, form: Mapping[str, str] | None, headers: Mapping[str, str]
    ) -> Response:
        client = self._client(url)
        data = None if form is None else dict(form)
        async with client.stream(method, url, data=data, headers=dict(headers)) as answer:
            body = bytearray()
            async for piece in answer.aiter_raw():
                body += piece
                if len(body) > MAX_BODY:
                    raise _failed(url, f"the answer has more than {MAX_BODY} bytes")
            return Response(answer.status_code, bytes(body))

    def _client(self, url: str) -> httpx2.AsyncClient:
        """The client for a URL. Requests to this machine do not use the proxy of the environment."""
        parts = urlsplit(url)
        if is_here(url) or skips_proxy(parts.hostname or "", parts.port):
            if self._here is None:
                self._here = _make(trust_env=False)
            return self._here
        if self._outside is None:
            self._outside = _make(trust_env=True)
        return self._outside


def _make(*, trust_env: bool) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        verify=tls_context(),
        trust_env=trust_env,
        follow_redirects=False,
        timeout=httpx2.Timeout(TOTAL_S, connect=CONNECT_S),
    )


def _failed(url: str, why: str) -> GoondanError:
    host = visible_line(httpx2.URL(url).host) if may_contact(url) else "the server"
    return fail("E_OAUTH_SERVER", f"{host}: {why}")


#: The longest head of a request (bytes). Browsers send some thousand; a code and a state have some hundred.
MAX_HEAD: Final = 16 * 1024
#: How long a browser may take to send its request (seconds).
READ_S: Final = 10.0
#: The most connections at the same time. Browsers open two or three.
MAX_CONNECTIONS: Final = 16
#: The path for apps without a redirectUri.
DEFAULT_PATH: Final = "/callback"
_ADDRESS: Final = "127.0.0.1"

#: Takes the parameters of a redirect by name. Returns whether it was accepted, and what to tell the person.
Arrived = Callable[[dict[str, str]], Awaitable[tuple[bool, str]]]


class Redirects:
    """The listeners. `arrived` is awaited with the parameters of each redirect."""

    def __init__(self, arrived: Arrived) -> None:
        self._arrived = arrived
        #: By the redirectUri of the app ("" for none): the server, and the URI to be sent along.
        self._open: dict[str, tuple[asyncio.Server, str]] = {}
        self._connections = 0

    async def open(self, uri: str | None) -> str:
        """Listen at `uri` (None: on a free port), and return the redirect URI for the request.

        If `uri` names a port, it is used. Otherwise a free port is put in. Raises GoondanError E_OAUTH_APP when the
        port is taken.
        """
        known = self._open.get(uri or "")
        if known is not None:
            return known[1]
        parts = urlsplit(uri or f"http://{_ADDRESS}{DEFAULT_PATH}")
        host, path = parts.hostname or _ADDRESS, parts.path or "/"
        try:
            server = await asyncio.start_server(
                lambda reader, writer: self._serve(reader, writer, f"{host}:{port}", path),
                _ADDRESS,
                parts.port or 0,
                limit=MAX_HEAD,
            )
        except OSError as error:
            message = f"nothing can listen on {_ADDRESS}:{parts.port or 0} for the redirect: {error.strerror}"
            raise fail(
                "E_OAUTH_APP", message, suggestion="Free the port, or name another one in redirectUri."
            ) from None
        port = server.sockets[0].getsockname()[1]
        # Exactly as it is written, because servers compare it so. Only a port of ours is added.
        full = uri if uri is not None and parts.port is not None else f"http://{host}:{port}{parts.path}"
        self._open[uri or ""] = (server, full)
        return full

    def close(self, uri: str | None) -> None:
        """Stop listening at `uri`."""
        known = self._open.pop(uri or "", None)
        if known is not None:
            known[0].close()

    def close_all(self) -> None:
        """Stop all listeners."""
        for uri in list(self._open):
            self.close(uri)

    # --- inside

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, path: str) -> None:
        self._connections += 1
        try:
            if self._connections > MAX_CONNECTIONS:
                return
            status, text = await self._answer(reader, host, path)
            writer.write(_page(status, text))
            async with asyncio.timeout(READ_S):
                await writer.drain()
        except (OSError, TimeoutError):
            pass
        finally:
            self._connections -= 1
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, host: str, path: str) -> tuple[int, str]:
        try:
            async with asyncio.timeout(READ_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return 400, "This is no request that a redirect makes."
        parameters = read_request(head, host, path)
        if parameters is None:
            return 404, "There is nothing here."
        good, text = await self._arrived(parameters)
        return (200 if good else 400), text


def read_request(head: bytes, host: str, path: str) -> dict[str, str] | None:
    """The parameters of a redirect to `path` at `host` (`NAME:PORT`). None for any other request. Pure.

    A request that names a parameter twice is none: two readers of it could see different values.
    """
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or words[0] != "GET" or not words[2].startswith("HTTP/1."):
        return None
    hosts = [
        value.strip().lower()
        for name, _, value in (line.partition(":") for line in lines[1:])
        if name.lower() == "host"
    ]
    port = host.rpartition(":")[2]
    # Another name that leads to this machine belongs to a page of a stranger, which has changed the address of its
    # name.
    if len(hosts) != 1 or hosts[0] not in (host, f"{_ADDRESS}:{port}", f"localhost:{port}"):
        return None
    target, _, query = words[1].partition("?")
    if target != path:
        return None
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=32, errors="strict")
    except ValueError:
        return None
    found = dict(pairs)
    return found if len(found) == len(pairs) else None


_STYLE: Final = "body{font:1.1em sans-serif;margin:4em auto;max-width:36em}"


def _page(status: int, text: str) -> bytes:
    """A whole answer. `text` is written by us."""
    reason = {200: "OK", 400: "Bad Request", 404: "Not Found"}[status]
    body = (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Goondan</title>"
        f"<style>{_STYLE}</style><p>{text}</p></html>"
    ).encode()
    style = f"sha256-{b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode('ascii')}"
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        f"Content-Security-Policy: default-src 'none'; style-src '{style}'; frame-ancestors 'none'\r\n"
        "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
