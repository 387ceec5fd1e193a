"""`gdn extension list`: every extension that an agent can have, the bundle's own first. Nothing is run.

With --json: {bundle, extensions: [{name, source, entry, agents, configSchema?}]}; `source` is `bundle` or the
package, and `agents` are those that use it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from goondan.kernel.cli import options
from goondan.kernel.cli.terminal import Style, filled, printable, style_of, width_of

if TYPE_CHECKING:
    from goondan.kernel.bundle.loader import Inspected


@click.command(name="list")
@options.bundle
@options.as_json
def command(bundle: str | None, as_json: bool) -> int:
    """List every extension of the bundle and of the bundled package."""
    from goondan.kernel.cli.commands.tool_catalog import look
    from goondan.kernel.cli.output import write, write_json

    inspected = look(bundle)
    rows = describe(inspected)
    if as_json:
        write_json({"bundle": inspected.path, "extensions": inspected.redact.all_of(rows)})
        return 0
    write(*inspected.redact.all_of(table(rows, style_of(sys.stdout))))
    return 0


def describe(inspected: Inspected) -> list[dict[str, Any]]:
    """One row for each extension. A bundled extension is left out when the bundle has one of the same name."""
    from goondan.kernel.bundle.base_extensions import BaseExtensions
    from goondan.schemas.bundle.resources import BASE_PACKAGE

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


def table(rows: list[dict[str, Any]], style: Style) -> list[str]:
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
