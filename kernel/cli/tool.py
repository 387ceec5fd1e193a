"""`gdn tool`: the tools of a bundle and of the bundled package, for those who write them.

Source: docs/design/commands.md section 6.
"""

from __future__ import annotations

from typing import Final

import click

from goondan.kernel.cli.lazy import LazyGroup

#: name -> one line of help; the module is `goondan.kernel.cli.tool_<name>`.
COMMANDS: Final[dict[str, str]] = {
    "list": "List every tool that can be called.",
    "show": "Show a tool's parameters, limits, sandbox and examples.",
    "new": "Write a new tool: its module, its manifest and its test.",
    "test": "Check a tool's manifest and run its examples in the sandbox.",
}


@click.group(name="tool", cls=LazyGroup, commands_of=COMMANDS, prefix="goondan.kernel.cli.tool_")
def command() -> None:
    """List, show, make and test tools."""
