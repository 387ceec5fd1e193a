"""Options that several commands share. Imports nothing but click: `--help` is to be quick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

#: Where events and calls go when no instance is named.
DEFAULT_INSTANCE: Final = "default"

bundle: Final[Decorator] = click.option(
    "--bundle",
    metavar="PATH",
    help="The bundle: a goondan.yaml or its directory.  [default: ./goondan.yaml, else the quickstart]",
)
as_json: Final[Decorator] = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
workdir: Final[Decorator] = click.option(
    "--workdir", metavar="DIR", help="Tools work in this directory, and may write there, instead of the instance's own."
)
instance: Final[Decorator] = click.option(
    "--instance", metavar="KEY", default=DEFAULT_INSTANCE, show_default=True, help="The instance of the agent."
)
