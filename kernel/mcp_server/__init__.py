"""An agent's tools as an MCP server (`gdn mcp serve`). Its modules import the SDK, so nothing imports them at a start.

Source: docs/mcp.md, "Our tools for MCP clients"; docs/design/commands.md section 12.
"""
