"""The config of an extension against its `spec.configSchema`: what does not fit, and what is filled in. Pure.

An extension that declares no schema gets its config as it was written. With one, a config that does not fit is an error
where it is written, and `default` of top-level properties is filled in for what is left out.

Source: requirements EXT-02, EXT-10.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from goondan.schemas.wire.errors import fail

#: The beginning of each issue of the checker of arguments, and the words for it here.
_ARGS: Final = "args"


def check_config(schema: dict[str, Any] | None, config: dict[str, Any]) -> list[str]:
    """What does not fit, one sentence each; empty: everything does. Raises GoondanError E_CONFIG_SCHEMA for a `schema`
    that is none, costs too much, or has a pattern that cannot run in linear time.
    """
    if schema is None:
        return []
    # It compiles schemas, which who has none need not import.
    from goondan.schemas.bundle.arguments import LOOK_AROUND, LOOK_AROUND_HINT, compile_arguments

    checker = compile_arguments(schema, {})
    _, issues = checker.apply(config)
    if checker.unchecked:
        message = f"at '{checker.unchecked[0]}': {LOOK_AROUND}"
        raise fail("E_CONFIG_SCHEMA", message, suggestion=LOOK_AROUND_HINT)
    return [f"config{issue.removeprefix(_ARGS)}" if issue.startswith(_ARGS) else issue for issue in issues]


def with_defaults(schema: dict[str, Any] | None, config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the defaults that the schema gives its top-level properties; a copy."""
    properties = (schema or {}).get("properties")
    if not isinstance(properties, dict):
        return dict(config)
    given = {
        name: copy.deepcopy(wanted["default"])
        for name, wanted in properties.items()
        if name not in config and isinstance(wanted, dict) and "default" in wanted
    }
    return {**given, **config}
