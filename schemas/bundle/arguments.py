"""Arguments of a tool call against the export's JSON Schema: aliases, the verdict, and the worded issues.

Rules.
- A documented alias is renamed to its canonical name before anything is checked, so schemas stay closed. When the
  canonical name is there too, an equal value is dropped and a different one stays where it is: the schema refuses it.
- The verdict is that of JSON Schema (draft 2020-12 unless `$schema` names another). Nothing is ever fetched.
- Issues are worded only for invalid arguments: first missing arguments, then unexpected ones (in the key order of
  JavaScript objects), then wrong values, in the order of the schema's properties. A value of a wrong type has only this
  issue.
- Compiling costs a hundred microseconds and is done at the first call, never when a process starts.
- Checking costs a bounded time, whatever the schema and the arguments are (schema_limits.py). So patterns run in linear
  time. One that needs look-around or a back reference cannot, and is left unchecked. A bundle with one is refused
  (kernel/bundle/rules/tools.py), so that only servers and extensions bring one.

Source: docs/design/tools.md section 3; requirements SCHEMA-10, SCHEMA-11, CALL-04; recorded parity `executor/*`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import jsonschema_rs

from goondan.schemas.bundle.json_values import json_type, rename_aliases
from goondan.schemas.bundle.schema_limits import Path, SchemaLimits, TooCostly
from goondan.schemas.wire import codec, frames
from goondan.schemas.wire.errors import GoondanError, fail, tool_error

#: Issues named in one message; the rest is a count. More helps no model, and the message is cut anyway.
MAX_ISSUES: Final = 5
#: A worded issue is at most this long: a schema's own keywords (enum, pattern) can be of any length.
MAX_ISSUE_CHARS: Final = 300
#: Largest array index as JavaScript orders keys: such keys come first, by number.
_MAX_INDEX_KEY: Final = 2**32 - 2
#: Stands for the value in the library's own wording, so that no issue repeats what may be long or secret.
_MASK: Final = "value"

#: The issue of arguments that are not checked at all, and of those that are wrong somewhere.
TOO_MUCH: Final = (
    "args: checking so many values against this schema could take too long; send fewer or shorter values in one call"
)
UNWORDED: Final = "args: they do not fit the schema; with this schema it cannot be said where"
#: What is wrong with a pattern that cannot run in linear time, and what helps.
LOOK_AROUND: Final = "the pattern uses look-around or a back reference, whose time to match nothing bounds"
LOOK_AROUND_HINT: Final = "Write it without (?=, (?!, (?<=, (?<! and \\1, or check this in the handler."


class ArgumentChecker:
    """The schema and aliases of one tool. Made at no cost; compiled at the first `apply`."""

    __slots__ = ("_aliases", "_is_valid", "_limits", "_parameters", "_validator", "unchecked")

    def __init__(self, parameters: dict[str, Any] | None, aliases: Mapping[str, str]) -> None:
        self._parameters = parameters
        self._aliases = dict(aliases)
        self._validator: Any = None
        self._is_valid: Any = None
        self._limits: Any = None
        #: The patterns that are not checked, each by its place in the schema. Known once the schema is compiled.
        self.unchecked: list[str] = []

    def apply(self, args: Any, size: int | None = None) -> tuple[dict[str, Any], list[str]]:
        """Rename aliases and check: the arguments to send, and the issues in their order (empty: valid). `size` is
        their size as msgpack (bytes). None: it is computed.

        `args` is never changed in place. Arguments that are no object are one issue; the returned ones are then {}.
        Arguments that could take too long to check are refused, with one issue that says so. Raises GoondanError as
        `compile` does.
        """
        if type(args) is not dict:
            return {}, [f"args: expected object but got {json_type(args)}"]
        if self._aliases:
            args = rename_aliases(args, self._aliases)
        if self._parameters is None:
            return args, []
        if self._is_valid is None:
            self.compile()
        try:
            if not self._limits.is_affordable(args, _size(args) if size is None else size):
                return args, [TOO_MUCH]
            if self._is_valid(args):
                return args, []
            return args, self._issues(args) if self._limits.can_be_worded(args) else self._first_issue(args)
        except (ValueError, TypeError, RecursionError) as error:
            return args, [f"args: not JSON: {_first_line(error)}"]  # a lone surrogate, a key that is no string, …

    def compile(self) -> None:
        """Raises GoondanError E_CONFIG_SCHEMA when `parameters` is no JSON Schema, or costs too much for any value."""
        schema = self._parameters
        if schema is None:
            return
        if not isinstance(schema, dict):
            raise fail("E_CONFIG_SCHEMA", f"the parameters are no JSON Schema: {json_type(schema)}")
        limits, costly = limits_of(schema)
        if costly is not None and not costly.lost:
            raise _too_costly(costly)
        try:
            validator, unchecked = _lenient_validator(schema, limits)
        except (ValueError, TypeError, RecursionError) as error:
            raise fail("E_CONFIG_SCHEMA", f"the parameters are no JSON Schema: {_first_line(error)}") from None
        if costly is not None:
            raise _too_costly(costly)
        self._limits = limits
        self._validator = validator
        self._is_valid = validator.is_valid
        self.unchecked = ["/".join(map(str, path))[:MAX_ISSUE_CHARS] for path in unchecked]

    def _first_issue(self, args: dict[str, Any]) -> list[str]:
        """The message for arguments that are too large to look for every fault."""
        if not self._limits.forks:  # then the first one is found without the others
            try:
                self._validator.validate(args)
            except jsonschema_rs.ValidationError as error:
                return self._worded(args, [error])[:1] or [UNWORDED]
        return [UNWORDED]

    def _issues(self, args: dict[str, Any]) -> list[str]:
        return self._worded(args, self._validator.iter_errors(args)) or [UNWORDED]  # never none: that means valid

    def _worded(self, args: dict[str, Any], errors: Iterable[Any]) -> list[str]:
        by_path: dict[tuple[str, ...], list[Any]] = {}  # the library takes a name of digits for an index
        for error in errors:
            by_path.setdefault(tuple(map(str, error.instance_path)), []).append(error)
        issues: list[str] = []
        _collect(args, self._parameters, (), by_path, self._parameters, issues)
        return issues


def limits_of(schema: Any) -> tuple[SchemaLimits | None, TooCostly | None]:
    """What checks cost, or why that is too much. It is computed before the validator is made, which may not survive the
    schema.
    """
    try:
        return SchemaLimits(schema), None
    except TooCostly as error:
        return None, error


def make_validator(schema: dict[str, Any], mask: str) -> Any:
    """The library's validator: it fetches nothing, and runs patterns in linear time. Raises as the library does."""
    make: Any = jsonschema_rs.validator_for if "$schema" in schema else jsonschema_rs.Draft202012Validator
    return make(schema, mask=mask, offline=True, pattern_options=jsonschema_rs.RegexOptions())


