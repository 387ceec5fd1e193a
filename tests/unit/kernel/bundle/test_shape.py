"""Documents to structs: the same verdict and value as msgspec gives, and every error instead of the first."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from goondan.kernel.bundle.rules.positions import Allowance, Mapping, compose
from goondan.kernel.bundle.rules.problems import Report
from goondan.kernel.bundle.rules.shape import Builder, Document, Environment
from goondan.schemas.bundle import resources


class Inner(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    size: Annotated[int, Meta(ge=1, le=10)] = 1


class Outer(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    items_here: list[str | Inner]
    mode: Literal["a", "b"] = "a"
    ratio: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    flag: bool = False
    extra: dict[str, Any] = {}
    labels: dict[str, str] = {}
    word: str | None = None
    network: Literal["none", "all"] | Inner = "none"


def build(text: str, env: dict[str, str] | None = None) -> tuple[Outer, list[tuple[str, str]]]:
    report = Report()
    node = compose(text, Allowance()).documents[0]
    assert isinstance(node, Mapping)
    built = Builder(Document("f", node, from_file=True), Environment(env), report).build(Outer)
    return built, [(p.code, p.path) for p in report.errors]


def test_a_whole_struct() -> None:
    built, errors = build(
        "itemsHere: [x, {name: y, size: 3}]\nratio: 0.25\nextra: {a: [1, null]}\nnetwork: {name: z}\n"
    )
    assert errors == []
    assert built == Outer(["x", Inner("y", 3)], ratio=0.25, extra={"a": [1, None]}, network=Inner("z"))


def test_every_error_and_stand_ins() -> None:
    built, errors = build(
        "itemsHere: [1, {size: 11}, {name: ''}, [a]]\nmode: c\nratio: 1\nflag: 1\nextra: []\nlabels: {a: 1}\n"
        "word: {}\nnetwork: some\nwrod: 1\n"
    )
    assert errors == [
        ("E_CONFIG_INVALID_VALUE", "itemsHere[0]"),
        ("E_CONFIG_INVALID_VALUE", "itemsHere[1].size"),
        ("E_CONFIG_MISSING_FIELD", "itemsHere[1].name"),
        ("E_CONFIG_INVALID_VALUE", "itemsHere[2].name"),
        ("E_CONFIG_INVALID_VALUE", "itemsHere[3]"),
        ("E_CONFIG_INVALID_VALUE", "mode"),
        ("E_CONFIG_INVALID_VALUE", "ratio"),
        ("E_CONFIG_INVALID_VALUE", "flag"),
        ("E_CONFIG_INVALID_VALUE", "extra"),
        ("E_CONFIG_INVALID_VALUE", "labels.a"),
        ("E_CONFIG_INVALID_VALUE", "word"),
        ("E_CONFIG_INVALID_VALUE", "network"),
        ("E_CONFIG_UNKNOWN_FIELD", "wrod"),
    ]
    assert isinstance(built, Outer)
    assert len(built.items_here) == 4


def test_nothing_in_an_optional_field_is_absent() -> None:
    built, errors = build("itemsHere: []\nextra:\nmode: ~\nword:\n")
    assert (built, errors) == (Outer([]), [])
    _, errors = build("itemsHere:\n")
    assert errors == [("E_CONFIG_INVALID_VALUE", "itemsHere")]


def test_variables_in_every_string_value() -> None:
    built, errors = build(
        "itemsHere: ['${A}', {name: 'x${A}'}]\nextra: {k: ['${A}', {'${A}': 1}]}\nlabels: {l: '${A}'}\nmode: ${M}\n",
        {"A": "v", "M": "b"},
    )
    assert errors == []
    assert built == Outer(["v", Inner("xv")], "b", extra={"k": ["v", {"${A}": 1}]}, labels={"l": "v"})


def test_each_unset_variable_once_and_none_without_an_environment() -> None:
    text = "itemsHere: ['${A} ${B} ${A}']\n"
    assert build(text, {})[1] == [("E_CONFIG_MISSING_ENV", "itemsHere[0]")] * 2
    built, errors = build(text, None)
    assert (built.items_here, errors) == (["${A} ${B} ${A}"], [])


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.sampled_from([0.5, 2.5])
    | st.sampled_from(["", "a", "c", "none"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "size", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_FIELDS = ["itemsHere", "mode", "ratio", "flag", "extra", "labels", "word", "network", "nope"]


@given(st.dictionaries(st.sampled_from(_FIELDS), _VALUES, max_size=5))
def test_the_verdict_and_the_value_are_those_of_msgspec(value: dict[str, Any]) -> None:
    report = Report()
    node = compose(msgspec.json.encode(value).decode(), Allowance()).documents[0]
    assert isinstance(node, Mapping)
    built = Builder(Document("f", node), Environment(None), report).build(Outer)
    given_fields = {key: item for key, item in value.items() if item is not None or key in ("itemsHere", "nope")}
    typed = {key: item if key == "extra" else _without_null_sizes(item) for key, item in given_fields.items()}
    try:
        expected = msgspec.convert(typed, Outer)
    except msgspec.ValidationError:
        assert report.errors
    else:
        assert report.errors == []
        assert built == expected


def _without_null_sizes(value: Any) -> Any:
    """`size:` with nothing behind it counts as absent; to msgspec it is null."""
    if isinstance(value, dict):
        items = {k: _without_null_sizes(v) for k, v in value.items()}
        kept = {k: v for k, v in items.items() if not (k == "size" and v is None)}
        return kept if set(value) <= {"name", "size"} else items
    return [_without_null_sizes(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", resources.DOCUMENTS.values(), ids=lambda kind: kind.__name__)
def test_every_kind_can_be_stood_in_for(kind: type[Any]) -> None:
    node = compose("x: 1", Allowance()).documents[0]
    assert isinstance(node, Mapping)
    report = Report()
    assert isinstance(Builder(Document("f", node, from_file=True), Environment({}), report).build(kind), kind)
    assert {p.code for p in report.errors} == {"E_CONFIG_UNKNOWN_FIELD", "E_CONFIG_MISSING_FIELD"}


def test_only_what_was_read_from_a_file_is_expanded() -> None:
    """A document that reaches a running swarm in another way must not read the user's environment."""
    report = Report()
    (node,) = compose('itemsHere: ["${SECRET}"]\n', Allowance()).documents
    assert isinstance(node, Mapping)
    for from_file, expected in ((True, ["s3cret"]), (False, ["${SECRET}"])):
        document = Document("f", node, from_file=from_file)
        assert Builder(document, Environment({"SECRET": "s3cret"}), report).build(Outer).items_here == expected
    assert Document("f", node).from_file is False
    assert report.errors == []
