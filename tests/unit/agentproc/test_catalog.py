"""Which calls may be made: order of the checks, and the recorded refusals."""

from __future__ import annotations

from typing import Any

import pytest

from goondan.agentproc.extensions.dynamic_tools import DynamicTools
from goondan.agentproc.machine.catalog import Allowed, Catalog
from goondan.schemas.bundle.launch import DEFAULT_ERROR_LIMIT, CatalogItem, ExtensionSpec, ToolSource
from goondan.schemas.wire.frames import ToolError
from tests.unit.agentproc.fakes import BASH, catalog_of, make_spec

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
    return catalog_of(*registry, allow_registry=allow).of_items(catalog)


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
    catalog = Catalog(make_spec("/nowhere"))
    assert [item.name for item in catalog.for_step().items] == ["bash__exec", "notes__add"]
    assert "hidden__run" in catalog.registry
    assert "hidden__run" not in catalog.for_step()


@pytest.mark.requirement("CATALOG-03")
def test_every_step_has_a_catalog_of_its_own() -> None:
    catalog = Catalog(make_spec("/nowhere"))
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


# --- what is asked of a catalog besides


SHOUT = CatalogItem(name="words__shout", source=ToolSource("config", "words"), error_message_limit=70)
COUNT = CatalogItem(name="words__count", source=ToolSource("config", "words"), parameters={"type": "object"})
OWN = CatalogItem(name="agents__send", source=ToolSource("config", "agents"), in_agent=True)
LATER = CatalogItem(name="words__later", source=ToolSource("config", "words"), deferred=True)


def dynamic(*names: str, hidden: tuple[str, ...] = ()) -> DynamicTools:
    """Tools of the extension `ext`; those of `hidden` are in no step unless somebody names them."""
    tools = DynamicTools({})
    for name in (*names, *hidden):
        item = {"name": name, "description": "x", "errorMessageLimit": 90}
        tools.register(item, lambda ctx, given: None, extension="ext", exposed=name not in hidden)
    return tools


def names(items: Any) -> list[str]:
    return [item.name for item in items]


def test_a_step_shows_what_is_not_deferred_and_knows_all_of_it() -> None:
    catalog = catalog_of(SHOUT, COUNT, LATER, initial=(SHOUT, COUNT, LATER)).for_step()
    assert (names(catalog.items), names(catalog.shown)) == (
        ["words__shout", "words__count", "words__later"],
        ["words__shout", "words__count"],
    )
    assert "words__later" in catalog
    assert isinstance(catalog.check("words__later", {}), Allowed)


def test_the_last_item_of_a_name_counts_in_the_place_of_the_first() -> None:
    renewed = CatalogItem(name="words__shout", description="renewed")
    catalog = catalog_of(SHOUT).of_items([SHOUT, COUNT, renewed])
    assert catalog.items == [renewed, COUNT]


def test_limits_and_schemas_are_those_of_the_tool_also_outside_the_catalog() -> None:
    catalog = catalog_of(SHOUT, COUNT, initial=(COUNT,), allow_registry=["words__*"]).for_step()
    assert catalog.error_limit("words__shout") == 70
    assert catalog.error_limit("words__count") == catalog.error_limit("nobody__x") == DEFAULT_ERROR_LIMIT
    assert catalog.parameters("words__count") == {"type": "object"}
    assert catalog.parameters("words__shout") is None, "it is not in the catalog"
    assert catalog.is_outside("words__shout")
    assert not catalog.is_outside("words__count"), "it is inside"
    assert not catalog.is_outside("nobody__x"), "no pattern lets it through"
    inside = catalog_of(SHOUT, initial=(SHOUT,)).for_step()
    assert (inside.error_limit("words__shout"), inside.is_outside("words__shout")) == (70, False)


def test_a_policy_opens_tools_of_extensions_as_well() -> None:
    tools = dynamic("ext__a", hidden=("ext__b",))
    opened = catalog_of(SHOUT, allow_registry=["ext__*"], dynamic=tools)
    assert opened.allowed_outside("ext__b") == tools.find("ext__b") is not None
    assert opened.allowed_outside("ext__c") is None
    assert opened.allowed_outside("words__shout") is None
    assert catalog_of(SHOUT, allow_registry=["*"]).allowed_outside("ext__a") is None
    assert catalog_of(SHOUT, allow_registry=["*"], dynamic=tools).allowed_outside("words__shout") is SHOUT


def test_a_step_has_the_agents_tools_then_the_named_ones_of_extensions_then_the_others() -> None:
    tools = dynamic("ext__a", "ext__b", hidden=("ext__c", "ext__d"))
    catalog = catalog_of(SHOUT, initial=(SHOUT,), dynamic=tools, named=["ext__c", "ext__b", "ext__gone"])
    assert names(catalog.for_step().items) == ["words__shout", "ext__c", "ext__b", "ext__a"]
    assert names(catalog.dynamic) == ["ext__c", "ext__b", "ext__a"]
    assert names(catalog_of(SHOUT, initial=(SHOUT,)).for_step().items) == ["words__shout"]
    assert catalog_of(SHOUT).dynamic == []
    assert catalog.registered("ext__d") == tools.find("ext__d") is not None
    assert (catalog.registered("words__shout"), catalog_of(SHOUT).registered("ext__a")) == (None, None)
    assert catalog.may_come("ext__gone")
    assert not catalog.may_come("ext__a")


