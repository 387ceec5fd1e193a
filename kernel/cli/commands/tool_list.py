"""`gdn tool list`: every tool that can be called, the bundle's own first. Nothing is started.

With --json: {bundle, tools: [{name, tool, source, description?, parameters?, idempotent}]}. What extensions register
when they run is not known here.

Source: docs/design/commands.md section 6; requirements CATALOG-01, NAME-01.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.terminal import Style, filled, printable, style_of, width_of

if TYPE_CHECKING:
    from goondan.kernel.bundle.tools import CheckedTool

#: The least width of a description on a narrow terminal (characters).
_MIN_WORDS: Final = 20


@click.command(name="list")
@options.bundle
@options.as_json
def command(bundle: str | None, as_json: bool) -> int:
    """List every tool of the bundle and of the bundled package. What extensions add at run time is not known here."""
    from goondan.kernel.cli.commands.tool_catalog import look
    from goondan.kernel.cli.output import is_terminal, write, write_json

    inspected = look(bundle)
    tools = inspected.checked.tools.values()
    if as_json:
        write_json({"bundle": inspected.path, "tools": inspected.redact.all_of(describe(tools))})
        return 0
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    write(*inspected.redact.all_of(table(tools, style_of(sys.stdout), width)))
    return 0


def describe(tools: Iterable[CheckedTool]) -> list[dict[str, Any]]:
    """One row for each export, with its unchanged schema."""
    from goondan.kernel.cli.commands.tool_catalog import source
    from goondan.schemas.bundle.address import build_tool_name, tool_identity

    rows: list[dict[str, Any]] = []
    for tool in tools:
        for export in tool.body.exports:
            row: dict[str, Any] = {
                "name": build_tool_name(tool.name, export.name),
                "tool": tool_identity(tool.name),
                "source": source(tool),
                "description": export.description,
                "parameters": export.parameters,
                "idempotent": export.idempotent,
            }
            rows.append({key: value for key, value in row.items() if value is not None})
    return rows


def table(tools: Iterable[CheckedTool], style: Style, width: int | None) -> list[str]:
    """One line for each export: its name, its source and the first sentence of its description. `width` is the width of
    the line (characters); None: there is no limit.
    """
    rows = [(row["name"], row["source"], row.get("description", "")) for row in describe(tools)]
    if not rows:
        return ["no tools"]
    names, sources = (max(width_of(row[column]) for row in rows) for column in (0, 1))
    lines = []
    for name, source, description in rows:
        words = printable(" ".join(description.split())).partition(". ")[0].rstrip(".")
        if width is not None:
            room = max(width - names - sources - 4, _MIN_WORDS)
            words = words if len(words) <= room else words[: room - 1] + "…"
        lines.append(f"{style.bold(filled(name, names))}  {style.dim(filled(source, sources))}  {words}".rstrip())
    return lines
