"""The state that all parts of the broker share, and the bytes to send. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from goondan.kernel.broker.calls import Calls
from goondan.kernel.broker.entities import Connection, Event, Instance
from goondan.kernel.broker.epochs import Epochs
from goondan.kernel.broker.journal.interface import Archive, Item
from goondan.kernel.broker.ledger import EPOCH_BLOCK, Ledger
from goondan.kernel.broker.mailbox import Mailbox, Quotas
from goondan.kernel.broker.presence import Presence
from goondan.kernel.broker.shares import kept_of
from goondan.schemas.bundle.address import instance_workdir
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import encode_value, to_raw
from goondan.schemas.wire.control import Principal, ToSupervisor
from goondan.schemas.wire.frames import ORCHESTRATOR, ErrorPayload, Frame, Shutdown, ShutdownReason

#: New events and tool calls that one peer may have unanswered.
CREDIT = 256
#: So many frames above its credit are accepted from a peer: they may have crossed a change of the credit.
CREDIT_SLACK = 64
#: How long a refused sender should wait (milliseconds).
RETRY_AFTER_MS = 100
#: For so long after its start, a broker expects peers, events and calls that it does not know (seconds). All of them
#: are back within a second, unless they wait for a processor.
RETURN_S = 3.0
#: At most so many different refusals are remembered until they are in the log.
MAX_REFUSALS = 64
#: Longer ids (characters) are refused where they enter, because the broker keeps ids.
MAX_ID = 256
#: The same limit for a correlation id. It is higher because such an id may be made from an event's id.
MAX_CORRELATION = 512
#: The end of the id of an event that replaces another one. Only the broker makes such ids.
REQUEUED_SUFFIX = "~requeued"


class Lossy(bytes):
    """A frame that is dropped when its peer takes no more. Any other frame waits."""

    __slots__ = ()


class Staged(NamedTuple):
    """A decision on its way into the journal."""

    #: The writes of the journal.
    item: Item
    #: Acts on the decision when the journal has it (True), or when the disk has no room for it (False). None: nothing
    #: waits for it. A crash before costs nothing: the next broker reads the records only.
    then: Callable[[bool], None] | None


class Bus:
    """The broker's state and its outgoing side.

    `out` collects (socket class, routing id, bytes), `staged` decisions for the journal. The loop empties both.
    `booted_at` is the moment when the broker's clock was zero (seconds since 1970), used only for times that people
    read.
    """

    def __init__(
        self,
        plan: KernelPlan,
        secret: bytes,
        *,
        broker_id: str,
        started_ms: int,
        epochs: Epochs,
        archive: Archive,
        ledger: Ledger,
        booted_at: float = 0.0,
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
        self.booted_at = booted_at
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
        #: Messages for operators; the loop writes them to the log.
        self.notices: list[str] = []
        self.counters: Counter[str] = Counter()
        #: Refusals for lack of room: (root, quota, what) -> how often. The loop writes them to the log.
        self.refusals: Counter[tuple[str, str, str]] = Counter()
        self.presence = Presence(secret)
        #: True in the first broker of a kernel, which has just read the bundle.
        self.new_kernel = False
        #: Decisions of people, one line each; the loop writes them to the log.
        self.audit: list[str] = []
        kept = plan.kept_agents if plan.kept_agents is not None else kept_of(plan.max_live_agents)
        quotas = Quotas(plan.max_open_events, plan.mailbox_mb << 20, plan.max_live_agents, kept)
        self.mailbox = Mailbox(epochs, quotas, archive)
        self.calls = Calls()
        self.calls.back_by = self.now + RETURN_S
        #: The supervisor's connection, if one is there.
        self.control: Connection | None = None
        #: Since when the oldest decision waits for the disk, as the loop has seen; None: none does.
        self.disk_since: float | None = None
        #: True while the kernel stops: the broker accepts and hands out nothing new.
        self.closing = False
        #: The reason that agents were told when the kernel began to stop, and the end of their time (broker's clock).
        self.draining: tuple[ShutdownReason, float] | None = None
        self._last_id = 0

    def stage(self, item: Item, then: Callable[[bool], None] | None = None) -> None:
        """Have the journal write a decision. `then` is called with True when it is durable. It is called with False
        when the disk has no room for it, which happens to refusable items only.
        """
        self.staged.append(Staged(item, then))

    def reserve_epochs(self) -> None:
        """Have the journal reserve more epochs before they run out."""
        top = self.mailbox.epochs.to_reserve(EPOCH_BLOCK)
        if top is not None:
            self.stage(self.ledger.epochs(top))

    def next_id(self) -> str:
        """A new id for a frame of the broker."""
        self._last_id += 1
        return f"{self.broker_id}.{self._last_id}"

    def note_refusal(self, root: str, quota: str, what: str) -> None:
        """Note for the log that this root was refused something. Repeats are counted until the loop logs them."""
        if len(self.refusals) < MAX_REFUSALS:
            self.refusals[root, quota, what] += 1

    def instance(self, agent: str, key: str, now: float) -> Instance:
        """The instance of that name. A new one is made."""
        found = self.mailbox.instances.get((agent, key))
        if found is not None:
            return found
        owner = self.plan.entry_agent if agent in self.plan.sharing_agents else agent
        return self.mailbox.instance(agent, key, instance_workdir(self.plan.state_dir, owner, key), now)

    def send(self, connection: Connection, frame: Frame) -> None:
        """Queue a frame of the broker and give it an id."""
        frame.id = self.next_id()
        self.out.append((connection.cls, connection.ident, encode_value(frame)))

    def shutdown(self, connection: Connection, grace_ms: int | None, reason: ShutdownReason) -> None:
        """Tell an agent or a tool host to leave within `grace_ms` (milliseconds). None: it may finish its step."""
        to = connection.claims.agent or connection.address
        payload = to_raw(Shutdown(grace_ms, reason))
        self.send(connection, Frame("shutdown", from_=ORCHESTRATOR, to=to, payload=payload))

    def ack(self, connection: Connection, frame_id: str, event: Event) -> None:
        """Tell a sender that its frame about `event` was accepted."""
        frame = Frame("ack", in_reply_to=frame_id, event_id=event.id, stage="accepted", trace_id=event.content.trace_id)
        frame.asynchronous = event.asynchronous
        self.send(connection, frame)

    def error(self, cls: int, ident: bytes, info: ErrorPayload, frame: Frame | None) -> None:
        """Answer `frame` with an error. An error is never answered, so two sides cannot send errors back and forth."""
        reply = Frame("error", id=self.next_id(), payload=to_raw(info))
        if frame is not None:
            reply.in_reply_to = frame.id[:MAX_ID] or None
            reply.call_id = frame.call_id[:MAX_ID] if frame.call_id else None
        self.out.append((cls, ident, encode_value(reply)))

    def tell_supervisor(self, message: ToSupervisor) -> None:
        """Send news to the supervisor. If they are lost: it gets the whole state at its next connect."""
        if self.control is not None:
            self.send(self.control, Frame("runtime.event", payload=to_raw(message)))


def principal_of(instance: Instance) -> Principal:
    """The name by which the supervisor knows an instance."""
    return Principal("agent", instance.agent, instance.key)
