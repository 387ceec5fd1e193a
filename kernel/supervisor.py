"""`python -m kernel.supervisor`: first process of a kernel, parent of all others.

It takes the lock, loads the bundle, starts broker, tool host and fork server side by side, keeps them and the wanted
agents running, and at the end sees every process gone. It decides nothing: lifecycle.py and roster.py do.

On `--ready-fd` it says one newline when the whole kernel is ready, or one line of JSON with the reason why it never
will be: `{"error": {…}, "problems": […]}`. When the other end of `--parent-fd` is closed it stops: whoever started
it is gone. If it is killed itself, everything below it is killed by its parent-death signal.

Source: delivery.md section 8; design section 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kernel import lock, paths, rundir
from kernel.agents import Agents
from kernel.lifecycle import (
    HURRY_S,
    STOP_ORDER,
    Finished,
    KillGroup,
    StopAction,
    Stopping,
    TerminateGroup,
    step_stop,
)
from kernel.log_bounds import bound_logs
from kernel.premises import Premises
from kernel.reaping import Reaper
from kernel.roster import LOOPS_AT, MAX_START_FAILURES
from kernel.services import Launch, Services
from kernel.spawn import (
    AGENT_ENVIRONMENT,
    close_unknown_descriptors,
    environment,
    memory_file,
)
from kernel.state_root import open_state_root
from kernel.supervisor_client import ProcessInfo, rfc3339
from kernel.supervisor_options import Options, load_plan, parse
from kernel.supervisor_socket import SupervisorSocket
from kernel.workers import Workers
from schemas.address import path_segment
from schemas.control import Drain, Exited, Inventory, Kill, Principal, Retire, SpawnFailed, Wanted
from schemas.errors import GoondanError, fail
from schemas.frames import ErrorPayload
from schemas.hidden import COPIES
from schemas.launch import KernelPlan
from schemas.secrecy import close_memory
from schemas.startup import become_subreaper, close_to_others, report_ready, set_process_name
from schemas.tokens import SECRET_BYTES, SOCKETS, Claims, mint
from schemas.visible import visible_line

if TYPE_CHECKING:
    from kernel.control_link import ControlLink

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
#: How long agents get to come to a step boundary and to release what they hold (seconds). It is less than what they get
#: until they are killed: by then the broker must have its events back.
DRAIN_S: Final = 2.5
#: The one tool host of a kernel, as the broker names it.
TOOLHOST_NAME: Final = "1"

_log = logging.getLogger("supervisor")


class Supervisor:
    """One kernel. `load` turns the options into a plan; it raises GoondanError."""

    def __init__(self, options: Options, load: Callable[[Options], KernelPlan]) -> None:
        self._options = options
        self._load = load
        self._loop = asyncio.get_running_loop()
        self.shared = options.shared
        self.entry_agent: str | None = None
        self.model: str | None = None
        self.private_copy: str | None = None
        self.stopping = False
        self.holders: set[object] = set()
        self._held_once = False
        self._parent_gone = False
        self._hurry = False
        self._bounding: asyncio.Future[None] | None = None
        self._host_failures = 0  # starts of the tool host in a row that never became ready
        self._started_at = time.time()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._plan: KernelPlan | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._stop: asyncio.Future[str] = self._loop.create_future()
        self._turning_points: list[asyncio.Future[Any]] = [self._ready, self._stop]
        self._changed = asyncio.Event()
        self._reaper = Reaper(self._loop, self._is_waiting_agent)
        self._workers = Workers(self._loop)
        self._fork_channel: socket.socket | None = None
        self._welcomed = False
        self._premises: Premises | None = None
        self._services: Services | None = None
        self._agents: Agents | None = None
        self._control: ControlLink | None = None
        self._socket = SupervisorSocket(self)
        self._restoring: asyncio.Task[None] | None = None

    # --- the whole life

    async def run(self) -> int:
        """From the lock to the last process. 0 after an ordered stop, 1 when the start failed, 2 for a bad bundle."""
        options = self._options
        try:
            state_root = paths.root_of(options.state_dir)
            for line in open_state_root(state_root, workspace=options.state_dir, make=True).mended:
                _log.warning("%s", visible_line(line))
            self._premises = Premises.enter(options.bundle, options.state_dir, options.run_dir)
        except GoondanError as error:
            self._report(error)
            return 1
        try:
            await self._begin(self._premises)
            reason = await self._stop
            _log.info("stopping: %s", reason)
            return 0
        except GoondanError as error:
            return self._failed(error)
        except OSError as error:
            return self._failed(fail("E_STATE", f"{error.filename or options.state_dir}: {error.strerror}"))
        finally:
            await self._end(self._premises)

    def _failed(self, error: GoondanError) -> int:
        """The start has failed: tell whoever waits; the exit status."""
        _log.error("the start failed: %s", error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()
        self._report(error)
        return 2 if error.info.code.startswith("E_CONFIG_") else 1

    async def _begin(self, premises: Premises) -> None:
        options, loop = self._options, self._loop
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        if options.parent_fd is not None:
            os.set_blocking(options.parent_fd, False)
            loop.add_reader(options.parent_fd, self._parent_said)
        await self._take_over(premises)
        plan = self._plan = self._load(options)
        if self._stop.done():
            return
        if os.path.isdir(f"{options.state_dir}/{COPIES}"):
            from kernel.trust.private_copy import sweep

            sweep(options.state_dir, keep=plan.private_copy)
        if plan.private_copy:
            self.private_copy = plan.private_copy
            _log.warning("others can write to %s: its code runs from a copy, %s", plan.bundle, plan.private_copy)
        self.entry_agent = plan.entry_agent
        if plan.entry_agent in plan.agents:
            from kernel.bundle.models import model_text

            self.model = model_text(plan.agents[plan.entry_agent].model)
            _log.info("%s talks to %s", plan.entry_agent, self.model)
        premises.describe(plan.entry_agent, plan.revision)
        self._write_client_token(premises, plan)
        self._reaper.start()
        self._start_processes(premises, plan)
        await asyncio.wait(self._turning_points, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            self._ready.result()
        elif not self._stop.done():
            raise fail(
                "E_KERNEL_SLOW", f"the kernel was not ready within {START_S:g} s; see {self._log_path('supervisor')}"
            )
        if not self._stop.done():
            _log.info("ready")
            report_ready(options.ready_fd)
            options.ready_fd = None
            gc.freeze()
            gc.enable()  # kernel/start.py turned it off
            self._backstop()
            self._look_for_run_dir()

    async def _take_over(self, premises: Premises) -> None:
        """Answer on the socket, and wait until nobody of a killed kernel is left."""
        options = self._options
        for reason in premises.unused:
            _log.warning("the runtime directory is %s: %s", premises.run_dir, reason)
        await self._listen(premises)
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

    async def _listen(self, premises: Premises) -> None:
        try:
            await self._socket.open(premises.run_dir)
        except OSError as error:
            raise fail("E_RUN_DIR", f"{premises.run_dir}: {error.strerror}") from None

    def _write_client_token(self, premises: Premises, plan: KernelPlan) -> None:
        token = mint(self._secret, Claims("client", revision=plan.revision, operator=True))
        premises.write(rundir.CLIENT_TOKEN, token.encode())

    def _start_processes(self, premises: Premises, plan: KernelPlan) -> None:
        self._agents = Agents(
            self._loop,
            self._reaper,
            endpoint=self._endpoint("agent"),
            mint=self._agent_token,
            log_path=lambda principal: self._log_path(f"agent-{path_segment(principal.name)}"),
            tell=self._tell,
            on_change=self._changed.set,
            on_hang=lambda: self._kill_service("forkserver"),
        )
        self._services = Services(
            self._loop,
            self._reaper,
            self,
            roles=("broker", "forkserver", "toolhost"),
            log_path=self._log_path,
            inherited_fds=(premises.alive_fd,),
        )
        self._services.begin()
        # Imported now: ZeroMQ loads while the three processes start.
        from kernel.control_link import ControlLink

        self._control = ControlLink(
            self._endpoint("control"),
            mint(self._secret, Claims("control", revision=plan.revision)),
            on_message=self._broker_said,
            inventory=self._inventory,
            on_first=self._control_up,
        )

    async def _end(self, premises: Premises) -> None:
        """Bounded: every group gets its time, then it is killed; then the last unknown children, then the files."""
        self.stopping = True
        if self._services is not None and self._agents is not None:
            self._services.end_restarts()
            left = await self._end_groups()
            if left:
                _log.error("not even SIGKILL ended: %s", ", ".join(left))
        if self._control is not None:
            await self._control.end()
        self._workers.close()
        until = self._loop.time() + LAST_CHILDREN_S
        while self._reaper.sweep(self._loop.time(), patience=0.0) and self._loop.time() < until:
            await asyncio.sleep(lock.LEFTOVERS_POLL_S)
        self._reaper.stop()
        self._socket.close()
        if self.private_copy is not None:
            from kernel.trust.private_copy import sweep

            sweep(self._options.state_dir)
        premises.leave()
        _log.info("stopped")

    async def _end_groups(self) -> tuple[str, ...]:
        state: Stopping | None = None
        while True:
            self._changed.clear()
            state, actions = step_stop(state, self._alive(), self._loop.time(), hurry=self._hurry)
            for action in actions:
                if isinstance(action, Finished):
                    return action.left
                self._perform_stop(action)
            if state is None:
                raise AssertionError("a stop that ends says Finished")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.0, state.until - self._loop.time()))

    def _perform_stop(self, action: StopAction) -> None:
        services, agents = self._services, self._agents
        if services is None or agents is None:
            return
        match action:
            case TerminateGroup("agents"):
                agents.stop(told=self._drain())
            case TerminateGroup(role):
                services.terminate(role)
            case KillGroup("agents"):
                _log.warning("agents did not leave in time")
                agents.kill_all()
            case KillGroup(role):
                _log.warning("%s did not leave in time", role)
                services.kill(role)
            case _:
                pass

    def _drain(self) -> bool:
        """Have the broker tell the agents to leave. False where there is none to do it."""
        control, services = self._control, self._services
        if control is None or services is None or not control.ready or services.state["broker"].phase != "ready":
            return False
        control.tell(Drain(round((HURRY_S if self._hurry else DRAIN_S) * 1000), "orchestrator_shutdown"))
        return True

    def _alive(self) -> frozenset[str]:
        services, agents = self._services, self._agents
        if services is None or agents is None:
            return frozenset()
        alive = {role for role, _ in STOP_ORDER if role != "agents" and services.alive(role)}
        return frozenset(alive | ({"agents"} if agents.alive else set()))

    # --- services

    def prepare(self, role: str, run: int) -> Launch:
        """How to start a service: module, arguments, environment, descriptors."""
        plan, premises = self._plan, self._premises
        if plan is None or premises is None:
            raise AssertionError("services start after the plan is there")
        if role == "broker":
            plan_fd = memory_file("plan", msgspec.msgpack.encode(plan))
            secret_fd = memory_file("secret", self._secret)
            arguments = ["--run-dir", premises.run_dir, "--plan-fd", str(plan_fd), "--secret-fd", str(secret_fd)]
            if run == 1:
                arguments.append("--new-kernel")
                if self._options.accept_loss:  # what a later broker would lose, nobody has agreed to
                    arguments.append("--accept-loss")
            env = environment(os.environ)
            return Launch(module="kernel.broker", arguments=arguments, env=env, pass_fds=[plan_fd, secret_fd])
        if role == "toolhost":
            token = mint(self._secret, Claims("toolhost", TOOLHOST_NAME, launch=run, revision=plan.revision))
            token_fd = memory_file("token", token.encode())
            status_read, status_write = os.pipe()
            self._workers.listen(status_read)
            arguments = ["--endpoint", self._endpoint("toolhost"), "--token-fd", str(token_fd)]
            arguments += ["--status-fd", str(status_write), "--broker-uid", str(os.geteuid())]
            arguments += ["--umask", f"{self._options.umask:03o}"]
            # What tools were granted of our environment passes by descriptor: an environment can be read in /proc.
            granted = {name for tool in plan.toolhost.tools for name in tool.sandbox.env}
            values = {name: os.environ[name] for name in sorted(granted) if name in os.environ}
            values_fd = memory_file("granted", msgspec.msgpack.encode(values))
            arguments += ["--env-fd", str(values_fd)]
            env = environment(os.environ)
            return Launch(module="toolhost", arguments=arguments, env=env, pass_fds=[token_fd, status_write, values_fd])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._fork_channel = ours
        providers = {agent.model.provider for agent in plan.agents.values()}
        return Launch(
            module="agentproc.forkserver",
            arguments=[
                *("--socket-fd", str(theirs.fileno())),
                *("--keep-fd", str(premises.alive_fd)),
                *(f"--provider={name}" for name in sorted(providers)),
            ],
            env=environment(os.environ, AGENT_ENVIRONMENT),
            pass_fds=[theirs.detach()],
        )

    def service_up(self, role: str) -> None:
        """A service is ready."""
        _log.info("%s is ready", role)
        if role == "toolhost":
            self._host_failures = 0
        if role == "broker" and self._control is not None:
            self._control.begin()
        elif role == "forkserver" and self._agents is not None and self._fork_channel is not None:
            channel, self._fork_channel = self._fork_channel, None
            self._agents.fork_server_up(channel)
        self._maybe_ready()

    def service_down(self, role: str, run: int, exit_cause: str) -> None:
        """A service is gone."""
        self._changed.set()
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
            if self._fork_channel is not None:
                self._fork_channel.close()
                self._fork_channel = None
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
        if all(service.proven for service in self._services.state.values()):
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
        alive_fd = self._premises.alive_fd
        try:
            theirs = os.stat(f"/proc/{pid}/fd/{alive_fd}")
        except OSError:
            return False
        return os.path.samestat(theirs, os.fstat(alive_fd))

    def _agent_token(self, principal: Principal, launch: int) -> str:
        plan = self._plan
        revision = plan.revision if plan is not None else ""
        return mint(self._secret, Claims("agent", principal.name, principal.instance_key, launch, revision))

    def _broker_said(self, message: Wanted | Retire | Kill) -> None:
        agents, services, now = self._agents, self._services, self._loop.time()
        if agents is None or services is None:
            return
        if isinstance(message, Wanted):
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
        self._loop.call_later(RUN_DIR_LOOK_S, self._look_for_run_dir)
        if self._premises is not None and not self.stopping and not self._premises.is_intact():
            self._restoring = self._loop.create_task(self._restore(self._premises))

    async def _restore(self, premises: Premises) -> None:
        _log.error("the runtime directory %s was removed; it is made again", premises.run_dir)
        try:
            premises.restore()
            self._socket.stop_listening()
            await self._listen(premises)
            if self._plan is not None:
                self._write_client_token(premises, self._plan)
        except (GoondanError, OSError) as error:
            self.stop(f"the runtime directory cannot be made again: {error}")
            return
        self._kill_service("broker")  # its sockets are gone; the next one makes them, and its peers come back

    # --- what the socket needs

    def stop(self, reason: str) -> None:
        """Begin the end. Further calls change nothing."""
        self.stopping = True
        if not self._stop.done():
            self._stop.set_result(reason)

    async def when_ready(self) -> None:
        """Wait for the start to succeed; raises GoondanError when it has not."""
        await asyncio.wait(self._turning_points, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done() or self.stopping:
            raise fail("E_KERNEL_NOT_RUNNING", "the kernel is stopping")
        self._ready.result()
        self._held_once = True

    def released(self, *, hurry: bool = False) -> None:
        """A kernel that a call started for itself ends with its last user, at once if that gave up (`hurry`)."""
        if self.shared and not self.holders and (self._held_once or self._parent_gone):
            self._hurry = self._hurry or hurry
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
        phase = "stopping" if self.stopping else "running" if self._ready.done() else "starting"
        rows = [
            ProcessInfo(
                role="supervisor",
                name="supervisor",
                instance_key=None,
                pid=os.getpid(),
                status=phase,
                since=rfc3339(self._started_at),
                restarts=0,
                last_exit=None,
            )
        ]
        services, agents = self._services, self._agents
        if services is None or agents is None:
            return rows
        offset = time.time() - self._loop.time()
        for role, service in services.state.items():
            rows.append(
                ProcessInfo(
                    role=role,
                    name=role,
                    instance_key=None,
                    pid=services.pid(role),
                    status="crash-loop" if service.deaths >= LOOPS_AT else _SERVICE_STATUS[service.phase],
                    since=rfc3339(services.since[role] + offset),
                    restarts=service.restarts,
                    last_exit=service.last_exit,
                )
            )
        return rows + agents.processes(offset) + self._workers.processes()

    # --- small things

    def _endpoint(self, cls: str) -> str:
        if self._premises is None:
            raise AssertionError("no runtime directory")
        return f"ipc://{self._premises.run_dir}/{SOCKETS[cls]}"

    def _log_path(self, name: str) -> str:
        return f"{self._options.state_dir}/logs/{name}.log"

    def _report(self, error: GoondanError) -> None:
        """Say why the start failed, to whoever waits."""
        fd, self._options.ready_fd = self._options.ready_fd, None
        if fd is None:
            print(visible_line(f"{error.info.code}: {error.info.message}"), file=sys.stderr)
            return
        report = {
            "error": error.info,
            "problems": getattr(error, "problems", []),
            "dropped": getattr(error, "dropped", 0),
        }
        with contextlib.suppress(OSError), open(fd, "wb") as out:
            out.write(msgspec.json.encode(report) + b"\n")


_SERVICE_STATUS: Final = {
    "stopped": "stopped",
    "starting": "starting",
    "ready": "running",
    "waiting": "waiting",
    "stopping": "stopping",
}


# --- the program ----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run a kernel. 0 after an ordered stop, 1 when it could not start, 2 for a bad bundle or bad usage."""
    close_memory()
    callers_umask = close_to_others()
    try:
        options = parse(arguments)
    except GoondanError as error:
        print(visible_line(f"{error.info.code}: {error.info.message}"), file=sys.stderr)
        return 2
    options.umask = callers_umask
    known = (options.ready_fd, options.parent_fd, options.agreed_fd)
    close_unknown_descriptors(fd for fd in known if fd is not None)
    set_process_name("gdn-supervisor")
    become_subreaper()
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal is the parent descriptor's news
    _raise_descriptor_limit()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr)

    async def live() -> int:
        return await Supervisor(options, load_plan).run()

    return asyncio.run(live())


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, WANTED_DESCRIPTORS) if hard != resource.RLIM_INFINITY else WANTED_DESCRIPTORS
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
