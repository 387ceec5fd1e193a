"""What `gdn ps` and `gdn mcp list` tell and the API does not: how each MCP server is, and what parts of the broker
have learned.

Source: docs/mcp.md; docs/model-limits.md; docs/serve.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.features.serve.api.routing import Asked
from goondan.features.serve.api.rules.callers import Caller
from goondan.features.serve.api.swarm import Swarm
from goondan.kernel.cli.operations import Operation
from goondan.kernel.cli.operator_question import learning
from goondan.kernel.supervisor_client import ask_supervisor
from goondan.schemas.wire.errors import GoondanError

#: How long a supervisor may take (seconds): a person looks on.
ANSWER_S: Final = 2.0


async def status(asked: Asked) -> dict[str, Any]:
    """`servers`: the sessions of MCP servers; `learned`: rows, each with `about` and,
    in words, `text`. What is of no agent is for who may see all. Raises GoondanError E_KERNEL_LOST.
    """
    caller, swarm = asked.caller, asked.swarm
    told = await asyncio.to_thread(_of_supervisor, swarm.state_dir, caller)
    return told | {"learned": [row async for row in _learned(swarm)] if "*" in caller.agents else []}


def _of_supervisor(state_dir: str, caller: Caller) -> dict[str, Any]:
    reply = ask_supervisor(state_dir, "ps", ANSWER_S)
    servers = [
        {**msgspec.to_builtins(one.server), "instanceKey": one.instance_key, "since": one.since}
        for one in (reply and reply.servers) or ()
        if one.server is not None and ("*" in caller.agents or caller.may_speak_to(one.server.agent or ""))
    ]
    return {"servers": servers}


async def _learned(swarm: Swarm) -> AsyncIterator[dict[str, Any]]:
    for learned in learning(limits=False):
        with suppress(GoondanError):  # no kernel runs, or it is without that part
            for row in (await swarm.admin({"op": learned.op}))[learned.op]:
                yield {**row, "about": learned.op, "text": learned.line(row)}


OPERATIONS: Final = (Operation("getStatus", "GET", "/status", "look", "Servers, and what was learned.", status),)
