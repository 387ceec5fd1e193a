"""The start of one jail for a tool: what it will see is looked up, its stay in the folders of others is put on record,
and it is launched, beside the loop but for the launch. Then its worker is told what to load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from schemas.errors import GoondanError, error_payload, fail
from schemas.frames import ErrorPayload
from schemas.hosts import read_network
from schemas.launch import ToolHostSpec, ToolSpec
from toolhost.jails import cells
from toolhost.jails.jail import Jail, Owner
from toolhost.jails.network import JailNetwork
from toolhost.jails.stays import Stays
from toolhost.policy.facts import look_up
from toolhost.policy.guarding import remove_placeholders
from toolhost.policy.hiding import Hiding, as_it_is_now
from toolhost.policy.launch_plan import LaunchPlan
from toolhost.policy.plan import plan
from toolhost.policy.subject import HostFacts
from toolhost.privileges.powers import Powers
from toolhost.sessions.live import LiveSession
from toolhost.sessions.wording import worker_init
from toolhost.untrusted import output_limit

#: What the system says of a jail that could not be started may name a long path (characters).
MAX_REASON: Final = 1000


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
        stays.begin(request.named, [place.path for place in request.guarded], request.made)
        begun.append(request.named)
        return made

    limit = output_limit(tool.sandbox.limits.output_mb)
    started = False
    try:
        jail = await Jail.start(make_plan, owner, powers, output_limit=limit, name=tool.name, niceness=niceness)
        started = True
        return jail, hiding
    finally:
        for named in begun[:-1] if started else begun:  # of tries that came to nothing
            powers.offload.submit(partial(stays.end, named))


async def last_one_ended(there: Iterable[LiveSession], workdir: str | None, patience_s: float) -> None:
    """Wait for jails in this workdir that are being ended: what those still write to it would count as the growth of
    the next one, and would change files under it.

    Raises GoondanError E_SANDBOX_UNAVAILABLE when one does not end: the kernel cannot kill it, for example while a disk
    does not answer.
    """
    try:
        async with asyncio.timeout(patience_s):
            for live in list(there):
                if live.jail.dying and workdir is not None and live.jail.plan.workdir == workdir:
                    await live.gone.wait()
    except TimeoutError:
        message = f"the jail before this one does not end in {workdir}; it was waited for {patience_s:g} s"
        suggestion = "Call again later, or in another instance. If it stays so, look for what its processes wait for."
        raise fail("E_SANDBOX_UNAVAILABLE", message, suggestion=suggestion) from None


def load(
    live: LiveSession,
    tool: ToolSpec,
    environment: Mapping[str, str],
    owner: cells.Owner,
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Tell the worker what to load, with what it was granted of `environment`; it waits for its network, if it has one.

    A shared jail is everybody's, and has nothing of the environment.
    """
    jail = live.jail
    names = tool.sandbox.env if tool.sandbox.isolation != "shared" else []
    granted = {name: environment[name] for name in names if name in environment}
    if jail.plan.layout is not None:
        live.network = JailNetwork(read_network(tool.sandbox.network), jail.plan.layout)
        granted = {**jail.plan.layout.environment, **granted}
    limit = output_limit(tool.sandbox.limits.output_mb)
    init = worker_init(live, tool, granted, limit)
    if jail.plan.calls is None:
        jail.send(init)
    else:
        live.session.forks = True
        live.cells = cells.Cells(jail, owner, loop, limit, init)
        jail.usage.cells = live.cells.processes
    if live.network is not None:
        (live.cells or jail).hold()  # until its sockets are there


def why_not(error: Exception) -> ErrorPayload:
    """Why calls fail whose jail could not be started."""
    if isinstance(error, GoondanError):
        return error.info
    if isinstance(error, OSError):
        return error_payload("E_SANDBOX_UNAVAILABLE", str(error)[:MAX_REASON])
    return error_payload("E_INTERNAL", f"a jail could not be started: {type(error).__name__}")
