"""Finds out which sandbox this host can give: the best kind of jail is tried first, then the others.

The tool host starts with this survey, and `python -m goondan.toolhost.survey` prints it, so both always agree.

Source: docs/design/sandbox.md sections 3.7 and 7.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from goondan.schemas.errors import GoondanError, fail
from goondan.schemas.receipts import Wall
from goondan.schemas.tiers import Tier
from goondan.schemas.tool_host_reports import Obstacle
from goondan.toolhost.policy.reduced import MINIMUM_LANDLOCK
from goondan.toolhost.policy.subject import HostFacts
from goondan.toolhost.policy.tiers import ROWS
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.survey.diagnosis import Signs, explain, unknown_machine, without_bubblewrap, without_landlock
from goondan.toolhost.survey.probe import Probed, probe

#: The most of a short file of /proc or /sys that is read (bytes).
_MAX_SIGN: Final = 4096
#: The consequence when calls cannot be forked.
ALONE: Final = "Every call of a tool with `isolation: call` gets a jail of its own, which takes some 50 ms"


class Survey(Struct, frozen=True, kw_only=True):
    """The result of a survey."""

    #: The tier. None: no tool can run.
    tier: Tier | None
    #: The walls that the probe jail has, in the words of receipts.
    walls: list[Wall] = []
    #: Unusual things on this host, for the operator.
    notes: list[str] = []
    #: The reasons why the host cannot give the full tier.
    findings: list[Obstacle] = []
    #: The facts by which jails are made here. None: no jail can be made.
    facts: HostFacts | None = None

    @property
    def error(self) -> GoondanError:
        """The error for callers of tools: why no jail can be made. Call it only when there are no facts."""
        message = f"tools need a jail, and none can be made: {self.findings[0].problem}"
        return fail("E_SANDBOX_UNAVAILABLE", message, suggestion=self.findings[0].fix)


async def survey(powers: Powers, usual: HostFacts | GoondanError) -> Survey:
    """Try to make a jail, from the best kind downwards. Never raises when a host lacks something.

    `usual` are the facts of facts.gather.
    """
    if isinstance(usual, GoondanError):
        return Survey(tier=None, findings=[unknown_machine(usual.info.message)])
    signs = read_signs(powers, usual)
    if usual.landlock < 1:
        return Survey(tier=None, findings=[without_landlock(signs)])
    if not usual.bwrap:
        return await _reduced(usual, [without_bubblewrap(usual.lack or "")], powers)
    # Some hosts refuse the nested user namespace that --disable-userns needs. They are fine otherwise, because the
    # filter refuses new namespaces as well.
    kinds = [usual, replace(usual, disable_userns=False)]
    if signs.root:
        # Root needs no user namespace: the jail is made with root's powers, and drops them itself.
        rooted = replace(usual, user_namespaces=False)
        kinds += [rooted, replace(rooted, net_admin=False)]
    failed: list[Probed] = []
    for facts in kinds:
        if not facts.net_admin and "loopback" not in (failed[-1].problem or ""):
            break
        probed = await probe(facts, powers)
        if probed.problem is None:
            lack = None if facts.user_namespaces else failed[0].problem
            notes = _notes(facts, signs, lack=lack, unmapped=probed.unmapped)
            return Survey(tier=facts.tier, walls=ROWS[facts.tier].walls(facts), notes=notes, facts=facts)
        failed.append(probed)
    first, *others = (explain(failure.problem or "", signs, failure.fix) for failure in failed)
    return await _reduced(usual, [first, *(other for other in others if other.what != first.what)], powers)


async def _reduced(usual: HostFacts, found: list[Obstacle], powers: Powers) -> Survey:
    """Try the reduced tier, for tools that ask for no more. `found` are the reasons why there is no full tier."""
    first = found[0]
    can_be = first.what in ("bubblewrap", "user namespaces", "procfs")
    if powers.operator == 0 or usual.landlock < MINIMUM_LANDLOCK or not can_be:
        return Survey(tier=None, findings=found)
    facts = replace(usual, tier="reduced", bwrap="", bwrap_root=None, fix=first.fix, lack=first.problem)
    if (await probe(facts, powers)).problem is not None:
        return Survey(tier=None, findings=[first])
    return Survey(tier=facts.tier, walls=ROWS[facts.tier].walls(facts), findings=[first], facts=facts)


def _notes(facts: HostFacts, signs: Signs, *, lack: str | None, unmapped: str | None) -> list[str]:
    notes = []
    if lack is not None:
        notes.append(
            "Jails have no user namespace here: bubblewrap runs as root, in a root directory that holds nothing of "
            f"this host but what jails are made from, and each jail drops root before any tool code. The cause: {lack}"
        )
    if not facts.net_admin:
        notes.append("Tools with a network grant are refused: root lacks CAP_NET_ADMIN, and no jail has a loopback.")
    if unmapped is not None:
        notes.append(
            f"Owners of files cannot be shown as others here ({unmapped}). An instance's own workspace belongs to a "
            "user of its own; a --workdir or a write grant is refused until you give it to the user that the message "
            "names."
        )
    if not signs.root:
        notes.append(
            "All jails run under your own user id: their namespaces and Landlock separate them from each other."
        )
    if facts.landlock < 6:
        notes.append(
            f"Landlock version {facts.landlock}: without its scopes for signals and abstract sockets (Linux 6.12)."
        )
    return notes


def read_signs(powers: Powers, facts: HostFacts) -> Signs:
    """Read the signs of this host, which a jail does not show."""
    return Signs(
        release=os.uname().release,
        lsm=_read("/sys/kernel/security/lsm"),
        apparmor_userns=_read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"),
        userns_clone=_read("/proc/sys/kernel/unprivileged_userns_clone"),
        max_userns=_read("/proc/sys/user/max_user_namespaces"),
        container=next((path for path in ("/.dockerenv", "/run/.containerenv") if os.path.exists(path)), None),
        bwrap=facts.bwrap,
        root=powers.operator == 0,
    )


def _read(path: str) -> str | None:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as source:
        return source.read(_MAX_SIGN).strip()
    return None
