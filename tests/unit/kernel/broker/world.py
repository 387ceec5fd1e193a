"""A whole bus without sockets, processes or time: the real router and the real peers over queues that can break.

What ZeroMQ may do, the wires here may do: a connection delivers in order, without duplicates, until it breaks; then
both directions lose what they hold, and the peer comes back under a new routing id, probing. Processes may be killed
at any step. The supervisor is reduced to its contract: it starts what is wanted and reports every exit it saw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

from msgspec import Raw, structs

from goondan.kernel.broker.__main__ import features
from goondan.kernel.broker.routing.deletions import Moved
from goondan.kernel.broker.routing.recovery import BadRow, reserved_epochs
from goondan.kernel.broker.routing.router import Router
from goondan.kernel.broker.state.bus import Bus, Staged
from goondan.kernel.broker.state.entities import CLIENTS, TOOLS, Connection, Content, Event, Instance
from goondan.kernel.broker.state.ledger import EPOCH_BLOCK, Ledger
from goondan.kernel.broker.state.mailbox import Epochs
from goondan.kernel.broker.state.parts import Part
from goondan.kernel.broker.state.records import EPOCHS, Row, event_subject
from goondan.kernel.broker.state.workdirs import Workdir
from goondan.schemas.wire.blobs import REFERENCES, check_reference, describe
from goondan.schemas.wire.codec import decode, encode, from_raw, to_raw
from goondan.schemas.wire.control import Principal
from goondan.schemas.wire.frames import AgentEvent, Blob, ErrorPayload, Frame, Hello, ReplyTo
from goondan.schemas.wire.tokens import Claims, mint
from tests.unit.kernel.broker.actors import SECRET, Actor, Agent, Client, Host, Store, Supervisor, Wire
from tests.unit.kernel.broker.journals import BothJournals
from tests.unit.kernel.broker.memory_journal import MemoryJournal
from tests.unit.kernel.broker.survival import assert_survived, on_the_way
from tests.unit.kernel.broker.swarm import plan


class Disk:
    """The folders of instances: they outlive every process. See goondan.kernel.broker.routing.deletions.Folders."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.full = False
        #: What was moved away, and whether the workdir stayed; in order.
        self.gone: list[tuple[str, str, bool]] = []
        self._moved: list[Moved] = []

    def exists(self, agent: str, key: str) -> bool:
        return (agent, key) in self.world.stores

    def move(self, agent: str, key: str, keep_workdir: bool) -> None:
        assert (agent, key) not in self.world.agents, "its process still lives"
        assert not any(call.startswith(f"{agent}/{key}/") for call in self.world.host.running), "its jail still lives"
        if self.full:
            self._moved.append(Moved(agent, key, "no space"))
            return
        self.world.stores.pop((agent, key), None)
        self.gone.append((agent, key, keep_workdir))
        self._moved.append(Moved(agent, key))

    def moved(self) -> list[Moved]:
        done, self._moved = self._moved, []
        return done


#: The call that an agent of `working` is in.
CALL = "coder/k/c0e0/0"
APart = TypeVar("APart", bound=Part)


