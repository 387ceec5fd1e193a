"""What a door says of the sessions with servers, and to whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from goondan.features.mcp import door
from goondan.kernel.cli.operations import Asked
from goondan.kernel.cli.rules.callers import Caller
from goondan.kernel.supervisor_client import Reply
from goondan.schemas.worker.tool_host_reports import ServerState, WorkerNews

AT = "2026-11-23T10:00:00Z"


def session(server: str, agent: str | None, error: str | None = None) -> WorkerNews:
    state = ServerState(
        server=server, extension=server, transport="stdio", agent=agent, state="connected", last_error=error
    )
    return WorkerNews(op="server", pid=5, agent=agent, instance_key="k", since=AT, server=state)


def told(monkeypatch: pytest.MonkeyPatch, reply: Reply | None, *agents: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(door, "ask_supervisor", lambda *_: reply)
    swarm: Any = SimpleNamespace(state_dir="/s")
    (row,) = door.routes(swarm)
    found: list[dict[str, Any]] = row.handler(Asked(Caller("phone", "look", agents), swarm, {}, None, None))
    return found


def test_a_caller_is_told_of_servers_of_its_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerNews(op="start", pid=6, agent="main", instance_key="k", since=AT)
    reply = Reply(ok=True, servers=[session("files", None), worker, session("mail", "main", "E_X: gone")])
    whole = told(monkeypatch, reply, "*")
    assert [(one["server"], one["lastError"]) for one in whole] == [("files", None), ("mail", "E_X: gone")]
    assert whole[1] | {"agent": "main", "instanceKey": "k", "since": AT, "pid": 5, "calls": 0} == whole[1]
    assert [one["server"] for one in told(monkeypatch, reply, "main")] == ["mail"]
    assert told(monkeypatch, reply, "other") == []


def test_without_a_kernel_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, None, "*") == []
