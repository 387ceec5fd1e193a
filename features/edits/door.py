"""A conversation is changed by a program that asks a door: its last turn is taken back, or another instance begins with
a copy of it.

Source: docs/serve.md, "Our API"; docs/design/turns.md section 11; docs/decisions/178.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from goondan.features.edits.wire import Forked
from goondan.kernel.cli.console.conversation import Conversation
from goondan.kernel.cli.operations import Asked, Operation, Swarm
from goondan.kernel.cli.rules.batch import check_instance
from goondan.kernel.cli.state import new_instance
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import OPERATOR_FORK, OPERATOR_UNDO
from goondan.schemas.wire.frames import ConversationEdited as Edited


class Undo(Struct, forbid_unknown_fields=True):
    """Which turn."""

    #: The instance.
    instance: str = "default"
    #: The turn that was seen as the last one: when another one is, nothing is taken back. None: whichever it is.
    turn: str | None = None


class Fork(Struct, forbid_unknown_fields=True):
    """What is copied, and where to."""

    #: The instance.
    instance: str = "default"
    #: What is before this turn is copied. None: everything.
    turn: str | None = None
    #: What is before this step of the turn, from 1. None: the first one.
    step: Annotated[int, Meta(ge=1)] | None = None
    #: The key of the new instance. None: one that no instance has.
    to: str | None = None


class Begun(Forked, frozen=True, kw_only=True):
    """The copy."""

    #: The key of the new instance.
    instance: str


async def undo(asked: Asked[Swarm]) -> dict[str, Any]:
    """Take the last turn back. Raises GoondanError E_INSTANCE_BUSY, E_UNDO_REFUSED."""
    agent, key = asked.place
    conversation = await _conversation(asked, agent, key)
    await conversation.check_idle()
    turn = asked.body.turn
    done: dict[str, Any] = await conversation.operate(OPERATOR_UNDO, None if turn is None else {"turnId": turn})
    return done


async def fork(asked: Asked[Swarm]) -> dict[str, Any]:
    """Begin another instance with a copy. Raises GoondanError E_TURN_NOT_FOUND, E_INSTANCE_NOT_FOUND; E_USAGE where
    there is a conversation already.
    """
    (agent, source), wanted = asked.place, asked.body
    key = check_instance(wanted.to or new_instance())
    if wanted.turn is None and wanted.step is not None:
        raise fail("E_USAGE", "a step is one of a turn", suggestion="Say its `turn`, too.")
    end = {} if wanted.turn is None else {"turnId": wanted.turn, "step": wanted.step or 1}
    conversation = await _conversation(asked, agent, key)
    return {**await conversation.operate(OPERATOR_FORK, {"from": source, **end}), "instance": key}


async def _conversation(asked: Asked[Swarm], agent: str, key: str) -> Conversation:
    return Conversation(await asked.swarm.session(), asked.swarm.state_dir, agent, key)


def routes(_: Swarm) -> list[Operation]:
    """Both ways."""
    path, copies = "/agents/{agent}/conversation", "Begin another instance with a copy."
    return [
        Operation("undoTurn", "POST", f"{path}/undo", "operate", "Take the last turn back.", undo, Edited, body=Undo),
        Operation("forkConversation", "POST", f"{path}/fork", "operate", copies, fork, Begun, body=Fork),
    ]
