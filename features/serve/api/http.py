"""HTTP/1.1 of a door: uvicorn with httptools, and bounds on what a connection may cost.

Every connection costs memory, and whoever opens one may be hostile. So

- there are so many at most, and one that has not shown a token gives way to a newer one: who opens thousands pushes
  out others of its kind only;
- the head of a request has some seconds, its bytes are bounded, and a body that nobody has read ends its
  connection;
- a reader that does not read is cut when the buffer of its connection has been full for some time.

httptools takes half of the processor time of h11 for a request. Its parser has no bound of its own, so bytes that are
no body are counted; and it hands on all requests of a packet, so it gets no more before these are answered. It refuses
what two readers may understand differently: bare line feeds, folded lines, Content-Length with Transfer-Encoding.

Source: RFC 9112; docs/commands.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade
from msgspec import Struct
from msgspec.structs import replace
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

#: How much may wait to be written on a connection in the system before its writers wait (bytes).
SEND_BUFFER: Final = 128 << 10
#: How much is read at once (bytes): a quarter of a MiB comes at once, and may be chunks of one byte.
PART: Final = 8 << 10
#: Requests of one packet that wait for the answer to the first.
MAX_QUEUED: Final = 64
#: Descriptors that are left for everything but connections.
OWN_FILES: Final = 256


class Bounds(Struct, frozen=True):
    """What a door spends on its callers."""

    #: Connections at once.
    connections: int = 2048
    #: Those of them that have not shown a token yet.
    strangers: int = 256
    #: Requests of one token at once; a stream is one.
    open: int = 1280
    #: How long the head of a request may take (seconds); a client on the same machine needs milliseconds.
    head_s: float = 5.0
    #: How long its body may take (seconds): 9 MiB on a busy machine take less than one.
    body_s: float = 30.0
    #: How long a connection may be idle between two requests (seconds).
    idle_s: int = 60
    #: How long a reader may leave its buffer full (seconds).
    write_s: float = 30.0
    #: The longest head of a request, and a PART more (bytes).
    head: int = 32 << 10
    #: Bodies that are in memory at once (bytes).
    bodies: int = 128 << 20
    #: How long requests under way have when the server ends (seconds).
    goodbye_s: int = 3


class Room:
    """The connections of one server: how many there are, and which are strangers'."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._count = 0
        self._strangers: dict[Connection, None] = {}  # the oldest first

    def enter(self, connection: Connection) -> bool:
        """Whether there is room for one more. The oldest stranger goes if there are too many."""
        if self._count >= self.bounds.connections and not self._strangers:
            return False
        if self._count >= self.bounds.connections or len(self._strangers) >= self.bounds.strangers:
            oldest = next(iter(self._strangers))
            self.leave(oldest)
            oldest.transport.abort()
        self._count += 1
        self._strangers[connection] = None
        return True

    def let_in(self, connection: Connection) -> None:
        """It has shown a token."""
        self._strangers.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """It is gone."""
        if connection.inside:
            connection.inside = False
            self._count -= 1
            self._strangers.pop(connection, None)


