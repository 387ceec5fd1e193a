"""Events on their way to an agent instance: states, leases, epochs, retention. Pure; routing.py drives it.

States of an event: `staged` (not yet in the journal) -> `accepted` -> `leased` -> `done` | `failed`, or from any of
the first three `expired` (deadline passed before it was handed over), `dead` (given up) or `cancelled`.

Rules.
- First in, first out per instance, one lease at a time; an event that comes back goes to the front.
- The epoch of an instance grows whenever a holder is lost, so that what the old holder still says is recognised.
- An attempt counts only if the holder died without having made a new tool call since it was handed the event.
- A finished event is kept with its answer until MAX_FINISHED others have finished; its id is known for longer, so that
  a late repeat is told that it was answered and is not worked on again.
- Large payloads count with their size, wherever they lie; each is held by the events and answers that refer to it. An
  event's own is held until its answer has arrived: until then its sender may send it again, to a broker without memory.

Source: delivery.md section 3; design section 3.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Raw, Struct

from kernel.broker.blobs import HeldBlobs, size_of
from kernel.broker.places import Claim, Places
from kernel.broker.seen import Seen
from kernel.broker.shares import Pool, kept_of
from schemas.frames import Blob, ReplyTo, Source

if TYPE_CHECKING:
    from kernel.broker.presence import Connection

State = Literal["staged", "accepted", "leased", "done", "failed", "expired", "dead", "cancelled"]
FINISHED: Final[frozenset[State]] = frozenset({"done", "failed", "expired", "dead", "cancelled"})

#: Deliveries without progress after which an event is a dead letter (delivery.md section 3).
MAX_ATTEMPTS: Final = 5
#: A holder that says nothing for this long is taken for hung: generous, since turns renew every 10 s (seconds).
LEASE_S: Final = 60.0
#: Events that may wait for one instance; more are refused with E_OVERLOADED.
MAX_QUEUED: Final = 10_000
#: Finished events whose answers are kept for repeats, by number, by bytes in memory, and by bytes with large payloads,
#: which lie elsewhere. A sender repeats until it has its answer, so most of these are never asked for; beyond them only
#: ids are known (seen.py).
MAX_FINISHED: Final = 1_000
MAX_FINISHED_INLINE: Final = 4 << 20
MAX_FINISHED_BYTES: Final = 64 << 20
#: An answer is named after its event.
ANSWER_SUFFIX: Final = ":answer"


class Event:
    """One accepted (or staged) event. Times are seconds on the broker's clock."""

    __slots__ = (
        "adopted",
        "answer",
        "answer_blob",
        "answer_id",
        "asker",
        "attempts",
        "auth",
        "blob",
        "call_id",
        "calls",
        "cancelled",
        "chain",
        "deadline",
        "ending",
        "from_",
        "id",
        "instance",
        "lease_until",
        "live",
        "open_calls",
        "parent",
        "payload",
        "progressed",
        "reply_to",
        "requests",
        "root",
        "sender",
        "session",
        "source",
        "state",
        "trace_id",
        "waiting_acks",
        "workdir",
    )

    def __init__(
        self,
        event_id: str,
        instance: Instance,
        *,
        sender: str | None,
        from_: str | None,
        payload: Raw,
        source: Source | None = None,
        reply_to: ReplyTo | None = None,
        chain: list[str] | None = None,
        auth: Raw | None = None,
        workdir: str | None = None,
        trace_id: str | None = None,
        deadline: float | None = None,
        call_id: str | None = None,
        blob: Blob | None = None,
        root: str | None = None,
        session: str | None = None,
        parent: str | None = None,
    ) -> None:
        self.id = event_id
        self.instance = instance
        #: The event that it began with: itself, where no agent and no tool sent it.
        self.root = root or event_id
        #: Whose work the root is: `client/<incarnation>`, the address of an agent or a tool host that acted by itself,
        #: or `root/<id>` where that is not known.
        self.session = session or unknown_session(self.root)
        #: The event whose turn waits for it.
        self.parent = parent
        #: The principal that may repeat it; None after a restart until somebody does.
        self.sender = sender
        self.from_ = from_
        self.payload = payload
        #: What stands for the payload, and for the answer's, if that is large.
        self.blob = blob
        self.answer_blob: Blob | None = None
        self.source = source
        self.reply_to = reply_to
        self.chain = chain
        self.auth = auth
        self.workdir = workdir
        self.trace_id = trace_id
        self.deadline = deadline
        #: The tool call whose handler asked for it; None when an agent or a client did.
        self.call_id = call_id
        #: What its own turn has asked of other instances, and waits for.
        self.requests: list[Event] = []
        self.state: State = "staged"
        self.attempts = 0
        self.progressed = False
        #: Every callId it has made, with the incarnation of the tool host that had it; and how many are open.
        self.calls: dict[str, str | None] = {}
        self.open_calls = 0
        self.lease_until = 0.0
        self.answer: Raw | None = None
        self.answer_id = event_id + ANSWER_SUFFIX
        #: The connection that waits for the answer right now.
        self.asker: Connection | None = None
        #: That connection wants to hear of the turn while it runs.
        self.live = False
        #: Known from its holder only, after a restart: its content is missing until its sender repeats it.
        self.adopted = False
        #: Frames to acknowledge once the event is journaled: (connection, frame id).
        self.waiting_acks: list[tuple[Connection, str]] = []
        #: It is to end: nobody is handed it any more; and its end, of our own, is on the way to the journal.
        self.cancelled = False
        self.ending = False

    @property
    def finished(self) -> bool:
        """Whether it will never be handed over again."""
        return self.state in FINISHED

    @property
    def by_operator(self) -> bool:
        """Whether an operator has sent it, not an agent in the course of things."""
        return self.source is not None and self.source.kind == "client" and self.source.name == "operator"

    @property
    def claim(self) -> Claim:
        """What its turn's place is counted with."""
        depth = len(self.chain) if self.chain else 0
        return Claim(self.session, self.root, self.by_operator, self.parent, depth)

    @property
    def size(self) -> int:
        """Bytes it holds in memory and on disk, near enough to budget by."""
        return self.inline + size_of(self.blob) + size_of(self.answer_blob)

    @property
    def inline(self) -> int:
        """Those of them that are in memory."""
        return 256 + len(memoryview(self.payload)) + (len(memoryview(self.answer)) if self.answer else 0)


