"""`handoff__request`: gives a piece of work to another agent and goes on. The answer arrives as a message.

It runs in the process of the agent that calls it, as `agents` does (docs/decisions/051).
"""

from __future__ import annotations

from typing import Any, Final

from goondan.agentproc.calls.swarm import Handler, Swarm
from goondan.agentproc.machine.questions import Question
from goondan.schemas.wire.frames import ToolResult


async def request(swarm: Swarm, name: str, args: dict[str, Any]) -> ToolResult:
    """Return `pending` with the correlation id as handle. The end of the work is told like that of every pending
    result.
    """
    question = Question(
        op="handoff",
        name=name,
        target=args["target"],
        input=args["payload"],
        instance_key=args.get("instanceKey"),
        timeout_ms=None,
        metadata=args.get("metadata"),
        asynchronous=True,
    )
    frame = await swarm.submit(question)
    return ToolResult(status="pending", handle=frame.reply_to.correlation_id if frame.reply_to is not None else None)


async def get(swarm: Swarm, name: str, args: dict[str, Any]) -> ToolResult:
    """`tool-result__get` with the handle of a handoff: what the work came to, or `pending` after `waitMs`."""
    return await swarm.end_of_work(args["handle"], float(args.get("waitMs", 0)) / 1000)


handlers: Final[dict[str, Handler]] = {"request": request}
