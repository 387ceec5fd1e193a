"""Sends a vendor's requests and reads its answers as they arrive: the one place of an agent that opens connections.

Rules.
- One client and one TLS context in a process, made at the first call: loading them takes longer than starting the
  agent, and most of its memory. A server on this machine needs no certificates and no proxy, and gets neither.
- A try ends in an answer or a Fault; retry.py says whether and when there is another. Each try is a request of its
  own, and `on_delta` hears when one begins anew.
- Cancelling the task closes the connection.
- No key in anything that is logged or raised, also when the server repeats it.

Source: design sections 8 and 10.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentproc.providers.base import ModelAnswer, ModelRequest, TextDelta, model_failed
from agentproc.providers.retry import MAX_RETRY_AFTER_S, retry_after, status_kind, wait_before_retry
from agentproc.providers.sse import EventTooLarge, SseDecoder
from agentproc.providers.vendor import (
    MAX_WORDS,
    AnswerReader,
    Fault,
    Vendor,
    WireRequest,
    error_words,
    first_model,
    plain,
)
from schemas.errors import GoondanError

if TYPE_CHECKING:
    import httpx


class Patience(Struct, frozen=True):
    """How long is waited for a server (seconds)."""

    #: For a connection. Across the world it takes one; a host that drops packets would take minutes.
    connect_s: float = 10.0
    #: For the next byte, the first included: models think, and local servers read long prompts, without a sign of
    #: life. Beyond five minutes, the load balancers in between have given up as well.
    silence_s: float = 300.0
    #: For the rest of a stream that has said it is complete, so that its connection can be used again.
    rest_s: float = 0.5


#: One answer with all that surrounds it (bytes): streams wrap every few letters in some hundred bytes.
MAX_STREAM_BYTES: Final = 128 << 20
#: An answer that does not stream (bytes).
MAX_BODY_BYTES: Final = 8 << 20
#: What is read of a refusal (bytes).
MAX_ERROR_BYTES: Final = 65_536
#: How long an unused connection is kept (seconds): about as long as servers keep theirs.
KEEP_ALIVE_S: Final = 60.0
#: Shortest key that is looked for in texts: replacing shorter ones would only garble them.
MIN_KEY_CHARS: Final = 4

_SUGGESTIONS: Final[dict[int, str]] = {
    401: "Check the Model's apiKey, or the environment variable that it comes from.",
    403: "Check that the key may use this model, and that the endpoint is the vendor's.",
    404: "Check the Model's model and endpoint.",
    429: "Wait, or raise the limits of your account.",
}

log = logging.getLogger("agentproc.model")


class HttpProvider:
    """A vendor's model behind the provider's interface.

    `sleep`, `chance` (in [0, 1)) and `now` (Unix time) are what retries need; tests give their own.
    """

    needs_history = True

    def __init__(
        self,
        vendor: Vendor,
        *,
        patience: Patience = Patience(),  # noqa: B008  it is frozen
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._vendor = vendor
        self._patience = patience
        self._sleep = sleep
        self._chance = chance
        self._now = now
        self._client: httpx.AsyncClient | None = None
        #: The model that was taken from the server's list.
        self._listed = ""

    async def complete(self, request: ModelRequest, on_delta: Callable[[TextDelta], None] | None = None) -> ModelAnswer:
        """Ask the model. Raises GoondanError E_MODEL_FAILED, with the vendor's words, when the retries are used up."""
        clock = asyncio.get_running_loop().time
        until = None if request.timeout_s is None else clock() + request.timeout_s
        wire = self._vendor.request(request)
        tries = 0
        while True:
            tries += 1
            heard = Listener(on_delta, tries > 1)
            try:
                if not request.model.model:
                    request = await self._name_model(request)
                    wire = self._vendor.request(request)
                return await self._try(request, wire, heard)
            except Fault as fault:
                left = None if until is None else until - clock()
                wait = wait_before_retry(fault, tries, self._chance(), left)
                if wait is None:
                    raise self._failed(request, wire, fault, tries) from None
                log.warning(
                    "model %s, try %d: %s; the next in %.1f s",
                    request.model.model,
                    tries,
                    redact(fault.message, request.model.api_key),
                    wait,
                )
            await self._sleep(wait)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    # --- one try

    async def _try(self, request: ModelRequest, wire: WireRequest, heard: Listener) -> ModelAnswer:
        """One request to its answer. Raises Fault."""
        client = self._open(wire.url)
        import httpx

        try:
            async with client.stream("POST", wire.url, headers=_checked(wire.headers), content=wire.body) as response:
                if not response.is_success:
                    raise await self._refusal(response)
                reader = self._vendor.reader(request)
                if response.headers.get("content-type", "").partition(";")[0].strip() == "application/json":
                    heard.text(reader.read_whole(await _read(response, MAX_BODY_BYTES)))
                else:
                    await self._read_stream(response, reader, heard)
                return reader.answer()
        except httpx.HTTPError as error:
            raise transport_fault(error, heard.began, self._patience) from None
        except (httpx.InvalidURL, UnicodeError) as error:
            raise Fault("final", f"an endpoint that is no URL: {plain(str(error))[:80]}") from None

    async def _name_model(self, request: ModelRequest) -> ModelRequest:
        """The request with the first model of the server's list, for a Model that names none. Raises Fault."""
        if not self._listed:
            wire = self._vendor.listing(request)
            client = self._open(wire.url)
            import httpx

            try:
                async with client.stream("GET", wire.url, headers=_checked(wire.headers)) as response:
                    if not response.is_success:
                        raise await self._refusal(response)
                    self._listed = first_model(await _read(response, MAX_BODY_BYTES))
            except httpx.HTTPError as error:
                raise transport_fault(error, False, self._patience) from None
            except (httpx.InvalidURL, UnicodeError) as error:
                raise Fault("final", f"an endpoint that is no URL: {plain(str(error))[:80]}") from None
            log.info("model: %s, the first that %s lists", self._listed, shown_server(wire.url))
        return replace(request, model=replace(request.model, model=self._listed))

    async def _read_stream(self, response: httpx.Response, reader: AnswerReader, heard: Listener) -> None:
        decoder, chunks = SseDecoder(), response.aiter_bytes()
        size, events, start = 0, 0, b""
        try:
            async for chunk in chunks:
                heard.began = True
                start, size = start or chunk[:200], size + len(chunk)
                if size > MAX_STREAM_BYTES:
                    raise Fault("final", f"a stream of more than {MAX_STREAM_BYTES} bytes")
                for event in decoder.feed(chunk):
                    events += 1
                    heard.text(reader.read(event))
                if reader.done:
                    await self._read_rest(chunks)
                    return
            for event in decoder.end():
                events += 1
                heard.text(reader.read(event))
        except EventTooLarge as error:
            raise Fault("final", str(error)) from None
        if events == 0:
            kind = plain(response.headers.get("content-type", "no content-type"))[:80]
            words = plain(start.decode("utf-8", "replace"))
            raise Fault("broken", f"no event stream but {kind}: {words}" if words else "an empty answer")

    async def _read_rest(self, chunks: AsyncIterator[bytes]) -> None:
        """What follows a complete answer is an end mark, or not worth waiting for."""
        import httpx

        size = 0
        with suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(self._patience.rest_s):
                async for chunk in chunks:
                    size += len(chunk)
                    if size > MAX_ERROR_BYTES:
                        return

    async def _refusal(self, response: httpx.Response) -> Fault:
        """A status that is no success, in the vendor's words."""
        status = response.status_code
        import httpx

        body = b""
        with suppress(httpx.HTTPError, Fault):
            body = await _read(response, MAX_ERROR_BYTES, cut=True)
        words = _words(body)
        if 300 <= status < 400:
            words = f"it redirects to {plain(response.headers.get('location', 'nowhere'))[:MAX_WORDS]}"
        reason = words or response.reason_phrase or "no reason given"
        return Fault(
            status_kind(status, response.headers),
            f"{status} {reason}",
            retry_after_s=retry_after(response.headers, self._now()),
            status=status,
        )

    # --- around it

    def _failed(self, request: ModelRequest, wire: WireRequest, fault: Fault, tries: int) -> GoondanError:
        times = f" (tried {tries} times)" if tries > 1 else ""
        asked = fault.retry_after_s
        if asked is not None and asked > MAX_RETRY_AFTER_S:
            times += f" (it asks to wait {asked:.0f} s)"
        message = f"model server {shown_server(wire.url)}: {fault.message}{times}"
        return model_failed(
            redact(message, request.model.api_key),
            suggestion=_SUGGESTIONS.get(fault.status or 0),
        )

    def _open(self, url: str) -> httpx.AsyncClient:
        """The process's client, made for the server of its model. Raises Fault when the environment forbids one."""
        if self._client is not None:
            return self._client
        # Its command line would bring 5 MiB of libraries along; None makes that import fail, which httpx expects.
        modules: dict[str, Any] = sys.modules
        modules.setdefault("httpx._main", None)
        import httpx

        if modules["httpx._main"] is None:
            del modules["httpx._main"]
        logging.getLogger("httpx").setLevel(logging.WARNING)  # else it writes a line with the URL for every request
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise Fault("final", f"an endpoint that is no URL: {error}") from None
        local = is_loopback(parts.hostname or "")
        try:
            plain_http = parts.scheme == "http" and (local or not getproxies())
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain_http else httpx.create_ssl_context()
        except OSError as error:
            message = f"the certificates cannot be loaded: {error.strerror or error} (see SSL_CERT_FILE, SSL_CERT_DIR)"
            raise Fault("final", message) from None
        try:
            self._client = httpx.AsyncClient(
                verify=tls,
                trust_env=not local,
                headers={
                    "user-agent": "goondan-kernel",
                    "content-type": "application/json",
                    "accept": "text/event-stream, application/json",
                    "accept-encoding": "identity",
                },
                timeout=httpx.Timeout(self._patience.silence_s, connect=self._patience.connect_s),
                limits=httpx.Limits(keepalive_expiry=KEEP_ALIVE_S),
            )
        except (ValueError, httpx.InvalidURL):
            raise Fault("final", "the proxy settings (HTTP_PROXY and its like) cannot be used") from None
        return self._client


