"""Who asks a swarm through a door: what it may do, and of which agents. Pure.

Source: docs/serve.md, "Who may come in".
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final, Literal, get_args

from msgspec import Struct

from goondan.schemas.bundle.address import is_resource_name
from goondan.schemas.wire.errors import fail

#: What a caller may do. `look`: read what there is. `talk`: also send messages to its agents, and cancel them.
#: `operate`: also what an operator does, such as to answer approvals and to restart.
Role = Literal["look", "talk", "operate"]
#: Each has what those before it have.
ROLES: Final[tuple[Role, ...]] = get_args(Role)


class Caller(Struct, frozen=True):
    """Who sends a request, by its token."""

    #: The name of the token. No other token of the file has it, so it scopes what belongs to one caller.
    name: str
    #: What it may do.
    role: Role
    #: Patterns (`*`, `?`) of the agents that it may speak to.
    agents: Sequence[str] = ()
    #: The digest of the token on which this one depends: it goes when that goes, may do less, or has other agents.
    behind: bytes = b""

    def may(self, role: Role) -> bool:
        """Whether it may do what needs this role."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def may_speak_to(self, agent: str) -> bool:
        """Whether it may speak to this agent. What is no name of an agent fits no pattern."""
        return is_resource_name(agent) and ("*" in self.agents or any(fnmatchcase(agent, one) for one in self.agents))

    def check_agent(self, agent: str) -> None:
        """Raise GoondanError E_FORBIDDEN unless it may speak to this agent."""
        if not self.may_speak_to(agent):
            raise fail("E_FORBIDDEN", f"the token {self.name} does not lead to the agent {agent[:100]!r}")
