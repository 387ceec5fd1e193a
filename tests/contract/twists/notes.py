"""What the extensions of a twist note down, for the test to look at."""

from __future__ import annotations

from typing import Any, Final

#: In the order in which it was noted; empty again before each test.
NOTES: Final[list[Any]] = []


def note(*what: Any) -> None:
    """Note one thing, or several as a tuple."""
    NOTES.append(what[0] if len(what) == 1 else what)
