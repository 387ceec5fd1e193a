"""The state that all parts of the broker share, the bytes to send, and the clocks of events. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Protocol

from msgspec import Struct

from goondan.kernel.broker.state import mailbox, parts, presence, records, workdirs
from goondan.kernel.broker.state.blobs import MAX_CALL_BYTES
from goondan.kernel.broker.state.entities import Call, Connection, Event, Instance, Standing
from goondan.kernel.broker.state.ledger import EPOCH_BLOCK, Ledger
from goondan.kernel.broker.state.shares import Pool, describe_shortage, kept_of
from goondan.schemas.bundle.address import SEPARATOR, instance_workdir, is_instance_key
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire import control, frames
from goondan.schemas.wire.codec import encode_value, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload, fail


class Calls:
    """All open calls."""

    def __init__(self) -> None:
        #: Written by ToolCalls, which keeps `event.work.open_calls` in step.
        self.open: dict[str | None, Call] = {}
        self._waiting: dict[str, Call] = {}
        #: Until then, agents may be about to send calls again that are not open here (seconds on the broker's clock).
        self.back_by = 0.0
        #: The names of the tools whose calls may make calls of other tools. Kept by ToolCalls.
        self.makers: frozenset[str] = frozenset()
        #: Size of all arguments by reference of open calls (bytes).
        self.large = Pool(MAX_CALL_BYTES, kept_of(MAX_CALL_BYTES))
        self.get = self.open.get

    def __len__(self) -> int:
        return len(self.open)

    def may_make_calls(self, tool: str | None) -> bool:
        """Whether calls of this tool, by its full name, may make calls of other tools."""
        return (tool or "").partition(SEPARATOR)[0] in self.makers

    def wait(self, call: Call, data: bytes) -> None:
        """Keep the frame until a tool host comes, because none is there."""
        call.data = data
        self._waiting[call.id] = call

    def take_waiting(self) -> list[Call]:
        """The calls that waited for a host, in order."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting

    def expired(self, now: float) -> list[Call]:
        """Calls that have waited for a host past their deadline."""
        return [call for call in self._waiting.values() if call.overdue(now)]

    def remove(self, call: Call) -> None:
        """Close an open call."""
        del self.open[call.id]
        call.event.work.open_calls -= 1
        self.forget_large(call)
        if call.data:
            self._waiting.pop(call.id, None)

    def forget_large(self, call: Call) -> None:
        """Its arguments by reference do not count any more."""
        if call.large:
            self.large.give(call.event.session, call.event.root, call.large)

    def given_to(self, address: str, which: Callable[[Connection], bool]) -> list[Call]:
        """The calls that were given to those connections of the tool host at this address."""
        given = ((call, call.host) for call in self.open.values() if call.host is not None)
        return [call for call, host in given if host.address == address and which(host)]


#: New events and tool calls that one peer may have unanswered.
CREDIT = 256
#: So many frames above its credit are accepted from a peer: they may have crossed a change of the credit.
CREDIT_SLACK = 64
#: How long a refused sender should wait (milliseconds).
RETRY_AFTER_MS = 100
#: For so long after its start, a broker expects peers, events and calls that it does not know (seconds). All of them
#: are back within a second, unless they wait for a processor.
RETURN_S = 3.0
#: Frames that may wait for one answer. More are refused with E_OVERLOADED.
MAX_ASKERS = 64
#: At most so many different refusals are remembered until they are in the log.
MAX_REFUSALS = 64
#: Longer ids (characters) are refused where they enter, because the broker keeps ids.
MAX_ID = 256
#: The same limit for a correlation id. It is higher because such an id may be made from an event's id.
MAX_CORRELATION = 512
#: The end of the id of an event that replaces another one. Only the broker makes such ids.
REQUEUED_SUFFIX = "~requeued"


def overloaded(message: str, retry_after_ms: int = RETRY_AFTER_MS) -> GoondanError:
    """The error E_OVERLOADED: the sender is to send the same again after that time (milliseconds)."""
    return GoondanError(error_payload("E_OVERLOADED", message, retry_after_ms=retry_after_ms))


def join(askers: list[tuple[Connection, str]], connection: Connection, frame: frames.Frame, what: str) -> bool:
    """Let a frame wait with others for one answer. False: it waited already, and its link came back over another
    connection. Raises GoondanError E_OVERLOADED when too many wait for `what`.
    """
    for at, (_, frame_id) in enumerate(askers):
        if frame_id == frame.id:
            askers[at] = connection, frame_id
            return False
    if len(askers) >= MAX_ASKERS:
        raise overloaded(f"too many ask for the end of this {what}")
    askers.append((connection, frame.id))
    return True


