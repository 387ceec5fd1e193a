"""The gate before all ways of a door: it judges a request, finds its way, and bounds its body.

A way says the role that it needs and how large its body may be. What it raises is answered in the form of its prefix:
a problem document, if the feature whose way it is has no form of its own. A request that cannot be answered any more
loses its connection.

When its client goes, the work on a request is cancelled. So a way that waits for an answer sees CancelledError.

Source: docs/design/features.md section 1; RFC 9457.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, NoReturn
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

from goondan.features.serve.api.http import Bounds, Connection
from goondan.features.serve.api.problems import problem, status_of
from goondan.features.serve.api.rules.callers import Caller, Role, Tokens
from goondan.features.serve.api.rules.heads import STRANGER, Head, Names, Refusal, judge
from goondan.schemas.wire.errors import GoondanError, fail

#: Makes the answer of an error with a status.
Formatter = Callable[[GoondanError, int], Response]
_Headers = Mapping[str, str]
#: How large a body is whose way says nothing (bytes).
MAX_BODY: Final = 1 << 20
#: What a stream says last when the door ends: after how many milliseconds a client may come back.
COME_BACK: Final = b"retry: 1000\n\n"
_LOG: Final = logging.getLogger("goondan.door")
#: What each answer says, unless its way has said it: it is a caller's own, and what its type says.
_HEADERS: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
#: How most answers begin.
_JSON_HEAD: Final = STATUS_LINE[200] + b"".join(
    [b"%b: %b\r\n" % header for header in (*_HEADERS, (b"content-type", b"application/json"))]
)


class Refused(Exception):
    """An error with a status of its own: raised by a way, answered by the gate in the form of its prefix."""

    def __init__(self, status: int, error: GoondanError, headers: _Headers | None = None) -> None:
        super().__init__(error.info.message)
        self.status = status
        self.error = error
        self.headers = headers or {}


def refused(status: int, message: str, code: str = "E_DOOR_REQUEST", headers: _Headers | None = None) -> Refused:
    """The error of a request that is wrong in a way that HTTP has a status for; `headers` are the answer's."""
    return Refused(status, fail(code, message), headers)


