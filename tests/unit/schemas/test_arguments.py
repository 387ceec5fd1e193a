"""Arguments against a schema: the verdict of JSON Schema, the recorded wording, and hostile input."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.schemas.bundle.arguments import compile_arguments, invalid_arguments
from goondan.schemas.bundle.json_values import json_type
from goondan.schemas.wire.errors import GoondanError

TRIM: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "mode": {"type": "string", "enum": ["start", "end", "both"]}},
    "required": ["text"],
    "additionalProperties": False,
}
QUERY: dict[str, Any] = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "path": {"type": "string"}},
    "required": ["data"],
    "additionalProperties": False,
}
SCRIPT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "args": {"type": "array", "items": {"type": "string"}},
        "timeoutMs": {"type": "number"},
    },
    "required": ["path"],
    "additionalProperties": False,
}
JOIN: dict[str, Any] = {
    "type": "object",
    "properties": {"parts": {"type": "array", "items": {"type": ["string", "number", "boolean"]}}},
    "required": ["parts"],
    "additionalProperties": False,
}
LIST: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "recursive": {"type": "boolean"}},
    "additionalProperties": False,
}

# schema, arguments, the recorded message behind "Invalid arguments for tool 'T': "
RECORDED: list[tuple[dict[str, Any], Any, str]] = [
    (TRIM, {}, "args.text: required property is missing"),
    (TRIM, {"text": 5}, "args.text: expected string but got integer"),
    (TRIM, {"text": 5.5}, "args.text: expected string but got number"),
    (TRIM, {"text": 5.0}, "args.text: expected string but got integer"),
    (TRIM, {"text": []}, "args.text: expected string but got array"),
    (TRIM, {"text": {}}, "args.text: expected string but got object"),
    (TRIM, {"text": None}, "args.text: expected string but got null"),
    (TRIM, {"text": True}, "args.text: expected string but got boolean"),
    (TRIM, {"text": "x", "mode": "left"}, 'args.mode: value must be one of ["start", "end", "both"]'),
    (TRIM, {"text": "x", "mode": None}, "args.mode: expected string but got null"),
    (TRIM, {"text": "x", "constructor": 1}, "args.constructor: unexpected property"),
    (
        TRIM,
        {"a": 1, "b": 2, "c": 3, "d": 4},
        "args.text: required property is missing; args.a: unexpected property; args.b: unexpected property; "
        "args.c: unexpected property; args.d: unexpected property",
    ),
    (
        QUERY,
        {"path": 5, "foo": 1, "bar": None},
        "args.data: required property is missing; args.foo: unexpected property; args.bar: unexpected property; "
        "args.path: expected string but got integer",
    ),
    (
        QUERY,
        {"path": 5, "a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6},
        "args.data: required property is missing; args.a: unexpected property; args.b: unexpected property; "
        "args.c: unexpected property; args.d: unexpected property; +3 more issues",
    ),
    (SCRIPT, {"path": "s.sh", "args": "a b"}, "args.args: expected array but got string"),
    (
        SCRIPT,
        {"path": "s.sh", "args": ["a", 1, None]},
        "args.args[1]: expected string but got integer; args.args[2]: expected string but got null",
    ),
    (SCRIPT, {"timeoutMs": True, "path": 1}, "args.path: expected string but got integer; "
     "args.timeoutMs: expected number but got boolean"),
    (JOIN, {"parts": ["a", None]}, "args.parts[1]: expected string|number|boolean but got null"),
    (
        QUERY,
        {"data": "", "z": 1, "10": 1, "2": 1, "02": 1},
        "args.2: unexpected property; args.10: unexpected property; args.z: unexpected property; "
        "args.02: unexpected property",
    ),
]  # fmt: skip


@pytest.mark.requirement("RESULT-05")
@pytest.mark.parametrize(("schema", "args", "expected"), RECORDED)
def test_issues_have_the_recorded_order_and_wording(schema: dict[str, Any], args: Any, expected: str) -> None:
    _, issues = compile_arguments(schema, {}).apply(args)
    error = invalid_arguments("T", issues, schema)
    assert error.message == f"Invalid arguments for tool 'T': {expected}"
    assert (error.name, error.code) == ("ToolInputValidationError", "E_TOOL_INVALID_ARGS")


def test_suggestion_names_what_is_required_and_allowed() -> None:
    assert invalid_arguments("T", ["x"], TRIM).suggestion == (
        "Check the input schema and write the arguments again. required=[text], allowed=[text, mode]"
    )
    assert "required=[(none)], allowed=[path, recursive]" in str(invalid_arguments("T", ["x"], LIST).suggestion)
    assert "required=[(none)], allowed=[(none)]" in str(invalid_arguments("T", ["x"], None).suggestion)


@pytest.mark.requirement("SCHEMA-11")
def test_nested_objects_unions_and_references_are_worded_at_their_place() -> None:
    schema = {
        "type": "object",
        "properties": {
            "filters": {
                "type": "object",
                "properties": {"status": {"enum": ["active", "inactive"]}, "n": {"$ref": "#/$defs/count"}},
                "required": ["status"],
                "additionalProperties": False,
            },
            "id": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "limit": {"type": "integer", "minimum": 1},
        },
        "$defs": {"count": {"type": ["integer", "boolean", "null"]}},
    }
    _, issues = compile_arguments(schema, {}).apply({"limit": 0, "id": None, "filters": {"n": "1", "x": 1}})
    assert issues[:3] == [
        "args.filters.status: required property is missing",
        "args.filters.x: unexpected property",
        "args.filters.n: expected integer|boolean|null but got string",
    ]
    assert [issue.split(":")[0] for issue in issues[3:]] == ["args.id", "args.limit"]
    assert compile_arguments(schema, {}).apply({"limit": 1, "id": 3, "filters": {"status": "active"}})[1] == []


def test_absent_schema_accepts_any_object_but_nothing_else() -> None:
    checker = compile_arguments(None, {})
    assert checker.apply({"anything": [1]}) == ({"anything": [1]}, [])
    others: list[Any] = [None, [], "x", 3]
    for value in others:
        assert checker.apply(value) == ({}, [f"args: expected object but got {json_type(value)}"])


def test_an_alias_gives_its_value_to_the_canonical_name() -> None:
    schema = {"type": "object", "properties": {"url": {"type": "string"}}, "additionalProperties": False}
    checker = compile_arguments(schema, {"fileUrl": "url", "downloadUrl": "url"})
    given_args = {"downloadUrl": "u"}
    assert checker.apply(given_args) == ({"url": "u"}, [])
    assert given_args == {"downloadUrl": "u"}
    assert checker.apply({"url": "u", "fileUrl": "u"}) == ({"url": "u"}, [])
    assert checker.apply({"url": "u", "fileUrl": "other"})[1] == ["args.fileUrl: unexpected property"]
    assert checker.apply({"fileUrl": 1})[1] == ["args.url: expected string but got integer"]


@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"properties": 5}, {"$ref": "#/nope"}, {"pattern": "("},
                                    {"$ref": "http://127.0.0.1:9/x"}, {"$schema": "http://127.0.0.1:9/s"}])  # fmt: skip
def test_a_broken_schema_is_one_structured_error_at_the_first_use(schema: dict[str, Any]) -> None:
    checker = compile_arguments(schema, {})
    with pytest.raises(GoondanError) as caught:
        checker.apply({})
    assert caught.value.info.code == "E_CONFIG_SCHEMA"


@pytest.mark.parametrize("args", [{"\ud800": 1}, {1: 2}, {"text": object()}])
def test_values_that_are_no_json_are_an_issue_not_an_exception(args: Any) -> None:
    _, issues = compile_arguments(TRIM, {}).apply(args)
    assert issues


def test_no_issue_repeats_a_long_value() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x" * 5000]}, "b": {"pattern": "^y"}}}
    secret = "s3cret" * 1000
    _, issues = compile_arguments(schema, {}).apply({"a": secret, "b": secret})
    assert len(issues) == 2
    assert all(len(issue) < 400 and "s3cret" not in issue for issue in issues)


# --- the verdict equals that of the reference implementation ----------------------------------------------------------

_scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([0.0, 1.5, 2.0]) | st.text("ab", max_size=2)
_values = st.recursive(
    _scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from("abc"), v, max_size=3), max_leaves=6
)
_types = st.sampled_from(["string", "number", "integer", "boolean", "null", "array", "object"])


def _schemas(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": _types | st.lists(_types, min_size=1, max_size=3, unique=True),
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
            "additionalProperties": st.booleans() | inner,
            "items": inner,
            "enum": st.lists(_scalars, min_size=1, max_size=3, unique_by=repr),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
            "minimum": st.integers(-3, 3),
            "maxLength": st.integers(0, 3),
            "minItems": st.integers(0, 2),
            "uniqueItems": st.booleans(),
            "pattern": st.sampled_from(["^a", "b$", "a|b"]),
            "const": _scalars,
        },
    )


_any_schema: st.SearchStrategy[dict[str, Any]] = st.recursive(st.just({}), _schemas, max_leaves=5)


@settings(max_examples=100, deadline=None)
@given(_any_schema, st.dictionaries(st.sampled_from("abc"), _values, max_size=3))
def test_verdict_equals_jsonschema(schema: dict[str, Any], args: dict[str, Any]) -> None:
    expected = jsonschema.Draft202012Validator(schema).is_valid(args)
    _, issues = compile_arguments(schema, {}).apply(args)
    assert (not issues) == expected
