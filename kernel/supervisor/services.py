"""The processes of broker, tool host, fork server and programs of features: prepares the start of each, performs the
decisions of their state machines, and hears the tool host's news about its workers.

Tokens, plans and values of the environment are passed by descriptors, because arguments and environments can be read in
/proc.

A tool host may start before the plan is known. Then its parts of the plan are promised. Its token comes through a pipe,
which it reads to the end before anything else. The pipe ends when all promised parts are there.

A tool host tells of its jailed workers and its servers on its status descriptor, one JSON object a line:
`{"op":"start","pid":…,"tool":…,"agent":…,"instanceKey":…,"since":…}` and `{"op":"exit","pid":…,"cause":…}`; `pid` is
the number on the host. `{"op":"server",…}` says how a session of a server is. The last of each is kept, also when it
has ended. Only lists for a person use this news, so invalid lines are skipped.

Source: docs/design/processes.md section 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from goondan.kernel import rundir, spawn
from goondan.kernel.ahead import FORK_SERVER, Ahead
from goondan.kernel.premises import Premises
from goondan.kernel.start import TOOL_HOST
from goondan.kernel.supervisor import lifecycle
from goondan.kernel.supervisor.options import Options
from goondan.kernel.supervisor.programs import Program, programs
from goondan.kernel.supervisor.reaping import Child, Exit, Readiness, Reaper, start_failure
from goondan.kernel.supervisor_client import ProcessInfo
from goondan.kernel.traces.logs import open_log
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.text.times import rfc3339
from goondan.schemas.transport import SOCKETS
from goondan.schemas.wire import control, frames
from goondan.schemas.wire.tokens import Claims, mint
from goondan.schemas.worker import servers
from goondan.schemas.worker.tool_host_reports import SURVEY, TOOLHOSTS, WorkerNews

#: The one tool host of a kernel, as the broker names it.
TOOLHOST_NAME: Final = "1"


class Launch(msgspec.Struct, kw_only=True):
    """One start of a program."""

    #: The module that runs.
    module: str
    #: Its arguments.
    arguments: list[str]
    #: Its environment.
    env: Mapping[str, str]
    #: Descriptors that are given to it. They are closed here after the start.
    pass_fds: list[int]


class _Promise(NamedTuple):
    """Our ends of the descriptors that were promised to a tool host."""

    #: The number of its start.
    run: int
    #: The pipe of its token.
    token_fd: int
    #: The memory file of granted values.
    values_fd: int

    def close(self) -> None:
        os.close(self.values_fd)
        os.close(self.token_fd)


class Launches:
    """The launches of one kernel. `on_host_status` gets the reading end of a tool host's news about its jails."""

    def __init__(
        self, options: Options, premises: Premises, secret: bytes, on_host_status: Callable[[int], None]
    ) -> None:
        self._options = options
        self._plan: KernelPlan | None = None
        self._premises = premises
        self._secret = secret
        self._on_host_status = on_host_status
        self._fork_channel: socket.socket | None = None
        self._promise: _Promise | None = None

    def know(self, plan: KernelPlan) -> None:
        """Use this plan for all later starts. A tool host that waits for a plan gets the promised parts."""
        self._plan = plan
        self._keep_promise()

    def close(self) -> None:
        """Handle that no plan will come."""
        promise, self._promise = self._promise, None
        if promise is not None:
            promise.close()

    def prepare(self, role: str, run: int) -> Launch:
        """Prepare the `run`-th start of this service."""
        if role == "broker":
            return self._broker(run)
        if role in programs():
            return self._program(programs()[role], run)
        return self._toolhost(run) if role == "toolhost" else self._fork_server()

    def take_fork_channel(self) -> socket.socket | None:
        """Take our end of the channel of the last fork server. It is given once."""
        channel, self._fork_channel = self._fork_channel, None
        return channel

    def endpoint(self, cls: str) -> str:
        """The endpoint of the broker for a class of peers."""
        return f"ipc://{self._premises.run_dir}/{SOCKETS[cls]}"

    def token(self, claims: Claims) -> str:
        """A token of this kernel, for the running revision."""
        return mint(self._secret, msgspec.structs.replace(claims, revision=self._known.revision))

    def agent_token(self, principal: control.Principal, launch: int) -> str:
        """The token of one launch of an agent."""
        return self.token(Claims("agent", principal.name, principal.instance_key, launch))

    # --- inside

    def _broker(self, run: int) -> Launch:
        plan_fd = spawn.memory_file("plan", msgspec.msgpack.encode(self._known))
        secret_fd = spawn.memory_file("secret", self._secret)
        arguments = ["--run-dir", self._premises.run_dir, "--plan-fd", str(plan_fd), "--secret-fd", str(secret_fd)]
        if run == 1:
            arguments.append("--new-kernel")
            if self._options.accept_loss:  # only for the first broker: nobody has agreed to a later loss
                arguments.append("--accept-loss")
        env = spawn.environment(os.environ)
        return Launch(module="goondan.kernel.broker", arguments=arguments, env=env, pass_fds=[plan_fd, secret_fd])

    @property
    def _known(self) -> KernelPlan:
        if self._plan is None:
            raise AssertionError("only a tool host starts before the plan is there")
        return self._plan

    def _toolhost(self, run: int) -> Launch:
        self.close()  # the promises to an earlier tool host
        token_fd, write_fd = os.pipe()
        values_fd = os.memfd_create("granted")
        self._promise = _Promise(run, write_fd, os.dup(values_fd))
        self._keep_promise()
        status_read, status_write = os.pipe()
        self._on_host_status(status_read)
        arguments = ["--endpoint", self.endpoint("toolhost"), "--token-fd", str(token_fd)]
        arguments += ["--status-fd", str(status_write), "--broker-uid", str(os.geteuid())]
        arguments += ["--umask", f"{self._options.umask:03o}", "--env-fd", str(values_fd)]
        arguments += ["--survey", os.path.join(self._options.state_dir, TOOLHOSTS, TOOLHOST_NAME, SURVEY)]
        env = spawn.environment(os.environ, spawn.AUTHORITIES)
        return Launch(module=TOOL_HOST, arguments=arguments, env=env, pass_fds=[token_fd, status_write, values_fd])

    def _keep_promise(self) -> None:
        """When the plan is known, give a tool host the granted values of our environment, and then its token."""
        promise, plan = self._promise, self._plan
        if promise is None or plan is None:
            return
        granted = {name for tool in plan.toolhost.tools for name in tool.variables}
        values = {name: os.environ[name] for name in sorted(granted) if name in os.environ}
        spawn.fill(promise.values_fd, msgspec.msgpack.encode(values))
        with suppress(BrokenPipeError):  # the tool host is gone
            os.write(promise.token_fd, self.token(Claims("toolhost", TOOLHOST_NAME, launch=promise.run)).encode())
        self.close()

    def _program(self, program: Program, run: int) -> Launch:
        token_fd = spawn.memory_file("token", self.token(Claims("control", program.name, launch=run)).encode())
        arguments = ["--endpoint", self.endpoint("control"), "--token-fd", str(token_fd)]
        arguments += program.arguments(self._options.state_dir)
        env = spawn.environment(os.environ, program.variables)
        given = [token_fd]
        if secrets := {name: os.environb[name] for name in map(os.fsencode, program.secrets) if name in os.environb}:
            given.append(spawn.memory_file("secrets", msgspec.msgpack.encode(secrets)))
            arguments += ["--secrets-fd", str(given[-1])]
        return Launch(module=program.module, arguments=arguments, env=env, pass_fds=given)

    def _fork_server(self) -> Launch:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        if self._fork_channel is not None:
            self._fork_channel.close()
        self._fork_channel = ours
        providers = {agent.model.provider for agent in self._known.agents.values()}
        return Launch(
            module=FORK_SERVER,
            arguments=[
                *("--socket-fd", str(theirs.fileno())),
                *("--keep-fd", str(self._premises.alive_fd)),
                *("--scratch", os.path.join(self._premises.run_dir, rundir.WARMUP_FOLDER)),
                *(f"--provider={name}" for name in sorted(providers)),
                *([] if self._options.parent_fd is None else ["--soon"]),  # a command waits with its message
            ],
            env=spawn.environment(os.environ, spawn.AGENT_ENVIRONMENT),
            pass_fds=[theirs.detach()],
        )


