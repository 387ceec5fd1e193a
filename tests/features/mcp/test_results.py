"""Results of a server as outputs of calls."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.features.mcp.jail.protocol import results
from goondan.features.mcp.jail.protocol.results import TooLarge, call_output, error_text, packed
from goondan.toolhost.calls.untrusted import check_json
from tests.features.mcp.test_lines import json_values


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


IMAGE = {"type": "image", "data": "aGk=", "mimeType": "image/png", "_meta": {"secret": 1}}
LINK = {"type": "resource_link", "uri": "file:///a", "name": "a", "size": 3}


@pytest.mark.parametrize(
    ("result", "output"),
    [
        ({"content": [text("hello")]}, "hello"),
        ({"content": [text("a"), text("b")]}, "a\nb"),
        ({"content": []}, ""),
        ({"content": [text('{"a": 1}')], "structuredContent": {"a": 1}}, {"a": 1}),
        ({"content": [text("5")], "structuredContent": {"result": 5}}, {"result": 5}),
        ({"content": [text("hi")], "structuredContent": {"result": "hi"}}, {"result": "hi"}),
        ({"content": [], "structuredContent": {"a": 1}}, {"a": 1}),
        (
            {"content": [text("It is warm.")], "structuredContent": {"a": 1}},
            {"structuredContent": {"a": 1}, "content": [text("It is warm.")]},
        ),
        (
            {"content": [text("see"), IMAGE, LINK]},
            {"content": [text("see"), {"type": "image", "mimeType": "image/png", "data": "aGk="}, LINK]},
        ),
        (
            {"content": [{"type": "resource", "resource": {"uri": "a:b", "blob": "aGk=", "x": 1}}]},
            {"content": [{"type": "resource", "resource": {"uri": "a:b", "blob": "aGk="}}]},
        ),
        ({"content": [{"type": "hologram"}, text("x")]}, "x"),
    ],
)
def test_what_a_call_gives(result: dict[str, Any], output: Any) -> None:
    assert call_output(result) == output


@given(json_values)
def test_any_result_becomes_an_output_that_the_host_lets_through(value: Any) -> None:
    for shape in (call_output, results.resource_output, results.prompt_output):
        for result in ({"content": value}, {"content": [value]}, {"structuredContent": value, "content": [text("x")]},
                       {"contents": [value]}, {"messages": [value, {"role": "user", "content": value}]}):  # fmt: skip
            check_json(bytes(packed(shape(result), 1 << 20)))
    assert isinstance(error_text({"content": [value]}), str)


@given(st.integers())
def test_integers_beyond_64_bits_become_doubles(value: int) -> None:
    back = msgspec.msgpack.decode(packed({"a": [value]}, 1000))["a"][0]
    assert back == (value if -(2**63) <= value < 2**64 else float(value))


def test_an_integer_beyond_doubles_does_not_end_the_call() -> None:
    assert msgspec.msgpack.decode(packed({"a": 10**400}, 10_000))["a"] == str(10**400)
    assert "digits" in msgspec.msgpack.decode(packed({"a": 10**5000}, 10_000))["a"]


def test_an_output_that_is_too_large_is_refused() -> None:
    with pytest.raises(TooLarge, match="limit 100"):
        packed("x" * 100, 100)


def test_an_error_without_a_word_has_one() -> None:
    assert error_text({"isError": True, "content": []}) == "the tool failed, and said nothing about it"
    assert error_text({"content": [IMAGE], "structuredContent": {"why": "so"}}) == '{"why":"so"}'