def backtracking(limits: SchemaLimits) -> list[Path]:
    """The places of patterns that only an engine with backtracking can match: with look-around or back references."""
    return [path for path, pattern in limits.patterns if _backtracks(pattern)]


def _backtracks(pattern: str) -> bool:
    linear, fancy = jsonschema_rs.RegexOptions(), jsonschema_rs.FancyRegexOptions()
    return not _compiles(pattern, linear) and _compiles(pattern, fancy)


def _compiles(pattern: str, options: Any) -> bool:
    try:
        jsonschema_rs.Draft202012Validator({"pattern": pattern}, offline=True, pattern_options=options)
    except ValueError:
        return False
    return True


def _lenient_validator(schema: dict[str, Any], limits: SchemaLimits | None) -> tuple[Any, list[Path]]:
    """The validator without the patterns that it cannot run in linear time, and their places."""
    try:
        return make_validator(schema, _MASK), []
    except ValueError:
        unchecked = backtracking(limits) if limits is not None else []
        if not unchecked:
            raise
    schema = copy.deepcopy(schema)
    for path in unchecked:
        around: Any = schema
        for step in path[:-1]:
            around = around[step]
        del around[path[-1]]
        if path[-2:-1] == ("patternProperties",):
            around[""] = True  # any name may have matched, which `additionalProperties` then said nothing of
    return make_validator(schema, _MASK), unchecked


def _too_costly(error: TooCostly) -> GoondanError:
    place = "/".join(map(str, error.path))[:MAX_ISSUE_CHARS]
    return fail("E_CONFIG_SCHEMA", f"the parameters cost too much to check, at '{place}': {error.message}")


def compile_arguments(parameters: dict[str, Any] | None, aliases: Mapping[str, str]) -> ArgumentChecker:
    """The checker of one tool. `parameters` None: any object is valid. `aliases` maps alias to canonical name."""
    return ArgumentChecker(parameters, aliases)


