"""What an example promises, and whether a result keeps it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goondan.kernel.bundle.rules.tool_pages import MAX_DIFFERENCES, MAX_VALUE, differences, unkept_promises

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("expected", "got", "found"),
    [
        ({"a": 1}, {"a": 1.0, "durationMs": 7}, []),
        ({"a": 1}, {"a": True}, ["output.a: expected 1, got true"]),
        ({"a": {"b": "x"}}, {"a": {}}, ['output.a.b: missing, expected "x"']),
        ([1, 2], [1, 2, 3], ["output: expected 2 items, got 3"]),
        ([{"a": 1}], [{"a": 2, "b": 3}], ["output[0].a: expected 1, got 2"]),
        (None, {}, ["output: expected null, got {}"]),
        ("가", "나", ['output: expected "가", got "나"']),
    ],
)
def test_differences_name_the_place(expected: Any, got: Any, found: list[str]) -> None:
    assert differences(expected, got) == found


def test_long_values_and_long_lists_are_cut() -> None:
    found = differences(["x" * 10_000] * 50, ["y"] * 50)
    assert len(found) == MAX_DIFFERENCES
    assert all(len(line) < MAX_VALUE + 100 for line in found)


@settings(max_examples=50)
@given(JSON)
def test_what_is_the_same_has_no_differences(value: Any) -> None:
    assert differences(value, copy.deepcopy(value)) == []


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), st.dictionaries(st.text(max_size=3), JSON, max_size=4))
def test_more_keys_than_shown_are_no_difference_and_fewer_are(shown: dict[str, Any], more: dict[str, Any]) -> None:
    assert differences(shown, {**more, **shown}) == []
    missing = shown.keys() - more.keys()
    assert len(differences(shown, more)) >= min(len(missing), 1)


def test_a_result_that_is_no_output() -> None:
    failed = {"status": "error", "error": {"message": "no", "code": "ENOENT"}}
    assert unkept_promises(failed, None, compares=False) == ["the call failed: no [ENOENT]"]
    assert unkept_promises({"status": "pending", "handle": "h"}, None, compares=False) == []
    assert unkept_promises({"status": "pending", "handle": "h"}, {}, compares=True) == [
        "the result is pending, and the example shows an output"
    ]
    assert unkept_promises({"status": "ok", "output": 3}, None, compares=False) == []
    assert unkept_promises({"status": "ok", "output": 3}, None, compares=True) == ["output: expected null, got 3"]
    assert unkept_promises({"status": "ok", "output": None}, None, compares=True) == []
