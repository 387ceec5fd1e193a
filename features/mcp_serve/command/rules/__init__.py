"""What MCP clients are told of tools and results. Pure."""
