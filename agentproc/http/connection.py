"""One HTTP/1.1 connection to a model's server: a request, its answer as it arrives, and the next request on it.

An agent asks one model, one question at a time, so there is one connection and no pool. httptools reads the answers
(the parser of Node, in C); asyncio's transport and ssl do the rest.

Rules.
- The connection is kept after an answer that was read to its end, closed after any other. A kept connection that the
  server has closed meanwhile is replaced silently: no part of an answer had come, and asking again is always allowed.
- There is a limit for each wait and each size: connecting, silence, the time, size and number of headers, the framing
  around a body, and the data that is read ahead.
- Every failure is a Fault with our own text. The texts of the system and of TLS in it are short and contain no header
  and no key.

Source: RFC 9110 and 9112; RFC 8305 (addresses); decision 020.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from msgspec import Struct

from goondan.agentproc.http.route import Route, dial, failed_to_connect, request_head, route_to, tls_context
from goondan.agentproc.providers.faults import ADVICE, Fault, FaultKind, plain
from goondan.agentproc.providers.vendor import Body, FileText

#: How long an unused connection is kept (seconds): about as long as servers keep theirs.
KEEP_ALIVE_S: Final = 60.0
#: The largest head of one answer: status line and headers, those of earlier "go on" answers included (bytes). Servers
#: themselves accept less.
MAX_HEAD_BYTES: Final = 65_536
#: The most headers of one answer. Vendors send about thirty.
MAX_HEADERS: Final = 256
#: The most data behind a head without a byte of the body (bytes): chunk sizes with their extensions, trailers.
MAX_FRAMING_BYTES: Final = 65_536
#: The largest answer with its framing (bytes): four times the longest body that is read (provider.py). A server that
#: sends every letter as a chunk of its own needs six times its body, but such bodies are short.
MAX_WIRE_BYTES: Final = 512 << 20
#: How much of a body is read ahead (bytes). Then the server has to wait.
READ_AHEAD_BYTES: Final = 1 << 20
#: The largest part of a file's base64 that is sent at once (bytes). Memory of this size is used again and again.
#: Buffers of megabytes would be fresh pages of the system each time, and to touch those takes longer than the encoding.
PART_BYTES: Final = 64 << 10
_READ_BYTES: Final = PART_BYTES // 4 * 3
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Patience(Struct, frozen=True):
    """How long to wait for a server (seconds)."""

    #: For a connection. Across the world it takes one second; a host that drops packets would take minutes.
    connect_s: float = 10.0
    #: For the whole head, counted from the request. Then for each next byte of the body. Models think, and local
    #: servers read long prompts, without sending anything. After five minutes the load balancers in between have given
    #: up as well.
    silence_s: float = 300.0
    #: For a head that has begun, to its end. It is some hundred bytes, and servers send it at once.
    head_s: float = 10.0
    #: For the rest of a stream that has said it is complete, so that its connection can be used again.
    rest_s: float = 0.5
    #: For the body of a refusal. Its status has already said the important part.
    refusal_s: float = 10.0


class Client:
    """Asks servers, and keeps the connection to the last one. Only one task may use it at a time."""

    def __init__(self) -> None:
        self._kept: Connection | None = None
        self._route: Route | None = None
        #: Headers of a request to it, and the head of such a request up to its length.
        self._head: tuple[str, Mapping[str, str], bytes] = "", {}, b""
        self._tls: ssl.SSLContext | None = None

    async def ask(self, method: str, url: str, headers: Mapping[str, str], body: Body, patience: Patience) -> Response:
        """Send a request. Returns its answer as soon as status and headers are there; the caller closes it. Raises
        Fault.

        `headers` have lower-case names and valid values. The headers of every request are added here.
        """
        route = self._route
        if route is None or route.url != url:
            route = route_to(url)
            if self._route is not None and self._route.way != route.way:
                self.close()
            self._route = route
            self._head = "", {}, b""
        if self._head[0] != method or self._head[1] is not headers:
            self._head = method, headers, request_head(method, route, headers)
        head = b"%s%d\r\n\r\n" % (self._head[2], sum(map(len, body)))
        kept, self._kept = self._kept, None
        if kept is not None and not kept.usable():
            kept.abort()
            kept = None
        while True:
            connection = kept or await self.connect(route, patience.connect_s)
            response = connection.begin_request(head, body, patience, self._keep)
            try:
                if response.unsent is not None:
                    await response.sent()
                while not response.has_head:
                    await response.news()
                coding = response.headers.get("content-encoding")
                if coding is not None and response.status < HTTPStatus.BAD_REQUEST and response.coding:
                    message = f"an answer in the content coding {response.coding}, for which nobody has asked"
                    raise Fault("final", f"{message}; a proxy may have made it")
                return response
            except BaseException as error:
                response.close()
                if kept is None or not isinstance(error, Fault) or not response.unheard:
                    raise
            kept = None

    async def connect(self, route: Route, limit_s: float) -> Connection:
        """A new connection, through the proxy if there is one. Raises Fault."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._open(route)
        except TimeoutError:
            message = f"no connection within {limit_s:g} s"
            raise Fault("busy", message, suggestion=ADVICE["unreachable"]) from None
        except OSError as error:
            raise failed_to_connect(error) from None

    def close(self) -> None:
        """Close the kept connection."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.abort()

    # --- inside

    def _keep(self, connection: Connection) -> None:
        if self._kept is not None:
            self._kept.abort()
        self._kept = connection

    async def _open(self, route: Route) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(loop)
        way = route.way
        try:
            await dial(loop, connection, way.host, way.port, self._context() if way.tls else None)
            if way.tunnel is not None:
                await connection.tunnel(way.tunnel)
                await connection.upgrade(self._context(), way.server)
        except BaseException:
            connection.abort()
            raise
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = tls_context()
        return self._tls


# --- the connection ---------------------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """A transport, and the answer that arrives on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._reader: Response | _Tunnel | None = None
        self._lost = False
        self._idle_since = 0.0
        #: Pending while the transport holds as much unsent data as it may.
        self.full: asyncio.Future[None] | None = None

    def usable(self) -> bool:
        """Whether the next request may use it."""
        return not self._lost and self.loop.time() - self._idle_since < KEEP_ALIVE_S

    def begin_request(
        self, head: bytes, body: Body, patience: Patience, on_close: Callable[[Connection], None]
    ) -> Response:
        """Send a request. All data from now on belongs to its answer. One with files is sent by `Response.sent`.
        `on_close` gets the connection when it may be used again.
        """
        response = self._reader = self._response = self._response or Response(self, patience)
        response.begin(patience, on_close)
        if FileText in map(type, body):
            response.unsent = parts_of([head, *body])
        else:
            self.write(head, *cast("Sequence[bytes]", body))
        return response

    def write(self, *data: bytes) -> None:
        """Send more of the request. Nothing is copied."""
        if self._transport is None or self._lost:
            self.connection_lost(None)
        else:
            self._transport.writelines(data)

    async def drained(self, limit_s: float) -> bool:
        """Wait until the server has taken most of what was sent, or is gone. False: it takes nothing for `limit_s`."""
        if self.full is None:
            return True
        waiting = self.full
        done, _ = await asyncio.wait([waiting], timeout=limit_s)
        return bool(done)

    async def tunnel(self, request: bytes) -> None:
        """Ask a proxy for a way to the server. Raises Fault."""
        tunnel = self._reader = _Tunnel(self.loop)
        self.write(request)
        await tunnel.granted

    async def upgrade(self, tls: ssl.SSLContext, host: str) -> None:
        """Speak TLS with the server at the other end of the tunnel."""
        if self._transport is None or self._lost:
            raise ConnectionResetError
        self._reader = None
        self._transport = await self.loop.start_tls(self._transport, self, tls, server_hostname=host)

    def idle(self) -> None:
        """The answer was read to its end."""
        self._reader = None
        self._idle_since = self.loop.time()

    def abort(self) -> None:
        """Close it at once, unsent data included."""
        self._reader, self._lost = None, True
        if self._transport is not None:
            self._transport.abort()

    def pause(self, paused: bool) -> None:
        """Stop or go on reading."""
        if self._transport is not None and not self._lost:
            (self._transport.pause_reading if paused else self._transport.resume_reading)()

    # --- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """There is a connection."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes for the waiting response. When there is none, the server sent data without a request, so the connection
        is dropped.
        """
        if self._reader is None:
            self.abort()
        else:
            self._reader.feed(data)

    def pause_writing(self) -> None:
        """The transport holds enough unsent data."""
        self.full = self.full or self.loop.create_future()

    def resume_writing(self) -> None:
        """The transport has sent most of it. Also: it need not be waited for."""
        full, self.full = self.full, None
        if full is not None and not full.done():
            full.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._lost = True
        self.resume_writing()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.lost()


class _Tunnel:
    """Waits for a proxy's answer to CONNECT."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.granted: asyncio.Future[None] = loop.create_future()
        self._data = b""

    def feed(self, data: bytes) -> None:
        """Bytes of the proxy's answer."""
        self._data += data
        head, ended, rest = self._data.partition(b"\r\n\r\n")
        if self.granted.done() or (not ended and len(head) <= MAX_HEAD_BYTES):
            return
        status = head.split(b"\r\n")[0].split(b" ", 2)
        kind: FaultKind = "final"
        if status[0].startswith(b"HTTP/1.") and len(status) > 1 and status[1].startswith(b"2") and not rest:
            self.granted.set_result(None)
        else:
            said = plain(b" ".join(status[1:])[:200].decode("utf-8", "replace"))
            if said.startswith("5"):
                kind = "busy"
            self.granted.set_exception(Fault(kind, f"no connection: the proxy says {said or 'nothing of use'}"))

    def lost(self) -> None:
        """The proxy closed the connection."""
        if not self.granted.done():
            self.granted.set_exception(Fault("busy", "no connection: the proxy closed it"))


