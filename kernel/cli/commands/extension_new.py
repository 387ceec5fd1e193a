"""`gdn extension new NAME`: an extension to begin with: `extensions/NAME.py`, `tests/test_NAME.py`, and its document in
goondan.yaml.

There must be a goondan.yaml, because an extension needs an agent.
"""

from __future__ import annotations

from typing import Final

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.commands.new_resource import NewResource, check_name, in_folder

_EXTENSION: Final = NewResource(
    kind="Extension",
    template="new-extension",
    manifest="extension.yaml",
    name_mark="EXTENSION-NAME",
    module_mark="EXTENSION_MODULE",
    needs_bundle=True,
)


@click.command(name="new")
@click.argument("name")
@in_folder
@options.as_json
def command(name: str, folder: str, as_json: bool) -> int:
    """Write a new extension into a bundle: its module, its test, and its document in goondan.yaml."""
    from goondan.kernel.bundle.base_extensions import BaseExtensions

    check_name(name, _EXTENSION.kind, BaseExtensions().names())
    steps = [
        (f"gdn extension test {name} --trust", "loads it, and lets a turn pass through it"),
        ("python3 -m unittest discover -s tests", "tests the functions by themselves"),
        (f"- Extension/{name}", "in spec.extensions of an Agent gives it to the agent"),
    ]
    _EXTENSION.write(name, folder, steps, as_json=as_json)
    return 0
