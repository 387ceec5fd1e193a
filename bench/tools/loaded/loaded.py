"""The tool that says when it began to load."""

from __future__ import annotations

from time import monotonic

BEGAN = monotonic()

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def same(ctx: Any, input: dict[str, Any]) -> float:
    """When the module began to run, on the clock that every process of the machine shares (seconds)."""
    return BEGAN


handlers = {"same": same}