class World:
    """Everything, and the ways in which it can go wrong."""

    def __init__(
        self,
        *,
        max_live_agents: int = 256,
        max_open_events: int = 65_536,
        handlers_ask: bool = False,
        journal: BothJournals | None = None,
        parts: dict[str, Raw] | None = None,
    ) -> None:
        """`parts` has what features have in the specification of `coder`."""
        self.now = 1000.0
        #: What was journaled; it outlives every broker.
        self.journal = journal or MemoryJournal()
        #: The broker dies in its next write, or in the one after so many: before it is durable, or after.
        self.dies: Literal["before", "after"] | None = None
        self.dies_in = 1
        #: The disk has no room for new events.
        self.full = False
        #: The broker goes on while its journal writes, as it does with `power`: what was staged, and what was refused.
        self.slow_disk = False
        self.unsettled: deque[tuple[list[Staged], frozenset[int]]] = deque()
        #: The folder of large payloads: name -> bytes. It outlives every process.
        self.files: dict[str, bytes] = {}
        self.written = 0
        self.disk = Disk(self)
        self.handlers_ask = handlers_ask
        #: Each turn of `coder` asks `reviewer` first, and waits so long (seconds); None: it asks nobody.
        self.patience_s: float | None = None
        self.idents = self.incarnations = self.launches = 0
        self.brokers_killed = 0
        self.wires: dict[tuple[int, bytes], Wire] = {}
        self.agents: dict[tuple[str, str], Agent] = {}
        self.stores: dict[tuple[str, str], Store] = {}
        self.ran: list[tuple[int, str]] = []
        #: Event id -> the instance that a client has asked.
        self.asked_of: dict[str, tuple[str, str]] = {}
        self.plan = plan(max_live_agents, max_open_events)
        self.plan.agents["coder"] = structs.replace(self.plan.agents["coder"], parts=parts or {})
        self.router = self._new_router()
        self.supervisor = Supervisor(self)
        self.launches += 1
        self.host = Host(self, self.launches)
        self.clients = [Client(self), Client(self)]
        #: agent/key -> handles of work that goes on in jails.
        self.background: dict[str, list[str]] = {}
        #: No jail ends any more.
        self.jails_hang = False

    def _new_router(self) -> Router:
        ms = int(self.now * 1000)
        rows = list(self.journal.rows())
        epochs = Epochs(reserved_epochs(self.journal.find_records(EPOCHS)), ms)
        bus = Bus(
            self.plan,
            SECRET,
            broker_id=f"b{ms}",
            started_ms=ms,
            epochs=epochs,
            archive=self.journal,
            ledger=Ledger("boot", 0.0),
            blobs="/state/blobs",
        )
        top = epochs.to_reserve(EPOCH_BLOCK)
        if top is not None:
            self.journal.append([bus.ledger.epochs(top)])
        return restored(Router(bus, self.disk, features()), rows)

    def write(self, frame: Frame) -> Blob:
        """Lay the payload of a frame down."""
        payload = bytes(frame.payload)
        self.written += 1
        blob = describe(payload, f"{self.written:032x}")
        self.files[blob.file] = payload
        return blob

    def read(self, frame: Frame) -> None:
        """Give a frame its payload; calls and results have one reader, who deletes it.

        It must be there, but for what was read before: its receiver knows the call, or has the event's answer.
        """
        check_reference(frame)
        assert frame.blob is not None
        request = frame.type == "tool.call" or (frame.type == "event" and frame.in_reply_to is None)
        if request and frame.blob.file not in self.files:
            return
        assert frame.blob.file in self.files, f"the payload of a {frame.type} is gone before it was read"
        frame.payload = Raw(self.files[frame.blob.file])
        if REFERENCES[frame.type]:
            del self.files[frame.blob.file]
        frame.blob = None

    def actors(self) -> list[Actor]:
        return [self.supervisor, self.host, *self.clients, *self.agents.values()]

    # --- steps

    def pump_up(self, actor: Actor) -> bool:
        """One message from an actor to the broker."""
        wire = actor.wire
        if not wire.up:
            return False
        data = wire.up.popleft()
        known = self.router.bus.presence.connections[wire.cls].get(wire.ident)
        if known is None:
            self.router.stranger(wire.cls, wire.ident, data, self.now)
        else:
            self.router.receive(known, data, self.now)
        self.after_round()
        return not _small_talk(data)

    def after_round(self) -> None:
        bus = self.router.bus
        self.commit()
        if self.router.bus is not bus:
            return  # it died in a write: what it would have sent is lost with it
        while bus.out:
            cls, ident, data = bus.out.pop(0)
            wire = self.wires.get((cls, ident))
            if wire is None:
                self.router.unreachable(cls, ident, self.now)
            else:
                wire.down.append(data)
        for file in bus.mailbox.blobs.removable:
            self.files.pop(file, None)
        bus.mailbox.blobs.removable.clear()
        if bus.faults:
            raise bus.faults[0]

    def commit(self) -> None:
        """Journal what was decided, and act on it."""
        bus = self.router.bus
        while bus.staged:
            staged, bus.staged = bus.staged, []
            dies = None
            if self.dies is not None:
                self.dies_in -= 1
                if self.dies_in <= 0:
                    dies, self.dies, self.dies_in = self.dies, None, 1
            refused = frozenset(at for at, decision in enumerate(staged) if self.full and decision.item.refusable)
            if dies != "before":
                self.journal.append([decision.item for at, decision in enumerate(staged) if at not in refused])
            if dies is not None:
                self.kill_broker(staged)
                return
            self.unsettled.append((staged, refused))
            if not self.slow_disk:
                self.settle_next()

    def settle_next(self) -> None:
        """The broker hears of the oldest batch that it has not heard of, if there is one."""
        if self.unsettled:
            staged, refused = self.unsettled.popleft()
            self.router.settle(staged, self.now, refused)

    def disk_catches_up(self) -> None:
        """Everything is on the disk, and the broker knows."""
        while self.unsettled:
            self.settle_next()
            self.after_round()

    def state(self, event_id: str) -> str:
        """What became of an event, as the broker or its journal knows it."""
        known = self.router.bus.mailbox.events.get(event_id)
        if known is not None:
            return known.state
        ended = self.journal.find_ended(event_subject(event_id))
        return "unknown" if ended is None else ended.state

    def pump_down(self, actor: Actor) -> bool:
        """One message from the broker to an actor."""
        if not actor.wire.down:
            return False
        data = actor.wire.down.popleft()
        actor.receive(data)
        return not _small_talk(data)

    def peer(self, agent: str = "coder", key: str = "k") -> Connection:
        """The connection of an instance's process."""
        connection = self.router.bus.mailbox.instances[agent, key].conn
        assert connection is not None
        return connection

    def flow(self, *actors: Actor) -> None:
        """Each of them in turn says all that it has to say, and hears all that is said to it."""
        for actor in actors:
            while self.pump_up(actor) or self.pump_down(actor):
                pass

    def goes_up(self, actor: Actor) -> None:
        """The broker has what the actor has sent, and the actor hears nothing."""
        while self.pump_up(actor):
            pass

    def goes_down(self, actor: Actor) -> None:
        """The actor has what the broker has sent it, and the broker hears nothing."""
        while self.pump_down(actor):
            pass

    def goes_on(self, rounds: int) -> None:
        """Everything but the tool host's calls goes on, and some time passes."""
        for _ in range(rounds):
            run(self)
            self.advance(0.3)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.router.tick(self.now)
        self.after_round()
        for actor in self.actors():
            actor.tick()

    # --- harm

    def cut(self, actor: Actor) -> None:
        """The connection breaks; libzmq makes another one."""
        actor.wire.cut(reconnect=True)

    def again(self, actor: Actor) -> None:
        """What an actor is about to receive, and what the broker is about to receive from it, comes twice."""
        for queue in (actor.wire.up, actor.wire.down):
            if queue and queue[0]:
                queue.appendleft(queue[0])

    def kill_agent(self, agent: Agent, *, ordered: bool = False, started: bool = True) -> None:
        if self.agents.get((agent.name, agent.key)) is not agent:
            return
        del self.agents[(agent.name, agent.key)]
        agent.wire.cut(reconnect=False)
        self.supervisor.exited(
            Principal("agent", agent.name, agent.key), agent.launch, ordered=ordered, started=started
        )

    def kill_host(self) -> None:
        old = self.host
        old.wire.cut(reconnect=False)
        self.supervisor.exited(Principal("toolhost", "1"), old.launch)
        self.now += 0.05
        self.launches += 1
        self.host = Host(self, self.launches)

    def kill_broker(self, staged: Sequence[Staged] = ()) -> None:
        """It dies, with decisions (`staged`) on their way into the journal; the next one must know what it knew."""
        self.brokers_killed += 1
        unsettled = [decision for batch, _ in self.unsettled for decision in batch]
        self.unsettled.clear()
        old, unwritten = self.router.bus, on_the_way([*unsettled, *staged, *self.router.bus.staged])
        self.now += 0.05
        if isinstance(self.journal, BothJournals):
            self.journal.broker_killed()
        self.router = self._new_router()
        assert_survived(old, self.router.bus, self.journal, unwritten)
        self.wires.clear()
        for actor in self.actors():
            actor.wire.cut(reconnect=True)

    # --- calm

    def settle(self, rounds: int = 400) -> None:
        """Let everything run until nothing moves; time goes on slowly."""
        quiet = 0
        self.slow_disk = False
        self.disk_catches_up()
        for done in range(rounds):
            if done == rounds // 2:
                self.host.run_out()
            moved = False
            for actor in self.actors():
                while actor.wire.up:
                    moved = self.pump_up(actor) or moved
            for actor in self.actors():
                while actor.wire.down:
                    moved = self.pump_down(actor) or moved
            self.supervisor.reconcile()
            moved = bool(self.host.running) or moved
            self.host.work()
            self.advance(0.3 if moved else 0.6)
            quiet = 0 if moved else quiet + 1
            if quiet > 6:
                return
        raise AssertionError("it does not come to rest")