class Way(Route):
    """A route that says which role a caller needs (`role`; None: no token, if its path is plain), and how large its
    body may be (`max_body`, bytes).
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        methods: Sequence[str] = ("GET",),
        *,
        role: Role | None = "operate",
        max_body: int = MAX_BODY,
    ) -> None:
        super().__init__(path, endpoint, methods=[*methods])
        self.methods: set[str] = {*methods}  # HEAD is not served
        self.role = role
        #: Its endpoint is called with the exchange; else it is an ASGI application, or a function for Starlette.
        self.is_direct = False
        #: What OpenAPI says of it: fields of Operation (routing.py) by name. Empty: nothing.
        self.operation: Mapping[str, Any] = {}
        self.max_body = max_body if {*methods} - {"GET"} else 0


def _refusal_of(error: Exception) -> Refused:
    """How an exception of a way is answered. Of one that nobody expects, the log says what it is and where it was
    raised; what it says may be a caller's.
    """
    match error:
        case Refused():
            return error
        case GoondanError():
            return Refused(status_of(error.info.code), error)
        case HTTPException():
            return refused(error.status_code, str(error.detail)[:200])
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    name = os.path.basename(frame.f_code.co_filename)
    _LOG.error("a request has failed: %s at %s:%d", type(error).__name__, name, line)
    return refused(500, "the request has failed, and the log says why", "E_INTERNAL")


def _is_good(headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
    is_whole = [value for name, value in headers if name == b"content-length"] == [b"%d" % len(body)]
    return is_whole and not HEADER_VALUE_RE.search(b"".join(chain.from_iterable(headers)))


class Gate:
    """Judges requests, and hands those that may come in to their ways."""

    def __init__(
        self,
        ways: Sequence[Way],
        names: Names,
        tokens: Tokens,
        bounds: Bounds,
        forms: Mapping[str, Formatter] | None = None,
        log: Callable[[bytes], None] | None = None,
        callers: Sequence[Callable[[bytes], Caller | None]] = (),
    ) -> None:
        """`forms`: how errors below a prefix of a path are answered. `log` gets a line for each request. `callers`:
        who else knows a caller by a digest.
        """
        self._ways = ways
        #: What answers the request that a connection has read the head of.
        self.begin: Callable[[Connection], Exchange] = partial(Exchange, self)
        #: Those ways whose paths have no names in them, by method and path.
        self.plain = {
            (method, way.path): way for way in reversed(ways) if not way.param_convertors for method in way.methods
        }
        #: The names under which the door may be asked.
        self.names = names
        self._forms = sorted((forms or {}).items(), key=lambda form: -len(form[0]))
        self._tokens = tokens
        self._callers = callers
        #: What may be spent, and how many bytes of bodies are in memory.
        self.bounds = bounds
        self.bodies = 0
        #: Gets a line for each request.
        self.log = log
        #: How many requests of each caller are open, by its name; and what works on those that were let in.
        self.open: Counter[str] = Counter()
        self.inside: set[Exchange] = set()
        #: Nobody new is let in.
        self.ended = False

    def replace(self, tokens: Tokens) -> None:
        """From now on these are the tokens. Requests and streams whose token has gone, or says less, lose their
        connection.
        """
        self._tokens = tokens
        for exchange in self.inside:
            if exchange.head is None or self.known(exchange.head.digest) != exchange.head.caller:
                exchange.task.cancel()

    def end(self) -> None:
        """Let nobody new in, and end the streams."""
        self.ended = True
        for exchange in self.inside:
            if exchange.streams:
                exchange.task.cancel()

    # --- for exchanges

    def find(self, scope: Scope) -> Way:
        """The way of a request whose path has names in it; they are put into the scope. Raises Refused 404, 405."""
        allowed: set[str] = set()
        # A name in a path may have a slash, which is %2F there and parts nothing. No path has a null.
        path = unquote_to_bytes(scope["raw_path"].replace(b"%2f", b"%2F").replace(b"%2F", b"%00")).decode()
        for way in self._ways:
            match, found = way.matches({**scope, "path": path})
            if match is Match.FULL:
                named = found["path_params"].items()
                scope.update(found, path_params={name: value.replace("\0", "/") for name, value in named})
                return way
            if match is Match.PARTIAL:
                allowed |= way.methods
        if allowed:
            methods = ", ".join(sorted(allowed))
            raise refused(405, f"this path takes {methods}", headers={"allow": methods})
        raise refused(404, "nothing is served at this path")

    def formatter(self, path: str) -> Formatter:
        """What makes the answer of an error at this path."""
        return next((form for prefix, form in self._forms if path.startswith(prefix)), problem)

    def known(self, digest: bytes) -> Caller | None:
        """Who has a token with this digest."""
        for ask in (self._tokens.known, *self._callers):
            if (caller := ask(digest)) is not None:
                if not caller.behind:
                    return caller
                maker = self._tokens.known(caller.behind)
                return caller if maker and maker.may(caller.role) and maker.agents == caller.agents else None
        return None


_Cycle: Any = RequestResponseCycle  # its types of messages are not those of Starlette


class Exchange(_Cycle):  # type: ignore[misc]
    """One request and its answer. What its way does not do at once, uvicorn's cycle does."""

    #: What works on it.
    task: asyncio.Task[Any]
    #: What its head says, when it was let in.
    head: Head | None = None
    #: Its answer is a stream of events.
    streams = False
    _way: Way | None = None
    _most = 0  # how large the body may be
    _held = 0  # how much of it has come
    _whole = False
    _status = 0
    _start: Message | None = None  # the head of an answer that leaves with its body
    _sent = 0
    body: bytearray

    def __init__(self, gate: Gate, connection: Connection) -> None:
        whole = connection.scope, connection.transport, connection.flow
        asks, stays = connection.expect_100_continue, connection.parser.should_keep_alive()
        super().__init__(*whole, _LOG, _LOG, False, [], asyncio.Event(), asks, stays, connection.on_response_complete)
        self._gate = gate
        self._connection = connection
        self._began = time.monotonic()

    async def run_asgi(self, _app: Any) -> None:
        connection = self._connection
        try:
            try:
                way = self._let_in()
                if way.is_direct:
                    await way.app(self)  # type: ignore[call-arg]
                else:  # the method fits already
                    await way.app(self.scope, self._body, self.answer)
            except Exception as error:
                await self._refuse(_refusal_of(error))
        except asyncio.CancelledError:
            if self.streams and self._gate.ended and not connection.flow.write_paused:
                await self.send({"type": "http.response.body", "body": COME_BACK, "more_body": True})
                connection.transport.close()  # without the last chunk: the stream is not whole
            else:
                connection.transport.abort()  # its client has gone, or its token, or the door ends
                self.disconnected = True  # uvicorn says so of the last request of a packet alone
        finally:
            self.on_response: Callable[[], None] = lambda: None  # it leads back to the connection
            if not self.response_complete:
                connection.transport.close()
            self._gate.bodies -= self._held
            if self.head is not None and self in self._gate.inside:
                self._gate.inside.remove(self)
                self._gate.open[self.head.caller.name] -= 1
            if self._gate.log is not None:
                self._gate.log(msgspec.json.encode(self._line()) + b"\n")

    def _let_in(self) -> Way:
        """The way of the request. Raises Refused, GoondanError."""
        gate, connection, scope = self._gate, self._connection, self.scope
        way = gate.plain.get((scope["method"], scope["path"]))
        head = judge(scope, gate.names, gate.known, way is not None and way.role is None, way is not None)
        if isinstance(head, Refusal):
            raise refused(head.status, head.reason, head.code, head.headers)
        self.head, caller = head, head.caller
        if caller is not STRANGER:
            connection.room.let_in(connection)
        if gate.ended:
            raise refused(503, "the door is closing", "E_LINK_CLOSED")
        if gate.open[caller.name] >= gate.bounds.open:
            raise refused(429, f"{gate.bounds.open} requests with the token {caller.name} are open", "E_OVERLOADED")
        gate.open[caller.name] += 1
        gate.inside.add(self)
        scope["path_params"] = {}
        self._way = way = way or gate.find(scope)
        if way.role is not None and not caller.may(way.role):
            raise fail("E_FORBIDDEN", f"this needs the role {way.role}, and the token {caller.name} has {caller.role}")
        self._most = way.max_body
        if head.length is not None and head.length > self._most:
            self._too_large()
        scope["state"]["caller"] = caller
        return way

    async def _body(self) -> Any:
        if self._whole:
            return await self.receive()
        body_s = self._gate.bounds.body_s
        try:
            async with asyncio.timeout(self._began + body_s - time.monotonic()):
                message = await self.receive()
        except TimeoutError:
            raise refused(408, f"the body did not come within {body_s:g} s") from None
        self._hold(len(message.get("body", b"")), message["type"] != "http.request" or not message["more_body"])
        return message

    async def read(self) -> bytearray:
        """The whole body. Raises Refused, GoondanError E_OVERLOADED, ClientDisconnect."""
        if not self.more_body:  # what is here needs neither a timer nor an event
            self._hold(len(self.body), is_whole=True)
            if self.flow.read_paused:
                self.flow.resume_reading()
            whole: bytearray = self.body
            self.body = bytearray()
            return whole
        data = bytearray()
        while not self._whole:
            message = await self._body()
            if message["type"] != "http.request":
                raise ClientDisconnect
            data += message["body"]
        return data

    def _hold(self, size: int, is_whole: bool) -> None:
        self._whole = is_whole
        if self._held + size > self._most:
            self._too_large()
        if self._gate.bodies + size > self._gate.bounds.bodies:
            raise fail("E_OVERLOADED", "the bodies of other requests take all room")
        self._gate.bodies += size
        self._held += size

    def _too_large(self) -> NoReturn:
        raise refused(413, f"a request at this path has at most {self._most} bytes")

    async def answer(self, message: Message) -> None:
        """Send a message of ASGI."""
        start, self._start = self._start, None
        body = message.get("body", b"")
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = [*message.get("headers", ())]
            named = dict(headers)
            message["headers"] = headers + [header for header in _HEADERS if header[0] not in named]
            self.streams = named.get(b"content-type", b"").startswith(b"text/event-stream")
            if b"content-length" in named and self.scope["method"] != "HEAD":
                self._start = message
            else:
                await self.send(message)
        elif start is not None and not message.get("more_body") and _is_good(start["headers"], body):
            lines = [b"%b: %b\r\n" % header for header in start["headers"] if header[0] != b"content-length"]
            await self.write(body, STATUS_LINE[self._status] + b"".join(lines), self._status)
        else:
            self._sent += len(body)
            if start is not None:
                await self.send(start)
            await self.send(message)

    async def write(self, body: bytes, head: bytes = _JSON_HEAD, status: int = 200) -> None:
        """Answer with a whole body, JSON if no `head` is given, in one system call, which wakes its reader once."""
        self._status = status
        self._sent += len(body)
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        self.response_started, self.response_complete, self.waiting_for_100_continue = True, True, False
        self.transport.write(b"%bcontent-length: %d\r\n%b\r\n%b" % (head, len(body), closing, body))
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    async def _refuse(self, refusal: Refused) -> None:
        """Answer an error, and close the connection if the rest of its request is not wanted."""
        if self._status:
            return  # and the connection is closed, because the answer is not whole
        answer: Response = self._gate.formatter(self.scope["path"])(refusal.error, refusal.status)
        answer.headers.update(refusal.headers)
        if refusal.status in (429, 503):
            answer.headers.setdefault("retry-after", "1")
        if self.head is None or not (self._whole or self.head.length == 0):
            self.keep_alive = False  # what comes behind is not read
        await answer(self.scope, self._body, self.answer)

    def _line(self) -> dict[str, Any]:
        """What the log says. It has nothing that a caller has chosen: no path, no query, no content."""
        took = time.monotonic() - self._began
        name = None if self.head is None else self.head.caller.name
        told = {"time": round(time.time() - took, 3), "token": name, "method": self.scope["method"][:16]}
        told |= {"way": getattr(self._way, "path", None), "status": self._status, "ms": round(took * 1000, 1)}
        return told | {"bytesIn": self._held, "bytesOut": self._sent}
