"""What the broker holds in memory: connections, agent instances, events and open calls. They refer to each other. Pure.

The rules about them are in other modules: presence.py decides who may connect, mailbox.py keeps the states of events.

States of an event: `staged` (not yet in the journal) -> `accepted` -> `leased` -> `done` | `failed`, or from any of
the first three `expired` (deadline passed before it was handed over), `dead` (given up) or `cancelled`.

Source: docs/design/delivery.md sections 2 and 3; docs/design/wire.md section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Literal

from msgspec import Raw, Struct, field

from goondan.kernel.broker.state.blobs import size_of
from goondan.kernel.broker.state.shares import Claim
from goondan.kernel.broker.state.workdirs import Workdir
from goondan.schemas.wire.blobs import size_of_files
from goondan.schemas.wire.frames import NO_PAYLOAD, Blob, FilePart, Frame, ReplyTo, Source
from goondan.schemas.wire.questions import ANSWER_SUFFIX
from goondan.schemas.wire.tokens import Claims, TokenClass

#: Frames that one client may get at once, and then per second. A turn makes about thirty a second.
LIVE_BURST: Final = 512
LIVE_PER_S: Final = 512.0


class Allowance(Struct):
    """A bucket of frames that fills with time. Times are seconds."""

    #: When `left` was right.
    at: float
    #: How many frames it has.
    left: float = float(LIVE_BURST)

    def take(self, now: float) -> bool:
        """Take one frame from the bucket; False when it is empty."""
        if now > self.at:
            self.left = min(float(LIVE_BURST), self.left + (now - self.at) * LIVE_PER_S)
            self.at = now
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


class Standing(Struct, eq=False):
    """The items of one event. Times are seconds on the broker's clock."""

    #: How many items of its own turn wait for a person.
    items: int = 0
    #: How many of them belong to inner calls. Such a call ends with the process of the turn, so the turn is handed
    #: over without a decision.
    inner: int = 0
    #: How many items its own turn has, with decided ones: they stay until the event ends.
    asked: int = 0
    #: Bytes of these items.
    asked_bytes: int = 0
    #: How many decided items its turn was not told of.
    unread: int = 0
    #: True when it may be handed over although items wait: one was decided after the last time.
    ready: bool = False
    #: How many items stop its clock: its own, and those of turns that it waits for.
    holds: int = 0
    #: Since when its clock stands still.
    held_since: float = 0.0

    def lost(self) -> bool:
        """The process of its turn is gone. Returns whether the turn only waited; then this is not a failed attempt."""
        self.ready = self.unread > 0
        return self.items > self.inner and not self.unread

    @property
    def waits(self) -> bool:
        """Whether it must not be handed over now, because its work needs a person's decision first."""
        return self.items > self.inner and not self.ready


class Spawned(Struct, frozen=True):
    """An instance that was started with `agents.spawn`."""

    #: The agent that asked first.
    owner_agent: str
    #: The instance key of this agent.
    owner_key: str
    #: When it asked (seconds on the broker's clock).
    created: float
    #: The working directory that the spawn gave; None when the instance has its own.
    cwd: Workdir | None
    #: Sender and frame id of the last spawn, so that a repeat gets the same answer.
    by: tuple[str, str]


#: The broker's sockets, by class; a connection's `cls` is an index into this.
CLASSES: Final[tuple[TokenClass, ...]] = ("control", "agent", "toolhost", "client")
CONTROL, AGENTS, TOOLS, CLIENTS = range(4)

#: Characters of a client's incarnation that name its session. They are few because every event keeps them.
SESSION_CHARS: Final = 64
#: The broker remembers refused events of one connection for at most so many targets. Beyond that their order may be
#: lost.
MAX_REFUSED: Final = 4096
#: So many refused events of a connection come back at once. For each further group of this size the connection is told
#: to wait one more period.
REFUSED_AT_ONCE: Final = 16
#: The longest time that a refused sender is told to wait (milliseconds).
MAX_RETRY_MS: Final = 5000
#: A refused event that is so late (seconds) is not expected any more: later events for its target are accepted again.
REFUSED_S: Final = 10.0
#: Room (bytes) that a request without a waiting turn reserves for its answer: the answer becomes an event and uses it.
ANSWER_ROOM: Final = 64 << 10
#: Bytes that an event counts in addition to its payload.
_EVENT_BYTES: Final = 256

