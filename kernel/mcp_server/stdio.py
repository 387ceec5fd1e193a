"""One MCP client on standard input and output: one JSON-RPC message a line, each of bounded size.

While it is served, whatever else is printed goes to stderr.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from mcp.server.lowlevel.server import Server
from mcp.shared._context_streams import create_context_streams
from mcp.shared.message import SessionMessage
from mcp_types import INVALID_REQUEST, ErrorData, JSONRPCError, jsonrpc_message_adapter

from goondan.kernel.cli.lines import MAX_LINE_BYTES, LineReader


async def serve_stdio(server: Server[Any]) -> None:
    """Serve until the client closes our standard input. Raises BrokenPipeError when it no longer reads."""
    out = os.dup(1)
    os.dup2(2, 1)
    incoming, read = create_context_streams[SessionMessage | Exception](0)
    write, outgoing = create_context_streams[SessionMessage](0)

    async def take() -> None:
        async with incoming:
            async for line in LineReader(0, MAX_LINE_BYTES):
                if line.data is None:
                    error = ErrorData(
                        code=INVALID_REQUEST, message=f"a message of {line.size} bytes; at most {MAX_LINE_BYTES}"
                    )
                    await asyncio.to_thread(_put, out, JSONRPCError(jsonrpc="2.0", id=None, error=error))
                elif line.data.strip():
                    await incoming.send(_read(line.data))

    async def give() -> None:
        async with outgoing:
            async for message in outgoing:
                await asyncio.to_thread(_put, out, message.message)

    try:
        async with asyncio.TaskGroup() as group:
            taking, giving = group.create_task(take()), group.create_task(give())
            await server.run(read, write, server.create_initialization_options())
            taking.cancel()
            await write.aclose()
            await giving
    except* BrokenPipeError:
        raise BrokenPipeError from None
    finally:
        os.close(out)


def _read(data: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(data, by_name=False))
    except ValueError as error:  # of pydantic, and for what is no UTF-8
        return error


def _put(out: int, message: Any) -> None:
    data = message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]
