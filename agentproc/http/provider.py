"""Sends a vendor's requests and reads its answers as they arrive.

Rules.
- A try ends with an answer or a Fault. `Retries` decides whether and when there is another try. Each try is a request
  of its own, and `on_delta` is told when the text begins again.
- Cancelling the task closes the connection.
- No logged or raised text contains a key, even if the server repeats the key in any form (schemas/text/redaction.py).
  The server's text is searched before it is cut: half a key would not be found.

Source: docs/design/turns.md sections 6 and 13.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from goondan.agentproc.http.connection import Client, Patience, Response
from goondan.agentproc.providers import base, faults, history
from goondan.agentproc.providers.reader import MAX_NAME, AnswerReader, EventTooLarge, SseDecoder
from goondan.agentproc.providers.vendor import Vendor, WireRequest, answered, first_model, with_files
from goondan.schemas.models import origins, server_answers
from goondan.schemas.text.redaction import Redactor
from goondan.schemas.wire import spans
from goondan.schemas.wire.errors import GoondanError, fail

#: The largest streamed answer, with all that surrounds the text (bytes). Streams wrap every few letters in some hundred
#: bytes.
MAX_STREAM_BYTES: Final = 128 << 20
#: The largest answer that does not stream (bytes).
MAX_BODY_BYTES: Final = 8 << 20
#: How long a server may take to say how long its model's context is (seconds). Without it a refusal tells.
WINDOW_S: Final = 5.0
#: How much of a refusal is read (bytes).
MAX_ERROR_BYTES: Final = 65_536

#: How much of a body that is no stream is looked at for what it says (bytes).
_START_BYTES: Final = 2000

_SUGGESTIONS: Final[dict[int, str]] = {
    401: "Check the Model's apiKey, or the environment variable that it comes from.",
    403: "Check that the key may use this model, and that the endpoint is the vendor's.",
    404: "Check the path of the Model's endpoint, which most servers want to end with /v1, and the name of the model.",
    405: "Check the path of the Model's endpoint, which most servers want to end with /v1.",
    429: "Wait, or raise the limits of your account.",
}
#: The same for statuses of one kind, by their first digit.
_KINDS: Final[dict[int, str]] = {
    3: "Write the address that it redirects to into the Model's endpoint, if it is to have the key.",
    5: "The fault is the server's own: send it again later, and look at its log or its status page.",
}

#: Statuses of a request that a server does not understand.
_UNREAD: Final = frozenset((400, 422))
#: For a server that does not say which models it has.
_NO_LIST: Final = "Check the base URL; or set GOONDAN_MODEL to the name of a model, so that no list is asked for."

log = logging.getLogger("agentproc.model")


class Tries:
    """The tries of `request`. `clock` gives seconds."""

    def __init__(
        self, request: base.ModelRequest, on_news: Callable[[base.ModelNews], None], clock: Callable[[], float]
    ) -> None:
        self.retries = faults.Retries(request.model.retry)
        self._permit = request.permit
        self._on_news = on_news
        self._clock = clock
        self._until = None if request.timeout_s is None else clock() + request.timeout_s
        self._faulty_since: float | None = None
        self._queued_s = 0.0  # since the first fault: for others, not for the server
        #: Whether a request is out.
        self.inside = False

    async def enter(self, body: Sequence[bytes]) -> None:
        """Wait until the next try may go out, which has this body. A request that is sent again at once is out already.
        Raises Fault, GoondanError.
        """
        if self._permit is not None and not self.inside:
            if not self._permit.passes():
                began = self._clock()
                await self._permit.enter(sum(map(len, body)), self._on_news)
                if self._faulty_since is not None:
                    self._queued_s += self._clock() - began
            self.inside = True
        self._on_news("asking")

    def answered(self, answer: base.ModelAnswer, headers: dict[str, str]) -> None:
        """The model has answered. `headers` are those of the answer."""
        if self.inside and self._permit is not None:
            self.inside, usage = False, answer.usage
            used = None if usage is None else usage.input_tokens + usage.output_tokens
            self._permit.over(headers, accepted=True, tokens=used)

    def next_wait(self, fault: faults.Fault, chance: float) -> float | None:
        """A try has failed: the seconds until the next one, None to give up. `chance` is in [0, 1)."""
        now = self._clock()
        self._faulty_since = now if self._faulty_since is None else self._faulty_since
        left = None if self._until is None else self._until - now
        return self.retries.next_wait(fault, chance, now - self._faulty_since - self._queued_s, left)

    async def pause(self, fault: faults.Fault, wait_s: float, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Wait for the next try, unless it waits for a permit: all requests wait for theirs together."""
        if fault.kind == "limited" and self._permit is not None and self.inside:
            self._permit.refused(fault.retry_after_s)
            self.inside = False
            return
        self.close()
        self._on_news("waiting")
        await sleep(wait_s)

    def close(self) -> None:
        """The call is over."""
        if self._permit is not None and self.inside:
            self.inside = False
            self._permit.over(None, accepted=False)