#: How an event ends. `done` and `failed` are the agent's word, the others the broker's.
End = Literal["done", "failed", "expired", "dead", "cancelled"]
State = Literal["staged", "accepted", "leased", End]
FINISHED: Final[frozenset[State]] = frozenset({"done", "failed", "expired", "dead", "cancelled"})

Handler = Callable[["Connection", Frame, float], None]


class RefusedEvent(Struct):
    """The first refused event for a target. After `until` (the broker's clock) its sender has given the event up."""

    #: The event.
    event_id: str
    #: When its sender gives it up (the broker's clock).
    until: float


class Connection(Struct, eq=False):
    """One welcomed connection."""

    #: The class of its socket.
    cls: int
    #: Its routing id there.
    ident: bytes
    #: The name of the principal.
    address: str
    #: What its token says.
    claims: Claims
    #: When a frame of it came last (seconds on the broker's clock).
    last_seen: float
    #: What tells this process of the principal from another one.
    incarnation: str
    #: The process, as it says.
    pid: int | None = None
    #: When it started, as it says (CLOCK_BOOTTIME, milliseconds); 0: it does not say.
    started_ms: int = 0
    #: Tool hosts only: the calls that the host had at its hello. They ran, or their result was not acknowledged.
    calls: frozenset[str] = frozenset()
    #: The work that this peer begins is counted under this name. A client keeps the name over its reconnects.
    session: str = ""
    #: The principal whose frame and event ids are compared. All clients of operators count as one.
    sender: str = ""
    #: True while QuietPeers looks at `last_seen` now and then.
    watched: bool = False
    #: Frame type -> handler, for the frames that this connection may send.
    handlers: dict[str, Handler] = {}
    #: Agents only: the instance that the process serves.
    instance: Instance | None = None
    #: Agents only: the tools that it may call.
    allowed: frozenset[str] = frozenset()
    #: Agents only: the prefixes of the MCP servers whose tools it may call.
    servers: frozenset[str] = frozenset()
    #: Clients only: how many live events it may get now; None before the first.
    allowance: Allowance | None = None
    #: Target -> the first event that was refused for overload. Later events for the target wait until it is back.
    refused: dict[tuple[str, str], RefusedEvent] = {}
    #: Agents and tool hosts only: whether it has acknowledged its `shutdown`. It is told nothing more of that kind.
    acknowledged: bool = False

    def __post_init__(self) -> None:
        self.sender = self.session = self.address
        if self.cls == CLIENTS:
            self.sender, self.session = "client", f"client/{self.incarnation[:SESSION_CHARS]}"
        if self.cls != TOOLS:
            self.calls = frozenset()

    def refuse(self, target: tuple[str, str], event_id: str, now: float, retry_ms: int) -> int:
        """An event for `target` was refused. Returns the time after which to send it again (milliseconds). The time
        grows with the number of waiting targets of this connection, so that a flood does not come back at once.
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
    """The parts of an event that nobody needs while it waits."""

    #: The header's `from`.
    from_: str | None = None
    #: The payload, unopened.
    payload: Raw = NO_PAYLOAD
    #: Where the answer goes. None: no answer is wanted.
    reply_to: ReplyTo | None = None
    #: The instances that wait for each other, the sender last; None when nobody waits.
    chain: list[str] | None = None
    #: The person on whose behalf the event was sent, as an operator said.
    auth: Raw | None = None
    #: The working directory that an operator named for this event.
    workdir: str | None = None
    #: The trace that the event belongs to.
    trace_id: str | None = None
    #: The turn, step or call in this trace that the event comes from (acting.py).
    parent_span_id: str | None = None
    #: Distinguishes the event from another one with the same id (records.py).
    digest: bytes = b""
    #: True when it differs from the journal's record, so that it must stay in memory.
    changed: bool = False


class Work(Struct, eq=False):
    """What the turns of one event have done so far, and how the event ended."""

    #: The requests of its own turn that the turn still waits for.
    requests: dict[Event, None] = {}
    #: The requests of its own turn that have ended, in order.
    answered: dict[Event, None] = {}
    #: The calls whose results its turn has not stored. callId -> incarnation of the tool host that had the call.
    #: Their number is bounded (calls.py).
    calls: dict[str, str | None] = {}
    #: How many of its calls are open.
    open_calls: int = 0
    #: How many holders were lost without progress.
    attempts: int = 0
    #: True when the present holder has stored something since it got the event.
    progressed: bool = False
    #: How many messages its turn has stored, as its holder said last.
    position: int = 0
    #: The step of its turn, as far as its holder has said; 0: not known.
    step: int = 0
    #: What its holder says that the turn waits for: since when this broker knows it, and a RuntimeEvent.
    wait: tuple[float, Raw] | None = None
    #: Its holder was told to send live events.
    tells: bool = False
    #: A holder that is silent until this moment counts as hung (seconds on the broker's clock).
    lease_until: float = 0.0
    #: Its answer.
    answer: Raw | None = None
    #: The reference to the answer's file if the answer is large.
    answer_blob: Blob | None = None
    #: Dead letters only: why it ended.
    cause: str = ""
    #: Dead letters only: when it ended (milliseconds since 1970).
    ended_ms: int = 0
    #: Dead letters only: the bytes that it held.
    dead_bytes: int = 0
    #: Bytes of the answer that are kept for the turn that asked: in memory.
    kept_here: int = 0
    #: Those of them in a file.
    kept_in_file: int = 0

    def moved(self, position: int | None) -> None:
        """Its holder has stored so many messages of the turn."""
        if position is not None and position > self.position:
            self.position, self.progressed = position, True


class Event(Struct, eq=False):
    """One accepted (or staged) event. Times are seconds on the broker's clock."""

    #: Its id.
    id: str
    #: The instance that it is for.
    instance: Instance
    #: The principal that may repeat it.
    sender: str
    #: The content while it is in memory; None while it is in the journal only, and nobody needs it.
    content_here: Content | None
    #: Who caused it.
    source: Source | None = None
    #: When its time is over; None: no deadline.
    deadline: float | None = None
    #: The tool call whose handler sent it; None when an agent or a client sent it.
    call_id: str | None = None
    #: The reference to the payload's file if the payload is large.
    blob: Blob | None = None
    #: The pictures and PDFs of an operator's message; None when it has none.
    files: list[FilePart] | None = None
    #: The event that all this work began with. It is this event itself when no agent and no tool sent it.
    root: str = ""
    #: The session of the root: `client/<incarnation>`, the address of an agent or a tool host that acted by itself,
    #: or `root/<id>` when the session is not known.
    session: str = ""
    #: The event whose turn sent this request and waits for it; None when no turn waits.
    asking: Event | None = None
    #: When it was accepted.
    since: float = 0.0
    #: True when an agent sent this request and does not wait: the answer becomes an event (ends.py).
    asynchronous: bool = False
    #: Such answers only: the correlation id of the request that is answered.
    in_reply_to: str | None = None
    #: Approximate size in memory (bytes). It counts also while the content is in the journal only.
    inline: int = 0
    #: True when its sender wants an answer.
    wants_answer: bool = False
    #: Length of the chain of instances that wait for each other; the sender is the last of them.
    depth: int = 0
    #: The items that a person is asked about. Made at its first use: 100,000 events may wait, and few have one.
    standing: Standing | None = None
    #: Made at its first use as well.
    _work: Work | None = None
    #: Frames to acknowledge once the event is journaled: (connection, frame id).
    waiting_acks: tuple[tuple[Connection, str], ...] = ()
    #: See the module.
    state: State = "staged"
    #: The connection that waits for the answer right now.
    asker: Connection | None = None
    #: True when that connection wants live events of the turn while it runs.
    live: bool = False
    #: True when it was cancelled: it is not handed over any more.
    cancelled: bool = False
    #: The state in which it ends; None until that is decided.
    end: End | None = None
    #: What features keep with it in the journal, by their names; None when there is nothing, or it was written.
    parts: dict[str, Raw] | None = None

    def __post_init__(self) -> None:
        content = self.content
        if self.root in ("", self.id):
            self.root = self.id  # one string, not two: there are many events
        self.session = self.session or unknown_session(self.root)
        self.inline = size_in_memory(content.payload, content.auth)
        self.wants_answer = content.reply_to is not None
        self.depth = len(content.chain) if content.chain else 0

    @property
    def answer_id(self) -> str:
        """The id of the event that answers it."""
        return self.id + ANSWER_SUFFIX

    @property
    def content(self) -> Content:
        """The content, which its holder is told. While it is in the journal only, `Contents` has to read it back."""
        if self.content_here is None:
            raise AssertionError(f"the content of event {self.id!r} was not recalled")
        return self.content_here

    @property
    def work(self) -> Work:
        """What its turns have done so far, and how it ended."""
        if self._work is None:
            self._work = Work()
        return self._work

    @property
    def held(self) -> bool:
        """Whether its clock stands still because a person is asked."""
        return self.standing is not None and self.standing.holds > 0

    @property
    def waits(self) -> bool:
        """Whether it is not handed over because its work needs a person's decision first."""
        return self.standing is not None and self.standing.waits

    @property
    def finished(self) -> bool:
        """Whether it will never be handed over again."""
        return self.state in FINISHED

    @property
    def ending(self) -> bool:
        """Whether it has ended, or its end is on the way to the journal."""
        return self.end is not None

    @property
    def keeps_answer(self) -> bool:
        """Whether the journal keeps the answer after the end of the event. It does so for clients: a client may come
        back for the answer, even if it did not wait.
        """
        asked = self.wants_answer or (self.source is not None and self.source.kind == "client")
        return asked and self.asking is None and not self.asynchronous

    @property
    def late_for(self) -> tuple[str, str] | None:
        """The instance (agent, key) that sent this request without waiting, or that this late answer goes to."""
        if self.in_reply_to is not None:
            return self.instance.agent, self.instance.key
        source = self.source
        if not self.asynchronous or source is None or source.instance_key is None:
            return None
        return source.name, source.instance_key

    @property
    def by_operator(self) -> bool:
        """Whether an operator sent it directly, not through an agent."""
        return self.source is not None and self.source.kind == "client" and self.source.name == "operator"

    @property
    def claim(self) -> Claim:
        """The claim by which its turn gets a place."""
        lender = None if self.asking is None else self.asking.id
        return Claim(self.session, self.root, self.by_operator, lender, self.depth)

    @property
    def size(self) -> int:
        """Approximate size (bytes): in memory, on disk, and the room that is reserved for its answer."""
        if self.blob is None and self.files is None and not self.asynchronous:
            return self.inline
        files = size_of_files(self.files or ())
        return self.inline + size_of(self.blob) + files + (ANSWER_ROOM if self.asynchronous else 0)


