"""What commands print: results, errors, JSON documents.

Source: design section 11.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, TextIO

import msgspec

from schemas.errors import GoondanError, fail
from schemas.frames import ErrorPayload

_USAGE_CODES = ("E_USAGE", "E_CONFIG_")


def write(text: str, stream: TextIO | None = None) -> None:
    """Print text and let it out at once. Characters that the terminal cannot show become `?`."""
    out = stream or sys.stdout
    out.buffer.write(text.encode(out.encoding or "utf-8", "replace") + b"\n")
    out.buffer.flush()


def write_text(text: str) -> None:
    """Print a text of a model on stdout: exactly as it is, but nothing that a terminal would obey."""
    from kernel.cli.plain import flowing

    write(flowing(text) if is_terminal(sys.stdout) else text)


def write_json(value: Any) -> None:
    """Print one JSON document on one line."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def write_pretty(value: Any) -> None:
    """Print one JSON document for a person."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    sys.stdout.buffer.flush()


def print_error(error: GoondanError, *, as_json: bool) -> None:
    """An error as the one JSON document on stdout, or as text on stderr; of a bundle with all its problems."""
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
        from kernel.bundle.text import counts, problem_lines

        lines = problem_lines(problems, os.getcwd())
        if dropped:
            lines.append(f"… and {dropped} more")
        write("\n".join([*lines, counts(len(problems) + dropped, 0)]), sys.stderr)
    else:
        write(error_text(error.info), sys.stderr)


def error_text(info: ErrorPayload) -> str:
    """An error for a person: what happened, what to do, where to read more; harmless to a terminal."""
    from kernel.cli.plain import flowing

    text = f"error: {info.message} [{info.code}]"
    if info.suggestion:
        text += f"\n  {info.suggestion}"
    if info.help_url:
        text += f"\n  {info.help_url}"
    return flowing(text)


def exit_code(error: GoondanError) -> int:
    """2 for what the caller wrote wrong, 1 for everything else."""
    return 2 if error.info.code.startswith(_USAGE_CODES) else 1


def unexpected(error: BaseException) -> GoondanError:
    """A bug of ours, or an operating system's refusal, as the one error that a person sees."""
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        return fail("E_STATE", f"{where}{error.strerror or error}")
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return fail("E_INTERNAL", f"{type(error).__name__}: {error}{where}")


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at it."""
    try:
        return stream.isatty()
    except ValueError:
        return False
