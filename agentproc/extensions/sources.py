"""Where the tools of extensions come from, as the extensions say it. Pure.

The present form is `{"type": "mcp", "name": …, "mcp": {"extensionName": …, "serverName": …}}`; the older one is free,
such as `{"type": "mcp", "extension": …}`, and is read as the present one.

Source: requirements ITEM-02, ITEM-03, ITEM-05, ITEM-07.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.launch import McpSource, ToolSource


def source_of(given: Any, extension: str) -> ToolSource:
    """The source of a tool that `extension` registers: its own name, whatever it says, and the MCP server behind it."""
    if not isinstance(given, Mapping) or given.get("type") != "mcp":
        return ToolSource("extension", extension)
    mcp = given.get("mcp")
    server = mcp.get("serverName") if isinstance(mcp, Mapping) else given.get("server")
    return ToolSource("mcp", extension, McpSource(extension, server if isinstance(server, str) else None))


def with_known_source(item: Any) -> Any:
    """A catalog item as middleware writes it, its source in the present form; one without the older is unchanged."""
    source = item.get("source") if isinstance(item, dict) else None
    if not isinstance(source, dict) or "name" in source or not isinstance(source.get("extension"), str):
        return item
    made = source_of(source, source["extension"])
    return {**item, "source": made}
