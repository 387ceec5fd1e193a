"""The bundled extension `approval`: a person decides about calls of tools.

Its config are the rules. The kernel reads them from the bundle, and the broker enforces them behind all middleware. So
nothing here could let a call through, and nothing that runs in an agent can take the rules back. What this module adds
is one line in the agent's log, so that who reads it knows that some calls wait.
"""

from __future__ import annotations

from typing import Any


def register(api: Any, config: dict[str, Any]) -> None:
    """Say what is in force."""
    actions = [rule["action"] for rule in config["rules"]]
    counted = ", ".join(f"{actions.count(action)} {action}" for action in ("ask", "deny", "allow"))
    line = f"{len(actions)} rules ({counted}); every other call: {config['default']}"
    api.logger.info(line)