def unknown_session(root: str) -> str:
    """Stands for the session of a root whose own sender is not known, or not known any more."""
    return f"root/{root}"


class Instance:
    """One (agent, instance key): its queue, its lease, its process."""

    __slots__ = (
        "agent",
        "answers",
        "conn",
        "epoch",
        "host",
        "key",
        "leased",
        "leaving",
        "open",
        "queue",
        "requested",
        "since",
        "spawned",
        "spawns",
        "workdir",
    )

    def __init__(self, agent: str, key: str, workdir: str, epoch: int, since: float) -> None:
        self.agent = agent
        self.key = key
        #: When this broker first heard of it, on the broker's clock (seconds).
        self.since = since
        self.workdir = workdir
        self.epoch = epoch
        self.queue: deque[Event] = deque()
        #: Its unfinished events, also those that are not in the journal yet.
        self.open = 0
        #: Answers to this instance's own requests: answer id -> encoded frame, until acknowledged (the second lane).
        self.answers: dict[str, bytes] = {}
        self.leased: Event | None = None
        self.conn: Connection | None = None
        self.host: Connection | None = None
        #: The supervisor has been asked to start it.
        self.requested = False
        #: Who asked for it before there was an event for it, and the frames of such that wait for its process.
        self.spawned: Spawned | None = None
        self.spawns: dict[tuple[str, str], PendingSpawn] = {}
        #: Its process is on its way out: nothing more is handed to it.
        self.leaving = False

    @property
    def wanted(self) -> bool:
        """Whether a process must run for it."""
        return bool(self.queue or self.leased or self.answers or self.spawns)

    @property
    def address(self) -> str:
        """How it is named in a call chain."""
        return f"{self.agent}/{self.key}"


