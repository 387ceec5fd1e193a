"""What the door says of servers and what was learned, and to whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from goondan.features import parts
from goondan.features.page.door import status
from goondan.features.serve.api.routing import Asked
from goondan.features.serve.api.rules.callers import Caller
from goondan.kernel.supervisor_client import Reply
from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.tool_host_reports import ServerState, WorkerNews

AT = "2026-11-23T10:00:00Z"
LEARNED = parts("status")
#: A row with what each of them has.
ROW = {
    "models": ["m"],
    "concurrent": 2,
    "perMinute": None,
    "refusals": 0,
    "learnedMs": 1000,
    "text": "waits",
    "sent": 0,
    "dropped": 0,
    "droppedTurns": 0,
}


def session(server: str, agent: str | None, error: str | None = None) -> WorkerNews:
    state = ServerState(
        server=server, extension=server, transport="stdio", agent=agent, state="connected", last_error=error
    )
    return WorkerNews(op="server", pid=5, agent=agent, instance_key="k", since=AT, server=state)


async def told(monkeypatch: pytest.MonkeyPatch, reply: Reply | None, *agents: str, kernel: bool = True) -> Any:
    async def admin(asked: dict[str, Any]) -> dict[str, Any]:
        if not kernel:
            raise fail("E_KERNEL_NOT_RUNNING", "none")
        return {asked["op"]: [ROW]}

    monkeypatch.setattr(status, "ask_supervisor", lambda *_: reply)
    swarm = cast(Any, SimpleNamespace(state_dir="/s", admin=admin))
    return await status.status(Asked(Caller("phone", "look", agents), swarm, {}, None, None))


async def test_servers_and_what_was_learned_are_told_as_far_as_they_are_of_the_callers_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reply = Reply(ok=True, servers=[session("files", None), session("mail", "main", "E_X: gone")])
    whole = await told(monkeypatch, reply, "*")
    assert [(one["server"], one.get("lastError")) for one in whole["servers"]] == [
        ("files", None),
        ("mail", "E_X: gone"),
    ]
    lines = [(module.LEARNED.op, module.LEARNED.line(ROW)) for module in LEARNED]
    assert [(row["about"], row["text"]) for row in whole["learned"]] == lines
    mine = await told(monkeypatch, reply, "main")
    assert [one["server"] for one in mine["servers"]] == ["mail"]
    assert mine["learned"] == []


async def test_without_a_kernel_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await told(monkeypatch, None, "*", kernel=False) == {"servers": [], "learned": []}
