"""The bundled extension `approval`: a person decides about calls of tools.

Its config contains the rules. The kernel reads them from the bundle, and the broker enforces them behind all
middleware. So this module cannot let a call through, and nothing that runs in an agent can take the rules back. The
module only adds one line to the agent's log. Whoever reads the log then knows that some calls wait.
"""

from __future__ import annotations

from typing import Any


def register(api: Any, config: dict[str, Any]) -> None:
    """Log which rules are in force."""
    actions = [rule["action"] for rule in config["rules"]]
    counted = ", ".join(f"{actions.count(action)} {action}" for action in ("ask", "deny", "allow"))
    line = f"{len(actions)} rules ({counted}); every other call: {config['default']}"
    api.logger.info(line)
