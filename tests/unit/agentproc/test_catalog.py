"""Which calls may be made: order of the checks, and the recorded refusals."""

from __future__ import annotations

from typing import Any

import pytest

from agentproc.catalog import Allowed, Catalog
from schemas.frames import ToolError
from schemas.launch import CatalogItem
from tests.unit.agentproc.fakes import BASH, make_spec

TRIM = CatalogItem(
    name="text-transform__trim",
    parameters={
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    },
)
QUERY = CatalogItem(
    name="json-query__query",
    parameters={
        "type": "object",
        "properties": {"data": {"type": "string"}, "path": {"type": "string"}},
        "required": ["data"],
        "additionalProperties": False,
    },
)


def step(catalog: list[CatalogItem], registry: list[CatalogItem], allow: tuple[str, ...] = ()) -> Any:
    return Catalog({item.name: item for item in registry}, catalog, allow).for_step()


def refused(outcome: Any) -> tuple[str | None, str | None, str]:
    assert isinstance(outcome, ToolError)
    return outcome.name, outcome.code, outcome.message


# recorded: catalog, registry, tool, args, (name, code, message)
EXECUTOR: list[tuple[list[CatalogItem], list[CatalogItem], str, dict[str, Any], tuple[str, str, str]]] = [
    ([TRIM], [TRIM], "nope__nothing", {}, ("ToolNotInCatalogError", "E_TOOL_NOT_IN_CATALOG",
     "Tool 'nope__nothing' is not available in the current Tool Catalog.")),
    ([TRIM], [TRIM, QUERY], "json-query__query", {"data": "{}"}, ("ToolNotInCatalogError", "E_TOOL_NOT_IN_CATALOG",
     "Tool 'json-query__query' is not available in the current Tool Catalog.")),
    ([], [TRIM], "text-transform__trim", {"bogus": 1}, ("ToolNotInCatalogError", "E_TOOL_NOT_IN_CATALOG",
     "Tool 'text-transform__trim' is not available in the current Tool Catalog.")),
    ([BASH], [BASH], "Bash__exec", {"command": "ls"}, ("ToolNotInCatalogError", "E_TOOL_NOT_IN_CATALOG",
     "Tool 'Bash__exec' is not available in the current Tool Catalog.")),
    ([BASH], [BASH], "", {}, ("ToolNotInCatalogError", "E_TOOL_NOT_IN_CATALOG",
     "Tool '' is not available in the current Tool Catalog.")),
    ([QUERY], [], "json-query__query", {}, ("ToolInputValidationError", "E_TOOL_INVALID_ARGS",
     "Invalid arguments for tool 'json-query__query': args.data: required property is missing")),
    ([QUERY], [], "json-query__query", {"data": "1"}, ("ToolNotFoundError", "E_TOOL_NOT_FOUND",
     "Tool 'json-query__query' is not registered.")),
]  # fmt: skip


@pytest.mark.requirement("CALL-01", "CALL-02", "CALL-04", "CALL-05")
@pytest.mark.parametrize(("catalog", "registry", "tool", "args", "expected"), EXECUTOR)
def test_refusals_are_the_recorded_ones(
    catalog: list[CatalogItem],
    registry: list[CatalogItem],
    tool: str,
    args: dict[str, Any],
    expected: tuple[str, str, str],
) -> None:
    assert refused(step(catalog, registry).check(tool, args)) == expected


@pytest.mark.requirement("CALL-06", "ERROR-06", "ERROR-07")
def test_a_refusal_says_what_to_do() -> None:
    outcome = step([], []).check("x__y", {})
    assert outcome.suggestion == (
        "Add the tool to the Agent's spec.tools, or register it dynamically in step middleware."
    )
    assert outcome.help_url == "https://docs.goondan.ai/errors/E_TOOL_NOT_IN_CATALOG"


@pytest.mark.requirement("CALL-03")
def test_registry_calls_need_a_policy_and_are_checked_all_the_same() -> None:
    hidden = CatalogItem(name="hidden__run", parameters={"type": "object", "required": ["a"]})
    assert refused(step([], [hidden]).check("hidden__run", {"a": 1}))[1] == "E_TOOL_NOT_IN_CATALOG"
    allowed = step([], [hidden], ("hidden__*",))
    assert allowed.check("hidden__run", {"a": 1}) == Allowed(hidden, {"a": 1})
    assert refused(allowed.check("hidden__run", {}))[1] == "E_TOOL_INVALID_ARGS"
    assert refused(allowed.check("hidden__other", {}))[1] == "E_TOOL_NOT_IN_CATALOG"
    assert refused(allowed.check("other__run", {}))[1] == "E_TOOL_NOT_IN_CATALOG"


@pytest.mark.requirement("CATALOG-01", "CATALOG-02", "CATALOG-04")
def test_an_agent_starts_with_its_catalog_not_with_its_registry() -> None:
    catalog = Catalog.of(make_spec("/nowhere"))
    assert [item.name for item in catalog.for_step().items] == ["bash__exec", "notes__add"]
    assert "hidden__run" in catalog.registry
    assert "hidden__run" not in catalog.for_step()


@pytest.mark.requirement("CATALOG-03")
def test_every_step_has_a_catalog_of_its_own() -> None:
    catalog = Catalog.of(make_spec("/nowhere"))
    assert catalog.for_step() is not catalog.for_step()


def test_aliases_reach_the_call_under_their_canonical_name() -> None:
    item = CatalogItem(
        name="t__d",
        parameters={"type": "object", "properties": {"fileId": {"type": "string"}}, "additionalProperties": False},
        aliases={"file_id": "fileId"},
    )
    assert step([item], [item]).check("t__d", {"file_id": "f"}) == Allowed(item, {"fileId": "f"})


def test_a_tool_with_a_broken_schema_fails_its_own_calls_only() -> None:
    broken = CatalogItem(name="b__x", parameters={"type": "nothing"})
    catalog = step([broken, BASH], [broken, BASH])
    assert refused(catalog.check("b__x", {}))[1] == "E_CONFIG_SCHEMA"
    assert isinstance(catalog.check("bash__exec", {"command": "ls"}), Allowed)
