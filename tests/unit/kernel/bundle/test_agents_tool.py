"""The manifests of the bundled tools that run in the agent's process, and who gets them."""

from __future__ import annotations

import pytest

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.plan import catalog_items


@pytest.mark.requirement("AGENTS-10", "ERROR-09")
def test_agents_has_five_exports_and_a_limit_of_its_own() -> None:
    tool = base_tools()["agents"]
    assert [export.name for export in tool.body.exports] == ["request", "send", "spawn", "list", "catalog"]
    assert tool.body.error_message_limit == 1500
    assert all(item.in_agent for item in catalog_items(tool))


def test_no_other_bundled_tool_runs_in_the_agent() -> None:
    of_core = {name: tool for name, tool in base_tools().items() if "/features/" not in tool.root}
    assert [name for name, tool in of_core.items() if tool.in_agent] == ["agents", "handoff"]


@pytest.mark.requirement("BASE-02")
def test_the_bundled_tools_and_their_exports() -> None:
    exports = {name: [export.name for export in tool.body.exports] for name, tool in base_tools().items()}
    specified = {
        "bash": ["exec", "script"],
        "file-system": ["read", "write", "list", "mkdir"],
        "http-fetch": ["get", "post"],
        "json-query": ["query", "pick", "count", "flatten"],
        "text-transform": ["replace", "slice", "split", "join", "trim", "case"],
        "agents": ["request", "send", "spawn", "list", "catalog"],
        "telegram": ["send", "edit", "delete", "react", "setChatAction", "downloadFile"],
        "slack": ["send", "read", "edit", "delete", "react", "downloadFile"],
    }
    assert {name: exports[name] for name in specified} == specified


#: What the specification says of each export: its parameters with their types, and which of them must be given.
ASKS = {"target": "string", "input": "string", "instanceKey": "string", "eventType": "string", "metadata": "object"}
PARAMETERS: dict[str, dict[str, tuple[dict[str, object], list[str]]]] = {
    "agents": {
        "request": ({**ASKS, "timeoutMs": "number", "async": "boolean"}, ["target", "input"]),
        "send": (dict(ASKS), ["target", "input"]),
        "spawn": ({"target": "string", "instanceKey": "string", "cwd": "string"}, ["target"]),
        "list": ({"includeAll": "boolean"}, []),
        "catalog": ({}, []),
    },
    "handoff": {
        "request": (
            {
                "target": "string",
                "payload": ["string", "number", "boolean", "object", "array", "null"],
                "instanceKey": "string",
                "metadata": "object",
            },
            ["target", "payload"],
        )
    },
}


@pytest.mark.requirement(
    "AGENTS-06", "AGENTS-12", "AGENTS-19", "AGENTS-22", "AGENTS-25", "AGENTS-28", "HANDOFF-02", "HANDOFF-06"
)
@pytest.mark.parametrize("tool", PARAMETERS)
def test_the_parameters_are_those_of_the_specification(tool: str) -> None:
    found = {}
    for export in base_tools()[tool].body.exports:
        schema = export.parameters or {}
        types = {name: part["type"] for name, part in schema.get("properties", {}).items()}
        found[export.name] = (types, schema.get("required", []))
    assert found == PARAMETERS[tool]
