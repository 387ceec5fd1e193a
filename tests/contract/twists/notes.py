"""What the extensions of a twist note down, for the test to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

#: In the order in which it was noted; empty again before each test.
NOTES: Final[list[Any]] = []


def note(*what: Any) -> None:
    """Note one thing, or several as a tuple."""
    NOTES.append(what[0] if len(what) == 1 else what)


#: What a test has done in the middle of what an extension does, by the place that the extension names.
HAPPENS: Final[dict[str, Callable[[], object]]] = {}


def here(place: str) -> None:
    """An extension has come to this place."""
    happens = HAPPENS.pop(place, None)
    if happens is not None:
        happens()
