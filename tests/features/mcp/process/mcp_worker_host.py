"""The tool host's end of an MCP worker, and servers for its other end.

The worker is the real one; it runs in the loop of the test, over real sockets.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from goondan.features.mcp.jail.login import Keeper
from goondan.features.mcp.jail.worker import Worker
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.worker.logins import ServerWish
from goondan.schemas.worker.servers import ServerInit
from goondan.schemas.worker.worker_frames import (
    Answer,
    Ask,
    Call,
    Cancel,
    Exit,
    HostFrame,
    Init,
    List,
    Listed,
    LoadFailed,
    Log,
    LoginNeeded,
    News,
    Progress,
    Ready,
    Result,
    WorkerError,
    WorkerFrame,
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(WorkerFrame).decode

#: A server in the test's loop: it reads lines and writes lines until the worker hangs up.
Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Host:
    """Speaks the worker protocol with one worker, and keeps what it said."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[int]) -> None:
        self._reader, self._writer = reader, writer
        #: The worker. Its result is the exit status.
        self.task = task
        self.logs: list[Log] = []
        self.news: list[News] = []
        self.progress: list[Progress] = []
        self.logins: list[LoginNeeded] = []
        self.asks: asyncio.Queue[Ask] = asyncio.Queue()
        self._results: dict[str, asyncio.Future[Result]] = {}
        self._listed: dict[int, asyncio.Future[Listed]] = {}
        self.begun: asyncio.Future[Ready | LoadFailed] = asyncio.get_running_loop().create_future()
        #: Stands for the process that holds tokens.
        self.keeper: Keeper | None = None
        self._calls = 0
        self._told = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4), "little")
                self._take(decode(await self._reader.readexactly(size)))
        except asyncio.IncompleteReadError:
            pass

    def _take(self, frame: WorkerFrame) -> None:
        self._told.set()
        self._told = asyncio.Event()
        match frame:
            case Ready() | LoadFailed():
                self.begun.set_result(frame)
            case Result():
                self._results.setdefault(frame.call_id, asyncio.get_running_loop().create_future()).set_result(frame)
            case Listed():
                self._listed[frame.list_id].set_result(frame)
            case Log():
                self.logs.append(frame)
            case News():
                self.news.append(frame)
            case Progress():
                self.progress.append(frame)
            case Ask(op="login"):
                asyncio.create_task(self._keep(frame))  # noqa: RUF006 # it ends before the test does
            case Ask():
                self.asks.put_nowait(frame)
            case LoginNeeded():
                self.logins.append(frame)
            case _:
                raise AssertionError(frame)

    async def _keep(self, ask: Ask) -> None:
        assert self.keeper is not None, "nobody holds tokens in this test"
        try:
            assert ask.value is not None and not ask.call_id
            wish = from_raw(ask.value, ServerWish)
            reply = await self.keeper.ask(wish.op, document=wish.document, url=wish.url)
        except GoondanError as error:
            told = WorkerError(name="OAuthError", message=error.info.message, code=error.info.code)
            self.send(Answer(call_id="", ask_id=ask.ask_id, error=told))
        else:
            self.send(Answer(call_id="", ask_id=ask.ask_id, value=to_raw(reply)))

    def send(self, frame: HostFrame) -> None:
        body = encode(frame)
        self._writer.write(len(body).to_bytes(4, "little") + body)

    async def ready(self) -> Ready:
        begun = await asyncio.wait_for(asyncio.shield(self.begun), 20)
        assert isinstance(begun, Ready), begun
        return begun

    def start(self, export: str, *, agent: str = "coder", deadline_ms: int | None = None, **arguments: Any) -> str:
        """Send a call; its id."""
        self._calls += 1
        call_id = str(self._calls)
        self._results.setdefault(call_id, asyncio.get_running_loop().create_future())
        self.send(
            Call(
                call_id=call_id,
                export=export,
                input=Raw(encode(arguments)),
                agent_name=agent,
                instance_key="u1",
                turn_id="t",
                tool_call_id=f"c{call_id}",
                workdir="/tmp",
                deadline_ms=deadline_ms,
            )
        )
        return call_id

    async def result(self, call_id: str) -> Result:
        future = self._results.setdefault(call_id, asyncio.get_running_loop().create_future())
        result = await asyncio.wait_for(asyncio.shield(future), 20)
        if result.status == "pending" and result.continues:
            self._results[call_id] = asyncio.get_running_loop().create_future()
        return result

    @staticmethod
    def output(result: Result) -> Any:
        """The output of a result that is well."""
        assert result.status == "ok", result
        assert result.output is not None
        return msgspec.msgpack.decode(result.output)

    @staticmethod
    def value(ask: Ask) -> Any:
        """What a question asks."""
        assert ask.value is not None
        return msgspec.msgpack.decode(ask.value)

    async def call(self, export: str, **arguments: Any) -> Any:
        """The output of a call that is well."""
        return self.output(await self.result(self.start(export, **arguments)))

    async def error(self, call_id: str) -> Any:
        """The error of a call that was started."""
        result = await self.result(call_id)
        assert result.status == "error", result
        assert result.error is not None
        return result.error

    async def fails(self, export: str, **arguments: Any) -> Any:
        """The error of a call that fails."""
        return await self.error(self.start(export, **arguments))

    async def list(self) -> Listed:
        number = len(self._listed) + 1
        self._listed[number] = asyncio.get_running_loop().create_future()
        self.send(List(number))
        return await asyncio.wait_for(self._listed[number], 20)

    def cancel(self, call_id: str) -> None:
        self.send(Cancel(call_id))

    def answer(self, ask: Ask, value: Any = None, **more: Any) -> None:
        self.send(Answer(call_id=ask.call_id, ask_id=ask.ask_id, value=Raw(encode(value)), **more))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for frames until it holds."""
        async with asyncio.timeout(20):
            while not condition():
                await self._told.wait()

    async def exit(self) -> int:
        self.send(Exit())
        return await asyncio.wait_for(asyncio.shield(self.task), 20)

    async def close(self) -> None:
        self._writer.close()
        self._reading.cancel()
        await asyncio.wait_for(self.task, 20)


@asynccontextmanager
async def hosted(
    server: socket.socket | None = None,
    connector: socket.socket | None = None,
    *,
    output_limit: int = 4 << 20,
    keeper: Keeper | None = None,
    **init: Any,
) -> AsyncIterator[Host]:
    """A worker that has had its `init`."""
    wanted = {"transport": "stdio" if server is not None else "http", "tools": True, "resources": True, "prompts": True}
    ours, theirs = socket.socketpair()
    task = asyncio.create_task(Worker(theirs, server, connector).run())
    reader, writer = await asyncio.open_connection(sock=ours)
    host = Host(reader, writer, task)
    host.keeper = keeper
    host.send(Init(1, "srv", "", {}, output_limit=output_limit, server=ServerInit(**{**wanted, **init})))
    try:
        yield host
    finally:
        await host.close()


@asynccontextmanager
async def beside(peer: Peer, *, is_ready: bool = True, **init: Any) -> AsyncIterator[Host]:
    """A worker whose server is `peer`, on a socket of its own, once it has listed what the server has."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours, limit=64 << 20)
    task = asyncio.create_task(_serving(peer, reader, writer))
    try:
        async with hosted(theirs, **init) as host:
            if is_ready:
                await host.ready()
            yield host
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        writer.close()


