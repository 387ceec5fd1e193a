"""The calls that this host has accepted, by callId, and the store of what is kept of them within a bound. Pure, with
the time as an argument.

States of a callId: unknown -> open (waiting or running) -> kept (finished, its result here) -> unknown again once the
agent has stored the result, or forgotten (finished, its result dropped).

Rules.
- A callId runs at most once. A repeat of an open callId attaches to it, a repeat of a kept one gets the same result,
  and a repeat of a forgotten one is told that its outcome is unknown.
- Kept results are bounded in bytes and in time. The oldest of the owner that has most go first (`FairStore`). Of a
  dropped result only the id stays known.
- A callId belongs to the agent instance that used it first. From another instance it is refused.

By a `Listing` the host itself asks what an MCP server offers: for an agent that attaches, or asks anew. It takes a
place in a session like any call, and ends as one: with what the server says, or with one error. It is answered by a
`reply` or an `error`, and nothing of it is kept.

Source: docs/design/delivery.md section 6.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain, count
from typing import Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct

from goondan.schemas.bundle.launch import ExportSpec, ToolSpec
from goondan.schemas.wire import blobs, codec, errors
from goondan.schemas.wire.frames import NO_PAYLOAD, ErrorPayload, Frame, ToolError
from goondan.schemas.worker import servers
from goondan.toolhost.policy.subject import CallFolder

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")
Owner = tuple[str, str]


class FairStore(Generic[Name, Value]):
    """Values that are kept for a while within a bound, by their names. Iterating gives the values, the oldest first.

    It decides which one goes first when there are too many. If the oldest of all went first, one owner could push out
    what is kept for everybody else. So the oldest value of the owner who has most goes first.
    """

    def __init__(self) -> None:
        #: The sizes of all values together.
        self.total = 0
        #: name -> the owner and the size of its value.
        self._entries: dict[Name, tuple[Owner, int]] = {}
        self._values: dict[Name, Value] = {}
        #: The value of a name, None when it is not kept.
        self.get: Callable[[Name], Value | None] = self._values.get
        #: owner -> the names of its values, the oldest first.
        self._names: dict[Owner, dict[Name, None]] = {}
        self._held: dict[Owner, int] = {}

    def put(self, name: Name, owner: Owner, size: int, value: Value) -> None:
        """Keep a new value. It replaces one of the same name."""
        if name in self._entries:
            self.take(name)
        self._entries[name] = (owner, size)
        self._values[name] = value
        self._names.setdefault(owner, {})[name] = None
        self._held[owner] = self._held.get(owner, 0) + size
        self.total += size

    def take(self, name: Name) -> Value | None:
        """Keep a value no longer. Return it, or None when it is not there."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        owner, size = entry
        names = self._names[owner]
        del names[name]
        self.total -= size
        self._held[owner] -= size
        if not names:
            del self._names[owner], self._held[owner]
        return self._values.pop(name)

    def held_by(self, owner: Owner) -> int:
        """The sizes of this owner's values together."""
        return self._held.get(owner, 0)

    def first_to_go(self) -> Name:
        """The name of the value that goes when there is too much. Something must be kept."""
        return next(iter(self._names[max(self._held, key=self._held.__getitem__)]))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Value]:
        return iter(self._values.values())


# --- the calls --------------------------------------------------------------------------------------------------------

#: Results that no agent has acknowledged yet, in all (bytes): one of the largest, or twenty of the default outputMb.
KEPT_BYTES: Final = blobs.MAX_OUTPUT_BYTES + (16 << 20)
#: How long a result waits for its acknowledgement (seconds). An agent that is restarted asks again within seconds; ten
#: minutes cover an operator who restarts a whole machine's services by hand.
KEPT_S: Final = 600.0
#: Ids of calls whose results were dropped; each takes some hundred bytes.
FORGOTTEN: Final = 16384
#: How much of a hello frame the callIds may take (bytes); the rest is for its header.
HELLO_BYTES: Final = 768 << 10
#: A kept result costs at least this much, so that many tiny ones are bounded, too (bytes).
_KEPT_OVERHEAD: Final = 512
#: News of a call moves its deadline in steps of this length (seconds) at most, since there may be thousands of pieces a
#: second.
NEWS_STEP_S: Final = 0.5
#: Finished calls whose deadlines may stay in the queue: most calls finish long before theirs, and would pile up.
_STALE: Final = 256
State = Literal["waiting", "running", "done"]
#: The largest answer (bytes): it travels as one frame, of 1 MiB with its header.
MAX_LISTING: Final = 1000 << 10
_NOTHING: Final = ExportSpec(name="")


