"""What all parts of the broker share: the state, and the bytes to send. Pure."""

from __future__ import annotations

from collections import Counter

from kernel.broker.approvals.items import Item
from kernel.broker.calls import Calls
from kernel.broker.entities import Connection, Event, Instance, Staged
from kernel.broker.epochs import Epochs
from kernel.broker.journal.interface import Archive
from kernel.broker.ledger import EPOCH_BLOCK, Ledger
from kernel.broker.mailbox import Mailbox, Quotas
from kernel.broker.presence import Presence
from kernel.broker.restart_wishes import Wish
from kernel.broker.shares import kept_of
from schemas.address import instance_workdir
from schemas.codec import encode_value, to_raw
from schemas.control import Principal, ToSupervisor
from schemas.frames import ORCHESTRATOR, ErrorPayload, Frame, Shutdown, ShutdownReason
from schemas.launch import KernelPlan

#: New events and tool calls that one peer may have unanswered.
CREDIT = 256
#: What a peer is forgiven above its credit before it is refused: frames that crossed a change of the window.
CREDIT_SLACK = 64
#: How long a refused sender should wait (milliseconds).
RETRY_AFTER_MS = 100
#: How long after its start a broker expects peers, events and calls that it does not know (seconds): all are back
#: within a second, unless they wait for a processor.
RETURN_S = 3.0
#: Different refusals that are remembered until the log has them.
MAX_REFUSALS = 64
#: Ids longer than this (characters) are refused where they enter: they are kept.
MAX_ID = 256
#: The same for a correlation id, which may be made of an event's id.
MAX_CORRELATION = 512


class Lossy(bytes):
    """A frame that is dropped where any other would wait for its peer."""

    __slots__ = ()


class Bus:
    """The broker's state and its outgoing side.

    `out` collects (socket class, routing id, bytes) and `staged` decisions for the journal; the loop empties both.
    `booted_at` is when the broker's clock was zero, in seconds since 1970: only for times that people read.
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
        """`blobs` is the folder of large payloads; without one, no payload is larger than a frame. `archive` knows the
        events that have ended.
        """
        self.plan = plan
        self.blobs = blobs
        self.broker_id = broker_id
        self.started_ms = started_ms
        self.booted_at = booted_at
        self.out: list[tuple[int, bytes, bytes]] = []
        self.staged: list[Staged] = []
        #: Instances whose next event may be handed over, once what is looked at now is done (router.py).
        self.due: dict[Instance, None] = {}
        self.archive = archive
        self.ledger = ledger
        #: The broker's clock in the moment of the frame, the tick or the answer of the journal that is looked at.
        self.now = started_ms / 1000
        #: Bugs of ours that were survived; the loop writes them to the log.
        self.faults: list[Exception] = []
        #: What operators should know; the loop writes it to the log.
        self.notices: list[str] = []
        self.counters: Counter[str] = Counter()
        #: What was refused for want of room, (root, quota, what) -> how often; the loop writes it to the log.
        self.refusals: Counter[tuple[str, str, str]] = Counter()
        self.presence = Presence(secret)
        #: Wishes for a restart that are not over, or were so lately, by their subjects in the journal.
        self.wishes: dict[str, Wish] = {}
        #: What waits for a person, or was decided by one and whose turn goes on, by subject, the oldest first.
        self.approvals: dict[str, Item] = {}
        #: Who decided what; the loop writes it to the log.
        self.audit: list[str] = []
        #: Of the conversations of agents, "" for all: see fresh.py.
        self.generations: dict[str, int] = {}
        kept = plan.kept_agents if plan.kept_agents is not None else kept_of(plan.max_live_agents)
        quotas = Quotas(plan.max_open_events, plan.mailbox_mb << 20, plan.max_live_agents, kept)
        self.mailbox = Mailbox(epochs, quotas, archive)
        self.calls = Calls()
        self.budgets = self.mailbox.budgets
        #: The supervisor's connection, if one is there.
        self.control: Connection | None = None
        #: The kernel is stopping: nothing new is taken or handed out.
        self.closing = False
        #: What agents were told when the kernel began to stop, and until when they have time (the broker's clock).
        self.draining: tuple[ShutdownReason, float] | None = None
        self._last_id = 0

    def reserve_epochs(self) -> None:
        """Have the journal reserve more epochs before there are few."""
        top = self.mailbox.epochs.to_reserve(EPOCH_BLOCK)
        if top is not None:
            self.staged.append(Staged("note", self.ledger.epochs(top)))

    def next_id(self) -> str:
        """A frame id of the broker's own."""
        self._last_id += 1
        return f"{self.broker_id}.{self._last_id}"

    def note_refusal(self, root: str, quota: str, what: str) -> None:
        """For the log: this root was refused something. Said once, until the loop has written it down."""
        if len(self.refusals) < MAX_REFUSALS:
            self.refusals[root, quota, what] += 1

    def instance(self, agent: str, key: str, now: float) -> Instance:
        """The instance of that name, made if it is new."""
        found = self.mailbox.instances.get((agent, key))
        if found is not None:
            return found
        return self.mailbox.instance(agent, key, instance_workdir(self.plan.state_dir, agent, key), now)

    def send(self, connection: Connection, frame: Frame) -> None:
        """Queue a frame of the broker's own; it gets an id."""
        frame.id = self.next_id()
        self.out.append((connection.cls, connection.ident, encode_value(frame)))

    def shutdown(self, connection: Connection, grace_ms: int | None, reason: ShutdownReason) -> None:
        """Tell an agent or a tool host to leave; None: a running step takes its time."""
        to = connection.claims.agent or connection.address
        payload = to_raw(Shutdown(grace_ms, reason))
        self.send(connection, Frame("shutdown", from_=ORCHESTRATOR, to=to, payload=payload))

    def ack(self, connection: Connection, frame_id: str, event: Event) -> None:
        """Tell a sender that its frame about `event` was taken."""
        frame = Frame("ack", in_reply_to=frame_id, event_id=event.id, stage="accepted", trace_id=event.content.trace_id)
        self.send(connection, frame)

    def error(self, cls: int, ident: bytes, info: ErrorPayload, frame: Frame | None) -> None:
        """Answer `frame` with an error. Errors are never answered, so two sides cannot play ping-pong with them."""
        reply = Frame("error", id=self.next_id(), payload=to_raw(info))
        if frame is not None:
            reply.in_reply_to = frame.id[:MAX_ID] or None
            reply.call_id = frame.call_id[:MAX_ID] if frame.call_id else None
        self.out.append((cls, ident, encode_value(reply)))

    def tell_supervisor(self, message: ToSupervisor) -> None:
        """News for the supervisor; at its next connect it gets the whole picture anyway."""
        if self.control is not None:
            self.send(self.control, Frame("runtime.event", payload=to_raw(message)))


def principal_of(instance: Instance) -> Principal:
    """How the supervisor knows an instance."""
    return Principal("agent", instance.agent, instance.key)
