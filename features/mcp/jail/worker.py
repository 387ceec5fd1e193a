"""The MCP worker as a process: it speaks with the tool host on its channel, and with one server.

It starts as a fork of the SDK template (template.py), behind the walls that the template has put up. Everything that it
needs is imported before.

The channel carries frames of schemas/WORKER.md, both ways. The tool host is trusted. A frame that is none ends the
worker. What a server, or a library of ours, says of the server's secrets ends here: everything that the worker says
passes `Channel.send`.

Source: docs/design/tools.md section 11; schemas/WORKER.md section 10.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import mcp_types as types
import msgspec
import uvloop
from mcp.shared.dispatcher import Dispatcher

from goondan.features.mcp.jail import calling, stdio
from goondan.features.mcp.jail.client import Client
from goondan.features.mcp.jail.http import Http
from goondan.features.mcp.jail.login import Login
from goondan.features.mcp.jail.protocol import bounds
from goondan.features.mcp.jail.protocol.results import Failure, error_of
from goondan.features.mcp.wire import ServerLogin
from goondan.schemas.text import redaction
from goondan.schemas.wire import codec, errors
from goondan.schemas.worker import worker_frames
from goondan.schemas.worker.logins import ServerOp, ServerReply, ServerWish
from goondan.schemas.worker.servers import NewsKind, ServerInit, ServerListing
from goondan.toolhost.calls.untrusted import Allowance
from goondan.toolhost.inside.wire import Frames, framed
from goondan.toolhost.socket_end import SocketEnd

#: Lines of the log at once and per second after that; what is over is dropped and counted. The host ends a worker that
#: sends 20,000 and 2,000.
LOG_BURST: Final = 1_000
LOG_PER_S: Final = 100
#: News of one server, at once and per second after that. Each makes agents ask for the lists again.
NEWS_BURST: Final = 50
NEWS_PER_S: Final = 5
#: How long a server has to end after its standard input was closed (seconds). Then the host sends signals.
LEAVE_S: Final = 5.0
#: How long the last frames may take to be written (seconds).
DRAIN_S: Final = 2.0
T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(worker_frames.HostFrame).decode
_plain = msgspec.msgpack.Decoder().decode
#: The name of errors about logins.
LOGIN_ERROR: Final = "OAuthError"
#: The fields of frames that have words of a server, and in two of them a field that has ours.
_THEIRS: Final = {"message": "", "output": "", "value": "", "uri": "", "error": "code", "listing": "era"}


def serve(channel: socket.socket, server: socket.socket | None, connector: socket.socket | None) -> int:
    """Be the worker of one server until the host is gone or says `exit`; the exit status of the process.

    `channel`: a stream socket to the host (schemas/WORKER.md). `server`: a stream socket that is the standard input and
    output of a server. `connector`: where connections for a server at an URL are asked for (http.py). All become ours.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(channel, server, connector))


async def _serve(channel: socket.socket, server: socket.socket | None, connector: socket.socket | None) -> int:
    worker = Worker(channel, server, connector)
    _hear_loggers(worker)
    return await worker.run()


