"""`gdn extension new NAME`: an extension to begin with: `extensions/NAME.py`, `tests/test_NAME.py`, and its document in
goondan.yaml.

As `gdn tool new` does it: the document is put behind the last one, nothing that is there is replaced, and when anything
fails nothing is left. Here there must be a goondan.yaml: an extension is of use to an agent only.
"""

from __future__ import annotations

import os
from typing import Final

import click

from kernel.cli import options

TEMPLATE: Final = "new-extension"
#: The template's manifest, which becomes part of goondan.yaml.
MANIFEST: Final = "extension.yaml"
#: What stands for the extension's name and for its module's name in the template.
NAME_MARK: Final = "EXTENSION-NAME"
MODULE_MARK: Final = "EXTENSION_MODULE"


@click.command(name="new")
@click.argument("name")
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    default=".",
    shell_complete=options.completed_path("dir"),
    help="The bundle's folder.  [default: here]",
)
@options.as_json
def command(name: str, folder: str, as_json: bool) -> int:
    """Write a new extension into a bundle: its module, its test, and its document in goondan.yaml."""
    from kernel.cli.output import write, write_json
    from kernel.cli.placing import Placing
    from kernel.cli.terminal import printable
    from kernel.cli.tool_new import addition, read_bundle
    from kernel.paths import BUNDLE_FILE
    from schemas.errors import fail

    folder = os.path.expanduser(folder)
    check_name(name)
    files = filled(name)
    document = files.pop(MANIFEST)
    bundle = os.path.join(folder, BUNDLE_FILE)
    before = read_bundle(bundle, name, kind="Extension")
    if before is None:
        hint = "Begin with `gdn init`, or name the folder with --dir."
        raise fail("E_INIT", f"there is no {bundle}", suggestion=hint)
    added = addition(bundle, before, document)
    with Placing(folder) as placing:
        placing.write(files, replace=False)
        placing.append(BUNDLE_FILE, before, added)
    steps = next_steps(folder, name)
    if as_json:
        write_json({"folder": os.path.abspath(folder), "files": list(files), "changed": BUNDLE_FILE, "next": steps})
        return 0
    width = max(len(step["command"]) for step in steps)
    lines = [f"wrote {printable(os.path.join(folder, path))}" for path in files]
    lines.append(f"added Extension/{name} to {printable(bundle)}")
    lines += ["", "Next:", *(f"  {printable(step['command']):<{width}}   {step['what']}".rstrip() for step in steps)]
    write(*lines)
    return 0


def check_name(name: str) -> None:
    """A name that an Extension can have and no bundled one has. Raises GoondanError E_USAGE, E_INIT."""
    from kernel.bundle.base_extensions import BaseExtensions
    from kernel.bundle.problems import shown
    from schemas.address import is_resource_name
    from schemas.errors import CODES, fail

    if not is_resource_name(name):
        raise fail("E_USAGE", f"{shown(name)} cannot be an extension's name", suggestion=CODES["E_CONFIG_INVALID_NAME"])
    if name in BaseExtensions().names():
        raise fail("E_INIT", f"there is a bundled extension {name!r}", suggestion="Choose another name.")


def filled(name: str) -> dict[str, bytes]:
    """Relative path -> content: the template for an extension of this name."""
    from kernel.cli.init import template_files
    from kernel.cli.tool_new import module_name

    module = module_name(name)

    def fill(text: str) -> str:
        return text.replace(NAME_MARK, name).replace(MODULE_MARK, module)

    return {fill(path): fill(data.decode("utf-8")).encode() for path, data in template_files(TEMPLATE).items()}


def next_steps(folder: str, name: str) -> list[dict[str, str]]:
    """What to do now: {command, what}, in order."""
    from shlex import quote

    enter = [("cd " + quote(folder), "")] if os.path.abspath(folder) != os.getcwd() else []
    steps = [
        *enter,
        (f"gdn extension test {name} --trust", "loads it, and lets a turn pass through it"),
        ("python3 -m unittest discover -s tests", "tests the functions by themselves"),
        (f"- Extension/{name}", "in spec.extensions of an Agent gives it to the agent"),
    ]
    return [{"command": line, "what": what} for line, what in steps]
