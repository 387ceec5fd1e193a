"""`gdn schema export DIR`: the contract as JSON Schema files, for editors and other languages.

Source: docs/design/wire.md section 1.
"""

from __future__ import annotations

import os

import click


@click.group(name="schema")
def command() -> None:
    """The contract as JSON Schema."""


@command.command(name="export")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def export(folder: str, as_json: bool) -> int:
    """Write the schemas of bundles, frames and workers into DIR."""
    from importlib.resources import files

    from goondan.kernel.cli.output import write_result
    from goondan.kernel.cli.placing import Placing

    schemas = {
        file.name: file.read_bytes() for file in files("goondan.schemas").joinpath("json").iterdir() if file.is_file()
    }
    with Placing(folder) as placing:
        written = [os.path.join(folder, name) for name in placing.write(schemas, replace=True)]
    write_result({"files": written}, *written, as_json=as_json)
    return 0
