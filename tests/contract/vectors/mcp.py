"""Recorded frames about MCP servers."""

from __future__ import annotations

from typing import Final

from goondan.schemas.mcp import McpAttach, McpListing, McpNews, McpPrompt, McpResource, McpTool
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AttachedServer, Frame, Hello

_SIGNED: Final = "b2Zm.aW4="


def mcp_frames() -> list[tuple[str, Frame, str | None]]:
    """Name, frame and payload kind of everything that our own encoder writes."""
    github = to_raw(McpAttach("github"))
    tool = McpTool(
        export="create_issue",
        name="create_issue",
        description="Open an issue",
        input_schema={"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]},
        annotations={"readOnlyHint": False},
    )
    listing = McpListing(
        server_name="github",
        server_version="1.2.0",
        protocol_version="2025-11-25",
        instructions="Ask before you close an issue.",
        tools=[tool],
        resources=[McpResource(uri="repo://readme", name="readme", mime_type="text/markdown")],
        resource_templates=[McpResource(uri="repo://{path}", name="file")],
        prompts=[McpPrompt(name="review", arguments=[{"name": "number", "required": True}])],
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
    gone = McpNews(server="github", kind="gone", message="exit status 1: out of memory")
    changed = McpNews(server="github", kind="resource", uri="repo://readme")
    return [
        ("mcp.attach", attach, "McpAttach"),
        ("mcp.attach to a tool host", passed, "McpAttach"),
        ("reply to mcp.attach", Frame("reply", id="b.32", in_reply_to="x.31", payload=to_raw(listing)), "McpListing"),
        ("mcp.list", Frame("mcp.list", id="x.32", payload=github), "McpAttach"),
        ("mcp.detach", Frame("mcp.detach", id="x.33", payload=github), "McpAttach"),
        ("mcp.news", Frame("mcp.news", id="h.31", instance_key="u1", payload=to_raw(gone)), "McpNews"),
        (
            "mcp.news of one agent's server",
            Frame("mcp.news", id="h.32", to="coder", instance_key="u1", payload=to_raw(changed)),
            "McpNews",
        ),
        ("hello of a tool host with MCP servers", Frame("hello", id="h.1", payload=to_raw(hello)), "Hello"),
    ]