def size_in_memory(payload: Raw, auth: Raw | None) -> int:
    """The approximate size of an event with this payload (bytes)."""
    return _EVENT_BYTES + len(memoryview(payload)) + (0 if auth is None else len(memoryview(auth)))


def unknown_session(root: str) -> str:
    """A name for the session of a root whose sender is not known (any more)."""
    return f"root/{root}"


class Instance(Struct, eq=False):
    """One (agent, instance key): its queue, its lease, its process."""

    #: The agent.
    agent: str
    #: The instance key.
    key: str
    #: Its working directory.
    workdir: Workdir
    #: Tells its present holder from those before.
    epoch: int
    #: When this broker first heard of it (seconds on the broker's clock).
    since: float
    #: Its events that wait, in order.
    queue: deque[Event] = field(default_factory=deque)
    #: The number of its unfinished events, with those that are not in the journal yet.
    open: int = 0
    #: Answers to this instance's own requests: answer id -> encoded frame, until acknowledged (the second lane).
    answers: dict[str, bytes] = {}
    #: The event that its process works on.
    leased: Event | None = None
    #: Its process.
    conn: Connection | None = None
    #: The tool host that serves it; `Assignments` writes it.
    host: Connection | None = None
    #: True when the supervisor was asked to start its process.
    requested: bool = False
    #: Who started it with `agents.spawn`; None when nobody did.
    spawned: Spawned | None = None
    #: Spawns that wait for its process, by sender and frame id.
    spawns: dict[tuple[str, str], PendingSpawn] = {}
    #: True when its process is about to end: nothing more is handed to it.
    leaving: bool = False
    #: When it began to wait for a place (seconds on the broker's clock).
    waits_since: float = 0.0
    #: How long it waited for the place of its next turn (seconds).
    place_s: float = 0.0
    #: True while it is being deleted: nothing new is accepted for it (deletions.py).
    deleting: bool = False

    @property
    def wanted(self) -> bool:
        """Whether a process must run for it."""
        return bool(self.leased or self.answers or self.spawns or self.has_queued)

    @property
    def has_queued(self) -> bool:
        """Whether an event waits for its turn. Events that are about to end, or wait for a person, do not count."""
        if self.queue and self.queue[0].waits:
            return False
        return any(not event.ending for event in self.queue)

    @property
    def place(self) -> Workdir:
        """Where its turn works: in the directory that an operator has named for the event, or in its own."""
        named = None if self.leased is None else self.leased.content.workdir
        return self.workdir if named is None else Workdir(named)

    @property
    def address(self) -> str:
        """Its name in a call chain."""
        return f"{self.agent}/{self.key}"


