"""Commands about the files of a bundle: `gdn init`, `gdn validate`, `gdn tool list`, `gdn tool show` and `gdn extension
list`. Nothing is started, so what extensions register when they run is not known here.

Each template is a folder of kernel/templates: a whole bundle that runs without a key. It is copied without changes.
Without --force no existing file is touched: everything is checked before the first file is written.

The exit status of `validate` is 0 for a bundle that can run, 2 for one that cannot.

NAME is a Tool (`bash`, `Tool/bash`) or one of its functions (`bash__exec`). With --json each prints one document:
    validate         {valid, errors, warnings, dropped?, bundle?, entryAgent?, agents, tools}
    tool list        {bundle, tools: [{name, tool, source, description?, parameters?, idempotent}]}
    tool show        {name, source, file, line, entry, errorMessageLimit, sandbox, granted?, exports}
    extension list   {bundle, extensions: [{name, source, entry, agents, configSchema?}]}

`source` is `bundle` or the package. `tool show` has every default filled in; `sandbox` is the manifest's request, and
`granted` is there when the tool gets something else.

Source: docs/design/bundle.md sections 1 and 7; docs/design/commands.md section 6; docs/design/tools.md sections 1 and
2; docs/design/sandbox.md section 1; requirements VALIDATE-04, CATALOG-01, NAME-01, NAME-13, BASE-01.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import Struct, to_builtins

from goondan import kernel
from goondan.features import FEATURES
from goondan.kernel.bundle.documents import BaseExtensions
from goondan.kernel.bundle.loader import Inspected, inspect_bundle
from goondan.kernel.bundle.rules.checked import CheckedTool
from goondan.kernel.bundle.rules.kinds import begin, local_models
from goondan.kernel.bundle.rules.models import model_text, shown_endpoint
from goondan.kernel.bundle.rules.problems import (
    BundleError,
    Problem,
    counts,
    did_you_mean,
    problem_lines,
    short_path,
    shown,
)
from goondan.kernel.bundle.rules.tool_pages import Parameter, parameter_rows, short
from goondan.kernel.cli import consent, options, output
from goondan.kernel.cli.state import state_of
from goondan.kernel.grants.powers import others
from goondan.kernel.paths import BUNDLE_FILE, find_bundle, root_of, state_dir
from goondan.schemas.bundle.address import SEPARATOR, build_tool_name, parse_tool_name, tool_identity
from goondan.schemas.bundle.resources import BASE_PACKAGE, ToolExport
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    from goondan.kernel.bundle.rules.checked import CheckedAgent

#: Template -> a command to try with it, besides `gdn run`. Its files are in kernel/templates/<template>.
TEMPLATES: Final[dict[str, list[tuple[str, str]]]] = {
    "agent": [],
    "two-agents": [
        ("gdn run --detach; gdn send reviewer TEXT", "reaches the other agent; gdn stop ends the swarm"),
        ("gdn run --workdir DIR", "both work in your folder DIR"),
    ],
    "team": [
        ("gdn run --detach; gdn send coder TEXT", "reaches one of the others; gdn stop ends the swarm"),
        ("gdn run --workdir DIR", "all three work in your folder DIR"),
    ],
    "tool": [
        ('gdn call notes__add \'{"text": "hello"}\'', "one call of the tool, in its jail"),
        ("python3 -m unittest discover -s tests", "tests the tool by itself"),
    ],
}


@click.command()
@click.argument("folder", metavar="[DIR]", default=".", shell_complete=options.completed_path("dir"))
@click.option(
    "--template", type=click.Choice(list(TEMPLATES)), default="agent", show_default=True, help="What to begin with."
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
@options.json
def init(folder: str, template: str, force: bool) -> None:
    """Write a new bundle into DIR (default: here): one agent, two that review each other's files, a team of three, or
    one with a tool of its own.

    It needs no key: `provider: auto` takes the model that the environment names, else a built-in console.
    """
    from goondan.kernel.cli.placing import Placing

    folder = os.path.expanduser(folder)
    with Placing(folder) as placing:
        made = placing.write(template_files(template), replace=force)
    _trust(folder)
    begun = list(begin(os.path.abspath(folder), made))
    steps = next_steps(folder, template)
    about = {"folder": os.path.abspath(folder), "template": template, "files": made}
    about |= {one.name: one.outcome for one in begun}
    if output.wants_json():
        output.write_json({**about, "next": steps})
        return
    width = max(len(step["command"]) for step in steps)
    lines = [f"wrote {output.printable(os.path.join(folder, name))}" for name in made]
    lines += [one.line for one in begun]
    lines += [
        "",
        "Next:",
        *(f"  {output.printable(step['command']):<{width}}   {step['what']}".rstrip() for step in steps),
    ]
    output.write(*lines)
    _offer_server(folder)


def _offer_server(folder: str) -> None:
    """Ask about a model server that runs here: the new bundle takes the model of the environment."""
    with suppress(GoondanError):  # the bundle is written; the first run asks again
        path = find_bundle(os.path.join(folder, BUNDLE_FILE))
        local_models().offer(root_of(state_dir(path)), path)


def _trust(folder: str) -> None:
    """Trust the bundle: we have just written it, so no question is needed, whatever model the environment names
    later.
    """
    with suppress(GoondanError):  # if this fails, the first run asks
        path = find_bundle(os.path.join(folder, BUNDLE_FILE))
        state = state_of(path)
        inspected = inspect_bundle(path, state_dir=state, handlers=False)
        # If other users can write there, the files may no longer be the ones that we wrote.
        if not inspected.errors and not others(inspected.judgement.powers):
            consent.remember(inspected, state, how="init")


def template_files(template: str) -> dict[str, bytes]:
    """Relative path -> content of a template's files."""
    return files_below(os.path.join(os.path.dirname(kernel.__file__), "templates", template))


