"""The lines of `gdn call --batch`: what a line may hold, and the errors of other lines. Pure.

A line is a JSON object {"id", "tool", "args"?, "workdir"?, "instance"?}. `id` is any string or number; the line's
result has the same one. Other fields are ignored, as everywhere on the wire.

Source: docs/design/commands.md section 5; docs/design/wire.md section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import msgspec

from goondan.kernel.cli.rules.direct import DEFAULT_INSTANCE
from goondan.schemas.bundle.address import MAX_INSTANCE_KEY, is_instance_key
from goondan.schemas.wire import blobs, codec
from goondan.schemas.wire.errors import GoondanError, fail

#: The longest line whose arguments can fit. Escapes make JSON at most six times as long as msgpack.
MAX_LINE_BYTES: Final = 6 * blobs.MAX_ARGS_BYTES
#: Digits that a 64-bit integer can have, with its sign.
_MAX_INT_DIGITS: Final = 20
_MIN_INT: Final = -(2**63)
_MAX_INT: Final = 2**64 - 1


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call."""

    #: Full name of the tool.
    tool: str
    #: The arguments.
    args: dict[str, Any]
    #: The instance that it is made for.
    instance: str = DEFAULT_INSTANCE
    #: The workdir, as it was given.
    workdir: str | None = None


class BadLine(Exception):
    """A line that is no call: its error, and its id if it has a usable one."""

    def __init__(self, id: Any, error: GoondanError) -> None:
        super().__init__(str(error))
        self.id = id
        self.error = error


def parse_json(text: str | bytes) -> Any:
    """Read JSON from outside.

    Integers beyond 64 bits become doubles, and lone surrogates become U+FFFD. Raises GoondanError E_USAGE for NaN and
    infinities (also by overflow), for text that is not UTF-8, and for text that nests too deep.
    """
    import json  # other commands use this module for less

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_constant)
        return codec.replace_surrogates(value)
    except UnicodeDecodeError:
        raise fail("E_USAGE", "the JSON is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise fail("E_USAGE", f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise fail("E_USAGE", "the JSON nests too deep") from None
    except ValueError as error:
        raise fail("E_USAGE", f"not JSON: {error}") from None


def _integer(digits: str) -> int | float:
    if len(digits) <= _MAX_INT_DIGITS:
        value = int(digits)
        if _MIN_INT <= value <= _MAX_INT:
            return value
    return _number(digits)


def _number(text: str) -> float:
    value = float(text)
    if value - value != 0.0:
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def parse_arguments(text: str | bytes) -> dict[str, Any]:
    """Read ARGS_JSON of `gdn call`: one object. Raises GoondanError E_USAGE, and E_FRAME_TOO_LARGE for a large one."""
    return _checked_arguments(parse_json(text))


def is_pair(word: str) -> bool:
    """Whether a word of `gdn call` is `KEY=VALUE`, and no JSON."""
    key, equals, _ = word.partition("=")
    return bool(equals) and bool(key) and key[0] not in '{["'


def parse_pairs(words: Iterable[str], declared: Mapping[str, Any]) -> dict[str, Any]:
    """KEY=VALUE words as arguments, as the console reads them: text where the schema (`declared`: its properties) says
    string, else JSON if it can be read as JSON. Raises GoondanError as `parse_arguments`.
    """
    args: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise fail(
                "E_USAGE", f"{word[:80]!r} is no KEY=VALUE", suggestion="Put words that belong together in quotes."
            )
        schema = declared.get(key)
        args[key] = codec.replace_surrogates(value)
        if not (isinstance(schema, dict) and schema.get("type") == "string"):
            with suppress(GoondanError):
                args[key] = parse_json(value)
    return _checked_arguments(args)


def _checked_arguments(args: Any) -> dict[str, Any]:
    if not isinstance(args, dict):
        raise fail("E_USAGE", f"the arguments must be a JSON object, not {_kind(args)}")
    data = codec.encode_value(args)
    if len(data) > blobs.MAX_ARGS_BYTES:
        raise fail("E_FRAME_TOO_LARGE", f"the arguments have {len(data)} bytes, limit {blobs.MAX_ARGS_BYTES}")
    try:
        codec.check_depth(data)
    except ValueError as error:
        raise fail("E_USAGE", f"the arguments are {error}") from None
    return args


@lru_cache(256)
def check_instance(key: str) -> str:
    """An instance key. Raises GoondanError E_USAGE."""
    if not is_instance_key(key):
        message = f"an instance key has 1 to {MAX_INSTANCE_KEY} characters, all of them visible"
        raise fail("E_USAGE", message)
    return key


def parse_line(data: bytes | None, size: int, instance: str = DEFAULT_INSTANCE) -> tuple[Any, ToolCall] | None:
    """The id and the call of one line. None for an empty line. Raises BadLine.

    `data` is None for a line that was too long. `instance` is used when the line names none.
    """
    if data is None:
        raise BadLine(None, fail("E_FRAME_TOO_LARGE", f"the line has {size} bytes, limit {MAX_LINE_BYTES}"))
    if not data.strip():
        return None
    found: Any = None
    try:
        value = parse_json(data)
        if not isinstance(value, dict):
            raise fail("E_USAGE", f"a line must be a JSON object, not {_kind(value)}")
        found = _id(value)
        tool = _text(value, "tool", None)
        if not tool:
            raise fail("E_USAGE", "a line must name a tool")
        call = ToolCall(
            tool=tool,
            args=_checked_arguments(value.get("args", {})),
            instance=check_instance(_text(value, "instance", instance) or ""),
            workdir=_text(value, "workdir", None),
        )
    except GoondanError as error:
        raise BadLine(found, error) from None
    return found, call


def _id(value: dict[str, Any]) -> Any:
    if "id" not in value:
        raise fail("E_USAGE", "a line must have an id")
    found = value["id"]
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        raise fail("E_USAGE", f"an id is a string or a number, not {_kind(found)}")
    return found


def _text(value: dict[str, Any], name: str, default: str | None) -> str | None:
    found = value.get(name, default)
    if found is not None and not isinstance(found, str):
        raise fail("E_USAGE", f"{name} must be a string, not {_kind(found)}")
    return found


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"
