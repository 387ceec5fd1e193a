"""`gdn extension`: the extensions of a bundle and those that come along, for those who write them."""

from __future__ import annotations

from typing import Final

import click

from goondan.kernel.cli.lazy import LazyGroup

#: name -> one line of help; the module is `goondan.kernel.cli.extension_<name>`.
COMMANDS: Final[dict[str, str]] = {
    "list": "List every extension that an agent can have.",
    "new": "Write a new extension: its module, its document and its test.",
    "test": "Load extensions, and let a turn pass through each.",
}


@click.group(name="extension", cls=LazyGroup, commands_of=COMMANDS, prefix="goondan.kernel.cli.extension_")
def command() -> None:
    """List, make and test extensions."""