class _Flow(FlowControl):
    """Reads no more while what has come is not read yet."""

    held = False

    def resume_reading(self) -> None:
        if self.held:
            self.read_paused = False
        else:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """One connection. It is closed when the head of a request does not come, or nobody reads what is sent."""

    cycle: Any

    def __init__(self, room: Room, **given: Any) -> None:
        super().__init__(**given)
        #: Where it is counted.
        self.room = room
        self._bounds = room.bounds
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.parser.set_dangerous_leniencies(lenient_data_after_close=False)
        self._spare = self._bounds.head  # bytes that may come and are no body: of a head, sizes of chunks, trailers
        self._is_deaf = False  # what comes is no request any more, and the answer to the last one ends the connection
        self._later = b""  # what has come and is not read yet
        #: It counts as one of the room's.
        self.inside = False
        #: What works on its request, or did on the last one.
        self.task: asyncio.Task[Any] | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        transport.set_write_buffer_limits(0)  # what waits here has its time, also when the connection ends
        self.inside = self.room.enter(self)
        if self.inside:
            self._limit("head", self._bounds.head_s)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._later += data
        if len(self._later) == len(data):  # else it goes on by itself
            self._go_on()

    def _go_on(self) -> None:
        """Read a part of what has come. Between two parts others have their turn, and the gate looks at the head."""
        if self.transport.is_closing() or self._is_deaf or not self._later:
            return
        cycle = self.cycle
        if cycle is not None and not (cycle.response_complete or cycle.more_body):  # the answer comes first
            self.flow.held = True
            self.transport.pause_reading()
            return
        part, self._later = self._later[:PART], self._later[PART:]
        self.flow.held = bool(self._later)
        self._spare -= len(part)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(part)
        except HttpParserError:
            self.send_400_response("This is no request of HTTP/1.1.")
        except HttpParserUpgrade:
            pass  # the gate refuses it
        if self._spare < 0:
            self.send_400_response("Too many bytes that are no body.")
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._limit("head", self._bounds.head_s)
        elif self._timers:
            self._free("head")
        if self._later:
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)
        elif not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_QUEUED:
            raise ValueError(f"more than {MAX_QUEUED} requests at once")
        self._spare = self._bounds.head
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        path, _, query = self.url.partition(b"?")
        if not path.startswith(b"/") or b"#" in self.url:
            raise ValueError("a request names a path")
        scope, parser, before, begin = self.scope, self.parser, self.cycle, self.app
        scope["method"], scope["http_version"] = parser.get_method().decode("ascii"), parser.get_http_version()
        name = path.decode("ascii")
        scope["path"], scope["raw_path"], scope["query_string"] = unquote(name) if "%" in name else name, path, query
        self.headers = []  # for trailers, which nobody reads
        self.cycle = begin(self)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, begin)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, begin))

    def _start_asgi_task(self, cycle: Any, _app: Any) -> None:
        self.task = cycle.task = task = self.loop.create_task(cycle.run_asgi(None))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def on_body(self, body: bytes) -> None:
        self._spare = min(self._spare + 8 * len(body), self._bounds.head)
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        if self.transport.is_closing():
            return
        if self._between or not (self.pipeline or self.cycle.response_started or not self.cycle.more_body):
            super().send_400_response(msg)
        else:  # requests before it are answered first
            self.cycle.keep_alive, self._is_deaf = False, True
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit("write", self._bounds.write_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._free("write")

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if self._later:
            asyncio.get_running_loop().call_soon(self._go_on)
        # Nobody wants the rest of a body whose request is answered. To read it takes time: uvloop reads 8 MiB before
        # anything else has its turn.
        if is_last and self.cycle.more_body and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        for what in [*self._timers]:
            self._free(what)
        self.room.leave(self)
        super().connection_lost(exc)
        if self.task is not None and not self._between:  # else it only ends what nobody waits for
            self.task.cancel()

    @property
    def _between(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _limit(self, what: str, seconds: float) -> None:
        if what not in self._timers:
            self._timers[what] = asyncio.get_running_loop().call_later(seconds, self.transport.abort)

    def _free(self, what: str) -> None:
        timer = self._timers.pop(what, None)
        if timer is not None:
            timer.cancel()


class HttpService:
    """HTTP on a socket that listens. `begin` makes what answers the request that a connection has read the head of."""

    def __init__(
        self, begin: Callable[[Connection], RequestResponseCycle], listening: socket.socket, bounds: Bounds
    ) -> None:
        self._listening = listening
        bounds = _within_descriptors(bounds)
        protocol: Any = partial(Connection, Room(bounds))
        spoken: dict[str, Any] = {"http": protocol, "interface": "asgi3", "ws": "none", "lifespan": "off"}
        unsaid: dict[str, Any] = dict.fromkeys(("access_log", "server_header", "date_header", "proxy_headers"), False)
        times: dict[str, Any] = {"timeout_keep_alive": bounds.idle_s, "timeout_graceful_shutdown": bounds.goodbye_s}
        self._uvicorn = uvicorn.Server(uvicorn.Config(begin, log_config=None, **spoken, **unsaid, **times))
        # Signals are the command's.
        self._uvicorn.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]

    async def serve(self) -> None:
        """Serve until `stop`."""
        await self._uvicorn.serve(sockets=[self._listening])

    def stop(self, *, now: bool = False) -> None:
        """End: what is under way has some seconds, or, with `now`, none."""
        self._uvicorn.should_exit = True
        for server in getattr(self._uvicorn, "servers", ()):  # it has them when it serves
            server.close()
        self._uvicorn.force_exit = self._uvicorn.force_exit or now


def _within_descriptors(bounds: Bounds) -> Bounds:
    """The bounds as the system's limit of descriptors allows them. It is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = bounds.connections + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        room = max(1, soft - OWN_FILES)
        return replace(bounds, connections=min(bounds.connections, room), strangers=min(bounds.strangers, room))
    return bounds


def listen(port: int, address: str = "127.0.0.1", backlog: int = 256) -> socket.socket:
    """A socket that listens at this address, and nowhere else. Raises OSError, ValueError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        # Connections have both from it. Without this an answer in two parts waits 40 ms for an acknowledgement.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind((address, port))
        listening.listen(backlog)
    except (OSError, OverflowError):
        listening.close()
        raise
    return listening
