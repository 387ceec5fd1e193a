"""The routes of our own API.

Source: docs/design/features.md section 1.
"""

from __future__ import annotations

from goondan.features.serve.api.gate import Way
from goondan.features.serve.api.routing import Operation, way
from goondan.features.serve.api.swarm import Swarm
from goondan.features.serve.door import looking, messages, openapi, operations

OPERATIONS: tuple[Operation, ...] = (
    *messages.OPERATIONS,
    *looking.OPERATIONS,
    *operations.OPERATIONS,
    *openapi.OPERATIONS,
)


def routes(swarm: Swarm) -> list[Way]:
    """All of them."""
    return [way(operation, swarm) for operation in OPERATIONS]
