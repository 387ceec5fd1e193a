"""Questions of operators: whose answers are shown, and in what order the broker is asked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from goondan.features.serve.api.routing import Asked
from goondan.features.serve.api.rules.callers import Caller
from goondan.features.serve.door.operations import OPERATIONS
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
