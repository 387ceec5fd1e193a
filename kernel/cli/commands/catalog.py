"""`gdn tool list`, `gdn tool show` and `gdn extension list`: what agents of a bundle can have.

Nothing is started, so what extensions register when they run is not known here.

NAME is a Tool (`bash`, `Tool/bash`) or one of its functions (`bash__exec`). With --json each prints one document:
    tool list        {bundle, tools: [{name, tool, source, description?, parameters?, idempotent}]}
    tool show        {name, source, file, line, entry, errorMessageLimit, sandbox, granted?, exports}
    extension list   {bundle, extensions: [{name, source, entry, agents, configSchema?}]}

`source` is `bundle` or the package. `tool show` has every default filled in; `sandbox` is the manifest's request, and
`granted` is there when the tool gets something else.

Source: docs/design/commands.md section 6; docs/design/tools.md sections 1 and 2; docs/design/sandbox.md section 1;
requirements CATALOG-01, NAME-01, NAME-13, BASE-01.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import click
from msgspec import Struct, to_builtins

from goondan.kernel.bundle.documents import BaseExtensions
from goondan.kernel.bundle.loader import Inspected, inspect_bundle
from goondan.kernel.bundle.problems import BundleError, did_you_mean, short_path, shown
from goondan.kernel.bundle.tool_pages import Parameter, parameter_rows, short
from goondan.kernel.bundle.tools import CheckedTool
from goondan.kernel.cli import options
from goondan.kernel.cli.output import emit, is_terminal
from goondan.kernel.cli.state import state_of
from goondan.kernel.cli.terminal import Style, filled, printable, style_of, width_of
from goondan.kernel.paths import find_bundle
from goondan.schemas.bundle.address import SEPARATOR, build_tool_name, parse_tool_name, tool_identity
from goondan.schemas.bundle.resources import BASE_PACKAGE, ToolExport
from goondan.schemas.wire.errors import fail


def look(bundle: str | None) -> Inspected:
    """Read the bundle that a command means, without its modules. Raises BundleError, GoondanError E_CONFIG_…"""
    path = find_bundle(bundle)
    inspected = inspect_bundle(path, state_dir=state_of(path), handlers=False)
    if inspected.errors:
        raise BundleError(inspected.errors, inspected.dropped)
    return inspected


def find(tools: Mapping[str, CheckedTool], name: str) -> tuple[CheckedTool, ToolExport | None]:
    """The Tool of a name, and the export if the name is a full one (`bash__exec`). `Tool/bash` means `bash`.

    Raises GoondanError E_TOOL_NOT_FOUND, with the closest name.
    """
    plain = name.removeprefix("Tool/")
    parsed = parse_tool_name(plain)
    if parsed is None:
        if plain in tools:
            return tools[plain], None
    else:
        tool = tools.get(parsed[0])
        for export in tool.body.exports if tool is not None else []:
            if tool is not None and export.name == parsed[1]:
                return tool, export
    names = full_names(tools)
    hint = did_you_mean(plain, names if SEPARATOR in plain else tools) or did_you_mean(plain, [*tools, *names])
    raise fail(
        "E_TOOL_NOT_FOUND", f"there is no tool {shown(name)}", suggestion=hint or "`gdn tool list` has them all."
    )


def full_names(tools: Mapping[str, CheckedTool]) -> list[str]:
    """Every name that can be called."""
    return [build_tool_name(tool.name, export.name) for tool in tools.values() for export in tool.body.exports]


#: The least width of a description on a narrow terminal (characters).
_MIN_WORDS: Final = 20


@click.command(name="list")
@options.bundle
@options.json
def tool_list(bundle: str | None) -> None:
    """List every tool of the bundle and of the bundled package. What extensions add at run time is not known here."""
    inspected = look(bundle)
    tools = inspected.checked.tools.values()
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    found, lines = inspected.redact.all_of([tool_rows(tools), tool_table(tools, style_of(sys.stdout), width)])
    emit({"bundle": inspected.path, "tools": found}, lines)


def tool_rows(tools: Iterable[CheckedTool]) -> list[dict[str, Any]]:
    """One row for each export, with its unchanged schema."""
    rows: list[dict[str, Any]] = []
    for tool in tools:
        for export in tool.body.exports:
            row: dict[str, Any] = {
                "name": build_tool_name(tool.name, export.name),
                "tool": tool_identity(tool.name),
                "source": tool.source,
                "description": export.description,
                "parameters": export.parameters,
                "idempotent": export.idempotent,
            }
            rows.append({key: value for key, value in row.items() if value is not None})
    return rows


def tool_table(tools: Iterable[CheckedTool], style: Style, width: int | None) -> list[str]:
    """One line for each export: its name, its source and the first sentence of its description. `width` is the width of
    the line (characters); None: there is no limit.
    """
    rows = [(row["name"], row["source"], row.get("description", "")) for row in tool_rows(tools)]
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


@click.command(name="show")
@click.argument("name", shell_complete=options.completed("tools"))
@options.bundle
@options.json
def tool_show(name: str, bundle: str | None) -> None:
    """Show a tool: its parameters, aliases, limits, sandbox and examples."""
    inspected = look(bundle)
    tool, export = find(inspected.checked.tools, name)
    exports = tool.body.exports if export is None else [export]
    shown, lines = inspected.redact.all_of(
        [to_builtins(whole_tool(tool, exports)), tool_page(tool, exports, style_of(sys.stdout))]
    )
    emit({**shown, "file": tool.document.file}, lines)


def whole_tool(tool: CheckedTool, exports: Iterable[ToolExport]) -> dict[str, Any]:
    """The document of --json."""
    place = tool.document.place("metadata", "name")
    gets = {} if granted_as_requested(tool) else {"granted": whole(tool.granted)}
    return {
        "name": tool_identity(tool.name),
        "source": tool.source,
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


def tool_page(tool: CheckedTool, exports: Iterable[ToolExport], style: Style) -> list[str]:
    """The page for a person."""
    place = tool.document.place("metadata", "name")
    where = f"{short_path(place.file, os.getcwd())}:{place.line}"
    lines = [f"{style.bold(tool_identity(tool.name))}  {style.dim(printable(f'{tool.source}, {where}'))}"]
    for export in exports:
        lines += ["", style.bold(build_tool_name(tool.name, export.name))]
        if export.description:
            lines.append(f"  {printable(' '.join(export.description.split()))}")
        lines += [f"  {line}".rstrip() for line in [*_parameters(export, style), *_remarks(export), *_examples(export)]]
    lines += ["", style.bold("limits and sandbox"), *[f"  {line}" for line in _sandbox(tool)]]
    return lines


def _parameters(export: ToolExport, style: Style) -> list[str]:
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


@click.command(name="list")
@options.bundle
@options.json
def extension_list(bundle: str | None) -> None:
    """List every extension of the bundle and of the bundled package."""
    inspected = look(bundle)
    rows = extension_rows(inspected)
    found, lines = inspected.redact.all_of([rows, extension_table(rows, style_of(sys.stdout))])
    emit({"bundle": inspected.path, "extensions": found}, lines)


def extension_rows(inspected: Inspected) -> list[dict[str, Any]]:
    """One row for each extension. A bundled extension is left out when the bundle has one of the same name."""
    own, base = inspected.checked.extensions, BaseExtensions()
    others = {name: base.find(name) for name in base.names() if name not in own}
    rows: list[dict[str, Any]] = []
    for source, found in (("bundle", own), (BASE_PACKAGE, others)):
        for name, extension in found.items():
            if extension is None:
                continue
            agents = [
                agent.name
                for agent in inspected.checked.agents.values()
                if any(spec.name == name for spec in agent.extensions)
            ]
            row = {"name": name, "source": source, "entry": extension.resource.spec.entry, "agents": agents}
            rows.append(row if extension.schema is None else {**row, "configSchema": extension.schema})
    return rows


def extension_table(rows: list[dict[str, Any]], style: Style) -> list[str]:
    """One line for each: its name, its source, the keys of its config, and the agents that use it."""
    names, sources = (max(width_of(row[column]) for row in rows) for column in ("name", "source"))
    lines = []
    for row in rows:
        keys = ", ".join((row.get("configSchema") or {}).get("properties") or ())
        users = f"used by {', '.join(row['agents'])}" if row["agents"] else ""
        words = "; ".join(part for part in (f"config: {keys}" if keys else "", users) if part)
        name, source = filled(row["name"], names), filled(row["source"], sources)
        lines.append(f"{style.bold(printable(name))}  {style.dim(source)}  {printable(words)}".rstrip())
    return lines


COMMANDS = {"tool list": tool_list, "tool show": tool_show, "extension list": extension_list}
