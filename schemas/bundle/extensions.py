"""What the kernel and an agent both know of extensions: the members of their `api`, and how a config fits its schema.
Pure.

The agent makes the object (agentproc/extensions/api.py); a test holds the two together. What features bring is in their
`bundle.py` (`API`).

An extension that declares no schema gets its config as it was written. With one, a config that does not fit is an error
where it is written, and `default` of top-level properties is filled in for what is left out.

Source: docs/extensions.md; requirements EXT-02, EXT-09, EXT-10.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from goondan.schemas.wire.errors import fail

#: Each member with what it has itself; None where that is not fixed.
API_MEMBERS: Final[Mapping[str, frozenset[str] | None]] = {
    "agent_name": None,
    "deny": None,
    "events": frozenset(("emit", "on", "once")),
    "ext_state": None,
    "extension": None,
    "instance": frozenset(("shared",)),
    "instance_key": None,
    "logger": frozenset(("debug", "error", "info", "log", "warn", "warning")),
    "pipeline": frozenset(("register",)),
    "pipelines": frozenset(("mutate", "wrap")),
    "state": frozenset(("get", "read", "set", "update")),
    "tools": frozenset(("bring", "register", "unregister")),
    "workdir": None,
}


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
