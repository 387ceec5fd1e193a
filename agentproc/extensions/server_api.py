"""`api.mcp`: the one MCP server of an extension. The bundled extension `mcp` has it, and no other.

Source: docs/design/tools.md section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from goondan.agentproc.extensions.dynamic_tools import DynamicTools
from goondan.agentproc.extensions.served_tools import ServedTool
from goondan.agentproc.servers import Servers
from goondan.schemas.mcp import McpListing, McpNews


class ServerApi:
    """One server. `name` is the prefix of its tools' names."""

    __slots__ = ("_extension", "_servers", "_tools", "name")

    def __init__(self, servers: Servers, tools: DynamicTools, extension: str, name: str) -> None:
        self._servers = servers
        self._tools = tools
        self._extension = extension
        self.name = name

    async def attach(self, timeout_s: float) -> McpListing:
        """Hold the server for this agent, and get what it offers. Raises GoondanError E_MCP_CONNECT and others."""
        return await self._servers.ask("mcp.attach", self.name, timeout_s)

    async def list(self, timeout_s: float) -> McpListing:
        """What the server offers now. Raises GoondanError as `attach`."""
        return await self._servers.ask("mcp.list", self.name, timeout_s)

    async def detach(self) -> None:
        """Hold the server no more."""
        await self._servers.detach(self.name)

    def on_news(self, listener: Callable[[McpNews], None]) -> None:
        """Call `listener` for each piece of news of the server."""
        self._servers.listen(self.name, listener)

    def offer(self, tools: Sequence[ServedTool]) -> None:
        """Offer these tools of the server from the next step on, in place of those that were offered before."""
        self._tools.serve(tools, extension=self._extension)

    def gone(self, why: str | None) -> None:
        """From now on calls of the tools fail with this message, without being made. None: they are made."""
        self._tools.served.gone(self._extension, why)
