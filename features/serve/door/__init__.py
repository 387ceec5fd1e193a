"""The routes of our own API.

Source: docs/design/features.md section 1.
"""

from __future__ import annotations

from goondan.features.serve.door import looking, messages, openapi, operations
from goondan.kernel.cli.operations import Operation, Swarm

OPERATIONS: tuple[Operation, ...] = (
    *messages.OPERATIONS,
    *looking.OPERATIONS,
    *operations.OPERATIONS,
    *openapi.OPERATIONS,
)


def routes(_: Swarm) -> tuple[Operation, ...]:
    """All of them."""
    return OPERATIONS
