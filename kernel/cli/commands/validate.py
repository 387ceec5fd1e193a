"""`gdn validate [P] [--bundle P] [--json]`: reports everything that is wrong with a bundle. Nothing is started.

Exit status 0 for a bundle that can run, 2 for one that cannot. With --json, one document on stdout:
{valid, errors, warnings, dropped?, bundle?, entryAgent?, agents, tools}.

Source: docs/design/bundle.md sections 1 and 7; requirement VALIDATE-04.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import click

from goondan.kernel.bundle.problems import BundleError, Problem
from goondan.kernel.cli import options
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    from goondan.kernel.bundle.checked import CheckedAgent
    from goondan.kernel.bundle.loader import Inspected

#: Exit status for a bundle that cannot run.
INVALID: Final = 2


@click.command(name="validate")
@click.argument("path", required=False, metavar="[BUNDLE]", shell_complete=options.completed_path("file"))
@options.bundle
@options.policy
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(path: str | None, bundle: str | None, policy: str | None, as_json: bool) -> int:
    """Check a bundle: a goondan.yaml or a directory (default: ./goondan.yaml, else the quickstart).

    --bundle names it as in other commands. Every error is reported with its file, line, column and a suggestion;
    nothing is started.
    """
    from goondan.kernel.bundle.loader import inspect_bundle
    from goondan.kernel.cli.output import write_result
    from goondan.kernel.cli.state import state_of
    from goondan.kernel.paths import find_bundle

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
    write_result(report, *lines, as_json=as_json)
    return 0 if report["valid"] else INVALID


def describe(inspected: Inspected) -> dict[str, Any]:
    """The document that --json prints. Agents and tools are listed if they could be read. The `source` of a tool is the
    name of its package, or `bundle` for a tool of the bundle.
    """
    from goondan.kernel.cli.commands.tool_catalog import source
    from goondan.schemas.bundle.address import build_tool_name

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
                {"name": build_tool_name(tool.name, export.name), "source": source(tool)}
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
    from goondan.kernel.bundle.models import shown_endpoint

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
    from goondan.kernel.bundle.models import model_text
    from goondan.kernel.bundle.problems import counts, problem_lines, short_path

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
    from goondan.kernel.bundle.problems import problem_lines

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
