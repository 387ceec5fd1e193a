"""The bundled extension `mcp`."""
