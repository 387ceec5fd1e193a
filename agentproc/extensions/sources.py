"""The sources of tools, as extensions write them. Pure.

The present form is `{"type": "mcp", "name": …, "mcp": {"extensionName": …, "serverName": …}}`. The older form is free,
such as `{"type": "mcp", "extension": …}`, and is converted to the present one.

Source: requirements ITEM-02, ITEM-03, ITEM-05, ITEM-07.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from goondan.schemas.launch import McpSource, ToolSource


def source_of(given: Any, extension: str) -> ToolSource:
    """The source of a tool that `extension` registers: always the extension's own name, and the MCP server
    behind it.
    """
    if not isinstance(given, Mapping) or given.get("type") != "mcp":
        return ToolSource("extension", extension)
    mcp = given.get("mcp")
    server = mcp.get("serverName") if isinstance(mcp, Mapping) else given.get("server")
    return ToolSource("mcp", extension, McpSource(extension, server if isinstance(server, str) else None))


def with_known_source(item: Any) -> Any:
    """A catalog item as middleware writes it, with its source in the present form. An item without the older form is
    unchanged.
    """
    source = item.get("source") if isinstance(item, dict) else None
    if not isinstance(source, dict) or "name" in source or not isinstance(source.get("extension"), str):
        return item
    made = source_of(source, source["extension"])
    return {**item, "source": made}
