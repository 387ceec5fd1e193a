"""An agent's tools as an MCP server: the SDK's, on standard input and output (over HTTP: `http.py`).

It imports the SDK, so nothing imports it at a start. The SDK speaks the versions with a handshake and those without.
Nothing else than tools is offered: no resources, no prompts, no logging, and the client is asked for nothing.

Each call is an operator's event for the agent, so that what the agent's own calls pass is passed: its catalog, its
middleware, approvals, budget, and the broker's places. An instance works on one event at a time.

Source: docs/mcp.md, "Our tools for MCP clients"; docs/design/commands.md section 12.
"""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import mcp_types
import msgspec
from mcp.server.lowlevel.server import Server
from mcp.shared._context_streams import create_context_streams
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from goondan.features.mcp_serve.command.rules import offering
from goondan.kernel.cli.commands.call import tool_result
from goondan.kernel.cli.console.lines import MAX_LINE_BYTES
from goondan.kernel.cli.console.streams import LineStreams
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.rules.batch import parse_arguments
from goondan.kernel.cli.session import CANCEL_S, Session
from goondan.kernel.traces.conversations import messages
from goondan.schemas.bundle.address import instance_dir
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import OPERATOR_CALL, OPERATOR_TOOLS, FilePart, OperatorCall, OperatorTool
from goondan.schemas.wire.runtime_events import RuntimeEvent

#: How long a list of tools is good (seconds). A client may ask often, and each look is a turn of the agent.
LIST_S: Final = 1.0
#: How long the agent may take to tell its tools (seconds): it may have to be started, and its extensions loaded.
LIST_PATIENCE_S: Final = 60.0
#: Calls that wait or run at once. An instance does one after another; more would only wait longer.
MAX_OPEN: Final = 64

#: Messages among which the result of a call is looked for. Other calls may have been stored since.
RECENT: Final = 4 * MAX_OPEN
#: How long the client may take to read the progress that came just before the result (seconds).
LAST_NEWS_S: Final = 1.0

#: Told how far a call is: done, total, words.
Progress = Callable[[float, float | None, str | None], Awaitable[None]]


class Offer:
    """The tools of `agent` that fit `patterns`, called in its instance `instance`; `short`: under short names. The
    conversation of the instance lies in `state_dir`.
    """

    def __init__(
        self,
        session: Session,
        state_dir: str,
        agent: str,
        instance: str,
        patterns: Sequence[str],
        workdir: str | None = None,
        *,
        short: bool = False,
    ) -> None:
        self._session = session
        self._state_dir = state_dir
        self._agent = agent
        self._instance = instance
        self._patterns = patterns
        self._workdir = workdir
        self._short = short
        self._known: list[OperatorTool] = []
        self._until = 0.0
        self._looking: asyncio.Task[list[OperatorTool]] | None = None
        self._open = 0
        self._cancelling: set[asyncio.Task[None]] = set()

    async def tools(self) -> dict[str, OperatorTool]:
        """What is offered now, by the names that clients get. Raises GoondanError when the agent cannot tell."""
        if not self._patterns:
            return {}
        return self._named(await self.everything())

    async def everything(self) -> list[OperatorTool]:
        """All that the agent could call now. Those who ask at once get one answer. Raises GoondanError."""
        if time.monotonic() < self._until:
            return self._known
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())
        return await asyncio.shield(self._looking)

    async def full_name(self, name: str) -> str | None:
        """The full name of a tool that is offered under this name; None: there is none. One that was offered before
        needs no new look: the agent itself refuses a call of what it no longer has. Raises GoondanError.
        """
        found = self._named(self._known).get(name) or (await self.tools()).get(name)
        return None if found is None else found.name

    def schema_of(self, name: str) -> Mapping[str, Any] | None:
        """The schema of a tool that was listed last; None when nothing is known of it."""
        found = self._named(self._known).get(name)
        return None if found is None else found.parameters

    async def call(self, name: str, arguments: Any, progress: Progress) -> dict[str, Any]:
        """Call one tool; the answer in the protocol's form. Everything that goes wrong is in the answer.

        When the waiting is cancelled, the turn is cancelled with its call.
        """
        if self._open >= MAX_OPEN:
            return offering.failure(_plain(fail("E_OVERLOADED", f"{MAX_OPEN} calls are under way, and no more may")))
        self._open += 1
        try:
            return await self._call(name, arguments, progress)
        except GoondanError as error:
            return offering.failure(_plain(error))
        finally:
            self._open -= 1

    async def close(self) -> None:
        """Wait until cancelled calls have ended, for some time."""
        if self._looking is not None:
            self._looking.cancel()
        if self._cancelling:
            await asyncio.wait(self._cancelling, timeout=CANCEL_S)

    # --- inside

    def _named(self, tools: Sequence[OperatorTool]) -> dict[str, OperatorTool]:
        return offering.named(offering.offered(tools, self._patterns), short=self._short)

    async def _look(self) -> list[OperatorTool]:
        message = Message(self._agent, self._instance, None, OPERATOR_TOOLS, workdir=self._workdir)
        answer = await self._session.ask(message, timeout_s=LIST_PATIENCE_S)
        self._known = msgspec.convert(tool_result(answer).get("output") or [], list[OperatorTool])
        self._until = time.monotonic() + LIST_S
        return self._known

    async def _call(self, name: str, arguments: Any, progress: Progress) -> dict[str, Any]:
        # As everything that comes in as JSON: within 64 bits, without what no frame can hold.
        args = parse_arguments(json.dumps(arguments if arguments is not None else {}))
        event_id = self._session.new_id()
        news: asyncio.Queue[RuntimeEvent | None] = asyncio.Queue()
        telling = asyncio.ensure_future(_tell(news, progress))
        try:
            asked = OperatorCall(name, args)
            message = Message(self._agent, self._instance, asked, OPERATOR_CALL, event_id, self._workdir)
            answer = await self._session.ask(message, listener=news.put_nowait)
            news.put_nowait(None)
            await asyncio.wait({telling}, timeout=LAST_NEWS_S)  # the protocol wants it before the answer
        except asyncio.CancelledError:
            task = asyncio.ensure_future(self._cancel(event_id))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)
            raise
        finally:
            telling.cancel()
        result = tool_result(answer)
        files = await asyncio.to_thread(self._files_of, answer.turn_id) if offering.has_files(result) else []
        return offering.call_result(result, {"turnId": answer.turn_id, "traceId": answer.trace_id}, files)

    def _files_of(self, turn_id: str | None) -> list[str]:
        """The files of the result of a turn as base64, where its conversation has them. Raises GoondanError E_STATE."""
        for message in reversed(messages(self._state_dir, self._agent, self._instance, last=RECENT)):
            if message["id"].startswith(f"{turn_id}.") and message["data"]["role"] == "tool":
                found = msgspec.convert(message["data"]["content"][0].get("files", []), list[FilePart])
                folder = Path(instance_dir(self._state_dir, self._agent, self._instance), "files")
                try:
                    return [b64encode((folder / file.blob.file).read_bytes()).decode() for file in found]
                except OSError as error:
                    raise fail("E_STATE", f"a file of the result cannot be read: {error.strerror}") from None
        return []

    async def _cancel(self, event_id: str) -> None:
        with suppress(GoondanError):  # it has just ended
            await self._session.cancel(event_id, CANCEL_S)


