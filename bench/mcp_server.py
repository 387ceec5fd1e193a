"""`python -m bench.mcp_server`: the tool that costs nothing (bench/tools/echo) as an MCP server over stdio."""

from __future__ import annotations

import logging

from mcp.server.mcpserver import MCPServer

server = MCPServer("bench", log_level="WARNING")


@server.tool(structured_output=True)
def same(text: str) -> dict[str, str]:
    """Give the arguments back."""
    return {"text": text}


if __name__ == "__main__":
    logging.disable(logging.INFO)
    server.run("stdio")
