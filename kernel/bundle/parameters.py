"""The parameters of an export as rows of a table: what a person reads instead of a JSON Schema. Pure.

Nested properties get a dotted name (`filter.status`), those of a list's items brackets (`users[].name`). A row cannot
show everything, for example unions of objects and conditions. `gdn tool show --json` prints the schema itself.

Source: requirements SCHEMA-08 to SCHEMA-11.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

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
