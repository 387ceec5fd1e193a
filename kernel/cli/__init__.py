"""`gdn`: the program. Its commands are in the table of commands/__init__.py, and each is imported only when it is used.

Rules of all commands.
- With `--json` stdout gets exactly one JSON document, on failure `{"error": {…}}`. Without it stdout gets the results,
  and stderr everything else.
- The exit status is 0, 1 for a failure, 2 for bad usage or a bad bundle, 130 after an interrupt, 141 when nobody reads
  the output.
- A person never sees a traceback.

Source: docs/design/commands.md sections 1 and 2.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

# When the collector looks at young, older and old objects. By default it looks fifty times while a command imports its
# modules, finds nothing, and takes 3 ms. The first of them are imported here.
gc.set_threshold(50_000, 20, 20)

from goondan.kernel.start import uuid_alone  # noqa: E402

uuid_alone()

from typing import Any, Final, NoReturn  # noqa: E402

import click  # noqa: E402

from goondan.kernel.cli.commands import Group  # noqa: E402
from goondan.schemas.system.secrecy import forbid_core_dumps  # noqa: E402

#: Exit status after an interrupt, when the reader of our output has gone, and after SIGTERM: what a shell reports.
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
EXIT_TERMINATED: Final = 143
EXIT_USAGE: Final = 2


class _ReaderGone(Exception):
    """Nobody reads our output any more."""


class _Commands(Group):
    """The commands of `gdn`."""

    def invoke(self, ctx: click.Context) -> Any:
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


def main() -> NoReturn:
    """The console script. Ends the process."""
    forbid_core_dumps()
    _open_standard_streams()
    # We do not use it. If development tools have installed it, msgspec would take 3 ms to import it.
    sys.modules.setdefault("typing_extensions", None)  # type: ignore[arg-type]
    signal.signal(signal.SIGTERM, _terminated)
    code = execute(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _reader_is_gone()
    # Not sys.exit: a thread that waits for a line on stdin would delay the end of the interpreter.
    sys.stderr.flush()
    os._exit(code)


def _open_standard_streams() -> None:
    """Open the standard streams that a shell has closed (`<&-`). Otherwise the next opened file would get their
    number.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _terminated(number: int, frame: object) -> NoReturn:
    """Handle SIGTERM: leave in the usual way, so that a kernel which was started for this command stops."""
    sys.exit(EXIT_TERMINATED)


def execute(arguments: list[str]) -> int:
    """Run one command line, and return its exit status. Raises nothing."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in ours
    try:
        result = group.main(arguments, prog_name="gdn", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        return _usage(error, as_json)
    except (_ReaderGone, BrokenPipeError):
        return _reader_is_gone()
    except BaseException as error:  # whatever it is, a person gets one structured error
        from goondan.kernel.cli.output import exit_code, print_error, unexpected
        from goondan.schemas.wire.errors import GoondanError

        known = error if isinstance(error, GoondanError) else unexpected(error)
        try:
            print_error(known, as_json=as_json)
        except BrokenPipeError:
            return _reader_is_gone()
        return exit_code(known)


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


def _reader_is_gone() -> int:
    """Close stdout, which nobody reads any more. So the interpreter's last flush reports no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return EXIT_BROKEN_PIPE
