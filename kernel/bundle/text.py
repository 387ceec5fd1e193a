"""Problems as a person reads them: grouped by file, `file:line:col: CODE message`, the suggestion below.

Source: docs/design/bundle.md section 7.
"""

from __future__ import annotations

from collections.abc import Iterable

from goondan.kernel.bundle.problems import Problem


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
