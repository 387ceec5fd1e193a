"""Starts the jails of one tool host, and gives back what they had when they are gone.

Beside the loop, what a jail will see is looked up and planned, and its write exposures are recorded. Then the jail is
launched, and its worker is told what to load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from goondan.schemas.bundle.launch import ServerSpec, ToolHostSpec, ToolSpec
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import ErrorPayload
from goondan.toolhost.calls.call_registry import Call
from goondan.toolhost.calls.session import JailSession
from goondan.toolhost.jails import server_jail, write_exposures
from goondan.toolhost.jails.jail import Jail, JailOwner
from goondan.toolhost.jails.launch import launch
from goondan.toolhost.jails.network import JailNetwork
from goondan.toolhost.lookup.folders import remove_placeholders
from goondan.toolhost.lookup.hiding import Hiding, as_it_is_now
from goondan.toolhost.lookup.jail_request import look_up
from goondan.toolhost.policy import launch_plan, subject
from goondan.toolhost.policy.plan import forks, plan
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.serving.live import LiveSession
from goondan.toolhost.traffic.rules import Layout

#: The system's message about a jail that did not start may name a long path; so many characters of it are kept.
MAX_REASON: Final = 1000
#: How long a killed jail's last process is waited for (seconds): it takes milliseconds.
CLOSE_S: Final = 3.0


class JailStarter:
    """Starts the jails of one tool host."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: ToolHostSpec,
        powers: Powers,
        environment: Mapping[str, str],
        exposures: write_exposures.WriteExposures | None,
    ) -> None:
        """`environment` holds the values that can be granted. Without `exposures` no write exposure is recorded."""
        self.powers = powers
        #: What is known of this host; None while no jail can be made.
        self.facts: subject.HostFacts | None = None
        self._loop = loop
        #: What the next jails are started by.
        self.spec = spec
        self._environment = environment
        #: The folders that jails can write to now.
        self.exposures = write_exposures.WriteExposures(None, powers) if exposures is None else exposures
        #: What forks the workers of servers, by the names of features.
        self.templates: dict[str, server_jail.TemplateLink] = {}
        #: How servers are asked first.
        self._eras = server_jail.Eras()

    def forks(self, tool: ToolSpec) -> bool:
        """Whether calls of this tool are forked in one jail, each behind walls of its own."""
        return self.facts is not None and forks(tool, self.facts)

    def fork_calls(self) -> None:
        """The walls around one call hold inside a jail: from now on a tool's forked calls share one jail."""
        if self.facts is not None:
            self.facts = msgspec.structs.replace(self.facts, nests=True)

    async def start(
        self, session: JailSession, call: Call, there: Iterable[LiveSession], owner: JailOwner, niceness: int
    ) -> LiveSession:
        """Start the jail of a session for this call. Raises GoondanError and OSError; then nothing is left of the jail.

        `there` are the sessions whose jails are there. `niceness`: see launch.launch.
        """
        tool, facts = call.tool, self.facts
        if facts is None:
            raise fail("E_SANDBOX_UNAVAILABLE", "no jail can be started")
        if tool.server is not None and tool.server.transport == "http":
            return await self._start_remote(session, tool, owner)
        tool = self._with_granted_variables(tool)
        await _last_one_ended(there, call.workdir)
        hiding = Hiding([])
        begun: list[list[str]] = []

        def make_plan() -> launch_plan.LaunchPlan:
            nonlocal hiding
            now = as_it_is_now(facts)
            request = look_up(
                tool,
                call.workdir,
                self.spec,
                now,
                self.powers,
                base=call.workdir_base,
                call_folder=call.folder,
            )
            try:
                made = plan(request, now)
                hiding = Hiding(made.hiding, now.absent)
            except BaseException:
                remove_placeholders(request.made, self.powers)
                raise
            self.exposures.begin(request.named, [place.path for place in request.guarded], request.made)
            begun.append(request.named)
            return made

        try:
            jail = await self._launch(make_plan, tool, owner, niceness)
            begun.pop()
        finally:
            for named in begun:  # of tries that came to nothing
                self.powers.offload.submit(partial(self.exposures.end, named))
        session.permissions = _permissions(tool)
        live = LiveSession(session, jail, tool, hiding)
        folder = None if call.folder is None else call.folder.path
        handshake = self._eras.handshake_first(tool)
        live.load(self._environment, owner, self._loop, folder=folder, handshake=handshake)
        return live

    def _with_granted_variables(self, tool: ToolSpec) -> ToolSpec:
        """A server with the variables that its sandbox names on top of its own: its worker cannot add them."""
        server = tool.server
        if server is None or not tool.sandbox.env:
            return tool
        granted = {name: self._environment[name] for name in tool.sandbox.env if name in self._environment}
        return msgspec.structs.replace(tool, server=msgspec.structs.replace(server, env={**granted, **server.env}))

    async def _launch(
        self, make_plan: Callable[[], launch_plan.LaunchPlan], tool: ToolSpec, owner: JailOwner, niceness: int
    ) -> Jail:
        """The jail of a tool, or that of a server with its worker. Raises GoondanError and OSError."""
        if tool.server is None:
            launched = await launch(make_plan, self.powers, niceness=niceness)
            return Jail(launched, owner, self.powers, self._loop)
        launched, forked, gate = await server_jail.launch_server(
            make_plan, self._template(tool.server), self.powers, niceness=niceness
        )
        return server_jail.ServerJail(launched, owner, self.powers, self._loop, forked, gate)

    async def _start_remote(self, session: JailSession, tool: ToolSpec, owner: JailOwner) -> LiveSession:
        """The worker of an http server. Raises GoondanError and OSError."""
        assert tool.server is not None
        network = server_jail.network_of(tool)
        ends = server_jail.Ends(jailed=False)
        forked = await server_jail.fork_worker(self._template(tool.server), ends)
        jail = server_jail.RemoteServer(ends, tool, owner, self.powers, self._loop, forked)
        session.permissions = _permissions(tool)
        live = LiveSession(session, jail, tool, Hiding([]))
        live.network = JailNetwork(network, Layout((), "", {}, {}))
        live.load(self._environment, owner, self._loop)
        return live

    def _template(self, server: ServerSpec) -> server_jail.TemplateLink:
        if server.worker not in self.templates:
            self.templates[server.worker] = server_jail.TemplateLink(server.worker, self._loop, self.powers)
        return self.templates[server.worker]

    def close(self) -> None:
        """End all workers of servers."""
        for template in self.templates.values():
            template.close()

    def ended(self, live: LiveSession) -> None:
        """The last process of this jail is gone."""
        if isinstance(live.jail, server_jail.ServerJail) and not live.jail.live:
            self._eras.ended_early(live.tool)
        self.powers.offload.submit(partial(self.exposures.end, live.named))