_log = logging.getLogger("supervisor")


class Services:
    """The processes that must always run (`roles`), and those that run after the first request for them
    (`on_demand`).

    `on_up` is called when one is ready. `on_down` gets the number and the end of one that is gone; another may have
    been started already. `on_failed` gets the reason why one cannot be started: then the kernel cannot start either.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reaper: Reaper,
        launches: Launches,
        *,
        on_up: Callable[[str], None],
        on_down: Callable[[str, int, str], None],
        on_failed: Callable[[frames.ErrorPayload], None],
        roles: tuple[str, ...],
        on_demand: tuple[str, ...] = (),
        log_path: Callable[[str], str],
        inherited_fds: tuple[int, ...],
        ahead: Ahead,
    ) -> None:
        self._ahead = ahead
        self.state = {role: lifecycle.Service(role) for role in (*roles, *on_demand)}
        self.since: dict[str, float] = dict.fromkeys(self.state, 0.0)
        self._on_demand = frozenset(on_demand)
        self._loop = loop
        self._reaper = reaper
        self._on_up = on_up
        self._on_down = on_down
        self._on_failed = on_failed
        self._launches = launches
        self._log_path = log_path
        self._inherited_fds = inherited_fds
        self._children: dict[str, Child] = {}
        self._readiness: dict[str, Readiness] = {}
        self._reports: dict[str, frames.ErrorPayload] = {}
        self._ending = False

    def begin(self) -> None:
        """Start everything that must always run."""
        for role in self.state:
            if role not in self._on_demand:
                self._feed(role, lifecycle.Begin())

    def want(self, role: str) -> None:
        """Start this service, if it does not run. A service that could not be started is tried again."""
        if not self._ending:
            self._feed(role, lifecycle.Begin())

    @property
    def proven(self) -> bool:
        """Whether everything that must always run was ready once."""
        return all(service.proven for role, service in self.state.items() if role not in self._on_demand)

    def end_restarts(self) -> None:
        """Start nothing again from now on."""
        self._ending = True

    def terminate(self, role: str) -> None:
        """Ask a service to leave."""
        self._feed(role, lifecycle.End())

    def forewarn(self, role: str) -> None:
        """Tell a service that is ready that it will be asked to leave soon."""
        if self.state[role].phase == "ready":
            self._children[role].send(signal.SIGUSR1)

    def kill(self, role: str) -> None:
        """Kill a service. It is started again, unless `end_restarts` was called."""
        child = self._children.get(role)
        if child is not None:
            child.kill()

    def group(self, name: str) -> Iterable[str]:
        """The services of a group of lifecycle.STOP_ORDER: all that start on demand, or the one with this name."""
        return self._on_demand if name == lifecycle.PROGRAMS else self.state.keys() & {name}

    def alive(self, role: str) -> bool:
        """Whether its process lives."""
        return role in self._children

    def pid(self, role: str) -> int | None:
        """Its process, if one lives."""
        child = self._children.get(role)
        return child.pid if child is not None else None

    def processes(self, offset: float) -> list[ProcessInfo]:
        """The services, for `ps`. `offset` added to the loop's time gives the wall-clock time."""
        return [
            ProcessInfo(
                role=role,
                name=role,
                pid=self.pid(role),
                status="crash-loop" if service.deaths >= lifecycle.LOOPS_AT else _STATUS[service.phase],
                since=rfc3339(self.since[role] + offset),
                restarts=service.restarts,
                last_exit=service.last_exit,
            )
            for role, service in self.state.items()
            if service.run or role not in self._on_demand
        ]

    # --- inside

    def _feed(self, role: str, event: lifecycle.ServiceEvent) -> None:
        before = self.state[role]
        self.state[role], actions = lifecycle.step_service(before, event)
        if self.state[role].phase != before.phase or self.state[role].run != before.run:
            self.since[role] = self._loop.time()
        for action in actions:
            self._perform(action)

    def _perform(self, action: lifecycle.ServiceAction) -> None:
        match action:
            case lifecycle.StartProcess(role, run):
                self._start(role, run)
            case lifecycle.KillProcess(role):
                self.kill(role)
            case lifecycle.TerminateProcess(role):
                child = self._children.get(role)
                if child is not None:
                    child.terminate()
            case lifecycle.Later(role, seconds, event):
                self._loop.call_later(seconds, self._feed, role, event)
            case lifecycle.GiveUp(role, cause):
                error = self._reports.get(role) or start_failure(role, cause, self._log_path(role))
                if role in self._on_demand:
                    _log.error("%s could not be started: %s", role, error.message)
                else:
                    self._on_failed(error)

    def _start(self, role: str, run: int) -> None:
        self._reports.pop(role, None)
        readiness = Readiness(self._loop, lambda: self._up(role, run))
        given: list[int] = []
        try:
            launch = self._launches.prepare(role, run)
            given = launch.pass_fds
            log = open_log(self._log_path(role))
            given.append(log)
            ready = ["--ready-fd", str(readiness.write_fd), "--parent-pid", str(os.getpid())]
            pid = self._ahead.start(
                launch.module,
                [*launch.arguments, *ready],
                env=launch.env,
                output_fd=log,
                pass_fds=[*launch.pass_fds[:-1], readiness.write_fd, *self._inherited_fds],
            )
        except OSError as error:
            readiness.close()
            _log.error("%s could not be started: %s", role, error.strerror)
            # Not inside of the step that has asked for it.
            self._loop.call_soon(self._down, role, run, lifecycle.Down(run, f"could not be started: {error.strerror}"))
            return
        finally:
            for fd in given:
                os.close(fd)
        readiness.handed_over()
        self._readiness[role] = readiness
        child = self._reaper.watch(pid, lambda seen: self._exited(role, run, seen), leads_group=True)
        if child is None:  # it is our child and nobody else waits for it
            raise AssertionError(f"{role}, pid {pid}, cannot be watched")
        self._children[role] = child

    def _up(self, role: str, run: int) -> None:
        self._readiness.pop(role, None)
        self._feed(role, lifecycle.Up(run))
        self._on_up(role)

    def _exited(self, role: str, run: int, seen: Exit) -> None:
        self._children.pop(role, None)
        readiness = self._readiness.pop(role, None)
        report = readiness.report if readiness is not None else None
        if readiness is not None:
            readiness.close()
        if report is not None:
            self._reports[role] = report
        cause = f"{seen.cause}: {report.message}" if report is not None else seen.cause
        if not self._ending:
            _log.warning("%s ended: %s", role, cause)
        self._down(role, run, lifecycle.Down(run, cause, final=report is not None))

    def _down(self, role: str, run: int, event: lifecycle.Down) -> None:
        if self._ending:
            self._feed(role, lifecycle.End())
        self._on_down(role, run, event.cause)
        self._feed(role, event)