class Call(Struct, eq=False, kw_only=True):
    """One call, from its `tool.call` to its result."""

    #: Its callId.
    id: str
    #: The agent that makes it.
    agent: str
    #: The key of the agent's instance.
    instance_key: str
    #: The tool.
    tool: ToolSpec
    #: The export of the tool.
    export: ExportSpec
    #: The arguments as the handler gets them.
    args: Raw
    #: The turn that makes it.
    turn_id: str
    #: Its toolCallId.
    tool_call_id: str
    #: The id of the assistant message that made it.
    message_id: str | None
    #: That message, as the agent encoded it. None: there is none, or it is not known.
    message: bytes | None = None
    #: The folder that it works in, as the frame says it.
    workdir: str | None
    #: The folder that the workdir must lie in, as the frame says it.
    workdir_base: str | None = None
    #: The folder that it names, as its frame says it. None: it names none.
    folder_name: str | None = None
    #: That folder, once it was found that the caller may name it.
    folder: CallFolder | None = None
    #: When it must have its result (seconds, on the loop's clock). None: without a deadline, or its time stands still.
    deadline: float | None
    #: Of a call of a server: it is given up when nothing is heard of it for so many seconds. Then `deadline` is when
    #: that is, and `total` is when it is given up whatever is heard.
    idle_s: float | None = None
    #: See `idle_s`.
    total: float | None = None
    #: The time that it got until its deadline (milliseconds).
    allowed_ms: int = 0
    #: What it has left while its time stands still (seconds), and since when it does.
    left: float | None = None
    #: See `left`.
    held_at: float | None = None
    #: Tells its tool from a tool of the same name in an earlier bundle.
    generation: str = ""
    #: The event that all this work began with.
    root_event: str | None = None
    #: The trace that it belongs to.
    trace_id: str | None = None
    #: Its state.
    state: State = "waiting"
    #: Calls with the same key share a jail.
    key: tuple[str, ...] = ()
    #: The number of the session that runs it.
    session: int = 0
    #: Its name in its jail.
    worker_call_id: str = ""
    #: How often a jail got it.
    attempts: int = 0
    #: When its jail got it (seconds, on the loop's clock).
    started: float = 0.0
    #: When the host got it (CLOCK_BOOTTIME, microseconds).
    came_us: int = 0
    #: When its jail got it, by the same clock.
    began_us: int = 0
    #: When its last progress was passed on (seconds, on the loop's clock).
    progress_at: float = 0.0
    #: How often the host has looked and its jail had not got it.
    looked: int = 0
    #: How many connections of its jail had been denied when it began.
    denied_before: int = 0
    #: The callId of the script that makes it, and the id of the `tool.ask` that it may be answered with its output.
    within: str | None = None
    #: See `within`.
    question: str | None = None
    #: The codes of the errors that the bus has answered its questions with: its handler may say them, too.
    heard: frozenset[str] = frozenset()

    @property
    def owner(self) -> tuple[str, str]:
        """The agent and the instance key that made the call."""
        return (self.agent, self.instance_key)


class StoredResult(Struct, eq=False):
    """The result of a finished call, for repeats."""

    #: The callId.
    id: str
    #: The agent and the instance key whose call it was.
    owner: tuple[str, str]
    #: The result, None once it was dropped.
    payload: Raw | None
    #: When it came (seconds, on the loop's clock).
    at: float