async def _last_one_ended(there: Iterable[LiveSession], workdir: str | None) -> None:
    """Wait for ending jails in this workdir. What they still write would count for the next jail, and change its files.

    Raises GoondanError E_SANDBOX_UNAVAILABLE when one does not end. Then Linux cannot kill it, for example while a disk
    does not answer.
    """
    try:
        async with asyncio.timeout(CLOSE_S):
            for live in list(there):
                if live.jail.dying and workdir is not None and live.jail.plan.workdir == workdir:
                    await live.gone.wait()
    except TimeoutError:
        message = f"the jail before this one does not end in {workdir}; it was waited for {CLOSE_S:g} s"
        suggestion = "Call again later, or in another instance. If it stays so, look for what its processes wait for."
        raise fail("E_SANDBOX_UNAVAILABLE", message, suggestion=suggestion) from None


def why_not(error: Exception) -> ErrorPayload:
    """The error of calls whose jail could not be started."""
    if isinstance(error, GoondanError):
        return error.info
    if isinstance(error, OSError):
        return error_payload("E_SANDBOX_UNAVAILABLE", str(error)[:MAX_REASON])
    return error_payload("E_INTERNAL", f"a jail could not be started: {type(error).__name__}")


def _permissions(tool: ToolSpec) -> Sequence[str]:
    """What the workers of a tool may ask. A shared jail is for everybody: it has none, whatever was asked for."""
    if tool.server is not None:
        return ("server",)  # its worker is ours, and asks in the name of the call that the server works on
    return () if tool.sandbox.isolation == "shared" else tool.sandbox.permissions
