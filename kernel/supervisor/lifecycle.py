"""Decisions about processes: which should run, and what to do about each that does not. Pure.

- `Service`: broker, tool host, fork server. Always wanted while the kernel runs. A program of a feature is wanted from
  the first time on that somebody has work for it. The first restart after a death is immediate, further ones back off
  to at most a second; ten healthy seconds forget the deaths. A service that was never ready may give up, and then the
  start of the kernel fails. A service that was ready once is restarted for ever.
- `Stopping`: turns come to an end first, while the tool host can still finish their calls. Then all leave side by side,
  agents that hold nothing any more among them. Each stage has its time, then what is left is killed.
- `Roster`: the agents that the broker wants are kept apart from those that the supervisor observes to run. Every event
  ends with a comparison of the two, so a lost or repeated event does no harm. A launch has a number of its own, which
  is never used twice. So a late event about an earlier launch is recognised. When an agent dies before it was ready,
  that is a failure of its principal. After MAX_START_FAILURES failures the principal is given up and the broker is
  told. Ordered deaths (a kill that the broker asked for, a retirement, a lost fork server) never count.

Each is fed with events and answers with actions that the supervisor performs.

Phases of a service: stopped -> starting -> ready -> (waiting ->) starting …, and stopping -> stopped.
Phases of an agent's launch: asked (at the fork server) -> starting (its pid is known) -> ready; from any of them
leaving (it was told to go) or dying (it was killed), and then it is gone.

Source: docs/design/processes.md sections 2, 3, 4 and 6.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from goondan.schemas.wire.control import Exited, Inventory, Principal, Ready, Running, SpawnFailed

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
#: The stages of a stop: the groups of processes that leave side by side, and the time that they get before they are
#: killed (seconds). `turns` are the agents that have not said goodbye, `agents` are all of them. Together with
#: KILL_WAIT_S per stage this stays under the 10 s in which `gdn stop` promises an end.
STOP_ORDER: Final[tuple[tuple[tuple[str, ...], float], ...]] = (
    (("turns",), 3.0),
    (("agents", "forkserver", "toolhost", PROGRAMS, "broker"), 1.5),
)
#: The time that each stage gets when nobody waits for its work any more (seconds): enough to say goodbye.
HURRY_S: Final = 0.2
#: How long killed groups may take to be gone (seconds); then the stop goes on without them.
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

    #: The number of the stage in STOP_ORDER.
    index: int
    #: What was left of it has been killed.
    killed: bool
    #: Until when it has time.
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
    turns_s: float | None = None,
) -> tuple[Stopping | None, list[StopAction]]:
    """What the stop does next. `alive` are the groups with a living process; `state` is None before it begins.

    `hurry`: nobody waits for what still runs, so each stage gets no more than HURRY_S. `turns_s`: the turns get so
    long instead of what STOP_ORDER says (seconds).

    Called when a process has ended and when `until` has come; at the end the state is None and the last action
    Finished.
    """
    index = -1 if state is None else state.index
    if state is not None and (left := [group for group in STOP_ORDER[index][0] if group in alive]):
        if now < state.until:
            return state, []
        if not state.killed:
            return Stopping(index, True, now + KILL_WAIT_S), [KillGroup(group) for group in left]
    for later, (groups, grace) in enumerate(STOP_ORDER[index + 1 :], index + 1):
        if later == 0 and turns_s is not None:
            grace = turns_s
        if there := [group for group in groups if group in alive]:
            until = now + (min(grace, HURRY_S) if hurry else grace)
            return Stopping(later, False, until), [TerminateGroup(group) for group in there]
    return None, [Finished(tuple(group for group in STOP_ORDER[-1][0] if group in alive))]


#: Failed starts in a row after which a principal's events end as E_AGENT_SPAWN_FAILED.
MAX_START_FAILURES: Final = 5
#: Ends in a row, none of them ordered, after which a principal or a service is shown as being in a crash loop.
LOOPS_AT: Final = 3
#: The most agents that start at the same time. More would only slow each other down on few cores. The broker wants no
#: more at a time. The limit is for restarts after a fork server or many agents were lost.
MAX_STARTING: Final = 32
#: How long a start counts as one of those (seconds). A longer start waits for something else than a processor.
STARTING_S: Final = 1.0
#: How long an agent that was asked to leave may take before it is killed (seconds).
LEAVE_LIMIT_S: Final = 10.0

AgentPhase = Literal["asked", "starting", "ready", "leaving", "dying"]


class Agent(Struct):
    """One launch of one principal."""

    #: The principal.
    principal: Principal
    #: The number of the launch.
    launch: int
    #: When the phase began.
    since: float
    #: The phase.
    phase: AgentPhase = "asked"
    #: Whether its pid is known.
    born: bool = False
    #: Whether its end was ordered. Then it does not count as a failure.
    ordered: bool = False
    #: Whether it was ready once.
    was_ready: bool = False
    #: Whether it has said goodbye: it holds nothing any more.
    is_done: bool = False
    #: Whether its start takes longer than STARTING_S.
    slow: bool = False

    @property
    def starting(self) -> bool:
        """Whether it counts as one of the agents that start now."""
        return self.phase in ("asked", "starting") and not self.slow

    def why_ended(self, cause: str) -> str:
        """Why its process has ended, which is seen to have ended by `cause`."""
        if self.phase == "dying" and not self.ordered:
            return f"it was not ready within {START_LIMIT_S:g} s, and was killed"
        return cause


class History(Struct):
    """The past of a principal that is wanted or runs."""

    #: How many starts in a row never became ready.
    failures: int = 0
    #: How many unordered deaths there were in a row after it was ready.
    crashes: int = 0
    #: How often it was started again.
    restarts: int = 0
    #: How its last process ended.
    last_exit: str | None = None

    @property
    def loops(self) -> bool:
        """Whether it ends again and again, however it is started."""
        return max(self.failures, self.crashes) >= LOOPS_AT


class Spawn(Struct, frozen=True):
    """Ask the fork server for this agent."""

    #: The agent and its instance.
    principal: Principal
    #: The number of the launch.
    launch: int


class KillAgent(Struct, frozen=True):
    """SIGKILL to the agent; its exit is reported when it is observed."""

    #: The number of the launch.
    launch: int


class TerminateAgent(Struct, frozen=True):
    """SIGTERM to the agent."""

    #: The number of the launch.
    launch: int


class Tell(Struct, frozen=True):
    """Report to the broker."""

    #: What is reported.
    message: Exited | Ready | SpawnFailed


AgentAction = Spawn | KillAgent | TerminateAgent | Tell


class Roster:
    """Compares the agents that are wanted with those that run. Every method is an event. It returns the actions to
    perform, in order. `now` is seconds of a clock that never goes back.
    """

    def __init__(self) -> None:
        self.wanted: set[Principal] = set()
        self.live: dict[Principal, Agent] = {}
        self.histories: dict[Principal, History] = {}
        self._by_launch: dict[int, Agent] = {}
        self._pending: dict[Principal, None] = {}  # wanted, not live, may start now; in order
        self._delayed: dict[Principal, float] = {}  # wanted, not live, may start at this time
        self._starting = 0
        self._launches = 0
        self._can_spawn = False
        self._stopping = False

    # --- what the broker says

    def want(self, principals: list[Principal], *, full: bool, now: float) -> list[AgentAction]:
        """The wanted set (`full`), or an addition. A running agent that is not wanted is idle: it is left alone."""
        chosen = {p for p in principals if p.role == "agent"}
        if full:
            for gone in self.wanted - chosen:
                self._unwant(gone)
        # In the order of the broker, and not of the set: the first one starts first.
        for principal in principals:
            if principal in chosen and principal not in self.wanted and not self._stopping:
                self.wanted.add(principal)
                if principal not in self.live:
                    self._pending[principal] = None
        return self._fill(now)

    def retire(self, principal: Principal, launch: int, now: float, *, done: bool = False) -> list[AgentAction]:
        """The broker let this launch go. If its exit was observed before this message, no launch follows it. `done`:
        it holds nothing any more.
        """
        self._unwant(principal)
        agent = self._by_launch.get(launch)
        if agent is None or agent.principal != principal:
            return []
        agent.ordered, agent.is_done = True, agent.is_done or done
        if agent.phase not in ("leaving", "dying"):
            self._enter(agent, "leaving", now)
        return self._fill(now)

    def kill(self, principal: Principal, launch: int, now: float) -> list[AgentAction]:
        """The broker wants this launch to end. The principal stays wanted if it was wanted."""
        agent = self._by_launch.get(launch)
        if agent is None or agent.principal != principal:
            # It is gone already: the report and the order have crossed. The broker waits for the report, so it is sent
            # again.
            return [Tell(Exited(principal, launch, "was not running", True))]
        return [*self._condemn(agent, now), *self._fill(now)]

    # --- what the supervisor observes

    def fork_server(self, *, up: bool, now: float) -> list[AgentAction]:
        """Whether spawning is possible. Requests that a dead fork server leaves unanswered are void.

        An agent that it had forked without telling may still say hello; its launch has been reported as ended, so
        the broker refuses it, and the supervisor kills children that it does not know.
        """
        self._can_spawn = up
        if up:
            return self._fill(now)
        actions: list[AgentAction] = []
        for agent in [agent for agent in self.live.values() if not agent.born]:
            agent.ordered = True
            actions += self._gone(agent, "the fork server was lost", now)
        return actions

    def spawned(self, launch: int, now: float) -> list[AgentAction]:
        """The agent has a pid. Orders that it could not get before it had a pid are given to it now."""
        agent = self._by_launch.get(launch)
        if agent is None or agent.born:
            return []
        agent.born = True
        if agent.phase == "asked":
            self._enter(agent, "starting", now)
            return []
        if agent.phase == "ready":
            return []
        return [KillAgent(launch) if agent.phase == "dying" else TerminateAgent(launch)]

    def refused(self, launch: int, cause: str, now: float) -> list[AgentAction]:
        """The fork server could not start it."""
        agent = self._by_launch.get(launch)
        return self._gone(agent, cause, now) if agent is not None else []

    def ready(self, launch: int, now: float) -> list[AgentAction]:
        """The agent said that it is ready. It may say so before its pid is known."""
        agent = self._by_launch.get(launch)
        if agent is None or agent.was_ready:
            return []
        agent.was_ready = True
        history = self.histories.get(agent.principal)
        if history is not None:
            history.failures = 0
        if agent.phase in ("asked", "starting"):
            self._enter(agent, "ready", now)
        return [Tell(Ready(agent.principal, launch)), *self._fill(now)]

    def exited(self, launch: int, cause: str, now: float, *, clean: bool = False) -> list[AgentAction]:
        """The agent's end was observed. `clean`: its exit status was 0, as after a retirement."""
        agent = self._by_launch.get(launch)
        return self._gone(agent, cause, now, clean=clean) if agent is not None else []

    def tick(self, now: float) -> list[AgentAction]:
        """Time has passed. Handle due restarts, and starts and departures that take too long."""
        for principal in [p for p, due in self._delayed.items() if due <= now]:
            del self._delayed[principal]
            self._pending[principal] = None
        actions: list[AgentAction] = []
        for agent in self.live.values():
            history = self.histories.get(agent.principal)
            if agent.starting and now - agent.since >= STARTING_S:
                agent.slow = True
                self._starting -= 1
            if agent.phase == "ready" and history is not None and history.crashes and now - agent.since >= HEALTHY_S:
                history.crashes = 0
            elif agent.phase == "starting" and now - agent.since >= START_LIMIT_S:
                # Killed, but not ordered: a start that hangs is a start that failed.
                self._enter(agent, "dying", now)
                actions.append(KillAgent(agent.launch))
            elif agent.phase == "leaving" and not self._stopping and now - agent.since >= LEAVE_LIMIT_S:
                actions += self._condemn(agent, now)
        return actions + self._fill(now)

    def next_due(self) -> float | None:
        """When to call `tick`: for a restart, or for launches that wait behind starts that take long. None: never."""
        due = [*self._delayed.values()]
        if self._pending and self._starting >= MAX_STARTING:
            due += [agent.since + STARTING_S for agent in self.live.values() if agent.starting]
        return min(due, default=None)

    def stop(self, now: float, *, told: bool = False) -> list[AgentAction]:
        """Nothing starts any more. Running agents are asked to leave. `told`: the broker asks those that are ready."""
        self._stopping = True
        for principal in list(self.wanted):
            self._unwant(principal)
        actions: list[AgentAction] = []
        for agent in self.live.values():
            agent.ordered = True
            if agent.phase != "dying":
                asked = told and agent.phase == "ready"
                self._enter(agent, "leaving", now)
                if agent.born and not asked:  # without a pid: when it is known
                    actions.append(TerminateAgent(agent.launch))
        return actions

    def terminate_all(self) -> list[AgentAction]:
        """Send SIGTERM to all agents: the broker is gone and cannot ask them to leave."""
        return [TerminateAgent(agent.launch) for agent in self.live.values() if agent.born and agent.phase != "dying"]

    def kill_all(self, now: float) -> list[AgentAction]:
        """The time for leaving is over."""
        actions: list[AgentAction] = []
        for agent in list(self.live.values()):
            actions += self._condemn(agent, now)
        return actions

    # --- questions

    def inventory(self) -> Inventory:
        """The running agents, for a broker that has just started or come back."""
        return Inventory([Running(agent.principal, agent.launch, agent.was_ready) for agent in self.live.values()])

    def find(self, launch: int) -> Agent | None:
        """The live agent of a launch."""
        return self._by_launch.get(launch)

    def waits(self, principal: Principal) -> bool:
        """Whether the principal is wanted and has no process."""
        return principal in self._pending or principal in self._delayed

    def overdue(self, now: float) -> bool:
        """Whether the fork server has left a request unanswered for so long that it hangs."""
        return any(not agent.born and now - agent.since >= START_LIMIT_S for agent in self.live.values())

    def audit(self, now: float) -> tuple[list[Principal], list[AgentAction]]:
        """Look for principals that are wanted but neither run nor wait. Such a principal is a bug, and this repairs
        it.
        """
        missed = [p for p in self.wanted if p not in self.live and p not in self._pending and p not in self._delayed]
        for principal in missed:
            self._pending[principal] = None
        return missed, self._fill(now)

    # --- inside

    def _fill(self, now: float) -> list[AgentAction]:
        actions: list[AgentAction] = []
        while self._can_spawn and not self._stopping and self._pending and self._starting < MAX_STARTING:
            principal = next(iter(self._pending))
            del self._pending[principal]
            self._launches += 1
            agent = Agent(principal, self._launches, now)
            self.live[principal] = self._by_launch[agent.launch] = agent
            self._starting += 1
            self.histories.setdefault(principal, History())
            actions.append(Spawn(principal, agent.launch))
        return actions

    def _enter(self, agent: Agent, phase: AgentPhase, now: float) -> None:
        self._starting -= agent.starting
        agent.phase, agent.since = phase, now
        self._starting += agent.starting

    def _condemn(self, agent: Agent, now: float) -> list[AgentAction]:
        agent.ordered = True
        if agent.phase == "dying":
            return []
        self._enter(agent, "dying", now)
        return [KillAgent(agent.launch)] if agent.born else []

    def _unwant(self, principal: Principal) -> None:
        self.wanted.discard(principal)
        self._pending.pop(principal, None)
        self._delayed.pop(principal, None)
        if principal not in self.live:
            self.histories.pop(principal, None)

    def _gone(self, agent: Agent, cause: str, now: float, *, clean: bool = False) -> list[AgentAction]:
        """A launch has ended: report it, and decide when the next one is due, if it is wanted."""
        principal = agent.principal
        self._enter(agent, "dying", now)
        del self.live[principal]
        del self._by_launch[agent.launch]
        actions: list[AgentAction] = [Tell(Exited(principal, agent.launch, cause, agent.ordered, agent.was_ready))]
        history = self.histories.setdefault(principal, History())
        history.last_exit = cause
        if principal not in self.wanted:
            del self.histories[principal]
            return actions + self._fill(now)
        history.restarts += 1
        wait = 0.0
        if agent.ordered:
            pass
        elif agent.was_ready:
            history.crashes += 1
            # A clean exit is a retirement whose order has not arrived yet. So wait for the order.
            wait = max(backoff(history.crashes), FIRST_BACKOFF_S if clean else 0.0)
        else:
            history.failures += 1
            wait = backoff(history.failures)
            if history.failures >= MAX_START_FAILURES:
                # This comes first: after the report of the exit alone the broker would want the agent again.
                actions.insert(0, Tell(SpawnFailed(principal, history.failures, cause)))
                self._unwant(principal)
                return actions + self._fill(now)
        if wait:
            self._delayed[principal] = now + wait
        else:
            self._pending[principal] = None
        return actions + self._fill(now)
