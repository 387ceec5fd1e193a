"""The first check of every frame: whether it is a frame, who sent it, and whether the sender may. Pure.

The loop passes every message part to `Router.receive`, or to `Router.stranger` if the routing id is unknown. It sends
`bus.out` and journals `bus.staged`. When the staged decisions are durable, it gives them to `settle`. Only header
fields are read. A new plan can be larger than a frame, so it comes in pieces.

Source: docs/design/wire.md sections 1, 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from goondan.kernel.broker.routing import acting, calls, clients, deletions, events, intake, observers, processes
from goondan.kernel.broker.routing.directory import Directory
from goondan.kernel.broker.routing.ends import Answering, Cancels, Ends, QuietPeers
from goondan.kernel.broker.routing.recovery import BadRow, Missing, restore
from goondan.kernel.broker.state import blobs, records
from goondan.kernel.broker.state.bus import CREDIT, MAX_ID, Bus, Clocks, MakeParts, Staged
from goondan.kernel.broker.state.entities import (
    AGENTS,
    CLASSES,
    CLIENTS,
    CONTROL,
    TOOLS,
    Connection,
    Event,
    Handler,
)
from goondan.kernel.broker.state.parts import (
    Hooks,
    OfEvents,
    OfHosts,
    OfInstances,
    Part,
    Take,
    Waiting,
    hooks_of,
)
from goondan.schemas.bundle import effective_config
from goondan.schemas.bundle.address import is_name
from goondan.schemas.bundle.launch import AgentSpec, KernelPlan
from goondan.schemas.wire import codec
from goondan.schemas.wire.control import ForFeature, Revise, Revised, ToBroker
from goondan.schemas.wire.errors import GoondanError, error_payload, fail
from goondan.schemas.wire.frames import PROTOCOL_VERSION, Frame, Hello, Welcome

_decode_control = msgspec.msgpack.Decoder(ToBroker).decode
#: The key of the handlers of confined agents, in place of a class.
CONFINED: Final = -1


class Router:
    """The whole broker without its sockets. `now` arguments are CLOCK_BOOTTIME in seconds."""

    def __init__(self, bus: Bus, folders: deletions.Folders, features: Sequence[MakeParts] = ()) -> None:
        """`folders` are the folders of instances. `features` make the parts of features."""
        self.bus = bus
        # Each part gets the parts that it needs when it is made, so the order shows who depends on whom.
        self.clocks = clocks = Clocks(bus)
        # What a part does at an end is done before what stands behind it does something.
        beside = [part for make in features for part in make(self)]
        live = clients.Live(bus)
        observing = observers.Observers(bus, live, lambda: self._hooks.choose())  # noqa: PLW0108 - as below
        hooks = self._hooks = Hooks([*beside, observing])
        actors = self._actors = acting.Actors(bus)
        # The events are not there yet.
        ends = self._ends = Ends(bus, lambda *end: self._events.finished(*end), hooks)  # noqa: PLW0108
        cancels = self._cancels = Cancels(bus, ends)
        self._quiet = quiet = QuietPeers(bus)
        #: The pieces of a new plan that have come: it can be larger than a frame.
        self._pieces: list[bytes] = []
        self._tool_calls = calls.ToolCalls(bus, clocks, cancels.call_ended, hooks)
        self._processes = processes.Processes(bus, ends, cancels, self._tool_calls, beside)
        self._directory = directory = Directory(bus, actors, self._processes.want)
        self._deletions = deletions.Deletions(bus, cancels, self._processes, directory, folders, beside)
        self._answering = answering = Answering(bus, quiet)
        self._events = events.Events(
            bus,
            answering=answering,
            cancels=cancels,
            ends=ends,
            processes=self._processes,
            quiet=quiet,
            tool_calls=self._tool_calls,
            hooks=hooks,
        )
        self._connections = bus.presence.connections
        self._prepare(bus.plan)
        own: list[Part] = [
            self._events,
            intake.Intake(bus, self._events.accepted, actors, answering, clocks, hooks),
            directory,
            self._tool_calls,
            self._processes,
            quiet,
            self._deletions,
            live,
            observing,
            answering,
            cancels,
        ]
        every = [*own, *beside]
        #: All parts, in the order in which their hooks are called.
        self.parts: tuple[Part, ...] = (*every, clients.Administration(bus, every))
        self._handlers = self._table()
        self._missing = Missing()
        self._waitings = hooks_of(self.parts, Part, Part.waiting)
        self._ticks = hooks_of(self.parts, Part, Part.tick)
        self._revises = hooks_of(self.parts, Part, Part.revise)
        self._welcomes = hooks_of(self.parts, Part, Part.welcome)
        self._heres = hooks_of(self.parts, Part, Part.here)
        self._gones = hooks_of(self.parts, Part, Part.gone)
        self._answers = hooks_of(self.parts, OfHosts, OfHosts.answered)
        self._held = hooks_of(beside, OfEvents, OfEvents.held)
        self._changes = hooks_of(beside, OfInstances, OfInstances.changes)
        self._allows = hooks_of(beside, OfInstances, OfInstances.allows)
        self._hears: dict[type[Struct] | str, list[Callable[[Any, float], None]]] = {}
        # Processes start and end after all others have heard of it.
        for part in [*(part for part in self.parts if part is not self._processes), self._processes]:
            for message, hear in part.hears.items():
                self._hears.setdefault(message, []).append(hear)
        hooks.choose()

    def _table(self) -> dict[int | str, dict[str, Handler]]:
        """The handlers of all frames, by who may send them."""
        takes = [take for part in self.parts for take in part.takes]
        everybody: set[int | str] = {CONTROL, AGENTS, TOOLS, CLIENTS, *(peer for take in takes for peer in take.peers)}
        own = (
            Take([*everybody], "ping", self._ping),
            Take([*everybody], "pong", self._ignore),
            Take([*everybody], "log", self._ignore),
            Take((CONTROL,), "runtime.event", self._control_event),
            Take((TOOLS,), "runtime.event", self._ignore),
            Take((TOOLS,), "reply", self._host_answered),
            Take((TOOLS,), "error", self._host_answered),
            Take((AGENTS, TOOLS, CLIENTS), "bye", self._bye),
            Take((AGENTS, TOOLS), "shutdown_ack", self._shutdown_ack),
        )
        table: dict[int | str, dict[str, Handler]] = {peer: {} for peer in (*everybody, CONFINED)}
        for take in (*own, *takes):
            handler = _bounded(take)
            for peer in take.peers:
                if take.frame_type in table[peer]:
                    raise AssertionError(f"two parts take {take.frame_type!r} of {peer!r}")
                table[peer][take.frame_type] = handler
                if peer == AGENTS:
                    table[CONFINED][take.frame_type] = self._confined(take, handler)
        return table

    # --- what an earlier broker has written down

    def restore(self, rows: Iterable[records.Row], on_bad: Callable[[BadRow], None]) -> None:
        """Read the journal. `on_bad` is called for each row that cannot be applied. Then call `resume`."""
        table = [record for part in self.parts for record in part.records]
        self._missing = restore(self.bus, rows, table, on_bad)

    def resume(self) -> None:
        """Go on with what was read. Work of agents and features that are not here any more becomes dead letters."""
        for resumed in reversed(hooks_of(self.parts, Part, Part.resumed)):
            resumed(self.bus.now)
        self._hooks.choose()
        self._ends.without_agent()
        for feature, count in self._missing.records.items():
            self.bus.notices.append(f"E_FEATURE_MISSING: {count} records of {feature} are kept, and nobody reads them")
        for event in list(self.bus.mailbox.events.values()):
            event.parts = None  # each part has taken its own
            missing = None if event.ending else self._missing.of(event)
            if missing is not None:
                message = f"the journal has records for it of the feature {missing!r}, which this kernel does not have"
                self._ends.give_up(event, "dead", "E_FEATURE_MISSING", message)

    # --- entry points of the loop

    def receive(self, connection: Connection, data: bytes, now: float) -> None:
        """One frame of a welcomed connection. Nothing that a peer can send makes it raise.

        Raises JournalFailed when the file cannot be read.
        """
        try:
            frame = codec.decode_frame(data)
            handler = connection.handlers.get(frame.type)
        except codec.DECODE_ERRORS as error:
            if (without := codec.without_nil(data)) is not None:
                self.receive(connection, without, now)
                return
            if data:  # an empty part is the probe of a new connection
                self.bus.counters["frames_bad"] += 1
                info = error_payload("E_FRAME_INVALID", f"not a frame: {codec.describe_decode_error(error)}")
                self.bus.error(connection.cls, connection.ident, info, None)
            return
        if handler is None:
            self._unexpected(connection, frame, now)
            return
        connection.last_seen = self.bus.now = now
        try:
            if frame.id and not is_name(frame.id, MAX_ID):  # the answer names it, and some answers come much later
                raise fail("E_FRAME_INVALID", f"id has at most {MAX_ID} characters, all of them visible")
            if frame.blob is not None or frame.files is not None:
                blobs.check(frame, from_host=connection.cls == TOOLS, by_operator=connection.claims.operator)
            handler(connection, frame, now)
            if self.bus.due:
                self._hand_over(now)
        except GoondanError as error:
            self.bus.counters["frames_refused"] += 1
            self.bus.error(connection.cls, connection.ident, error.info, frame)
        except records.JournalFailed:
            raise  # ended events cannot be read any more: this process must end, and the next one checks the file
        except Exception as error:
            # A bug of ours may cost the frame that met it, but not the whole bus.
            self.bus.faults.append(error)
            message = f"the broker failed on a frame of type {frame.type[:40]!r}"
            self.bus.error(connection.cls, connection.ident, error_payload("E_INTERNAL", message), frame)

    def stranger(self, cls: int, ident: bytes, data: bytes, now: float) -> None:
        """One message part from a connection that has not said hello. It is a hello, or the peer is asked for one."""
        self.bus.now = now
        try:
            frame = codec.decode(data) if data else None
        except codec.FrameError as error:
            self.bus.counters["frames_bad"] += 1
            self.bus.error(cls, ident, error.info, None)
            return
        if frame is not None and frame.type == "error":
            return
        if frame is None or frame.type != "hello":
            self.bus.counters["hello_required"] += 1
            info = error_payload("E_HELLO_REQUIRED", "this connection has not said hello")
            self.bus.error(cls, ident, info, frame)
            return
        try:
            self._greet(cls, ident, frame, now)
            self._hand_over(now)
        except GoondanError as error:
            self.bus.counters["hello_refused"] += 1
            self.bus.error(cls, ident, error.info, frame)

    def settle(self, staged: list[Staged], now: float, refused: frozenset[int] = frozenset()) -> None:
        """The journal has these decisions, except those at the positions `refused`. Act on them, in order."""
        self.bus.now = now
        for at, decision in enumerate(staged):
            if decision.then is not None:
                decision.then(at not in refused)
        if self._deletions.active:
            self._deletions.advance(now)
        if self.bus.due:
            self._hand_over(now)

    def waiting(self, now: float) -> Iterator[Waiting]:
        """See Core."""
        for waiting in self._waitings:
            yield from waiting(now)

    def held(self, event: Event, since: float | None) -> None:
        """See Core."""
        for held in self._held:
            held(event, since)

    def accepted(self, event: Event, kept: bool) -> None:
        """See Core."""
        self._events.accepted(event, kept)

    def call_goes_on(self, connection: Connection, frame: Frame) -> None:
        """See Core."""
        try:
            self._tool_calls.call(connection, frame, self.bus.now)
        except GoondanError as error:
            self.bus.error(connection.cls, connection.ident, error.info, frame)

    def _hand_over(self, now: float) -> None:
        """Hand over the next events of instances that are due. This may make further instances due."""
        due = self.bus.due
        while due:
            instance = next(iter(due))
            del due[instance]
            self._events.dispatch(instance, now)

    def unreachable(self, cls: int, ident: bytes, now: float) -> None:
        """The transport has no peer with this routing id."""
        self.bus.now = now
        connection = self._connections[cls].get(ident)
        if connection is not None:
            if connection is self.bus.control:
                self.bus.control = None
            for gone in self._gones:
                gone(connection, now)
            self._processes.unreachable(connection, now)
            self._hand_over(now)

    def tick(self, now: float) -> None:
        """Check deadlines, hung holders, quiet peers and epochs. Call this a few times a second."""
        self.bus.now = now
        self.bus.reserve_epochs()
        for tick in self._ticks:
            tick(now)
        self._hand_over(now)

    def shut_down(self, grace_ms: int) -> None:
        """Tell every agent and tool host to finish. After this, nothing new is accepted or handed over."""
        self.bus.closing = True
        for cls in (AGENTS, TOOLS):
            for connection in self._connections[cls].values():
                self.bus.shutdown(connection, grace_ms, "orchestrator_shutdown")

    # --- the supervisor's word

    def _control_event(self, connection: Connection, frame: Frame, now: float) -> None:
        """`runtime.event` from the supervisor."""
        try:
            codec.check_depth(bytes(frame.payload))
            message = _decode_control(frame.payload)
            if isinstance(message, Revise):
                self._take_piece(message)
                return
        except codec.DECODE_ERRORS as error:
            raise fail("E_FRAME_INVALID", f"no control message: {error}") from None
        of = message.feature if isinstance(message, ForFeature) else type(message)
        for hear in self._hears.get(of, ()):
            hear(message, now)
        if self._deletions.active:  # a deletion may have waited for this
            self._deletions.advance(now)

    def _take_piece(self, message: Revise) -> None:
        """A first piece begins a new plan, the last one completes it. Raises msgspec.DecodeError for a bad plan."""
        if message.piece == 0:
            self._pieces = []
        if message.piece != len(self._pieces):
            return  # of a plan whose beginning another broker got: the supervisor asks again
        self._pieces.append(message.data)
        if len(self._pieces) == message.pieces:
            self._revise(msgspec.msgpack.decode(b"".join(self._pieces), type=KernelPlan))

    def _prepare(self, plan: KernelPlan) -> None:
        """Prepare what agents and tool hosts are told, and the tools that agents may call."""
        self._specs = {name: codec.to_raw(spec) for name, spec in plan.agents.items()}
        self._host_spec = codec.to_raw(plan.toolhost)
        self._allowed = {name: effective_config.reachable_tools(spec) for name, spec in plan.agents.items()}

    def _revise(self, plan: KernelPlan) -> None:
        """A new revision replaces the running one. Changed agents use it from their next step on. Agents that cannot do
        so are restarted by another message of the supervisor. The tools that agents may call change at once. Tool hosts
        say hello again and get their new specification.
        """
        bus = self.bus
        before, bus.plan = bus.plan, plan
        self._prepare(plan)
        self._actors.revise(plan)
        for revise in self._revises:
            revise(plan)
        self._hooks.choose()
        changed = {name for name, spec in plan.agents.items() if not _is_same(before.agents.get(name), spec)}
        for connection in self._connections[AGENTS].values():
            self._set_allowed(connection)
            agent, key = connection.claims.agent or "", connection.claims.instance_key or ""
            if agent in changed:
                found = next((told for changes in self._changes if (told := changes(agent, key))), None)
                told = replace(found or effective_config.LiveChanges(), spec=self._specs[agent])
                bus.send(connection, Frame("config.changed", payload=codec.to_raw(told)))
        for connection in list(self._connections[TOOLS].values()):
            self._tool_calls.host_unreachable(connection)
            info = error_payload("E_HELLO_REQUIRED", "there is a new revision")
            bus.error(connection.cls, connection.ident, info, None)
        self._ends.without_agent()
        bus.tell_supervisor(Revised(plan.revision))

    def _set_allowed(self, connection: Connection) -> None:
        """The tools that an agent's process may call are those of the plan, and what parts add."""
        agent, key = connection.claims.agent or "", connection.claims.instance_key or ""
        connection.allowed = self._allowed.get(agent, frozenset())
        for allows in self._allows:
            connection.allowed |= allows(agent, key)
        spec = self.bus.plan.agents.get(agent)
        connection.servers = frozenset() if spec is None else frozenset(spec.servers)

    # --- confined agents

    def _refuse_outside(self, connection: Connection, frame: Frame, now: float) -> NoReturn:
        hint = "Its answers are from a file of anybody, so it may change nothing outside. See docs/replay.md."
        raise fail("E_FORBIDDEN", f"agent {connection.claims.agent} is answered from a file", suggestion=hint)

    def _confined(self, take: Take, handle: Handler) -> Handler:
        """The handler for a confined agent."""
        if take.confined == "no":
            return self._refuse_outside
        if take.confined == "yes":
            return handle

        def checked(connection: Connection, frame: Frame, now: float) -> None:
            agents = self.bus.plan.agents
            own, other = agents.get(connection.claims.agent or ""), agents.get(frame.to or "")
            stays = take.confined == "inside" or (own is not None and own.own_state)
            if not stays or (other is not None and not other.confined):
                self._refuse_outside(connection, frame, now)
            handle(connection, frame, now)

        return checked

    # --- hello

    def _handlers_of(self, connection: Connection) -> dict[str, Handler]:
        """The handlers of a peer. A supervised process on the control socket has a name; the supervisor has none."""
        if connection.cls == AGENTS:
            spec = self.bus.plan.agents.get(connection.claims.agent or "")
            return self._handlers[AGENTS if spec is None or not spec.confined else CONFINED]
        if connection.cls == CONTROL and connection.claims.agent is not None:
            return self._handlers.get(connection.claims.agent, {})
        return self._handlers[connection.cls]

    def _greet(self, cls: int, ident: bytes, frame: Frame, now: float) -> None:
        hello = codec.from_raw(frame.payload, Hello)
        presence = self.bus.presence
        try:
            connection, old = presence.greet(cls, ident, hello, now)
        except GoondanError as error:
            if error.info.code == "E_PRINCIPAL_BUSY":
                self.bus.send(presence.holder(hello), Frame("ping"))  # the loop drops it if it is not there any more
            raise
        if cls == AGENTS and connection.claims.agent not in self.bus.plan.agents:
            presence.drop(connection)
            raise fail("E_AGENT_NOT_FOUND", f"no agent {connection.claims.agent!r}")
        self._quiet.watch(connection)
        self.bus.counters["hello_" + CLASSES[cls]] += 1
        connection.handlers = self._handlers_of(connection)
        if cls == AGENTS:
            self._welcome_agent(connection, old, hello, frame, now)
            return
        if cls == TOOLS:
            self._welcome(connection, frame, spec=self._host_spec)
            self._tool_calls.host_here(connection)
        elif cls == CONTROL and connection.claims.agent is None:
            self._welcome(connection, frame)
            self.bus.control = connection
            self.bus.tell_supervisor(self._processes.wanted())
        else:
            self._welcome(connection, frame, **self._fields_of(connection))
        for here in self._heres:
            here(connection, hello, now)

    def _welcome_agent(
        self, connection: Connection, old: Connection | None, hello: Hello, frame: Frame, now: float
    ) -> None:
        agent, key = connection.claims.agent or "", connection.claims.instance_key or ""
        instance = self.bus.instance(agent, key, now)
        if old is not None and old.incarnation != connection.incarnation:
            instance.conn = None
            lost = self.bus.mailbox.lose_holder(instance, counts=True)
            self._processes.count_attempt(lost, "another process has taken its place")
        self._set_allowed(connection)
        self._processes.process_here(instance, connection, now)
        self._directory.welcomed(instance)
        self._events.adopt(instance, hello, now)
        self._welcome(
            connection,
            frame,
            instance_key=key,
            workdir=instance.workdir.path,
            epoch=instance.epoch,
            spec=self._specs[agent],
            **self._fields_of(connection),
        )
        for here in self._heres:
            here(connection, hello, now)
        if self.bus.draining is not None:
            reason, until = self.bus.draining
            self.bus.shutdown(connection, max(0, round((until - now) * 1000)), reason)
        self._answering.repeat_answers(instance, connection)
        self._cancels.holder_here(instance, connection, hello.leases)
        self._events.dispatch(instance, now)
        self._processes.serve(now)

    def _fields_of(self, peer: Connection) -> dict[str, Any]:
        """What parts tell a peer with its `welcome`."""
        return {name: value for welcome in self._welcomes for name, value in welcome(peer).items()}

    def _welcome(self, connection: Connection, hello: Frame, **more: Any) -> None:
        body = Welcome(
            version=PROTOCOL_VERSION,
            principal=connection.address,
            broker=self.bus.broker_id,
            credit=CREDIT,
            max_frame=codec.MAX_FRAME_BYTES,
            revision=self.bus.plan.revision,
            blobs=self.bus.blobs,
            durability=self.bus.plan.durability,
            **more,
        )
        self.bus.send(connection, Frame("welcome", in_reply_to=hello.id, payload=codec.to_raw(body)))

    def _unexpected(self, connection: Connection, frame: Frame, now: float) -> None:
        if frame.type == "hello":  # its welcome was lost, or two hellos crossed: greet it again
            self.bus.presence.drop(connection)
            self.stranger(connection.cls, connection.ident, codec.encode(frame), now)
        elif frame.type != "error":
            self.bus.counters["frames_refused"] += 1
            info = error_payload("E_FRAME_TYPE", f"no frame of type {frame.type[:40]!r} is taken on this socket")
            self.bus.error(connection.cls, connection.ident, info, frame)

    # --- the rest

    def _bye(self, connection: Connection, frame: Frame, now: float) -> None:
        """A peer asks to leave. It may, if it leaves no work behind."""
        instance = connection.instance
        if instance is not None and instance.wanted:
            raise fail("E_FORBIDDEN", "there is work for this instance")
        self.bus.send(connection, Frame("reply", in_reply_to=frame.id))
        if instance is not None:
            self._processes.leave(instance, connection, now)
        elif connection.cls == TOOLS:
            self._processes.host_lost(connection, now)
        else:
            self.bus.presence.drop(connection)

    def _shutdown_ack(self, connection: Connection, frame: Frame, now: float) -> None:
        """A process has released its work, and exits now."""
        self.bus.counters["shutdown_acks"] += 1
        connection.acknowledged = True
        if connection.instance is not None:
            self._processes.says_goodbye(connection.instance)

    def _host_answered(self, connection: Connection, frame: Frame, now: float) -> None:
        """`reply` or `error` from a tool host: it answers a question of a part. What nobody has asked is dropped."""
        any(answered(connection, frame, now) for answered in self._answers)

    def _ping(self, connection: Connection, frame: Frame, now: float) -> None:
        self.bus.send(connection, Frame("pong", in_reply_to=frame.id))

    def _ignore(self, connection: Connection, frame: Frame, now: float) -> None:
        """Ignore a sign of life, or news that nobody listens to."""


def _is_same(old: AgentSpec | None, new: AgentSpec) -> bool:
    """Whether two specifications of an agent are the same. The bundle's revision in them does not count."""
    return old is not None and replace(old, revision=new.revision) == new


def _bounded(take: Take) -> Handler:
    """The handler of a frame, which refuses a payload that is too long (E_FRAME_TOO_LARGE)."""
    handle, most_bytes = take.handler, take.most_bytes
    if most_bytes is None:
        return handle

    def checked(connection: Connection, frame: Frame, now: float) -> None:
        size = len(memoryview(frame.payload))
        if size > most_bytes:
            raise fail("E_FRAME_TOO_LARGE", f"the payload of {frame.type} has {size} bytes, limit {most_bytes}")
        handle(connection, frame, now)

    return checked
