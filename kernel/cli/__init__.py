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

from contextlib import suppress  # noqa: E402
from typing import Any, Final, NoReturn  # noqa: E402

from goondan.kernel.cli.rules import direct  # noqa: E402
from goondan.kernel.start import import_whole, uuid_alone  # noqa: E402
from goondan.schemas.system.secrecy import forbid_core_dumps  # noqa: E402

#: Exit status after an interrupt, when the reader of our output has gone, and after SIGTERM: what a shell reports.
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
EXIT_TERMINATED: Final = 143
#: The variable that a shell sets when it completes a line: click does that.
COMPLETING: Final = "_GDN_COMPLETE"


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
    except OSError:  # which was told, if the command had not failed before
        code = code or 1
    # Not sys.exit: a thread that waits for a line on stdin would delay the end of the interpreter.
    with suppress(OSError):
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
        result = _run(arguments, as_json)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (KeyboardInterrupt, EOFError):
        from goondan.kernel.cli.output import write

        with suppress(OSError):
            write("", stream=sys.stderr)  # as click does: the shell begins a line of its own
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return _reader_is_gone()
    except BaseException as error:  # whatever it is, a person gets one structured error
        from goondan.kernel.cli.output import exit_code, print_error, unexpected
        from goondan.schemas.wire.errors import GoondanError

        known = error if isinstance(error, GoondanError) else unexpected(error)
        try:
            print_error(known, as_json=as_json)
        except BrokenPipeError:
            return _reader_is_gone()
        except OSError:  # no document can be written: what went wrong is told where a person may see it
            with suppress(OSError):
                print_error(known, as_json=False)
        return exit_code(known)


def _run(arguments: list[str], as_json: bool) -> Any:
    line = None if COMPLETING in os.environ else direct.read(arguments)
    if line is None:
        uuid_alone()
        return import_whole("goondan.kernel.cli.program").run(arguments, as_json=as_json)
    ahead = import_whole("goondan.kernel.cli.supervisor_ahead")
    try:
        ahead.start(line.given["bundle"])
        uuid_alone()
        output = import_whole("goondan.kernel.cli.output")
        module = import_whole(f"goondan.kernel.cli.commands.{line.command}")
        output.say_json(wanted=line.as_json)
        return getattr(module, line.command)(**line.given)
    finally:
        ahead.end()


def _reader_is_gone() -> int:
    """Close stdout, which nobody reads any more. So the interpreter's last flush reports no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return EXIT_BROKEN_PIPE