class Response:
    """The answer to one request. `headers` have lower-case names; a repeated header is joined with commas.

    A connection uses one object, and its parser, for all its answers, one after the other: `begin` makes it new.
    """

    def __init__(self, connection: Connection, patience: Patience) -> None:
        self._connection = connection
        self._parts: list[bytes] = []
        self.on_body = self._parts.append
        self.begin(patience)
        self._parser = HttpResponseParser(self)

    def begin(self, patience: Patience, on_close: Callable[[Connection], None] | None = None) -> None:
        """The answer to the next request. `on_close` gets the connection when it may be used again."""
        self.status, self.reason = 0, ""
        self.headers: dict[str, str] = {}
        #: The parts of a request with files that are still to be sent; None: all are sent.
        self.unsent: Iterator[bytes] | None = None
        self._on_close = on_close
        self._patience = patience
        self._heard = self._headers = self._size = 0
        self._framing = 0  # bytes since the last one of the body
        self._end: int | None = None  # how many of the parts are the rest of the body, once it is complete
        #: Whether status and headers are there.
        self.has_head = False
        self._in_head = self._told_head = self._keeps = self._began = False
        self._fault: Fault | None = None
        self._news: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the wait for news
        self._late: asyncio.TimerHandle | None = None
        self._parts.clear()

    @property
    def unheard(self) -> bool:
        """Whether the connection was lost before the first byte."""
        return self._heard == 0 and self._fault is not None and self._fault.kind == "busy"

    @property
    def ended(self) -> bool:
        """Whether it was read to its end."""
        return self._end is not None and not self._parts

    @property
    def coding(self) -> str:
        """The content coding of the body, which is never asked for; "" where there is none."""
        coding = plain(self.headers.get("content-encoding", "")).strip().lower()[:40]
        return "" if coding == "identity" else coding

    async def sent(self) -> None:
        """Send what is unsent of the request. It stops when the server answers before that, or is gone: what it says is
        in the head. Raises Fault.
        """
        if self.unsent is None:
            return
        for part in self.unsent:
            if self.has_head or self._fault is not None:
                return
            self._connection.write(part)
            if not await self._connection.drained(self._patience.silence_s):
                self._fail("silent", f"a server that reads nothing of the request for {self._patience.silence_s:g} s")
                return
        self.unsent = None

    def news(self) -> asyncio.Future[None]:
        """Wait for the head, `silence_s` in all, and `head_s` from the first byte of a head to its end. Behind it: for
        a byte of the body or for its end. Framing is not part of the body and does not extend the wait. Raises Fault.
        """
        if self._fault is not None:
            raise self._fault
        loop, limit_s = self._connection.loop, self._patience.silence_s
        self._timer = loop.call_later(limit_s, self._silent, limit_s)
        self._news = loop.create_future()
        return self._news

    async def read(self) -> bytes:
        """The data of the body that has arrived, at least one byte; no bytes at its end. Raises Fault."""
        while not self._parts:
            if self._end is not None:
                return b""
            await self.news()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        if self._size > READ_AHEAD_BYTES:
            self._connection.pause(False)
        self._parts.clear()
        self._size = 0
        if self._end is not None:
            self._end = 0
        return data

    def close(self) -> None:
        """Give the connection back if the answer was read to its end. Otherwise close it."""
        connection = self._connection
        for timer in (self._timer, self._late):
            if timer is not None:
                timer.cancel()
        if self._end is not None and self._keeps and self._fault is None and self.unsent is None:
            connection.idle()
            if self._on_close is not None:
                self._on_close(connection)
        else:
            connection.abort()

    def _silent(self, limit_s: float) -> None:
        what = "no end of the answer's head" if self._heard and not self.has_head else "nothing"
        self._fail("silent", f"{what} for {limit_s:g} s")

    def _watch_head(self) -> None:
        """End the wait for the rest of a head that comes too slowly. Most heads come in one piece."""
        late, self._late = self._late, None
        if self._in_head:
            limit_s = self._patience.head_s
            self._late = late or self._connection.loop.call_later(limit_s, self._silent, limit_s)
        elif late is not None:
            late.cancel()

    def _fail(self, kind: FaultKind, message: str, advice: str | None = None) -> None:
        self._fault = self._fault or Fault(kind, message, suggestion=ADVICE["silent"] if kind == "silent" else advice)
        self._connection.resume_writing()
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            if self._timer is not None:
                self._timer.cancel()
            if not news.done():
                news.set_result(None)

    # --- from the connection

    def feed(self, data: bytes) -> None:
        """Bytes of the answer."""
        self._heard += len(data)
        parts = self._parts
        known = len(parts)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self._keeps = False
            if self._end is None:
                self._fail("broken", "an answer that is no HTTP", ADVICE["page"])
        complete = self._end is not None
        if complete:
            del parts[self._end :]  # of another answer
        new = sum(map(len, parts[known:]))
        if new:
            self._began = True
            self._size += new
            self._framing = 0
            if self._size > READ_AHEAD_BYTES:
                self._connection.pause(True)
        if not self.has_head:
            self._watch_head()
            if self._heard > MAX_HEAD_BYTES:
                self._fail("broken", f"an answer whose head is larger than {MAX_HEAD_BYTES} bytes")
            return
        if not complete:
            self._bound(0 if new else len(data))
        if parts or complete or not self._told_head:
            self._told_head = True
            self._tell()

    def _bound(self, framing: int) -> None:
        """Bound what comes around a body. So many bytes more have come without one of the body."""
        self._framing += framing
        if self._framing > MAX_FRAMING_BYTES:
            self._fail("broken", f"{MAX_FRAMING_BYTES} bytes of chunk extensions or trailers without a body")
        if self._heard > MAX_WIRE_BYTES:
            self._fail("final", f"an answer of more than {MAX_WIRE_BYTES} bytes on the wire")

    def lost(self) -> None:
        """The connection is over. A body without a length is complete; any other open answer fails."""
        self._keeps = False
        if self._end is not None:
            return
        if self.has_head and "content-length" not in self.headers and "transfer-encoding" not in self.headers:
            self._end = len(self._parts)
            self._tell()
        elif self._began:
            self._fail("broken", "half an answer: the connection was lost", ADVICE["cut off"])
        else:
            self._fail("busy", "nothing: the connection was lost before an answer", ADVICE["closed"])

    # --- from the parser

    def on_message_begin(self) -> None:
        """An answer begins. After a second answer the connection is not kept."""
        self._in_head = True
        if self._end is not None:
            self._keeps = False

    def on_status(self, status: bytes) -> None:
        """The reason phrase."""
        self.reason += status.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        if self.has_head or self._fault is not None:
            return
        self._headers += 1
        if self._headers > MAX_HEADERS:
            self._fail("broken", f"an answer with more than {MAX_HEADERS} headers")
            return
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        """The headers are complete. The body follows; after a "go on" answer, the real answer follows."""
        if self.has_head or self._fault is not None:
            return
        status = self._parser.get_status_code()
        self._in_head = False
        if status < 200:
            self.headers, self.reason = {}, ""
            return
        self.status, self.has_head = status, True
        self._keeps = self._parser.should_keep_alive()
        if self._late is not None:
            self._watch_head()
        if self._connection.full is not None:
            self._connection.resume_writing()  # `sent` need not wait: the server may read no more of the request

    def on_message_complete(self) -> None:
        """The end."""
        if self.has_head and self._end is None:
            self._end = len(self._parts)


# --- files in a request -----------------------------------------------------------------------------------------------


def parts_of(pieces: Body) -> Iterator[bytes]:
    """The body in parts, in order. Raises Fault `final` when a file is not as it was."""
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
        else:
            yield from _file_parts(piece)


def _file_parts(file: FileText) -> Iterator[bytes]:
    try:
        descriptor = os.open(file.path, _FLAGS)
    except OSError as error:
        raise Fault("final", f"a file of the conversation cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
            raise Fault("final", "a file of the conversation has changed")
        buffer = memoryview(bytearray(min(_READ_BYTES, file.size)))
        left = file.size
        while left:
            wanted = min(_READ_BYTES, left)
            _fill(descriptor, buffer[:wanted])
            left -= wanted
            yield b2a_base64(buffer[:wanted], newline=False)
    except OSError as error:
        raise Fault("final", f"a file of the conversation cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _fill(descriptor: int, buffer: memoryview) -> None:
    while buffer:
        count = os.readv(descriptor, [buffer])
        if not count:
            raise Fault("final", "a file of the conversation has become shorter")
        buffer = buffer[count:]
