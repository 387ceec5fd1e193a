"""Events on their way to an agent instance: states, leases, epochs, retention. Pure; events.py drives it.

States of an event: `staged` (not yet in the journal) -> `accepted` -> `leased` -> `done` | `failed`, or from any of
the first three `expired` (deadline passed before it was handed over), `dead` (given up) or `cancelled`.

Rules.
- First in, first out per instance, one lease at a time; an event that comes back goes to the front.
- The epoch of an instance grows whenever a holder is lost, so that what the old holder still says is recognised.
- An attempt counts only if the holder died without having stored a message since it was handed the event.
- A finished event that a turn has asked for is kept with its answer until the event of that turn has ended: the turn
  may run again in another process, and asks again then. Every other finished event is in the journal only.
- Large payloads count with their size, wherever they lie; each is held by the events and answers that refer to it.

Source: docs/design/delivery.md sections 2, 3 and 4.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Raw, Struct

from kernel.broker.assignments import Assignments
from kernel.broker.blobs import HeldBlobs, Receiver, size_of
from kernel.broker.budgets.book import Book, Line
from kernel.broker.contents import Content, Contents
from kernel.broker.due import Due
from kernel.broker.epochs import Epochs
from kernel.broker.journal.interface import Archive, Item
from kernel.broker.places import Claim, Places
from kernel.broker.shares import Pool, kept_of
from kernel.broker.spawns import Spawned
from kernel.broker.standing import Standing
from kernel.broker.work import Work
from kernel.broker.workdirs import Workdir
from schemas.frames import NO_PAYLOAD, Blob, Source
from schemas.questions import ANSWER_SUFFIX

if TYPE_CHECKING:
    from kernel.broker.presence import Connection

State = Literal["staged", "accepted", "leased", "done", "failed", "expired", "dead", "cancelled"]
FINISHED: Final[frozenset[State]] = frozenset({"done", "failed", "expired", "dead", "cancelled"})

#: Deliveries without progress after which an event is a dead letter (docs/design/delivery.md section 4).
MAX_ATTEMPTS: Final = 5
#: A holder that says nothing for this long is taken for hung; turns renew every 10 s (seconds).
LEASE_S: Final = 30.0
#: Events that may wait for one instance; more are refused with E_OVERLOADED.
MAX_QUEUED: Final = 10_000
#: What a request that nobody waits for holds for its answer (bytes): the answer becomes an event, and takes its place.
ANSWER_ROOM: Final = 64 << 10
#: Answers that turns were given and may ask for again, in all (bytes): in memory until they were read, in files as long
#: as the turn lasts. A quarter of the folder of large payloads, as for clients.
MAX_TURN_ANSWERS: Final = 256 << 20
#: Questions of one instance that it does not wait for, and answers to such that wait for it: as many as pieces of
#: pending work may go on for it.
MAX_LATE: Final = 256
#: Dead letters, and their bytes: they stay until a person has looked, and an agent that never starts must not fill the
#: disk with what others send it.
MAX_DEAD: Final = 4096
MAX_DEAD_BYTES: Final = 256 << 20
#: What an event counts with beside its payload (bytes).
_EVENT_BYTES: Final = 256


class Event:
    """One accepted (or staged) event. Times are seconds on the broker's clock."""

    __slots__ = (
        "_content",
        "_waiting_acks",
        "_work",
        "asker",
        "asking",
        "asynchronous",
        "blob",
        "budget",
        "call_id",
        "cancelled",
        "deadline",
        "depth",
        "end",
        "id",
        "in_reply_to",
        "inline",
        "instance",
        "live",
        "root",
        "sender",
        "session",
        "since",
        "source",
        "standing",
        "state",
        "wants_answer",
    )

    def __init__(
        self,
        event_id: str,
        instance: Instance,
        *,
        sender: str,
        content: Content,
        source: Source | None = None,
        deadline: float | None = None,
        call_id: str | None = None,
        blob: Blob | None = None,
        root: str | None = None,
        session: str | None = None,
        asking: Event | None = None,
        since: float = 0.0,
        asynchronous: bool = False,
        in_reply_to: str | None = None,
        parent_span_id: str | None = None,
    ) -> None:
        self.id = event_id
        self.instance = instance
        #: The event that it began with: itself, where no agent and no tool sent it.
        self.root = event_id if root is None or root == event_id else root  # one string, not two: there are many events
        #: Whose work the root is: `client/<incarnation>`, the address of an agent or a tool host that acted by itself,
        #: or `root/<id>` where that is not known.
        self.session = session or unknown_session(self.root)
        #: The principal that may repeat it.
        self.sender = sender
        self._content: Content | None = content
        #: Bytes of it in memory, near enough to budget by; they count also while it is in the journal only.
        self.inline = size_in_memory(content.payload, content.auth)
        #: Somebody is to be answered.
        self.wants_answer = content.reply_to is not None
        #: How many wait for each other, this sender the last of them.
        self.depth = len(content.chain) if content.chain else 0
        #: What stands for the payload if that is large.
        self.blob = blob
        self.source = source
        self.deadline = deadline
        #: The tool call whose handler asked for it; None when an agent or a client did.
        self.call_id = call_id
        #: The event whose turn asked for it and waits; None when nobody's turn does.
        self.asking = asking
        #: An agent asked for it and does not wait: its answer becomes an event of its own (late_answers.py).
        self.asynchronous = asynchronous
        #: Of such an answer: the correlation id of what it answers.
        self.in_reply_to = in_reply_to
        #: When it was accepted.
        self.since = since
        # Made when they are used: there may be 100,000 events that wait, and none of them uses one.
        self.standing: Standing | None = None
        self._work: Work | None = None
        self._waiting_acks: list[tuple[Connection, str]] | None = None
        self.state: State = "staged"
        #: The connection that waits for the answer right now.
        self.asker: Connection | None = None
        #: That connection wants to hear of the turn while it runs.
        self.live = False
        #: Somebody wishes it to end: nobody is handed it any more.
        self.cancelled = False
        #: How it ends, from the moment in which that is decided.
        self.end: State | None = None
        #: The budgets that its turns are charged to; None: nobody counts.
        self.budget: Line | None = None

    @property
    def answer_id(self) -> str:
        """The id of the event that answers it."""
        return self.id + ANSWER_SUFFIX

    @property
    def content(self) -> Content:
        """What a holder is told of it. contents.py brings it back first where it may be in the journal only."""
        if self._content is None:
            raise AssertionError(f"the content of event {self.id!r} was not recalled")
        return self._content

    @content.setter
    def content(self, content: Content) -> None:
        self._content = content

    @property
    def content_here(self) -> Content | None:
        """The same; None while it is in the journal only."""
        return self._content

    def let_go(self) -> None:
        """Its content is in the journal, and needed by nobody now."""
        self._content = None

    @property
    def work(self) -> Work:
        """What its turns have come to, and its end."""
        if self._work is None:
            self._work = Work()
        return self._work

    @property
    def waiting_acks(self) -> list[tuple[Connection, str]]:
        """Frames to acknowledge once the event is journaled: (connection, frame id)."""
        if self._waiting_acks is None:
            self._waiting_acks = []
        return self._waiting_acks

    def acknowledged(self) -> None:
        """Its senders know that it is journaled."""
        self._waiting_acks = None

    @property
    def held(self) -> bool:
        """Whether its clock stands still, because a person is asked."""
        return self.standing is not None and self.standing.holds > 0

    @property
    def waits(self) -> bool:
        """Whether it is not handed out, because only a person can bring it further."""
        return self.standing is not None and self.standing.waits

    @property
    def finished(self) -> bool:
        """Whether it will never be handed over again."""
        return self.state in FINISHED

    def moved(self, position: int | None) -> None:
        """Its holder has stored so many messages of the turn."""
        work = self.work
        if position is not None and position > work.position:
            work.position = position
            work.progressed = True

    @property
    def ending(self) -> bool:
        """Whether it has ended, or its end is on the way to the journal."""
        return self.end is not None

    @property
    def keeps_answer(self) -> bool:
        """Whether the journal keeps the answer when the event has ended, because somebody may ask for it: a client may
        come back for it, also one that did not wait.
        """
        asked = self.wants_answer or (self.source is not None and self.source.kind == "client")
        return asked and self.asking is None and not self.asynchronous

    @property
    def parent(self) -> str | None:
        """The event whose turn waits for it."""
        return None if self.asking is None else self.asking.id

    @property
    def late_for(self) -> tuple[str, str] | None:
        """The instance (agent, key) that has asked it without waiting, or that it brings such an answer to."""
        if self.in_reply_to is not None:
            return self.instance.agent, self.instance.key
        source = self.source
        if not self.asynchronous or source is None or source.instance_key is None:
            return None
        return source.name, source.instance_key

    @property
    def by_operator(self) -> bool:
        """Whether an operator has sent it, not an agent in the course of things."""
        return self.source is not None and self.source.kind == "client" and self.source.name == "operator"

    @property
    def claim(self) -> Claim:
        """What its turn's place is counted with."""
        return Claim(self.session, self.root, self.by_operator, self.parent, self.depth)

    @property
    def size(self) -> int:
        """Bytes it holds in memory and on disk, near enough to budget by, and those that are kept for its answer."""
        if self.blob is None and not self.asynchronous:
            return self.inline
        return self.inline + size_of(self.blob) + (ANSWER_ROOM if self.asynchronous else 0)


