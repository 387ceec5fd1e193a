"""The bundled tool `json-query`: queries of a JSON text.

JSON is read strictly (RFC 8259), and numbers are doubles, as recorded: a number that is no integer up to 2^53 loses the
digits after the 16th, and a number that is too large for a double is read as null.

Source: docs/design/tools.md section 9; requirements JSON-01 to JSON-12; recorded parity `json-query__*`.
"""

from __future__ import annotations

from json import JSONDecoder

from goondan_base.arguments import EXACT, InvalidInput, as_text, non_empty, number, string, strings
from goondan_tool import ToolContext

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn

#: Integers from minus this up to twice this can be sent.
WIDEST = 1 << 63
#: The most digits of an index of an array that fits into a call.
INDEX_DIGITS = 9
_INFINITY = float("inf")


class Missing:
    """The result of a path that leads nowhere."""


MISSING = Missing()


# --- exports --------------------------------------------------------------------------------------------------------


def query(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`json-query__query`: the value at a path."""
    value, path = at_path(input)
    if value is MISSING:
        return {"path": path, "found": False, "value": None}
    return {"path": path, "found": True, "value": finite(value)}


def pick(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`json-query__pick`: some keys of an object."""
    data = non_empty(input, "data")
    keys = strings(input, "keys")
    document = parse(data)
    if not isinstance(document, dict):
        raise InvalidInput("Input data must be a JSON object for pick operation")
    return {"keys": keys, "result": finite({key: document[key] for key in keys if key in document})}


def count(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`json-query__count`: the number of elements, keys or characters. A missing value counts as null."""
    value, path = at_path(input)
    kind = "null" if value is MISSING else json_type(value)
    if isinstance(value, list | dict | str):
        return {"path": path, "count": len(value), "type": kind}
    return {"path": path, "count": int(kind != "null"), "type": kind}


def flatten(ctx: ToolContext, input: dict[str, Any]) -> dict[str, Any]:
    """`json-query__flatten`: flatten arrays in an array, level by level. A fraction of a level counts as a whole
    level.
    """
    data = non_empty(input, "data")
    depth = number(input, "depth", 1)
    document = parse(data)
    if not isinstance(document, list):
        raise InvalidInput("Input data must be a JSON array for flatten operation")
    result = flattened(document, depth)
    return {"depth": depth, "count": len(result), "result": finite(result)}


handlers = {"query": query, "pick": pick, "count": count, "flatten": flatten}


# --- paths ----------------------------------------------------------------------------------------------------------


def at_path(input: dict[str, Any]) -> tuple[Any, str]:
    """The value of `data` at `path` (or MISSING), and the given path."""
    data = non_empty(input, "data")
    path = string(input, "path", ".")
    value = parse(data)
    for step in steps(path):
        value = child(value, step)
    return value, path


def steps(path: str) -> list[str]:
    """The keys and indexes of a path: the texts between brackets, and those between dots outside of brackets.

    Empty steps do not count. A closing bracket ends a step, also when no bracket is open.
    """
    found: list[str] = []
    start, inside = 0, False
    for at, character in enumerate(path):
        if character in "[]" or (character == "." and not inside):
            found.append(path[start:at])
            start = at + 1
            inside = character == "["
    found.append(path[start:])
    return [step for step in found if step]


def child(value: Any, step: str) -> Any:
    """The value one step down, or MISSING. An index has only digits. An object has only its own keys."""
    if isinstance(value, dict):
        return value.get(step, MISSING)
    if isinstance(value, list) and step.isascii() and step.isdigit():
        digits = step.lstrip("0") or "0"
        if len(digits) <= INDEX_DIGITS and int(digits) < len(value):
            return value[int(digits)]
    return MISSING


# --- values ---------------------------------------------------------------------------------------------------------


def parse(text: str) -> Any:
    """A JSON text as Python values. Numbers that are too large are infinite here (see `finite`). Raises
    InvalidInput.
    """
    try:
        return _decoder.decode(text)
    except RecursionError:
        raise InvalidInput("Failed to parse input as JSON: it is nested too deep") from None
    except ValueError:
        raise InvalidInput("Failed to parse input as JSON") from None


def to_number(digits: str) -> float:
    """A JSON number as a double, or as an int where JavaScript prints it as one and msgpack can hold it."""
    value = float(digits)
    if not value.is_integer() or not -WIDEST <= value < 2 * WIDEST:
        return value
    return int(value) if -EXACT <= value <= EXACT else int(as_text(value))


def no_constant(name: str) -> NoReturn:
    """Refuse NaN and infinities, which are no JSON."""
    raise ValueError(name)


_decoder = JSONDecoder(parse_float=to_number, parse_int=to_number, parse_constant=no_constant)


def finite(value: Any) -> Any:
    """The value with None in place of infinite numbers, and `value` itself if there are none. Not recursive, because it
    can be deep.
    """
    if isinstance(value, float):
        return value if -_INFINITY < value < _INFINITY else None
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list):
            for key, inner in item.items() if isinstance(item, dict) else enumerate(item):
                if isinstance(inner, float):
                    if not -_INFINITY < inner < _INFINITY:
                        item[key] = None
                elif isinstance(inner, dict | list):
                    waiting.append(inner)
    return value


def json_type(value: Any) -> str:
    """The type as JSON names it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def flattened(items: list[Any], depth: float) -> list[Any]:
    """The items. An array down to `depth` levels is replaced by its items. Not recursive, because it can be deep."""
    result: list[Any] = []
    open_lists = [iter(items)]
    while open_lists:
        for item in open_lists[-1]:
            if isinstance(item, list) and len(open_lists) - 1 < depth:
                open_lists.append(iter(item))
                break
            result.append(item)
        else:
            open_lists.pop()
    return result
