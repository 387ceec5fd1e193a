"""The command line as click reads it: groups, help, usage errors.

Source: docs/design/commands.md section 1.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import click

from goondan.kernel.cli.commands import command_of, helps
from goondan.kernel.start import import_whole

#: Exit status after an interrupt, and of bad usage: what a shell reports.
EXIT_INTERRUPTED: Final = 130
EXIT_USAGE: Final = 2


class Group(click.Group):
    """A group that knows the names and lines of help of its commands, and imports one when it is used. `whole`: its
    name with those of the groups that it is in; "" for `gdn`.
    """

    def __init__(self, *args: Any, whole: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self._whole = whole

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the tables."""
        return list(helps(self._whole))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One command, or a group in this one. None when there is none of this name."""
        lines = helps(self._whole)
        if cmd_name not in lines:
            return None
        whole = f"{self._whole} {cmd_name}".lstrip()
        if helps(whole):
            return Group(cmd_name, whole=whole, help=lines[cmd_name])
        return command_of(whole)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of `--help`."""
        with formatter.section("Commands"):
            formatter.write_dl(list(helps(self._whole).items()))


class _ReaderGone(Exception):
    """Nobody reads our output any more."""


class _Commands(Group):
    """The commands of `gdn`."""

    def invoke(self, ctx: click.Context) -> Any:
        import_whole("goondan.kernel.cli.output").say_json(wanted=False)  # until the command has read its options
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _ReaderGone from None  # click would end the process with 1


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="goondan-kernel", prog_name="gdn", message="%(prog)s %(version)s")
def group() -> None:
    """Goondan: swarms of agents in separate processes, their tools in a sandbox."""


def run(arguments: list[str], *, as_json: bool) -> Any:
    """Run one command line. Returns what the command returns, or an exit status. Raises what the command raises, and
    BrokenPipeError when nobody reads the output.
    """
    try:
        return group.main(arguments, prog_name="gdn", standalone_mode=False)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        return _usage(error, as_json)
    except _ReaderGone:
        raise BrokenPipeError from None


def _usage(error: click.ClickException, as_json: bool) -> int:
    from goondan.kernel.cli.output import print_error, write
    from goondan.schemas.wire.errors import fail

    if isinstance(error, click.exceptions.NoArgsIsHelpError) and not as_json:
        write(*error.format_message().split("\n"), stream=sys.stderr)  # a group without a command: its help
        return EXIT_USAGE
    context = getattr(error, "ctx", None)
    hint = f"Try `{context.command_path} --help`." if context is not None else "Try `gdn --help`."
    print_error(fail("E_USAGE", error.format_message(), suggestion=hint), as_json=as_json)
    return EXIT_USAGE
