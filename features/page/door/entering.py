"""How a person comes in: a code from the terminal, and the token that it becomes.

Source: docs/decisions/176.
"""

from __future__ import annotations

import os
import time
from typing import Any

from msgspec import Struct

from goondan.features.page.door.passes import CODE_S, Kind, Passes
from goondan.features.serve.api.gate import refused
from goondan.features.serve.api.routing import Asked
from goondan.features.serve.api.swarm import Swarm


class Wanted(Struct, forbid_unknown_fields=True):
    """Which code."""

    #: What its token may do: `look`, or `act`.
    kind: Kind = "look"


class Entering:
    """The codes and tokens of one door."""

    def __init__(self, swarm: Swarm) -> None:
        self._passes = Passes()
        swarm.callers.append(lambda digest: self._passes.known(digest, time.monotonic()))

    async def code(self, asked: Asked) -> dict[str, Any]:
        """A code."""
        now, maker = time.monotonic(), asked.digest
        code = self._passes.make_code(asked.body.kind, asked.caller, maker, os.urandom(12), now)
        return {"code": code, "seconds": int(CODE_S)}

    async def session(self, asked: Asked) -> dict[str, Any]:
        """The token for a code. Of a token that was given instead, its role."""
        found = self._passes.spend(asked.digest, os.urandom(32), time.monotonic())
        if found is None and not asked.caller.name:
            raise refused(401, "the code was used, is too old, or is none", "E_DOOR_REFUSED")
        token, role = found or (None, asked.caller.role)
        return {"token": token, "role": role}