def size_in_memory(payload: Raw, auth: Raw | None) -> int:
    """What an event with this payload takes (bytes), near enough to budget by."""
    return _EVENT_BYTES + len(memoryview(payload)) + (0 if auth is None else len(memoryview(auth)))


def unknown_session(root: str) -> str:
    """Stands for the session of a root whose own sender is not known, or not known any more."""
    return f"root/{root}"


class Instance:
    """One (agent, instance key): its queue, its lease, its process."""

    __slots__ = (
        "agent",
        "answers",
        "conn",
        "deleting",
        "epoch",
        "host",
        "in_line_since",
        "key",
        "leased",
        "leaving",
        "open",
        "place_s",
        "queue",
        "requested",
        "since",
        "spawned",
        "spawns",
        "workdir",
    )

    def __init__(self, agent: str, key: str, workdir: Workdir, epoch: int, since: float) -> None:
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
        #: The tool host that serves it; assignments.py writes it.
        self.host: Connection | None = None
        #: The supervisor has been asked to start it.
        self.requested = False
        #: Who asked for it before there was an event for it, and the frames of such that wait for its process.
        self.spawned: Spawned | None = None
        self.spawns: dict[tuple[str, str], PendingSpawn] = {}
        #: Its process is on its way out: nothing more is handed to it.
        self.leaving = False
        #: When it began to wait for a place, and how long it waited for the one that its next turn has (seconds).
        self.in_line_since = 0.0
        self.place_s = 0.0
        #: Somebody has it deleted: nothing new is taken for it (deletions.py).
        self.deleting = False

    @property
    def wanted(self) -> bool:
        """Whether a process must run for it."""
        return bool(self.leased or self.answers or self.spawns or self.has_queued)

    @property
    def has_queued(self) -> bool:
        """Whether an event waits that is not just about to end, nor for a person."""
        if self.queue and self.queue[0].waits:
            return False
        return any(not event.ending for event in self.queue)

    @property
    def address(self) -> str:
        """How it is named in a call chain."""
        return f"{self.agent}/{self.key}"


