"""JSON Patch and JSON Pointer as the RFCs have them, for the three operations that there are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.live_config.broker.rules import apply_operations, pointer
from goondan.features.live_config.wire import Operation
from goondan.schemas.wire.errors import GoondanError

#: RFC 6902, appendix A, and RFC 6901, section 5.
DOCUMENT: dict[str, Any] = {"foo": ["bar", "baz"], "": 0, "a/b": 1, "c%d": 2, "m~n": 8, " ": 7, "o": {"p": None}}


@pytest.mark.parametrize(
    ("document", "operations", "made"),
    [
        ({"foo": "bar"}, [("add", "/baz", "qux")], {"baz": "qux", "foo": "bar"}),
        ({"foo": ["bar", "baz"]}, [("add", "/foo/1", "qux")], {"foo": ["bar", "qux", "baz"]}),
        ({"baz": "qux", "foo": "bar"}, [("remove", "/baz")], {"foo": "bar"}),
        ({"foo": ["bar", "qux", "baz"]}, [("remove", "/foo/1")], {"foo": ["bar", "baz"]}),
        ({"baz": "qux", "foo": "bar"}, [("replace", "/baz", "boo")], {"baz": "boo", "foo": "bar"}),
        ({"foo": "bar"}, [("add", "/child", {"grandchild": {}})], {"foo": "bar", "child": {"grandchild": {}}}),
        ({"foo": ["bar"]}, [("add", "/foo/-", ["abc", "def"])], {"foo": ["bar", ["abc", "def"]]}),
        ({"foo": 1}, [("add", "/foo", None)], {"foo": None}),
        ({"foo": 1}, [("replace", "", {"x": 1}), ("add", "/y", 2)], {"x": 1, "y": 2}),
        ({"a": [1]}, [("add", "/a/1", 2), ("add", "/a/0", 0), ("remove", "/a/1")], {"a": [0, 2]}),
        ({"m~n": 1, "a/b": 2}, [("remove", "/m~0n"), ("replace", "/a~1b", 3)], {"a/b": 3}),
        ({"~1": 1}, [("replace", "/~01", 2)], {"~1": 2}),
        ({"1": [0]}, [("replace", "/1/0", 5)], {"1": [5]}),
    ],
)
def test_what_the_documents_say(document: Any, operations: list[tuple[Any, ...]], made: Any) -> None:
    before = copy.deepcopy(document)
    assert apply_operations(document, [Operation(*operation) for operation in operations]) == made
    assert document == before


@pytest.mark.parametrize(
    "operation",
    [
        Operation("add", "/foo/bar/baz", 1),
        Operation("add", "/foo/8", 1),
        Operation("add", "/foo/01", 1),
        Operation("add", "/foo/-1", 1),
        Operation("add", "/foo/1e0", 1),
        Operation("add", "/foo/١", 1),
        Operation("add", "/foo/1\n", 1),
        Operation("replace", "/foo/2", 1),
        Operation("replace", "/foo/-", 1),
        Operation("replace", "/nothing", 1),
        Operation("remove", "/nothing"),
        Operation("remove", "/foo/2"),
        Operation("remove", ""),
        Operation("add", "foo", 1),
        Operation("add", "/m~2n", 1),
        Operation("add", "/m~", 1),
        Operation("add", "/x"),
        Operation("add", "/" * 40, 1),
        Operation("add", "/foo/0/1", 1),
    ],
    ids=lambda operation: f"{operation.op} {operation.path[:9]}",
)
def test_what_they_refuse(operation: Operation) -> None:
    with pytest.raises(GoondanError) as caught:
        apply_operations(DOCUMENT, [operation])
    assert caught.value.info.code == "E_CONFIG_INVALID_VALUE"


@pytest.mark.parametrize(
    ("text", "found"),
    [("/foo", ["bar", "baz"]), ("/foo/0", "bar"), ("/", 0), ("/a~1b", 1), ("/c%d", 2), ("/m~0n", 8), ("/ ", 7)],
)
def test_pointers(text: str, found: Any) -> None:
    value: Any = DOCUMENT
    for segment in pointer(text):
        value = value[int(segment)] if isinstance(value, list) else value[segment]
    assert value == found


@given(st.text(max_size=20))
def test_any_text_is_a_pointer_or_refused(text: str) -> None:
    try:
        segments = pointer(text)
    except GoondanError:
        return
    assert "".join("/" + segment.replace("~", "~0").replace("/", "~1") for segment in segments) == text