class CallRegistry:
    """All calls of one tool host, and the results that it keeps."""

    def __init__(self, *, kept_bytes: int = KEPT_BYTES, kept_s: float = KEPT_S, forgotten: int = FORGOTTEN) -> None:
        self._max_bytes = kept_bytes
        self._max_s = kept_s
        self._max_forgotten = forgotten
        self._open: dict[str, Call] = {}
        self._kept: FairStore[str, StoredResult] = FairStore()
        self._forgotten: FairStore[str, StoredResult] = FairStore()
        self._deadlines: list[tuple[float, int, Call]] = []
        self._order = count()

    def get(self, call_id: str) -> Call | StoredResult | None:
        """What is known of a callId."""
        return self._open.get(call_id) or self._kept.get(call_id) or self._forgotten.get(call_id)

    def open(self, call: Call) -> None:
        """Accept a new call."""
        self._open[call.id] = call
        if call.deadline is not None:
            heapq.heappush(self._deadlines, (call.deadline, next(self._order), call))
            if len(self._deadlines) > 2 * len(self._open) + _STALE:
                self._deadlines = [item for item in self._deadlines if _is_due_then(item)]
                heapq.heapify(self._deadlines)

    def heard_of(self, call: Call, now: float) -> None:
        """Something was heard of a call: if silence is bounded for it, its silence begins anew."""
        if call.idle_s is not None and call.deadline is not None:
            at = now + call.idle_s
            at = at if call.total is None else min(at, call.total)
            if at - call.deadline >= min(NEWS_STEP_S, call.idle_s / 8):
                call.deadline = at
                heapq.heappush(self._deadlines, (at, next(self._order), call))

    def hold(self, call: Call, now: float) -> None:
        """A person must decide something that this call waits for: its time stands still."""
        if call.deadline is not None:
            call.left, call.deadline, call.held_at = call.deadline - now, None, now

    def go_on(self, call: Call, now: float) -> None:
        """Its time goes on."""
        if call.left is not None:
            if call.total is not None and call.held_at is not None:
                call.total += now - call.held_at
            call.deadline, call.left, call.held_at = now + call.left, None, None
            heapq.heappush(self._deadlines, (call.deadline, next(self._order), call))

    def close(self, call: Call, payload: Raw, now: float) -> bool:
        """Keep the call's one result. False when it had one already; then this one is dropped."""
        if call.state == "done":
            return False
        call.state = "done"
        call.args, call.message = NO_PAYLOAD, None  # the queue of deadlines has the call for a while
        del self._open[call.id]
        size, owner = memoryview(payload).nbytes + _KEPT_OVERHEAD, (call.agent, call.instance_key)
        self._kept.put(call.id, owner, size, StoredResult(call.id, owner, payload, now))
        while self._kept.total > self._max_bytes:
            self._forget(self._kept.first_to_go())
        return True

    def open_of(self, owner: tuple[str, str]) -> list[Call]:
        """The open calls of an agent instance."""
        return [call for call in self._open.values() if call.owner == owner]

    def acknowledge(self, call_ids: Iterable[str]) -> None:
        """The agents have stored these results."""
        for call_id in call_ids:
            if self._kept.take(call_id) is None:
                self._forgotten.take(call_id)

    def expire(self, now: float) -> None:
        """Drop results that have waited too long. Call now and then."""
        while (oldest := next(iter(self._kept), None)) is not None and now - oldest.at >= self._max_s:
            self._forget(oldest.id)

    def _forget(self, call_id: str) -> None:
        """Drop a result that is kept; its id stays known."""
        stored = self._kept.take(call_id)
        if stored is not None:
            stored.payload = None
            self._forgotten.put(call_id, stored.owner, 1, stored)
            if len(self._forgotten) > self._max_forgotten:
                self._forgotten.take(self._forgotten.first_to_go())

    # --- deadlines

    def next_deadline(self) -> float | None:
        """When the next open call is due."""
        heap = self._deadlines
        while heap and not _is_due_then(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> list[Call]:
        """Open calls whose deadline has passed, earliest first. Each is reported once."""
        heap = self._deadlines
        found = []
        while heap and heap[0][0] <= now:
            item = heapq.heappop(heap)
            if _is_due_then(item):
                found.append(item[2])
        return found

    # --- views

    def waits(self) -> list[tuple[Call, bool]]:
        """The open calls that have waited for their jail for two looks, and again after ten, since events may be lost,
        each with True. And those that were among them and have it now. Call once a second.
        """
        found = []
        for call in self._open.values():
            if call.state == "waiting":
                call.looked += 1
                if call.looked % 10 == 3:
                    found.append((call, True))
            elif call.looked:
                if call.looked >= 3:
                    found.append((call, False))
                call.looked = 0
        return found

    def known_ids(self, max_bytes: int = HELLO_BYTES) -> list[str]:
        """CallIds that this host answers for, for `hello`: open ones first, then those with the newest results.

        As many as fit into `max_bytes`, because hello is one frame.
        """
        found: list[str] = []
        for call_id in chain(self._open, (stored.id for stored in reversed(self.kept()))):
            max_bytes -= len(call_id) * 4 + 8  # a character of UTF-8 has four bytes at most
            if max_bytes < 0:
                break
            found.append(call_id)
        return found

    def kept(self) -> list[StoredResult]:
        """Results that nobody has acknowledged, oldest first: sent again after a reconnect."""
        return list(self._kept)

    @property
    def empty(self) -> bool:
        """Whether nothing is open or kept."""
        return not self._open and not len(self._kept)

    @property
    def kept_bytes(self) -> int:
        """How much the kept results take (bytes)."""
        return self._kept.total


def _is_due_then(item: tuple[float, int, Call]) -> bool:
    """Whether an entry of the queue still counts: the call is open, and its deadline has not moved."""
    moment, _, call = item
    return call.state != "done" and call.deadline == moment


class Listing(Call, eq=False, kw_only=True):
    """A request to know what a server offers."""

    #: The `id` of the frame that is answered.
    request: str
    #: Whether the agent wants to be attached.
    attaches: bool


def listing_for(frame: Frame, tool: ToolSpec, generation: str, now: float, allowed_s: float) -> Listing:
    """The listing that a frame of an agent asks for. It has `allowed_s` seconds."""
    server = tool.server
    sees = server is not None and server.scope == "agent"
    return Listing(
        id=f"listing/{frame.from_}/{frame.instance_key}/{frame.id}",
        agent=frame.from_ or "",
        instance_key=frame.instance_key or "",
        tool=tool,
        export=_NOTHING,
        args=Raw(bytes(NO_PAYLOAD)),
        turn_id="",
        tool_call_id="",
        message_id=None,
        workdir=frame.workdir if sees else None,
        workdir_base=frame.workdir_base if sees else None,
        deadline=now + allowed_s,
        allowed_ms=int(allowed_s * 1000),
        generation=generation,
        request=frame.id,
        attaches=frame.type == servers.ATTACH,
    )


def answer_of(call: Listing, listing: servers.ServerListing) -> Frame:
    """What the agent is told: the listing, or that it is too large."""
    payload = codec.to_raw(listing)
    size = memoryview(payload).nbytes
    if size > MAX_LISTING:
        message = f"what the MCP server {call.tool.name} offers takes {size} bytes, limit {MAX_LISTING}"
        info = errors.error_payload(
            servers.NOT_CONNECTED, message, suggestion="Filter its tools, or turn off what is not needed."
        )
        return _answer(call, "error", codec.to_raw(info))
    return _answer(call, "reply", payload)


def refusal_of(call: Listing, error: ToolError) -> Frame:
    """What the agent is told when there is no listing."""
    error = msgspec.structs.replace(error, code=error.code or servers.NOT_CONNECTED)
    return _answer(call, "error", codec.to_raw(msgspec.convert(error, ErrorPayload, from_attributes=True)))


def _answer(call: Listing, kind: str, payload: msgspec.Raw) -> Frame:
    return Frame(kind, to=call.agent, instance_key=call.instance_key, in_reply_to=call.request, payload=payload)
