"""Decisions about processes: which should run, and what to do about each that does not.

Two machines here and one in roster.py, each fed with events and answering with actions that the supervisor performs:

- `Service`: broker, tool host, fork server. Always wanted while the kernel runs. A program of a feature is wanted from
  the first time on that somebody has work for it. The first restart after a death is immediate, further ones back off
  to at most a second; ten healthy seconds forget the deaths. A service that was never ready may give up, and then the
  start of the kernel fails. A service that was ready once is restarted for ever.
- `Stopping`: agents leave first, while the tool host can still finish their calls, then the tool host, the
  programs of features, the fork server and the broker; each has its time, then it is killed.

Phases of a service: stopped -> starting -> ready -> (waiting ->) starting …, and stopping -> stopped.

Source: docs/design/processes.md sections 2 and 6.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

#: A service or agent that was ready for this long is healthy: earlier deaths are forgotten (seconds).
HEALTHY_S: Final = 10.0
#: Second restart in a row waits this long; doubled for each further one (seconds).
FIRST_BACKOFF_S: Final = 0.05
#: No restart waits longer: callers are promised an answer within 5 s of any death (seconds).
MAX_BACKOFF_S: Final = 1.0
#: A start that takes longer is hung and ends as a death; machines under load take a few seconds (seconds).
START_LIMIT_S: Final = 15.0
#: Deaths in a row after which a service that was never ready fails the start of the kernel.
MAX_FIRST_DEATHS: Final = 3

#: The group of the programs of features. The groups of services have their names.
PROGRAMS: Final = "programs"
#: The order in which groups of processes leave, and the time that each gets before it is killed (seconds). Together
#: with KILL_WAIT_S per group this stays under the 10 s in which `gdn stop` promises an end.
STOP_ORDER: Final[tuple[tuple[str, float], ...]] = (
    ("agents", 3.0),
    ("toolhost", 1.5),
    (PROGRAMS, 0.5),
    ("forkserver", 0.5),
    ("broker", 1.0),
)
#: The time that each group gets when nobody waits for its work any more (seconds): enough to say goodbye.
HURRY_S: Final = 0.2
#: How long a killed group may take to be gone (seconds); then the stop goes on without it.
KILL_WAIT_S: Final = 0.5


def backoff(deaths: int) -> float:
    """Seconds to wait before the restart that follows the `deaths`-th death in a row."""
    if deaths <= 1:
        return 0.0
    return min(FIRST_BACKOFF_S * 2.0 ** min(deaths - 2, 16), MAX_BACKOFF_S)


# --- services -------------------------------------------------------------------------------------------------------

ServicePhase = Literal["stopped", "starting", "ready", "waiting", "stopping"]


class Service(Struct, frozen=True):
    """One program that must run."""

    #: Its role.
    role: str
    #: Its phase.
    phase: ServicePhase = "stopped"
    #: The number of its last start.
    run: int = 0
    #: How many times in a row it died.
    deaths: int = 0
    #: How often it was restarted.
    restarts: int = 0
    #: It was ready at least once.
    proven: bool = False
    #: Why it ended last.
    last_exit: str | None = None


class Begin(Struct, frozen=True):
    """The service is wanted from now on."""


class Up(Struct, frozen=True):
    """The process of start `run` said that it is ready."""

    #: The number of the start.
    run: int


class Down(Struct, frozen=True):
    """A process is gone, or could not be started."""

    #: The number of its start.
    run: int
    #: Why.
    cause: str
    #: It said that another start is no use.
    final: bool = False


class Steady(Struct, frozen=True):
    """HEALTHY_S have passed since start `run` was ready."""

    #: The number of the start.
    run: int


class RetryDue(Struct, frozen=True):
    """The backoff after the death of start `run` is over."""

    #: The number of the start.
    run: int


class StartOverdue(Struct, frozen=True):
    """START_LIMIT_S have passed since start `run`."""

    #: The number of the start.
    run: int


class End(Struct, frozen=True):
    """The service is not wanted any more."""


ServiceEvent = Begin | Up | Down | Steady | RetryDue | StartOverdue | End


class StartProcess(Struct, frozen=True):
    """Start the program; report Up and Down with this `run`."""

    #: The service.
    role: str
    #: The number of the start, for Up and Down.
    run: int


class KillProcess(Struct, frozen=True):
    """SIGKILL to its process group."""

    #: The service.
    role: str


class TerminateProcess(Struct, frozen=True):
    """SIGTERM: it ends by itself."""

    #: The service.
    role: str


class Later(Struct, frozen=True):
    """Give an event to a service after a time."""

    #: The service.
    role: str
    #: The time (seconds).
    seconds: float
    #: The event.
    event: ServiceEvent


class GiveUp(Struct, frozen=True):
    """The service cannot be started; the kernel's start has failed."""

    #: The service.
    role: str
    #: Why, for a person.
    cause: str


