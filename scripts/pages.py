"""Pages of the documentation that are made from the code: they are written, or compared with the existing files."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

#: Ends what people have written at the beginning of a page. The rest of the page is made by a script.
MARK: Final = "<!-- Below this line: made by {}. -->\n"


class Page(Protocol):
    """One page in one language."""

    @property
    def path(self) -> Path:
        """The path of the page."""

    def text(self) -> str:
        """The text that the page should have."""

    def problems(self) -> list[str]:
        """The missing parts of the page. To be called after `text`."""


def hand_written(path: Path, script: str) -> str:
    """The beginning of a page, up to the mark and with it.

    Raises: ValueError if the page has no mark.
    """
    before, mark, _ = path.read_text(encoding="utf-8").partition(MARK.format(script))
    if not mark:
        raise ValueError(f"{path} has no line {MARK.format(script)!r}")
    return before + mark


def write_or_check(pages: Iterable[Page], script: str, arguments: list[str]) -> int:
    """Write the pages, or with `--check` compare them: 1 when one is out of date or lacks a translation."""
    status = 0
    for page in pages:
        text = page.text()
        problems = page.problems()
        if "--check" not in arguments:
            page.path.write_text(text, encoding="utf-8")
        elif not page.path.is_file() or page.path.read_text(encoding="utf-8") != text:
            problems.append(f"{page.path.name} is out of date: run {script}")
        for problem in problems:
            print(problem, file=sys.stderr)
            status = 1
    return status