class PendingSpawn(Struct):
    """An `agents.spawn` that is answered when the process is there. `until` is on the broker's clock; the start is
    counted with `claim`.
    """

    conn: Connection
    frame_id: str
    until: float
    claim: Claim


class Staged(Struct, frozen=True):
    """A decision that takes effect when the journal has `item`.

    `accept`: the event may be handed out, and its senders are told. `finish`: it has ended as `state`, with its answer.
    `spawn`: the process of the instance may be started. `deletion`: the instance may go, or has gone. `restart`: the
    wish may be granted. `fresh`: conversations begin anew. `budget`: see budgets/desk.py. `config`: a patch is in
    force, or is no more. `approval`: of one item. `note`: nothing waits for it.
    """

    kind: Literal["accept", "finish", "spawn", "deletion", "restart", "fresh", "budget", "config", "approval", "note"]
    item: Item
    #: What it is about; None for `spawn`, `deletion` and some notes.
    event: Event | None = None
    #: The instance of a `spawn` or a `deletion`.
    instance: Instance | None = None
    #: Who is told of a `finish`, and the frame that is acknowledged with it.
    conn: Connection | None = None
    frame_id: str = ""
    answer: Raw = NO_PAYLOAD
    blob: Blob | None = None
    state: State = "done"
    #: The event that a `finish` puts into the mailbox: the answer to a request that nobody waits for.
    follow: Event | None = None
    #: The subject of what a `restart` or an `approval` is about, the agent of a `fresh`, what a `budget` is about, or
    #: the id of the patch of a `config`.
    wish: str = ""


