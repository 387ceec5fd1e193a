"""Schemas as tables."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.kernel.bundle.documents import base_tools
from goondan.kernel.bundle.rules.tool_pages import MAX_ROWS, Parameter, parameter_rows, type_words

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "items", "anyOf", "enum", "required", "default", "minimum", "x"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=10,
)


def test_nested_properties_and_items_have_rows_of_their_own() -> None:
    schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "The text.", "minLength": 1},
            "filter": {"type": "object", "properties": {"status": {"enum": ["on", "off"], "default": "on"}}},
            "users": {"type": "array", "items": {"type": "object", "properties": {"age": {"type": "integer"}}}},
        },
        "required": ["text"],
    }
    assert parameter_rows(schema) == [
        Parameter("text", "string, at least 1 characters", required=True, description="The text."),
        Parameter("filter", "object"),
        Parameter("filter.status", '"on" or "off"', default='"on"'),
        Parameter("users", "array of object"),
        Parameter("users[].age", "integer"),
    ]
    assert parameter_rows(None) == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": ["string", "integer"]}, "string or integer"),
        ({"type": "array", "items": {"type": ["string", "number"]}}, "array of (string or number)"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string or null"),
        ({"type": "integer", "minimum": 1, "maximum": 5}, "integer, ≥ 1, ≤ 5"),
        ({"const": 3}, "3"),
        ({}, "anything"),
        (True, "anything"),
        (False, "nothing"),
    ],
)
def test_types_in_words(schema: Any, words: str) -> None:
    assert type_words(schema) == words


@settings(max_examples=50)
@given(JSON)
def test_any_json_has_rows_and_never_too_many(schema: Any) -> None:
    assert len(parameter_rows(schema)) <= MAX_ROWS


def test_a_schema_that_refers_to_itself_by_depth_ends() -> None:
    schema: dict[str, Any] = {"properties": {}}
    schema["properties"] = {f"p{number}": schema for number in range(20)}
    assert len(parameter_rows(schema)) == MAX_ROWS


def test_every_parameter_of_the_bundled_tools_says_what_it_is() -> None:
    rows = [
        row
        for tool in base_tools().values()
        for export in tool.body.exports
        for row in parameter_rows(export.parameters)
    ]
    assert len(rows) > 30
    assert [row.name for row in rows if row.type == "anything"] == []
