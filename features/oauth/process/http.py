"""Requests to OAuth servers: over https, or plain http to this machine. No redirects are followed, and the time and
size are bounded.

No error and no log contains a part of a request: forms have codes, refresh tokens and secrets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httpx2

from goondan.features.oauth.process.protocol import is_here, may_contact
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
