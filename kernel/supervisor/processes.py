"""All processes of a kernel but the supervisor: their starts, the broker's messages about them, and their ends in two
stages, before the kernel ends itself or takes its own place.

The tool host takes longest to start, and needs nothing of the bundle until then. So it starts while the bundle is being
opened (`begin_tool_host`), and gets its part of the bundle when that is known (services.py).

At the end lifecycle.py decides (`step_stop`). The broker asks the agents to leave, so that they can release their
events. When there is no broker, they get SIGTERM.

Source: docs/design/processes.md section 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from goondan.kernel import lock, supervisor_client
from goondan.kernel.ahead import Ahead
from goondan.kernel.premises import Premises
from goondan.kernel.supervisor import lifecycle, reaping
from goondan.kernel.supervisor.agents import Agents
from goondan.kernel.supervisor.options import Options
from goondan.kernel.supervisor.programs import programs
from goondan.kernel.supervisor.services import TOOLHOST_NAME, Launches, Services, Workers
from goondan.schemas.bundle import address, launch
from goondan.schemas.wire import control as messages
from goondan.schemas.wire import errors, frames, tokens
from goondan.schemas.worker.tool_host_reports import WorkerNews

if TYPE_CHECKING:
    from goondan.kernel.supervisor.control_link import ControlLink

#: How long agents get to come to a step boundary and to release their events (seconds). They are killed some time
#: later: by then the broker must have its events back.
DRAIN_S: Final = 2.5
#: The same before a restart (seconds). It is longer, because a call that is cut off has an unknown outcome, and turns
#: go on right after the restart.
RESTART_GRACE_S: Final = 8.0

_log = logging.getLogger("supervisor")


class Ending:
    """The state of the end.

    - `begun`: processes are being ended.
    - `for_good`: the kernel ends with them.
    - `hurry`: no command waits for work that still runs.
    - `changed` must be set when a process has ended, or one of the others has changed.
    """

    def __init__(self) -> None:
        self.begun = False
        self.for_good = False
        self.hurry = False
        self.changed = asyncio.Event()

    async def run(self, services: Services, agents: Agents, control: ControlLink | None) -> tuple[str, ...]:
        """End all processes. Returns the groups that not even SIGKILL has ended in time."""
        loop = asyncio.get_running_loop()
        state: lifecycle.Stopping | None = None
        patience = None if self.for_good else RESTART_GRACE_S + lifecycle.KILL_WAIT_S
        if not agents.busy:  # else the first stage begins with it
            agents.roster.stop(loop.time())
        while True:
            self.changed.clear()
            alive = _alive(services, agents)
            if patience is not None and self.for_good:  # a restart that has become an end
                patience = None
                if state is not None and state.index == 0:
                    until = loop.time() + lifecycle.STOP_ORDER[0][1]
                    state = lifecycle.Stopping(state.index, state.killed, min(state.until, until))
                    self._drain(services, control)
            state, actions = lifecycle.step_stop(state, alive, loop.time(), hurry=self.hurry, turns_s=patience)
            for action in actions:
                if isinstance(action, lifecycle.Finished):
                    return action.left
                self._perform(action, loop.time(), services, agents, control)
            if state is None:
                raise AssertionError("a stop that ends says Finished")
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it forgets to be cancelled when the change comes that very moment.
                async with asyncio.timeout_at(state.until):
                    await self.changed.wait()

    def _perform(
        self, action: lifecycle.StopAction, now: float, services: Services, agents: Agents, control: ControlLink | None
    ) -> None:
        match action:
            case lifecycle.TerminateGroup("turns"):
                agents.perform(agents.roster.stop(now, told=self._drain(services, control)))
                services.forewarn("toolhost")
                services.terminate("forkserver")  # nothing starts any more
            case lifecycle.TerminateGroup(group):
                for role in services.group(group):
                    services.terminate(role)
            case lifecycle.KillGroup("turns" | "agents"):
                _log.warning("agents did not leave in time")
                agents.perform(agents.roster.kill_all(now))
            case lifecycle.KillGroup(group):
                _log.warning("%s did not leave in time", group)
                for role in services.group(group):
                    services.kill(role)

    def _drain(self, services: Services, control: ControlLink | None) -> bool:
        """Let the broker ask the agents to leave. False when there is no broker."""
        if control is None or not control.ready or services.state["broker"].phase != "ready":
            return False
        if self.for_good:
            control.tell(
                messages.Drain(round((lifecycle.HURRY_S if self.hurry else DRAIN_S) * 1000), "orchestrator_shutdown")
            )
        else:
            control.tell(messages.Drain(round(RESTART_GRACE_S * 1000), "restart"))
        return True


def _alive(services: Services, agents: Agents) -> frozenset[str]:
    there = {"turns": agents.busy, "agents": bool(agents.roster.live)}
    groups = (group for stage, _ in lifecycle.STOP_ORDER for group in stage)
    return frozenset(one for one in groups if there.get(one) or any(map(services.alive, services.group(one))))


#: How long a broker may answer nothing before it is replaced (seconds): longer than any disk makes it wait.
HANG_S: Final = 20.0
#: How long the last unknown children may take to die after all other processes have ended (seconds).
LAST_CHILDREN_S: Final = 1.0


class Processes:
    """The processes of one kernel. `ready` is set when all processes that must run are ready. Otherwise it is set to
    the reason why they never will be.

    `about_bundle` gets what the broker says about the bundle. `broker_here` is called when a broker has connected,
    which has not got the messages to the broker before it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: Options,
        premises: Premises,
        secret: bytes,
        ending: Ending,
        ahead: Ahead,
        *,
        about_bundle: Callable[[messages.AboutBundle], None],
        broker_here: Callable[[], None],
    ) -> None:
        """Tokens are signed with `secret`."""
        self.ready: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._about_bundle = about_bundle
        self._broker_here = broker_here
        self._premises = premises
        self._ending = ending
        self._ahead = ahead
        self._logs = f"{options.state_dir}/logs"
        self._welcomed = False
        self._host_failures = 0  # starts of the tool host, one after another, that never became ready
        self._control: ControlLink | None = None
        self.reaper = reaping.Reaper(loop, lambda pid: pid in ahead or self._is_waiting_agent(pid))
        self._workers = Workers(loop)
        self.launches = Launches(options, premises, secret, self._workers.listen)
        self.agents = Agents(
            loop,
            self.reaper,
            endpoint=self.launches.endpoint("agent"),
            mint=self.launches.agent_token,
            log_path=lambda principal: self._log_path(f"agent-{address.path_segment(principal.name)}"),
            tell=self.tell,
            on_change=ending.changed.set,
            on_hang=lambda: self._services.kill("forkserver"),
        )
        self._services = Services(
            loop,
            self.reaper,
            self.launches,
            on_up=self._service_up,
            on_down=self._service_down,
            on_failed=self._service_failed,
            roles=("broker", "forkserver", "toolhost"),
            on_demand=tuple(programs()),
            log_path=self._log_path,
            inherited_fds=(premises.alive_fd,),
            ahead=ahead,
        )

    # --- the start

    def begin_tool_host(self) -> None:
        """Start the tool host. It waits for the bundle when it cannot go on without it."""
        self.reaper.start()
        self._services.want("toolhost")

    def begin(self, plan: launch.KernelPlan) -> None:
        """Start all processes that must always run, as the plan says."""
        self.launches.know(plan)
        self._services.begin()
        # Imported now, while the three processes start. Not later: a restart must not meet the files of an update.
        from goondan.kernel.supervisor.control_link import ControlLink

        self._control = ControlLink(
            self.launches.endpoint("control"),
            self.launches.token(tokens.Claims("control")),
            on_message=self._broker_said,
            inventory=self.agents.roster.inventory,
            on_welcome=self._control_up,
        )

    # --- the end

    async def end(self) -> None:
        """End all processes, in bounded time. Every stage has its time, then what is left is killed. The last unknown
        children follow.
        """
        self._services.end_restarts()
        self._ahead.close()
        self.launches.close()
        left = await self._ending.run(self._services, self.agents, self._control)
        if left:
            _log.error("not even SIGKILL ended: %s", ", ".join(left))
        if self._control is not None:
            await self._control.end()
        self._workers.close()
        until = self._loop.time() + LAST_CHILDREN_S
        while self.reaper.sweep(self._loop.time(), patience=0.0) and self._loop.time() < until:
            await asyncio.sleep(lock.LEFTOVERS_POLL_S)
        self.reaper.stop()

    # --- while they run

    def tell(self, message: messages.ToBroker) -> None:
        """Send a message to the broker."""
        if self._control is not None:
            self._control.tell(message)

    def audit(self) -> None:
        """Compare the running processes with those that should run, in case an event was lost."""
        self.agents.audit()
        self._look_for_life()
        self.reaper.sweep_soon()

    def replace_broker(self) -> None:
        """End the broker. The next broker makes its sockets again, and the peers come back."""
        self._services.kill("broker")

    def servers(self) -> list[WorkerNews]:
        """How each session of an MCP server is."""
        return self._workers.servers()

    def infos(self, offset: float) -> list[supervisor_client.ProcessInfo]:
        """The processes, for `ps`. `offset` added to the loop's time gives the wall-clock time."""
        return self._services.processes(offset) + self.agents.processes(offset) + self._workers.processes()

    def _look_for_life(self) -> None:
        """Replace a broker that lives and says nothing: it hangs, and all its peers wait for it."""
        if self._control is None:
            return
        heard, ready_since = self._control.ping(), self._services.since["broker"]
        silence = self._loop.time() - max(heard, ready_since)
        if self._services.state["broker"].phase == "ready" and silence >= HANG_S:
            _log.error("the broker has said nothing for %.0f s", silence)
            self._services.kill("broker")

    # --- what services tell

    def _service_up(self, role: str) -> None:
        """A service is ready."""
        _log.info("%s is ready", role)
        if role == "toolhost":
            self._host_failures = 0
        if role == "broker" and self._control is not None:
            self._control.begin()
        elif role == "forkserver":
            channel = self.launches.take_fork_channel()
            if channel is not None:
                self.agents.fork_server_up(channel)
        self._maybe_ready()

    def _service_down(self, role: str, run: int, exit_cause: str) -> None:
        """The process of a service is gone."""
        self._ending.changed.set()
        if role == "toolhost":
            self._workers.close()
            principal = messages.Principal("toolhost", TOOLHOST_NAME)
            self.tell(messages.Exited(principal, run, exit_cause, self._ending.begun))
            self._host_failures += self._services.state[role].phase == "starting"
            if self._host_failures >= lifecycle.MAX_START_FAILURES:
                # Its start is tried again and again. Work that waits for it must not wait as long.
                self.tell(messages.SpawnFailed(principal, self._host_failures, exit_cause))
        elif role == "broker":
            if self._ending.begun:
                self.agents.perform(self.agents.roster.terminate_all())  # perhaps it has not asked them to leave
            if self._ending.for_good and not (self.agents.busy or self._services.alive("forkserver")):
                self._premises.clear()  # a disk may take milliseconds; the tool host takes some as well
        elif role == "forkserver":
            channel = self.launches.take_fork_channel()
            if channel is not None:
                channel.close()
            self.agents.fork_server_down()

    def _service_failed(self, error: frames.ErrorPayload) -> None:
        """A service cannot be started at all."""
        if not self.ready.done():
            self.ready.set_exception(errors.GoondanError(error))

    def _control_up(self) -> None:
        self._welcomed = True
        self._maybe_ready()
        self._broker_here()

    def _maybe_ready(self) -> None:
        if self._welcomed and self._services.proven and not self.ready.done():
            self.ready.set_result(None)

    # --- what the broker says

    def _broker_said(self, message: messages.ToSupervisor) -> None:
        if isinstance(message, messages.AboutBundle):
            self._about_bundle(message)
            return
        agents, services, now = self.agents, self._services, self._loop.time()
        if isinstance(message, messages.ProgramWanted):
            services.want(message.name)
        elif isinstance(message, messages.Wanted):
            agents.perform(agents.roster.want(message.principals, full=message.full, now=now))
        elif message.principal.role == "toolhost":
            if isinstance(message, messages.Kill) and services.state["toolhost"].run == message.launch:
                _log.warning("the tool host is killed: %s", message.reason)
                services.kill("toolhost")
        elif isinstance(message, messages.Retire):
            agents.perform(agents.roster.retire(message.principal, message.launch, now, done=message.done))
            self._ending.changed.set()
        else:
            _log.warning("agent %s is killed: %s", message.principal.name, message.reason)
            agents.perform(agents.roster.kill(message.principal, message.launch, now))

    # --- inside

    def _is_waiting_agent(self, pid: int) -> bool:
        """Whether an unknown child is an agent that the fork server keeps ready: then it holds the kernel's own lock.

        An orphan of a jail cannot hold the lock. Without its fork server such an agent ends by itself, or is ended.
        """
        return self._services.alive("forkserver") and self._premises.is_ours(pid)

    def _log_path(self, name: str) -> str:
        return f"{self._logs}/{name}.log"
