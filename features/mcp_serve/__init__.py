"""An agent's tools as an MCP server.

Source: docs/mcp.md, "Our tools for MCP clients".
"""