def run(world: World, rounds: int = 8) -> None:
    """Let frames flow, without the tool host doing any work."""
    for _ in range(rounds):
        world.flow(*world.actors())
        world.supervisor.reconcile()


def working(agent: str = "coder", *, max_live_agents: int = 256) -> World:
    """An agent in the middle of its first tool call, which does not end."""
    world = World(max_live_agents=max_live_agents)
    world.clients[0].ask("c0e0", agent)
    run(world)
    assert list(world.host.running) == [f"{agent}/k/c0e0/0"]
    return world


def client(world: World, *, operator: bool = True) -> Connection:
    """A client of its own, without an actor: a session."""
    world.idents += 1
    ident = b"client-%09d" % world.idents
    hello = Hello(mint(SECRET, Claims("client", operator=operator)), ident.decode())
    world.router.stranger(CLIENTS, ident, encode(Frame("hello", id="h", payload=to_raw(hello))), world.now)
    world.router.bus.out.clear()
    return world.router.bus.presence.connections[CLIENTS][ident]


def host(world: World) -> Connection:
    """The connection of the tool host."""
    (connection,) = world.router.bus.presence.connections[TOOLS].values()
    return connection


def outgoing(world: World, connection: Connection, frame: Frame) -> list[tuple[int, bytes, Frame]]:
    """What leaves the broker because of a frame: for which class, to whom, and what. Nothing of it is delivered."""
    bus = world.router.bus
    world.router.receive(connection, encode(frame), world.now)
    world.commit()
    left = [(cls, ident, decode(data)) for cls, ident, data in bus.out]
    bus.out.clear()
    return left


