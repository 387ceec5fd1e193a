"""The life of one kernel, from its lock to its last process: start, restart in place, end, and requests of commands.

Source: docs/design/processes.md section 2.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from goondan.kernel import lock, paths, rundir
from goondan.kernel.ahead import Ahead
from goondan.kernel.bundle.loader import OpenedBundle
from goondan.kernel.premises import SIGNALS, Premises
from goondan.kernel.state_root import open_state_root
from goondan.kernel.supervisor.command_socket import Command, SupervisorSocket
from goondan.kernel.supervisor.options import Options, watched_besides
from goondan.kernel.supervisor.processes import Ending, Processes
from goondan.kernel.supervisor.reaping import report_start_failure
from goondan.kernel.supervisor_client import ProcessInfo, Reply, Request
from goondan.kernel.traces.logs import bound_logs
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.system.startup import report_ready
from goondan.schemas.text import times, visible
from goondan.schemas.wire import control, tokens
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.worker import grantable, tool_host_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from goondan.kernel.grants.powers import Power
    from goondan.kernel.supervisor.conductor import Conductor
    from goondan.kernel.supervisor.handover import Handover
    from goondan.kernel.supervisor.reader import Revision

#: How often agents are compared with the wanted set, and logs with their bound (seconds). This finds what events
#: missed.
BACKSTOP_S: Final = 5.0
#: How often the runtime directory is checked (seconds). A command that misses it waits longer than that
#: (supervisor_client.py).
RUN_DIR_LOOK_S: Final = 1.0
#: How long a start may take before it has failed (seconds). Loading a bundle and three processes takes well under one
#: second.
START_S: Final = 30.0
_log = logging.getLogger("supervisor")


class Supervisor:
    """One kernel. `load` opens the bundle that the options name; its second argument are the powers of the revision
    that runs. It raises GoondanError.
    """

    def __init__(
        self,
        options: Options,
        load: Callable[[Options, Sequence[Power] | None], OpenedBundle],
        resumed: Handover | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """`resumed`: the state that the supervisor before this one has handed over. `ahead`: forked programs."""
        self._ahead = ahead or Ahead()
        self._options = options
        self._load = load
        self._resumed = resumed
        #: Set at the end of `run` when another supervisor takes the place of this one.
        self.handover: Handover | None = None
        self._loop = asyncio.get_running_loop()
        self._shared = options.shared
        #: It does not end with the command that started it.
        self._detached = options.parent_fd is None
        self.entry_agent: str | None = None
        self._model: str | None = None
        self._private_copy: str | None = None
        self._ending = Ending()
        self._held_once = resumed is not None and resumed.held_once
        self._parent_gone = resumed is not None and resumed.parent_gone
        self._bounding: asyncio.Future[None] | None = None
        self._started_at = time.time() if resumed is None else resumed.started_at
        self._restarts = 0 if resumed is None else resumed.restarts
        self._opened: OpenedBundle | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._stop: asyncio.Future[str] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._conductor: Conductor | None = None
        self._next: Revision | None = None  # the revision that runs after the restart
        self._turning_points: list[asyncio.Future[Any]] = [self._ready, self._stop]
        self._premises: Premises | None = None
        self._processes: Processes | None = None
        self._socket = SupervisorSocket(self._answer, self._released)
        self._restoring: asyncio.Task[None] | None = None

    # --- the whole life

    async def run(self) -> int:
        """Run the kernel, from its lock to its last process. Returns 0 after an ordered stop, 1 when the start failed,
        2 for a bad bundle.

        If `handover` is set afterwards, the last process has ended, and the kernel goes on in a program that gets the
        handover.
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
            _log.warning("%s", visible.visible_line(line))
        return Premises.enter(options.bundle, options.state_dir, options.run_dir)

    def _failed(self, error: GoondanError) -> int:
        """Handle a failed start: tell all who wait for it. Returns the exit status."""
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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a restart in place blocks them
        if options.parent_fd is not None:
            os.set_blocking(options.parent_fd, False)
            loop.add_reader(options.parent_fd, self._parent_said)
        await self._take_over(premises)
        processes = self._processes = Processes(
            loop,
            options,
            premises,
            os.urandom(tokens.SECRET_BYTES),
            self._ending,
            self._ahead,
            about_bundle=self._about_bundle,
            broker_here=self._broker_here,
        )
        processes.ready.add_done_callback(self._started)
        processes.begin_tool_host()
        opened = self._opened = self._open(options)
        self._ahead.close_unneeded()
        plan = opened.plan
        if self._stop.done():
            return
        if os.path.isdir(f"{options.state_dir}/{grantable.COPIES}"):
            from goondan.kernel.trust.private_copy import sweep

            sweep(options.state_dir, keep=plan.private_copy)
        if plan.private_copy:
            self._private_copy = plan.private_copy
            _log.warning("others can write to %s: its code runs from a copy, %s", plan.bundle, plan.private_copy)
        processes.begin(plan)
        self._describe(plan)  # while they start
        self._write_client_token(premises, processes)
        self._conductor = self._make_conductor(processes, opened)
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
            processes.agents.kernel_ready()
            gc.freeze()
            gc.enable()  # kernel/start.py turned it off
            self._backstop()
            if options.watch:
                self.conducting.watch()
            self._look_for_run_dir()

    def _describe(self, plan: KernelPlan) -> None:
        """Write the running bundle into the record, and tell it to commands."""
        self.entry_agent = plan.entry_agent
        if plan.entry_agent in plan.agents:
            from goondan.kernel.bundle.rules.models import model_text

            self._model = model_text(plan.agents[plan.entry_agent].model)
            _log.info("%s talks to %s", plan.entry_agent, self._model)
        if self._premises is not None:
            self._premises.describe(plan.entry_agent, plan.revision)

    async def _take_over(self, premises: Premises) -> None:
        """Answer on the socket, and wait until no process of a killed kernel is left."""
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

    def _open(self, options: Options) -> OpenedBundle:
        """The bundle. A bundle that was checked before a restart began runs in any case. Raises GoondanError."""
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

    def _write_client_token(self, premises: Premises, processes: Processes) -> None:
        operator = tokens.Claims("client", operator=True, uid=os.geteuid())
        premises.write(rundir.CLIENT_TOKEN, processes.launches.token(operator).encode())

    def _make_conductor(self, processes: Processes, opened: OpenedBundle) -> Conductor:
        # Imported now, while processes start. Not later: a restart must not meet the files of an update.
        from goondan.kernel.supervisor.conductor import BundleReader, Conductor

        options = self._options
        reader = BundleReader(self._loop, processes.reaper, options, self._log_path("supervisor"))
        besides = watched_besides(paths.root_of(options.state_dir), options.bundle, options.policy)
        return Conductor(self, reader, processes.agents, opened, options.bundle, besides)

    def _started(self, ready: asyncio.Future[None]) -> None:
        """Handle the end of the start: every process is ready, or one never will be."""
        if self._ready.done():
            return
        error = ready.exception()
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    async def _end(self, premises: Premises) -> None:
        """End all processes, in bounded time, and then the files go."""
        self._ending.begun = True
        self._ending.for_good = self.ending or self._next is None
        if self._conductor is not None:
            self._conductor.close(for_good=self.ending)
        if self._processes is not None:
            await self._processes.end()
        if self._next is not None and self._opened is not None and not self.ending:
            await self._hand_over(premises, self._next, self._opened)
            return
        if not self._ended.done():
            self._ended.set_result(None)
        await self._socket.close()
        if self._private_copy is not None:
            from goondan.kernel.trust.private_copy import sweep

            sweep(self._options.state_dir)
        premises.leave()
        _log.info("stopped")

    async def _hand_over(self, premises: Premises, revision: Revision, opened: OpenedBundle) -> None:
        """Collect what the next program needs. Every process but this one has ended."""
        from goondan.kernel.supervisor.handover import Handover

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

    def _backstop(self) -> None:
        if self.stopping:
            return
        self._loop.call_later(BACKSTOP_S, self._backstop)
        if self._processes is not None:
            self._processes.audit()
        if self._bounding is None or self._bounding.done():
            # Sorting lines by their sources takes some tenths of a second.
            folder = f"{self._options.state_dir}/logs"
            self._bounding = self._loop.run_in_executor(None, bound_logs, folder)

    def _look_for_run_dir(self) -> None:
        """Check that the runtime directory is still there. If it was removed, make it again, or end the kernel."""
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
            if self._processes is not None:
                self._write_client_token(premises, self._processes)
        except (GoondanError, OSError) as error:
            self.stop(f"the runtime directory cannot be made again: {error}")
            return
        if self._processes is not None:
            self._processes.replace_broker()  # its sockets are gone

    # --- requests of commands, and what the conductor needs

    @property
    def stopping(self) -> bool:
        """Whether the processes are being ended, for a restart or for the end of the kernel (`ending`)."""
        return self._ending.begun

    @property
    def ending(self) -> bool:
        """Whether the kernel ends."""
        return self._ending.for_good

    def stop(self, reason: str) -> None:
        """Begin the end. A further call only turns a restart into an end."""
        self._ending.begun = self._ending.for_good = True
        self._ending.changed.set()
        if not self._stop.done():
            self._stop.set_result(reason)

    async def _answer(self, command: Command, request: Request, resumed: bool) -> Reply:
        """Answer a command (kernel/supervisor_client.py)."""
        try:
            match request.op:
                case "ps":
                    return self._tell_processes()
                case "stop":
                    self.stop("asked to")
                    return Reply(ok=True, stopping=True)
                case "hold":
                    return await self._hold(command)
                case "release" | "abandon":
                    command.holds = False
                    self._released(hurry=request.op == "abandon")
                    return Reply(ok=True, stopping=self.ending)
                case "news":
                    lines, told = await self.conducting.news.after(request.after)
                    return Reply(ok=True, news=lines, told=told)
                case "feature" if request.feature is not None:
                    return Reply(ok=True, answer=await self.conducting.ask(request.feature, request.question))
                case "restart" if request.agent is not None:
                    many = await self.conducting.restart_agent(request.agent, fresh=request.fresh)
                    return Reply(ok=True, restarted=many)
                case "restart":
                    await (self._restarted() if resumed else self._restart(request.reason, fresh=request.fresh))
                    return Reply(ok=True, entry_agent=self.entry_agent, model=self._model)
        except GoondanError as error:
            return Reply(error=error.info, stopping=self.ending)
        return Reply(error=error_payload("E_USAGE", f"no operation {request.op[:40]!r}"))

    async def _hold(self, command: Command) -> Reply:
        if self.ending:
            return Reply(error=error_payload("E_KERNEL_NOT_RUNNING", "the kernel is stopping"), stopping=True)
        command.holds = True
        try:
            await self._when_ready()
        except GoondanError as error:
            return Reply(error=error.info, stopping=True)
        return Reply(
            ok=True, entry_agent=self.entry_agent, model=self._model, shared=self._shared, detached=self._detached
        )

    async def _when_ready(self) -> None:
        """Wait for the end of the start, or of a restart. Raises GoondanError when it has failed."""
        await asyncio.wait(self._turning_points, return_when=asyncio.FIRST_COMPLETED)
        if self.stopping and not self.ending:
            await asyncio.shield(self._ended)
        if not self._ready.done() or self.ending:
            raise fail("E_KERNEL_NOT_RUNNING", "the kernel is stopping")
        self._ready.result()
        self._held_once = True

    async def _restart(self, reason: str, *, fresh: bool) -> None:
        """Restart in place, if the bundle may run. After a success the next program answers. Raises GoondanError:
        E_RESTART_REFUSED, E_KERNEL_NOT_RUNNING, and the faults of the bundle.
        """
        await self.conducting.restart(reason, fresh=fresh)
        await asyncio.shield(self._ended)
        raise fail("E_KERNEL_NOT_RUNNING", "the kernel is stopping")

    async def _restarted(self) -> None:
        """Wait for the end of the restart with which this program began. Raises GoondanError when it has failed."""
        await self._when_ready()
        if self._resumed is not None and self._resumed.error is not None:
            raise GoondanError(self._resumed.error)

    @property
    def conducting(self) -> Conductor:
        """The conductor of its restarts. Raises GoondanError E_RESTART_REFUSED before there is one."""
        if self._conductor is None:
            raise fail("E_RESTART_REFUSED", "the kernel is still starting")
        return self._conductor

    def revise(self, opened: OpenedBundle) -> None:
        """Use another revision of the bundle. Processes that start from now on belong to it."""
        self._opened = opened
        if self._processes is not None:
            self._processes.launches.know(opened.plan)
        self._describe(opened.plan)

    @property
    def is_ready(self) -> bool:
        """Whether the kernel has started."""
        return self._ready.done()

    def begin_restart(self, revision: Revision, reason: str) -> None:
        """End every process, then go on as the program that comes after."""
        self._ending.begun, self._next = True, revision
        self._stop.set_result(reason)

    def answer(self, message: control.ToBroker) -> None:
        """Send a message to the broker."""
        if self._processes is not None:
            self._processes.tell(message)

    def _about_bundle(self, message: control.AboutBundle) -> None:
        """Handle a message of the broker about the bundle."""
        self.conducting.heard(message)

    def _broker_here(self) -> None:
        """A broker has connected."""
        if self._conductor is not None:
            self._conductor.broker_here()

    def _released(self, *, hurry: bool = False) -> None:
        """Handle that a command has let the kernel go. A kernel that was started for calls ends with its last user, and
        at once when that user gave up (`hurry`).
        """
        if self._shared and not self._socket.held and (self._held_once or self._parent_gone):
            self._ending.hurry = self._ending.hurry or hurry
            self.stop("nobody uses it any more")

    def _parent_said(self) -> None:
        fd = self._options.parent_fd
        if fd is None or os.read(fd, 4096):
            return
        self._loop.remove_reader(fd)
        self._parent_gone = True
        if self._shared:
            self._released()
        else:
            self.stop("the process that started it is gone")

    def _tell_processes(self) -> Reply:
        """All processes, and how each session of a server is, for `ps`."""
        phase = "running" if self._ready.done() else "starting" if self._resumed is None else "restarting"
        if self.stopping:
            phase = "stopping" if self.ending else "restarting"
        rows = [
            ProcessInfo(
                role="supervisor",
                name="supervisor",
                pid=os.getpid(),
                status=phase,
                since=times.rfc3339(self._started_at),
                restarts=self._restarts,
            )
        ]
        servers: list[tool_host_reports.WorkerNews] = []
        if self._processes is not None:
            rows += self._processes.infos(time.time() - self._loop.time())
            servers = self._processes.servers()
        if self._premises is not None:
            for row in rows:
                if row.role == "broker":
                    row.run_dir = self._premises.run_dir
        return Reply(
            ok=True,
            processes=rows,
            servers=servers,
            private_copy=self._private_copy,
            state_dir=self._options.state_dir,
        )

    # --- small things

    def _log_path(self, name: str) -> str:
        return f"{self._options.state_dir}/logs/{name}.log"

    def _report(self, error: GoondanError) -> None:
        """Tell all who wait for the start why it failed."""
        fd, self._options.ready_fd = self._options.ready_fd, None
        report_start_failure(fd, error)