def files_below(root: str) -> dict[str, bytes]:
    """Relative path -> content of the files of a folder, without compiled ones."""
    files: dict[str, bytes] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = os.path.join(folder, name)
            with open(path, "rb") as source:
                files[os.path.relpath(path, root)] = source.read()
    return files


def next_steps(folder: str, template: str) -> list[dict[str, str]]:
    """What to do now: {command, what}, in order."""
    enter = [("cd " + quote(folder), "")] if os.path.abspath(folder) != os.getcwd() else []
    run = ("gdn run", "talks to it; Ctrl-D ends it")
    rest = [("gdn validate", "checks goondan.yaml after a change")]
    rest += [step for feature in FEATURES for step in feature.to_try.items()]
    return [{"command": line, "what": what} for line, what in [*enter, run, *TEMPLATES[template], *rest]]


#: Exit status for a bundle that cannot run.
INVALID: Final = 2


@click.command(name="validate")
@click.argument("path", required=False, metavar="[BUNDLE]", shell_complete=options.completed_path("file"))
@options.bundle
@options.policy
@options.json
def validate(path: str | None, bundle: str | None, policy: str | None) -> int:
    """Check a bundle: a goondan.yaml or a directory (default: ./goondan.yaml, else the quickstart).

    --bundle names it as in other commands. Every error is reported with its file, line, column and a suggestion;
    nothing is started.
    """
    if path is not None and bundle is not None:
        raise fail("E_USAGE", "give BUNDLE or --bundle, not both")
    named = bundle if path is None else path
    try:
        found = find_bundle(named)
        inspected = inspect_bundle(found, state_dir=state_of(found), policy=policy)
    except BundleError as error:
        report, lines = _refused(error.problems)
    except GoondanError as error:
        report, lines = _refused([_problem(error, named or "")])
    else:
        report, lines = describe(inspected), human(inspected, _cwd())
    output.emit(report, lines)
    return 0 if report["valid"] else INVALID


def describe(inspected: Inspected) -> dict[str, Any]:
    """The document that --json prints. Agents and tools are listed if they could be read. The `source` of a tool is the
    name of its package, or `bundle` for a tool of the bundle.
    """
    checked, hide = inspected.checked, inspected.redact.all_of
    report: dict[str, Any] = {
        "valid": not inspected.errors,
        "errors": inspected.errors,
        "warnings": inspected.warnings,
        "bundle": inspected.path,
        # Values that documents take from the environment are not shown.
        "entryAgent": hide(checked.entry_agent) or None,
        "agents": hide([_agent(agent) for agent in checked.agents.values()]),
        "tools": hide(
            [
                {"name": build_tool_name(tool.name, export.name), "source": tool.source}
                for tool in checked.tools.values()
                for export in tool.body.exports
            ]
        ),
    }
    if inspected.dropped:
        report["dropped"] = inspected.dropped
    return report