class PendingSpawn(Struct):
    """An `agents.spawn` that is answered when the process is there."""

    #: The connection that asked.
    conn: Connection
    #: The id of its frame.
    frame_id: str
    #: When the asker gives up (seconds on the broker's clock).
    until: float
    #: The claim that the start is counted with.
    claim: Claim


class Call(Struct, gc=False):
    """One open call. Times are seconds on the broker's clock."""

    #: Its callId.
    id: str
    #: The event whose turn makes it.
    event: Event
    #: The agent's frame, to have it sent again.
    frame_id: str
    #: The full name of the tool.
    tool: str | None
    #: The time that it had when it came (milliseconds). None: no deadline.
    deadline_ms: int | None
    #: When it came.
    began: float
    #: The tool host that has the call; None while it waits for one.
    host: Connection | None = None
    #: The frame to send; kept only while no host has it.
    data: bytes = b""
    #: When it was first sent (CLOCK_BOOTTIME, milliseconds), if that was before this broker began.
    sent_before: int | None = None
    #: Size of its arguments (bytes) if they go by reference; else 0.
    large: int = 0
    #: It has asked its agent something (`tool.ask`).
    asks: bool = False
    #: Of a call that may make others, of an agent whose calls a person may have to decide: its payload; else b"".
    script: bytes = b""
    #: Its tool host has said that it waits for its jail; None: it does not.
    jail_since: float | None = None

    def overdue(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline_ms is not None and self.began + self.deadline_ms / 1000 <= now


class Actor(Struct, frozen=True):
    """Who speaks in a frame."""

    #: The principal whose frame and event ids are compared.
    sender: str
    #: The broker writes this into the header's `from`.
    name: str
    #: The source that the broker writes into an event.
    source: Source
    #: The session that all this work is counted with.
    session: str
    #: The event that all this work began with; None when it begins with this frame.
    root: str | None = None
    #: The agent instance that speaks; None for a client and for a tool host that speaks for itself.
    instance: Instance | None = None
    #: The event that this instance works on; None in the same cases.
    turn: Event | None = None
    #: The call in whose name a tool host speaks; None for everybody else.
    call_id: str | None = None
