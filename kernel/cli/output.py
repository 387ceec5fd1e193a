"""The output of commands: results, errors, JSON documents. Only this module prints, so only this module has to escape
control characters.

Source: docs/design/commands.md section 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

import click
import msgspec

from goondan.kernel.cli.options import JSON_KEY
from goondan.schemas.text.visible import visible_json
from goondan.schemas.wire.errors import GoondanError, fail, help_url
from goondan.schemas.wire.frames import ErrorPayload

_USAGE_CODES = ("E_USAGE", "E_CONFIG_")


def write(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines and flush them, on stdout by default. Each is one line on a terminal, whatever is in it: line ends
    and control characters are shown by their number. Characters that the terminal cannot show become `?`.
    """
    from goondan.kernel.cli.terminal import shown_line

    _put("\n".join(map(shown_line, lines)) + "\n", stream or sys.stdout)


def write_text(text: str, *, stream: TextIO | None = None, raw: bool = False) -> None:
    """Print a text of a model, on stdout by default, exactly as it is but for control characters. They are shown by
    their number in pipes and files, too, because at the end of most pipes is a terminal. `raw`: they stay.
    """
    from goondan.kernel.cli.plain import flowing

    _put((text if raw else flowing(text)) + "\n", stream or sys.stdout)


def _put(text: str, out: TextIO) -> None:
    out.buffer.write(text.encode(out.encoding or "utf-8", "replace"))
    out.buffer.flush()


def columns_of(stream: TextIO, unknown: int) -> int:
    """The width of a terminal; `unknown` for what is none, or does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or unknown
    except (OSError, ValueError):
        return unknown


def write_json(value: Any) -> None:
    """Print one JSON document on one line."""
    _put_json(_encoded(value))


def write_result(document: Any, *lines: str, as_json: bool) -> None:
    """Print what a command has found or done: one JSON document, or lines for a person."""
    if as_json:
        write_json(document)
    else:
        write(*lines)


def emit(document: Any, lines: Iterable[str] = ()) -> None:
    """Print what a command has found or done: with --json (options.json) the document, else the lines, which are for a
    person. Lines that nobody reads are not made if `lines` is a generator.
    """
    if wants_json():
        write_json(document)
    elif made := list(lines):
        write(*made)


def wants_json() -> bool:
    """Whether the command that runs was called with --json."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(JSON_KEY))


def pretty_lines(value: Any) -> list[str]:
    """A JSON document as lines for a person."""
    return visible_json(msgspec.json.format(_encoded(value), indent=2)).decode().split("\n")


def write_pretty(value: Any) -> None:
    """Print one JSON document for a person."""
    _put_json(msgspec.json.format(_encoded(value), indent=2))


def _encoded(value: Any) -> bytes:
    """A value as JSON. Bytes of a file's name that are not UTF-8 have no form in JSON and become U+FFFD."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        from goondan.schemas.wire.codec import replace_surrogates

        return msgspec.json.encode(replace_surrogates(msgspec.to_builtins(value)))


def _put_json(document: bytes) -> None:
    sys.stdout.buffer.write(visible_json(document) + b"\n")
    sys.stdout.buffer.flush()


def print_error(error: GoondanError, *, as_json: bool) -> None:
    """Print an error as the one JSON document on stdout, or as text on stderr. For a bundle, print all its problems."""
    problems = getattr(error, "problems", None)
    dropped = getattr(error, "dropped", 0)
    if as_json:
        document: dict[str, Any] = {"error": error.info}
        if problems:
            document["errors"] = problems
        if dropped:
            document["dropped"] = dropped
        write_json(document)
    elif problems:
        from goondan.kernel.bundle.problems import counts, problem_lines

        lines = problem_lines(problems, os.getcwd())
        if dropped:
            lines.append(f"… and {dropped} more")
        write(*lines, counts(len(problems) + dropped, 0), stream=sys.stderr)
    else:
        write(*error_lines(error.info), stream=sys.stderr)


def error_lines(info: ErrorPayload) -> list[str]:
    """An error for a person: what happened, what to do, where to read more."""
    page = f"gdn explain {info.code}" if info.help_url == help_url(info.code) else info.help_url
    more = [f"  {text}" for text in (info.suggestion, page) if text]
    return [f"error: {info.message} [{info.code}]", *more]


def exit_code(error: GoondanError) -> int:
    """The exit status of an error: 2 for mistakes of the caller, 1 for everything else."""
    return 2 if error.info.code.startswith(_USAGE_CODES) else 1


def unexpected(error: BaseException) -> GoondanError:
    """The error that a person sees for a bug of ours, or for a refusal of the operating system."""
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        return fail("E_STATE", f"{where}{error.strerror or error}")
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return fail("E_INTERNAL", f"{type(error).__name__}: {error}{where}")


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at it."""
    try:
        return stream.isatty()
    except ValueError:
        return False
