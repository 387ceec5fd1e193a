"""MCP servers for tests: small programs that speak the protocol by hand, and a tool host that serves them."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from goondan.schemas.bundle.launch import SandboxSpec, ServerSpec, ToolSpec
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame
from goondan.schemas.worker.servers import NamedServer
from tests.toolhost_fixture import Bench

#: A server of the handshake era in some lines. Each tool is a function of its arguments; `say` writes a message.
SERVER = """
import json, os, signal, sys, threading, time
lock = threading.Lock()
def say(message):
    with lock:
        sys.stdout.write(json.dumps(message) + "\\n"); sys.stdout.flush()
def notify(method, **params): say({"jsonrpc": "2.0", "method": method, "params": params})
calls = 0
def echo(args, ask): return args
def count(args, ask):
    global calls
    calls += 1
    return [calls, os.getpid()]
def nap(args, ask): time.sleep(args["s"]); return "slept"
def where(args, ask): return [os.getcwd(), sorted(os.listdir(".")), sys.argv[1:], os.environ.get("X")]
tools = {"echo": echo, "count": count, "nap": nap, "where": where}
def answer(ask):
    method, params = ask["method"], ask.get("params", {})
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "small", "version": "1"}}
    if method == "tools/list":
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in tools]}
    if method == "tools/call":
        value = tools[params["name"]](params.get("arguments", {}), ask)
        return {"content": [{"type": "text", "text": json.dumps(value)}]}
    raise LookupError(method)
def work(ask):
    try: say({"jsonrpc": "2.0", "id": ask["id"], "result": answer(ask)})
    except LookupError as error:
        say({"jsonrpc": "2.0", "id": ask["id"], "error": {"code": -32601, "message": str(error)}})
def serve():
    for line in sys.stdin:
        ask = json.loads(line)
        if "id" in ask and "method" in ask:
            threading.Thread(target=work, args=(ask,), daemon=True).start()
"""


def make_server(
    folder: Path,
    source: str = "",
    *,
    name: str = "srv",
    sandbox: SandboxSpec | None = None,
    arguments: list[str] | None = None,
    last: str = "serve()",
    **options: Any,
) -> ToolSpec:
    """A stdio server: SERVER, then `source`, then the line `last`. `options` are those of ServerSpec."""
    root = folder / f"server-{name}"
    root.mkdir(parents=True, exist_ok=True)
    (root / "server.py").write_text(f"{SERVER}\n{source}\n{last}\n", encoding="utf-8")
    command = [f"{sys.base_prefix}/bin/python3", "-I", "-S", str(root / "server.py"), *(arguments or [])]
    spec = ServerSpec(extension=name, transport="stdio", worker="mcp", command=command, tools=True, **options)
    return ToolSpec(name=name, entry="", root=str(root), exports=[], sandbox=sandbox or SandboxSpec(), server=spec)


class Asker:
    """What an agent asks of servers, through a Bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._count = 0

    async def ask(
        self,
        server: str = "srv",
        kind: str = "mcp.attach",
        *,
        agent: str = "coder",
        instance_key: str = "k1",
        workdir: Path | str | None = None,
    ) -> dict[str, Any]:
        """Ask, and wait for the answer: the listing, or the error with its code."""
        self._count += 1
        number = f"ask-{self._count}"
        waiter = self.bench.answers[number] = asyncio.get_running_loop().create_future()
        frame = Frame(kind, id=number, from_=agent, instance_key=instance_key, payload=to_raw(NamedServer(server)))
        frame.workdir = None if workdir is None else str(workdir)
        self.bench.host.on_frame(frame)
        answer: Frame = await asyncio.wait_for(waiter, 40)
        told: dict[str, Any] = msgspec.msgpack.decode(answer.payload)
        return told

    def detach(self, server: str = "srv", *, agent: str = "coder", instance_key: str = "k1") -> None:
        """Leave a server."""
        frame = Frame("mcp.detach", from_=agent, instance_key=instance_key, payload=to_raw(NamedServer(server)))
        self.bench.host.on_frame(frame)

    def news(self, agent: str = "coder") -> list[dict[str, Any]]:
        """What the agent was told so far."""
        return [msgspec.msgpack.decode(frame.payload) for frame in self.bench.news if frame.to == agent]


def text(result: dict[str, Any]) -> Any:
    """The value that a tool of SERVER returned."""
    assert result["status"] == "ok", result
    output = result["output"]
    content = output["content"] if isinstance(output, dict) else output
    found = content if isinstance(content, str) else content[0]["text"]
    return msgspec.json.decode(found)


class Web:
    """A server at a URL that answers with the headers that it was sent."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self.tasks.add(task)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                writer.write(self.answer(head[0].split(" ")[1], json.loads(body) if body else {}, headers))
                await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    def answer(self, path: str, message: dict[str, Any], headers: dict[str, str]) -> bytes:
        key = headers["authorization"].partition(" ")[2]
        if path == "/refuses":
            body = json.dumps({"error": f"{key} is no key"}).encode()
            return b"HTTP/1.1 403 %s\r\ncontent-length: %d\r\n\r\n%s" % (key.encode(), len(body), body)
        if "id" not in message:
            return b"HTTP/1.1 202 Ok\r\ncontent-length: 0\r\n\r\n"
        told: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        tool = {"name": "echo", "description": f"for {key}", "inputSchema": {"type": "object"}}
        if message["method"] == "initialize":
            who = {"name": key, "version": "1"}
            told["result"] = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": who}
        elif message["method"] == "tools/list":
            told["result"] = {"tools": [tool]}
        else:
            told["error"] = {"code": -32000, "message": f"{key} may not", "data": {"headers": headers}}
        body = json.dumps(told).encode()
        return b"HTTP/1.1 200 Ok\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