class Lossy(bytes):
    """A frame that is dropped when its peer takes no more. Any other frame waits."""

    __slots__ = ()


class Staged(Struct, frozen=True):
    """A decision on its way into the journal."""

    #: The writes of the journal.
    item: records.Item
    #: Acts on the decision when the journal has it (True), or when the disk has no room for it (False). None: nothing
    #: waits for it. A crash before costs nothing: the next broker reads the records only.
    then: Callable[[bool], None] | None


class Bus:
    """The broker's state and its outgoing side.

    `out` collects (socket class, routing id, bytes), `staged` decisions for the journal. The loop empties both.
    """

    def __init__(
        self,
        plan: KernelPlan,
        secret: bytes,
        *,
        broker_id: str,
        started_ms: int,
        epochs: mailbox.Epochs,
        archive: records.Archive,
        ledger: Ledger,
        blobs: str | None = None,
    ) -> None:
        """`blobs` is the folder of large payloads; without one, no payload may be larger than a frame. `archive` knows
        the events that have ended.
        """
        self.plan = plan
        #: The kernel's secret, which every broker of it has.
        self.secret = secret
        self.blobs = blobs
        self.broker_id = broker_id
        self.started_ms = started_ms
        #: When the broker's clock was zero (seconds since 1970), for times that people read.
        self.booted_at = ledger.booted_at
        self.out: list[tuple[int, bytes, bytes]] = []
        self.staged: list[Staged] = []
        #: Instances that may get their next event as soon as the present frame is handled (router.py).
        self.due: dict[Instance, None] = {}
        self.archive = archive
        self.ledger = ledger
        #: The broker's clock when the present frame, tick or answer of the journal came.
        self.now = started_ms / 1000
        #: Exceptions that are bugs of ours. The broker went on; the loop writes them to the log.
        self.faults: list[Exception] = []
        #: Messages for operators, and decisions of people, one line each; the loop writes them to the log.
        self.notices: list[str] = []
        self.counters: Counter[str] = Counter()
        #: Refusals for lack of room: (root, quota, what) -> how often. The loop writes them to the log.
        self.refusals: Counter[tuple[str, str, str]] = Counter()
        self.presence = presence.Presence(secret)
        #: True in the first broker of a kernel, which has just read the bundle.
        self.new_kernel = False
        kept = plan.kept_agents if plan.kept_agents is not None else kept_of(plan.max_live_agents)
        quotas = mailbox.Quotas(plan.max_open_events, plan.mailbox_mb << 20, plan.max_live_agents, kept)
        self.mailbox = mailbox.Mailbox(epochs, quotas, archive)
        self.calls = Calls()
        self.calls.back_by = self.now + RETURN_S
        #: The supervisor's connection, if one is there.
        self.control: Connection | None = None
        #: Since when the oldest decision waits for the disk, as the loop has seen; None: none does.
        self.disk_since: float | None = None
        #: True while the kernel stops: the broker accepts and hands out nothing new.
        self.closing = False
        #: The reason that agents were told when the kernel began to stop, and the end of their time (broker's clock).
        self.draining: tuple[frames.ShutdownReason, float] | None = None
        #: A new id for a frame of the broker.
        self.next_id = map(f"{broker_id}.{{}}".format, count(1)).__next__

    def stage(self, item: records.Item, then: Callable[[bool], None] | None = None) -> None:
        """Have the journal write a decision. `then` is called with True when it is durable. It is called with False
        when the disk has no room for it, which happens to refusable items only.
        """
        self.staged.append(Staged(item, then))

    def reserve_epochs(self) -> None:
        """Have the journal reserve more epochs before they run out."""
        top = self.mailbox.epochs.to_reserve(EPOCH_BLOCK)
        if top is not None:
            self.stage(self.ledger.epochs(top))

    def shortage(self, pool: Pool, event: Event, amount: int, what: str) -> str | None:
        """Why there is no room in `pool` for `amount` more of an event's root, in words; None when there is room. It is
        noted for the log. Repeats are counted until the loop logs them.
        """
        shortage = pool.shortage(event.session, event.root, amount, operator=event.by_operator)
        if shortage is None:
            return None
        if len(self.refusals) < MAX_REFUSALS:
            self.refusals[event.root, shortage.quota, what] += 1
        return describe_shortage(shortage, event.root, what, amount, pool.capacity)

    def check_target(self, agent: str, key: str, *, operator: bool = False) -> None:
        """Raise GoondanError for an agent that is not there or is the operator's, and for a key that none can be."""
        agents = self.plan.agents
        if agent not in agents or (agent == frames.OPERATOR_AGENT and not operator):
            known = ", ".join(sorted(name for name in agents if name != frames.OPERATOR_AGENT))[:500]
            raise fail("E_AGENT_NOT_FOUND", f"no agent {agent[:100]!r}; there are: {known}")
        if (agent, key) not in self.mailbox.instances and not is_instance_key(key):
            raise fail("E_FRAME_INVALID", f"instanceKey must be 1 to {MAX_ID} visible characters")

    def instance(self, agent: str, key: str, now: float) -> Instance:
        """The instance of that name. A new one is made."""
        found = self.mailbox.instances.get((agent, key))
        if found is None:
            owner = self.plan.entry_agent if agent in self.plan.sharing_agents else agent
            workdir = workdirs.Workdir(instance_workdir(self.plan.state_dir, owner, key))
            found = self.mailbox.instances[agent, key] = Instance(agent, key, workdir, self.mailbox.epochs.next(), now)
        return found

    def send(self, connection: Connection, frame: frames.Frame) -> None:
        """Queue a frame of the broker and give it an id."""
        frame.id = self.next_id()
        self.out.append((connection.cls, connection.ident, encode_value(frame)))

    def reply(self, connection: Connection, frame_id: str, body: object) -> None:
        """Answer a frame."""
        self.send(connection, frames.Frame("reply", in_reply_to=frame_id, payload=to_raw(body)))

    def shutdown(self, connection: Connection, grace_ms: int | None, reason: frames.ShutdownReason) -> None:
        """Tell an agent or a tool host to leave within `grace_ms` (milliseconds). None: it may finish its step. One
        that has acknowledged that already is not told again.
        """
        if connection.acknowledged:
            return
        to = connection.claims.agent or connection.address
        payload = to_raw(frames.Shutdown(grace_ms, reason))
        self.send(connection, frames.Frame("shutdown", from_=frames.ORCHESTRATOR, to=to, payload=payload))

    def ack(self, connection: Connection, frame_id: str, event: Event) -> None:
        """Tell a sender that its frame about `event` was accepted."""
        frame = frames.Frame(
            "ack", in_reply_to=frame_id, event_id=event.id, stage="accepted", trace_id=event.content.trace_id
        )
        frame.asynchronous = event.asynchronous
        self.send(connection, frame)

    def error(self, cls: int, ident: bytes, info: frames.ErrorPayload, frame: frames.Frame | None) -> None:
        """Answer `frame` with an error. An error is never answered, so two sides cannot send errors back and forth."""
        reply = frames.Frame("error", id=self.next_id(), payload=to_raw(info))
        if frame is not None:
            reply.in_reply_to = frame.id[:MAX_ID] or None
            reply.call_id = frame.call_id[:MAX_ID] if frame.call_id else None
        self.out.append((cls, ident, encode_value(reply)))

    def tell_supervisor(self, message: control.ToSupervisor) -> None:
        """Send news to the supervisor. If they are lost: it gets the whole state at its next connect."""
        if self.control is not None:
            self.send(self.control, frames.Frame("runtime.event", payload=to_raw(message)))


