"""The bundled tool `json-query` without a jail."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.toolhost.base.json_query import json_query

CTX: Any = None  # no export looks at it
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.requirement("JSON-04")
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (".", []), ("", []), ("a", ["a"]), (".a.b", ["a", "b"]), ("a[0].b", ["a", "0", "b"]), ("[0][1]", ["0", "1"]),
        ("a..b.", ["a", "b"]), ("a[].0[]", ["a", "0"]), ("a[b.c]d", ["a", "b.c", "d"]), ('a["b"]', ["a", '"b"']),
        ("a[0", ["a", "0"]), ("a]b", ["a", "b"]), ("[[0]]", ["0"]), ("a[0.b", ["a", "0.b"]),
    ],
)  # fmt: skip
def test_paths(path: str, expected: list[str]) -> None:
    assert json_query.steps(path) == expected


def test_long_paths_take_little_time() -> None:
    assert len(json_query.steps("a[b]." * 200_000)) == 400_000
    assert json_query.steps("[" * 1_000_000) == []


@pytest.mark.requirement("JSON-05")
@pytest.mark.parametrize("step", ["-1", "1.0", "0x0", "+0", "1a", " 0", "0 ", "٠", "²", "9" * 5000, "length", "3"])
def test_what_is_no_index_finds_nothing(step: str) -> None:
    assert json_query.child(["a", "b", "c"], step) is json_query.MISSING


def test_indexes_and_keys() -> None:
    assert [json_query.child(["a", "b"], step) for step in ("0", "1", "01", "0000000000001")] == ["a", "b", "b", "b"]
    assert json_query.child({"0": None}, "0") is None
    assert json_query.child({"a": 1}, "constructor") is json_query.MISSING
    assert json_query.child("text", "0") is json_query.MISSING
    assert json_query.child(None, "x") is json_query.MISSING


@pytest.mark.requirement("JSON-01")
@pytest.mark.parametrize(
    "data",
    ["NaN", "-Infinity", "\ufeff1", "1 2", "01", "1.", ".5", "+1", "'a'", '"\t"', "[1,]", "{1:2}", "nul", " ",
     "\u00a01", '"\\x41"', '{"a" 1}', "[", '"'],
)  # fmt: skip
def test_what_is_no_json(data: str) -> None:
    with pytest.raises(ValueError) as caught:
        json_query.query(CTX, {"data": data})
    assert str(caught.value) == "Failed to parse input as JSON"


def test_what_is_nested_too_deep_is_an_error_of_its_own() -> None:
    assert json_query.count(CTX, {"data": "[" * 200 + "]" * 200})["count"] == 1
    for data in ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000):
        with pytest.raises(ValueError) as caught:
            json_query.query(CTX, {"data": data})
        assert str(caught.value).startswith("Failed to parse input as JSON: it is nested too deep")


def test_numbers_are_doubles() -> None:
    """And integers are written as JavaScript writes them, as far as 64 bits go."""
    values = json_query.parse("[1, 1.0, -0, 1e3, 9007199254740993, 12345678901234567890, 0.1, 1e20]")
    assert values == [1, 1, 0, 1000, 9007199254740992, 12345678901234567000, 0.1, 1e20]
    assert [type(value) for value in values] == [int, int, int, int, int, int, float, float]
    assert json_query.parse("[-9223372036854775809, 18446744073709551616]") == [-9223372036854776000, 2.0**64]
    assert json_query.parse("9" * 10_000) == math.inf


def test_numbers_too_large_read_as_null() -> None:
    data = '{"a": 1e400, "b": [-1e400, {"c": 1e999}], "d": "1e400"}'
    assert json_query.query(CTX, {"data": data})["value"] == {"a": None, "b": [None, {"c": None}], "d": "1e400"}
    assert json_query.query(CTX, {"data": data, "path": "a"}) == {"path": "a", "found": True, "value": None}
    assert json_query.count(CTX, {"data": data, "path": "a"}) == {"path": "a", "count": 1, "type": "number"}
    assert json_query.pick(CTX, {"data": data, "keys": ["a"]})["result"] == {"a": None}
    assert json_query.flatten(CTX, {"data": "[[1e400]]"})["result"] == [None]


def as_doubles(value: Any) -> Any:
    """With every number the double it stands for."""
    if isinstance(value, list):
        return [as_doubles(item) for item in value]
    if isinstance(value, dict):
        return {key: as_doubles(item) for key, item in value.items()}
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


@given(JSON)
def test_a_document_is_found_as_it_is(document: Any) -> None:
    found = json_query.query(CTX, {"data": json.dumps(document)})
    assert as_doubles(found) == {"path": ".", "found": True, "value": as_doubles(document)}


@pytest.mark.requirement("JSON-10")
@pytest.mark.parametrize(
    ("data", "count", "kind"),
    [("[1,[2]]", 2, "array"), ('{"a":1}', 1, "object"), ('"a👍b"', 3, "string"), ("false", 1, "boolean"),
     ("0", 1, "number"), ("null", 0, "null"), ('""', 0, "string")],
)  # fmt: skip
def test_counts(data: str, count: int, kind: str) -> None:
    assert json_query.count(CTX, {"data": data}) == {"path": ".", "count": count, "type": kind}


@pytest.mark.requirement("JSON-12")
@pytest.mark.parametrize(
    ("depth", "expected"),
    [(0, [1, [2, [3, [4]]], []]), (-1, [1, [2, [3, [4]]], []]), (0.1, [1, 2, [3, [4]]]), (1, [1, 2, [3, [4]]]),
     (1.5, [1, 2, 3, [4]]), (3, [1, 2, 3, 4]), (1e308, [1, 2, 3, 4])],
)  # fmt: skip
def test_levels(depth: float, expected: list[Any]) -> None:
    assert json_query.flattened([1, [2, [3, [4]]], []], depth) == expected


def test_flattening_needs_no_stack() -> None:
    deep: list[Any] = [1]
    for _ in range(50_000):
        deep = [deep]
    assert json_query.flattened(deep, 1e9) == [1]
    while deep and isinstance(deep[0], list):
        deep = deep[0]  # taken apart from the outside: its own end would recurse


@given(st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=4), max_leaves=12).map(lambda v: [v]))
def test_flattening_level_by_level(items: list[Any]) -> None:
    once = json_query.flattened(items, 1)
    assert json_query.flattened(once, 1) == json_query.flattened(items, 2)
    assert not any(isinstance(item, list) for item in json_query.flattened(items, math.inf))