class Worker:
    """One worker. Use from the loop's thread only."""

    def __init__(self, channel: socket.socket, server: socket.socket | None, connector: socket.socket | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = server
        self._connector = connector
        self._over = asyncio.Event()
        self._channel = Channel(channel, self._loop, on_frame=self._frame, on_end=self._over.set)
        self._tokens = TokenKeeper(self._channel.send, self._loop)
        self._status = 0
        #: The prefix of the server.
        self._name = ""
        self._stdio: stdio.Stdio | None = None
        self._client: Client | None = None
        self._calls: calling.Calls | None = None
        #: Calls that came before the server was connected.
        self._early: list[worker_frames.HostFrame] = []
        self._ready = False
        self._leaving = False
        #: The host was told that the server cannot be used.
        self._given_up = False
        self._living: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        now = self._loop.time()
        self._lines = Allowance(LOG_BURST, LOG_PER_S, now)
        self._dropped = 0
        self._told = Allowance(NEWS_BURST, NEWS_PER_S, now)
        self._untold: set[tuple[NewsKind, str | None]] = set()

    async def run(self) -> int:
        """Until the end; the exit status."""
        await self._over.wait()
        if self._living is not None:
            self._living.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._living
        await self._channel.drain(DRAIN_S)
        return self._status

    # --- frames of the host

    def _frame(self, frame: worker_frames.HostFrame) -> None:
        if isinstance(frame, worker_frames.Init):
            self._living = self._loop.create_task(self._live(frame))
        elif isinstance(frame, worker_frames.Exit):
            self._leave()
        elif isinstance(frame, worker_frames.Answer) and not frame.call_id:
            self._tokens.answered(frame)
        elif not self._ready:
            self._early.append(frame)
        else:
            self._work(frame)

    def _work(self, frame: worker_frames.HostFrame) -> None:
        assert self._calls is not None
        if isinstance(frame, worker_frames.Call):
            self._calls.start(frame)
        elif isinstance(frame, worker_frames.Cancel):
            self._calls.cancel(frame.call_id)
        elif isinstance(frame, worker_frames.Answer):
            self._calls.answered(frame)
        elif isinstance(frame, worker_frames.List):
            self._spawn(self._list(frame.list_id))

    def _leave(self) -> None:
        """No more calls: close the server's standard input, and wait for its end."""
        self._leaving = True
        if self._stdio is not None and self._stdio.ended is None:
            self._stdio.hang_up()
            self._loop.call_later(LEAVE_S, self._over.set)
        else:
            self._over.set()

    # --- the server

    async def _live(self, init: worker_frames.Init) -> None:
        """From `init` to the end of the server."""
        asked, self._name = init.server, init.tool
        if init.protocol != worker_frames.WORKER_PROTOCOL or asked is None:
            self._fail_to_load(
                f"this worker speaks protocol {worker_frames.WORKER_PROTOCOL}, and with MCP servers only"
            )
            return
        if asked.secrets:
            self._channel.hide(asked.secrets)
        try:
            self._client = client = Client(asked, self)
            self._calls = calling.Calls(client, self._channel.send, init.output_limit, asked.idle_ms)
            if asked.transport == "http":
                await self._over_http(asked, client)
            else:
                await client.run(self._descriptor, self._connected)
        except Exception as error:
            if self._ready:
                self.log("error", f"the connection with the server has failed: {error_of(error).message}")
                self._end(1)
            else:
                self._fail_to_load(error_of(error).message)

    @asynccontextmanager
    async def _descriptor(self) -> AsyncIterator[Dispatcher[Any]]:
        if self._server is None:
            raise Failure("E_MCP_CONNECT", "the server's descriptor is missing")
        self._stdio = stdio.Stdio(
            self._server, self._loop, on_noise=partial(self.log, "warn"), on_end=self._server_gone
        )
        yield self._stdio

    async def _over_http(self, asked: ServerInit, client: Client) -> None:
        """Try the ways to the server, the newest first."""
        if self._connector is None or asked.endpoint is None:
            raise Failure("E_MCP_CONNECT", "the server's endpoint is missing")
        how = msgspec.convert(asked.login or {}, ServerLogin)
        has_token = any(name.lower() == "authorization" for name in asked.headers)
        wanted = how.enabled and not has_token
        login = Login(asked.endpoint, how, self._tokens, client) if wanted else None
        gone = partial(self._server_gone, "it knows its session no more")
        http = Http(asked.endpoint, asked.headers, self._connector, self._loop, login, gone)
        first: Exception | None = None
        try:
            for way in http.ways():
                try:
                    await client.run(way, self._connected)
                    return
                except Exception as error:
                    if self._ready:
                        raise
                    first = first or http.explained(error)
                    if not http.elsewhere:
                        raise first from None
            assert first is not None
            raise first
        finally:
            await http.close()

    def _connected(self, listing: ServerListing) -> None:
        self._ready = True
        self._channel.send(worker_frames.Ready(protocol=worker_frames.WORKER_PROTOCOL, exports=[], listing=listing))
        early, self._early = self._early, []
        for frame in early:
            self._work(frame)

    def _fail_to_load(self, message: str) -> None:
        if not self._given_up:
            self._given_up = True
            self._channel.send(worker_frames.LoadFailed(message=bounds.line(message, 2000)))
            self._channel.flush()
            self._end(1)

    def _server_gone(self, reason: str) -> None:
        if self._leaving:
            self._over.set()
        elif self._ready:
            self.log("error", f"the server is gone: {reason}")
            self._end(1)
        elif reason != stdio.CLOSED_HERE:  # else something has gone wrong before, and is told of
            self._fail_to_load(f"the server is gone: {reason}")

    def _end(self, status: int) -> None:
        """The worker is of no use any more. Calls that were open have their errors in this turn of the loop."""
        self._status = status
        self._loop.call_later(0.01, self._over.set)

    async def _list(self, list_id: int) -> None:
        assert self._client is not None
        try:
            listing = await self._client.look()
        except Exception as error:
            self._channel.send(worker_frames.Listed(list_id=list_id, error=error_of(error)))
        else:
            self._channel.send(worker_frames.Listed(list_id=list_id, listing=listing))

    # --- what the client tells and asks (client.Events)

    def changed(self, kind: NewsKind, uri: str | None = None) -> None:
        """Something of the server has changed. What comes too often is told once, later."""
        if (kind, uri) in self._untold:
            return
        if self._told.take(self._loop.time()):
            self._channel.send(worker_frames.News(kind=kind, uri=uri))
        elif len(self._untold) < NEWS_BURST:
            self._untold.add((kind, uri))
            self._loop.call_later(1.0, self._tell_late, kind, uri)

    def _tell_late(self, kind: NewsKind, uri: str | None) -> None:
        self._untold.discard((kind, uri))
        self.changed(kind, uri)

    def log(self, level: str, message: str) -> None:
        """A line for the log."""
        if not self._lines.take(self._loop.time()):
            self._dropped += 1
            return
        if self._dropped:
            self._channel.send(worker_frames.Log(level="warn", message=f"{self._dropped} lines were dropped"))
            self._dropped = 0
        self._channel.send(worker_frames.Log(level=level, message=bounds.line(message)))  # type: ignore[arg-type] # one of the four

    def login(self, message: str | None) -> None:
        """A person has to log in, as the process that holds tokens says, or (None) has come back."""
        error = None
        if message is not None:
            hint = f"Run `gdn auth login mcp:{self._name}`. The next step tries again."
            error = worker_frames.WorkerError(name=LOGIN_ERROR, message=message, code="E_OAUTH_LOGIN", suggestion=hint)
        self._channel.send(worker_frames.LoginNeeded(error=error))

    async def elicit(self, params: types.ElicitRequestParams) -> types.ElicitResult | types.ErrorData:
        """The server asks a person."""
        assert self._calls is not None
        return await _or_refused(self._calls.elicit(params))

    async def sample(self, params: types.CreateMessageRequestParams) -> types.CreateMessageResult | types.ErrorData:
        """The server asks a model."""
        assert self._calls is not None
        return await _or_refused(self._calls.sample(params))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _or_refused(answer: Awaitable[T]) -> T | types.ErrorData:
    try:
        return await answer
    except Failure as failure:
        return types.ErrorData(code=types.INVALID_REQUEST, message=str(failure))


class _Loggers(logging.Handler):
    """What the SDK logs, as lines of the worker's log: one line each, without tracebacks."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(logging.WARNING)
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:
            message = str(record.msg)
        error = record.exc_info[1] if record.exc_info else None
        self._worker.log("warn", message if error is None else f"{message} ({type(error).__name__})")


def _hear_loggers(worker: Worker) -> None:
    root = logging.getLogger()
    root.handlers[:] = [_Loggers(worker)]
    root.setLevel(logging.WARNING)


class TokenKeeper:
    """Asks the process that holds tokens, and gets its answers. Use from the loop's thread only."""

    def __init__(self, send: Callable[[worker_frames.WorkerFrame], None], loop: asyncio.AbstractEventLoop) -> None:
        self._send = send
        self._loop = loop
        self._numbers = 0
        self._open: dict[int, asyncio.Future[ServerReply]] = {}

    async def ask(self, op: ServerOp, *, document: str | None = None, url: str | None = None) -> ServerReply:
        """Ask, and wait for the answer. Raises Failure."""
        self._numbers += 1
        number = self._numbers
        waits = self._open[number] = self._loop.create_future()
        wish = ServerWish(op=op, server="", document=document, url=url)  # the host knows which server it is
        self._send(worker_frames.Ask(call_id="", ask_id=number, op="login", value=codec.to_raw(wish)))
        try:
            reply: ServerReply = await waits
            return reply
        finally:
            del self._open[number]

    def answered(self, answer: worker_frames.Answer) -> None:
        """An answer has come. One that nobody waits for is skipped."""
        waits = self._open.get(answer.ask_id)
        if waits is None or waits.done():
            return
        if answer.value is not None:
            try:
                waits.set_result(codec.from_raw(answer.value, ServerReply))
            except errors.GoondanError as error:
                waits.set_exception(Failure("E_OAUTH_UNAVAILABLE", error.info.message, name=LOGIN_ERROR))
        elif answer.error is not None:
            code = answer.error.code or "E_OAUTH_UNAVAILABLE"
            waits.set_exception(Failure(code, answer.error.message, name=LOGIN_ERROR))


class Channel(SocketEnd):
    """Use from the loop's thread only."""

    def __init__(
        self,
        channel: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        on_frame: Callable[[worker_frames.HostFrame], None],
        on_end: Callable[[], None],
    ) -> None:
        """`channel` becomes ours. `on_end` is called when the host has closed its end."""
        super().__init__(channel, loop, on_data=self._take, on_left=self._ended, on_broken=self._ended)
        self._on_frame = on_frame
        self._on_end = on_end
        self._frames = Frames()
        self._redact: redaction.Redactor | None = None
        self.read()

    def hide(self, secrets: Iterable[str]) -> None:
        """From now on `***` is sent in the place of each of these."""
        self._redact = redaction.Redactor(*secrets)

    def send(self, frame: worker_frames.WorkerFrame) -> None:
        """Queue a frame. Frames of one turn of the loop are written together."""
        body = _encode(frame)
        to_keeper = isinstance(frame, worker_frames.Ask) and frame.op == "login"  # it takes tokens there
        if self._redact is not None and not to_keeper:
            body = without(body, self._redact)
        self.put(framed(body))
        self.flush_soon()

    async def drain(self, seconds: float) -> None:
        """Wait until everything is written, but no longer than this."""
        end = self._loop.time() + seconds
        self.flush()
        while self.unwritten and self._loop.time() < end:
            await asyncio.sleep(0.005)

    def _take(self, data: bytes) -> None:
        try:
            bodies = self._frames.feed(data)
        except ValueError:
            self._ended()
            return
        for body in bodies:
            self._on_frame(_decode(body))

    def _ended(self) -> None:
        if not self.closed:
            self.close()
            self._on_end()


def without(body: bytes, redact: redaction.Redactor) -> bytes:
    """An encoded frame without secrets. A tool whose name has one is left out: it could not be called."""
    text = body.decode("utf-8", "replace")
    if redact(text) == text:
        return body  # what stands between two strings can make a hit of none, and never hides one
    frame: dict[str, Any] = _plain(body)
    for key in _THEIRS.keys() & frame.keys():
        shown = redaction.in_texts(frame[key], redact)
        if isinstance(shown, dict) and (ours := _THEIRS[key]) in shown:
            shown[ours] = frame[key][ours]
        if key == "listing" and shown is not None:
            both = zip(frame[key].get("tools", ()), shown.get("tools", ()), strict=True)
            shown["tools"] = [
                it for before, it in both if (before["export"], before["name"]) == (it["export"], it["name"])
            ]
        frame[key] = shown
    return _encode(frame)