async def _serving(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await peer(reader, writer)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def tunnels(*, refuse: bool = False) -> AsyncIterator[tuple[socket.socket, list[str]]]:
    """A worker's connector with a stand-in of the egress proxy behind it, and the places that it was asked for."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    asked: list[str] = []
    tasks: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def tunnel(sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        head = await reader.readuntil(b"\r\n\r\n")
        place = head.split()[1].decode()
        asked.append(place)
        host, _, port = place.rpartition(":")
        if refuse or host != "127.0.0.1":
            body = f"E_SANDBOX_DENIED: {place}: not granted".encode()
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            writer.close()
            return
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(relay(reader, up_writer), relay(up_reader, writer))

    def wanted() -> None:
        if ours.recv(64) != b"connect":
            loop.remove_reader(ours.fileno())
            return
        mine, its = socket.socketpair()
        socket.send_fds(ours, [b"ok"], [its.fileno()])
        its.close()
        task = asyncio.create_task(tunnel(mine))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_reader(ours.fileno(), wanted)
    try:
        yield theirs, asked
    finally:
        loop.remove_reader(ours.fileno())
        ours.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Scripted:
    """A server of the handshake era, written by hand: it can lie, hang, and shout as no SDK would let it."""

    def __init__(self, **answers: Any) -> None:
        """`answers`: what a method is answered with, by its name with `_` for `/`: a result, or a function of the
        request that returns one, or None for no answer at all.
        """
        self.capabilities: dict[str, Any] = {"tools": {"listChanged": True}}
        self.tools: list[dict[str, Any]] = [{"name": "echo", "inputSchema": {"type": "object"}}]
        self.answers = answers
        #: Everything that was said to it.
        self.heard: list[dict[str, Any]] = []
        self.writer: asyncio.StreamWriter | None = None
        #: It hears what comes while it works on an answer.
        self.concurrent = False
        self._told = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        while line := await reader.readline():
            message = json.loads(line)
            self.heard.append(message)
            self._told.set()
            self._told = asyncio.Event()
            if "method" in message and "id" in message:
                task = asyncio.create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                if not self.concurrent:
                    await task

    async def _answer(self, message: dict[str, Any]) -> None:
        method = message["method"]
        found = self.answers.get(method.replace("/", "_"), self.usual(message))
        result = found(message) if callable(found) else found
        if asyncio.iscoroutine(result):
            result = await result
        if isinstance(result, dict) and "error" in result:
            self.say({"jsonrpc": "2.0", "id": message["id"], "error": result["error"]})
        elif result is not None:
            self.say({"jsonrpc": "2.0", "id": message["id"], "result": result})

    def usual(self, message: dict[str, Any]) -> dict[str, Any]:
        match message["method"]:
            case "initialize":
                return {
                    "protocolVersion": "2025-11-25",
                    "capabilities": self.capabilities,
                    "serverInfo": {"name": "scripted", "version": "1"},
                }
            case "tools/list":
                return {"tools": self.tools}
            case "tools/call":
                return {"content": [{"type": "text", "text": json.dumps(message["params"].get("arguments"))}]}
            case _:
                return {"error": {"code": -32601, "message": "Method not found"}}

    def say(self, message: Any) -> None:
        self.write(json.dumps(message).encode() + b"\n")

    def write(self, data: bytes) -> None:
        assert self.writer is not None
        self.writer.write(data)

    def tell(self, method: str, **params: Any) -> None:
        self.say({"jsonrpc": "2.0", "method": method, "params": params})

    async def heard_of(self, method: str, count: int = 1) -> dict[str, Any]:
        """The message by which this method is asked for or told the `count`-th time."""
        async with asyncio.timeout(20):
            while True:
                found = [message for message in self.heard if message.get("method") == method]
                if len(found) >= count:
                    return found[count - 1]
                await self._told.wait()

    async def answer_to(self, key: Any) -> dict[str, Any]:
        """The client's answer to a request of ours."""
        async with asyncio.timeout(20):
            while True:
                for message in self.heard:
                    if message.get("id") == key and "method" not in message:
                        return message
                await self._told.wait()


@asynccontextmanager
async def web_server(answer: Callable[[str, bytes], Awaitable[bytes]]) -> AsyncIterator[int]:
    """The port of a server on loopback that answers each request, one a connection, with what `answer` makes of its
    head and body.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            body = await reader.readexactly(int(field(head, "content-length") or 0))
            writer.write(await answer(head, body))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Put the clock of this loop forward: what waits for it is due at once. Nobody sleeps, and on a busy machine the
    time that a test means is much longer than the time that it takes.
    """
    loop = asyncio.get_running_loop()
    before = loop.time
    monkeypatch.setattr(loop, "time", lambda: before() + seconds)


def field(head: str, name: str) -> str | None:
    """A field of a head."""
    for line in head.split("\r\n")[1:]:
        key, _, value = line.partition(":")
        if key.lower() == name:
            return value.strip()
    return None


def as_json(value: Any) -> bytes:
    """An answer of a web server."""
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
