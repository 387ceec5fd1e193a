"""The calls by which the host itself asks what an MCP server offers: for an agent that attaches, or asks anew. Pure.

A listing takes a place in a session like any call, and ends as one: with what the server says, or with one error. It is
answered by a `reply` or an `error`, and nothing of it is kept.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from goondan.schemas.codec import to_raw
from goondan.schemas.errors import error_payload
from goondan.schemas.frames import NO_PAYLOAD, ErrorPayload, Frame, ToolError
from goondan.schemas.launch import ExportSpec, ToolSpec
from goondan.schemas.mcp import McpListing
from goondan.toolhost.calls.call_registry import Call

#: The largest answer (bytes): it travels as one frame, of 1 MiB with its header.
MAX_LISTING: Final = 1000 << 10
_NOTHING: Final = ExportSpec(name="")


class Listing(Call, eq=False, kw_only=True):
    """A wish to know what a server offers."""

    #: The `id` of the frame that is answered.
    request: str
    #: Whether the agent wants to be attached.
    attaches: bool


def listing_for(frame: Frame, tool: ToolSpec, generation: str, now: float, allowed_s: float) -> Listing:
    """The listing that a frame of an agent asks for. It has `allowed_s` seconds."""
    server = tool.server
    sees = server is not None and server.scope == "agent"
    return Listing(
        id=f"listing/{frame.from_}/{frame.instance_key}/{frame.id}",
        agent=frame.from_ or "",
        instance_key=frame.instance_key or "",
        tool=tool,
        export=_NOTHING,
        args=Raw(bytes(NO_PAYLOAD)),
        turn_id="",
        tool_call_id="",
        message_id=None,
        workdir=frame.workdir if sees else None,
        workdir_base=frame.workdir_base if sees else None,
        deadline=now + allowed_s,
        allowed_ms=int(allowed_s * 1000),
        generation=generation,
        request=frame.id,
        attaches=frame.type == "mcp.attach",
    )


def answer_of(call: Listing, listing: McpListing) -> Frame:
    """What the agent is told: the listing, or that it is too large."""
    payload = to_raw(listing)
    size = memoryview(payload).nbytes
    if size > MAX_LISTING:
        message = f"what the MCP server {call.tool.name} offers takes {size} bytes, limit {MAX_LISTING}"
        info = error_payload("E_MCP_CONNECT", message, suggestion="Filter its tools, or turn off what is not needed.")
        return _answer(call, "error", to_raw(info))
    return _answer(call, "reply", payload)


def refusal_of(call: Listing, error: ToolError) -> Frame:
    """What the agent is told when there is no listing."""
    info = ErrorPayload(
        code=error.code or "E_MCP_CONNECT",
        message=error.message,
        suggestion=error.suggestion,
        help_url=error.help_url,
        name=error.name,
    )
    return _answer(call, "error", to_raw(info))


def _answer(call: Listing, kind: str, payload: msgspec.Raw) -> Frame:
    return Frame(kind, to=call.agent, instance_key=call.instance_key, in_reply_to=call.request, payload=payload)