def principal_of(instance: Instance) -> control.Principal:
    """The name by which the supervisor knows an instance."""
    return control.Principal("agent", instance.agent, instance.key)


def left_ms(event: Event, now: float) -> int | None:
    """The time that the turn of an event has left (milliseconds); None without a deadline."""
    if event.deadline is None:
        return None
    standing = event.standing
    at = standing.held_since if standing is not None and standing.holds else now
    return max(1, int((event.deadline - at) * 1000))


class Clocks:
    """The clocks of all events."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def hold(self, event: Event, since: float) -> list[Event]:
        """One more item holds this event since `since` (the broker's clock). Returns the events whose clocks stop."""
        chain: list[Event] = []
        held: Event | None = event
        while held is not None and held not in chain:
            chain.append(held)
            held = held.asking
        for one in chain:
            standing = one.standing = one.standing or Standing()
            standing.holds += 1
            standing.held_since = since if standing.holds == 1 else min(since, standing.held_since)
            if standing.holds == 1:
                self._tell_all(one)
        return chain

    def release(self, chain: list[Event], now: float) -> None:
        """An item does not hold these events any more."""
        for event in chain:
            standing = event.standing
            if standing is None or not standing.holds:
                continue
            standing.holds -= 1
            if not standing.holds and not event.finished:
                self._go_on(event, standing, now)

    def _go_on(self, event: Event, standing: Standing, now: float) -> None:
        if event.deadline is not None:
            event.deadline += max(0.0, now - standing.held_since)
            if event.state == "accepted":
                self._bus.mailbox.deadlines.add(event.deadline, event)
            if not event.ending:
                self._bus.stage(self._bus.ledger.deadline_moved(event, event.deadline))
        self._tell_all(event)

    def _tell_all(self, event: Event) -> None:
        self.tell_holder(event)
        self.tell_asker(event)
        for call_id in event.work.calls if event.work.open_calls else ():
            call = self._bus.calls.get(call_id)
            if call is not None and call.asks and call.host is not None:
                self._bus.send(call.host, self.of_call(call))

    def of_call(self, call: Call) -> frames.Frame:
        """What the tool host of a call that asks its agent is told about the call's time: it is that of its turn."""
        return frames.Frame("clock", call_id=call.id, stage="held" if call.event.held else "runs")

    def tell_holder(self, event: Event) -> None:
        """Tell the process of the turn."""
        instance = event.instance
        if instance.leased is event and instance.conn is not None:
            self._send(instance.conn, event, None)

    def tell_asker(self, event: Event) -> None:
        """Tell the asker that waits for the event."""
        asker, contents = event.asker, self._bus.mailbox.contents
        if asker is None or not event.wants_answer or event.asynchronous or event.ending:
            return
        contents.recall(event)
        reply_to = event.content.reply_to
        if event.state == "accepted":
            contents.rests(event)
        if reply_to is not None and self._bus.presence.connections[asker.cls].get(asker.ident) is asker:
            self._send(asker, event, reply_to.correlation_id)

    def tell_call(self, item: str, stage: frames.ClockStage) -> None:
        """Tell the tool host of the call that asks a person. Its questions are named after it: `<callId>?<number>`."""
        call_id, mark, _ = item.rpartition("?")
        call = self._bus.calls.get(call_id) if mark else None
        if call is not None and call.host is not None:
            self._bus.send(call.host, frames.Frame("clock", call_id=call.id, stage=stage))

    def _send(self, connection: Connection, event: Event, correlation: str | None) -> None:
        frame = frames.Frame(
            "clock", event_id=event.id, in_reply_to=correlation, stage="held" if event.held else "runs"
        )
        frame.epoch = event.instance.epoch if correlation is None else None
        frame.call_id = event.call_id if correlation is not None else None
        frame.deadline_ms = left_ms(event, self._bus.now)
        self._bus.send(connection, frame)


class Core(Protocol):
    """What the core gives a part."""

    #: The state that all parts share.
    bus: Bus
    #: The clocks of events, which stand still while a person is asked.
    clocks: Clocks

    def accepted(self, event: Event, kept: bool) -> None:
        """Act on a new event that a part has staged: the journal has it, or no room for it."""

    def call_goes_on(self, connection: Connection, frame: frames.Frame) -> None:
        """Pass on a `tool.call` that a part has not admitted at once. It is asked about it again."""

    def waiting(self, now: float) -> Iterable[parts.Waiting]:
        """Who waits for what any part has."""

    def held(self, event: Event, since: float | None) -> None:
        """Tell all parts that a person is asked, or no longer (OfEvents.held)."""


#: Makes the parts of a feature: `parts` of its `broker.py`.
MakeParts = Callable[[Core], Sequence[parts.Part]]


def outer_call(bus: Bus, event: Event, within: str) -> Call:
    """The call that makes another one: it is open in the same turn, and its tool may make calls. Raises GoondanError:
    E_FORBIDDEN, or E_OVERLOADED while its agent may be about to send it again.
    """
    call = bus.calls.get(within)
    if call is None and bus.now < bus.calls.back_by:
        raise overloaded("the call that makes this one is not open here")
    if call is None or call.event is not event or not bus.calls.may_make_calls(call.tool):
        raise fail("E_FORBIDDEN", "`within` names no open call of this turn that may make calls")
    return call
