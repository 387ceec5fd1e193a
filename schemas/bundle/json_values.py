"""JSON values and the names of parameters: whether two values are the same, of which type one is, and other spellings
of a parameter. Pure, and apart from arguments.py: the broker compiles no schema, which takes a library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def same_json(one: Any, other: Any) -> bool:
    """As JSON has it, at every depth: 1 and 1.0 are one number, and true is no number. Python takes True for 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def rename_aliases(args: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """A copy of `args` with canonical names; `args` itself when it uses no alias."""
    if not any(alias in args for alias in aliases):
        return args
    renamed = dict(args)
    for alias, canonical in aliases.items():
        if alias not in renamed:
            continue
        if canonical not in renamed:
            renamed[canonical] = renamed.pop(alias)
        elif renamed[canonical] == renamed[alias] and json_type(renamed[canonical]) == json_type(renamed[alias]):
            del renamed[alias]
    return renamed


def json_type(value: Any) -> str:
    """The JSON type of `value` as issues name it; a number without fraction is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
