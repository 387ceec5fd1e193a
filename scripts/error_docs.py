"""Writes docs/error-causes.md: who is to blame for each error code, environment or message.

The table is `CODES` and `ENVIRONMENT` of schemas/errors.py; scripts/error_text has the words before it. `--check`
compares instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from msgspec import Struct

from goondan.schemas.errors import CODES, ENVIRONMENT
from scripts.pages import write_or_check

DOCS: Final = Path(__file__).parents[1] / "docs"


class Page(Struct):
    """The page in one language."""

    #: The file's name.
    name: str
    #: The file in scripts/error_text with what stands before the rows.
    head: str
    #: The page that explains the codes, and the words for the two kinds.
    words: tuple[str, str, str]

    @property
    def path(self) -> Path:
        """Where the page is."""
        return DOCS / self.name

    def text(self) -> str:
        """The page."""
        explained, environment, message = self.words
        whose = {code: environment if code in ENVIRONMENT else message for code in CODES}
        head = (Path(__file__).parent / "error_text" / self.head).read_text(encoding="utf-8")
        return head + "".join(
            f"| [{code}]({explained}#{code.lower()}) | {who} |\n" for code, who in sorted(whose.items())
        )

    def problems(self) -> list[str]:
        """Codes of the environment that do not exist."""
        return [f"{code} is in ENVIRONMENT and not in CODES" for code in sorted(ENVIRONMENT - CODES.keys())]


PAGES: Final = (Page("error-causes.md", "en.txt", ("errors.md", "environment", "message")),)

if __name__ == "__main__":
    sys.exit(write_or_check(PAGES, "scripts/error_docs.py", sys.argv[1:]))
