"""`self-restart__request`: asks the kernel to restart in place, with its bundle as it is now.

It runs in the process of the agent that calls it, like the other tools that talk to the kernel (docs/decisions/051).
"""

from __future__ import annotations

from typing import Any, Final

from goondan.agentproc.calls.swarm import Handler, Swarm

#: The reason when the call gives none.
REASON: Final = "tool:self-restart"


async def request(swarm: Swarm, name: str, args: dict[str, Any]) -> Any:
    """Grant or refuse at once. The restart comes when this result is stored and the step has ended."""
    reason = args.get("reason", REASON)
    await swarm.restart(name, reason)
    return {"ok": True, "restartRequested": True, "restartReason": reason}


handlers: Final[dict[str, Handler]] = {"request": request}
