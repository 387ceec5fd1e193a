"""Groups of commands. A group knows the names and one-line helps, and imports a command only when it is used.

Source: docs/design/commands.md section 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from goondan.kernel.cli.imports import import_whole


class LazyGroup(click.Group):
    """`commands_of`: name -> one line of help. The command of `name` is `<prefix><name>.command`, a module."""

    def __init__(self, *args: Any, commands_of: Mapping[str, str], prefix: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._commands_of = commands_of
        self._prefix = prefix

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order given."""
        return list(self._commands_of)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command. None when there is none of this name."""
        if cmd_name not in self._commands_of:
            return None
        command: click.Command = import_whole(self._prefix + cmd_name).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of `--help`."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._commands_of.items()))
