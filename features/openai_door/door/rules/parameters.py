"""Which parameters OpenAI's doors take, which they pass over, and which they refuse. parameters.json has the table.

A parameter that would change what the answer means is refused with its reason, so that nobody believes that it was
obeyed. One that tunes how a model writes is passed over: many programs send it always, and how an agent's model writes
is said in its Model. A value that changes nothing (`n: 1`, `tools: []`) is taken everywhere. What OpenAI does not know
either is refused.

Source: https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Literal

from msgspec import Struct

from goondan.features.openai_door.door.rules.faults import refused

#: What of a schema only describes.
_WORDS: Final = frozenset({"title", "description", "$schema", "$id", "examples", "$comment", "default"})
_FORMS: Final[Mapping[str, Any]] = {"text": str, "number": int | float, "integer": int, "list": list, "object": dict}


class Parameter(Struct, frozen=True):
    """What becomes of one parameter."""

    #: `used`; `ignored`: any value of its form is passed over; `refused`: only values that change nothing are taken.
    does: Literal["used", "ignored", "refused"]
    #: The form of its values, beside null (`_fits`).
    form: str
    #: Why, in one sentence.
    why: str = ""
    #: Of one that is refused: the values that change nothing, beside null.
    same: list[Any] = []


#: The parameters of each door, by their names.
Table = Mapping[str, Parameter]


def check(given: Mapping[str, Any], table: Table) -> None:
    """Raise RefusedError for a parameter of another form, one that is refused, and one that nobody knows."""
    for name, value in given.items():
        row = table.get(name)
        if row is None:
            raise refused(f"Unrecognized request argument supplied: {name[:64]}", name[:64], "unknown_parameter")
        if value is not None and not _fits(value, row.form):
            raise refused(f"Invalid type for '{name}': it takes {row.form}, or null.", name, "invalid_type")
        if row.does == "refused" and value is not None and value not in row.same:
            raise refused(f"'{name}' is not supported here. {row.why}", name, "unsupported_parameter")


def _fits(value: Any, form: str) -> bool:
    """Whether a value is a `flag`, has another form, or one of `FORM or FORM`. `any`: every value will do."""
    if form in ("flag", "any") or isinstance(value, bool):
        return form == "any" or (form == "flag" and isinstance(value, bool))
    return any(isinstance(value, _FORMS[one]) for one in form.split(" or "))


def check_format(wanted: Any, param: str, schema: Mapping[str, Any] | None) -> None:
    """Raise RefusedError unless answers have this form already. `wanted`: the value of `response_format`, or of
    `text.format`. `schema`: the JSON Schema of the agent's answers, None without one.
    """
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if wanted is None or kind == "text" or (kind == "json_object" and schema is not None):
        return
    inner = wanted.get("json_schema", wanted) if kind == "json_schema" else None
    asked = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None or asked is None or not _same(asked, schema):
        message = (
            f"'{param}' is not supported here, unless it asks for the form that the agent's answers have anyway. That "
            "is said in its bundle (`output.schema`)."
        )
        raise refused(message, param, "unsupported_parameter")


def _same(one: Any, other: Any) -> bool:
    with suppress(RecursionError):
        return bool(_bare(one) == _bare(other))
    return False


def _bare(schema: Any, *, names: bool = False) -> Any:
    """A schema without what only describes. `names`: the keys of this object are names of fields, or of definitions."""
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if names or key not in _WORDS}
        return {key: _bare(value, names=not names and key in ("properties", "$defs")) for key, value in kept.items()}
    if isinstance(schema, list):
        return sorted(map(_bare, schema), key=str)
    return schema