_STATUS: Final = {
    "stopped": "stopped",
    "starting": "starting",
    "ready": "running",
    "waiting": "waiting",
    "stopping": "stopping",
}


#: The longest line (bytes). Longer ones are skipped.
MAX_LINE: Final = 65536
#: The most workers that are kept: more than any tool host may have. News of others is dropped.
MAX_WORKERS: Final = 65536
#: Sessions of MCP servers that are remembered; those that have ended longest ago go first.
MAX_SERVERS: Final = 1024


class Workers:
    """The workers of one tool host."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._fd = -1
        self._data = b""
        self._running: dict[int, WorkerNews] = {}
        self._servers: dict[tuple[str, str | None, str | None], WorkerNews] = {}

    def listen(self, fd: int) -> None:
        """Read the news of a new tool host from `fd`. It is closed here at its end. The workers of the earlier tool
        host are gone.
        """
        self.close()
        self._fd = fd
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def close(self) -> None:
        """The tool host is gone."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._data = b""
        self._running.clear()
        self._servers.clear()

    def _read(self) -> None:
        try:
            chunk = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        if not chunk:
            self.close()
            return
        lines = (self._data + chunk).split(b"\n")
        self._data = lines.pop()[-MAX_LINE:]
        for line in lines:
            self.hear(line)

    def hear(self, line: bytes) -> None:
        """Handle one line of news."""
        try:
            news = msgspec.json.decode(line, type=WorkerNews)
        except msgspec.DecodeError:
            return
        if news.op == "server":
            self._hear_server(news)
        elif news.op == "exit":
            self._running.pop(news.pid, None)
        elif len(self._running) < MAX_WORKERS:
            self._running[news.pid] = news

    def _hear_server(self, news: WorkerNews) -> None:
        name = (news.tool, news.agent, news.instance_key)
        self._servers.pop(name, None)  # it is the newest now
        self._servers[name] = news
        if len(self._servers) > MAX_SERVERS:
            ended = (name for name, told in self._servers.items() if told.server and told.server.state == "ended")
            del self._servers[next(ended, next(iter(self._servers)))]

    def servers(self) -> list[WorkerNews]:
        """How each session of an MCP server is, or was at its end; in the order of their names."""
        return [self._servers[name] for name in sorted(self._servers, key=lambda name: [part or "" for part in name])]

    def processes(self) -> list[ProcessInfo]:
        """The workers, for `ps`."""
        return [
            ProcessInfo(
                role="worker",
                name=news.tool,
                instance_key=news.instance_key,
                pid=news.pid,
                status="running",
                since=news.since,
            )
            for news in self._running.values()
        ] + [
            ProcessInfo(
                role=servers.ROLE,
                name=news.tool,
                instance_key=news.instance_key,
                pid=news.pid or None,
                status=news.server.state,
                since=news.since,
            )
            for news in self.servers()
            if news.server is not None and news.server.state != "ended"
        ]
