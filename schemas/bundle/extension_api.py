"""The members of the `api` that an extension's `register` gets: what a check of its source may know.

The agent makes the object (agentproc/extensions/api.py); a test holds the two together. What features bring is in their
`bundle.py` (`API`).

Source: docs/extensions.md; requirement EXT-09.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Each member with what it has itself; None where that is not fixed.
API_MEMBERS: Final[Mapping[str, frozenset[str] | None]] = {
    "agent_name": None,
    "deny": None,
    "events": frozenset(("emit", "on", "once")),
    "ext_state": None,
    "extension": None,
    "instance": frozenset(("shared",)),
    "instance_key": None,
    "live_config": frozenset(("propose_patch",)),
    "logger": frozenset(("debug", "error", "info", "log", "warn", "warning")),
    "pipeline": frozenset(("register",)),
    "pipelines": frozenset(("mutate", "wrap")),
    "state": frozenset(("get", "read", "set", "update")),
    "tools": frozenset(("bring", "register", "unregister")),
    "workdir": None,
}
