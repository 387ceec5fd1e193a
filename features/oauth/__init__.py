"""Access tokens: a person agrees to what extensions and MCP servers may do in their name at a server.

Source: docs/oauth.md.
"""
