"""The agents of the bundle, with the forms of their answers. They are read from the bundle: the broker lists none.

A bundle that was changed and has not been taken over may list others than the kernel has. The broker decides, so a
message for an agent that it does not have is refused by it.

Source: docs/structured-answers.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

from goondan.features.serve.api import Swarm
from goondan.kernel.bundle.loader import inspect_bundle

#: How long the list is taken for what the bundle has (seconds). To read one takes a tenth.
FRESH_S: Final = 5.0

#: The JSON Schema of each agent's answers, by its name. None: it answers in words.
Agents = Mapping[str, Mapping[str, Any] | None]


class Listed:
    """The agents of a swarm."""

    def __init__(self, swarm: Swarm) -> None:
        self._place = swarm.place
        self._found: Agents = {}
        self._until = 0.0
        self._reading = asyncio.Lock()

    async def agents(self) -> Agents:
        """All of them. Raises GoondanError for a bundle that cannot be read."""
        async with self._reading:
            if time.monotonic() >= self._until:
                self._found = await asyncio.to_thread(self._read)
                self._until = time.monotonic() + FRESH_S
            return self._found

    def _read(self) -> Agents:
        place = self._place
        checked = inspect_bundle(place.bundle, state_dir=place.state_dir, handlers=False, policy=place.policy).checked
        return {
            name: None if agent.body.output is None else agent.body.output.schema
            for name, agent in checked.agents.items()
        }
