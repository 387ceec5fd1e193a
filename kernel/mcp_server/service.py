"""The MCP server: the SDK's, with our tools behind it. It speaks the versions with a handshake and those without.

Nothing else than tools is offered: no resources, no prompts, no logging, and the client is asked for nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final, TypeVar

from mcp.server.lowlevel.server import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
)

from goondan.kernel.mcp.offering import tool_entry
from goondan.kernel.mcp_server.offer import Offer
from goondan.schemas.wire.errors import GoondanError

_T = TypeVar("_T")

#: The longest name of a tool in a message about it (characters).
_SHOWN: Final = 100


def make_server(offer: Offer, agent: str, version: str) -> Server[Any]:
    """A server whose tools are those of an offer."""

    async def list_tools(ctx: Any, params: PaginatedRequestParams | None) -> ListToolsResult:
        if params is not None and params.cursor is not None:
            raise MCPError(INVALID_PARAMS, "there is one page of tools, and no cursor leads to another")
        tools = await _told(offer.tools())
        return ListToolsResult.model_validate({"tools": [tool_entry(name, tool) for name, tool in tools.items()]})

    async def call_tool(ctx: Any, params: CallToolRequestParams) -> CallToolResult:
        name = await _told(offer.full_name(params.name))
        if name is None:
            raise MCPError(INVALID_PARAMS, f"no tool {params.name[:_SHOWN]!r} is offered")
        answer = await offer.call(name, params.arguments, ctx.session.report_progress)
        return CallToolResult.model_validate(answer)

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
        raise MCPError(INTERNAL_ERROR, f"{error.info.message} [{error.info.code}]") from None
