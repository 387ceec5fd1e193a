"""Recorded frames about what calls ask of the agents that made them."""

from __future__ import annotations

from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import error_payload
from goondan.schemas.wire.frames import Frame, ToolCallPayload
from goondan.schemas.wire.questions import ToolAnswer, ToolAsk


def tool_ask_frames() -> list[tuple[str, Frame, str | None]]:
    """Name, frame and payload kind of everything that our own encoder writes."""
    called = {"name": "json-query__count", "args": {"data": [1, 2], "path": "$"}}
    result = {"status": "ok", "output": {"count": 2}}
    tool = {"name": "json-query__count", "description": "Count.", "parameters": {"type": "object"}}
    found = {"tools": [tool], "total": 12}
    failed = error_payload("E_TOOL_NOT_IN_CATALOG", "Tool 'x' is not available in the current Tool Catalog.")
    inner = ToolCallPayload(args=to_raw({"data": "[1, 2]"}), turn_id="t1", tool_call_id="c1>1")
    return [
        (
            "tool.call that a script makes",
            Frame(
                "tool.call",
                id="a.3",
                event_id="e-1",
                tool="json-query__count",
                call_id="t1/c1>1",
                epoch=7,
                within="t1/c1",
                payload=to_raw(inner),
            ),
            "ToolCallPayload",
        ),
        (
            "tool.ask: call a tool",
            Frame("tool.ask", id="h.9", call_id="t1/c1", payload=to_raw(ToolAsk(1, "tool", to_raw(called)))),
            "ToolAsk",
        ),
        (
            "tool.ask from the broker",
            Frame(
                "tool.ask",
                id="h.10",
                from_="toolhost/1",
                to="coder",
                instance_key="u1",
                event_id="e-1",
                tool="code__run",
                call_id="t1/c1",
                epoch=7,
                payload=to_raw(ToolAsk(2, "tools", to_raw({"query": "count things"}))),
            ),
            "ToolAsk",
        ),
        (
            "tool.answer: a result",
            Frame(
                "tool.answer",
                id="a.4",
                call_id="t1/c1",
                in_reply_to="h.9",
                payload=to_raw(ToolAnswer(1, to_raw(result))),
            ),
            "ToolAnswer",
        ),
        (
            "tool.answer: tools",
            Frame(
                "tool.answer",
                id="a.5",
                call_id="t1/c1",
                in_reply_to="h.10",
                payload=to_raw(ToolAnswer(2, to_raw(found))),
            ),
            "ToolAnswer",
        ),
        (
            "tool.answer: an error",
            Frame(
                "tool.answer",
                id="a.6",
                call_id="t1/c1",
                in_reply_to="h.11",
                payload=to_raw(ToolAnswer(3, None, failed)),
            ),
            "ToolAnswer",
        ),
    ]