async def _tell(news: asyncio.Queue[RuntimeEvent | None], progress: Progress) -> None:
    """Tell the client how far a call is. The protocol wants each number to be larger than the one before."""
    last = -1.0
    while (event := await news.get()) is not None:
        if event.kind == "tool.waits":
            last += 0.001
            await progress(max(last, 0.0), None, "a person is asked whether this call may be made")
        elif event.kind == "tool.progress" and event.done is not None and event.done > last:
            last = event.done
            await progress(event.done, event.total, event.message)


def _plain(error: GoondanError) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(error.info)
    return plain


# --- the protocol ---------------------------------------------------------------------------------------------------

_T = TypeVar("_T")

#: The longest name of a tool in a message about it (characters).
_SHOWN: Final = 100


def make_server(offer: Offer, agent: str, version: str) -> Server[Any]:
    """A server whose tools are those of an offer."""

    async def list_tools(ctx: Any, params: mcp_types.PaginatedRequestParams | None) -> mcp_types.ListToolsResult:
        if params is not None and params.cursor is not None:
            raise MCPError(mcp_types.INVALID_PARAMS, "there is one page of tools, and no cursor leads to another")
        tools = await _told(offer.tools())
        return mcp_types.ListToolsResult.model_validate(
            {"tools": [offering.tool_entry(name, tool) for name, tool in tools.items()]}
        )

    async def call_tool(ctx: Any, params: mcp_types.CallToolRequestParams) -> mcp_types.CallToolResult:
        name = await _told(offer.full_name(params.name))
        if name is None:
            raise MCPError(mcp_types.INVALID_PARAMS, f"no tool {params.name[:_SHOWN]!r} is offered")
        answer = await offer.call(name, params.arguments, ctx.session.report_progress)
        return mcp_types.CallToolResult.model_validate(answer)

    return Server(
        "goondan",
        version=version,
        title=f"Goondan agent {agent}",
        instructions=f"The tools of the agent {agent}. They run in jails, and its operator's rules hold for them.",
        get_tool_input_schema=offer.schema_of,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def _told(answer: Awaitable[_T]) -> _T:
    try:
        return await answer
    except GoondanError as error:
        raise MCPError(mcp_types.INTERNAL_ERROR, f"{error.info.message} [{error.info.code}]") from None


# --- standard input and output --------------------------------------------------------------------------------------


async def serve_stdio(server: Server[Any]) -> None:
    """Serve until the client closes our standard input: one JSON-RPC message a line, each of bounded size. What is
    printed meanwhile goes to stderr. Raises BrokenPipeError when the client no longer reads.
    """
    streams = LineStreams(MAX_LINE_BYTES)
    incoming, read = create_context_streams[SessionMessage | Exception](0)
    write, outgoing = create_context_streams[SessionMessage](0)

    async def take() -> None:
        async with incoming:
            while (line := await streams.read()) is not None:
                if line.data is None:
                    error = mcp_types.ErrorData(
                        code=mcp_types.INVALID_REQUEST,
                        message=f"a message of {line.size} bytes; at most {MAX_LINE_BYTES}",
                    )
                    await streams.write(_line(mcp_types.JSONRPCError(jsonrpc="2.0", id=None, error=error)))
                elif line.data.strip():
                    await incoming.send(_read(line.data))

    async def give() -> None:
        async with outgoing:
            async for message in outgoing:
                await streams.write(_line(message.message))
                if streams.broken.done():
                    raise BrokenPipeError

    try:
        async with asyncio.TaskGroup() as group:
            taking, giving = group.create_task(take()), group.create_task(give())
            await server.run(read, write, server.create_initialization_options())
            taking.cancel()
            await write.aclose()
            await giving
    except* BrokenPipeError:
        raise BrokenPipeError from None


def _read(data: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(data, by_name=False))
    except ValueError as error:  # of pydantic, and for what is no UTF-8
        return error


def _line(message: Any) -> bytes:
    data: str = message.model_dump_json(by_alias=True, exclude_unset=True)
    return data.encode()