class Listener:
    """Hands pieces of text on. `began`: something of the answer has arrived."""

    def __init__(self, on_delta: Callable[[TextDelta], None] | None, again: bool) -> None:
        self.began = False
        self._on_delta = on_delta
        self._again = again

    def text(self, piece: str) -> None:
        """The next piece; the first of a repeated try takes the earlier ones back."""
        self.began = True
        if piece and self._on_delta is not None:
            self._on_delta(TextDelta(piece, self._again))
            self._again = False


# --- pieces -----------------------------------------------------------------------------------------------------------


async def _read(response: httpx.Response, limit: int, *, cut: bool = False) -> bytes:
    """A body of at most `limit` bytes; a longer one is cut, or a Fault."""
    parts: list[bytes] = []
    size = 0
    async for chunk in response.aiter_bytes():
        parts.append(chunk)
        size += len(chunk)
        if size > limit:
            if cut:
                break
            raise Fault("final", f"an answer of more than {limit} bytes")
    return b"".join(parts)[:limit]


def _words(body: bytes) -> str:
    """What a refusal says: the message of an error document, else its text."""
    try:
        return error_words(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return plain(body[: MAX_WORDS * 4].decode("utf-8", "replace"))[:MAX_WORDS]


def _checked(headers: dict[str, str]) -> dict[str, str]:
    """Headers that can be sent. Raises Fault for a key that cannot: the client's own error would show it."""
    cleaned = {name: value.strip() for name, value in headers.items()}
    if not all(value.isascii() and value.isprintable() for value in cleaned.values()):
        raise Fault("final", "the apiKey holds characters that a key cannot have; it was not sent")
    return cleaned


def transport_fault(error: Exception, began: bool, patience: Patience) -> Fault:
    """What a failure of httpx means. Its own texts are left out where they could repeat a header or a password."""
    import httpx

    if isinstance(error, httpx.ConnectTimeout):
        return Fault("busy", f"no connection within {patience.connect_s:g} s")
    if isinstance(error, httpx.TimeoutException):
        return Fault("silent", f"nothing for {patience.silence_s:g} s")
    if isinstance(error, httpx.UnsupportedProtocol):
        return Fault("final", "an endpoint that is no http or https URL")
    if isinstance(error, httpx.LocalProtocolError):
        return Fault("final", "a request that cannot be sent; check the Model's endpoint and apiKey")
    if isinstance(error, httpx.ConnectError):
        reason, certificate = _cause(error)
        return Fault("final" if certificate else "busy", f"no connection: {reason}")
    if began:
        return Fault("broken", "half an answer: the connection was lost")
    return Fault("busy", "nothing: the connection was lost before an answer")


def _cause(error: BaseException) -> tuple[str, bool]:
    """Why there is no connection, as the system or TLS says it; and whether that is the server's certificate."""
    at: BaseException | None = error
    found = plain(str(error))[:200] or "no reason given"
    for _ in range(8):
        if at is None:
            break
        if isinstance(at, ssl.SSLError):
            return plain(at.verify_message if isinstance(at, ssl.SSLCertVerificationError) else str(at))[:200], True
        if isinstance(at, BaseExceptionGroup):
            at = at.exceptions[0]
            continue
        if isinstance(at, OSError) and at.strerror:  # asyncio writes texts of its own; the resolver's are below zero
            found = plain(os.strerror(at.errno) if at.errno and at.errno > 0 else at.strerror)[:200]
        at = at.__cause__ or at.__context__
    return found, False


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def shown_server(url: str) -> str:
    """A URL as it may be shown: without user, password and query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "of the endpoint"
    return plain(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")[:200]


def redact(text: str, key: str | None) -> str:
    """`text` without the key."""
    key = (key or "").strip()
    return text.replace(key, "***") if len(key) >= MIN_KEY_CHARS else text
