"""The upper bound of what an agent may ever call on the bus. Pure; the broker holds it, and the agent knows it.

Source: docs/design/tools.md section 1; requirements CATALOG-04, CATALOG-05, CALL-03.
"""

from __future__ import annotations

from collections.abc import Container
from fnmatch import fnmatchcase

from goondan.schemas.bundle.address import SEPARATOR
from goondan.schemas.bundle.launch import AgentSpec


def reachable_tools(spec: AgentSpec) -> frozenset[str]:
    """The tools that `spec.tools` names, those that the policy opens to the model, and those that the agent's
    extensions may add.
    """
    opened = {item.name for item in spec.registry if any(fnmatchcase(item.name, p) for p in spec.allow_registry)}
    return frozenset(spec.catalog) | opened | frozenset(spec.addable)


def server_of(tool: str | None, servers: Container[str]) -> str | None:
    """The MCP server among `servers` (prefixes) that a tool of this name belongs to; None when there is none.

    All tools of a server whose prefix AgentSpec.servers has may be called. Which those are, only the server knows.
    """
    prefix, separator, export = (tool or "").partition(SEPARATOR)
    return prefix if separator and export and prefix in servers else None
