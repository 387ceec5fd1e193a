"""What the broker holds in memory: connections, agent instances and events, which refer to each other. Pure.

The rules about them are in other modules: presence.py decides who may connect, mailbox.py keeps the states of events,
assignments.py chooses the tool host of an instance, contents.py keeps the content of events that wait.

States of an event: `staged` (not yet in the journal) -> `accepted` -> `leased` -> `done` | `failed`, or from any of
the first three `expired` (deadline passed before it was handed over), `dead` (given up) or `cancelled`.

Source: docs/design/delivery.md sections 2 and 3; docs/design/wire.md section 3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Literal

from msgspec import Raw, Struct

from goondan.kernel.broker.allowance import Allowance
from goondan.kernel.broker.blobs import size_of
from goondan.kernel.broker.places import Claim
from goondan.kernel.broker.spawns import Spawned
from goondan.kernel.broker.standing import Standing
from goondan.kernel.broker.workdirs import Workdir
from goondan.schemas.wire.blobs import size_of_files
from goondan.schemas.wire.frames import NO_PAYLOAD, Blob, FilePart, Frame, Hello, ReplyTo, Source
from goondan.schemas.wire.questions import ANSWER_SUFFIX
from goondan.schemas.wire.tokens import Claims, TokenClass

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

State = Literal["staged", "accepted", "leased", "done", "failed", "expired", "dead", "cancelled"]
FINISHED: Final[frozenset[State]] = frozenset({"done", "failed", "expired", "dead", "cancelled"})

Handler = Callable[["Connection", Frame, float], None]


class RefusedEvent(Struct):
    """The first refused event for a target. After `until` (the broker's clock) its sender has given the event up."""

    #: The event.
    event_id: str
    #: When its sender gives it up (the broker's clock).
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
        "servers",
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
        #: The work that this peer begins is counted under this name. A client keeps the name over its reconnects.
        self.session = f"client/{self.incarnation[:SESSION_CHARS]}" if cls == CLIENTS else address
        self.started_ms = hello.started_ms or 0
        #: Tool hosts only: the calls that the host had at its hello. They ran, or their result was not acknowledged.
        self.calls: frozenset[str] = frozenset(hello.calls) if cls == TOOLS else frozenset()
        self.pid = hello.pid
        self.last_seen = now
        #: True while quiet.py looks at `last_seen` now and then.
        self.watched = False
        #: Frame type -> handler, for the frames that this connection may send.
        self.handlers: dict[str, Handler] = {}
        #: Agents only: the instance that the process serves.
        self.instance: Instance | None = None
        #: Agents only: the tools that it may call.
        self.allowed: frozenset[str] = frozenset()
        #: Agents only: the prefixes of the MCP servers whose tools it may call.
        self.servers: frozenset[str] = frozenset()
        #: Clients only: how much live news it may get now; None before the first.
        self.allowance: Allowance | None = None
        #: Target -> the first event that was refused for overload. Later events for the target wait until it is back.
        self.refused: dict[tuple[str, str], RefusedEvent] = {}

    @property
    def sender(self) -> str:
        """The principal whose frame and event ids are compared. All clients of operators count as one."""
        if self.cls == CLIENTS:
            return "client"
        return self.address

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
    #: The turn, step or call in this trace that the event comes from (tracing.py).
    parent_span_id: str | None = None
    #: Distinguishes the event from another one with the same id (journal/records.py).
    digest: bytes = b""
    #: True when it differs from the journal's record, so that it must stay in memory.
    changed: bool = False


class Work:
    """What the turns of one event have done so far, and how the event ended."""

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
        "step",
        "wait",
    )

    def __init__(self) -> None:
        #: The requests of its own turn that the turn still waits for.
        self.requests: dict[Event, None] = {}
        #: The requests of its own turn that have ended, in order.
        self.answered: dict[Event, None] = {}
        #: The calls whose results its turn has not stored. callId -> incarnation of the tool host that had the call.
        #: Their number is bounded (tool_calls.py).
        self.calls: dict[str, str | None] = {}
        #: How many of its calls are open.
        self.open_calls = 0
        #: How many holders were lost without progress.
        self.attempts = 0
        #: True when the present holder has stored something since it got the event.
        self.progressed = False
        #: How many messages its turn has stored, as its holder said last.
        self.position = 0
        #: The step of its turn, as far as its holder has said; 0: not known.
        self.step = 0
        #: What its holder says that the turn waits for: since when this broker knows it, and a RuntimeEvent.
        self.wait: tuple[float, Raw] | None = None
        #: A holder that is silent until this moment counts as hung (seconds on the broker's clock).
        self.lease_until = 0.0
        #: Its answer.
        self.answer: Raw | None = None
        #: The reference to the answer's file if the answer is large.
        self.answer_blob: Blob | None = None
        #: Dead letters only: why it ended.
        self.cause = ""
        #: Dead letters only: when it ended (milliseconds since 1970).
        self.ended_ms = 0
        #: Dead letters only: the bytes that it held.
        self.dead_bytes = 0
        #: Bytes of the answer that are kept for the turn that asked: in memory, and in a file.
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
        "call_id",
        "cancelled",
        "deadline",
        "depth",
        "end",
        "files",
        "id",
        "in_reply_to",
        "inline",
        "instance",
        "live",
        "parts",
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
        files: list[FilePart] | None = None,
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
        #: The event that all this work began with. It is this event itself when no agent and no tool sent it.
        self.root = event_id if root is None or root == event_id else root  # one string, not two: there are many events
        #: The session of the root: `client/<incarnation>`, the address of an agent or a tool host that acted by itself,
        #: or `root/<id>` when the session is not known.
        self.session = session or unknown_session(self.root)
        #: The principal that may repeat it.
        self.sender = sender
        self._content: Content | None = content
        #: Approximate size in memory (bytes). It counts also while the content is in the journal only.
        self.inline = size_in_memory(content.payload, content.auth)
        #: True when its sender wants an answer.
        self.wants_answer = content.reply_to is not None
        #: Length of the chain of instances that wait for each other; the sender is the last of them.
        self.depth = len(content.chain) if content.chain else 0
        #: The reference to the payload's file if the payload is large.
        self.blob = blob
        #: The pictures and PDFs of an operator's message; None when it has none.
        self.files = files
        self.source = source
        self.deadline = deadline
        #: The tool call whose handler sent it; None when an agent or a client sent it.
        self.call_id = call_id
        #: The event whose turn sent this request and waits for it; None when no turn waits.
        self.asking = asking
        #: True when an agent sent this request and does not wait: the answer becomes an event (late_answers.py).
        self.asynchronous = asynchronous
        #: Such answers only: the correlation id of the request that is answered.
        self.in_reply_to = in_reply_to
        #: When it was accepted.
        self.since = since
        # The next three are made at their first use: 100,000 events may wait, and none of them uses one.
        self.standing: Standing | None = None
        self._work: Work | None = None
        self._waiting_acks: list[tuple[Connection, str]] | None = None
        self.state: State = "staged"
        #: The connection that waits for the answer right now.
        self.asker: Connection | None = None
        #: True when that connection wants news of the turn while it runs.
        self.live = False
        #: True when it was cancelled: it is not handed over any more.
        self.cancelled = False
        #: The state in which it ends; None until that is decided.
        self.end: State | None = None
        #: What features keep with it in the journal, by their names; None when there is nothing, or it was written.
        self.parts: dict[str, Raw] | None = None

    @property
    def answer_id(self) -> str:
        """The id of the event that answers it."""
        return self.id + ANSWER_SUFFIX

    @property
    def content(self) -> Content:
        """The content, which its holder is told. While it is in the journal only, contents.py has to read it back."""
        if self._content is None:
            raise AssertionError(f"the content of event {self.id!r} was not recalled")
        return self._content

    @content.setter
    def content(self, content: Content) -> None:
        self._content = content

    @property
    def content_here(self) -> Content | None:
        """The content if it is in memory; None while it is in the journal only."""
        return self._content

    def let_go(self) -> None:
        """Drop the content from memory: it is in the journal, and nobody needs it now."""
        self._content = None

    @property
    def work(self) -> Work:
        """What its turns have done so far, and how it ended."""
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
        """Its senders were told that it is journaled."""
        self._waiting_acks = None

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
        """Whether the journal keeps the answer after the end of the event. It does so for clients: a client may come
        back for the answer, even if it did not wait.
        """
        asked = self.wants_answer or (self.source is not None and self.source.kind == "client")
        return asked and self.asking is None and not self.asynchronous

    @property
    def parent(self) -> str | None:
        """The event whose turn waits for it."""
        return None if self.asking is None else self.asking.id

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
        return Claim(self.session, self.root, self.by_operator, self.parent, self.depth)

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
        #: When this broker first heard of it (seconds on the broker's clock).
        self.since = since
        self.workdir = workdir
        self.epoch = epoch
        self.queue: deque[Event] = deque()
        #: The number of its unfinished events, with those that are not in the journal yet.
        self.open = 0
        #: Answers to this instance's own requests: answer id -> encoded frame, until acknowledged (the second lane).
        self.answers: dict[str, bytes] = {}
        self.leased: Event | None = None
        self.conn: Connection | None = None
        #: The tool host that serves it; assignments.py writes it.
        self.host: Connection | None = None
        #: True when the supervisor was asked to start its process.
        self.requested = False
        #: Who started it with `agents.spawn`; None when nobody did.
        self.spawned: Spawned | None = None
        #: Spawns that wait for its process, by sender and frame id.
        self.spawns: dict[tuple[str, str], PendingSpawn] = {}
        #: True when its process is about to end: nothing more is handed to it.
        self.leaving = False
        #: When it began to wait for a place (seconds on the broker's clock).
        self.in_line_since = 0.0
        #: How long it waited for the place of its next turn (seconds).
        self.place_s = 0.0
        #: True while it is being deleted: nothing new is accepted for it (deletions.py).
        self.deleting = False

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


class Finish(Struct, frozen=True):
    """The end of an event that is on its way into the journal."""

    #: The event.
    event: Event
    #: The state in which it ends.
    state: State
    #: Its answer.
    answer: Raw = NO_PAYLOAD
    #: The reference to the answer's file if the answer is large.
    blob: Blob | None = None
    #: The connection that is told of it.
    conn: Connection | None = None
    #: Its frame, which is acknowledged then.
    frame_id: str = ""
    #: The event that comes into the mailbox with the end: the answer to a request whose sender does not wait.
    follow: Event | None = None
