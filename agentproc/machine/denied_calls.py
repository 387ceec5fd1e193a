"""Calls that were refused: who refused each, and the line that would allow it (pure).

Source: docs/design/traces.md section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from goondan.schemas.bundle.address import SEPARATOR
from goondan.schemas.bundle.effective_config import tool_of
from goondan.schemas.bundle.launch import AgentSpec
from goondan.schemas.traces.turn_notes import RefusedDetail, Refuser
from goondan.schemas.wire.errors import CODES, GoondanError, fail, row_of

#: The code of an extension's refusal.
REFUSED: Final = "E_EXTENSION_DENIED"
#: Stands in its message, behind the extension.
_SAYS: Final = " refused it: "
#: The code of a refusal -> who refuses with it.
REFUSERS: Final[dict[str, Refuser]] = {
    "E_TOOL_NOT_IN_CATALOG": "catalog",
    "E_SANDBOX_DENIED": "grant",
    "E_FORBIDDEN": "grant",
    REFUSED: "extension",
}


def refused_by(extension: str, reason: str) -> GoondanError:
    """The error with which an extension refuses what goes on."""
    return fail(REFUSED, f"Extension/{extension}{_SAYS}{reason}")


def refusal(spec: AgentSpec, tool: str, code: str, message: str, suggestion: str | None) -> RefusedDetail | None:
    """The refusal that an error of this code tells of, for the agent of `spec`; None: it is none. `tool` is "" for a
    turn or a step.
    """
    by = REFUSERS.get(code) or row_of(code).refuser
    allow = suggestion or CODES.get(code, "")
    if by == "catalog":
        allow = _in_catalog(spec, tool)
    elif by == "extension":
        allow = f"the config or the code of {message.partition(_SAYS)[0]}, which decides"
    return RefusedDetail(by, code, message, allow, tool) if by else None


def unreachable(tool: str, hosts: Sequence[str]) -> RefusedDetail:
    """The refusal of connections of a call: it has the grants of its Tool. `hosts`: as "host:port"."""
    shown = ", ".join(hosts)
    allow = f"Tool/{tool.partition(SEPARATOR)[0]}: spec.sandbox.network: {{allow: [{shown}]}}"
    return RefusedDetail("grant", "E_SANDBOX_DENIED", f"not reachable from this sandbox: {shown}", allow, tool)


def _in_catalog(spec: AgentSpec, tool: str) -> str:
    if tool in spec.catalog:
        return f"an extension of Agent/{spec.name} has taken it out of this step, and can leave it in"
    found = next((item for item in spec.registry if item.name == tool), None)
    if found is None:
        return "nothing: there is no such tool (gdn tool list)"
    return f"Agent/{spec.name}: spec.tools: [Tool/{tool_of(found)}]"