class Quotas(Struct, frozen=True):
    """What the mailbox is made for: unfinished events, their bytes, places for turns, and places kept for operators."""

    open_events: int
    mailbox_bytes: int
    live_agents: int
    kept_agents: int


class Mailbox:
    """All instances and events, with the budgets."""

    def __init__(self, epochs: Epochs, quotas: Quotas, archive: Archive) -> None:
        """`archive` is the journal, which has the contents of events that wait."""
        self.contents = Contents(archive)
        self.instances: dict[tuple[str, str], Instance] = {}
        #: Unfinished events, and finished ones whose answer a turn may ask for again.
        self.events: dict[str, Event] = {}
        #: Events that were given up; a person decides about them.
        self.dead: dict[str, Event] = {}
        #: How many of them each agent has; their number and bytes, by session and by root.
        self._dead_of: dict[str, int] = {}
        self.dead_letters = Pool(MAX_DEAD, kept_of(MAX_DEAD))
        self.dead_bytes = Pool(MAX_DEAD_BYTES, kept_of(MAX_DEAD_BYTES))
        #: Unfinished events, their bytes, and the places of turns: by session and by root.
        self.open = Pool(quotas.open_events, kept_of(quotas.open_events))
        self.held = Pool(quotas.mailbox_bytes, kept_of(quotas.mailbox_bytes))
        self.answers = Pool(MAX_TURN_ANSWERS, kept_of(MAX_TURN_ANSWERS))
        self.places: Places[Instance] = Places(quotas.live_agents, quotas.kept_agents)
        self.blobs = HeldBlobs()
        self.budgets = Book()
        self.hosts = Assignments()
        self.epochs = epochs
        #: Instances with an event that is leased.
        self.holding: dict[Instance, None] = {}
        #: Queued events with a deadline.
        self.deadlines: Due[Event] = Due(lambda event: event.state == "accepted" and not event.held)
        #: Of roots with unfinished events besides the one that they begin with: whose they are, and how many of those.
        self._roots: dict[str, tuple[str, int]] = {}
        #: What instances have asked without waiting, by agent and key: unfinished requests, and answers that wait.
        self._late: dict[tuple[str, str], int] = {}

    def instance(self, agent: str, key: str, workdir: str, now: float) -> Instance:
        """The instance of that name, made if it is new. `workdir`, a path of its own, is used then."""
        found = self.instances.get((agent, key))
        if found is None:
            found = self.instances[(agent, key)] = Instance(agent, key, Workdir(workdir), self.epochs.next(), now)
        return found

    @property
    def bytes(self) -> int:
        """What all unfinished events hold."""
        return self.held.held

    def session_of(self, root: str) -> str:
        """Whose work this root is; a name of its own for one that is not known."""
        event = self.events.get(root)
        if event is not None and not event.finished:
            return event.session
        session, _ = self._roots.get(root, (unknown_session(root), 0))
        return session

    def late_of(self, instance: Instance) -> int:
        """How many questions, or answers to them, are on the way that this instance does not wait for."""
        return self._late.get((instance.agent, instance.key), 0)

    def stage(self, event: Event) -> None:
        """Hold the place of an event while the journal writes it."""
        self.events[event.id] = event
        self._opened(event)
        self.blobs.hold(event.blob)

    def unstage(self, event: Event) -> None:
        """The journal has no room for it."""
        del self.events[event.id]
        self._closed(event)
        self.blobs.release(event.blob)

    def _opened(self, event: Event) -> None:
        """An unfinished event is counted where it belongs."""
        event.instance.open += 1
        self.open.take(event.session, event.root, 1)
        self.held.take(event.session, event.root, event.size)
        if event.id != event.root:
            session, count = self._roots.get(event.root, (event.session, 0))
            self._roots[event.root] = (session, count + 1)
        elif event.root in self._roots:
            self._roots[event.root] = (event.session, self._roots[event.root][1])
        if (asker := event.late_for) is not None:
            self._late[asker] = self._late.get(asker, 0) + 1

    def _closed(self, event: Event) -> None:
        """It is finished, or the journal has no room for it."""
        event.instance.open -= 1
        self.open.give(event.session, event.root, 1)
        self.held.give(event.session, event.root, event.size)
        if event.id != event.root:
            session, count = self._roots.pop(event.root)
            if count > 1:
                self._roots[event.root] = (session, count - 1)
        if (asker := event.late_for) is not None:
            left = self._late.pop(asker) - 1
            if left:
                self._late[asker] = left

    def unwanted(self, event: Event) -> None:
        """Who asked for it without waiting has gone: its answer goes to nobody, and no room is kept for it."""
        self._closed(event)
        event.asynchronous = event.wants_answer = False
        self._opened(event)

    def accept(self, event: Event) -> None:
        """The journal has it: queue it."""
        event.state = "accepted"
        event.instance.queue.append(event)
        if event.deadline is not None:
            self.deadlines.add(event.deadline, event)

    def lease(self, event: Event, now: float) -> None:
        """Hand over `event`, which is the first in its queue, to an instance that has a place or is to have one."""
        instance = event.instance
        self.contents.recall(event)
        self.places.force(instance, event.claim)
        instance.queue.popleft()
        instance.leased = event
        self.holding[instance] = None
        event.state = "leased"
        event.work.progressed = False
        event.work.lease_until = now + LEASE_S

    def give_back(self, instance: Instance) -> None:
        """The leased event was not delivered, or was released: to the front again, nothing counted."""
        event = instance.leased
        if event is None:
            return
        self._rests(instance)
        event.state = "accepted"
        instance.queue.appendleft(event)
        if event.deadline is not None:
            self.deadlines.add(event.deadline, event)

    def _rests(self, instance: Instance) -> None:
        """It holds no event any more, and needs no place."""
        event, instance.leased = instance.leased, None
        if event is not None and event.budget is not None:
            self.budgets.left(event.budget, event.id)
        del self.holding[instance]
        self.places.release(instance)

    def lose_holder(self, instance: Instance, *, counts: bool) -> Event | None:
        """The holder is gone: new epoch, event to the front.

        Returns the event if the journal must hear of it: that was an attempt that counts, or the turn has got on.
        """
        instance.epoch, event = self.epochs.next(), instance.leased
        self.give_back(instance)
        if event is None or event.cancelled or event.ending:
            return None
        if event.work.progressed:
            return event
        if not counts:
            return None
        if event.standing is not None and event.standing.lost():
            return None
        event.work.attempts += 1
        return event

    def finish(self, event: Event, state: State, answer: Raw, blob: Blob | None = None) -> None:
        """End an event, whatever its state was; keep it, with its answer (`blob` if that is large), where it is needed.

        What its own turn had asked for is forgotten: nobody asks for that again.
        """
        instance = event.instance
        self.contents.moves(event)
        if instance.leased is event:
            self._rests(instance)
        elif event.state == "accepted":
            instance.queue.remove(event)
        size = event.size
        self._closed(event)
        self.places.over(event.id)
        event.state = state
        work = event.work
        work.answer, work.answer_blob = answer, blob
        if event.content_here is not None:
            event.content.payload = NO_PAYLOAD  # nobody reads it again
        work.calls.clear()
        for asked in work.answered:
            self._forget(asked)
        for asked in work.requests:
            asked.asking = None  # it goes on, and nobody waits for it
        work.answered.clear()
        work.requests.clear()
        self.blobs.hold(blob)
        if state == "dead":
            self._bury(event, size)
        else:
            self.blobs.release(event.blob)
            event.blob = None
        if event.asking is None:
            self._forget(event)
        else:
            event.asking.work.requests.pop(event, None)
            event.asking.work.answered[event] = None
            work.kept_here, work.kept_in_file = len(memoryview(answer)), size_of(blob)
            self.answers.take(event.session, event.root, work.kept_here + work.kept_in_file)

    def _forget(self, event: Event) -> None:
        """The journal knows all that is still needed of a finished event."""
        self.events.pop(event.id, None)
        work = event.work
        if kept := work.kept_here + work.kept_in_file:
            self.answers.give(event.session, event.root, kept)
            work.kept_here = work.kept_in_file = 0
        if event.keeps_answer:
            self.blobs.leave(event.work.answer_blob)
        else:
            self.blobs.release(event.work.answer_blob)

    def _bury(self, event: Event, size: int) -> None:
        self.dead[event.id] = event
        event.work.dead_bytes = size
        agent = event.instance.agent
        self._dead_of[agent] = self._dead_of.get(agent, 0) + 1
        self.dead_letters.take(event.session, event.root, 1)
        self.dead_bytes.take(event.session, event.root, size)

    def may_die(self, event: Event) -> bool:
        """Whether there is room for this event should it be given up, as others for its agent were."""
        if event.instance.agent not in self._dead_of:
            return True
        session, root, operator = event.session, event.root, event.by_operator
        return self.dead_letters.may_take(session, root, 1, operator=operator) and self.dead_bytes.may_take(
            session, root, event.size, operator=operator
        )

    def drop_dead(self, event: Event) -> None:
        """A person has dealt with a dead letter."""
        del self.dead[event.id]
        count = self._dead_of.pop(event.instance.agent)
        if count > 1:
            self._dead_of[event.instance.agent] = count - 1
        self.dead_letters.give(event.session, event.root, 1)
        self.dead_bytes.give(event.session, event.root, event.work.dead_bytes)
        self.blobs.release(event.blob)
        event.blob = None

    def arrived(self, answer_id: str, *, at: Receiver) -> bool:
        """An answer has arrived where it was wanted; True when its kept copy takes a file that can go now."""
        return self.blobs.arrived(answer_id, at=at)

    def answer_read(self, answer_id: str) -> None:
        """Who asked in a turn has an answer that it may ask for again: from now on only the journal holds its bytes."""
        event = self.events.get(answer_id.removesuffix(ANSWER_SUFFIX))
        if event is not None and event.finished:
            work = event.work
            work.answer = None
            if work.kept_here:
                self.answers.give(event.session, event.root, work.kept_here)
                work.kept_here = 0

    def keeps(self, event: Event, answer: Raw, blob: Blob | None) -> bool:
        """Whether there is room to keep an answer of this size for the turn that asked."""
        size = len(memoryview(answer)) + size_of(blob)
        return size <= ANSWER_ROOM or self.answers.may_take(event.session, event.root, size, operator=False)

    def forget_idle(self, instance: Instance) -> None:
        """Drop an instance that has nothing here and no process."""
        busy = instance.wanted or instance.open or instance.conn is not None or instance.requested or instance.leaving
        if not busy and not instance.deleting and instance.spawned is None:
            self.hosts.release(instance)
            self.instances.pop((instance.agent, instance.key), None)
