"""What a person does from the page that the API does not have: the last turn of a conversation is taken back, another
instance begins with a copy, and a packaged tool gets what it asks for.

The agent changes a conversation: it is an operator's event, whose name is the core's. A kernel without what answers
such events says E_FEATURE_MISSING.

Source: docs/conversations.md; docs/decisions/178; docs/design/sandbox.md section 1; docs/decisions/176.
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from goondan.features.serve.api.routing import Asked
from goondan.kernel.cli.commands.permissions import accept_tool
from goondan.kernel.cli.console.conversation import ANSWER_S
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.operations import Operation
from goondan.kernel.cli.rules.batch import check_instance
from goondan.kernel.cli.state import new_instance
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import OPERATOR_FORK, OPERATOR_UNDO, ToolResult


class Change(Struct, forbid_unknown_fields=True):
    """Which conversation."""

    #: The agent.
    agent: str
    #: The instance.
    instance: str = "default"
    #: To take back: the turn that the person saw as the last one. To fork: the turn before which the copy ends; None:
    #: everything is copied.
    turn: str | None = None


class Fork(Change, forbid_unknown_fields=True):
    """Where the copy ends, and which instance it becomes."""

    #: The step of the turn, from 1.
    step: Annotated[int, Meta(ge=1)] = 1
    #: The key of the new instance. None: one that no instance has.
    to: str | None = None


class Grant(Struct, forbid_unknown_fields=True):
    """Which tool."""

    #: Its id: PACKAGE/NAME.
    tool: str


async def undo(asked: Asked) -> dict[str, Any]:
    """Take the last turn back. Raises GoondanError E_INSTANCE_BUSY, E_UNDO_REFUSED."""
    change: Change = asked.body
    asked.caller.check_agent(change.agent)
    key = check_instance(change.instance)
    if (await asked.swarm.admin({"op": "events", "agent": change.agent, "instanceKey": key}))["events"]:
        raise fail("E_INSTANCE_BUSY", f"{change.agent}/{key[:100]} has work", suggestion="Wait for its end, or stop it")
    done = await _operate(asked, key, OPERATOR_UNDO, None if change.turn is None else {"turnId": change.turn})
    return {"instance": key, "message": done.get("said")}


async def fork(asked: Asked) -> dict[str, Any]:
    """Begin another instance with a copy. `message`: the text that repeats the turn, if the copy ends before it."""
    wanted: Fork = asked.body
    asked.caller.check_agent(wanted.agent)
    key, place = check_instance(wanted.to or new_instance()), {"turnId": wanted.turn, "step": wanted.step}
    done = await _operate(asked, key, OPERATOR_FORK, {"from": wanted.instance, **(place if wanted.turn else {})})
    return {"instance": key, "message": done.get("message")}


async def _operate(asked: Asked, key: str, kind: str, said: Any) -> dict[str, Any]:
    message = Message(asked.body.agent, key, said, kind, event_id=f"page-{os.urandom(12).hex()}")
    answer = await asked.swarm.ask(message, ANSWER_S, new=True)
    if answer.error is not None or answer.output is None:
        raise GoondanError(answer.error) if answer.error else fail("E_INTERNAL", "the answer has no output")
    done: dict[str, Any] = from_raw(from_raw(answer.output, ToolResult).output or b"", dict)
    return done


async def grant(asked: Asked) -> dict[str, str]:
    """As `gdn grant accept` does. A kernel that runs gets it at its next start. What was asked for is not said: there
    may be values of the environment in it.
    """
    if "*" not in asked.caller.agents:
        raise fail("E_FORBIDDEN", f"a tool is for all agents, and the token {asked.caller.name} is for some")
    done = await asyncio.to_thread(accept_tool, asked.body.tool, asked.swarm.place.bundle)
    return {"tool": done["tool"], "status": done["status"]}


OPERATIONS: Final = (
    Operation("undoTurn", "POST", "/conversations/undo", "operate", "Take the last turn back.", undo, body=Change),
    Operation("forkConversation", "POST", "/conversations/fork", "operate", "Begin with a copy.", fork, body=Fork),
    Operation("grant", "POST", "/grants", "operate", "A tool gets what it asks for.", grant, body=Grant),
)
