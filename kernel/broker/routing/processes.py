"""Decides which processes are wanted, and what follows when a process is gone. Pure; the supervisor acts.

Rules.
- Level-triggered: an instance with work, a place (places.py) and no process is wanted. The supervisor gets the whole
  set at every connect. It decides nothing: it starts the processes that it is told to start, in the same order.
- A turn has a place while it runs. A process without a place is idle and needs only memory. There are at most as many
  processes as places. Before one more is started, the process that was idle longest is told to leave.
- Few processes are started at a time, so that the next one does not wait behind all earlier ones. A start that hangs
  soon does not count any more, because it needs no processor.
- A lost holder: first its exit is observed, then the epoch grows, then its event is handed over again.

Source: docs/design/processes.md sections 4 and 5; docs/design/delivery.md section 3; docs/decisions/047.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from goondan.kernel.broker.routing.calls import ToolCalls
from goondan.kernel.broker.routing.ends import Cancels, Ends
from goondan.kernel.broker.state import mailbox, presence, shares
from goondan.kernel.broker.state.bus import Bus, principal_of
from goondan.kernel.broker.state.entities import AGENTS, CLIENTS, TOOLS, Connection, Event, Instance
from goondan.kernel.broker.state.parts import OfHosts, Part, hooks_of
from goondan.schemas.wire import control

#: A turn may run this much longer than its event's deadline. Then its process counts as hung (seconds).
DEADLINE_GRACE_S: Final = 10.0
#: So many events of a queue may claim the place of their instance. Later ones wait behind these anyway.
LOOKED_AT: Final = 64
#: How long an agent that has to make room may take to leave (milliseconds).
LEAVE_MS: Final = 1000
#: Agents that may start at the same time. A start takes some milliseconds of a processor, and the next agent waits for
#: all starts before it. With 32 a new instance took 1 to 2 s behind a flood on two busy cores, with 8 half a second.
MAX_STARTING: Final = 8
#: A start that takes longer than this waits for something else than a processor, so it does not count (seconds).
STARTING_S: Final = 1.0


class Processes(Part):
    """The part of the broker that decides about processes."""

    def __init__(self, bus: Bus, ends: Ends, cancels: Cancels, tool_calls: ToolCalls, parts: Sequence[object]) -> None:
        self._bus = bus
        self._ends = ends
        self._cancels = cancels
        self._tool_calls = tool_calls
        hosts = [tool_calls, *parts]
        self._host_lost = hooks_of(hosts, OfHosts, OfHosts.host_lost)
        self._host_ended = hooks_of(hosts, OfHosts, OfHosts.host_ended)
        self._no_host = hooks_of(hosts, OfHosts, OfHosts.no_host)
        self._instances = bus.mailbox.instances
        self._places = bus.mailbox.places
        #: Instances whose process runs, is being started, or is leaving.
        self._processes: set[Instance] = set()
        #: Of these: starting lately -> since when (seconds on the broker's clock).
        self._starting: dict[Instance, float] = {}
        #: Of these: connected and without a place, the longest idle first. Some may not be idle any more.
        self._idle: dict[Instance, None] = {}
        #: Of these: leaving.
        self._leaving: set[Instance] = set()
        #: Of these: leaving, and allowed to finish a running step.
        self._unhurried: set[Instance] = set()
        #: Instances that have a place and are started when another process has gone.
        self._delayed: dict[Instance, None] = {}
        #: Holders that are being killed because they do not answer -> why.
        self._hung: dict[Instance, str] = {}
        self._serving = False
        self.hears = {
            control.Inventory: self._inventory,
            control.Exited: self._exited,
            control.SpawnFailed: self._spawn_failed,
            control.Drain: self._drain,
            control.RestartUndone: self._reopen,
            control.RestartAgents: self._restart_agents,
        }

    # --- wanting

    def want(self, instance: Instance, now: float) -> None:
        """An instance has work and no process: get a place for it, then a process."""
        if instance.requested or instance.leaving or instance.conn is not None or self._bus.control is None:
            return  # without a supervisor nobody starts it; one that comes is told
        self._wait_for_place(instance, now)
        self.serve(now)

    def has_place(self, instance: Instance, now: float) -> bool:
        """Whether a connected instance may get its next event now. If not, it waits for a place here."""
        if not self._places.holds(instance) and not self._places.take(instance, instance.queue[0].claim):
            self._idle.setdefault(instance)
            self._wait_for_place(instance, now)
            self.serve(now)
            return False
        self._idle.pop(instance, None)
        return True

    def rests(self, instance: Instance, now: float) -> None:
        """An instance has no event to work on: it gives its place back."""
        if instance.conn is not None:
            self._places.release(instance)
            self._idle.pop(instance, None)
            self._idle[instance] = None
        elif not (instance.requested or instance.leaving or instance.wanted):
            self._gone(instance, now)
        if self._places.claims:
            self.serve(now)

    def _wait_for_place(self, instance: Instance, now: float) -> None:
        """Wait for a place. It may be counted with any event that waits for this instance."""
        if not self._places.waits(instance):
            instance.waits_since = now
            self._places.wait(instance, self._claims(instance))
            return
        if 0 < len(instance.queue) <= LOOKED_AT:
            self._places.wait(instance, [instance.queue[-1].claim])
        if instance.spawns:
            self._places.wait(instance, [next(reversed(instance.spawns.values())).claim])

    def _claims(self, instance: Instance) -> Iterator[shares.Claim]:
        for event in islice(instance.queue, LOOKED_AT):
            yield event.claim
        for spawn in instance.spawns.values():
            yield spawn.claim
        if not instance.queue and not instance.spawns:  # an answer waits for it
            yield shares.Claim(presence.agent_address(instance.agent, instance.key), instance.address)

    def serve(self, now: float) -> None:
        """Give places to those that wait, as far as the shares allow: start processes, or hand over events."""
        if self._serving:
            return
        self._serving = True
        try:
            while self._places.claims and (grant := self._places.first()) is not None:
                instance = grant.key
                if instance.conn is None:
                    if self._bus.control is None or not instance.wanted:
                        self._places.withdraw(instance)
                        self.rests(instance, now)
                        continue
                    if len(self._starting) >= MAX_STARTING:
                        break
                    self._places.grant(grant)
                    instance.place_s = now - instance.waits_since
                    # It has a place: ask for its process, or first for room.
                    instance.requested = True
                    self._starting[instance] = now
                    self._delayed[instance] = None
                    self._fill(now)
                elif instance.leased is not None or not instance.queue or self._bus.closing:
                    self._places.withdraw(instance)
                else:
                    self._places.grant(grant)
                    instance.place_s = now - instance.waits_since
                    self._bus.due[instance] = None
        finally:
            self._serving = False

    def _fill(self, now: float) -> None:
        """Start instances that waited until a process was gone. For the others, tell idle processes to leave."""
        while self._delayed and len(self._processes) < self._places.capacity:
            instance = next(iter(self._delayed))
            del self._delayed[instance]
            self._processes.add(instance)
            self._bus.tell_supervisor(control.Wanted([principal_of(instance)]))
        kept: list[Instance] = []
        while self._idle and len(self._delayed) > len(self._leaving):
            instance = next(iter(self._idle))
            del self._idle[instance]
            connection = instance.conn
            if connection is None or instance.leased or self._places.holds(instance):
                continue
            if instance.answers:  # it is about to acknowledge them
                kept.append(instance)
                continue
            self._bus.shutdown(connection, LEAVE_MS, "idle")
            self.leave(instance, connection, now)
        self._idle.update(dict.fromkeys(kept))

    def wanted(self) -> control.Wanted:
        """The whole set of wanted processes, for a supervisor that has just connected."""
        wanted = [principal_of(i) for i in self._processes if (i.wanted or i.conn is not None) and not i.leaving]
        return control.Wanted(wanted, full=True)

    def process_here(self, instance: Instance, connection: Connection, now: float) -> None:
        """An agent process was welcomed."""
        connection.instance = instance
        instance.conn = connection
        instance.requested = instance.leaving = False
        self._processes.add(instance)
        self._leaving.discard(instance)
        self._unhurried.discard(instance)
        self._starting.pop(instance, None)
        self._delayed.pop(instance, None)

    def leave(self, instance: Instance, connection: Connection, now: float) -> None:
        """An agent process leaves as agreed. If a supervisor started it, its exit has yet to be observed."""
        self._bus.presence.drop(connection)
        instance.conn = None
        self._idle.pop(instance, None)
        self._places.release(instance)
        if connection.claims.launch and self._bus.control is not None:
            instance.leaving = True
            self._leaving.add(instance)
            self._bus.tell_supervisor(control.Retire(principal_of(instance), connection.claims.launch))
        else:
            self._gone(instance, now)

    def dismissed(self, instance: Instance, now: float) -> bool:
        """Have the process of an instance without work leave. True when it has none and none will come."""
        connection = instance.conn
        if connection is not None and (self._bus.control is not None or not connection.claims.launch):
            self._bus.shutdown(connection, LEAVE_MS, "idle")
            self.leave(instance, connection, now)
        elif connection is None and (instance in self._delayed or not instance.requested):
            if instance in self._delayed:  # nobody has been asked for it yet
                instance.requested = False
                self._processes.discard(instance)
                self._starting.pop(instance, None)
                del self._delayed[instance]
            self._places.release(instance)
        return instance not in self._processes and not instance.requested

    # --- the supervisor's word

    def _drain(self, message: control.Drain, now: float) -> None:
        """The kernel ends: tell every agent and client. Agents that come back later are told at their hello."""
        self._bus.closing = True
        self._bus.draining = (message.reason, now + message.grace_period_ms / 1000)
        for cls in (AGENTS, CLIENTS):  # clients hear why their answers do not come
            for connection in self._bus.presence.connections[cls].values():
                self._bus.shutdown(connection, message.grace_period_ms, message.reason)

    def _restart_agents(self, message: control.RestartAgents, now: float) -> None:
        """The processes of these agents leave, at once or after a step. An instance with work is wanted again then."""
        for instance in list(self._instances.values()):
            connection = instance.conn
            if connection is None or instance.agent not in message.agents:
                continue
            launch = connection.claims.launch
            if message.launches is not None and launch not in message.launches:
                continue
            if instance.leaving and (instance not in self._unhurried or message.grace_period_ms is None):
                continue
            self._bus.shutdown(connection, message.grace_period_ms, message.reason)
            if instance.leased is None and not instance.answers:
                self.leave(instance, connection, now)
            elif launch:
                # It goes on to speak until it has given back what it holds; the supervisor sees it gone.
                instance.leaving = True
                self._leaving.add(instance)
                if message.grace_period_ms is None:
                    self._unhurried.add(instance)
                else:
                    self._retire(instance)

    def _retire(self, instance: Instance, *, done: bool = False) -> None:
        """From now on the supervisor watches this process until its end, and kills it when it takes too long."""
        self._unhurried.discard(instance)
        if (connection := instance.conn) is not None:
            self._bus.tell_supervisor(control.Retire(principal_of(instance), connection.claims.launch, done))

    def says_goodbye(self, instance: Instance) -> None:
        """The process of an instance has released its event, and ends now."""
        if instance in self._unhurried or self._bus.draining is not None:
            self._retire(instance, done=True)

    def _reopen(self, message: control.RestartUndone, now: float) -> None:
        """The kernel goes on: hand over the events that were held back."""
        for instance in list(self._instances.values()):
            self._bus.due[instance] = None
        self.serve(now)

    def _inventory(self, message: control.Inventory, now: float) -> None:
        """The supervisor names the agents that run, at every connect. All others that it had started have ended.

        A tool host that ended meanwhile is noticed when its successor says hello.
        """
        running = {_address(item.principal): item.launch for item in message.running}
        agents = [item.launch for item in message.running if item.principal.role == "agent"]
        self._bus.presence.agents_ended.all_but(agents)
        for connection in list(self._bus.presence.connections[AGENTS].values()):
            claims = connection.claims
            if claims.launch and running.get(connection.address, 0) != claims.launch:
                principal = control.Principal("agent", claims.agent or "", claims.instance_key or "")
                self._exited(control.Exited(principal, claims.launch, "it ended unheard"), now)
        for instance in list(self._instances.values()):
            if instance.conn is None and presence.agent_address(instance.agent, instance.key) not in running:
                instance.requested = instance.leaving = False
                self.lost(instance, "its process is gone", counts=False, now=now)

    def _exited(self, message: control.Exited, now: float) -> None:
        principal = message.principal
        connection = self._bus.presence.end_launch(_address(principal), message.launch)
        if principal.role == "toolhost":
            for ended in self._host_ended:
                ended(_address(principal), message.launch, now)
            return
        instance = self._instances.get((principal.name, principal.instance_key or ""))
        if instance is None or (instance.conn is not None and instance.conn is not connection):
            return  # unknown, or news of an earlier launch
        hung = self._hung.pop(instance, None)
        # A start that failed says nothing of the event that waits for it: the supervisor counts those.
        counts = hung is not None or (message.started and not (message.ordered or instance.leaving))
        instance.conn = None
        instance.requested = instance.leaving = False
        self.lost(instance, hung or message.cause, counts=counts, now=now)

    def _spawn_failed(self, message: control.SpawnFailed, now: float) -> None:
        principal = message.principal
        if principal.role == "toolhost":
            for no_host in self._no_host:
                no_host(message.message)
            return
        instance = self._instances.get((principal.name, principal.instance_key or ""))
        if instance is None:
            return
        instance.requested = False
        self._bus.mailbox.lose_holder(instance, counts=False)  # it was welcomed, handed its event, and ended then
        text = spawn_failure(message)
        for event in list(instance.queue):
            if event.cancelled:
                self._cancels.end_queued(event)
            else:
                self._ends.give_up(event, "dead", "E_AGENT_SPAWN_FAILED", text)
        self._gone(instance, now)

    # --- losses

    def lost(self, instance: Instance, cause: str, *, counts: bool, now: float) -> None:
        """The process of an instance is certainly gone: it gets a new epoch, and its event goes to the next process."""
        self.count_attempt(self._bus.mailbox.lose_holder(instance, counts=counts), cause)
        if instance.conn is None:
            self._forget(instance)
            if not instance.wanted:
                self._gone(instance, now)
                return
        self._bus.due[instance] = None
        if instance.spawns:
            self.want(instance, now)
        self._fill(now)
        self.serve(now)

    def count_attempt(self, event: Event | None, cause: str) -> None:
        """A delivery of `event` did not lead to its end. Write down how far its turn came, and how many deliveries made
        no progress: after some of these the event is given up.
        """
        if event is None:
            return
        self._bus.stage(self._bus.ledger.attempt(event))
        if event.work.attempts >= mailbox.MAX_ATTEMPTS:
            message = f"the agent ended {event.work.attempts} times on this event without progress, last: {cause}"
            self._ends.give_up(event, "dead", "E_AGENT_FAILED", message)

    def unreachable(self, connection: Connection, now: float) -> None:
        """The transport has no such peer any more. With a supervisor, only its news count; without one, this counts."""
        self._bus.presence.drop(connection)
        instance = connection.instance
        supervised = self._bus.control is not None and connection.claims.launch > 0
        if instance is not None and instance.conn is connection:
            instance.conn = None
            if not supervised:
                self.lost(instance, "the connection was lost", counts=True, now=now)
        elif connection.cls == TOOLS and supervised:
            self._tool_calls.host_unreachable(connection)
        elif connection.cls == TOOLS:
            self.host_lost(connection, now)

    def host_lost(self, host: Connection, now: float) -> None:
        """A tool host is gone, with all that ran there."""
        for lost in self._host_lost:
            lost(host, now)

    def _forget(self, instance: Instance) -> None:
        """The instance has no process, and the one that was asked for will not come."""
        self._processes.discard(instance)
        self._leaving.discard(instance)
        self._unhurried.discard(instance)
        for kept in (self._starting, self._idle, self._delayed):
            kept.pop(instance, None)
        self._hung.pop(instance, None)
        self._places.release(instance)

    def _gone(self, instance: Instance, now: float) -> None:
        self._forget(instance)
        self._bus.mailbox.forget_idle(instance)
        if instance.wanted:
            self.want(instance, now)
        self._fill(now)
        self.serve(now)

    # --- time

    def tick(self, now: float) -> None:
        """Find hung holders and starts that take too long, and make room."""
        for instance in list(self._bus.mailbox.holding):
            event = instance.leased
            if event is None:
                continue
            late = event.deadline is not None and event.deadline + DEADLINE_GRACE_S <= now and not event.held
            if late or event.work.lease_until <= now:
                if late:
                    event.deadline = now  # the kill gets its own grace before it is asked for again
                event.work.lease_until = now + DEADLINE_GRACE_S
                reason = self._hung[instance] = "its deadline passed" if late else "its lease ran out"
                self.kill(instance, reason, now)
        for instance in [one for one in self._unhurried if one.leased is None]:  # so it should be gone in a moment
            self._retire(instance)
        for instance in [instance for instance, since in self._starting.items() if now - since >= STARTING_S]:
            del self._starting[instance]
        self._fill(now)
        self.serve(now)

    def kill(self, instance: Instance, reason: str, now: float) -> None:
        """Kill the process of an instance and wait for its exit. Without a supervisor it only gets a new epoch."""
        connection = instance.conn
        if self._bus.control is not None and connection is not None and connection.claims.launch:
            self._bus.tell_supervisor(control.Kill(principal_of(instance), connection.claims.launch, reason))
            return
        if connection is not None:
            self._bus.presence.drop(connection)
            instance.conn = None
        self.lost(instance, reason, counts=True, now=now)


def spawn_failure(message: control.SpawnFailed) -> str:
    """The reason why a process could not be started, for those who wait for it."""
    return f"the agent could not be started in {message.attempts} attempts: {message.message}"


def _address(principal: control.Principal) -> str:
    if principal.role == "agent":
        return presence.agent_address(principal.name, principal.instance_key or "")
    return f"{principal.role}/{principal.name}"
