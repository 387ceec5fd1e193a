"""What a line of `gdn call --batch` may hold, and how lines come out of chunks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.cli.console.lines import LineSplitter
from goondan.kernel.cli.rules.batch import (
    MAX_LINE_BYTES,
    BadLine,
    ToolCall,
    check_instance,
    parse_arguments,
    parse_json,
    parse_line,
)
from goondan.schemas.wire.blobs import MAX_ARGS_BYTES
from goondan.schemas.wire.errors import GoondanError


def parse(line: str | bytes) -> tuple[Any, ToolCall] | None:
    data = line.encode() if isinstance(line, str) else line
    return parse_line(data, len(data))


def test_a_line_with_everything() -> None:
    line = '{"id": 7, "tool": "bash__exec", "args": {"command": "ls"}, "workdir": "/w", "instance": "u1"}'
    expected = ToolCall(tool="bash__exec", args={"command": "ls"}, instance="u1", workdir="/w")
    assert parse(line) == (7, expected)


def test_what_is_left_out_has_a_default() -> None:
    assert parse('{"id":"a","tool":"t"}') == ("a", ToolCall(tool="t", args={}))
    data = b'{"id":"a","tool":"t"}'
    assert parse_line(data, len(data), "mine") == ("a", ToolCall(tool="t", args={}, instance="mine"))


@pytest.mark.parametrize("line", ["", "   ", "\t\r"])
def test_empty_lines_are_no_calls(line: str) -> None:
    assert parse(line) is None


@pytest.mark.parametrize(
    ("line", "id_", "says"),
    [
        ("nonsense", None, "not JSON"),
        ('{"id":1,"tool":"t"', None, "not JSON"),
        ("[1]", None, "a line must be a JSON object, not a list"),
        ("null", None, "not null"),
        ('{"tool":"t"}', None, "must have an id"),
        ('{"id":null,"tool":"t"}', None, "not null"),
        ('{"id":true,"tool":"t"}', None, "not a boolean"),
        ('{"id":[1],"tool":"t"}', None, "not a list"),
        ('{"id":1}', 1, "must name a tool"),
        ('{"id":1,"tool":""}', 1, "must name a tool"),
        ('{"id":1,"tool":5}', 1, "tool must be a string, not a number"),
        ('{"id":1,"tool":"t","args":[]}', 1, "must be a JSON object, not a list"),
        ('{"id":1,"tool":"t","args":null}', 1, "not null"),
        ('{"id":1,"tool":"t","instance":5}', 1, "instance must be a string"),
        ('{"id":1,"tool":"t","instance":""}', 1, "an instance key has"),
        ('{"id":1,"tool":"t","instance":"a\\u0000"}', 1, "an instance key has"),
        ('{"id":1,"tool":"t","workdir":{}}', 1, "workdir must be a string"),
        ('{"id":1,"tool":"t","args":{"x":NaN}}', None, "NaN is no JSON number"),
        ('{"id":1,"tool":"t","args":{"x":1e999}}', None, "too large"),
        (b'{"id":1,"tool":"\xff"}', None, "not UTF-8"),
        ("[" * 100_000, None, "nests too deep"),
    ],
)
def test_bad_lines_get_one_structured_error_and_keep_their_id(line: str | bytes, id_: Any, says: str) -> None:
    with pytest.raises(BadLine) as caught:
        parse(line)
    info = caught.value.error.info
    assert (caught.value.id, info.code) == (id_, "E_USAGE")
    assert says in info.message
    assert info.suggestion
    assert info.help_url


def test_arguments_nest_as_deep_as_a_payload_may() -> None:
    nested: Any = 1
    for _ in range(63):
        nested = [nested]
    assert parse_arguments(json.dumps({"x": nested}))
    with pytest.raises(GoondanError, match="nested deeper"):
        parse_arguments(json.dumps({"x": [[nested]]}))


def test_what_is_too_large_is_refused_by_size() -> None:
    assert parse(json.dumps({"id": 1, "tool": "t", "args": {"x": "a" * (MAX_ARGS_BYTES - 8)}}))
    with pytest.raises(BadLine) as caught:
        parse(json.dumps({"id": 1, "tool": "t", "args": {"x": "a" * (MAX_ARGS_BYTES - 7)}}))
    assert (caught.value.id, caught.value.error.info.code) == (1, "E_FRAME_TOO_LARGE")
    with pytest.raises(BadLine) as caught:
        parse_line(None, MAX_LINE_BYTES + 1)
    assert caught.value.error.info.code == "E_FRAME_TOO_LARGE"


def test_numbers_enter_as_the_wire_can_hold_them() -> None:
    text = '{"a": 18446744073709551615, "b": -9223372036854775808, "c": 18446744073709551616, "d": 1.5, "e": -0}'
    found = parse_arguments(text)
    assert found == {"a": 2**64 - 1, "b": -(2**63), "c": float(2**64), "d": 1.5, "e": 0}
    assert [type(value) for value in found.values()] == [int, int, float, float, int]


def test_lone_surrogates_become_replacement_characters() -> None:
    assert parse_arguments('{"a\\ud800": "x\\udfffy", "b": ["\\ud83d\\ude00"]}') == {"a\ufffd": "x\ufffdy", "b": ["😀"]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(json_values)
def test_json_comes_in_as_it_is(value: Any) -> None:
    found = parse_json(json.dumps(value))
    assert found == value
    assert json.dumps(found) == json.dumps(value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_call_an_empty_line_or_a_bad_line(data: bytes) -> None:
    code = "accepted"
    try:
        parsed = parse_line(data, len(data))
        assert parsed is None or isinstance(parsed[1], ToolCall)
    except BadLine as bad:
        code = bad.error.info.code
    assert code in ("accepted", "E_USAGE", "E_FRAME_TOO_LARGE")


@given(st.text(max_size=300))
def test_instance_keys_are_accepted_or_refused_as_usage(key: str) -> None:
    found, code = "", ""
    try:
        found = check_instance(key)
    except GoondanError as error:
        code = error.info.code
    assert (found == key and key) or code == "E_USAGE"


@given(st.lists(st.binary(max_size=30).filter(lambda b: b"\n" not in b)), st.data())
def test_lines_are_the_same_however_the_input_is_cut(lines: list[bytes], data: st.DataObject) -> None:
    limit = 10
    whole = b"\n".join(lines)
    splitter = LineSplitter(limit)
    found = []
    while whole:
        cut = data.draw(st.integers(1, len(whole)))
        found += splitter.feed(whole[:cut])
        whole = whole[cut:]
    found += splitter.finish()
    expected = lines[:-1] if lines and not lines[-1] else lines
    assert [line.number for line in found] == list(range(1, len(expected) + 1))
    assert [line.size for line in found] == [len(line) for line in expected]
    assert [line.data for line in found] == [
        line.removesuffix(b"\r") if len(line) <= limit else None for line in expected
    ]


def test_a_line_without_end_takes_no_more_memory_than_the_limit() -> None:
    splitter = LineSplitter(1000)
    for _ in range(10_000):
        splitter.feed(b"x" * 1000)
    assert sum(map(len, splitter._parts)) <= 1000
    (line,) = splitter.feed(b"\nnext")
    assert (line.data, line.size) == (None, 10_000_000)
    assert splitter.finish()[0].data == b"next"


def test_infinity_by_digits_is_refused() -> None:
    with pytest.raises(GoondanError, match="too large"):
        parse_json("9" * 400)
    assert math.isfinite(parse_json("1e308"))
