"""MCP servers as tools of agents: checked, started in jails, installed, looked at; and agents' tools for MCP clients.

Source: docs/mcp.md; docs/design/tools.md section 11.
"""
