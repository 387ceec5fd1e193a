"""What a person reads of a tool's manifest: its parameters as rows of a table instead of a JSON Schema, and how results
differ from what its examples promise. Pure.

Nested properties get a dotted name (`filter.status`), those of a list's items brackets (`users[].name`). A row cannot
show everything, for example unions of objects and conditions. `gdn tool show --json` prints the schema itself.

An object of an example need not show every key. Other keys are not compared, so a duration or a path can be left out.
Lists and all other values must be equal. A number is equal to the same number of another type, but never to a boolean.

Source: docs/design/tools.md section 10; requirements SCHEMA-08 to SCHEMA-11.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, Literal

from msgspec import Struct

from goondan.kernel.bundle.rules.problems import Path, spell

#: Rows of one schema, and levels: a schema may be of any size, a table for a person not.
MAX_ROWS: Final = 100
MAX_LEVELS: Final = 6
#: Keyword -> how a bound is written behind the type.
_BOUNDS: Final = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "like /{}/",
}


class Parameter(Struct, frozen=True, omit_defaults=True):
    """One row."""

    #: Name of the parameter.
    name: str
    #: Its type.
    type: str
    #: It must be given.
    required: bool = False
    #: Its default as JSON. "": the schema names none.
    default: str = ""
    #: What it means.
    description: str = ""


def parameter_rows(schema: dict[str, Any] | None) -> list[Parameter]:
    """The rows of an export's `parameters`, at most MAX_ROWS, in the order of the schema."""
    rows: list[Parameter] = []
    for row in _rows(schema, "", MAX_LEVELS):
        rows.append(row)
        if len(rows) == MAX_ROWS:
            break
    return rows


def _rows(schema: Any, prefix: str, levels: int) -> Iterator[Parameter]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or levels == 0:
        return
    required = schema.get("required")
    needed = required if isinstance(required, list) else []
    for name, inner in properties.items():
        known = inner if isinstance(inner, dict) else {}
        description = known.get("description")
        yield Parameter(
            name=f"{prefix}{name}",
            type=type_words(inner),
            required=name in needed,
            default=_json(known["default"]) if "default" in known else "",
            description=description if isinstance(description, str) else "",
        )
        yield from _rows(inner, f"{prefix}{name}.", levels - 1)
        if isinstance(known.get("items"), dict):
            yield from _rows(known["items"], f"{prefix}{name}[].", levels - 1)


def type_words(schema: Any) -> str:
    """A schema's type in a few words: `string`, `array of string`, `"upper" or "lower"`, `integer, ≥ 1`."""
    if not isinstance(schema, dict):
        return "anything" if schema is not False else "nothing"
    if isinstance(schema.get("enum"), list):
        return " or ".join(_json(value) for value in schema["enum"])
    if "const" in schema:
        return _json(schema["const"])
    named = schema.get("type")
    names = [str(name) for name in named] if isinstance(named, list) else [named] if isinstance(named, str) else []
    for union in ("anyOf", "oneOf"):
        if not names and isinstance(schema.get(union), list):
            names = list(dict.fromkeys(type_words(inner) for inner in schema[union]))
    words = " or ".join(names) or "anything"
    items = schema.get("items")
    if names == ["array"] and isinstance(items, dict):
        inner = type_words(items)
        words = f"array of {inner}" if " or " not in inner else f"array of ({inner})"
    bounds = [
        text.format(schema[key]) for key, text in _BOUNDS.items() if isinstance(schema.get(key), int | float | str)
    ]
    return ", ".join([words, *bounds])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


#: The most differences of one example that are shown.
MAX_DIFFERENCES: Final = 5
#: The most of a value in a difference (characters).
MAX_VALUE: Final = 200


def differences(expected: Any, got: Any) -> list[str]:
    """The differences between `got` and the example, at most MAX_DIFFERENCES lines. Empty when there are none."""
    return list(islice(_differences(expected, got, ("output",)), MAX_DIFFERENCES))


def _differences(expected: Any, got: Any, at: Path) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(got, dict):
        for key, value in expected.items():
            if key in got:
                yield from _differences(value, got[key], (*at, key))
            else:
                yield f"{spell((*at, key))}: missing, expected {short(value)}"
    elif isinstance(expected, list) and isinstance(got, list):
        for index, (left, right) in enumerate(zip(expected, got, strict=False)):
            yield from _differences(left, right, (*at, index))
        if len(expected) != len(got):
            yield f"{spell(at)}: expected {len(expected)} items, got {len(got)}"
    elif expected != got or isinstance(expected, bool) != isinstance(got, bool):
        yield f"{spell(at)}: expected {short(expected)}, got {short(got)}"


def short(value: Any) -> str:
    """A value as JSON on one line, cut to MAX_VALUE characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…"


class Outcome(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """How one example ended."""

    #: Full name of the tool.
    tool: str
    #: The number of the example, from 0.
    index: int
    #: The manifest that it stands in.
    file: str
    #: The line of its input there.
    line: int
    #: Whether it passed.
    status: Literal["passed", "failed", "skipped"]
    #: Its arguments.
    input: dict[str, Any]
    #: How long the call took (milliseconds).
    duration_ms: float = 0.0
    #: Why it failed.
    differences: list[str] = []
    #: The call's result.
    output: Any = None
    #: The call's error.
    error: Any = None
    #: Why no call was made.
    reason: str = ""


def unkept_promises(result: dict[str, Any], expected: Any, *, compares: bool) -> list[str]:
    """Why a ToolResult differs from the promise of the example. Empty when it does not. `compares`: the example shows
    an output.
    """
    if result["status"] == "error":
        error = result.get("error") or {}
        return [f"the call failed: {error.get('message', '')} [{error.get('code', 'E_TOOL')}]"]
    if compares and result["status"] != "ok":
        return [f"the result is {result['status']}, and the example shows an output"]
    return differences(expected, result.get("output")) if compares else []
