"""`gdn schema export DIR`: the contract as JSON Schema files, for editors and other languages.

Source: design section 11.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.group(name="schema")
def command() -> None:
    """The contract as JSON Schema."""


@command.command(name="export")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def export(folder: Path, as_json: bool) -> int:
    """Write the schemas of bundles, frames and workers into DIR."""
    from kernel.cli.output import write as write_text
    from kernel.cli.output import write_json
    from schemas.export import write

    files = [str(path) for path in write(folder)]
    if as_json:
        write_json({"files": files})
    else:
        write_text("\n".join(files))
    return 0