def _agent(agent: CheckedAgent) -> dict[str, Any]:
    """One agent of the document. With `provider: auto` it has `chosenBy`: the variable that decided, "" for none."""
    model = agent.model
    row: dict[str, Any] = {"name": agent.name, "provider": None, "model": None}
    if model is not None:
        row |= {"provider": model.provider, "model": model.model}
        if model.endpoint is not None:
            row["endpoint"] = shown_endpoint(model.endpoint)
        if model.chosen_by is not None:
            row["chosenBy"] = model.chosen_by
    return {**row, "tools": agent.tools}


def human(inspected: Inspected, cwd: str) -> list[str]:
    """The lines for a person: first the problems, last what the bundle has."""
    lines = problem_lines(inspected.errors, cwd) + problem_lines(inspected.warnings, cwd, warning=True)
    name = short_path(inspected.path, cwd)
    if inspected.errors:
        if inspected.dropped:
            lines.append(f"… and {inspected.dropped} more")
        return [*lines, f"{name}: {counts(len(inspected.errors) + inspected.dropped, len(inspected.warnings))}"]
    checked = inspected.checked
    tools = checked.tools.values()
    agents = [name + (" (entry)" if name == checked.entry_agent else "") for name in checked.agents]
    models = [f"{name} talks to {model_text(agent.model)}" for name, agent in checked.agents.items() if agent.model]
    own = [f"{tool.name} ({tool.package})" if tool.package else tool.name for tool in tools if not tool.bundled]
    warned = f" ({counts(0, len(inspected.warnings))})" if inspected.warnings else ""
    return [
        *lines,
        f"{name}: valid{warned}",
        *inspected.redact.all_of(
            [
                f"  agents: {', '.join(agents) or 'none'}",
                *[f"  model: {line}" for line in models],
                f"  tools: {', '.join(own) or 'none of its own'}, and {len(tools) - len(own)} bundled",
            ]
        ),
    ]


def _refused(problems: list[Problem]) -> tuple[dict[str, Any], list[str]]:
    """The document for a bundle that could not be read at all."""
    report: dict[str, Any] = {"valid": False, "errors": problems, "warnings": [], "agents": [], "tools": []}
    return report, problem_lines(problems, _cwd())


def _cwd() -> str:
    """The current folder, from which shown paths begin. When it was removed, the command does not fail."""
    try:
        return os.getcwd()
    except OSError:
        return "/"


def _problem(error: GoondanError, file: str) -> Problem:
    info = error.info
    return Problem(
        code=info.code, message=info.message, file=file, suggestion=info.suggestion or "", help_url=info.help_url
    )


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
    width = shutil.get_terminal_size().columns if output.is_terminal(sys.stdout) else None
    found, lines = inspected.redact.all_of([tool_rows(tools), tool_table(tools, output.style_of(sys.stdout), width)])
    output.emit({"bundle": inspected.path, "tools": found}, lines)


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


def tool_table(tools: Iterable[CheckedTool], style: output.Style, width: int | None) -> list[str]:
    """One line for each export: its name, its source and the first sentence of its description. `width` is the width of
    the line (characters); None: there is no limit.
    """
    rows = [(row["name"], row["source"], row.get("description", "")) for row in tool_rows(tools)]
    if not rows:
        return ["no tools"]
    taken = sum(max(output.width_of(row[column]) for row in rows) for column in (0, 1)) + 4
    lines = []
    for name, source, description in rows:
        words = output.printable(" ".join(description.split())).partition(". ")[0].rstrip(".")
        if width is not None:
            room = max(width - taken, _MIN_WORDS)
            words = words if len(words) <= room else words[: room - 1] + "…"
        lines.append((name, source, words))
    return output.columns(lines, style.bold, style.dim)


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
        [to_builtins(whole_tool(tool, exports)), tool_page(tool, exports, output.style_of(sys.stdout))]
    )
    output.emit({**shown, "file": tool.document.file}, lines)


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


