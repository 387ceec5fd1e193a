"""A server at the other end of a descriptor: requests out, answers in. The SDK's session speaks through it.

`Stdio` is one of the SDK's dispatchers (mcp.shared.dispatcher). It takes the place of the SDK's own, which has no
bounds, and which costs more tasks and copies for each message.

Source: docs/design/tools.md section 11.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import anyio
import anyio.abc
from mcp.shared.dispatcher import CallOptions, OnNotify, OnNotifyIntercept, OnRequest, ProgressFnT, run_notify_intercept
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import MessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, REQUEST_TIMEOUT
from pydantic import ValidationError

from goondan.features.mcp.jail.protocol import bounds
from goondan.schemas.worker.worker_frames import SERVER_LEFT
from goondan.toolhost.socket_end import SocketEnd

#: Bytes that a server has not read yet. 64 calls of the largest arguments are more; a server that reads none of them
#: has hung.
MAX_UNREAD: Final = 128 << 20
#: The reason when it is this side that has no more use for the connection.
CLOSED_HERE: Final = "the connection was closed"
#: Requests of the server that are worked on at a time. Each may have asked a person, and waits.
MAX_ASKED: Final = 64

_CONTEXT: Final = TransportContext(kind="stdio", can_send_request=False)


class _Open(NamedTuple):
    """A request of ours that has no answer yet."""

    future: asyncio.Future[dict[str, Any]]
    on_progress: ProgressFnT | None


class _Incoming:
    """What a handler of the SDK is told about a message of the server: mcp.shared.dispatcher.DispatchContext."""

    def __init__(self, request_id: bounds.Id | None) -> None:
        self._request_id = request_id
        self.cancel_requested = anyio.Event()

    @property
    def transport(self) -> TransportContext:
        return _CONTEXT

    @property
    def can_send_request(self) -> bool:
        return False

    @property
    def request_id(self) -> bounds.Id | None:
        return self._request_id

    @property
    def message_metadata(self) -> MessageMetadata:
        return None

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        raise NoBackChannelError(method)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """A client has nothing to tell about a request of the server."""

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """The same."""


class Stdio:
    """One connection. Use from its loop's thread only."""

    def __init__(
        self,
        server: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        on_noise: Callable[[str], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`server` becomes ours. `on_noise` gets a line for the log. `on_end` gets the reason, once, when the server is
        of no use any more: it has closed its output, or broke a rule.
        """
        self._socket = server
        self._loop = loop
        self._on_noise = on_noise
        self._on_end = on_end
        self._lines = bounds.Lines(loop.time())
        self._next_id = 0
        self._open: dict[bounds.Id, _Open] = {}
        self._asked: dict[bounds.Id, tuple[asyncio.Task[None], _Incoming]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._end = SocketEnd(server, loop, on_data=self._heard, on_left=lambda: self.close(SERVER_LEFT))
        #: Why the server is of no use any more. None: it is.
        self.ended: str | None = None
        self._over = asyncio.Event()
        self._on_request: OnRequest | None = None
        self._on_notify: OnNotify | None = None
        self._intercept: OnNotifyIntercept | None = None

    # --- the SDK's dispatcher

    async def run(
        self,
        on_request: OnRequest,
        on_notify: OnNotify,
        on_notify_intercept: OnNotifyIntercept | None = None,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Read until the server ends, or this is cancelled."""
        self._on_request, self._on_notify, self._intercept = on_request, on_notify, on_notify_intercept
        self._end.read()
        task_status.started()
        try:
            await self._over.wait()
        finally:
            self.close(CLOSED_HERE)
            for task in list(self._tasks):
                task.cancel()

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        """Ask, and wait for the answer. Raises MCPError: the server's error, GONE, REQUEST_TIMEOUT."""
        opts = opts or {}
        key, waiting = self._send(method, params, opts)
        timeout = opts.get("timeout")
        try:
            if timeout is None:
                return await waiting.future
            async with asyncio.timeout(timeout):
                return await waiting.future
        except TimeoutError:
            self._give_up(key, opts, f"no answer within {timeout:g} s")
            raise MCPError(
                code=REQUEST_TIMEOUT, message=f"the server did not answer {method} in {timeout:g} s"
            ) from None
        except asyncio.CancelledError:
            self._give_up(key, opts, "the caller gave up")
            raise
        finally:
            self._open.pop(key, None)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """Tell the server something."""
        self._tell(method, params)

    # --- requests of ours

    def _send(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions) -> tuple[bounds.Id, _Open]:
        if self.ended is not None:
            raise MCPError(code=bounds.GONE, message=self.ended)
        key: bounds.Id | None = opts.get("request_id")
        if key is None:
            self._next_id += 1
            key = self._next_id
        if key in self._open:
            raise ValueError(f"request id {key!r} is open")
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": key, "method": method}
        on_progress = opts.get("on_progress")
        if on_progress is not None:
            params = dict(params or {})
            params["_meta"] = {**(params.get("_meta") or {}), "progressToken": key}
        if params:
            message["params"] = params
        waiting = self._open[key] = _Open(self._loop.create_future(), on_progress)
        self._write(bounds.encode(message))
        return key, waiting

    def _give_up(self, key: bounds.Id, opts: CallOptions, reason: str) -> None:
        if opts.get("cancel_on_abandon", True):
            self._tell("notifications/cancelled", {"requestId": key, "reason": reason})

    def _tell(self, method: str, params: Mapping[str, Any] | None) -> None:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        if params:
            message["params"] = params
        self._write(bounds.encode(message))

    # --- the descriptor

    def _write(self, data: bytes) -> None:
        if self.ended is not None:
            return
        self._end.put(data)
        if self._end.unwritten > MAX_UNREAD:
            self.close(f"it left {MAX_UNREAD >> 20} MiB unread")
        elif not self._end.is_blocked:
            self._end.flush()

    def _heard(self, data: bytes) -> None:
        try:
            for message in self._lines.feed(data, self._loop.time()):
                self._take(message)
        except bounds.Flood as flood:
            self.close(str(flood))

    def hang_up(self) -> None:
        """Close the server's standard input: it is to end. What it still says is read."""
        if not self._end.closed:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def close(self, reason: str) -> None:
        """End the connection: every open request fails with `reason`. Safe to call again."""
        if self.ended is not None:
            return
        self.ended = f"the server is gone: {reason}"
        self._on_end(reason)  # before the server can notice: its end takes this process along, with all it has to say
        self._end.close()
        for waiting in self._open.values():
            if not waiting.future.done():
                waiting.future.set_exception(MCPError(code=bounds.GONE, message=self.ended))
        self._over.set()

    # --- messages of the server

    def _take(self, message: bounds.Message) -> None:
        if type(message) is bounds.Answered:
            self._answered(message)
        elif type(message) is bounds.Told:
            self._told(message)
        elif type(message) is bounds.Asked:
            self._ask(message)
        elif type(message) is bounds.Noise:
            self._on_noise(f"on its standard output ({message.reason}): {message.text}")

    def _answered(self, message: bounds.Answered) -> None:
        key = message.id
        if key is None and len(self._open) == 1:
            key = next(iter(self._open))  # of a request that the server could not read, and there is only one
        # 1 and True are one key, and so are 1 and 1.0; parse lets neither True nor 1.0 be an id.
        waiting = None if key is None else self._open.get(key)
        if waiting is None or waiting.future.done():
            self._on_noise(f"an answer to nobody's request {bounds.line(str(message.id), 80)!r} was dropped")
            return
        if message.error is None:
            waiting.future.set_result(message.result or {})
            return
        code, text = message.error.get("code"), message.error.get("message")
        data = message.error.get("data")
        error = MCPError(
            code if type(code) is int else INTERNAL_ERROR,
            bounds.text(text, bounds.MAX_DESCRIPTION) or "no message",
            data,
        )
        waiting.future.set_exception(error)

    def _told(self, message: bounds.Told) -> None:
        params = message.params
        if message.method == "notifications/progress":
            self._progress(params or {})
        elif message.method == "notifications/cancelled":
            self._cancel(params or {})
        if run_notify_intercept(self._intercept, message.method, params):
            return
        if self._on_notify is not None and message.method not in _OURS:
            self._spawn(_tell(self._on_notify, message.method, params))

    def _progress(self, params: dict[str, Any]) -> None:
        token, done = params.get("progressToken"), bounds.number(params.get("progress"))
        waiting = self._open.get(token) if type(token) is int or type(token) is str else None
        if waiting is None or waiting.on_progress is None or done is None:
            return
        text = params.get("message")
        total = bounds.number(params.get("total"))
        self._spawn(_report(waiting.on_progress, done, total, text if type(text) is str else None))

    def _cancel(self, params: dict[str, Any]) -> None:
        """The server takes a request of its own back."""
        key = params.get("requestId")
        entry = self._asked.get(key) if type(key) is int or type(key) is str else None
        if entry is not None:
            task, incoming = entry
            incoming.cancel_requested.set()
            task.cancel()

    def _ask(self, message: bounds.Asked) -> None:
        if message.id in self._asked or len(self._asked) >= MAX_ASKED:
            reason = "this id is in use" if message.id in self._asked else f"{MAX_ASKED} requests are open"
            self._reply(message.id, error={"code": INTERNAL_ERROR, "message": reason})
            return
        incoming = _Incoming(message.id)
        task = self._spawn(self._handle(message, incoming))
        self._asked[message.id] = (task, incoming)
        task.add_done_callback(lambda _: self._asked.pop(message.id, None))

    async def _handle(self, message: bounds.Asked, incoming: _Incoming) -> None:
        assert self._on_request is not None
        try:
            result = await self._on_request(incoming, message.method, message.params)
        except MCPError as error:
            answer: dict[str, Any] = {"code": error.code, "message": error.message}
            if error.data is not None:
                answer["data"] = error.data
            self._reply(message.id, error=answer)
        except ValidationError:
            self._reply(message.id, error={"code": INVALID_PARAMS, "message": "Invalid request parameters"})
        else:
            self._reply(message.id, result=result)

    def _reply(self, key: bounds.Id, **answer: Any) -> None:
        self._write(bounds.encode({"jsonrpc": "2.0", "id": key, **answer}))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """A handler that fails costs one message, and not the connection."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._on_noise(f"a message could not be handled: {type(task.exception()).__name__}")


#: Nobody but this module and the session's own tables takes these, and progress may come often.
_OURS: Final = frozenset({"notifications/progress", "notifications/cancelled"})


async def _report(on_progress: ProgressFnT, done: float, total: float | None, text: str | None) -> None:
    await on_progress(done, total, text)


async def _tell(on_notify: OnNotify, method: str, params: dict[str, Any] | None) -> None:
    await on_notify(_Incoming(None), method, params)
