"""The tool that reports when it began to load."""

from __future__ import annotations

from time import monotonic

BEGAN = monotonic()

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def same(ctx: Any, input: dict[str, Any]) -> float:
    """The time when the module began to run, on the clock that all processes of the machine share (seconds)."""
    return BEGAN


handlers = {"same": same}
