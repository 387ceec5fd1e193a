"""Recorded refusals of every bundled tool: not in the catalog, or invalid arguments. No handler runs for them.

The manifests of tools that are not bundled yet are not needed: what their schemas say about a recorded refusal stands
in the refusals themselves (the suggestion lists required and allowed properties in order, the messages name types).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest

from goondan.schemas.bundle.launch import CatalogItem
from goondan.schemas.wire.errors import cut_message
from goondan.schemas.wire.frames import ToolError
from tests.contract.recorded import cases
from tests.unit.agentproc.fakes import catalog_of

REFUSALS = ("E_TOOL_INVALID_ARGS", "E_TOOL_NOT_IN_CATALOG")
LISTS = re.compile(r"required=\[(?P<required>[^]]*)\], allowed=\[(?P<allowed>[^]]*)\]")
TYPE = re.compile(r"args\.(?P<name>\w+)(?P<item>\[\d+\])?: expected (?P<types>[a-z|]+) but got")
ENUM = re.compile(r"args\.(?P<name>\w+): value must be one of (?P<options>\[[^]]*\])")


def refusals() -> list[dict[str, Any]]:
    return [case for case in cases() if case["expect"].get("error", {}).get("code") in REFUSALS]


def names(listed: str) -> list[str]:
    return [] if listed == "(none)" else listed.split(", ")


def schemas(cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tool -> as much of its schema as its recorded refusals tell."""
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"type": "object", "additionalProperties": False})
    for case in cases:
        error, schema = case["expect"]["error"], found[case["tool"]]
        lists = LISTS.search(error["suggestion"])
        if lists is None:
            continue
        schema["required"] = names(lists["required"])
        properties = schema.setdefault("properties", {name: {} for name in names(lists["allowed"])})
        for told in TYPE.finditer(error["message"]):
            types = told["types"].split("|")
            kind: Any = types if len(types) > 1 else types[0]
            where = properties[told["name"]]
            if told["item"]:
                where.setdefault("items", {})["type"] = kind
            else:
                where["type"] = kind
        for told in ENUM.finditer(error["message"]):
            properties[told["name"]]["enum"] = json.loads(told["options"])
    return dict(found)


CASES_HERE = refusals()
SCHEMAS = schemas(CASES_HERE)


@pytest.mark.requirement("CALL-04", "CALL-05", "ERROR-03", "RESULT-05")
@pytest.mark.parametrize("case", CASES_HERE, ids=[case["id"] for case in CASES_HERE])
def test_recorded(case: dict[str, Any]) -> None:
    items = [CatalogItem(name=tool, parameters=schema) for tool, schema in SCHEMAS.items() if "properties" in schema]
    shown = items if "catalog" not in case else [item for item in items if item.name in case["catalog"]]
    registry = [] if case.get("registry") == "empty" else items
    outcome = catalog_of(*registry).of_items(shown).check(case["tool"], case["args"])
    assert isinstance(outcome, ToolError)
    expected = case["expect"]["error"]
    limit = case.get("errorMessageLimit", 2000 if case["tool"].startswith("file-system") else 1000)
    assert (outcome.name, outcome.code) == (expected["name"], expected["code"])
    assert cut_message(outcome.message, limit) == expected["message"]
    lists = LISTS.search(expected["suggestion"])
    if lists is not None:
        assert str(outcome.suggestion).endswith(lists[0])


def test_the_recording_holds_many_of_them() -> None:
    assert len(CASES_HERE) > 80
    assert len(SCHEMAS) > 20
