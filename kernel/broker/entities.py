"""What the broker holds in memory, plainly: connections, agent instances and events, which refer to each other. Pure.

The rules about them are elsewhere: presence.py says who may connect, mailbox.py what becomes of events, assignments.py
which tool host serves an instance, contents.py where the content of an event is while it waits.

States of an event: `staged` (not yet in the journal) -> `accepted` -> `leased` -> `done` | `failed`, or from any of
the first three `expired` (deadline passed before it was handed over), `dead` (given up) or `cancelled`.

Source: docs/design/delivery.md sections 2 and 3; docs/design/wire.md section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Literal

from msgspec import Raw, Struct

from kernel.broker.allowance import Allowance
from kernel.broker.blobs import size_of
from kernel.broker.budgets.book import Line
from kernel.broker.journal.interface import Item
from kernel.broker.places import Claim
from kernel.broker.spawns import Spawned
from kernel.broker.standing import Standing
from kernel.broker.workdirs import Workdir
from schemas.frames import NO_PAYLOAD, Blob, Frame, Hello, ReplyTo, Source
from schemas.questions import ANSWER_SUFFIX
from schemas.tokens import Claims, TokenClass

#: The broker's sockets, by class; a connection's `cls` is an index into this.
CLASSES: Final[tuple[TokenClass, ...]] = ("control", "agent", "toolhost", "client")
CONTROL, AGENTS, TOOLS, CLIENTS = range(4)

#: Of a client's incarnation, so many characters tell its session from others: it is kept with every event.
SESSION_CHARS: Final = 64
#: Targets of one connection of which it is remembered that an event was refused; beyond them the order may be lost.
MAX_REFUSED: Final = 4096
#: So many refused events of a connection come back at once; for each further so many it is told to wait once as long.
REFUSED_AT_ONCE: Final = 16
#: The longest time that a refused sender is told to wait (milliseconds).
MAX_RETRY_MS: Final = 5000
#: A refused event that is so late (seconds) is not sent any more: what comes after it may come.
REFUSED_S: Final = 10.0
#: What a request that nobody waits for holds for its answer (bytes): the answer becomes an event, and takes its place.
ANSWER_ROOM: Final = 64 << 10
#: What an event counts with beside its payload (bytes).
_EVENT_BYTES: Final = 256

State = Literal["staged", "accepted", "leased", "done", "failed", "expired", "dead", "cancelled"]
FINISHED: Final[frozenset[State]] = frozenset({"done", "failed", "expired", "dead", "cancelled"})

Handler = Callable[["Connection", Frame, float], None]


class RefusedEvent(Struct):
    """The first event for a target that was refused. After `until` (the broker's clock) its sender has given it up."""

    event_id: str
    until: float


class Connection:
    """One welcomed connection."""

    __slots__ = (
        "address",
        "allowance",
        "allowed",
        "calls",
        "claims",
        "cls",
        "handlers",
        "ident",
        "incarnation",
        "instance",
        "last_seen",
        "pid",
        "refused",
        "session",
        "started_ms",
        "watched",
    )

    def __init__(self, cls: int, ident: bytes, address: str, claims: Claims, hello: Hello, now: float) -> None:
        self.cls = cls
        self.ident = ident
        self.address = address
        self.claims = claims
        self.incarnation = hello.incarnation
        #: What this peer sets going is counted under this name: a client keeps it over its reconnects.
        self.session = f"client/{self.incarnation[:SESSION_CHARS]}" if cls == CLIENTS else address
        self.started_ms = hello.started_ms or 0
        #: Tool hosts: the calls that it had when it said hello, running or with a result that is not acknowledged.
        self.calls: frozenset[str] = frozenset(hello.calls) if cls == TOOLS else frozenset()
        self.pid = hello.pid
        self.last_seen = now
        #: Somebody looks at `last_seen` now and then (quiet.py).
        self.watched = False
        #: What this connection may send, by frame type.
        self.handlers: dict[str, Handler] = {}
        #: Agents: the instance it serves, and the tools it may call.
        self.instance: Instance | None = None
        self.allowed: frozenset[str] = frozenset()
        #: Clients: how much live news it may get now; None before the first.
        self.allowance: Allowance | None = None
        #: target -> what was refused for overload first: later ones for it wait until that one is back.
        self.refused: dict[tuple[str, str], RefusedEvent] = {}

    @property
    def sender(self) -> str:
        """The principal whose frame and event ids are compared: all operator clients are one."""
        if self.cls == CLIENTS:
            return "client"
        return self.address

    def refuse(self, target: tuple[str, str], event_id: str, now: float, retry_ms: int) -> int:
        """An event for `target` was refused. Returns when it is to be sent again (milliseconds): the later, the more
        targets of this connection wait, so that a flood does not come back in a flood.
        """
        known = self.refused.get(target)
        if known is None or known.event_id == event_id or known.until <= now:
            known = self.refused[target] = RefusedEvent(event_id, 0.0)
        if len(self.refused) > MAX_REFUSED:
            del self.refused[next(iter(self.refused))]
        retry_ms = min(MAX_RETRY_MS, retry_ms * (1 + len(self.refused) // REFUSED_AT_ONCE))
        if known.event_id == event_id:
            known.until = now + retry_ms / 1000 + REFUSED_S
        return retry_ms


class Content(Struct):
    """The parts of an event that nobody asks for while it waits."""

    #: What stands in the header's `from`.
    from_: str | None = None
    payload: Raw = NO_PAYLOAD
    reply_to: ReplyTo | None = None
    #: Who waits for whom, ending with the sender; None when nobody waits.
    chain: list[str] | None = None
    #: On whose behalf, as an operator said.
    auth: Raw | None = None
    #: The working directory that an operator named for this event.
    workdir: str | None = None
    #: What it is a part of, and in that the turn, step or call that it comes from (tracing.py).
    trace_id: str | None = None
    parent_span_id: str | None = None
    #: Tells the event from another one with the same id (journal/records.py).
    digest: bytes = b""
    #: It says more than the journal's record, so it stays here.
    changed: bool = False


class Work:
    """What the turns of one event have come to, and its end."""

    __slots__ = (
        "answer",
        "answer_blob",
        "answered",
        "attempts",
        "calls",
        "cause",
        "dead_bytes",
        "ended_ms",
        "kept_here",
        "kept_in_file",
        "lease_until",
        "open_calls",
        "position",
        "progressed",
        "requests",
    )

    def __init__(self) -> None:
        #: What its own turn has asked for and waits for.
        self.requests: dict[Event, None] = {}
        #: What its own turn has asked for and has ended, in order.
        self.answered: dict[Event, None] = {}
        #: The calls that it has made and whose results it has not stored, with the incarnation of the tool host that
        #: had each (bounded, see tool_calls.py).
        self.calls: dict[str, str | None] = {}
        #: How many of its calls are open.
        self.open_calls = 0
        #: Holders that were lost without progress.
        self.attempts = 0
        #: The present holder has stored something since it was handed the event.
        self.progressed = False
        #: How many messages its turn has stored, as its holder said last.
        self.position = 0
        #: A holder that is silent until then is taken for hung (seconds on the broker's clock).
        self.lease_until = 0.0
        #: Its answer, and what stands for that if it is large.
        self.answer: Raw | None = None
        self.answer_blob: Blob | None = None
        #: Of dead letters: why it ended, and when (milliseconds since 1970).
        self.cause = ""
        self.ended_ms = 0
        #: Of dead letters: what it held (bytes).
        self.dead_bytes = 0
        #: What is kept of the answer for the turn that asked: in memory, and in a file (bytes).
        self.kept_here = self.kept_in_file = 0


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
