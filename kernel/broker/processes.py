"""Which processes are wanted, and what follows when one is gone. Pure; the supervisor acts.

Rules.
- Level-triggered: an instance with work and no process is wanted; the whole set is told at every control connect.
- At most `max_live_agents` processes; for one more, the longest idle one is sent home first.
- An agent that is asked by one that waits for it gets a process beyond that number, one for each that waits: else all
  places could be taken by those who wait. Chains have a limit (events.MAX_CHAIN), so this ends.
- A lost holder: its exit has been observed, then the epoch grows, then its event is handed out again.

Source: delivery.md sections 3, 6, 8.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

import msgspec

from kernel.broker.bus import Bus, principal_of
from kernel.broker.directory import Directory
from kernel.broker.events import Events
from kernel.broker.mailbox import Instance
from kernel.broker.presence import AGENTS, CLIENTS, TOOLS, Connection, agent_address
from kernel.broker.tool_calls import ToolCalls
from schemas.codec import DECODE_ERRORS, check_depth, to_raw
from schemas.control import Exited, Inventory, Kill, Principal, Retire, SpawnFailed, ToBroker, Wanted
from schemas.errors import GoondanError, error_payload
from schemas.frames import Frame, Shutdown

#: A turn may run this much longer than its event's deadline before its process is taken for hung (seconds).
DEADLINE_GRACE_S: Final = 10.0
#: A peer that was silent this long is pinged; an unreachable one is dropped then (seconds).
PING_AFTER_S: Final = 2.0
#: Events of a queue that are looked at for one whose asker waits; behind so many it waits for them anyway.
LOOKED_AT: Final = 64
#: How long an agent that has to make room may take to leave (milliseconds).
LEAVE_MS: Final = 1000

_decode_control = msgspec.msgpack.Decoder(ToBroker).decode


class Processes:
    """The process side of the broker."""

    def __init__(self, bus: Bus, events: Events, tool_calls: ToolCalls, directory: Directory) -> None:
        self._bus = bus
        self._events = events
        self._directory = directory
        self._tool_calls = tool_calls
        self._instances = bus.mailbox.instances
        #: Instances that have a process, or will, or whose process is still leaving.
        self._places: set[Instance] = set()
        self._waiting: deque[Instance] = deque()
        #: Instances with a process beyond the limit -> the address of the one that waits for each.
        self._extra: dict[Instance, str] = {}

    # --- wanting

    def want(self, instance: Instance) -> None:
        """An instance has work and no process: ask for one, or for room first."""
        if instance.requested or instance.leaving or instance.conn is not None:
            return
        if instance not in self._places and len(self._places) >= self._bus.plan.max_live_agents:
            waits = self._waits_for(instance)
            if waits is None:
                if instance not in self._waiting:
                    self._waiting.append(instance)
                return
            self._extra[instance] = waits
        self._places.add(instance)
        instance.requested = True
        self._bus.tell_supervisor(Wanted([principal_of(instance)]))

    def _waits_for(self, instance: Instance) -> str | None:
        """The agent whose turn cannot end before this instance has a process, and that has no such process yet."""
        for event in islice(instance.queue, LOOKED_AT):
            if event.chain and event.reply_to is not None and event.chain[-1] not in self._extra.values():
                return event.chain[-1]
        return None

    def wanted(self) -> Wanted:
        """The whole set, for a supervisor that has just connected."""
        wanted = [principal_of(i) for i in self._places if (i.wanted or i.conn is not None) and not i.leaving]
        return Wanted(wanted, full=True)

    def not_needed(self, instance: Instance) -> None:
        """An instance without a process has nothing to do any more: its place is free."""
        if not (instance.requested or instance.leaving or instance.wanted):
            self._gone(instance)

    def here(self, instance: Instance, connection: Connection, now: float) -> None:
        """An agent process was welcomed."""
        connection.instance = instance
        instance.conn = connection
        instance.requested = instance.leaving = False
        instance.idle_since = now
        self._places.add(instance)
        self._directory.started(instance, now)

    def leave(self, instance: Instance, connection: Connection) -> None:
        """An agent process goes with our consent; its exit is still to be seen if a supervisor started it."""
        self._bus.presence.drop(connection)
        instance.conn = None
        if connection.claims.launch and self._bus.control is not None:
            instance.leaving = True
            self._bus.tell_supervisor(Retire(principal_of(instance), connection.claims.launch))
        else:
            self._gone(instance)

    def make_room(self) -> None:
        """Instances wait for a place: give them what is free, and send idle processes home for the rest."""
        while self._waiting and len(self._places) < self._bus.plan.max_live_agents:
            instance = self._waiting.popleft()
            if instance.wanted:
                self.want(instance)
        for instance in [instance for instance in self._waiting if self._waits_for(instance) is not None]:
            self._waiting.remove(instance)
            self.want(instance)
        if not self._waiting:
            return
        leaving = sum(1 for i in self._places if i.leaving)
        idle = sorted(
            (i for i in self._places if i.conn is not None and not i.wanted and not i.leaving),
            key=lambda instance: instance.idle_since,
        )
        for instance in idle[: max(0, len(self._waiting) - leaving)]:
            connection = instance.conn
            if connection is not None:
                self._bus.send(connection, Frame("shutdown", payload=to_raw(Shutdown(LEAVE_MS, "idle"))))
                self.leave(instance, connection)

    # --- the supervisor's word

    def control_event(self, connection: Connection, frame: Frame, now: float) -> None:
        """`runtime.event` from the supervisor."""
        try:
            check_depth(bytes(frame.payload))
            message = _decode_control(frame.payload)
        except DECODE_ERRORS as error:
            raise GoondanError(error_payload("E_FRAME_INVALID", f"no control message: {error}")) from None
        if isinstance(message, Inventory):
            self._inventory(message, now)
        elif isinstance(message, Exited):
            self._exited(message, now)
        elif isinstance(message, SpawnFailed):
            self._spawn_failed(message)

    def _inventory(self, message: Inventory, now: float) -> None:
        """The agents that run, told at every control connect: others that it had started have ended unheard.

        A tool host that ended unheard is found out when its successor says hello.
        """
        running = {_address(item.principal): item.launch for item in message.running}
        for connection in list(self._bus.presence.connections[AGENTS].values()):
            claims = connection.claims
            if claims.launch and running.get(connection.address, 0) != claims.launch:
                principal = Principal("agent", claims.agent or "", claims.instance_key or "")
                self._exited(Exited(principal, claims.launch, "it ended unheard"), now)
        for instance in list(self._instances.values()):
            if instance.conn is None and agent_address(instance.agent, instance.key) not in running:
                instance.requested = instance.leaving = False
                self.lost(instance, "its process is gone", counts=False, now=now)

    def _exited(self, message: Exited, now: float) -> None:
        principal = message.principal
        connection = self._bus.presence.end_launch(_address(principal), message.launch)
        if principal.role == "toolhost":
            self._tool_calls.launch_ended(_address(principal), message.launch)
            return
        instance = self._instances.get((principal.name, principal.instance_key or ""))
        if instance is None or (instance.conn is not None and instance.conn is not connection):
            return  # unknown, or news of an earlier launch
        counts = not (message.ordered or instance.leaving)
        instance.conn = None
        instance.requested = instance.leaving = False
        self.lost(instance, message.cause, counts=counts, now=now)

    def _spawn_failed(self, message: SpawnFailed) -> None:
        principal = message.principal
        if principal.role == "toolhost":
            self._tool_calls.no_host(message.message)
            return
        instance = self._instances.get((principal.name, principal.instance_key or ""))
        if instance is None:
            return
        instance.requested = False
        text = f"the agent could not be started in {message.attempts} attempts: {message.message}"
        for event in list(instance.queue):
            self._events.end(event, "dead", "E_AGENT_SPAWN_FAILED", text)
        self._directory.failed(instance, "E_AGENT_SPAWN_FAILED", text)
        self._gone(instance)

    # --- losses

    def lost(self, instance: Instance, cause: str, *, counts: bool, now: float) -> None:
        """The process of an instance is gone for certain: new epoch, and its event to the next one."""
        given_up = self._bus.mailbox.lose_holder(instance, counts=counts)
        if given_up is not None:
            message = f"the agent ended {given_up.attempts} times on this event without progress, last: {cause}"
            self._events.end(given_up, "dead", "E_AGENT_FAILED", message)
        if instance.conn is None and not instance.wanted:
            self._gone(instance)
            return
        self._events.dispatch(instance, now)
        if instance.spawns:
            self.want(instance)

    def unreachable(self, connection: Connection, now: float) -> None:
        """libzmq has no such peer any more. With a supervisor its word counts, without one this is all there is."""
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
            self._tool_calls.host_lost(connection)

    def _gone(self, instance: Instance) -> None:
        self._places.discard(instance)
        self._extra.pop(instance, None)
        self._bus.mailbox.forget_idle(instance)
        if instance.wanted:
            self.want(instance)
        self.make_room()

    # --- time

    def tick(self, now: float) -> None:
        """Hung holders, quiet peers, room."""
        for instance in list(self._instances.values()):
            event = instance.leased
            if event is None:
                continue
            late = event.deadline is not None and event.deadline + DEADLINE_GRACE_S <= now
            if late or event.lease_until <= now:
                self._unhang(instance, "its deadline passed" if late else "its lease ran out", now)
        self._ping_quiet(now)
        self.make_room()

    def _unhang(self, instance: Instance, reason: str, now: float) -> None:
        """A holder that does not answer: killed, and its exit waited for; only fenced where nobody can kill it."""
        event, connection = instance.leased, instance.conn
        if event is None:
            return
        if event.deadline is not None and event.deadline + DEADLINE_GRACE_S <= now:
            event.deadline = now  # the kill gets its own grace before it is asked for again
        event.lease_until = now + DEADLINE_GRACE_S
        if self._bus.control is not None and connection is not None and connection.claims.launch:
            self._bus.tell_supervisor(Kill(principal_of(instance), connection.claims.launch, reason))
            return
        if connection is not None:
            self._bus.presence.drop(connection)
            instance.conn = None
        self.lost(instance, reason, counts=True, now=now)

    def _ping_quiet(self, now: float) -> None:
        """Ask peers that hold something, or that nobody watches, for a sign of life."""
        for cls in (AGENTS, TOOLS, CLIENTS):
            for connection in list(self._bus.presence.connections[cls].values()):
                instance = connection.instance
                watched_and_idle = instance is not None and connection.claims.launch > 0 and not instance.wanted
                if not watched_and_idle and now - connection.last_seen > PING_AFTER_S:
                    connection.last_seen = now
                    self._bus.send(connection, Frame("ping"))


def _address(principal: Principal) -> str:
    if principal.role == "agent":
        return agent_address(principal.name, principal.instance_key or "")
    return f"{principal.role}/{principal.name}"
