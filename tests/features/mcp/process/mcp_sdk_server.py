"""A server that is written with the official SDK: over a socket in the loop of the test, or at an URL on loopback.

`python -m tests.features.mcp.process.mcp_sdk_server` is the same on standard input and output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import mcp_types as types
import uvicorn
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter
from pydantic import BaseModel

#: A picture of one pixel.
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63000100000500010d0a2db4"
    "0000000049454e44ae426082"
)


class Forecast(BaseModel):
    city: str
    degrees: float


class Wish(BaseModel):
    size: str


def make_server() -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer("sdk", version="7", instructions="Ask for the weather.")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @server.tool()
    def weather(city: str) -> Forecast:
        """Says how warm it is."""
        return Forecast(city=city, degrees=21.5)

    @server.tool(structured_output=False)
    def picture() -> Image:
        """Draws."""
        return Image(data=PIXEL, format="png")

    @server.tool(structured_output=False)
    def fail(why: str) -> str:
        """Fails."""
        raise ToolError(why)

    @server.tool(structured_output=False)
    async def count(to: int, ctx: Context[Any, Any]) -> str:
        """Counts, and says how far it is."""
        for number in range(to):
            await ctx.report_progress(number + 1, to, f"at {number + 1}")
        return "done"

    @server.tool(structured_output=False)
    async def hang(ctx: Context[Any, Any]) -> str:
        """Never answers."""
        await ctx.report_progress(0, 1, "hanging")
        await anyio.sleep_forever()
        return "never"

    @server.tool(structured_output=False)
    async def grow(ctx: Context[Any, Any]) -> str:
        """Gets one more tool."""
        server.add_tool(lambda: "new", name="grown", structured_output=False)
        with contextlib.suppress(Exception):  # in the handshake era the session tells it
            await ctx.session.send_tool_list_changed()
        await ctx.notify_tools_changed()
        return "grown"

    @server.tool(structured_output=False)
    async def pizza(ctx: Context[Any, Any]) -> str | types.InputRequiredResult:
        """Asks how large, in the way of its era."""
        if ctx.protocol_version != "2026-07-28":
            asked = await ctx.elicit("How large?", Wish)
            return f"{asked.action}: {asked.data.size if asked.action == 'accept' else None}"
        responses = ctx.input_responses
        if not responses:
            schema = {"type": "object", "properties": {"size": {"type": "string"}}, "required": ["size"]}
            question = types.ElicitRequest(
                params=types.ElicitRequestFormParams(message="How large?", requested_schema=schema)
            )
            return types.InputRequiredResult(input_requests={"size": question}, request_state="s1")
        answer = responses["size"]
        assert isinstance(answer, types.ElicitResult)
        assert ctx.request_state == "s1"
        return f"{answer.action}: {(answer.content or {}).get('size')}"

    @server.resource("memo://today", name="today", mime_type="text/plain")
    def today() -> str:
        """What is to be done."""
        return "buy tea"

    @server.resource("memo://{day}", name="day")
    def day(day: str) -> str:
        return f"nothing on {day}"

    @server.prompt()
    def review(code: str) -> str:
        """Reviews code."""
        return f"Review this: {code}"

    return server


async def serve_socket(server: MCPServer[Any], sock: socket.socket, era: Literal["modern", "handshake"]) -> None:
    """Serve one client. In the era `handshake` it does not know what came later."""
    reader, writer = await asyncio.open_connection(sock=sock, limit=64 << 20)
    into, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](16)
    outgoing, out = anyio.create_memory_object_stream[SessionMessage](16)

    async def read() -> None:
        async with into:
            while line := await reader.readline():
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                if (
                    era == "handshake"
                    and isinstance(message, types.JSONRPCRequest)
                    and message.method == "server/discover"
                ):
                    error = {"code": -32601, "message": "Method not found"}
                    writer.write(json.dumps({"jsonrpc": "2.0", "id": message.id, "error": error}).encode() + b"\n")
                    continue
                await into.send(SessionMessage(message))

    async def write() -> None:
        async for item in out:
            writer.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")

    inner = server._lowlevel_server
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read()), group.create_task(write())]
            await inner.run(incoming, outgoing, inner.create_initialization_options())
            for task in tasks:
                task.cancel()
    finally:
        for stream in (into, incoming, outgoing, out):
            stream.close()
        writer.close()


@asynccontextmanager
async def beside(era: Literal["modern", "handshake"]) -> AsyncIterator[socket.socket]:
    """The worker's end of a socket, with the server at the other one."""
    ours, theirs = socket.socketpair()
    task = asyncio.create_task(serve_socket(make_server(), ours, era))
    try:
        yield theirs
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _without_discovery(app: Any, *, sessions_end: bool) -> Any:
    """The same server as if it had been written before there was `server/discover`.

    With `sessions_end` it forgets sessions before their first call.
    """

    async def older(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if sessions_end and scope["type"] == "http" and scope["method"] == "POST":
            first = await receive()
            if b'"tools/call"' in first.get("body", b""):
                await send({"type": "http.response.start", "status": 404, "headers": []})
                await send({"type": "http.response.body", "body": b""})
                return
            messages, original = [first], receive

            async def receive() -> Any:
                return messages.pop() if messages else await original()

        if headers.get(b"mcp-method") == b"server/discover":
            await send({"type": "http.response.start", "status": 400, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"Bad Request"})
        else:
            await app(scope, receive, send)

    return older


@asynccontextmanager
async def at_url(*, handshake: bool = False, sessions_end: bool = False, **options: Any) -> AsyncIterator[str]:
    """The URL of the server."""
    app: Any = make_server().streamable_http_app(**options)
    if handshake:
        app = _without_discovery(app, sessions_end=sessions_end)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", lifespan="on", ws="none", timeout_graceful_shutdown=1)
    program = uvicorn.Server(config)
    task = asyncio.create_task(program.serve(sockets=[listening]))
    try:
        while not program.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
    finally:
        program.should_exit = True
        await task
        listening.close()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    make_server().run("stdio")