ServiceAction = StartProcess | KillProcess | TerminateProcess | Later | GiveUp


def step_service(service: Service, event: ServiceEvent) -> tuple[Service, list[ServiceAction]]:
    """What a service does about an event. Events of an earlier run change nothing."""
    match event:
        case Begin() if service.phase == "stopped":
            return _start(service)
        case Up(run) if run == service.run and service.phase == "starting":
            ready = replace(service, phase="ready", proven=True)
            return ready, [Later(service.role, HEALTHY_S, Steady(run))]
        case Steady(run) if run == service.run and service.phase == "ready":
            return replace(service, deaths=0), []
        case Down(run) if run == service.run and service.phase == "stopping":
            return replace(service, phase="stopped", last_exit=event.cause), []
        case Down(run) if run == service.run and service.phase in ("starting", "ready"):
            return _died(service, event)
        case RetryDue(run) if run == service.run and service.phase == "waiting":
            return _start(service)
        case StartOverdue(run) if run == service.run and service.phase == "starting":
            return service, [KillProcess(service.role)]  # its Down follows
        case End() if service.phase in ("starting", "ready"):
            return replace(service, phase="stopping"), [TerminateProcess(service.role)]
        case End() if service.phase == "waiting":
            return replace(service, phase="stopped"), []
        case _:
            return service, []


def _start(service: Service) -> tuple[Service, list[ServiceAction]]:
    run = service.run + 1
    started = replace(service, phase="starting", run=run, restarts=run - 1)
    return started, [StartProcess(service.role, run), Later(service.role, START_LIMIT_S, StartOverdue(run))]


def _died(service: Service, event: Down) -> tuple[Service, list[ServiceAction]]:
    deaths = service.deaths + 1
    dead = replace(service, phase="waiting", deaths=deaths, last_exit=event.cause)
    if not service.proven and (event.final or deaths >= MAX_FIRST_DEATHS):
        return replace(dead, phase="stopped"), [GiveUp(service.role, event.cause)]
    wait = backoff(deaths)
    if wait == 0.0:
        return _start(dead)
    return dead, [Later(service.role, wait, RetryDue(event.run))]


# --- the end --------------------------------------------------------------------------------------------------------


class Stopping(Struct, frozen=True):
    """How far the stop is."""

    #: The number of the group in STOP_ORDER.
    index: int
    #: The group has been killed.
    killed: bool
    #: Until when the group has time.
    until: float


class TerminateGroup(Struct, frozen=True):
    """Ask every process of the group to leave."""

    #: The group.
    group: str


class KillGroup(Struct, frozen=True):
    """SIGKILL to every process of the group."""

    #: The group.
    group: str


class Finished(Struct, frozen=True):
    """The stop is over. `left` are the groups that not even SIGKILL ended in time."""

    #: The groups that did not end.
    left: tuple[str, ...]


StopAction = TerminateGroup | KillGroup | Finished


def step_stop(
    state: Stopping | None,
    alive: frozenset[str],
    now: float,
    *,
    hurry: bool = False,
    agents_s: float | None = None,
) -> tuple[Stopping | None, list[StopAction]]:
    """What the stop does next. `alive` are the groups with a living process; `state` is None before it begins.

    `hurry`: nobody waits for what still runs, so each group gets no more than HURRY_S. `agents_s`: agents get so long
    instead of what STOP_ORDER says (seconds).

    Called when a process has ended and when `until` has come; at the end the state is None and the last action
    Finished.
    """
    index = -1 if state is None else state.index
    if state is not None:
        group, _ = STOP_ORDER[index]
        if group in alive and now < state.until:
            return state, []
        if group in alive and not state.killed:
            return Stopping(index, True, now + KILL_WAIT_S), [KillGroup(group)]
    for later in range(index + 1, len(STOP_ORDER)):
        group, grace = STOP_ORDER[later]
        if group == "agents" and agents_s is not None:
            grace = agents_s
        if group in alive:
            return Stopping(later, False, now + (min(grace, HURRY_S) if hurry else grace)), [TerminateGroup(group)]
    return None, [Finished(tuple(group for group, _ in STOP_ORDER if group in alive))]
