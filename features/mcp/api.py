"""How an MCP server is, in one row: for the command that lists them, and for programs that ask a door.

Source: docs/mcp.md, "Looking at servers".
"""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from goondan.schemas.worker.tool_host_reports import WorkerNews


def row(news: WorkerNews) -> dict[str, Any]:
    """One session of a server, as the tool host told of it last."""
    state = news.server
    if state is None:
        raise AssertionError("only news of servers has a row")
    told = {"instanceKey": news.instance_key, "pid": news.pid or None, "since": news.since}
    known: dict[str, Any] = to_builtins(state)
    return idle_row(state.server, state.extension, state.transport) | known | told


def idle_row(prefix: str, extension: str, transport: str) -> dict[str, Any]:
    """A server that nobody has attached to."""
    return {
        "server": prefix,
        "extension": extension,
        "transport": transport,
        "agent": None,
        "instanceKey": None,
        "state": "idle",
        "protocolVersion": "",
        "attached": 0,
        "openCalls": 0,
        "calls": 0,
        "memoryKb": 0,
        "pid": None,
        "since": "",
        "lastError": None,
    }