class Spawned(Struct, frozen=True):
    """An instance that was asked for with `agents.spawn`. `owner_*` asked first; `created` is on the broker's clock.

    `by` is the sender and the frame id that started it last, so that a repeat is told the same.
    """

    owner_agent: str
    owner_key: str
    created: float
    cwd: str | None
    by: tuple[str, str]


class SpawnRecord(Struct, frozen=True, omit_defaults=True):
    """A spawned instance, remembered beyond the broker's life. `created`: seconds since 1970. `gone`: no more."""

    agent: str
    key: str
    owner_agent: str = ""
    owner_key: str = ""
    created: float = 0.0
    cwd: str | None = None
    gone: bool = False


class PendingSpawn(Struct):
    """An `agents.spawn` that is answered when the process is there. `until` is on the broker's clock; the start is
    counted with `claim`.
    """

    conn: Connection
    frame_id: str
    until: float
    claim: Claim


class Staged(Struct, frozen=True):
    """A decision that takes effect when the journal has it: an accepted event, or a finished one with its answer."""

    kind: Literal["accept", "finish"]
    event: Event
    conn: object = None
    frame_id: str = ""
    answer: Raw | None = None
    state: Literal["done", "failed"] = "done"
    blob: Blob | None = None


class Quotas(Struct, frozen=True):
    """What the mailbox is made for: unfinished events, their bytes, places for turns, and places kept for operators."""

    open_events: int
    mailbox_bytes: int
    live_agents: int
    kept_agents: int


