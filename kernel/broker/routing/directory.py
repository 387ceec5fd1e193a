"""Answers `agents.*`: lists agents and instances, and starts an instance that has no event yet. Pure.

Agents ask for themselves. Tool hosts ask in the name of an open call (acting.py). Both are served in the same way.

Rules.
- Every frame gets one `reply` or `error`. `agents.spawn` is answered when the process has said hello. A process that
  cannot be started, or not in time, is answered with an error.
- A repeat (same sender, same frame id) is the same request: it starts nothing and gets the same answer.
- An instance has a working directory of its own, or the one that a spawn gave it (workdirs.py).
- The number of remembered spawned instances is bounded, for each asker and in all. Instances without a process are
  forgotten first. A spawn is journaled before the asker is told, so that a new broker knows it.

Source: docs/design/wire.md section 4; docs/design/delivery.md section 5; requirements AGENTS-22 to AGENTS-30.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from goondan.kernel.broker.routing import acting, processes
from goondan.kernel.broker.state import entities, shares
from goondan.kernel.broker.state.bus import Bus, overloaded
from goondan.kernel.broker.state.parts import LISTS_BYTES, Part, Record, Take, fitting
from goondan.kernel.broker.state.records import InstanceSpawned, Item, Write
from goondan.kernel.broker.state.workdirs import Beneath, Workdir, shared
from goondan.schemas.bundle.address import is_instance_key
from goondan.schemas.text.times import rfc3339
from goondan.schemas.wire import codec, errors, frames
from goondan.schemas.wire.control import Exited, Inventory, Principal, Ready, SpawnFailed
from goondan.schemas.wire.frames import NO_PAYLOAD, OPERATOR_AGENT, Frame

#: How long a process may take to start when the asker names no deadline (seconds).
SPAWN_S: Final = 60.0
#: Instances that one asker has spawned, and that all have, of which it is remembered who did.
MAX_OWNED: Final = 256
MAX_SPAWNED: Final = 4096
#: Frames that may wait for the process of one instance.
MAX_WAITING: Final = 256


class Directory(Part):
    """Knows the instances that were spawned, and those who wait for their processes."""

    def __init__(self, bus: Bus, actors: acting.Actors, want: Callable[[entities.Instance, float], None]) -> None:
        """`want` asks for the process of an instance (Processes)."""
        self._bus = bus
        self._actors = actors
        self._want = want
        #: Spawned instances, the oldest first.
        self._spawned: dict[entities.Instance, None] = {}
        #: The same by the agent and the instance key that spawned them.
        self._owned: defaultdict[tuple[str, str], dict[entities.Instance, None]] = defaultdict(dict)
        #: Instances for whose process somebody may still wait.
        self._awaited: dict[entities.Instance, None] = {}
        #: Launches that are ready: they have loaded all that they need.
        self._ready: set[int] = set()
        self.takes = (
            Take((entities.AGENTS, entities.TOOLS), "agents.spawn", self.spawn, LISTS_BYTES, confined="inside"),
            Take((entities.AGENTS, entities.TOOLS), "agents.list", self.list, LISTS_BYTES),
            Take((entities.AGENTS, entities.TOOLS), "agents.catalog", self.catalog),
        )
        self.records = (Record(InstanceSpawned, self._restore),)
        self.hears = {
            SpawnFailed: self.spawn_failed,
            Ready: self.heard,
            Inventory: self.heard,
            Exited: self.heard,
        }

    def _restore(self, subject: str, record: InstanceSpawned) -> None:
        """Take over a record of an earlier broker."""
        if record.agent in self._bus.plan.agents and is_instance_key(record.key):
            created = record.created - self._bus.booted_at
            instance = self._bus.instance(record.agent, record.key, created)
            cwd = None if record.cwd is None else Workdir(record.cwd, record.beneath or Beneath(record.cwd))
            instance.workdir = cwd or instance.workdir
            self._own(instance, entities.Spawned(record.owner_agent, record.owner_key, created, cwd, ("", "")))

    # --- frames

    def catalog(self, connection: entities.Connection, frame: Frame, now: float) -> None:
        """`agents.catalog`: the agents of the swarm."""
        me = _instance(self._actors.of(connection, frame)).agent
        available = sorted(name for name in self._bus.plan.agents if name != OPERATOR_AGENT)
        others = [name for name in available if name != me]
        body = frames.AgentsCatalog(
            swarm_name=self._bus.plan.swarm,
            entry_agent=self._bus.plan.entry_agent,
            self_agent=me,
            available_count=len(available),
            callable_count=len(others),
            available_agents=available,
            callable_agents=others,
        )
        self._bus.reply(connection, frame.id, body)

    def list(self, connection: entities.Connection, frame: Frame, now: float) -> None:
        """`agents.list`: the instances that the asker has spawned, or all of them."""
        me = _instance(self._actors.of(connection, frame))
        asked = frames.AgentsList() if frame.payload == NO_PAYLOAD else codec.from_raw(frame.payload, frames.AgentsList)
        every = [*self._bus.mailbox.instances.values()] if asked.include_all else [*self._spawned]

        def entries() -> Iterator[frames.ListedAgent]:
            for instance in every:
                record = instance.spawned
                mine = record is not None and (record.owner_agent, record.owner_key) == (me.agent, me.key)
                if instance.agent != OPERATOR_AGENT and (mine or asked.include_all):
                    yield self._entry(instance, record)

        agents = fitting(entries())
        self._bus.reply(connection, frame.id, frames.AgentsListed(len(agents), agents))

    def spawn(self, connection: entities.Connection, frame: Frame, now: float) -> None:
        """`agents.spawn`: start the process of an instance; answered when the process is there."""
        actor = self._actors.of(connection, frame)
        me = _instance(actor)
        target, key = frame.to or "", frame.instance_key or me.key
        self._bus.check_target(target, key)
        if self._bus.closing:
            raise overloaded("the kernel is stopping", 1000)
        cwd = _workdir(actor, me, frame, self._bus.plan.spawn_workdirs)
        instance = self._bus.mailbox.instances.get((target, key))
        if instance is not None and instance.deleting:
            raise overloaded(f"{instance.address} is being deleted")
        by = (actor.sender, frame.id)
        if instance is not None and by in instance.spawns:
            instance.spawns[by].conn = connection  # a repeat, perhaps over another connection
            return
        if instance is not None and self._is_there(instance) and not instance.leaving:
            _same_workdir(instance, cwd)
            again = instance.spawned is not None and instance.spawned.by == by
            self._told(connection, frame.id, instance, spawned=again)
            return
        if instance is not None and (instance.wanted or instance.spawned is not None or instance.conn is not None):
            _same_workdir(instance, cwd)
            if len(instance.spawns) >= MAX_WAITING:
                raise overloaded(f"too many wait for {instance.address}")
        if instance is None or instance.spawned is None:
            self._make_room(me)
        instance = self._bus.instance(target, key, now)
        if cwd is not None:
            instance.workdir = cwd
        item = Item(())
        if instance.spawned is None:
            item = self._own(instance, entities.Spawned(me.agent, me.key, now, cwd, by))
        else:
            instance.spawned = replace(instance.spawned, by=by)
        milliseconds = frame.deadline_ms
        patience_s = SPAWN_S if milliseconds is None else max(0, milliseconds) / 1000
        turn = actor.turn
        lender, depth = (None, 0) if turn is None else (turn.id, 1 + turn.depth)  # it waits for the process
        claim = shares.Claim(actor.session, actor.root or me.address, lender=lender, depth=depth)
        instance.spawns[by] = entities.PendingSpawn(connection, frame.id, now + patience_s, claim)
        self._awaited[instance] = None
        self._bus.stage(item, partial(self._journaled, instance))

    def _journaled(self, instance: entities.Instance, kept: bool) -> None:
        """The journal knows who spawned this instance: its process may be started."""
        if instance.spawns:
            self._want(instance, self._bus.now)

    # --- results of spawns

    def welcomed(self, instance: entities.Instance) -> None:
        """The process of an instance has said hello. It may still fail while it loads its extensions."""
        if self._is_there(instance):
            for waiting in instance.spawns.values():
                self._told(waiting.conn, waiting.frame_id, instance, spawned=True)
            instance.spawns.clear()

    def heard(self, message: Ready | Inventory | Exited, now: float) -> None:
        """News of the supervisor about processes that are ready, run or have ended."""
        if isinstance(message, Exited):
            self._ready.discard(message.launch)
            return
        if isinstance(message, Ready):
            self._ready.add(message.launch)
            instances = self._of(message.principal)
        else:
            self._ready = {one.launch for one in message.running if one.ready}
            instances = [*self._awaited]
        for instance in instances:
            self.welcomed(instance)

    def _is_there(self, instance: entities.Instance) -> bool:
        """Whether its process is connected and ready. Nobody reports this of a process that was started by hand."""
        launch = 0 if instance.conn is None else instance.conn.claims.launch
        return instance.conn is not None and (launch == 0 or launch in self._ready)

    def spawn_failed(self, message: SpawnFailed, now: float) -> None:
        """The supervisor could not start a process."""
        for instance in self._of(message.principal):
            self.failed(instance, "E_AGENT_SPAWN_FAILED", processes.spawn_failure(message))

    def _of(self, principal: Principal) -> Sequence[entities.Instance]:
        """The instance of an agent process; none for another process."""
        found = self._bus.mailbox.instances.get((principal.name, principal.instance_key or ""))
        return () if found is None or principal.role != "agent" else (found,)

    def failed(self, instance: entities.Instance, code: str, message: str) -> None:
        """The process of an instance cannot be started: tell everybody who waits for it."""
        for waiting in instance.spawns.values():
            self._refuse(waiting, code, message)
        instance.spawns.clear()

    def deleted(self, instance: entities.Instance) -> Item:
        """Forget who spawned an instance, and which others it spawned. Returns the writes for the journal."""
        writes: tuple[Write, ...] = ()
        if instance in self._spawned:
            writes += self._own(instance, None).writes
        for other in [*self._owned.get((instance.agent, instance.key), ())]:
            if other.spawned is not None:
                writes += self._own(other, replace(other.spawned, owner_agent="", owner_key="")).writes
        return Item(writes)

    def tick(self, now: float) -> None:
        """Answer those whose time is over. The process may still start."""
        for instance in list(self._awaited):
            for by, waiting in list(instance.spawns.items()):
                if waiting.until <= now:
                    del instance.spawns[by]
                    self._refuse(waiting, "E_AGENT_TIMEOUT", f"{instance.address} was not started in time")
            if not instance.spawns:
                del self._awaited[instance]

    # --- inside

    def _make_room(self, me: entities.Instance) -> None:
        """If there are too many, forget the oldest spawned instance that has no process and no work."""
        for among, limit in ((self._owned.get((me.agent, me.key), {}), MAX_OWNED), (self._spawned, MAX_SPAWNED)):
            if len(among) < limit:
                continue
            idle = next((i for i in among if i.conn is None and not i.wanted and not i.requested), None)
            if idle is None:
                message = f"{len(among)} spawned instances have processes or work; no more are started now"
                raise errors.fail("E_AGENT_SPAWN_FAILED", message, suggestion="Wait until some of them have ended.")
            self._bus.stage(self._own(idle, None))
            self._bus.mailbox.forget_idle(idle)

    def _own(self, instance: entities.Instance, spawned: entities.Spawned | None) -> Item:
        """Remember who spawned an instance, or forget it (None). Returns the writes for the journal."""
        if (before := instance.spawned) is not None:
            owned = self._owned[before.owner_agent, before.owner_key]
            del owned[instance]
            if not owned:
                del self._owned[before.owner_agent, before.owner_key]
        instance.spawned = spawned
        if spawned is None:
            del self._spawned[instance]
        else:
            self._spawned[instance] = self._owned[spawned.owner_agent, spawned.owner_key][instance] = None
        return self._bus.ledger.spawned(instance, spawned)

    def _entry(self, instance: entities.Instance, record: entities.Spawned | None) -> frames.ListedAgent:
        created = instance.since if record is None else record.created
        return frames.ListedAgent(
            target=instance.agent,
            instance_key=instance.key,
            owner_agent=None if record is None else record.owner_agent or None,
            owner_instance_key=None if record is None else record.owner_key or None,
            created_at=rfc3339(self._bus.booted_at + created),
            cwd=None if record is None else _path(record),
        )

    def _told(
        self, connection: entities.Connection, frame_id: str, instance: entities.Instance, *, spawned: bool
    ) -> None:
        cwd = None if instance.spawned is None else _path(instance.spawned)
        self._bus.reply(connection, frame_id, frames.SpawnedAgent(instance.agent, instance.key, spawned, cwd))

    def _refuse(self, waiting: entities.PendingSpawn, code: str, message: str) -> None:
        asked = Frame("agents.spawn", id=waiting.frame_id)
        self._bus.error(waiting.conn.cls, waiting.conn.ident, errors.error_payload(code, message), asked)


def _instance(actor: entities.Actor) -> entities.Instance:
    if actor.instance is None:
        raise errors.fail("E_FORBIDDEN", "a tool host asks in the name of an open call only")
    return actor.instance


def _workdir(actor: entities.Actor, me: entities.Instance, frame: Frame, opened: Sequence[str]) -> Workdir | None:
    """The workdir that `cwd` of a spawn names: in the asker's workdir, or opened by the policy. None without `cwd`."""
    asked = frames.AgentsSpawn() if frame.payload == NO_PAYLOAD else codec.from_raw(frame.payload, frames.AgentsSpawn)
    if asked.cwd is None:
        return None
    named = None if actor.turn is None else actor.turn.content.workdir
    return shared(me.workdir if named is None else Workdir(named), asked.cwd, opened)


def _same_workdir(instance: entities.Instance, cwd: Workdir | None) -> None:
    if cwd is not None and cwd.path != instance.workdir.path:
        message = f"{instance.address} is there already, with another working directory"
        raise errors.fail("E_AGENT_SPAWN_FAILED", message, suggestion="Spawn another instance key, or leave cwd out.")


def _path(record: entities.Spawned) -> str | None:
    return None if record.cwd is None else record.cwd.path
