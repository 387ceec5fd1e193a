"""The error results that the broker itself gives to tool calls. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from goondan.kernel.broker.bus import Bus
from goondan.kernel.broker.entities import Connection
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import ErrorPayload, Frame


def refuse_call(bus: Bus, connection: Connection, frame: Frame, info: ErrorPayload) -> None:
    """Answer a call that is not made with an error result."""
    refused = Frame("tool.result", call_id=frame.call_id, in_reply_to=frame.id, to=connection.claims.agent)
    refused.payload = to_raw({"status": "error", "error": tool_error(info)})
    bus.send(connection, refused)


def tool_error(info: ErrorPayload) -> dict[str, Any]:
    """An error as a tool's result has it."""
    fields: dict[str, Any] = msgspec.to_builtins(info)
    fields.pop("retryAfterMs", None)
    return {"name": "ToolHostError", **fields}
