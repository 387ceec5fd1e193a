"""Recorded frames about MCP servers."""

from __future__ import annotations

from typing import Final

from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AttachedServer, Frame, Hello
from goondan.schemas.worker.servers import (
    NamedServer,
    ServerListing,
    ServerNews,
    ServerPrompt,
    ServerResource,
    ServerTool,
)

_SIGNED: Final = "b2Zm.aW4="


def mcp_frames() -> list[tuple[str, Frame, str | None]]:
    """Name, frame and payload kind of everything that our own encoder writes."""
    github = to_raw(NamedServer("github"))
    tool = ServerTool(
        export="create_issue",
        name="create_issue",
        description="Open an issue",
        input_schema={"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]},
        annotations={"readOnlyHint": False},
    )
    listing = ServerListing(
        server_name="github",
        server_version="1.2.0",
        protocol_version="2025-11-25",
        instructions="Ask before you close an issue.",
        tools=[tool],
        resources=[ServerResource(uri="repo://readme", name="readme", mime_type="text/markdown")],
        resource_templates=[ServerResource(uri="repo://{path}", name="file")],
        prompts=[ServerPrompt(name="review", arguments=[{"name": "number", "required": True}])],
        ttl_ms=60_000,
        session=3,
    )
    hello = Hello(_SIGNED, "5f1c0a9b3d2e", attached=[AttachedServer("github", "coder", "u1")])
    attach = Frame("mcp.attach", id="x.31", payload=github)
    passed = Frame(
        "mcp.attach",
        id="b.31",
        from_="coder",
        instance_key="u1",
        workdir="/state/instances/coder/u1/workspace",
        deadline_ms=60_000,
        payload=github,
    )
    gone = ServerNews(server="github", kind="gone", message="exit status 1: out of memory")
    changed = ServerNews(server="github", kind="resource", uri="repo://readme")
    return [
        ("mcp.attach", attach, "NamedServer"),
        ("mcp.attach to a tool host", passed, "NamedServer"),
        (
            "reply to mcp.attach",
            Frame("reply", id="b.32", in_reply_to="x.31", payload=to_raw(listing)),
            "ServerListing",
        ),
        ("mcp.list", Frame("mcp.list", id="x.32", payload=github), "NamedServer"),
        ("mcp.detach", Frame("mcp.detach", id="x.33", payload=github), "NamedServer"),
        ("mcp.news", Frame("mcp.news", id="h.31", instance_key="u1", payload=to_raw(gone)), "ServerNews"),
        (
            "mcp.news of one agent's server",
            Frame("mcp.news", id="h.32", to="coder", instance_key="u1", payload=to_raw(changed)),
            "ServerNews",
        ),
        ("hello of a tool host with MCP servers", Frame("hello", id="h.1", payload=to_raw(hello)), "Hello"),
    ]