def test_what_can_run_what_runs_here_and_what_could_ever_be_called() -> None:
    tools = dynamic("ext__a")
    catalog = catalog_of(SHOUT, OWN, dynamic=tools, reach=frozenset({"words__shout"}))
    assert [catalog.can_run(name) for name in ("words__shout", "ext__a", "nobody__x")] == [True, True, False]
    assert [name in catalog.run_here for name in ("words__shout", "agents__send", "nobody__x")] == [False, True, False]
    asked = ("words__shout", "agents__send", "ext__a", "nobody__x")
    assert [catalog.reaches(name) for name in asked] == [True, False, True, False]
    without = catalog_of(SHOUT, reach=frozenset({"words__shout"}))
    assert [without.reaches(name) for name in asked] == [True, False, False, False]
    assert [without.can_run(name) for name in ("words__shout", "ext__a")] == [True, False]
    assert isinstance(catalog.for_step().check("ext__a", {}), Allowed)


def test_a_configuration_that_names_tools_replaces_what_the_agent_declares_until_it_is_taken_back() -> None:
    tools = dynamic(hidden=("ext__a", "ext__b"))
    catalog = catalog_of(
        SHOUT, COUNT, BASH, initial=(BASH,), dynamic=tools, named=["ext__b"], reach=frozenset({"bash__exec"})
    )
    assert names(catalog.for_step().items) == ["bash__exec", "ext__b"]
    catalog.begin_with(["words", "ext.a", "gone"])
    assert names(catalog.for_step().items) == ["words__shout", "words__count", "ext__a"]
    assert [catalog.may_come(name) for name in ("ext__a", "ext__b", "words", "gone")] == [True, False, False, True]
    assert [catalog.reaches(name) for name in ("bash__exec", "words__shout", "words__count")] == [True, True, True]
    catalog.begin_with([])
    assert names(catalog.for_step().items) == []
    assert not catalog.reaches("words__shout")
    catalog.begin_with(None)
    assert names(catalog.for_step().items) == ["bash__exec", "ext__b"]
    assert not catalog.reaches("words__shout")
    assert catalog.may_come("ext__b")


def test_a_schema_is_compiled_once_for_each_item() -> None:
    catalog = catalog_of(COUNT)
    first = catalog.checker(COUNT)
    assert catalog.checker(COUNT) is first
    renewed = CatalogItem(name=COUNT.name, parameters={"type": "object", "required": ["a"]})
    assert catalog.checker(renewed) is not first
    assert catalog.checker(renewed).apply({})[1] == ["args.a: required property is missing"]
    assert catalog.checker(SHOUT).apply({}) == ({}, [])


@pytest.mark.requirement("SCHEMA-11")
def test_a_pattern_that_is_not_checked_is_named_once_and_the_tool_stays(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=.*x)y"}}}
    item = CatalogItem(name="files__find", parameters=schema)
    catalog = step([item], [item])
    for _ in range(2):
        assert catalog.check("files__find", {"a": "no"}) == Allowed(item, {"a": "no"})
    assert isinstance(catalog.check("files__find", {"a": 5}), ToolError)
    (record,) = caplog.records
    assert "files__find" in record.getMessage() and "properties/a/pattern" in record.getMessage()


def test_the_catalog_of_an_agent() -> None:
    spec = make_spec(
        "/nowhere", catalog=["bash__exec", "nobody__x"], dynamic=["ext__a"], allow_registry=["hidden__*"],
        addable=["notes__add"],
    )  # fmt: skip
    catalog = Catalog(spec, dynamic(hidden=("ext__a",)))
    assert catalog.agent == "coder"
    assert catalog.for_step().items[0] is BASH
    assert names(catalog.for_step().items) == ["bash__exec", "nobody__x", "ext__a"]
    assert refused(catalog.for_step().check("nobody__x", {}))[1] == "E_TOOL_NOT_FOUND"
    assert isinstance(catalog.for_step().check("hidden__run", {}), Allowed)
    reached = ("bash__exec", "notes__add", "hidden__run", "ext__a", "ext__b")
    assert [catalog.reaches(name) for name in reached] == [True, True, True, True, False]
    assert Catalog(make_spec("/nowhere", "writer")).agent == "writer"


def test_only_an_extension_of_the_bundle_widens_its_agent() -> None:
    own, bundled = (ExtensionSpec(name="x", entry="/x.py", resource={}, bundled=bundled) for bundled in (False, True))
    widened = [Catalog(make_spec("/n", extensions=found)).widened for found in ([], [bundled], [bundled, own])]
    assert widened == [False, False, True]
    assert catalog_of().widened is False


def test_a_broken_schema_is_named_in_the_refusal() -> None:
    broken = CatalogItem(name="b__x", parameters={"type": "nothing"})
    outcome = step([broken], [broken]).check("b__x", {})
    assert refused(outcome)[0] == "ToolSchemaError"
    assert outcome.message
