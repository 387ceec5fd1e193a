"""`gdn mcp`: MCP servers in bundles, and our tools as an MCP server.

Source: docs/mcp.md.
"""

from __future__ import annotations

from typing import Final

import click

from goondan.kernel.cli.lazy import LazyGroup

#: name -> one line of help; the module is `goondan.kernel.cli.mcp_<name>`.
COMMANDS: Final[dict[str, str]] = {
    "add": "Install the package of an MCP server, and write its Extension.",
    "inspect": "Start an MCP server in a jail; show what it offers and what it was refused.",
    "list": "Show the MCP servers of a bundle: state, calls, memory, last error.",
    "import": "Convert the MCP servers of other programs into Extensions.",
    "serve": "Offer the tools of an agent to MCP clients.",
}


@click.group(name="mcp", cls=LazyGroup, commands_of=COMMANDS, prefix="goondan.kernel.cli.mcp_")
def command() -> None:
    """Use MCP servers, and offer an agent's tools to MCP clients."""
