"""The start of one jail for a tool: what it will see is looked up, its stay in the folders of others is put on record,
and it is launched. All but the launch happens beside the loop.
"""

from __future__ import annotations

from functools import partial

from schemas.launch import ToolHostSpec, ToolSpec
from toolhost import offload
from toolhost.calls.results import output_limit
from toolhost.jails.jail import Jail, Owner
from toolhost.jails.stays import Stays
from toolhost.policy.facts import look_up
from toolhost.policy.guarding import remove_placeholders
from toolhost.policy.hiding import Hiding, as_it_is_now
from toolhost.policy.launch_plan import LaunchPlan
from toolhost.policy.plan import plan
from toolhost.policy.subject import HostFacts
from toolhost.privileges.powers import Powers


async def start_jail(
    tool: ToolSpec, workdir: str | None, spec: ToolHostSpec, facts: HostFacts, powers: Powers, stays: Stays, *,
    owner: Owner, niceness: int, base: str | None = None, sized: bool = False,
) -> tuple[Jail, Hiding]:  # fmt: skip
    """Start it, and its stay, which is the caller's to end after the jail; what it must not see comes with it. Raises
    GoondanError and OSError: none is left then. `niceness`: see launch.launch. `base`: see
    look_up. `sized`: the workdir lies in a file system with a bound.
    """
    begun: list[list[str]] = []
    hiding = Hiding([])

    def make_plan() -> LaunchPlan:
        nonlocal hiding
        now = as_it_is_now(facts)
        request = look_up(tool, workdir, spec, now, powers, base=base, sized=sized)
        try:
            made = plan(request, now)
            hiding = Hiding(made.hiding, now.absent)
        except BaseException:
            remove_placeholders(request.made, powers)
            raise
        stays.begin(made.named, made.guarded, made.made)
        begun.append(made.named)
        return made

    limit = output_limit(tool.sandbox.limits.output_mb)
    started = False
    try:
        jail = await Jail.start(make_plan, owner, powers, output_limit=limit, name=tool.name, niceness=niceness)
        started = True
        return jail, hiding
    finally:
        for named in begun[:-1] if started else begun:  # of tries that came to nothing
            offload.soon(partial(stays.end, named))
