"""Writes docs/error-causes.md: the error codes of which the environment is to blame, and not the message.

They are `ENVIRONMENT` of schemas/wire/errors.py; the words before them stand in the page. `--check` compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from goondan.features import parts
from goondan.schemas.wire.errors import CODES, ENVIRONMENT
from scripts.pages import hand_written, write_or_check

parts("wire")  # the codes of features
SCRIPT: Final = "scripts/error_docs.py"


class Page:
    """The page."""

    @property
    def path(self) -> Path:
        """Where the page is."""
        return Path(__file__).parents[1] / "docs" / "error-causes.md"

    def text(self) -> str:
        """The page."""
        rows = (f"- [{code}](errors.md#{code.lower()})\n" for code in sorted(ENVIRONMENT))
        return hand_written(self.path, SCRIPT) + "\n" + "".join(rows)

    def problems(self) -> list[str]:
        """Codes of the environment that do not exist."""
        return [f"{code} is in ENVIRONMENT and not in CODES" for code in sorted(ENVIRONMENT - CODES.keys())]


if __name__ == "__main__":
    sys.exit(write_or_check([Page()], SCRIPT, sys.argv[1:]))
