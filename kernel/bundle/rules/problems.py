"""The problems of a bundle, each with its place, the report that collects them, and how a person reads them.

Source: docs/design/bundle.md section 7; requirements VALIDATE-04, ERROR-06, ERROR-07.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from goondan.schemas.wire.errors import CODES, GoondanError, error_payload, help_url

#: The most problems that are kept. The others are only counted. Otherwise the report on a broken file could be larger
#: than the file.
MAX_PROBLEMS: Final = 200
#: The longest piece of a user's text in a message (characters).
MAX_SHOWN: Final = 80

#: warning code -> the suggestion shown when the place that raises it has no better one.
WARNINGS: Final[dict[str, str]] = {
    "W_CONFIG_IGNORED": "Remove the field; it has no effect.",
    "W_CONFIG_NOT_GRANTED": "Look at the tool's code, then accept its request with `gdn grant accept`.",
    "W_CONFIG_API": "docs/extensions.md lists what `api` has.",
    "W_CONFIG_DEPENDENCY": "Change the order in the agent's spec.extensions, or take a dependency out.",
    "W_CONFIG_NOT_STARTED": "Remove the resource, or leave it until the kernel supports it.",
    "W_CONFIG_OPEN_KEY": "Use https, or a tunnel to this machine.",
    "W_CONFIG_SHADOWED": "Give the bundle's own another name, or keep it if replacing is what you want.",
    "W_CONFIG_SKIPPED": "Keep other YAML files out of the bundle's directory, or name the goondan.yaml itself.",
    "W_CONFIG_UNCHECKED": "Install bubblewrap 0.11 or newer, so that modules can be loaded in a jail and checked.",
    "W_CONFIG_UNUSED": "Use it in an Agent or in the Swarm, or remove it.",
    "W_CONFIG_NO_AGENT": "Add an Agent to talk to; without one, only `gdn call` can use the tools.",
}

Path = tuple[str | int, ...]


class Problem(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One error or warning."""

    #: Its code.
    code: str
    #: What is wrong.
    message: str
    #: The file that it is in.
    file: str
    #: The line, from 1. 0: the problem has no place in a file.
    line: int = 0
    #: The column, from 1. 0: the problem has no place in a file.
    column: int = 0
    #: The place in the document.
    path: str = ""
    #: The document's identity (`Tool/bash`), where it is known.
    resource: str = ""
    #: What to do about it.
    suggestion: str = ""
    #: Where more is said about it.
    help_url: str | None = None


class Position(Struct, frozen=True):
    """A place in a file and in its document."""

    #: The file.
    file: str
    #: The line, from 1. 0: not known.
    line: int = 0
    #: The column, from 1. 0: not known.
    column: int = 0
    #: The place in the document.
    path: Path = ()
    #: The document's identity, where it is known.
    resource: str = ""


class Report:
    """Collects errors and warnings, without repeating one and without growing past MAX_PROBLEMS each."""

    def __init__(self) -> None:
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []
        #: problems that were not kept
        self.dropped = 0
        self._seen: set[tuple[str, str, str, int, int, str]] = set()

    def error(self, code: str, message: str, at: Position, suggestion: str | None = None) -> None:
        """Add an error. `suggestion` defaults to the code's own."""
        self._add(self.errors, code, message, at, suggestion or CODES[code], help_url(code))

    def warn(self, code: str, message: str, at: Position, suggestion: str | None = None) -> None:
        """Add a warning. `suggestion` defaults to the code's own."""
        self._add(self.warnings, code, message, at, suggestion or WARNINGS[code], None)

    def sort(self, files: Iterable[str]) -> None:
        """Put the problems in reading order: files in the order given, then line and column."""
        order = {name: index for index, name in enumerate(files)}
        for problems in (self.errors, self.warnings):
            problems.sort(key=lambda p: (order.get(p.file, len(order)), p.file, p.line, p.column))

    def hide(self, redact: Callable[[str], str]) -> None:
        """Pass all texts with content of the bundle through `redact`. Positions in files do not change."""
        for problems in (self.errors, self.warnings):
            problems[:] = [
                replace(
                    problem,
                    message=redact(problem.message),
                    suggestion=redact(problem.suggestion),
                    path=redact(problem.path),
                    resource=redact(problem.resource),
                )
                for problem in problems
            ]

    def _add(
        self, into: list[Problem], code: str, message: str, at: Position, suggestion: str, url: str | None
    ) -> None:
        key = (code, message, at.file, at.line, at.column, at.resource)
        if key in self._seen:
            return
        if len(into) >= MAX_PROBLEMS:
            self.dropped += 1
            return
        self._seen.add(key)
        into.append(
            Problem(
                code=code,
                message=message,
                file=at.file,
                line=at.line,
                column=at.column,
                path=spell(at.path),
                resource=at.resource,
                suggestion=suggestion,
                help_url=url,
            )
        )


class BundleError(GoondanError):
    """The bundle cannot be run. `problems` are all errors. `info` is the first one, with the number of the others."""

    def __init__(self, problems: list[Problem], dropped: int = 0) -> None:
        first = problems[0]
        others = len(problems) + dropped - 1
        more = f" (and {others} more)" if others else ""
        where = f"{first.file}:{first.line}:{first.column}" if first.line else first.file
        super().__init__(
            error_payload(first.code, f"{where}: {first.message}{more}", suggestion=first.suggestion or None)
        )
        self.problems = problems
        self.dropped = dropped


def spell(path: Path) -> str:
    """A path in a document as a person writes it: `spec.exports[0].name`. Unusual keys are in brackets and quotes."""
    out: list[str] = []
    for step in path:
        if isinstance(step, int):
            out.append(f"[{step}]")
        elif step.replace("-", "").replace("_", "").isalnum():
            out.append(f".{step}" if out else step)
        else:
            out.append(f"[{shown(step)}]")
    return "".join(out)


def shown(text: str) -> str:
    """A user's text in quotes, shortened, on one line and without control characters."""
    cut = text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
    return "'" + "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in cut) + "'"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """A suggestion that names the closest of `known`. None when none is close."""
    if len(word) > MAX_SHOWN:
        return None
    import difflib

    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:
        close = [name for name in names if name.lower() == word.lower()]
    return f"Did you mean {shown(close[0])}?" if close else None


def problem_lines(problems: Iterable[Problem], cwd: str, *, warning: bool = False) -> list[str]:
    """Two lines for each problem, then the command that explains each code; paths below `cwd` are relative to it."""
    lines: list[str] = []
    codes: dict[str, None] = {}
    for problem in problems:
        if problem.help_url is not None:
            codes[problem.code] = None
        where = short_path(problem.file, cwd) or "bundle"
        if problem.line:
            where += f":{problem.line}:{problem.column}"
        kind = "warning: " if warning else ""
        about = f"{problem.resource}: " if problem.resource and problem.resource not in problem.message else ""
        place = f" ({problem.path})" if problem.path else ""
        lines.append(f"{where}: {kind}{problem.code} {about}{problem.message}{place}")
        if problem.suggestion:
            lines.append(f"    {problem.suggestion}")
    return [*lines, *(f"gdn explain {code}" for code in codes)]


def counts(errors: int, warnings: int) -> str:
    """`2 errors, 1 warning`."""
    return f"{errors} error{'' if errors == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"


def short_path(path: str, cwd: str) -> str:
    """`path` relative to `cwd` when it lies below it."""
    prefix = cwd.rstrip("/") + "/"
    return path.removeprefix(prefix)
