"""What `gdn ps` and `gdn mcp list` tell and the API does not: the memory of processes, how each MCP server is, and what
parts of the broker have learned.

Source: docs/mcp.md; docs/model-limits.md; docs/serve.md.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.features.serve.api.routing import Asked, Operation
from goondan.features.serve.api.rules.callers import Caller
from goondan.features.serve.api.swarm import Swarm
from goondan.kernel.cli.operator_question import learning
from goondan.kernel.supervisor_client import ask_supervisor
from goondan.schemas.wire.errors import GoondanError

#: How long a supervisor may take (seconds): a person looks on.
ANSWER_S: Final = 2.0


async def status(asked: Asked) -> dict[str, Any]:
    """`memory`: resident bytes by pid; `servers`: the sessions of MCP servers; `learned`: rows, each with `about` and,
    in words, `text`. What is of no agent is for who may see all. Raises GoondanError E_KERNEL_LOST.
    """
    caller, swarm = asked.caller, asked.swarm
    told = await asyncio.to_thread(_of_supervisor, swarm.state_dir, caller)
    return told | {"learned": [row async for row in _learned(swarm)] if "*" in caller.agents else []}


def _of_supervisor(state_dir: str, caller: Caller) -> dict[str, Any]:
    reply, memory = ask_supervisor(state_dir, "ps", ANSWER_S), {}
    everything, may = "*" in caller.agents, caller.may_speak_to
    for row in (reply and reply.processes) or ():
        if everything or (may(row.name) if row.role == "agent" else row.instance_key is None):
            with suppress(OSError), open(f"/proc/{row.pid}/statm", "rb") as pages:
                memory[str(row.pid)] = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    servers = [
        {**msgspec.to_builtins(one.server), "instanceKey": one.instance_key, "since": one.since}
        for one in (reply and reply.servers) or ()
        if one.server is not None and (everything or may(one.server.agent or ""))
    ]
    return {"memory": memory, "servers": servers}


async def _learned(swarm: Swarm) -> AsyncIterator[dict[str, Any]]:
    for learned in learning(limits=False):
        with suppress(GoondanError):  # no kernel runs, or it is without that part
            for row in (await swarm.admin({"op": learned.op}))[learned.op]:
                yield {**row, "about": learned.op, "text": learned.line(row)}


OPERATIONS: Final = (Operation("getStatus", "GET", "/status", "look", "Memory, servers, what was learned.", status),)
