"""`gdn tool new|test`, `gdn extension new|test`: a tool or an extension to begin with, and a try of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from goondan.features.try_out.command.extension_test import command as extension_test
from goondan.features.try_out.command.new import extension_new, tool_new
from goondan.features.try_out.command.tool_test import command as tool_test

COMMANDS: Final[Mapping[str, click.Command]] = {
    "tool new": tool_new,
    "tool test": tool_test,
    "extension new": extension_new,
    "extension test": extension_test,
}
