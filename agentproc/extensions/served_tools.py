"""Tools of MCP servers in an agent: their items, their other names, and whether their server is there. Pure.

Their calls go over the bus like those of any Tool. `mcp.<name>` and `mcp__<name>` are other names of a tool, with the
name that its server has for it, as long as no two servers have a tool of this name.

Source: docs/design/tools.md section 11; requirements MCP-15, MCP-24, ITEM-06.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from msgspec import Struct

from goondan.schemas.address import SEPARATOR
from goondan.schemas.errors import tool_error
from goondan.schemas.frames import ToolError
from goondan.schemas.launch import CatalogItem

#: What stands before the own name of a tool in its other name.
ALIAS: Final = "mcp" + SEPARATOR


class ServedTool(Struct, frozen=True):
    """A tool of an MCP server."""

    #: The catalog item.
    item: CatalogItem
    #: The server's own name of the tool.
    own_name: str
    #: What the registration says about the tool, for people: `source` and `mcpServer`. No model is sent it.
    metadata: dict[str, Any] = {}


class ServedTools:
    """The tools of all servers of one agent."""

    def __init__(self) -> None:
        self._of: dict[str, Sequence[ServedTool]] = {}
        self._gone: dict[str, str] = {}
        self._items: dict[str, CatalogItem] = {}
        self._aliases: dict[str, str] = {}
        self._whose: dict[str, str] = {}

    @property
    def items(self) -> list[CatalogItem]:
        """All of them, in the order in which their servers were registered."""
        return list(self._items.values())

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def find(self, name: str) -> CatalogItem | None:
        """The item of this name, or of this other name."""
        return self._items.get(self._aliases.get(name, name))

    def metadata(self, name: str) -> dict[str, Any]:
        """What the registration says about the tool of this name (MCP-24)."""
        return next((tool.metadata for tools in self._of.values() for tool in tools if tool.item.name == name), {})

    def canonical(self, name: str) -> str:
        """The name of a tool by its other name; any other name is given back."""
        return self._aliases.get(name, name)

    def replace(self, extension: str, tools: Sequence[ServedTool]) -> None:
        """The tools of the extension's server are these now."""
        if tools or extension in self._of:
            self._of[extension] = tools
            self._index()

    def remove(self, extension: str) -> None:
        """The extension has gone."""
        self._gone.pop(extension, None)
        if self._of.pop(extension, None) is not None:
            self._index()

    def gone(self, extension: str, why: str | None) -> None:
        """The server of the extension has ended, or is there again (None)."""
        if why is None:
            self._gone.pop(extension, None)
        else:
            self._gone[extension] = why

    def refusal(self, name: str) -> ToolError | None:
        """Why a call of this tool need not be made; None when it is to be made."""
        why = self._gone.get(self._whose.get(name, ""))
        if why is None:
            return None
        return tool_error("E_MCP_GONE", f"Tool '{name}': the MCP server has ended: {why}", name="McpError")

    def _index(self) -> None:
        every = [(extension, tool) for extension, tools in self._of.items() for tool in tools]
        self._items = {tool.item.name: tool.item for _, tool in every}
        self._whose = {tool.item.name: extension for extension, tool in every}
        names = Counter(tool.own_name for _, tool in every)
        aliases = {ALIAS + tool.own_name: tool.item.name for _, tool in every if names[tool.own_name] == 1}
        self._aliases = {alias: name for alias, name in aliases.items() if alias not in self._items}


def without_taken(tools: Iterable[ServedTool], taken: Iterable[str]) -> tuple[list[ServedTool], list[str]]:
    """The tools whose names are free, and the names of the others."""
    names = frozenset(taken)
    kept, left = [], []
    for tool in tools:
        if tool.item.name in names:
            left.append(tool.item.name)
        else:
            kept.append(tool)
    return kept, left
