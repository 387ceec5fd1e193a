"""Options that several commands share. Imports click and nothing that takes time, so that `--help` is quick."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

import click

from goondan.kernel.cli.rules import direct

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_Agent = TypeVar("_Agent", str, str | None)
_Key = TypeVar("_Key", str, str | None)

Completion = Callable[[click.Context, click.Parameter, str], list[Any]]


def completed(source: str, *more: str) -> Completion:
    """Offers what the function `source` of goondan.kernel.cli.completions finds, which is imported only for it. `more`:
    its further arguments.
    """

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        import importlib

        # Imported by its name, like the commands: the pure modules that know these options read no files.
        completions: Any = importlib.import_module("goondan.kernel.cli.completions")
        found = getattr(completions, source)
        items: list[Any] = completions.offer(lambda ctx: found(ctx, *more), ctx, incomplete)
        return items

    return complete


def completed_path(kind: Literal["file", "dir"]) -> Completion:
    """Lets the shell complete a path."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type=kind)]

    return complete


class Seconds(click.FloatRange):
    """A time to wait, in seconds: more than zero and at most a year.

    `nan` is neither less nor more than a limit, so a range alone lets it through.
    """

    #: No command waits longer for one answer. As milliseconds it fits every integer of the wire.
    MOST: Final = 366 * 24 * 3600

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=self.MOST)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is not a number of seconds.", param, ctx)
        return seconds


def named(agent: _Agent, key: _Key) -> tuple[_Agent, str | _Key]:
    """Agent and instance key as a person gave them: also as `AGENT/KEY`, which is how lists show an instance. Raises
    GoondanError E_USAGE for two keys.
    """
    name, slash, own = (agent or "").partition("/")
    if not slash:
        return agent, key
    if key not in (None, DEFAULT_INSTANCE, own):
        from goondan.schemas.wire.errors import fail

        raise fail("E_USAGE", f"two instances are named: {own[:100]!r} and {key[:100]!r}", suggestion="Name one.")
    return name, own


#: Where events and calls go when no instance is named.
DEFAULT_INSTANCE: Final = direct.DEFAULT_INSTANCE


def in_folder(text: str) -> Decorator:
    """The option --dir, with the folder of a bundle that is written to. `text` is its help."""
    complete = completed_path("dir")
    return click.option("--dir", "folder", metavar="DIR", default=".", shell_complete=complete, help=text)


bundle: Final[Decorator] = click.option(
    "--bundle",
    metavar="PATH",
    shell_complete=completed_path("file"),
    help="The bundle: a goondan.yaml or its directory.  [default: ./goondan.yaml, else the quickstart]",
)
policy: Final[Decorator] = click.option(
    "--policy", metavar="FILE", help="What you grant, besides the policy.yaml of the state root."
)
trust: Final[Decorator] = click.option(
    "--trust", is_flag=True, help="Trust the bundle for this time, whatever it asks for; see gdn trust."
)
reasoning: Final[Decorator] = click.option(
    "--reasoning",
    is_flag=True,
    help="Show the model's reasoning where it is not a terminal, too: on stderr, or with --json in the document.",
)


def _keep_json(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    from goondan.kernel.cli.output import say_json

    say_json(wanted=value)
    return value


#: `--json`. The command has no parameter for it: it prints its result with output.emit, or asks output.wants_json.
json: Final[Decorator] = click.option(
    "--json", "as_json", is_flag=True, expose_value=False, callback=_keep_json, help="Print one JSON document."
)
workdir: Final[Decorator] = click.option(
    "--workdir",
    metavar="DIR",
    shell_complete=completed_path("dir"),
    help="Tools work in this directory, and may write there, instead of the instance's own.",
)
instance: Final[Decorator] = click.option(
    "--instance",
    metavar="KEY",
    default=DEFAULT_INSTANCE,
    show_default=True,
    shell_complete=completed("instances"),
    help="The instance of the agent.",
)
