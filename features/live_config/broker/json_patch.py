"""JSON Patch (RFC 6902) with `add`, `remove` and `replace`, and JSON Pointer (RFC 6901). Pure.

The broker's loop runs this, so it imports nothing, and its cost depends only on the length of the path: containers
beside the path are shared with the given document, which does not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from msgspec import UNSET

from goondan.features.live_config.wire import Operation
from goondan.schemas.wire.errors import fail

#: Segments of one pointer; effective configurations are not deep.
MAX_SEGMENTS: Final = 32
_INDEX: Final = re.compile(r"(?:0|[1-9][0-9]{0,9})\Z")
_BAD_ESCAPE: Final = re.compile(r"~(?![01])")


def apply_operations(document: Any, operations: Iterable[Operation]) -> Any:
    """The document after all operations, in order. Raises GoondanError E_CONFIG_INVALID_VALUE: nothing is applied."""
    for operation in operations:
        path = pointer(operation.path)
        if operation.op != "remove" and operation.value is UNSET:
            raise fail("E_CONFIG_INVALID_VALUE", f"{_told(operation)} has no value")
        document = _apply(document, path, operation)
    return document


def pointer(text: str) -> list[str]:
    """The segments of a JSON Pointer. Raises GoondanError E_CONFIG_INVALID_VALUE."""
    if text == "":
        return []
    if not text.startswith("/") or _BAD_ESCAPE.search(text):
        hint = "A path begins with / and writes / as ~1 and ~ as ~0 in a name."
        raise fail("E_CONFIG_INVALID_VALUE", f"{text[:100]!r} is no JSON Pointer", suggestion=hint)
    segments = [segment.replace("~1", "/").replace("~0", "~") for segment in text[1:].split("/")]
    if len(segments) > MAX_SEGMENTS:
        raise fail("E_CONFIG_INVALID_VALUE", f"a path has {len(segments)} segments, and at most {MAX_SEGMENTS}")
    return segments


def _apply(node: Any, path: list[str], operation: Operation) -> Any:
    if not path:
        if operation.op == "remove":
            raise fail("E_CONFIG_INVALID_VALUE", "the whole configuration cannot be removed")
        return operation.value
    if isinstance(node, dict):
        return _apply_to_object(node, path, operation)
    if isinstance(node, list):
        return _apply_to_array(node, path, operation)
    raise _missing(operation, path[0])


def _apply_to_object(node: dict[str, Any], path: list[str], operation: Operation) -> dict[str, Any]:
    key, *rest = path
    if key not in node and (rest or operation.op != "add"):
        raise _missing(operation, key)
    made = dict(node)
    if rest:
        made[key] = _apply(node[key], rest, operation)
    elif operation.op == "remove":
        del made[key]
    else:
        made[key] = operation.value
    return made


def _apply_to_array(node: list[Any], path: list[str], operation: Operation) -> list[Any]:
    key, *rest = path
    items = list(node)
    adds = operation.op == "add" and not rest
    if adds and key == "-":
        return [*items, operation.value]
    if not _INDEX.match(key) or int(key) >= len(items) + adds:
        raise _missing(operation, key)
    at = int(key)
    if rest:
        items[at] = _apply(items[at], rest, operation)
    elif adds:
        items.insert(at, operation.value)
    elif operation.op == "remove":
        del items[at]
    else:
        items[at] = operation.value
    return items


def _missing(operation: Operation, key: str) -> Exception:
    return fail("E_CONFIG_INVALID_VALUE", f"{_told(operation)}: there is no {key[:80]!r}")


def _told(operation: Operation) -> str:
    return f"{operation.op} {operation.path[:200]}"