def invalid_arguments(tool: str, issues: list[str], parameters: dict[str, Any] | None) -> frames.ToolError:
    """The error result of a call whose arguments have `issues` (at least one). The message is not cut to any limit."""
    listed = "; ".join(issues[:MAX_ISSUES])
    rest = f"; +{len(issues) - MAX_ISSUES} more issues" if len(issues) > MAX_ISSUES else ""
    schema = parameters if isinstance(parameters, dict) else {}
    required, properties = schema.get("required"), schema.get("properties")
    allowed = ", ".join(properties) if isinstance(properties, dict) else ""
    needed = ", ".join(map(str, required)) if isinstance(required, list) else ""
    return tool_error(
        "E_TOOL_INVALID_ARGS",
        f"Invalid arguments for tool '{tool}': {listed}{rest}",
        name="ToolInputValidationError",
        suggestion=(
            "Check the input schema and write the arguments again. "
            f"required=[{needed or '(none)'}], allowed=[{allowed or '(none)'}]"
        ),
    )


def _size(args: dict[str, Any]) -> int:
    """What arguments take as msgpack (bytes)."""
    try:
        return len(codec.encode_value(args))
    except OverflowError:  # an integer that the wire cannot carry; whoever sends it says so
        return sys.maxsize


def _collect(
    value: Any, schema: Any, path: Path, by_path: dict[tuple[str, ...], list[Any]], root: Any, issues: list[str]
) -> None:
    """Word the errors at `path`, then those below it, children in the order of the schema's properties."""
    here = by_path.pop(tuple(map(str, path)), None)
    if here is not None and not _word(value, path, here, root, issues):
        return
    if not by_path:
        return
    if isinstance(value, dict):
        properties = schema.get("properties") if isinstance(schema, dict) else None
        declared = properties if isinstance(properties, dict) else {}
        for key in [*(k for k in declared if k in value), *(k for k in value if k not in declared)]:
            _collect(value[key], declared.get(key), (*path, key), by_path, root, issues)
    elif isinstance(value, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        for index, item in enumerate(value):
            _collect(item, items, (*path, index), by_path, root, issues)


def _word(value: Any, path: Path, errors: list[Any], root: Any, issues: list[str]) -> bool:
    """Add the issues of one place. False: its type is wrong, so its other issues do not matter."""
    name = _spell(path)
    kinds = {error.kind.name: error for error in reversed(errors)}
    if "type" in kinds:
        expected = "|".join(_types(kinds["type"], root))
        issues.append(f"{name}: expected {expected} but got {json_type(value)}")
        return False
    issues += [f"{name}.{e.kind.property}: required property is missing" for e in errors if e.kind.name == "required"]
    extra = [key for e in errors if e.kind.name in _UNEXPECTED for key in e.kind.unexpected]
    issues += [f"{name}.{key}: unexpected property" for key in _javascript_order(dict.fromkeys(extra), value)]
    for error in errors:
        if error.kind.name == "enum":
            options = ", ".join(json.dumps(o, ensure_ascii=False, separators=(",", ":")) for o in error.kind.options)
            issues.append(_short(f"{name}: value must be one of [{options}]", len(name)))
        elif error.kind.name != "required" and error.kind.name not in _UNEXPECTED:
            issues.append(_short(f"{name}: {error.message}", len(name)))
    return True


_UNEXPECTED: Final = frozenset({"additionalProperties", "unevaluatedProperties"})


def _types(error: Any, root: Any) -> list[str]:
    """The types as the schema lists them (the library sorts them)."""
    node = root
    for step in error.schema_path:
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            return list(error.kind.types)  # behind a $ref
    if isinstance(node, str):
        return [node]
    return [str(item) for item in node] if isinstance(node, list) else list(error.kind.types)


def _javascript_order(keys: Mapping[str, None], value: Any) -> list[str]:
    """`keys` as JavaScript enumerates them: array indexes by number, then the others as they were written."""
    written = [key for key in value if key in keys] if isinstance(value, dict) else list(keys)
    indexes = sorted((key for key in written if _is_index(key)), key=int)
    return indexes + [key for key in written if not _is_index(key)]


def _is_index(key: str) -> bool:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        return False
    return (key == "0" or key[0] != "0") and int(key) <= _MAX_INDEX_KEY


def _spell(path: Path) -> str:
    return "args" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:MAX_ISSUE_CHARS]


def _short(issue: str, name_chars: int) -> str:
    limit = name_chars + MAX_ISSUE_CHARS
    return issue if len(issue) <= limit else issue[: limit - 3] + "..."
