"""Questions of operators: whose answers are shown, and in what order the broker is asked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from goondan.features import parts
from goondan.features.serve.api.routing import Asked
from goondan.features.serve.api.rules.callers import Caller
from goondan.features.serve.door.operations import OPERATIONS, learned
from goondan.schemas.wire.errors import GoondanError, fail

#: What the broker says of a letter that was sent again: it is no dead letter any more.
DONE = {"eventId": "e1", "state": "requeued", "newEventId": "e1~requeued"}


def requeued(*agents: str, of: str | None) -> tuple[Any, list[str]]:
    """The answer to a caller with these agents, and what was asked. The letter is of an agent, or none any more."""
    ops: list[str] = []

    async def admin(request: dict[str, Any]) -> dict[str, Any]:
        ops.append(request["op"])
        if request["op"] == "dead.requeue":
            return DONE
        if of is None:
            raise fail("E_EVENT_NOT_FOUND", "there is no dead letter")
        return {"agent": of}

    operation = next(row for row in OPERATIONS if row.name == "requeueDeadLetter")
    swarm, caller = cast(Any, SimpleNamespace(admin=admin)), Caller("one", "operate", agents)
    asked = Asked(caller, swarm, {"id": "e1"}, None, None)
    return asyncio.run(cast(Any, operation.handler(asked))), ops


def test_a_repeat_gets_the_same_answer() -> None:
    assert requeued("*", of=None) == (DONE, ["dead.requeue"])


def test_for_who_may_not_see_all_the_agent_is_asked_first() -> None:
    assert requeued("main", of="main") == (DONE, ["dead.show", "dead.requeue"])
    with pytest.raises(GoondanError, match="does not lead to the agent 'other'"):
        requeued("main", of="other")


async def test_what_was_learned_is_told_to_who_may_see_all() -> None:
    row = {"models": ["m"], "concurrent": 2, "perMinute": None, "refusals": 0, "learnedMs": 1000, "text": "waits"}
    row |= {"sent": 0, "dropped": 0, "droppedTurns": 0}
    every = [module.LEARNED for module in parts("status")]

    async def told(*agents: str, missing: str = "") -> list[dict[str, Any]]:
        async def admin(request: dict[str, Any]) -> dict[str, Any]:
            if request["op"] == missing:
                raise fail("E_FRAME_INVALID", "admin knows no such question")
            return {request["op"]: [row]}

        return await learned(
            Asked(Caller("one", "look", agents), cast(Any, SimpleNamespace(admin=admin)), {}, None, None)
        )

    assert [(one["about"], one["text"]) for one in await told("*")] == [(one.op, one.line(row)) for one in every]
    assert [one["about"] for one in await told("*", missing=every[0].op)] == [one.op for one in every[1:]]
    assert await told("main") == []
