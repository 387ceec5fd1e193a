"""The listener for redirects: the browser brings the answer of an OAuth server to it.

It listens only while a person is being asked. It reads the first line of a request and the Host, and nothing else.
Every other path than that of the redirect gets a 404. Its pages contain nothing of the request, and load nothing.

Source: RFC 8252.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from goondan.schemas.wire.errors import fail

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
    style = _source_of(_STYLE)
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        f"Content-Security-Policy: default-src 'none'; style-src '{style}'; frame-ancestors 'none'\r\n"
        "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def _source_of(style: str) -> str:
    """The name of this style sheet in a Content-Security-Policy."""
    from base64 import b64encode

    return f"sha256-{b64encode(hashlib.sha256(style.encode()).digest()).decode('ascii')}"
