"""The MCP servers of a checked bundle as the tool host and the agents are told of them. Pure.

Values of variables and headers go to tool hosts only: agents do not need them. A digest names what makes two sessions
different, these values included, so an agent attaches anew when one of them changes.

Source: docs/design/tools.md section 11; requirements MCP-05 to MCP-09, MCP-22.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from goondan.kernel.bundle.servers import CheckedServer, is_mcp, prefix_of
from goondan.schemas.bundle.launch import ExtensionSpec, McpServerSpec, SandboxSpec, ToolSpec

_ordered: Final = msgspec.msgpack.Encoder(order="deterministic")
#: Stands in agents for the value of a variable or a header.
_HIDDEN: Final = "***"
_SECRETS: Final = ("env", "headers")


def server_tool(server: CheckedServer, digest: str) -> ToolSpec:
    """An MCP server as a Tool of the tool host. `digest` is that of the folder that its command names."""
    tool = server.tool
    sandbox = tool.granted or tool.sandbox
    narrowed = {name: left for name, left in tool.narrowed.items() if name in server.agents}
    narrowed |= {name: own for name, (_, own) in server.of_agents.items()}
    shared = _with_digest(server.spec, sandbox, digest)
    servers: dict[str, McpServerSpec] = {}
    for name, left in narrowed.items():
        spec = server.of_agents[name][0] if name in server.of_agents else server.spec
        servers[name] = _with_digest(spec, left, digest)
    return ToolSpec(
        name=tool.name,
        entry=tool.entry,
        root=tool.root,
        exports=[],
        error_message_limit=tool.body.error_message_limit,
        sandbox=sandbox,
        narrowed=narrowed,
        digest=digest,
        server=shared,
        servers=servers,
    )


def _with_digest(spec: McpServerSpec, sandbox: SandboxSpec, folder: str) -> McpServerSpec:
    total = hashlib.sha256(_ordered.encode([replace(spec, digest=""), sandbox, folder])).hexdigest()
    return replace(spec, digest=total)


def agent_extension(extension: ExtensionSpec, agent: str, tools: Mapping[str, ToolSpec]) -> ExtensionSpec:
    """What an agent is told of one of its extensions. `tools` are those of the tool host that are MCP servers."""
    if not is_mcp(extension.entry, extension.bundled) or not extension.config:
        return extension
    tool = tools[prefix_of(extension.name, extension.config)]
    spec = tool.servers.get(agent) or tool.server
    document = dict(extension.resource)
    document["spec"] = without_values(document["spec"])
    return replace(
        extension,
        resource=document,
        config=document["spec"]["config"],
        server=tool.name,
        server_digest="" if spec is None else spec.digest,
    )


def agent_document(document: dict[str, Any], servers: bool) -> dict[str, Any]:
    """The document of an agent that has `servers`, without the values in its own configs of these."""
    body = document.get("spec")
    uses = body.get("extensions") if isinstance(body, dict) else None
    if not servers or not isinstance(body, dict) or not isinstance(uses, list):
        return document
    shown = [without_values(use) if isinstance(use, dict) else use for use in uses]
    return {**document, "spec": {**body, "extensions": shown}}


def without_values(holder: dict[str, Any]) -> dict[str, Any]:
    """A copy of an object with a `config` in which variables and headers of a transport have no values."""
    config = holder.get("config")
    transport = config.get("transport") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(transport, dict):
        return holder
    hidden = {key: dict.fromkeys(transport[key], _HIDDEN) for key in _SECRETS if isinstance(transport.get(key), dict)}
    oauth = transport.get("oauth")
    if isinstance(oauth, dict) and "clientSecret" in oauth:
        hidden["oauth"] = {**oauth, "clientSecret": _HIDDEN}
    return {**holder, "config": {**config, "transport": {**transport, **hidden}}}