class HttpProvider:
    """A vendor's model behind the provider's interface.

    `client` holds the connection. Retries use `sleep` and `chance` (in [0, 1)); tests give their own.
    """

    needs_history = True

    def __init__(
        self,
        vendor: Vendor[Any],
        *,
        client: Client | None = None,
        patience: Patience = Patience(),  # noqa: B008  it is frozen
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._vendor = vendor
        self._patience = patience
        self._sleep = sleep
        self._chance = chance
        self._client = client or Client()
        self._seeing = history.Seeing(_is_there)
        #: The model and the headers of the last request that was checked, its URL, and the headers as they are sent.
        self._checked: tuple[Any, dict[str, str], str, dict[str, str]] = None, {}, "", {}
        self._tells_trace = os.environ.get(spans.VARIABLE) == "1"
        #: The model that was taken from the server's list.
        self._listed = ""

    async def complete(
        self,
        request: base.ModelRequest,
        on_delta: base.OnDelta | None = None,
        on_news: Callable[[base.ModelNews], None] | None = None,
    ) -> base.ModelAnswer:
        """Ask the model. Raises GoondanError with the vendor's words when the retries are used up: E_MODEL_QUOTA for an
        account that may use no more, ContextOverflow for a request that is longer than the model's context, otherwise
        E_MODEL_FAILED.
        """
        if request.max_tokens is not None and request.max_tokens < base.output_limit(request.model):
            request = replace(request, model=base.limited_output(request.model, request.max_tokens))
        request = self._seeing.ready(request)
        on_news = on_news or _nobody
        tries = Tries(request, on_news, asyncio.get_running_loop().time)
        wire = self._vendor.request(request)
        try:
            while True:
                try:
                    await tries.enter(wire.body)
                    if not request.model.model:
                        wire = self._vendor.listing(request)
                        request = await self._name_model(request, wire)
                        wire = self._vendor.request(request)
                    heard = Listener(on_delta, on_news, tries.retries.count > 0)
                    answer, headers = await self._try(request, wire, heard)
                    tries.answered(answer, headers)
                    return answer if request.output is None else answered(answer)
                except faults.Fault as error:
                    fault = error
                if (changed := self._changed(request, fault)) is not None:
                    request = changed
                    wire = self._vendor.request(request)
                    continue
                wait = tries.next_wait(fault, self._chance())
                if wait is None:
                    raise self._failed(request, wire, fault, tries.retries)
                words = base.redactor_of(request.model)(fault.message)
                model, count = request.model.model, tries.retries.count
                log.warning("model %s, try %d: %s; the next in %.1f s", model, count, words, wait)
                on_news(base.FailedTry(words, wait))
                await tries.pause(fault, wait, self._sleep)
        finally:
            if tries.inside:
                tries.close()

    async def window(self, request: base.ModelRequest) -> int | None:
        """The model's context as its server says (tokens). Of the vendor's own server the table knows the models."""
        if request.model.endpoint is None:
            return None
        wire = self._vendor.listing(request)
        model, found = request.model.model or self._listed, None
        with suppress(faults.Fault, TimeoutError):
            async with asyncio.timeout(WINDOW_S):
                listed = server_answers.in_listing(await self._get(request, wire), model)
                found = listed.window
                if listed.ask is not None:
                    url = server_answers.server_root(wire.url.removesuffix("/models")) + listed.ask
                    asked = await self._get(request, msgspec.structs.replace(wire, url=url))
                    found = server_answers.in_answer(listed.ask, asked, model) or found
        return found

    def forget(self) -> None:
        """Drop the conversation as it was written."""
        self._vendor.forget()

    async def close(self) -> None:
        """Close the connection."""
        self._client.close()

    # --- tries

    def _changed(self, request: base.ModelRequest, fault: faults.Fault) -> base.ModelRequest | None:
        """The request that goes out at once, without what the server has refused. None: there is nothing to leave
        out.
        """
        told = self._seeing.learn(request, fault.status, fault.message)
        if told is None and fault.status in _UNREAD and self._vendor.gives_up(request, fault.message):
            log.warning("model %s: sent again without what it refused", request.model.model)
            return request
        return told

    async def _try(
        self, request: base.ModelRequest, wire: WireRequest, heard: Listener
    ) -> tuple[base.ModelAnswer, dict[str, str]]:
        """One request; its answer and the headers of that. Raises Fault."""
        model, given, url, headers = self._checked
        if model is not request.model or given is not wire.headers or url is not wire.url:
            self._check_key(request, wire)
            headers = _checked(wire.headers)
            self._checked = request.model, wire.headers, wire.url, headers
        if self._tells_trace and request.trace_id:
            span_id = spans.model_span(request.turn_id, request.step)
            headers = {**headers, "traceparent": spans.traceparent(request.trace_id, span_id)}
        body = wire.body if request.files is None else with_files(wire.body, request.files)
        response = await self._client.ask("POST", wire.url, headers, body, self._patience)
        try:
            if not 200 <= response.status < 300:
                raise await self._refusal(response, base.redactor_of(request.model))
            reader = self._vendor.reader(request)
            if response.headers.get("content-type", "").partition(";")[0].strip() == "application/json":
                heard.piece(reader, reader.read_whole(await _read(response, MAX_BODY_BYTES)))
            else:
                await self._read_stream(response, reader, heard)
            answer = reader.answer()
            if answer.model != request.model.model or self._listed:
                answer = self._named(answer, request)
            return answer, response.headers
        finally:
            response.close()

    def _check_key(self, request: base.ModelRequest, wire: WireRequest) -> None:
        """Raises Fault when the key and the Model's headers belong to another server than the one in the request."""
        model = request.model
        secret = model.api_key or model.headers
        if (
            secret
            and origins.origin_of(wire.url)
            and not origins.key_may_go(wire.url, model.key_origin, self._vendor.server)
        ):
            meant = model.key_origin or origins.origin_of(self._vendor.server)
            raise faults.Fault("final", f"the key was not sent: it is meant for {meant}")

    async def _name_model(self, request: base.ModelRequest, wire: WireRequest) -> base.ModelRequest:
        """The request with a model. When the Model names none, it is the first one of the server's list, which `wire`
        asks for. Raises Fault.
        """
        if not self._listed:
            self._listed = first_model(await self._get(request, wire))
            named = base.redactor_of(request.model)(faults.plain(self._listed))
            log.info("model: %s, the first that %s lists", named[: faults.MAX_WORDS], shown_server(wire.url))
        return replace(request, model=replace(request.model, model=self._listed))

    async def _get(self, request: base.ModelRequest, wire: WireRequest) -> bytes:
        """What the server says at the URL of `wire`. Raises Fault."""
        self._check_key(request, wire)
        response = await self._client.ask("GET", wire.url, _checked(wire.headers), (), self._patience)
        try:
            if not 200 <= response.status < 300:
                raise await self._refusal(response, base.redactor_of(request.model))
            return await _read(response, MAX_BODY_BYTES)
        finally:
            response.close()

    async def _read_stream(self, response: Response, reader: AnswerReader, heard: Listener) -> None:
        decoder = SseDecoder()
        size, events, start = 0, 0, b""
        try:
            while True:
                chunk = await response.read()
                start, size = start or chunk[:_START_BYTES], size + len(chunk)
                if size > MAX_STREAM_BYTES:
                    raise faults.Fault("final", f"a stream of more than {MAX_STREAM_BYTES} bytes")
                found = decoder.feed(chunk) if chunk else decoder.end()
                events += len(found)
                if heard.on_delta is None or not heard.on_delta.wanted:
                    heard.piece(reader, reader.read(found))  # nobody reads it: it is only news
                else:
                    for event in found:
                        heard.piece(reader, reader.read((event,)))
                if not chunk:
                    break
                if reader.done:
                    if not response.ended:
                        await self._read_rest(response)
                    return
        except EventTooLarge as error:
            raise faults.Fault("final", str(error)) from None
        if events == 0:
            kind = faults.plain(response.headers.get("content-type", "no content-type"))[:80]
            text = start.decode("utf-8", "replace")
            words = faults.page_title(text) or faults.plain(text)[:200]
            message = f"no event stream but {kind}: {words}" if words else "an empty answer"
            raise faults.Fault("broken", message, suggestion=faults.ADVICE["page"])

    async def _read_rest(self, response: Response) -> None:
        """Read the end mark behind a complete answer, if it has not come yet. Any other data there is not worth waiting
        for.
        """
        size = 0
        with suppress(TimeoutError, faults.Fault):
            async with asyncio.timeout(self._patience.rest_s):
                while chunk := await response.read():
                    size += len(chunk)
                    if size > MAX_ERROR_BYTES:
                        return

    async def _refusal(self, response: Response, redact: Redactor) -> faults.Fault:
        """The Fault of a status that means failure, in the vendor's words."""
        status = response.status
        body = b""
        with suppress(faults.Fault, TimeoutError):
            async with asyncio.timeout(self._patience.refusal_s):
                body = b"" if response.coding else await _read(response, MAX_ERROR_BYTES, cut=True)
        words, names = _refused(redact(body.decode("utf-8", "replace")))
        if 300 <= status < 400:
            place = faults.plain(redact(response.headers.get("location", "nowhere")))
            words = f"it redirects to {place[: faults.MAX_WORDS]}"
        reason = words or faults.plain(redact(response.reason))[: faults.MAX_WORDS] or _phrase(status)
        overflow = faults.overflow_of(status, body.decode("utf-8", "replace"))
        now = time.time()
        asked = faults.retry_after(response.headers, now)
        if asked is None and status == HTTPStatus.TOO_MANY_REQUESTS:
            asked = faults.exhausted_wait(response.headers, now)
        kind = "final" if overflow is not None else faults.refusal_kind(status, response.headers, names, words, asked)
        return faults.Fault(kind, f"{status} {reason}", retry_after_s=asked, status=status, overflow=overflow)

    # --- around it

    def _failed(
        self, request: base.ModelRequest, wire: WireRequest, fault: faults.Fault, retries: faults.Retries
    ) -> GoondanError:
        times = f" (tried {retries.count} times)" if retries.count > 1 else ""
        asks_too_long = retries.asks_too_long(fault)
        if asks_too_long:
            times += f" (it asks to wait {fault.retry_after_s:.0f} s)"
        redact = base.redactor_of(request.model)
        listing = not request.model.model
        which = f"GET {shown_server(wire.url)}" if listing else shown_server(wire.url)
        message = f"model server {which}: {redact(fault.message)}{times}"
        if fault.overflow is not None:
            return base.ContextOverflow(redact(message), fault.overflow)
        if fault.kind == "quota" or (fault.kind == "limited" and asks_too_long):
            return fail("E_MODEL_QUOTA", redact(message))
        suggestion = fault.suggestion or _SUGGESTIONS.get(fault.status or 0) or _KINDS.get((fault.status or 0) // 100)
        if listing and (fault.status is None or fault.status not in (401, 403, 429)):
            suggestion = _NO_LIST
        return base.ModelFailure(redact(message), suggestion=suggestion, usage=fault.usage)

    def _named(self, answer: base.ModelAnswer, request: base.ModelRequest) -> base.ModelAnswer:
        """The answer with the name of its model: the server's word for it, else what was asked for."""
        name = base.redactor_of(request.model)(answer.model) if answer.model else request.model.model
        return answer if name == answer.model else replace(answer, model=faults.plain(name)[:MAX_NAME] or None)


def _nobody(news: base.ModelNews) -> None:
    """Ignore the news."""


class Listener(msgspec.Struct):
    """Passes on the news of one try."""

    #: Gets the text, and the reasoning, while it is wanted; None: nobody does.
    on_delta: base.OnDelta | None
    #: Gets the news.
    on_news: Callable[[base.ModelNews], None]
    #: What was told before is void.
    again: bool
    #: How much the model had said when that was told last.
    content: int = 0
    #: The listeners to whom all was passed on before the next piece (OnDelta.wanted).
    followed: int = 0

    def piece(self, reader: AnswerReader, text: str) -> None:
        """Pass on the text that `reader` has read, and the reasoning. The first piece of a repeated try makes the
        earlier ones void.
        """
        if reader.content != self.content and not reader.done:  # the end itself is told by the answer
            self.content = reader.content
            self.on_news("content")
        if self.on_delta is None or not self.on_delta.wanted:
            return
        if self.followed != self.on_delta.wanted:
            self.followed, text = self.on_delta.wanted, reader.from_beginning()
        self._tell(reader.take_reasoning(), reasoning=True)
        self._tell(text)

    def _tell(self, text: str, *, reasoning: bool = False) -> None:
        if text and self.on_delta is not None:
            self.on_delta(base.TextDelta(text, self.again, reasoning))
            self.again = False


def _is_there(path: str, size: int) -> bool:
    """Whether a file of this size (bytes) is there."""
    try:
        return os.stat(path, follow_symlinks=False).st_size == size
    except OSError:
        return False


# --- pieces -----------------------------------------------------------------------------------------------------------


async def _read(response: Response, limit: int, *, cut: bool = False) -> bytes:
    """A body of at most `limit` bytes. A longer one is cut, or raises Fault."""
    parts: list[bytes] = []
    size = 0
    while chunk := await response.read():
        parts.append(chunk)
        size += len(chunk)
        if size > limit:
            if cut:
                break
            raise faults.Fault("final", f"an answer of more than {limit} bytes")
    return b"".join(parts)[:limit]


def _refused(body: str) -> tuple[str, list[str]]:
    """The text of a refusal, and the names of its errors: those of an error document, otherwise its whole text."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return faults.page_title(body) or faults.plain(body[: faults.MAX_WORDS * 4])[: faults.MAX_WORDS], []
    return faults.error_words(document), faults.error_names(document)


def _checked(headers: dict[str, str]) -> dict[str, str]:
    """Headers that can be sent. Raises Fault for a key that cannot be sent: the client's own error would
    show the key.
    """
    cleaned = {name: value.strip() for name, value in headers.items()}
    if not all(value.isascii() and value.isprintable() for value in cleaned.values()):
        raise faults.Fault("final", "the apiKey or a header holds characters that cannot be sent; nothing was sent")
    return cleaned


def _phrase(status: int) -> str:
    """The meaning of a status, for a server that sends no text."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "no reason given"


def shown_server(url: str) -> str:
    """A URL in a form that may be shown: without user, password and query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "of the endpoint"
    return faults.plain(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")[:200]
