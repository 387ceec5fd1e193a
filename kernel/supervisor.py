"""`python -m kernel.supervisor`: first process of a kernel, parent of all others.

It takes the lock, loads the bundle, starts broker, tool host and fork server side by side, keeps them and the wanted
agents running, and at the end sees every process gone. It decides nothing: lifecycle.py and roster.py do.

On `--ready-fd` it says one newline when the whole kernel is ready, or one line of JSON with the reason why it never
will be: `{"error": {…}, "problems": […]}`. When the other end of `--parent-fd` is closed it stops: whoever started
it is gone. If it is killed itself, everything below it is killed by its parent-death signal.

A restart in place ends every process below it and then replaces this program by a new one, under the same pid
(restarting/handover.py).

Source: docs/design/processes.md section 2.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from kernel import lock, paths, rundir
from kernel.agents import Agents
from kernel.bundle.opening import Opened
from kernel.ending import Ending
from kernel.launches import TOOLHOST_NAME, Launches
from kernel.log_bounds import bound_logs
from kernel.premises import Premises
from kernel.reaping import Reaper
from kernel.restarting.held import SIGNALS
from kernel.roster import MAX_START_FAILURES
from kernel.services import Launch, Services
from kernel.spawn import close_unknown_descriptors, report_start_failure
from kernel.state_root import open_state_root
from kernel.supervisor_client import ProcessInfo, rfc3339
from kernel.supervisor_options import Options, load_bundle, parse, resuming, watched_besides
from kernel.supervisor_socket import SupervisorSocket
from kernel.workers import Workers
from schemas.address import path_segment
from schemas.control import (
    AboutBundle,
    Exited,
    Inventory,
    Kill,
    Principal,
    Retire,
    SpawnFailed,
    ToBroker,
    TokensWanted,
    ToSupervisor,
    Wanted,
)
from schemas.errors import GoondanError, fail
from schemas.frames import ErrorPayload
from schemas.hidden import COPIES
from schemas.launch import KernelPlan
from schemas.secrecy import close_memory
from schemas.startup import (
    become_subreaper,
    close_to_others,
    raise_descriptor_limit,
    report_ready,
    set_process_name,
)
from schemas.tokens import OAUTH, SECRET_BYTES, Claims
from schemas.visible import visible_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.control_link import ControlLink
    from kernel.restarting.conductor import Conductor
    from kernel.restarting.handover import Handover
    from kernel.restarting.revision import Revision
    from kernel.trust.powers import Power

#: The backstop: agents are compared with the wanted set and logs with their bound this often (seconds).
BACKSTOP_S: Final = 5.0
#: How often the runtime directory is looked at (seconds): whoever misses it waits no longer (supervisor_client.py).
RUN_DIR_LOOK_S: Final = 1.0
#: A broker that answers nothing for this long is replaced (seconds): longer than any disk makes it wait.
HANG_S: Final = 20.0
#: A start that takes longer has failed (seconds). Loading a bundle and three processes take well under one.
START_S: Final = 30.0
#: How long the last unknown children may take to die after everything else has (seconds).
LAST_CHILDREN_S: Final = 1.0
#: Descriptors for thousands of agents: a pidfd each and a pipe while it starts.
WANTED_DESCRIPTORS: Final = 65536

_log = logging.getLogger("supervisor")


class Load(Protocol):
    """Opens a bundle."""

    def __call__(self, options: Options, running: Sequence[Power] | None) -> Opened: ...


class Supervisor:
    """One kernel. `load` opens the bundle that the options name; it raises GoondanError."""

    def __init__(self, options: Options, load: Load, resumed: Handover | None = None) -> None:
        """`resumed`: what the supervisor hands over whose place this one takes."""
        self._options = options
        self._load = load
        self._resumed = resumed
        #: Set at the end of `run` when another supervisor is to take this one's place.
        self.handover: Handover | None = None
        self._loop = asyncio.get_running_loop()
        self.shared = options.shared
        self.entry_agent: str | None = None
        self.model: str | None = None
        self.private_copy: str | None = None
        self._ending = Ending()
        self.holders: set[object] = set()
        self._held_once = resumed is not None and resumed.held_once
        self._parent_gone = resumed is not None and resumed.parent_gone
        self._bounding: asyncio.Future[None] | None = None
        self._host_failures = 0  # starts of the tool host in a row that never became ready
        self._started_at = time.time() if resumed is None else resumed.started_at
        self._restarts = 0 if resumed is None else resumed.restarts
        self._opened: Opened | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._stop: asyncio.Future[str] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._conductor: Conductor | None = None
        self._next: Revision | None = None  # what takes the place of all this
        self._turning_points: list[asyncio.Future[Any]] = [self._ready, self._stop]
        self._reaper = Reaper(self._loop, self._is_waiting_agent)
        self._workers = Workers(self._loop)
        self._launches: Launches | None = None
        self._welcomed = False
        self._premises: Premises | None = None
        self._services: Services | None = None
        self._agents: Agents | None = None
        self._control: ControlLink | None = None
        self._socket = SupervisorSocket(self)
        self._restoring: asyncio.Task[None] | None = None

    # --- the whole life

    async def run(self) -> int:
        """From the lock to the last process. 0 after an ordered stop, 1 when the start failed, 2 for a bad bundle.

        With `handover` set, the last process has ended, and the kernel goes on in a program that is given that.
        """
        options = self._options
        try:
            self._premises = self._enter()
        except GoondanError as error:
            self._report(error)
            return 1
        try:
            await self._begin(self._premises)
            reason = await self._stop
            _log.info("%s: %s", "stopping" if self.ending else "restarting", reason)
            return 0
        except GoondanError as error:
            return self._failed(error)
        except OSError as error:
            return self._failed(fail("E_STATE", f"{error.filename or options.state_dir}: {error.strerror}"))
        finally:
            await self._end(self._premises)

    def _enter(self) -> Premises:
        if self._resumed is not None:
            return Premises.resume(self._resumed.held)
        options = self._options
        state_root = paths.root_of(options.state_dir)
        for line in open_state_root(state_root, workspace=options.state_dir, make=True).mended:
            _log.warning("%s", visible_line(line))
        return Premises.enter(options.bundle, options.state_dir, options.run_dir)

    def _failed(self, error: GoondanError) -> int:
        """The start has failed: tell whoever waits; the exit status."""
        _log.error("the start failed: %s", error)
        self._ending.for_good = True
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()
        self._report(error)
        return 2 if error.info.code.startswith("E_CONFIG_") else 1

    async def _begin(self, premises: Premises) -> None:
        options, loop = self._options, self._loop
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a restart in place holds them back
        if options.parent_fd is not None:
            os.set_blocking(options.parent_fd, False)
            loop.add_reader(options.parent_fd, self._parent_said)
        await self._take_over(premises)
        opened = self._opened = self._open(options)
        plan, secret = opened.plan, os.urandom(SECRET_BYTES)
        launches = self._launches = Launches(options, plan, premises, secret, self._workers.listen)
        if self._stop.done():
            return
        if os.path.isdir(f"{options.state_dir}/{COPIES}"):
            from kernel.trust.private_copy import sweep

            sweep(options.state_dir, keep=plan.private_copy)
        if plan.private_copy:
            self.private_copy = plan.private_copy
            _log.warning("others can write to %s: its code runs from a copy, %s", plan.bundle, plan.private_copy)
        self._describe(plan)
        self._write_client_token(premises)
        self._reaper.start()
        self._start_processes(premises, launches, opened)
        await asyncio.wait(self._turning_points, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            self._ready.result()
        elif not self._stop.done():
            raise fail(
                "E_KERNEL_SLOW", f"the kernel was not ready within {START_S:g} s; see {self._log_path('supervisor')}"
            )
        if not self._stop.done():
            _log.info("ready" if self._resumed is None else "ready again after a restart")
            report_ready(options.ready_fd)
            options.ready_fd = None
            if self._agents is not None:
                self._agents.kernel_ready()
            gc.freeze()
            gc.enable()  # kernel/start.py turned it off
            self._backstop()
            if options.watch:
                self.conducting.watch()
            self._look_for_run_dir()

    def _describe(self, plan: KernelPlan) -> None:
        """Say in the record, and to commands, what runs."""
        self.entry_agent = plan.entry_agent
        if plan.entry_agent in plan.agents:
            from kernel.bundle.models import model_text

            self.model = model_text(plan.agents[plan.entry_agent].model)
            _log.info("%s talks to %s", plan.entry_agent, self.model)
        if self._premises is not None:
            self._premises.describe(plan.entry_agent, plan.revision)

    async def _take_over(self, premises: Premises) -> None:
        """Answer on the socket, and wait until nobody of a killed kernel is left."""
        options = self._options
        for reason in premises.unused:
            _log.warning("the runtime directory is %s: %s", premises.run_dir, reason)
        if self._resumed is None:
            self._listen(premises)
        else:
            self._socket.resume(self._resumed.listener_fd, self._resumed.waiting)
            if not premises.is_intact():
                premises.restore()
                self._socket.stop_listening()
                self._listen(premises)
        until = self._loop.time() + lock.LEFTOVERS_S
        while not premises.is_quiet():
            if self._loop.time() >= until:
                message = f"processes of an earlier kernel with the state in {options.state_dir} do not end"
                raise fail("E_KERNEL_RUNNING", message)
            await asyncio.sleep(lock.LEFTOVERS_POLL_S)
        premises.settle(keep=(rundir.SUPERVISOR_SOCKET,))
        try:
            os.makedirs(f"{options.state_dir}/logs", 0o700, exist_ok=True)
        except OSError as error:
            raise fail("E_STATE", f"{options.state_dir}: {error.strerror}") from None

    def _open(self, options: Options) -> Opened:
        """The bundle. What was checked before a restart began runs in any case. Raises GoondanError."""
        resumed = self._resumed
        if resumed is None:
            return self._load(options, None)
        if resumed.error is None:
            try:
                return self._load(options, resumed.powers)
            except GoondanError as error:
                _log.error("the bundle has changed again and may not run; what was checked before runs: %s", error)
        return resumed.checked()

    def _listen(self, premises: Premises) -> None:
        try:
            self._socket.open(premises.run_dir)
        except OSError as error:
            raise fail("E_RUN_DIR", f"{premises.run_dir}: {error.strerror}") from None

    def _write_client_token(self, premises: Premises) -> None:
        premises.write(rundir.CLIENT_TOKEN, self._launching.token(Claims("client", operator=True)).encode())

    def _start_processes(self, premises: Premises, launches: Launches, opened: Opened) -> None:
        self._agents = Agents(
            self._loop,
            self._reaper,
            endpoint=launches.endpoint("agent"),
            mint=launches.agent_token,
            log_path=lambda principal: self._log_path(f"agent-{path_segment(principal.name)}"),
            tell=self._tell,
            on_change=self._ending.changed.set,
            on_hang=lambda: self._kill_service("forkserver"),
        )
        self._services = Services(
            self._loop,
            self._reaper,
            self,
            roles=("broker", "forkserver", "toolhost"),
            on_demand=(OAUTH,),
            log_path=self._log_path,
            inherited_fds=(premises.alive_fd,),
        )
        self._services.begin()
        # Imported now, while the three processes start. Not later: a restart must not meet the files of an update.
        from kernel.control_link import ControlLink
        from kernel.restarting.conductor import Conductor
        from kernel.restarting.looks import Looks

        looks = Looks(self._loop, self._reaper, self._options, self._log_path("supervisor"))
        bundle, policy = self._options.bundle, self._options.policy
        root = paths.root_of(self._options.state_dir)
        self._conductor = Conductor(self, looks, self._agents, opened, bundle, watched_besides(root, bundle, policy))
        self._control = ControlLink(
            launches.endpoint("control"),
            launches.token(Claims("control")),
            on_message=self._broker_said,
            inventory=self._inventory,
            on_first=self._control_up,
        )

    async def _end(self, premises: Premises) -> None:
        """Bounded: every group gets its time, then it is killed; then the last unknown children, then the files."""
        self._ending.begun = True
        self._ending.for_good = self.ending or self._next is None
        if self._conductor is not None:
            self._conductor.close(for_good=self.ending)
        if self._services is not None and self._agents is not None:
            self._services.end_restarts()
            left = await self._ending.run(self._services, self._agents, self._control)
            if left:
                _log.error("not even SIGKILL ended: %s", ", ".join(left))
        if self._control is not None:
            await self._control.end()
        self._workers.close()
        until = self._loop.time() + LAST_CHILDREN_S
        while self._reaper.sweep(self._loop.time(), patience=0.0) and self._loop.time() < until:
            await asyncio.sleep(lock.LEFTOVERS_POLL_S)
        self._reaper.stop()
        if self._next is not None and self._opened is not None and not self.ending:
            await self._hand_over(premises, self._next, self._opened)
            return
        if not self._ended.done():
            self._ended.set_result(None)
        await self._socket.close()
        if self.private_copy is not None:
            from kernel.trust.private_copy import sweep

            sweep(self._options.state_dir)
        premises.leave()
        _log.info("stopped")

    async def _hand_over(self, premises: Premises, revision: Revision, opened: Opened) -> None:
        """Everything but this process has ended: what the next program needs."""
        from kernel.restarting.handover import Handover

        listener_fd, waiting = await self._socket.hand_over()
        self.handover = Handover(
            held=premises.held(),
            listener_fd=listener_fd,
            waiting=waiting,
            plan=revision.plan,
            powers=revision.powers,
            plan_before=msgspec.msgpack.encode(opened.plan),
            powers_before=opened.powers,
            reason=self._stop.result(),
            umask=self._options.umask,
            started_at=self._started_at,
            restarts=self._restarts + 1,
            held_once=self._held_once,
            parent_gone=self._parent_gone,
        )

    # --- services

    def prepare(self, role: str, run: int) -> Launch:
        """How to start a service."""
        return self._launching.prepare(role, run)

    def service_up(self, role: str) -> None:
        """A service is ready."""
        _log.info("%s is ready", role)
        if role == "toolhost":
            self._host_failures = 0
        if role == "broker" and self._control is not None:
            self._control.begin()
        elif role == "forkserver" and self._agents is not None:
            channel = self._launching.take_fork_channel()
            if channel is not None:
                self._agents.fork_server_up(channel)
        self._maybe_ready()

    def service_down(self, role: str, run: int, exit_cause: str) -> None:
        """A service is gone."""
        self._ending.changed.set()
        if role == "toolhost" and self._services is not None:
            self._workers.close()
            principal = Principal("toolhost", TOOLHOST_NAME)
            self._tell(Exited(principal, run, exit_cause, self.stopping))
            self._host_failures += self._services.state[role].phase == "starting"
            if self._host_failures >= MAX_START_FAILURES:
                # It is tried again for ever; what waits for it must not wait as long.
                self._tell(SpawnFailed(principal, self._host_failures, exit_cause))
        elif role == "broker":
            if self.stopping and self._agents is not None:
                self._agents.terminate_all()  # it may have died before it told them
        elif role == "forkserver":
            channel = self._launching.take_fork_channel()
            if channel is not None:
                channel.close()
            if self._agents is not None:
                self._agents.fork_server_down()

    def service_failed(self, role: str, error: ErrorPayload) -> None:
        """A service cannot be started at all."""
        if not self._ready.done():
            self._ready.set_exception(GoondanError(error))

    def _kill_service(self, role: str) -> None:
        if self._services is not None:
            self._services.kill(role)

    def _control_up(self) -> None:
        self._welcomed = True
        self._maybe_ready()

    def _maybe_ready(self) -> None:
        if self._ready.done() or not self._welcomed or self._services is None:
            return
        if self._services.proven:
            self._ready.set_result(None)

    # --- agents

    def _tell(self, message: Exited | SpawnFailed) -> None:
        if self._control is not None:
            self._control.tell(message)

    def _inventory(self) -> Inventory:
        if self._agents is None:
            raise AssertionError("the control link begins after the agents")
        return self._agents.roster.inventory()

    def _is_waiting_agent(self, pid: int) -> bool:
        """Whether an unknown child is an agent that the fork server keeps ready: it holds the kernel's own lock.

        A stray of a jail cannot hold it. Without its fork server such an agent ends by itself, or is ended.
        """
        if self._premises is None or self._services is None or not self._services.alive("forkserver"):
            return False
        return self._premises.is_ours(pid)

    def _broker_said(self, message: ToSupervisor) -> None:
        if isinstance(message, AboutBundle):
            self.conducting.heard(message)
            return
        agents, services, now = self._agents, self._services, self._loop.time()
        if agents is None or services is None:
            return
        if isinstance(message, TokensWanted):
            services.want(OAUTH)
        elif isinstance(message, Wanted):
            agents.perform(agents.roster.want(message.principals, full=message.full, now=now))
        elif message.principal.role == "toolhost":
            if isinstance(message, Kill) and services.state["toolhost"].run == message.launch:
                _log.warning("the tool host is killed: %s", message.reason)
                services.kill("toolhost")
        elif isinstance(message, Retire):
            agents.perform(agents.roster.retire(message.principal, message.launch, now))
        else:
            _log.warning("agent %s is killed: %s", message.principal.name, message.reason)
            agents.perform(agents.roster.kill(message.principal, message.launch, now))

    def _backstop(self) -> None:
        if self.stopping:
            return
        self._loop.call_later(BACKSTOP_S, self._backstop)
        if self._agents is not None and not self.stopping:
            self._agents.audit()
        self._look_for_life()
        self._reaper.sweep_soon()
        if self._bounding is None or self._bounding.done():
            # Sorting lines by their sources takes some tenths of a second when there is something to do.
            folder = f"{self._options.state_dir}/logs"
            self._bounding = self._loop.run_in_executor(None, bound_logs, folder)

    def _look_for_life(self) -> None:
        """A broker that lives and says nothing hangs, and everybody with it."""
        if self._control is None or self._services is None or self.stopping:
            return
        heard, ready_since = self._control.ping(), self._services.since["broker"]
        silence = self._loop.time() - max(heard, ready_since)
        if self._services.state["broker"].phase == "ready" and silence >= HANG_S:
            _log.error("the broker has said nothing for %.0f s", silence)
            self._services.kill("broker")

    def _look_for_run_dir(self) -> None:
        """Somebody of ours may have cleaned up: the kernel makes its runtime directory again, or ends."""
        if self.stopping:
            return
        self._loop.call_later(RUN_DIR_LOOK_S, self._look_for_run_dir)
        if self._premises is not None and not self._premises.is_intact():
            self._restoring = self._loop.create_task(self._restore(self._premises))

    async def _restore(self, premises: Premises) -> None:
        _log.error("the runtime directory %s was removed; it is made again", premises.run_dir)
        try:
            premises.restore()
            self._socket.stop_listening()
            self._listen(premises)
            if self._launches is not None:
                self._write_client_token(premises)
        except (GoondanError, OSError) as error:
            self.stop(f"the runtime directory cannot be made again: {error}")
            return
        self._kill_service("broker")  # its sockets are gone; the next one makes them, and its peers come back

    # --- what the socket needs

    @property
    def stopping(self) -> bool:
        """Whether its processes are being ended: for a restart, or because the kernel is (`ending`)."""
        return self._ending.begun

    @property
    def ending(self) -> bool:
        """Whether the kernel ends."""
        return self._ending.for_good

    def stop(self, reason: str) -> None:
        """Begin the end. Further calls change nothing, but that a restart becomes an end."""
        self._ending.begun = self._ending.for_good = True
        self._ending.changed.set()
        if not self._stop.done():
            self._stop.set_result(reason)

    async def when_ready(self) -> None:
        """Wait for the start to succeed; raises GoondanError when it has not. During a restart: for its end."""
        await asyncio.wait(self._turning_points, return_when=asyncio.FIRST_COMPLETED)
        if self.stopping and not self.ending:
            await asyncio.shield(self._ended)
        if not self._ready.done() or self.ending:
            raise fail("E_KERNEL_NOT_RUNNING", "the kernel is stopping")
        self._ready.result()
        self._held_once = True

    async def restart(self, reason: str, *, fresh: bool) -> None:
        """Restart in place, if the bundle may run. Returns only in the program that comes after; raises GoondanError:
        E_RESTART_REFUSED, E_KERNEL_NOT_RUNNING, and what is wrong with the bundle.
        """
        await self.conducting.restart(reason, fresh=fresh)
        await asyncio.shield(self._ended)
        raise fail("E_KERNEL_NOT_RUNNING", "the kernel is stopping")

    @property
    def conducting(self) -> Conductor:
        """What restarts it. Raises GoondanError E_RESTART_REFUSED before there is such a thing."""
        if self._conductor is None:
            raise fail("E_RESTART_REFUSED", "the kernel is still starting")
        return self._conductor

    def revise(self, opened: Opened) -> None:
        """Another revision is the one that runs: processes that start from now on are of it."""
        self._opened, self._launching.plan = opened, opened.plan
        self._describe(opened.plan)

    @property
    def is_ready(self) -> bool:
        """Whether it has started."""
        return self._ready.done()

    def begin_restart(self, revision: Revision, reason: str) -> None:
        """End every process, then go on as the program that comes after."""
        self._ending.begun, self._next = True, revision
        self._stop.set_result(reason)

    def answer(self, message: ToBroker) -> None:
        """Tell the broker."""
        if self._control is not None:
            self._control.tell(message)

    async def restarted(self) -> None:
        """Wait for the end of the restart that this program began with; raises GoondanError when it failed."""
        await self.when_ready()
        if self._resumed is not None and self._resumed.error is not None:
            raise GoondanError(self._resumed.error)

    def released(self, *, hurry: bool = False) -> None:
        """A kernel that a call started for itself ends with its last user, at once if that gave up (`hurry`)."""
        if self.shared and not self.holders and (self._held_once or self._parent_gone):
            self._ending.hurry = self._ending.hurry or hurry
            self.stop("nobody uses it any more")

    def _parent_said(self) -> None:
        fd = self._options.parent_fd
        if fd is None or os.read(fd, 4096):
            return
        self._loop.remove_reader(fd)
        self._parent_gone = True
        if self.shared:
            self.released()
        else:
            self.stop("the process that started it is gone")

    def processes(self) -> list[ProcessInfo]:
        """Everything, for `ps`."""
        phase = "running" if self._ready.done() else "starting" if self._resumed is None else "restarting"
        if self.stopping:
            phase = "stopping" if self.ending else "restarting"
        rows = [
            ProcessInfo(
                role="supervisor",
                name="supervisor",
                instance_key=None,
                pid=os.getpid(),
                status=phase,
                since=rfc3339(self._started_at),
                restarts=self._restarts,
                last_exit=None,
            )
        ]
        services, agents = self._services, self._agents
        if services is None or agents is None:
            return rows
        offset = time.time() - self._loop.time()
        return rows + services.processes(offset) + agents.processes(offset) + self._workers.processes()

    # --- small things

    @property
    def _launching(self) -> Launches:
        if self._launches is None:
            raise AssertionError("processes start after the plan is there")
        return self._launches

    def _log_path(self, name: str) -> str:
        return f"{self._options.state_dir}/logs/{name}.log"

    def _report(self, error: GoondanError) -> None:
        """Say why the start failed, to whoever waits."""
        fd, self._options.ready_fd = self._options.ready_fd, None
        report_start_failure(fd, error)


# --- the program ----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run a kernel. 0 after an ordered stop, 1 when it could not start, 2 for a bad bundle or bad usage."""
    close_memory()
    callers_umask = close_to_others()
    try:
        options = parse(arguments)
        resumed = None
        if options.resume_fd is not None:
            from kernel.restarting.handover import read

            resumed = read(options.resume_fd)
    except GoondanError as error:
        print(visible_line(f"{error.info.code}: {error.info.message}"), file=sys.stderr)
        return 2
    options.umask = callers_umask if resumed is None else resumed.umask
    known = [fd for fd in (options.ready_fd, options.parent_fd, options.agreed_fd) if fd is not None]
    close_unknown_descriptors(known if resumed is None else [*known, *resumed.descriptors])
    set_process_name("gdn-supervisor")
    become_subreaper()
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal is the parent descriptor's news
    raise_descriptor_limit(WANTED_DESCRIPTORS)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)
    return asyncio.run(_live(options, resumed))


async def _live(options: Options, resumed: Handover | None) -> int:
    while True:
        supervisor = Supervisor(options, load_bundle, resumed)
        status = await supervisor.run()
        if supervisor.handover is None:
            return status
        inherited = [] if options.parent_fd is None else [options.parent_fd]
        from kernel.restarting.handover import execute, stay

        refused = execute(supervisor.handover, resuming(options), inherited)
        resumed = stay(supervisor.handover, refused)


if __name__ == "__main__":
    sys.exit(main())