class Mailbox:
    """All instances and events, with the budgets."""

    def __init__(self, first_epoch: int, quotas: Quotas) -> None:
        self.instances: dict[tuple[str, str], Instance] = {}
        self.events: dict[str, Event] = {}
        #: Unfinished events, their bytes, and the places of turns: by session and by root.
        self.open = Pool(quotas.open_events, kept_of(quotas.open_events))
        self.held = Pool(quotas.mailbox_bytes, kept_of(quotas.mailbox_bytes))
        self.places: Places[Instance] = Places(quotas.live_agents, quotas.kept_agents)
        self.blobs = HeldBlobs()
        self._first_epoch = first_epoch
        self._finished: deque[Event] = deque()
        self._finished_bytes = 0
        self._finished_inline = 0
        self._answered = Seen()
        #: Of roots with unfinished events: whose they are, and how many events.
        self._roots: dict[str, tuple[str, int]] = {}

    def instance(self, agent: str, key: str, workdir: str, now: float) -> Instance:
        """The instance of that name, made if it is new. `workdir` is used then."""
        found = self.instances.get((agent, key))
        if found is None:
            found = self.instances[(agent, key)] = Instance(agent, key, workdir, self._first_epoch, now)
        return found

    @property
    def bytes(self) -> int:
        """What all unfinished events hold."""
        return self.held.held

    def session_of(self, root: str) -> str:
        """Whose work this root is; a name of its own for one that is not known."""
        session, _ = self._roots.get(root, (unknown_session(root), 0))
        return session

    def stage(self, event: Event) -> None:
        """Hold the place of an event while the journal writes it."""
        self.events[event.id] = event
        self._opened(event)
        self.blobs.hold(event.blob)

    def complete(self, event: Event, payload: Raw, blob: Blob | None, root: str, session: str) -> None:
        """The content of an event that was known from its holder only, and what it belongs to."""
        self._closed(event)
        event.payload, event.blob = payload, blob
        event.root, event.session = root, session
        self.blobs.hold(blob)
        self._opened(event)

    def _opened(self, event: Event) -> None:
        """An unfinished event is counted where it belongs."""
        event.instance.open += 1
        self.open.take(event.session, event.root, 1)
        self.held.take(event.session, event.root, event.size)
        session, count = self._roots.get(event.root, (event.session, 0))
        self._roots[event.root] = (event.session if event.id == event.root else session, count + 1)

    def _closed(self, event: Event) -> None:
        """It is finished, or forgotten, or belongs elsewhere."""
        event.instance.open -= 1
        self.open.give(event.session, event.root, 1)
        self.held.give(event.session, event.root, event.size)
        session, count = self._roots.pop(event.root)
        if count > 1:
            self._roots[event.root] = (session, count - 1)

    def accept(self, event: Event) -> None:
        """The journal has it: queue it."""
        event.state = "accepted"
        event.instance.queue.append(event)

    def lease(self, event: Event, now: float) -> None:
        """Hand over `event`, which is the first in its queue, to an instance that has a place or is to have one."""
        instance = event.instance
        self.places.force(instance, event.claim)
        instance.queue.popleft()
        instance.leased = event
        event.state = "leased"
        event.progressed = False
        event.lease_until = now + LEASE_S

    def give_back(self, instance: Instance) -> None:
        """The leased event was not delivered, or was released: to the front again, nothing counted."""
        event = instance.leased
        if event is None:
            return
        instance.leased = None
        self.places.release(instance)
        if event.adopted and not event.cancelled:
            # Nothing of it to hand over: its sender, or its next holder, brings it back.
            self._closed(event)
            self.blobs.release(event.blob)
            del self.events[event.id]
            return
        event.state = "accepted"
        instance.queue.appendleft(event)

    def lose_holder(self, instance: Instance, *, counts: bool) -> Event | None:
        """The holder is gone: new epoch, event to the front. Returns the event if its attempts are used up."""
        instance.epoch += 1
        event = instance.leased
        self.give_back(instance)
        if event is None or event.state != "accepted" or event.cancelled:
            return None
        if counts and not event.progressed:
            event.attempts += 1
        return event if event.attempts >= MAX_ATTEMPTS else None

    def finish(self, event: Event, state: State, answer: Raw | None, blob: Blob | None = None) -> None:
        """End an event, whatever its state was; keep it, with its answer (`blob` if that is large), for repeats."""
        instance = event.instance
        if instance.leased is event:
            instance.leased = None
            self.places.release(instance)
        elif event.state == "accepted":
            instance.queue.remove(event)
        self._closed(event)
        self.places.over(event.id)
        event.state = state
        event.answer = answer
        event.answer_blob = blob
        event.payload = Raw(b"\xc0")  # nobody reads it again
        self.blobs.hold(blob)
        if event.reply_to is None:
            self._drop_payload(event)
        event.calls.clear()
        event.requests.clear()
        self._finished.append(event)
        self._finished_bytes += event.size
        self._finished_inline += event.inline
        while self._finished and (
            len(self._finished) > MAX_FINISHED
            or self._finished_bytes > MAX_FINISHED_BYTES
            or self._finished_inline > MAX_FINISHED_INLINE
        ):
            old = self._finished.popleft()
            self._finished_bytes -= old.size
            self._finished_inline -= old.inline
            self.blobs.release(old.blob)
            self.blobs.release(old.answer_blob)
            self.events.pop(old.id, None)
            self._answered.add(old.sender or "", old.instance.address, old.id)

    def was_answered(self, sender: str, instance: Instance, event_id: str) -> bool:
        """Whether this event has finished too long ago for its answer to be kept."""
        return (sender, instance.address, event_id) in self._answered

    def answered(self, answer_id: str, *, by_agent: bool) -> None:
        """The answer has arrived where it was wanted: nobody will send the event again, or ask for the answer."""
        self.blobs.arrived(answer_id, to_agent=by_agent)
        event = self.events.get(answer_id.removesuffix(ANSWER_SUFFIX))
        if event is not None and event.finished and event.blob is not None:
            self._finished_bytes -= event.blob.size
            self._drop_payload(event)

    def _drop_payload(self, event: Event) -> None:
        self.blobs.release(event.blob)
        event.blob = None

    def forget_idle(self, instance: Instance) -> None:
        """Drop an instance that has nothing here and no process. Its epoch may start again: epochs only must grow."""
        busy = instance.wanted or instance.open or instance.conn is not None or instance.requested or instance.leaving
        if not busy and instance.spawned is None:
            self.instances.pop((instance.agent, instance.key), None)
            self._first_epoch = max(self._first_epoch, instance.epoch + 1)
