"""The manifests of the bundled tools that run in the agent's process, and who gets them."""

from __future__ import annotations

import pytest

from kernel.bundle.base import base_tools
from kernel.plan import catalog_items


@pytest.mark.requirement("AGENTS-10", "ERROR-09")
def test_agents_has_five_exports_and_a_limit_of_its_own() -> None:
    tool = base_tools()["agents"]
    assert [export.name for export in tool.body.exports] == ["request", "send", "spawn", "list", "catalog"]
    assert tool.body.error_message_limit == 1500
    assert all(item.in_agent for item in catalog_items(tool))


def test_no_other_bundled_tool_runs_in_the_agent() -> None:
    assert [name for name, tool in base_tools().items() if tool.in_agent] == ["agents", "handoff"]