def said(world: World, connection: Connection, frame: Frame) -> list[Frame]:
    """What a peer is told because of a frame of it; everything else is delivered."""
    bus = world.router.bus
    world.after_round()
    world.router.receive(connection, encode(frame), world.now)
    world.commit()
    told = [decode(data) for _, ident, data in bus.out if ident == connection.ident]
    bus.out[:] = [item for item in bus.out if item[1] != connection.ident]
    world.after_round()
    return [frame for frame in told if frame.type != "ping"]


def out(world: World, cls: int) -> list[Frame]:
    """What leaves the broker for a class now; everything else is delivered."""
    bus = world.router.bus
    world.commit()
    found = [decode(data) for kind, _, data in bus.out if kind == cls]
    bus.out[:] = [item for item in bus.out if item[0] != cls]
    world.after_round()
    return [frame for frame in found if frame.type != "ping"]


def tell(world: World, frame: Frame, connection: Connection | None = None, cls: int | None = None) -> list[Frame]:
    """A frame of the tool host, or another peer, and what is answered to its class, or told to another class."""
    connection = connection or host(world)
    world.router.receive(connection, encode(frame), world.now)
    return out(world, connection.cls if cls is None else cls)


def request(
    event_id: str = "r1",
    to: str = "reviewer",
    key: str = "k",
    call_id: str | None = CALL,
    *,
    calls: int = 0,
    **more: Any,
) -> Frame:
    """What an agent or its handler asks another one, who makes so many calls."""
    event = AgentEvent(id=event_id, type="agent.request", created_at="2026-01-01T00:00:00Z", input=calls)
    frame = Frame("event", id=f"f-{event_id}", to=to, instance_key=key, event_id=event_id, call_id=call_id)
    frame.reply_to, frame.payload = ReplyTo("whoever", f"corr-{event_id}"), to_raw(event)
    for name, value in more.items():
        setattr(frame, name, value)
    return frame


def code(frames: list[Frame]) -> str:
    """The code of the error that is the one frame of these."""
    (error,) = frames
    assert error.type == "error", error
    return from_raw(error.payload, ErrorPayload).code


def part_of(router: Router, cls: type[APart]) -> APart:
    """The part of that class."""
    (found,) = [part for part in router.parts if isinstance(part, cls)]
    return found


def restored(router: Router, rows: Iterable[Row]) -> Router:
    """The router with what an earlier broker has written down."""
    router.restore(rows, _no_bad_row)
    router.resume()
    return router


def _no_bad_row(bad: BadRow) -> None:
    raise bad


def _small_talk(data: bytes) -> bool:
    return bool(data) and decode(data).type in ("ping", "pong")


def waited_for_by(event: Event, *names: str) -> None:
    """The turns of these instances (agent/key, the last one asks) wait for this event."""
    for name in reversed(names):
        agent, _, key = name.partition("/")
        asker = Event(f"of-{name}", Instance(agent, key, Workdir("/w"), 1, 0.0), sender="", content_here=Content())
        event.asking, event = asker, asker
