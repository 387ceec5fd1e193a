"""Hostile and broken YAML: one structured error each, at its place, in bounded time and memory."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.bundle.rules.lookup import MAX_FILE_BYTES
from goondan.kernel.bundle.rules.positions import (
    MAX_FAULTS,
    MAX_NODES,
    Allowance,
    Composed,
    Fault,
    Mapping,
    Node,
    Scalar,
    compose,
    decode,
    node_at,
    plain,
    resolve,
)
from goondan.schemas.wire.codec import MAX_DEPTH


def read(text: str | bytes) -> Composed:
    decoded = decode(text.encode() if isinstance(text, str) else text)
    return Composed([], [decoded], complete=False) if isinstance(decoded, Fault) else compose(decoded, Allowance())


def only(text: str) -> Any:
    composed = read(text)
    assert composed.faults == []
    assert len(composed.documents) == 1
    return plain(composed.documents[0])


SYNTAX = {
    "unclosed quote": (b"a: 'x\n", 2, 1),
    "unclosed flow": (b"a: [1, 2\nb: 3\n", 2, 2),
    "bad indentation": (b"a:\n  b: 1\n c: 2\n", 3, 2),
    "tab": (b"a:\n\tb: 1\n", 2, 1),
    "reserved character": (b"a: @x\n", 1, 4),
    "zero byte": (b"a: 1\nb: \0\n", 2, 4),
    "control character": (b"a: \x07\n", 1, 4),
    "Latin-1": (b"a: 1\nname: caf\xe9\n", 2, 10),
    "UTF-16": ("a: 1\n".encode("utf-16"), 1, 1),
    "binary": (bytes(range(128, 256)), 1, 1),
    "escaped surrogate": (rb'a: "\ud800"', 1, 7),
    "merge key": (b"a: &x {b: 1}\nc:\n  <<: *x\n", 3, 3),
    "number as key": (b"a: 1\n1: x\n", 2, 1),
    "boolean as key": (b"true: x\n", 1, 1),
    "null as key": (b"~: x\n", 1, 1),
    "empty key": (b": x\n", 1, 1),
    "list as key": (b"? [a]\n: x\n", 1, 3),
    "mapping as key": (b"{{a: 1}: x}\n", 1, 2),
    "tag on a scalar": (b"a: !secret x\n", 1, 4),
    "python tag": (b"a: !!python/object/apply:os.system [ls]\n", 1, 4),
    "tag on a mapping": (b"a: !m {b: 1}\n", 1, 4),
    "set tag": (b"a: !!set {b}\n", 1, 4),
    "wrong core tag": (b"a: !!int x\n", 1, 4),
    "alias without an anchor": (b"a: *x\n", 1, 4),
    "alias in its own anchor": (b"a: &x [1, *x]\n", 1, 11),
    "alias of another document": (b"a: &x 1\n---\nb: *x\n", 3, 4),
    "too deep": (b"a: " + b"[" * 100 + b"]" * 100, 1, 3 + MAX_DEPTH),
    "too large": (b"a: " + b"x" * MAX_FILE_BYTES, 1, 1),
    "version of another YAML": (b"%YAML 3.0\n---\na: 1\n", 1, 1),
}


@pytest.mark.parametrize("case", SYNTAX.values(), ids=SYNTAX.keys())
def test_one_fault_at_its_place(case: tuple[bytes, int, int]) -> None:
    data, line, column = case
    composed = read(data)
    assert [(f.code, f.line, f.column) for f in composed.faults] == [("E_CONFIG_SYNTAX", line, column)]


def test_a_key_that_stands_twice() -> None:
    composed = read("a:\n  b: 1\n  b: 2\n  c: 3\n")
    assert [(f.code, f.line, f.column, f.path) for f in composed.faults] == [("E_CONFIG_DUPLICATE", 3, 3, ("a", "b"))]
    assert "line 2" in composed.faults[0].message
    assert plain(composed.documents[0]) == {"a": {"b": 1, "c": 3}}


def test_every_fault_of_a_file() -> None:
    composed = read("a: 1\na: 2\n1: x\nb: !t y\nc: *z\n<<: {}\nd: .inf\n")
    assert [f.line for f in composed.faults] == [2, 3, 4, 5, 6, 7]
    assert composed.complete


def test_documents_before_a_syntax_error_are_kept() -> None:
    composed = read("a: 1\n---\nb: 2\n---\nc: [\n")
    assert [plain(d) for d in composed.documents] == [{"a": 1}, {"b": 2}]
    assert not composed.complete


def test_faults_are_counted_only_so_far() -> None:
    composed = read("".join(f"{n}: x\n" for n in range(1000)))
    assert len(composed.faults) == MAX_FAULTS
    assert not composed.complete


def test_tabs_get_their_own_hint() -> None:
    assert read("a:\n\tb: 1\n").faults[0].suggestion == "Indent with spaces, not tabs."


# --- bombs ----------------------------------------------------------------------------------------------------------


def bomb(levels: int, width: int, leaf: str) -> str:
    lines = [f"x0: &x0 {leaf}"]
    lines += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [bomb(9, 10, "lol"), bomb(60, 2, "{a: b}"), bomb(3, 90, '"' + "y" * 5000 + '"')],
    ids=["wide", "deep", "text"],
)
def test_an_exploding_alias_costs_nothing(text: str) -> None:
    began = time.process_time()
    composed = read(text)
    assert time.process_time() - began < 1.0
    assert [f.code for f in composed.faults] == ["E_CONFIG_SYNTAX"]
    assert not composed.complete


def test_the_budget_is_one_for_all_files() -> None:
    allowance = Allowance()
    text = "a: [" + "1," * (MAX_NODES // 2) + "]"
    assert compose(text, allowance).faults == []
    assert [f.code for f in compose(text, allowance).faults] == ["E_CONFIG_SYNTAX"]


@pytest.mark.parametrize(
    "unit", ["- a\n", "a:\n- ", "{", "[", "- - ", "? ", "a: &b ", "'", '"\\x', "#\n", "--- \n", "|\n"]
)
def test_a_megabyte_of_anything_is_read_in_bounded_time(unit: str) -> None:
    text = unit * (MAX_FILE_BYTES // len(unit))
    began = time.process_time()
    read(text)
    assert time.process_time() - began < 5.0


# --- values ---------------------------------------------------------------------------------------------------------

VALUES = {
    "": None, "~": None, "null": None, "true": True, "False": False, "yes": "yes", "no": "no", "on": "on", "y": "y",
    "0": 0, "-7": -7, "+7": 7, "007": 7, "0o17": 15, "0x1F": 31, "0b1": "0b1", "1_000": "1_000", "1.5": 1.5, ".5": 0.5,
    "1e3": 1000.0, "1.": 1.0, "12:30": "12:30", "2026-01-01": "2026-01-01", "1.2.3": "1.2.3", "0o8": "0o8", "-": "-",
    "18446744073709551615": 2**64 - 1, "18446744073709551616": float(2**64), "-9223372036854775808": -(2**63),
    "-9223372036854775809": float(-(2**63) - 1), "9" * 400: math.inf, "0x" + "f" * 30: "0x" + "f" * 30,
    "0xffffffffffffffffff": float(0xFFFFFFFFFFFFFFFFFF), "٣": "٣",
}  # fmt: skip


@pytest.mark.parametrize("text", VALUES)
def test_plain_scalars_mean_what_yaml_1_2_says(text: str) -> None:
    value = resolve(text)
    assert value == VALUES[text]
    assert type(value) is type(VALUES[text])


def test_quoted_and_tagged_scalars() -> None:
    assert only("a: '1'\nb: \"true\"\nc: !!str 1\nd: !!float 1\ne: |\n  x\n  y") == {
        "a": "1", "b": "true", "c": "1", "d": 1, "e": "x\ny",
    }  # fmt: skip


def test_infinities_are_no_json() -> None:
    for text in (".inf", "-.Inf", ".nan", "9" * 400, "1e999"):
        composed = read(f"a: {text}")
        assert [f.code for f in composed.faults] == ["E_CONFIG_INVALID_VALUE"], text


def test_aliases_are_shared_values() -> None:
    assert only("a: &x {b: [1]}\nc: *x\nd: &y text\ne: *y\n") == {
        "a": {"b": [1]},
        "c": {"b": [1]},
        "d": "text",
        "e": "text",
    }


def test_a_byte_order_mark_and_windows_line_ends() -> None:
    composed = read("\ufeffa: 1\r\nb:\r\n  - x\r\n".encode())
    assert plain(composed.documents[0]) == {"a": 1, "b": ["x"]}
    _, place = node_at(composed.documents[0], ("b", 0))
    assert place == (3, 5)


def test_empty_files_and_documents() -> None:
    for text in ("", "---\n", "---\n---\n...\n", "# nothing\n"):
        assert read(text) == Composed([], [], complete=True)


def test_columns_count_characters() -> None:
    root = read("안녕: {이름: 값}\n").documents[0]
    assert node_at(root, ("안녕", "이름"))[1] == (1, 10)


def test_the_place_of_what_is_not_there_is_above_it() -> None:
    root = read("a:\n  b: 1\n").documents[0]
    assert node_at(root, ("a", "zzz", 3))[1] == (1, 1)
    assert node_at(root, ("a", "b", "c"))[1] == (2, 6)


# --- anything -------------------------------------------------------------------------------------------------------

_TEXT = st.text(alphabet=st.sampled_from(list("ab:-[]{},&*!|>'\"%@`#?~<= \n\t\\x0\0\x85\ufeffé0.9")), max_size=60)
# Without what YAML folds or refuses in a quoted text: line separators, control characters, noncharacters.
_STRINGS = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"), exclude_characters="\ufeff\ufffe\uffff"))
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_STRINGS.filter("<<".__ne__), inner, max_size=4),
    max_leaves=12,
)


def nodes(node: Node) -> list[Node]:
    if isinstance(node, Scalar):
        return [node]
    below = [e.value for e in node.entries.values()] if isinstance(node, Mapping) else node.items
    return [node, *(n for child in below for n in nodes(child))]


@given(_TEXT | st.text(max_size=40))
def test_any_text_gives_documents_or_faults(text: str) -> None:
    composed = read(text.encode("utf-8", "surrogatepass"))
    lines = text.count("\n") + text.count("\r") + text.count("\x85") + text.count("\u2028") + text.count("\u2029") + 2
    for fault in composed.faults:
        assert fault.code in ("E_CONFIG_SYNTAX", "E_CONFIG_DUPLICATE", "E_CONFIG_INVALID_VALUE")
        assert 1 <= fault.line <= lines
        assert fault.column >= 1
    for document in composed.documents:
        assert all(n.line >= 1 and n.column >= 1 for n in nodes(document))
    assert composed.complete or composed.faults


@given(st.binary(max_size=60))
def test_any_bytes_give_documents_or_faults(data: bytes) -> None:
    composed = read(data)
    assert composed.complete or composed.faults


@given(_JSON.filter(lambda value: value is not None))
def test_json_is_read_as_json(value: Any) -> None:
    assert only(json.dumps(value, ensure_ascii=False)) == value
