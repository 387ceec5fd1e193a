"""The page's ways: its files, which need no token, and what its scripts ask that the API does not have.

Source: docs/decisions/176; docs/serve.md, "One more door".
"""

from __future__ import annotations

from functools import lru_cache

from goondan.features.page.door import inbox, static, status
from goondan.features.page.door.entering import Entering
from goondan.features.page.door.live import Live
from goondan.features.serve.api.gate import Way
from goondan.features.serve.api.routing import Operation, way
from goondan.features.serve.api.swarm import Swarm

#: Where what the page's scripts ask is.
PREFIX = "/page/api"


@lru_cache(4)  # whoever describes a door asks for its ways again
def routes(swarm: Swarm) -> list[Way]:
    """All of them."""
    entering, live = Entering(swarm), Live(swarm)
    operations: tuple[Operation, ...] = (
        *entering.operations(),
        *live.operations(),
        *inbox.OPERATIONS,
        *status.OPERATIONS,
    )
    return [*static.ways(), *(way(operation, swarm, PREFIX) for operation in operations)]
