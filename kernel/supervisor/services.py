"""The processes of broker, tool host, fork server and programs of features: performs the decisions of their state
machines.

Source: docs/design/processes.md section 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

import msgspec

from goondan.kernel.logs import open_log
from goondan.kernel.spawn import command, start_failure, start_program
from goondan.kernel.supervisor.lifecycle import (
    PROGRAMS,
    Begin,
    Down,
    End,
    GiveUp,
    KillProcess,
    Later,
    Service,
    ServiceAction,
    ServiceEvent,
    StartProcess,
    TerminateProcess,
    Up,
    step_service,
)
from goondan.kernel.supervisor.reaping import Child, Exit, Readiness, Reaper
from goondan.kernel.supervisor.roster import LOOPS_AT
from goondan.kernel.supervisor_client import ProcessInfo
from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire.frames import ErrorPayload

_log = logging.getLogger("supervisor")


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


class Observer(Protocol):
    """The object that the services report to."""

    def prepare(self, role: str, run: int) -> Launch:
        """Prepare a start of this service."""

    def service_up(self, role: str) -> None:
        """It is ready."""

    def service_down(self, role: str, run: int, exit_cause: str) -> None:
        """Its process is gone. Another one may have been started already."""

    def service_failed(self, role: str, error: ErrorPayload) -> None:
        """The service cannot be started, so the kernel cannot start either."""


class Services:
    """The processes that must always run (`roles`), and those that run after the first request for them
    (`on_demand`).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reaper: Reaper,
        observer: Observer,
        *,
        roles: tuple[str, ...],
        on_demand: tuple[str, ...] = (),
        log_path: Callable[[str], str],
        inherited_fds: tuple[int, ...],
    ) -> None:
        self.state = {role: Service(role) for role in (*roles, *on_demand)}
        self.since: dict[str, float] = dict.fromkeys(self.state, 0.0)
        self._on_demand = frozenset(on_demand)
        self._loop = loop
        self._reaper = reaper
        self._observer = observer
        self._log_path = log_path
        self._inherited_fds = inherited_fds
        self._children: dict[str, Child] = {}
        self._readiness: dict[str, Readiness] = {}
        self._reports: dict[str, ErrorPayload] = {}
        self._ending = False

    def begin(self) -> None:
        """Start everything that must always run."""
        for role in self.state:
            if role not in self._on_demand:
                self._feed(role, Begin())

    def want(self, role: str) -> None:
        """Start this service, if it does not run. A service that could not be started is tried again."""
        if not self._ending:
            self._feed(role, Begin())

    @property
    def proven(self) -> bool:
        """Whether everything that must always run was ready once."""
        return all(service.proven for role, service in self.state.items() if role not in self._on_demand)

    def end_restarts(self) -> None:
        """Start nothing again from now on."""
        self._ending = True

    def terminate(self, role: str) -> None:
        """Ask a service to leave."""
        self._feed(role, End())

    def kill(self, role: str) -> None:
        """Kill a service. It is started again, unless `end_restarts` was called."""
        child = self._children.get(role)
        if child is not None:
            child.kill()

    def group(self, name: str) -> Iterable[str]:
        """The services of a group of lifecycle.STOP_ORDER: all that start on demand, or the one with this name."""
        return self._on_demand if name == PROGRAMS else self.state.keys() & {name}

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
                instance_key=None,
                pid=self.pid(role),
                status="crash-loop" if service.deaths >= LOOPS_AT else _STATUS[service.phase],
                since=rfc3339(self.since[role] + offset),
                restarts=service.restarts,
                last_exit=service.last_exit,
            )
            for role, service in self.state.items()
            if service.run or role not in self._on_demand
        ]

    # --- inside

    def _feed(self, role: str, event: ServiceEvent) -> None:
        before = self.state[role]
        self.state[role], actions = step_service(before, event)
        if self.state[role].phase != before.phase or self.state[role].run != before.run:
            self.since[role] = self._loop.time()
        for action in actions:
            self._perform(action)

    def _perform(self, action: ServiceAction) -> None:
        match action:
            case StartProcess(role, run):
                self._start(role, run)
            case KillProcess(role):
                self.kill(role)
            case TerminateProcess(role):
                child = self._children.get(role)
                if child is not None:
                    child.terminate()
            case Later(role, seconds, event):
                self._loop.call_later(seconds, self._feed, role, event)
            case GiveUp(role, cause):
                error = self._reports.get(role) or start_failure(role, cause, self._log_path(role))
                if role in self._on_demand:
                    _log.error("%s could not be started: %s", role, error.message)
                else:
                    self._observer.service_failed(role, error)

    def _start(self, role: str, run: int) -> None:
        self._reports.pop(role, None)
        readiness = Readiness(self._loop, lambda: self._up(role, run))
        given: list[int] = []
        try:
            launch = self._observer.prepare(role, run)
            given = launch.pass_fds
            log = open_log(self._log_path(role))
            given.append(log)
            ready = ["--ready-fd", str(readiness.write_fd), "--parent-pid", str(os.getpid())]
            pid = start_program(
                command(launch.module, [*launch.arguments, *ready]),
                env=launch.env,
                output_fd=log,
                pass_fds=[*launch.pass_fds[:-1], readiness.write_fd, *self._inherited_fds],
            )
        except OSError as error:
            readiness.close()
            _log.error("%s could not be started: %s", role, error.strerror)
            # Not inside of the step that has asked for it.
            self._loop.call_soon(self._down, role, run, Down(run, f"could not be started: {error.strerror}"))
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
        self._feed(role, Up(run))
        self._observer.service_up(role)

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
        self._down(role, run, Down(run, cause, final=report is not None))

    def _down(self, role: str, run: int, event: Down) -> None:
        if self._ending:
            self._feed(role, End())
        self._observer.service_down(role, run, event.cause)
        self._feed(role, event)


_STATUS: Final = {
    "stopped": "stopped",
    "starting": "starting",
    "ready": "running",
    "waiting": "waiting",
    "stopping": "stopping",
}
