"""`gdn init` and `gdn validate`: a new bundle from kernel/templates, and everything that is wrong with one. Nothing is
started.

Each template is a folder of kernel/templates: a whole bundle that runs without a key. It is copied without changes.
Without --force no existing file is touched: everything is checked before the first file is written.

The exit status of `validate` is 0 for a bundle that can run, 2 for one that cannot. With --json, one document on
stdout: {valid, errors, warnings, dropped?, bundle?, entryAgent?, agents, tools}.

Source: docs/design/bundle.md sections 1 and 7; docs/design/commands.md section 6; requirement VALIDATE-04.
"""

from __future__ import annotations

import os
from contextlib import suppress
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click

from goondan import kernel
from goondan.kernel.bundle.kinds import begin, local_models
from goondan.kernel.bundle.loader import Inspected, inspect_bundle
from goondan.kernel.bundle.models import model_text, shown_endpoint
from goondan.kernel.bundle.problems import BundleError, Problem, counts, problem_lines, short_path
from goondan.kernel.cli import options
from goondan.kernel.cli.consent import remember
from goondan.kernel.cli.output import emit, wants_json, write, write_json
from goondan.kernel.cli.state import state_of
from goondan.kernel.cli.terminal import printable
from goondan.kernel.paths import BUNDLE_FILE, find_bundle, root_of, state_dir
from goondan.kernel.trust.powers import others
from goondan.schemas.bundle.address import build_tool_name
from goondan.schemas.wire.errors import GoondanError, fail

if TYPE_CHECKING:
    from goondan.kernel.bundle.checked import CheckedAgent


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
    if wants_json():
        write_json({**about, "next": steps})
        return
    width = max(len(step["command"]) for step in steps)
    lines = [f"wrote {printable(os.path.join(folder, name))}" for name in made]
    lines += [one.line for one in begun]
    lines += ["", "Next:", *(f"  {printable(step['command']):<{width}}   {step['what']}".rstrip() for step in steps)]
    write(*lines)
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
            remember(inspected, state, how="init")


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
    rest = [("gdn validate", "checks goondan.yaml after a change"), ("gdn doctor", "checks this machine")]
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
    emit(report, lines)
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


COMMANDS = {"init": init, "validate": validate}
