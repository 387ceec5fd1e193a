"""`gdn init [DIR]`: writes a first bundle, from kernel/templates.

Each template is a folder of kernel/templates: a whole bundle that runs without a key. It is copied without changes.
Without --force no existing file is touched: everything is checked before the first file is written.

Source: docs/design/commands.md section 6.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import click

from goondan.kernel.cli import options
from goondan.kernel.paths import BUNDLE_FILE, find_bundle, root_of, state_dir
from goondan.schemas.wire.errors import GoondanError

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


#: What was done about the repository -> the line that says so.
@click.command()
@click.argument("folder", metavar="[DIR]", default=".", shell_complete=options.completed_path("dir"))
@click.option(
    "--template", type=click.Choice(list(TEMPLATES)), default="agent", show_default=True, help="What to begin with."
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
@options.as_json
def command(folder: str, template: str, force: bool, as_json: bool) -> int:
    """Write a new bundle into DIR (default: here): one agent, two that review each other's files, a team of three, or
    one with a tool of its own.

    It needs no key: `provider: auto` takes the model that the environment names, else a built-in console.
    """
    from goondan.kernel.bundle.kinds import begin
    from goondan.kernel.cli.output import write, write_json
    from goondan.kernel.cli.placing import Placing

    folder = os.path.expanduser(folder)
    with Placing(folder) as placing:
        made = placing.write(template_files(template), replace=force)
    _trust(folder)
    begun = list(begin(os.path.abspath(folder), made))
    steps = next_steps(folder, template)
    if as_json:
        about = {"folder": os.path.abspath(folder), "template": template, "files": made}
        about |= {one.name: one.outcome for one in begun}
        write_json({**about, "next": steps})
        return 0
    from goondan.kernel.cli.terminal import printable

    width = max(len(step["command"]) for step in steps)
    lines = [f"wrote {printable(os.path.join(folder, name))}" for name in made]
    lines += [one.line for one in begun]
    lines += ["", "Next:", *(f"  {printable(step['command']):<{width}}   {step['what']}".rstrip() for step in steps)]
    write(*lines)
    _offer_server(folder)
    return 0


def _offer_server(folder: str) -> None:
    """Ask about a model server that runs here: the new bundle takes the model of the environment."""
    from goondan.kernel.bundle.kinds import local_models

    with suppress(GoondanError):  # the bundle is written; the first run asks again
        path = find_bundle(os.path.join(folder, BUNDLE_FILE))
        local_models().offer(root_of(state_dir(path)), path)


def _trust(folder: str) -> None:
    """Trust the bundle: we have just written it, so no question is needed, whatever model the environment names
    later.
    """
    from goondan.kernel.bundle.loader import inspect_bundle
    from goondan.kernel.cli.consent import remember
    from goondan.kernel.cli.state import state_of
    from goondan.kernel.trust.powers import others

    with suppress(GoondanError):  # if this fails, the first run asks
        path = find_bundle(os.path.join(folder, BUNDLE_FILE))
        state = state_of(path)
        inspected = inspect_bundle(path, state_dir=state, handlers=False)
        # If other users can write there, the files may no longer be the ones that we wrote.
        if not inspected.errors and not others(inspected.judgement.powers):
            remember(inspected, state, how="init")


def template_files(template: str) -> dict[str, bytes]:
    """Relative path -> content of a template's files."""
    from goondan import kernel

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
    from shlex import quote

    enter = [("cd " + quote(folder), "")] if os.path.abspath(folder) != os.getcwd() else []
    run = ("gdn run", "talks to it; Ctrl-D ends it")
    rest = [("gdn validate", "checks goondan.yaml after a change"), ("gdn doctor", "checks this machine")]
    return [{"command": line, "what": what} for line, what in [*enter, run, *TEMPLATES[template], *rest]]
