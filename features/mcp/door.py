"""The sessions with MCP servers, for programs that ask a door.

Source: docs/mcp.md, "Looking at servers"; docs/serve.md, "Our API".
"""

from __future__ import annotations

from typing import Any, Final

from goondan.features.mcp.api import row
from goondan.kernel.cli.operations import Asked, Operation, Swarm
from goondan.kernel.supervisor_client import ask_supervisor

#: How long a supervisor may take (seconds): whoever asks looks again and again.
ANSWER_S: Final = 2.0


def routes(_: Swarm) -> list[Operation]:
    """The one way."""
    return [Operation("listServers", "GET", "/mcp/servers", "look", "The sessions with MCP servers.", servers)]


def servers(asked: Asked[Swarm]) -> list[dict[str, Any]]:
    """The rows of `gdn mcp list` of servers that run, of agents of the caller. What is of no agent is for who may see
    all. Raises GoondanError E_KERNEL_LOST.
    """
    reply = ask_supervisor(asked.swarm.state_dir, "ps", ANSWER_S)
    rows = [row(news) for news in (reply and reply.servers) or () if news.server is not None]
    caller = asked.caller
    return [one for one in rows if "*" in caller.agents or caller.may_speak_to(one["agent"] or "")]