def tool_page(tool: CheckedTool, exports: Iterable[ToolExport], style: output.Style) -> list[str]:
    """The page for a person."""
    place = tool.document.place("metadata", "name")
    where = f"{short_path(place.file, os.getcwd())}:{place.line}"
    lines = [f"{style.bold(tool_identity(tool.name))}  {style.dim(output.printable(f'{tool.source}, {where}'))}"]
    for export in exports:
        lines += ["", style.bold(build_tool_name(tool.name, export.name))]
        if export.description:
            lines.append(f"  {output.printable(' '.join(export.description.split()))}")
        lines += [f"  {line}".rstrip() for line in [*_parameters(export, style), *_remarks(export), *_examples(export)]]
    lines += ["", style.bold("limits and sandbox"), *[f"  {line}" for line in _sandbox(tool)]]
    return lines


def _parameters(export: ToolExport, style: output.Style) -> list[str]:
    if export.parameters is None:
        return ["", "no parameters are declared: arguments are not checked"]
    rows = parameter_rows(export.parameters)
    if not rows:
        return ["", "no parameters"]
    table = [("parameter", "type", "", "default", "what it is"), *map(_cells, rows)]
    kept = [column for column in range(5) if column < 2 or any(row[column] for row in table[1:])]
    head, *lines = output.columns([[row[column] for column in kept] for row in table])
    return ["", style.dim(head), *lines]


def _cells(row: Parameter) -> tuple[str, ...]:
    required = "required" if row.required else ""
    return row.name, row.type, required, row.default, " ".join(row.description.split())


def _remarks(export: ToolExport) -> list[str]:
    found = [
        f"also called {output.printable(alias)}: {output.printable(name)}" for alias, name in export.aliases.items()
    ]
    if export.idempotent:
        found.append("idempotent: it is called again when its outcome is unknown, and once more when its process ends")
    if export.background:
        found.append("background: processes that it leaves behind live until the jail retires")
    return ["", *found] if found else []


def _examples(export: ToolExport) -> list[str]:
    lines = []
    for example in export.examples:
        answer = "" if example.output is None else f"  → {output.printable(short(example.output))}"
        lines.append(f"example: {output.printable(short(example.input))}{answer}")
    return ["", *lines] if lines else []


def _sandbox(tool: CheckedTool) -> list[str]:
    asked = whole(tool.body.sandbox)
    limits = asked.pop("limits")
    rows = {"error messages": f"at most {tool.body.error_message_limit} characters", "entry": tool.entry}
    rows |= {key: value if isinstance(value, str) else short(value) for key, value in asked.items() if _says(value)}
    rows["limits"] = ", ".join(f"{key} {value}" for key, value in limits.items())
    if not granted_as_requested(tool):
        rows["granted"] = "something else than this: `gdn grant list` says what"
    return output.columns(rows.items())


@click.command(name="list")
@options.bundle
@options.json
def extension_list(bundle: str | None) -> None:
    """List every extension of the bundle and of the bundled package."""
    inspected = look(bundle)
    rows = extension_rows(inspected)
    found, lines = inspected.redact.all_of([rows, extension_table(rows, output.style_of(sys.stdout))])
    output.emit({"bundle": inspected.path, "extensions": found}, lines)


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


def extension_table(rows: list[dict[str, Any]], style: output.Style) -> list[str]:
    """One line for each: its name, its source, the keys of its config, and the agents that use it."""
    lines = []
    for row in rows:
        keys = ", ".join((row.get("configSchema") or {}).get("properties") or ())
        users = f"used by {', '.join(row['agents'])}" if row["agents"] else ""
        words = "; ".join(part for part in (f"config: {keys}" if keys else "", users) if part)
        lines.append((row["name"], row["source"], words))
    return output.columns(lines, style.bold, style.dim)


COMMANDS = {
    "init": init,
    "validate": validate,
    "tool list": tool_list,
    "tool show": tool_show,
    "extension list": extension_list,
}
