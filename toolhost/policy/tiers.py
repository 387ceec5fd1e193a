"""The table of sandbox tiers: what the jails of each are made of, the strongest first. Pure.

A tier has its name in schemas/worker/tiers.py, its plan in a module of this folder, a row here, and in survey/tiers.py
how a host is tried for it. Nothing else asks for a tier by its name.

Source: docs/design/sandbox.md section 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from goondan.schemas.wire.errors import fail
from goondan.schemas.worker.receipts import Wall
from goondan.schemas.worker.tiers import Tier, is_weaker
from goondan.toolhost.policy.launch_plan import LaunchPlan
from goondan.toolhost.policy.plan import plan_full, walls_full
from goondan.toolhost.policy.reduced import plan_reduced, walls_reduced
from goondan.toolhost.policy.subject import HostFacts, Request


class Row(NamedTuple):
    """One tier."""

    #: Makes the launch plan of one jail. Raises GoondanError for what the tier cannot give.
    plan: Callable[[Request, HostFacts], LaunchPlan]
    #: The walls of its jails on a host, in the words of receipts.
    walls: Callable[[HostFacts], list[Wall]]
    #: Whether a jail has namespaces and mounts of its own. Then bubblewrap makes it, and installs the filter.
    namespaces: bool


ROWS: Final[dict[Tier, Row]] = {
    "full": Row(plan_full, walls_full, namespaces=True),
    "reduced": Row(plan_reduced, walls_reduced, namespaces=False),
}


def plan(request: Request, host: HostFacts) -> LaunchPlan:
    """The launch plan of one jail.

    Raises GoondanError E_SANDBOX_UNAVAILABLE below the tool's `minTier`, and E_SANDBOX_DENIED for what cannot be given.
    """
    tool = request.tool
    least = tool.sandbox.min_tier
    if is_weaker(host.tier, least):
        lack = f": {host.lack}" if host.lack else ""
        text = f"the tool {tool.name} needs the {least} sandbox (minTier), and this host has the {host.tier} one{lack}"
        raise fail("E_SANDBOX_UNAVAILABLE", text, suggestion=host.fix)
    return ROWS[host.tier].plan(request, host)


def has_namespaces(tier: Tier) -> bool:
    """Whether jails of that tier have namespaces and mounts of their own."""
    return ROWS[tier].namespaces
