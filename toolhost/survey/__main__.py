"""`python -m goondan.toolhost.survey`: makes a jail, and prints as one JSON document which sandbox this host can give.

    {"tier": "full" | "reduced" | null, "walls": [NAME, …], "notes": [TEXT, …],
     "findings": [{"what", "problem", "fix"}, …],
     "limits": {"memoryMb": "cgroup" | "watched", …},
     "kernel": "6.18.0", "machine": "x86_64", "root": false, "user": 1000,
     "bwrap": PATH | null, "bwrapVersion": "0.11.0" | null, "landlock": 6}

`tier` is null when no tool can run. Then `findings` says why, and what would help. `walls` are the walls that the probe
jail has. `limits` names the mechanism of each limit of a jail. Both use the words of the receipts, and both are empty
without a jail. `root` says whether root has started the program. Then `user` is the user who makes jails: the tool
host's own user, or 0 where there is no such number. The exit status is 0 for every result.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from goondan.schemas.wire.errors import GoondanError
from goondan.toolhost.drop_privileges import drop_privileges
from goondan.toolhost.facts.host import landlock_abi
from goondan.toolhost.limits.table import mechanisms
from goondan.toolhost.policy.plan import has_namespaces
from goondan.toolhost.policy.subject import HostFacts
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.survey.tiers import ALONE, survey, why_calls_are_not_forked


async def report(powers: Powers, usual: HostFacts | GoondanError) -> dict[str, object]:
    """The document: the survey, and facts about the host for a person."""
    found = await survey(powers, usual)
    notes = [*found.notes]
    if found.facts is not None and has_namespaces(found.facts.tier):
        problem = await why_calls_are_not_forked(found.facts, powers)
        notes += [] if problem is None else [f"{ALONE}: {problem}."]
    facts = None if isinstance(usual, GoondanError) else usual
    return {
        "tier": found.tier,
        "walls": found.walls,
        "notes": notes,
        "findings": found.findings,
        "limits": {} if found.facts is None else mechanisms(found.facts.groups),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "root": powers.operator == 0,
        "user": os.geteuid(),
        "bwrap": (facts.bwrap or None) if facts else None,
        "bwrapVersion": (facts.bwrap_version or None) if facts else None,
        "landlock": landlock_abi(),
    }


def main() -> int:
    """Print the report. Returns 0, or 1 when root could not be given up."""
    try:
        powers, facts = drop_privileges()
    except OSError as error:
        print(f"goondan.toolhost.survey: cannot give up root's powers: {error.strerror or error}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(report(powers, facts))) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
