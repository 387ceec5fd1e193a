"""MCP servers as a person has them: lists of other programs, what is installed, and our tools as a server."""
