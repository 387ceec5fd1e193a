"""A person lets a packaged tool have what it asks for.

Source: docs/design/sandbox.md section 1; docs/decisions/176.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from goondan.features.serve.api.routing import Asked
from goondan.kernel.cli.commands.permissions import accept_tool
from goondan.kernel.cli.operations import Operation
from goondan.schemas.wire.errors import fail


class Grant(Struct, forbid_unknown_fields=True):
    """Which tool."""

    #: Its id: PACKAGE/NAME.
    tool: str


def grant(asked: Asked) -> dict[str, str]:
    """As `gdn grant accept` does. A kernel that runs gets it at its next start. What was asked for is not said: there
    may be values of the environment in it.
    """
    if "*" not in asked.caller.agents:
        raise fail("E_FORBIDDEN", f"a tool is for all agents, and the token {asked.caller.name} is for some")
    done = accept_tool(asked.body.tool, asked.swarm.place.bundle)
    return {"tool": done["tool"], "status": done["status"]}


OPERATIONS: Final = (
    Operation("grant", "POST", "/grants", "operate", "A tool gets what it asks for.", grant, body=Grant),
)
