"""Schemas and values that cost too much to check are refused before they are checked; honest ones are not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from goondan.kernel.bundle.loader import inspect_bundle
from goondan.schemas.bundle.arguments import TOO_MUCH, UNWORDED, compile_arguments
from goondan.schemas.bundle.schema_limits import MAX_SUBSCHEMAS, MAX_UNITS, SchemaLimits, TooCostly, pattern_price
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.errors import GoondanError

#: What any one check may take (seconds of processor time). The bound aims at half a second on this machine; the rest is
#: for slower ones and for everything that is tested beside it.
STATED_S = 4.0


def chain(length: int, *, keyword: str = "allOf", leaf: Any = True, into: str | None = None) -> dict[str, Any]:
    """Each of `length` definitions applies the next one twice; `into`: to a member of this name."""

    def step(number: int) -> Any:
        reference = {"$ref": f"#/$defs/a{number + 1}"}
        return reference if into is None else {"properties": {into: reference}}

    parts = {f"a{number}": {keyword: [step(number), step(number)]} for number in range(length)}
    return {"type": "object", "$defs": {**parts, f"a{length}": leaf}, "$ref": "#/$defs/a0"}


def nested(levels: int, leaf: Any, **beside: Any) -> Any:
    value = leaf
    for _ in range(levels):
        value = {"x": value, **beside}
    return value


def apply(schema: Any, args: Any) -> list[str]:
    """The issues, found within the stated time."""
    checker = compile_arguments(schema, {})
    began = time.process_time()
    _, issues = checker.apply(args)
    assert time.process_time() - began < STATED_S
    return issues


def dynamic(length: int) -> dict[str, Any]:
    parts = {
        f"a{number}": {"$dynamicAnchor": f"n{number}", "allOf": [{"$dynamicRef": f"#n{number + 1}"}] * 2}
        for number in range(length)
    }
    end = {"$dynamicAnchor": f"n{length}", "type": "object"}
    return {"type": "object", "$defs": {**parts, "end": end}, "$dynamicRef": "#n0"}


def mutual(types: int, keyword: str, *, backwards: bool = False) -> dict[str, Any]:
    """Types whose member x may be of any of them: the validator goes every way that comes back to no type."""
    order = range(types - 1, -1, -1) if backwards else range(types)
    ways = [{"properties": {"x": {"$ref": f"#/$defs/g{n}"}}} for n in order]
    roots = [{"$ref": f"#/$defs/g{types - 1}"}, {"$ref": "#/$defs/g0"}]
    return {"type": "object", "$defs": {f"g{n}": {keyword: ways} for n in range(types)}, "allOf": roots}


BOMBS: dict[str, Any] = {
    "the one of the issue": chain(26),
    "as long as you like": chain(3000),
    "deeper than a stack": {
        "type": "object",
        "$defs": {
            **{f"a{n}": {"unevaluatedItems": False, "anyOf": [{"$ref": f"#/$defs/a{n + 1}"}]} for n in range(2000)},
            "a2000": {},
        },
        "$ref": "#/$defs/a0",
    },
    "anyOf": chain(26, keyword="anyOf", leaf=False),
    "oneOf": chain(26, keyword="oneOf"),
    "through members": chain(26, into="x"),
    "if, then and else": {
        "type": "object",
        "$defs": {
            **{
                f"a{n}": {"if": {"$ref": f"#/$defs/a{n + 1}"}, "then": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(26)
            },
            "a26": {},
        },
        "$ref": "#/$defs/a0",
    },
    "unevaluated": {
        "type": "object",
        "$defs": {
            **{f"a{n}": {"$ref": f"#/$defs/a{n + 1}", "unevaluatedProperties": False} for n in range(26)},
            "a26": {"properties": {"x": {}}},
        },
        "$ref": "#/$defs/a0",
    },
    "dynamic": dynamic(26),
    "by anchor": {
        "type": "object",
        "$defs": {
            **{f"a{n}": {"$anchor": f"n{n}", "allOf": [{"$ref": f"#n{n + 1}"}] * 2} for n in range(26)},
            "end": {"$anchor": "n26"},
        },
        "$ref": "#n0",
    },
    "by id": {
        "$id": "https://x.example/root",
        "type": "object",
        "$defs": {
            **{f"a{n}": {"$id": f"a{n}", "allOf": [{"$ref": f"a{n + 1}"}, {"$ref": f"a{n + 1}"}]} for n in range(26)},
            "end": {"$id": "a26"},
        },
        "$ref": "a0",
    },
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "definitions": {
            **{
                f"a{n}": {"dependencies": {k: {"$ref": f"#/definitions/a{n + 1}"} for k in "xy"}} for n in range(26)
            },
            "a26": {},
        },
        "allOf": [{"$ref": "#/definitions/a0"}],
    },
    "inside a recursion": {
        "type": "object",
        "$defs": {
            **{f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"$ref": f"#/$defs/a{n + 1}"}]} for n in range(26)},
            "a26": {"properties": {"x": {"$ref": "#/$defs/a0"}}},
        },
        "$ref": "#/$defs/a0",
    },
    "types that all contain each other": mutual(20, "allOf"),
    "alternatives that all contain each other": mutual(20, "anyOf"),
    "types that contain all earlier ones": mutual(20, "allOf", backwards=True),
    "a circle around one value": {
        "type": "object",
        "$defs": {f"g{n}": {"allOf": [{"$ref": f"#/$defs/g{m}"} for m in range(6) if m != n]} for n in range(6)},
        "additionalProperties": {"$ref": "#/$defs/g0"},
    },
    "too many parts": {"type": "object", "properties": {f"p{n}": {} for n in range(MAX_SUBSCHEMAS)}},
}  # fmt: skip


@pytest.mark.parametrize("schema", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_before_it_is_tried(schema: Any) -> None:
    began = time.process_time()
    with pytest.raises(TooCostly):
        SchemaLimits(schema)
    with pytest.raises(GoondanError) as caught:
        compile_arguments(schema, {}).apply({"x": {}})
    assert time.process_time() - began < STATED_S
    assert caught.value.info.code == "E_CONFIG_SCHEMA"
    assert "cost too much" in caught.value.info.message


TERM = {"$ref": "#/$defs/E"}
RECURSIVE = {
    "type": "object",
    "$defs": {
        "E": {
            "anyOf": [
                {"type": "number"},
                *(
                    {
                        "type": "object",
                        "properties": {"op": {"const": op}, "left": TERM, "right": TERM},
                        "required": ["op", "left", "right"],
                    }
                    for op in ("add", "sub", "mul", "div", "pow")
                ),
            ]
        }
    },
    "properties": {"expression": {"$ref": "#/$defs/E"}},
}  # fmt: skip
ROW = {f"field{number}": {"type": "string", "maxLength": 100} for number in range(30)}
ROWS = {
    "type": "object",
    "properties": {
        "rows": {
            "type": "array",
            "items": {"type": "object", "properties": ROW, "required": list(ROW), "additionalProperties": False},
        }
    },
}


def expression(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"op": "pow", "left": value, "right": 2}
    return {"expression": value}


#: Values are made by the test that needs them: together they take hundreds of megabytes, in every worker.
HONEST: list[tuple[Any, Callable[[], Any]]] = [
    (chain(10), dict),
    (chain(8, into="x"), lambda: nested(8, {})),
    (RECURSIVE, lambda: expression(25)),
    (ROWS, lambda: {"rows": [dict.fromkeys(ROW, "abcdefg")] * 15_000}),
    ({"type": "object", "properties": {"text": {"type": "string"}}}, lambda: {"text": "x" * 8_000_000}),
    ({"type": "object", "properties": {"text": {"type": "string", "pattern": "^[a-z]+$"}}},
     lambda: {"text": "x" * 8_000_000}),
    ({"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer"}}}},
     lambda: {"n": [1] * 1_000_000}),
    ({"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}},
     lambda: {"n": list(range(100_000))}),
    ({"type": "object", "properties": {"p": {"pattern": r"^(?=.*\d)(?!.*\s).{8,}$"}}}, lambda: {"p": "correct4horse"}),
    ({"type": "object", "additionalProperties": {"$ref": "#"}}, lambda: nested(30, {})),
    ({"type": "object", "properties": {"s": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}},
     lambda: {"s": ROWS}),
    (mutual(6, "anyOf"), lambda: nested(30, {})),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "type": "object", "$ref": "#/$defs/a"}, dict),
    ({"type": "object", "$defs": {"a/b c~": {"type": "object"}}, "$ref": "#/$defs/a~1b%20c~0"}, dict),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "definitions": {"a": {"$id": "#a"}},
      "properties": {"x": {"$ref": "#a"}}}, lambda: {"x": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "args"), HONEST)
def test_an_honest_schema_takes_large_and_deep_values(schema: Any, args: Callable[[], Any]) -> None:
    assert apply(schema, args()) == []


def forked(keyword: str) -> dict[str, Any]:
    ways = [
        {"properties": {"x": {"$ref": "#/$defs/R"}, "k": {"const": number}}, "required": ["k"]} for number in range(3)
    ]
    return {"$defs": {"R": {"type": "object", keyword: ways}}, "$ref": "#/$defs/R"}


def arrays(**items: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "array", **items}}}


BACKTRACKING = arrays(items={"pattern": r"^(a|a)*\1?$"})
DEAR: dict[str, tuple[Any, Callable[[], Any], list[str] | None]] = {
    "a fault for each of a million": (
        arrays(items={"type": "string"}),
        lambda: {"a": list(range(1_000_000))},
        ["args.a[0]: expected string but got integer"],
    ),
    "a fault for each way of 10 levels": (forked("anyOf"), lambda: nested(10, 1, k=2), [UNWORDED]),
    "or of 60": (forked("oneOf"), lambda: nested(60, 1, k=2), [UNWORDED]),
    "no fault at 60": (forked("oneOf"), lambda: nested(60, {"k": 2}, k=2), []),
    "copies of a large value": (
        {"type": "object", "allOf": [{"required": [f"q{n}"]} for n in range(200)]},
        lambda: {"a": list(range(100_000))},
        ["args.q0: required property is missing"],
    ),
    "many unique objects": (
        arrays(uniqueItems=True),
        lambda: {"a": [{"a": n} for n in range(150_000)]},
        [TOO_MUCH],
    ),
    "a pattern that has to look at everything": (
        {"type": "object", "properties": {"a": {"pattern": "(?:[01]*1[01]{40}){1,20}x"}}},
        lambda: {"a": "01" * 400_000},
        [TOO_MUCH],
    ),
    "a pattern that backtracks": (BACKTRACKING, lambda: {"a": ["a" * 30 + "b"] * 100_000}, []),
    "many letters for few states": (
        {"type": "object", "properties": {"a": {"pattern": "^(a|b|ab)*c$"}}},
        lambda: {"a": "ab" * 1_000_000},
        None,
    ),
    "empty objects of five hundred fields": (
        arrays(items={"properties": {f"p{n}": {} for n in range(500)}}),
        lambda: {"a": [{} for _ in range(150_000)]},
        [TOO_MUCH],
    ),
    "constants that are compared": (
        arrays(items={"enum": [{"a": n} for n in range(1000)]}),
        lambda: {"a": [{"a": -1}] * 50_000},
        [TOO_MUCH],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "args", "issues"), DEAR.values(), ids=DEAR.keys())
def test_what_is_dear_for_large_values_is_bounded(
    schema: Any, args: Callable[[], Any], issues: list[str] | None
) -> None:
    found = apply(schema, args())
    assert found == issues if issues is not None else found


def test_a_wrong_value_under_a_name_of_digits_is_wrong() -> None:
    """The library takes such a name for an index; the fault was found, not worded, and so taken for none."""
    schema = {"type": "object", "additionalProperties": {"type": "string"}}
    assert apply(schema, {"0": 5}) == ["args.0: expected string but got integer"]
    assert apply(schema, {"a": "x", "17": {"1": 2}}) == ["args.17: expected string but got object"]


@pytest.mark.requirement("SCHEMA-11")
def test_a_pattern_that_needs_look_around_is_left_unchecked_and_named() -> None:
    schema = {
        "type": "object",
        "properties": {
            "p": {"type": "string", "pattern": r"^(?=.*\d)(?!.*\s).{8,}$", "maxLength": 20},
            "pattern": {"const": {"pattern": "(?=x)"}},
            "q": {"$ref": "#/$defs/twice"},
            "named": {"patternProperties": {"^(?!x)": {"type": "string"}, "^n": {"type": "number"}},
                      "additionalProperties": False},
        },
        "additionalProperties": False,
        "$defs": {"twice": {"type": "string", "pattern": r"^(a+)\1$"}},
    }  # fmt: skip
    before = json.dumps(schema)
    checker = compile_arguments(schema, {})
    args = {"p": "none", "q": "aaa", "pattern": {"pattern": "(?=x)"}, "named": {"x": 1, "n": 1}}
    assert checker.apply(args) == (args, [])
    assert sorted(checker.unchecked) == [
        "$defs/twice/pattern",
        "properties/named/patternProperties/^(?!x)",
        "properties/p/pattern",
    ]
    wrong = {"p": "n" * 30, "q": 5, "r": 1, "pattern": {}, "named": {"n": "text"}}
    issues = checker.apply(wrong)[1]
    assert [issue.split(":")[0] for issue in issues] == ["args.r", "args.p", "args.pattern", "args.q", "args.named.n"]
    assert json.dumps(schema) == before, "the model is still shown all of it"


def test_a_pattern_that_is_none_is_no_schema() -> None:
    with pytest.raises(GoondanError) as caught:
        compile_arguments(
            {"type": "object", "properties": {"a": {"pattern": "("}, "b": {"pattern": "(?=b)"}}}, {}
        ).compile()
    assert caught.value.info.code == "E_CONFIG_SCHEMA"


def test_the_price_of_patterns() -> None:
    assert pattern_price("^[a-z]+$") < 10
    assert pattern_price("^[a-z]{1,1000}$") < 10
    assert pattern_price("[a-z]{1,1000}$") > 1000
    assert pattern_price("^[a-z]*[a-z]{1,1000}$") > 1000
    assert pattern_price("^(ab|c{3}){1,1000}$") > 1000
    assert pattern_price("(" * 9 + "[" + "\\") >= 1


# --- any schema -------------------------------------------------------------------------------------------------------

names = st.sampled_from(["a", "b", "c"])
references = st.sampled_from([f"#/$defs/d{number}" for number in range(5)] + ["#"])
leaves = st.one_of(
    st.just({}),
    st.booleans(),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["object", "array", "string", "integer"])),
    st.builds(lambda reference: {"$ref": reference}, references),
    st.builds(lambda reference: {"$ref": reference, "unevaluatedProperties": False}, references),
    st.just({"uniqueItems": True}),
    st.just({"const": {"a": [1]}}),
    st.just({"pattern": r"^(a|a)*\1?$"}),
    st.just({"pattern": "(a|b){1,30}c"}),
)


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, min_size=1, max_size=4)
    members = st.dictionaries(names, inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda keyword, schemas: {keyword: schemas}, st.sampled_from(["allOf", "anyOf", "oneOf"]), lists),
        st.builds(lambda keyword, schema: {keyword: schema}, st.sampled_from(["not", "items", "contains"]), inner),
        st.builds(lambda schemas: {"properties": schemas, "required": sorted(schemas)}, members),
        st.builds(lambda schemas, rest: {"properties": schemas, "additionalProperties": rest}, members, inner),
        st.builds(lambda schema, then: {"if": schema, "then": then, "else": schema}, inner, inner),
        st.builds(lambda schema: {"patternProperties": {"^a": schema, "a|b": schema}}, inner),
        st.builds(lambda schemas, rest: {"prefixItems": schemas, "items": rest}, lists, inner),
    )


schemas = st.recursive(leaves, grown, max_leaves=12)
documents = st.builds(
    lambda parts, root: {"$defs": {f"d{n}": part for n, part in enumerate(parts)}, "type": "object", "allOf": [root]},
    st.lists(schemas, min_size=5, max_size=5),
    schemas,
)
values = st.dictionaries(
    names,
    st.recursive(
        st.integers() | st.text("ab", max_size=40),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(names, inner, max_size=3),
        max_leaves=40,
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(documents, values, st.integers(0, 12))
def test_no_schema_and_value_take_longer_than_stated(schema: Any, value: Any, levels: int) -> None:
    args = {"a": nested(levels, value), "b": [value] * 20}
    json.dumps(schema)
    with suppress(GoondanError):  # refused as a whole, in time
        apply(schema, args)


@given(st.integers(1, 40), st.sampled_from(["allOf", "anyOf", "oneOf"]))
def test_the_price_of_a_chain_is_that_of_all_its_paths(length: int, keyword: str) -> None:
    try:
        units = SchemaLimits(chain(length, keyword=keyword)).price.units
    except TooCostly as error:
        units = int(error.message.split("may take ")[1].removeprefix("more than ").split(" ")[0].replace(",", ""))
        assert units > MAX_UNITS
    assert min(2**length, 10**12) <= units <= 6 * 2 ** (length + 1)


def test_a_bundle_with_a_bomb_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("handlers = {'go': lambda ctx, args: 1}\n")
    bundle = tmp_path / "goondan.yaml"
    spec = {"entry": "./tool.py", "exports": [{"name": "go", "parameters": chain(26)}]}
    bundle.write_text(f"apiVersion: goondan.ai/v1\nkind: Tool\nmetadata: {{name: bomb}}\nspec: {json.dumps(spec)}\n")
    began = time.process_time()
    errors = inspect_bundle(str(bundle), state_dir=None, env={}, handlers=False).errors
    assert time.process_time() - began < STATED_S
    (error,) = [error for error in errors if error.code == "E_CONFIG_SCHEMA"]
    assert "steps, limit 500,000" in error.message
    assert "bomb" in str(error)
    assert len(encode_value(spec)) < 4000
