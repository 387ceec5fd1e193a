"""Whether two JSON values are the same. Pure."""

from typing import Any


def same_json(one: Any, other: Any) -> bool:
    """As JSON has it, at every depth: 1 and 1.0 are one number, and true is no number. Python takes True for 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
