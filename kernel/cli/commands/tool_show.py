"""`gdn tool show NAME`: the parameters of a tool, its rights, and how it is called. Nothing is started.

NAME is a Tool (`bash`, `Tool/bash`) or one of its functions (`bash__exec`). With --json one document: {name, source,
file, line, entry, errorMessageLimit, sandbox, exports}, with every default filled in. `sandbox` is the manifest's
request. `granted` is added when the tool gets something else (`gdn grant list` says why).

Source: docs/design/commands.md section 6; docs/design/sandbox.md section 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct, to_builtins

from goondan.kernel.bundle.examples import short
from goondan.kernel.cli import options
from goondan.kernel.cli.commands.tool_catalog import find, look, source
from goondan.kernel.cli.terminal import Style, filled, printable, style_of, width_of
from goondan.schemas.bundle.address import build_tool_name, tool_identity

if TYPE_CHECKING:
    from goondan.kernel.bundle.parameters import Parameter
    from goondan.kernel.bundle.tools import CheckedTool
    from goondan.schemas.bundle.resources import ToolExport


@click.command(name="show")
@click.argument("name", shell_complete=options.completed("tools"))
@options.bundle
@options.as_json
def command(name: str, bundle: str | None, as_json: bool) -> int:
    """Show a tool: its parameters, aliases, limits, sandbox and examples."""
    from goondan.kernel.cli.output import write, write_json

    inspected = look(bundle)
    tool, export = find(inspected.checked.tools, name)
    exports = tool.body.exports if export is None else [export]
    if as_json:
        shown = inspected.redact.all_of(to_builtins(describe(tool, exports)))
        write_json({**shown, "file": tool.document.file})
    else:
        write(*inspected.redact.all_of(render(tool, exports, style_of(sys.stdout))))
    return 0


def describe(tool: CheckedTool, exports: Iterable[ToolExport]) -> dict[str, Any]:
    """The document of --json."""
    place = tool.document.place("metadata", "name")
    gets = {} if granted_as_requested(tool) else {"granted": whole(tool.granted)}
    return {
        "name": tool_identity(tool.name),
        "source": source(tool),
        "file": place.file,
        "line": place.line,
        "entry": tool.entry,
        "errorMessageLimit": tool.body.error_message_limit,
        "sandbox": whole(tool.body.sandbox),
        **gets,
        "exports": [
            {**whole(export), "name": build_tool_name(tool.name, export.name), "examples": export.examples}
            for export in exports
        ],
    }


def granted_as_requested(tool: CheckedTool) -> bool:
    """Whether the tool gets exactly what its manifest requests."""
    return tool.granted is None or tool.granted == tool.sandbox


def whole(value: Any) -> Any:
    """A struct as JSON with all its fields. The wire leaves out fields that have their default; this document does
    not.
    """
    if isinstance(value, Struct):
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        return {key: whole(getattr(value, name)) for name, key in names}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value


def _says(value: Any) -> bool:
    """Whether a request names anything."""
    return any(map(_says, value.values())) if isinstance(value, dict) else bool(value)


def render(tool: CheckedTool, exports: Iterable[ToolExport], style: Style) -> list[str]:
    """The page for a person."""
    from goondan.kernel.bundle.problems import short_path

    place = tool.document.place("metadata", "name")
    where = f"{short_path(place.file, os.getcwd())}:{place.line}"
    lines = [f"{style.bold(tool_identity(tool.name))}  {style.dim(printable(f'{source(tool)}, {where}'))}"]
    for export in exports:
        lines += ["", style.bold(build_tool_name(tool.name, export.name))]
        if export.description:
            lines.append(f"  {printable(' '.join(export.description.split()))}")
        lines += [f"  {line}".rstrip() for line in [*_parameters(export, style), *_remarks(export), *_examples(export)]]
    lines += ["", style.bold("limits and sandbox"), *[f"  {line}" for line in _sandbox(tool)]]
    return lines


def _parameters(export: ToolExport, style: Style) -> list[str]:
    from goondan.kernel.bundle.parameters import parameter_rows

    if export.parameters is None:
        return ["", "no parameters are declared: arguments are not checked"]
    rows = parameter_rows(export.parameters)
    if not rows:
        return ["", "no parameters"]
    heads = ("parameter", "type", "", "default", "what it is")
    cells = [_cells(row) for row in rows]
    kept = [column for column in range(len(heads)) if column < 2 or any(row[column] for row in cells)]
    widths = {column: max(width_of(row[column]) for row in [heads, *cells]) for column in kept}

    def line(row: tuple[str, ...]) -> str:
        return "  ".join(filled(row[column], widths[column]) for column in kept).rstrip()

    return ["", style.dim(line(heads)), *[line(row) for row in cells]]


def _cells(row: Parameter) -> tuple[str, ...]:
    words = " ".join(row.description.split())
    required = "required" if row.required else ""
    return tuple(printable(text) for text in (row.name, row.type, required, row.default, words))


def _remarks(export: ToolExport) -> list[str]:
    found = [f"also called {printable(alias)}: {printable(name)}" for alias, name in export.aliases.items()]
    if export.idempotent:
        found.append("idempotent: it is called again when its outcome is unknown, and once more when its process ends")
    if export.background:
        found.append("background: processes that it leaves behind live until the jail retires")
    return ["", *found] if found else []


def _examples(export: ToolExport) -> list[str]:
    lines = []
    for example in export.examples:
        answer = "" if example.output is None else f"  → {printable(short(example.output))}"
        lines.append(f"example: {printable(short(example.input))}{answer}")
    return ["", *lines] if lines else []


def _sandbox(tool: CheckedTool) -> list[str]:
    asked = whole(tool.body.sandbox)
    limits = asked.pop("limits")
    rows = {"error messages": f"at most {tool.body.error_message_limit} characters", "entry": tool.entry}
    rows |= {key: value if isinstance(value, str) else short(value) for key, value in asked.items() if _says(value)}
    rows["limits"] = ", ".join(f"{key} {value}" for key, value in limits.items())
    if not granted_as_requested(tool):
        rows["granted"] = "something else than this: `gdn grant list` says what"
    width = max(map(len, rows))
    return [f"{key:<{width}}  {printable(value)}" for key, value in rows.items()]
