"""One end of a link, as a state machine: no socket, no clock, no tasks (link.py is its shell).

States: `absent` (no welcome yet, or the broker was lost) -> `greeting` (hello sent) -> `ready` -> `closed`.

Rules.
- A frame that must arrive is an OutboxEntry in the outbox, under its frame id, until it is answered. After every
  welcome all entries are sent again, oldest first, with the ids they had: the broker and the receivers drop repeats.
- An entry is answered by: `ack`, `reply` or `error` with its id in `inReplyTo` (kind `post`); a `tool.result` with
  its callId (kind `call`); an `event` with its correlation id in `inReplyTo` (kind `ask`); a `tool.answer` with
  its id in `inReplyTo` and its callId (kind `tool ask`).
- The broker asks for hello. The first frame of a connection is an empty probe. The broker answers it with
  E_HELLO_REQUIRED without `inReplyTo`, and only that starts a greeting. So a new broker behind the same path is noticed
  at once.
- Credit: at most `window` new `event` and `tool.call` frames are unanswered at a time. The others wait here in order.
- The asker of an `ask` may lose patience before its deadline. Then the entry goes out again as a request without
  waiting, and ends with the broker's ack that says so; else the answer is on its way. Nothing is asked so that the
  broker has not accepted, and what it refuses for lack of room just ends.
- E_OVERLOADED puts the entry back. The entry, and all later ones for the same target, wait for the time that the error
  names.
- A payload that is too large for a frame first goes into a file. Until then its entry is `unwritten`, and all later
  entries for the same target wait for it. Without a folder for such files a frame may have the full size, but not more.

Source: docs/design/wire.md section 5; docs/design/delivery.md section 5; PROTOCOL.md "Hello" and "Sending until
answered".
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Any, Final, Literal

from msgspec import Struct, structs

from goondan.schemas.wire import frames
from goondan.schemas.wire.blobs import INLINE_FRAME_BYTES, MAX_BLOB_BYTES, REFERENCES, too_large
from goondan.schemas.wire.codec import MAX_FRAME_BYTES, FrameError, decode, encode, encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, error_payload

Kind = Literal["post", "call", "ask", "tool ask"]
Phase = Literal["absent", "greeting", "ready", "closed"]

#: How much longer than its deadline a peer waits for the other side's answer, before it gives the error itself
#: (seconds).
DEADLINE_GRACE_S: Final = 1.0
#: How many requests without an answer in time are remembered, so that a late answer is not taken for a repeat. Beyond
#: that, a late answer is not logged.
MAX_OVERDUE: Final = 256
#: How soon hello is sent again when there is no answer, or when the principal is still busy (seconds).
HELLO_RETRY_S: Final = 0.5
#: How many refusals of a token end the link, when the token may have been renewed meanwhile.
TOKEN_REFUSALS: Final = 4
#: How long a busy principal is tried again (seconds). Usually its other process is just ending.
BUSY_PATIENCE_S: Final = 10.0
#: How long an overloaded target gets nothing when the error names no time (seconds).
DEFAULT_HOLD_S: Final = 0.1
#: How long the broker may send nothing while something is unanswered, before it is pinged; and as long again before the
#: connection is made anew (seconds). The broker itself pings who waits for it every 2 s.
SILENCE_S: Final = 5.0
#: The window before the first welcome. Nothing is sent then, so any positive number will do.
_INITIAL_WINDOW: Final = 64


class OutboxEntry(Struct, eq=False):
    """One frame that must be answered."""

    #: How it is answered.
    kind: Kind
    #: The id of the frame.
    id: str
    #: What is sent. It is empty as long as its payload has no file.
    data: bytes
    #: The shell's: it is called with the answer, or with an error.
    waiter: Any
    #: When no answer is waited for any more. None: for ever.
    expires: float | None
    #: When the asker stops waiting for the answer, which then comes as an event. None: it waits until `expires`.
    patience: float | None
    #: The call that its result is for.
    call_id: str | None
    #: What its answering event names.
    correlation: str | None
    #: Only new work costs credit. Acks, answers and control frames are always admitted.
    costs_credit: bool
    #: Frames of one target go out in their order.
    target: str
    #: The frame as long as its payload has no file.
    unwritten: frames.Frame | None = None
    #: The reference that `data` has in place of a payload.
    blob: frames.Blob | None = None
    #: Since when its time stands still; None: it runs.
    held_since: float | None = None
    #: Whether it holds credit.
    holds_credit: bool = False
    #: The broker's last word is that it has no room. So it has not taken the frame.
    refused: bool = False
    #: The broker has acknowledged the frame.
    accepted: bool = False
    #: It is out of the outbox, so it is not sent any more.
    over: bool = False
    #: The shell's: it is called when the broker has accepted an `ask`. None: nobody wants to know.
    on_accepted: Any = None

    def hold(self, now: float) -> None:
        """Its time stands still."""
        if self.held_since is None:
            self.held_since = now

    def go_on(self, now: float) -> None:
        """Its time runs again."""
        if self.held_since is None:
            return
        lost, self.held_since = now - self.held_since, None
        self.expires = None if self.expires is None else self.expires + lost
        self.patience = None if self.patience is None else self.patience + lost


class Settled(Struct, frozen=True):
    """An entry has its answer."""

    #: The entry.
    entry: Any
    #: The frame that answered.
    frame: frames.Frame | None
    #: The error in place of a result: the answer was an `error` frame, or none came in time.
    error: frames.ErrorPayload | None = None
    #: A frame to send back, encoded. None: nothing is sent.
    reply: bytes | None = None


class Accepted(Struct, frozen=True):
    """The broker has accepted an `ask` whose asker wants to know that (`OutboxEntry.on_accepted`)."""

    #: The entry.
    entry: Any
    #: The broker's `ack`.
    frame: frames.Frame


class Deliver(Struct, frozen=True):
    """A frame for the user of the link."""

    #: The frame.
    frame: frames.Frame


class Reply(Struct, frozen=True):
    """Bytes to send now."""

    #: The bytes.
    data: bytes
    #: A late answer that they acknowledge: its asker was already told that there is none.
    late: frames.Frame | None = None


class Greet(Struct, frozen=True):
    """The broker wants hello: send the frame of `Peer.hello`."""


class Welcomed(Struct, frozen=True):
    """The link is ready. `Peer.sendable` now gives the whole outbox again."""

    #: The broker's welcome.
    welcome: frames.Welcome


class LinkRefused(Struct, frozen=True):
    """The broker refuses us. The link is over."""

    #: Why.
    error: frames.ErrorPayload


Outcome = Settled | Accepted | Deliver | Reply | Greet | Welcomed | LinkRefused


class Peer:
    """The state of one link. `now` arguments are seconds on any steady clock."""

    def __init__(
        self,
        token: str,
        incarnation: str,
        *,
        pid: int | None = None,
        started_ms: int | None = None,
        by_reference: bool = True,
        renews: bool = False,
    ) -> None:
        """`by_reference` False: this process has no access to the folder of large payloads. `renews`: `token` is set
        again before each hello, so a refused token may only be an old one.
        """
        self.phase: Phase = "absent"
        self._by_reference = by_reference
        self.incarnation = incarnation
        self.welcome: frames.Welcome | None = None
        self.window = _INITIAL_WINDOW
        self.in_use = 0
        self.token = token
        self._renews = renews
        self._token_refusals = 0
        self._pid = pid
        self.started_ms = started_ms
        self._counter = 0
        self._outbox: dict[str, OutboxEntry] = {}
        self._by_call: dict[str, OutboxEntry] = {}
        self._by_correlation: dict[str, OutboxEntry] = {}
        #: Correlation ids of requests that were not answered in time, oldest first.
        self._overdue: dict[str, None] = {}
        #: What `sendable` could give, now or later.
        self.waiting: deque[OutboxEntry] = deque()
        #: Whether an entry that costs no credit may be among them.
        self._free_waits = False
        self._unwritten: list[OutboxEntry] = []
        self._held: dict[str, float] = {}
        self._hello_id = ""
        self._hello_at: float | None = None
        self._busy_since: float | None = None
        #: Since when the broker has sent nothing while something is unanswered; inf: nothing is.
        self._silent_since = inf
        self._pinged = False

    # --- outgoing

    def next_id(self) -> str:
        """A frame id, unique for this incarnation."""
        self._counter += 1
        return f"{self.incarnation}.{self._counter}"

    def submit(
        self,
        kind: Kind,
        frame: frames.Frame,
        waiter: Any,
        now: float,
        patience_s: float | None = None,
        on_accepted: Any = None,
    ) -> bytes | None:
        """Take a frame into the outbox. Returns the bytes to send at once, or None when the frame has to wait. A large
        payload must first be written: see `take_unwritten`. `patience_s` (seconds), `on_accepted`: see `Link.ask`.

        Raises FrameError when the frame is too large, GoondanError E_LINK_CLOSED when the link is over.
        """
        if self.phase == "closed":
            raise GoondanError(error_payload("E_LINK_CLOSED", "the link is closed"))
        if not frame.id:
            frame.id = self.next_id()
        data = encode_value(frame)
        if len(data) > INLINE_FRAME_BYTES and self.goes_by_reference(frame, len(data)):
            data = b""
        expires = None if frame.deadline_ms is None else now + frame.deadline_ms / 1000 + DEADLINE_GRACE_S
        entry = OutboxEntry(
            kind,
            frame.id,
            data,
            waiter,
            expires,
            None if patience_s is None else now + patience_s,
            frame.call_id if kind in ("call", "tool ask") else None,
            frame.reply_to.correlation_id if kind == "ask" and frame.reply_to else None,
            kind in ("call", "ask") or frame.type == "event",
            f"{frame.to}\0{frame.instance_key}" if frame.type == "event" else frame.type,
            None if data else frame,
            on_accepted=on_accepted,
        )
        if not data:
            self._unwritten.append(entry)
        self._outbox[entry.id] = entry
        if kind == "call" and entry.call_id is not None:
            self._by_call[entry.call_id] = entry
        elif entry.correlation is not None:
            self._by_correlation[entry.correlation] = entry
        if self.phase != "ready" or self.waiting or self._held or not data or not self._admit(entry):
            self.waiting.append(entry)
            self._free_waits = self._free_waits or not entry.costs_credit
            return None
        return data

    def accepted(self) -> frozenset[str]:
        """The ids of frames that the broker has accepted and not answered."""
        return frozenset(entry.id for entry in self._outbox.values() if entry.accepted)

    def goes_by_reference(self, frame: frames.Frame, size: int) -> bool:
        """Whether the payload of a frame with `size` encoded bytes goes by reference.

        Raises FrameError E_FRAME_TOO_LARGE for a frame that cannot be sent at all.
        """
        payload = len(memoryview(frame.payload))
        # When the header alone is large, a file does not help.
        if size > INLINE_FRAME_BYTES and payload > INLINE_FRAME_BYTES // 2 and frame.type in REFERENCES and self.blobs:
            if payload > MAX_BLOB_BYTES:
                raise FrameError(too_large(payload, MAX_BLOB_BYTES).info)
            return True
        if size > MAX_FRAME_BYTES:
            message = f"frame of {size} bytes, limit {MAX_FRAME_BYTES}"
            raise FrameError(error_payload("E_FRAME_TOO_LARGE", message))
        return False

    @property
    def blobs(self) -> str | None:
        """The folder of large payloads, if this process may use one."""
        return self.welcome.blobs if self.welcome is not None and self._by_reference else None

    def take_unwritten(self) -> list[OutboxEntry]:
        """The entries whose payloads must be written now. Each is given once. Call `written` or `forget` for it."""
        taken, self._unwritten = self._unwritten, []
        return taken

    def written(self, entry: OutboxEntry, blob: frames.Blob) -> bool:
        """The payload of an entry has its file, so `sendable` may give the entry. False when nobody waits for it any
        more.
        """
        frame, entry.unwritten = entry.unwritten, None
        if frame is None or self._outbox.get(entry.id) is not entry:
            return False
        entry.blob = blob
        entry.data = encode_reference(frame, blob)
        return True

    def sendable(self, now: float) -> OutboxEntry | None:
        """The next waiting entry that may be sent now, or None. It counts as sent."""
        if self.phase != "ready" or not self.waiting:
            return None
        if self._held:
            self._held = {target: until for target, until in self._held.items() if until > now}
        unwritten: set[str] = set()
        found: OutboxEntry | None = None
        over = blocked = free = False
        for at, entry in enumerate(self.waiting):
            if entry.over:
                over = True
                continue
            free = free or not entry.costs_credit
            if (blocked and entry.costs_credit) or entry.target in self._held or entry.target in unwritten:
                continue
            if not entry.data:
                unwritten.add(entry.target)
            elif self._admit(entry):
                del self.waiting[at]
                found = entry
                break
            elif not self._free_waits:
                break
            else:
                blocked = True  # what costs no credit goes on
        else:
            self._free_waits = free
        if over:
            self.waiting = deque(entry for entry in self.waiting if not entry.over)
        if found is not None and found.kind == "ask" and found.expires is not None:
            found.data = _with_deadline(found.data, found.expires - (found.held_since or now) - DEADLINE_GRACE_S)
        return found

    @property
    def rests(self) -> bool:
        """Whether nothing is due: the link is ready, and no entry waits for an answer."""
        return self.phase == "ready" and not self._outbox

    def forget(self, frame_id: str) -> OutboxEntry | None:
        """Take an entry out of the outbox without an answer."""
        entry = self._outbox.pop(frame_id, None)
        if entry is not None:
            entry.over = True
            self._drop_index(entry)
            self._release(entry)
        return entry

    def hello(self, now: float, **held: Any) -> bytes:
        """The hello to send; `held` are fields of Hello that say what this process holds. Afterwards the phase is
        `greeting`.
        """
        self.phase = "greeting"
        self._hello_at = now
        self._hello_id = self.next_id()
        body = frames.Hello(
            token=self.token,
            incarnation=self.incarnation,
            awaiting=list(self._by_correlation),
            pid=self._pid,
            started_ms=self.started_ms,
            **held,
        )
        return encode(frames.Frame("hello", id=self._hello_id, payload=to_raw(body)))

    # --- incoming

    def receive(self, frame: frames.Frame, now: float) -> Outcome | None:
        """Handle a frame. Returns what to do, or None when there is nothing to do."""
        kind = frame.type
        if kind == "tool.result" and frame.call_id is not None:
            entry = self._by_call.pop(frame.call_id, None)
            if entry is None:
                return None  # a repeat, or the caller gave up
            del self._outbox[entry.id]
            self._release(entry)
            return Settled(entry, frame)
        if kind == "event" and frame.in_reply_to is not None and not frame.asynchronous:
            return self._receive_answer(frame)
        if kind in ("ack", "reply", "error", "welcome") and frame.in_reply_to is not None:
            return self._receive_reply(frame, now)
        if kind == "tool.answer":
            return self._receive_tool_answer(frame)
        if kind == "error":
            error = from_raw(frame.payload, frames.ErrorPayload)
            if error.code == "E_HELLO_REQUIRED":
                self.lost()
                return Greet()
            return Deliver(frame)
        if kind == "ping":
            return Reply(encode(frames.Frame("pong", id=self.next_id(), in_reply_to=frame.id)))
        if kind == "pong":
            return None
        if kind == "clock":
            self._set_clock(frame, now)
            return Deliver(frame)
        if kind == "credit":
            self.window = max(1, from_raw(frame.payload, frames.Credit).window)
            return None
        return Deliver(frame)

    def awaits(self, frame: frames.Frame) -> bool:
        """Whether the payload of this frame is needed. An answer or a result may be a repeat, and then it is not."""
        if frame.type == "tool.result" and frame.call_id is not None:
            return frame.call_id in self._by_call
        if frame.type == "tool.answer":
            return self._asked(frame) is not None
        if frame.type != "event" or frame.in_reply_to is None or frame.asynchronous:
            return True
        return frame.in_reply_to in self._by_correlation

    def unreadable(self, frame: frames.Frame, error: frames.ErrorPayload, now: float) -> Outcome | None:
        """Handle a frame whose payload is not available. If a caller waits for it, the caller gets the error. Any other
        frame is delivered with `blob` still set and with the error as its payload.
        """
        frame.payload = to_raw(error)
        outcome = self.receive(frame, now)
        if isinstance(outcome, Settled) and outcome.error is None:
            return Settled(outcome.entry, None, error, outcome.reply)
        return outcome

    def lost(self) -> None:
        """The broker does not know us, or no longer. All unanswered entries are sent again after the next welcome."""
        if self.phase == "closed":
            return
        self.phase = "absent"
        self.in_use = 0
        for entry in self._outbox.values():
            entry.holds_credit = False
        self.waiting = deque(self._outbox.values())
        self._free_waits = True
        self._held.clear()

    def tick(self, now: float) -> tuple[list[Settled], bool]:
        """The entries whose time is over, and whether hello must be sent again. Call it a few times a second."""
        expired = []
        for entry in self._outbox.values():
            if entry.held_since is not None:
                continue
            impatient = entry.patience is not None and entry.patience <= now
            if (entry.expires is not None and entry.expires <= now) or (impatient and entry.refused):
                expired.append(entry)
            elif impatient and entry.accepted:
                self._ask_for_an_event(entry)
        settled = []
        for entry in expired:
            self.forget(entry.id)
            self._remember_overdue(entry)
            code = "E_TOOL_TIMEOUT" if entry.kind == "call" else "E_AGENT_TIMEOUT"
            settled.append(Settled(entry, None, error_payload(code, "no answer within the deadline")))
        greet = self.phase == "greeting" and self._hello_at is not None and now - self._hello_at >= HELLO_RETRY_S
        return settled, greet

    def silence(self, heard_at: float, now: float) -> Literal["ping", "connect"] | None:
        """What to do about a broker whose last frame came at `heard_at`: `ping` it, `connect` anew, or nothing
        (PROTOCOL.md "Silence"). Call it with each tick, when the frames that are there were received.
        """
        if self.rests or self.phase == "closed":
            self._silent_since, self._pinged = inf, False
            return None
        if heard_at >= self._silent_since:
            self._pinged = False
        self._silent_since = max(heard_at, min(self._silent_since, now))
        if now - self._silent_since < SILENCE_S:
            return None
        self._silent_since, self._pinged = now, not self._pinged
        return "ping" if self._pinged else "connect"

    def _ask_for_an_event(self, entry: OutboxEntry) -> None:
        """The asker does not wait any more: the same request goes out again as one without waiting. The broker's ack
        says whether it is one now; else the answer is on its way.
        """
        frame = decode(entry.data)
        frame.asynchronous, entry.patience = True, None
        entry.data = encode_value(frame)
        self.waiting.append(entry)
        self._restore_order()

    def close(self) -> list[OutboxEntry]:
        """End the link. Returns the entries that will never be answered."""
        self.phase = "closed"
        entries = list(self._outbox.values())
        self._outbox.clear()
        self._by_call.clear()
        self._by_correlation.clear()
        self.waiting.clear()
        return entries

    # --- inside

    def _receive_answer(self, frame: frames.Frame) -> Outcome:
        """Handle an answering event. It is acknowledged in any case, so that the broker need not keep it for us."""
        ack = frames.Frame("ack", id=self.next_id(), stage="done", event_id=frame.event_id, in_reply_to=frame.id)
        entry = self._by_correlation.pop(frame.in_reply_to or "", None)
        if entry is None:
            is_late = frame.in_reply_to in self._overdue
            self._overdue.pop(frame.in_reply_to or "", None)
            return Reply(encode(ack), frame if is_late else None)
        del self._outbox[entry.id]
        self._release(entry)
        return Settled(entry, frame, None, encode(ack))

    def _asked(self, frame: frames.Frame) -> OutboxEntry | None:
        """The open `tool.ask` that a `tool.answer` is for; None when there is none. The broker has checked whose call
        it is, so an answer counts for a question of that call only.
        """
        entry = self._outbox.get(frame.in_reply_to or "")
        if entry is None or entry.kind != "tool ask" or entry.call_id != frame.call_id:
            return None
        return entry

    def _receive_tool_answer(self, frame: frames.Frame) -> Outcome | None:
        entry = self._asked(frame)
        if entry is None:
            return None  # a repeat, or nobody waits for it any more
        self.forget(entry.id)
        return Settled(entry, frame)

    def _set_clock(self, frame: frames.Frame, now: float) -> None:
        """Stop or start a clock, because a person is being asked or has answered. It is the clock of a request of ours,
        or of a turn that runs here.
        """
        if frame.in_reply_to is not None:
            found = self._by_correlation.get(frame.in_reply_to)
            entries = [] if found is None else [found]
        else:
            entries = list(self._by_call.values())
        for entry in entries:
            if frame.stage == "held":
                entry.hold(now)
            elif frame.stage == "runs":
                entry.go_on(now)
                if frame.in_reply_to is not None and frame.deadline_ms is not None and entry.expires is not None:
                    entry.expires = now + frame.deadline_ms / 1000 + DEADLINE_GRACE_S

    def _receive_reply(self, frame: frames.Frame, now: float) -> Outcome | None:
        if frame.in_reply_to == self._hello_id:
            return self._receive_greeting(frame, now)
        entry = self._outbox.get(frame.in_reply_to or "")
        if entry is None:
            return None  # a repeat of an answer
        if frame.type == "error":
            error = from_raw(frame.payload, frames.ErrorPayload)
            if error.code == "E_HELLO_REQUIRED":
                return None  # it was sent before hello: after the welcome it is sent again
            if error.code == "E_OVERLOADED":
                self._hold(entry, now + (error.retry_after_ms or DEFAULT_HOLD_S * 1000) / 1000)
                return None
            self.forget(entry.id)
            return Settled(entry, None, error)
        if entry.kind == "ask":
            told, entry.accepted = entry.accepted, True
            self._release(entry)  # the broker has accepted it; it stays here until it is answered
            if frame.asynchronous:  # the answer comes as an event
                self.forget(entry.id)
                return Settled(entry, frame)
            return None if told or entry.on_accepted is None else Accepted(entry, frame)
        if entry.kind == "call":
            return None
        self.forget(entry.id)
        return Settled(entry, frame)

    def _receive_greeting(self, frame: frames.Frame, now: float) -> Outcome | None:
        if frame.type == "error":
            error = from_raw(frame.payload, frames.ErrorPayload)
            self._busy_since = self._busy_since if self._busy_since is not None else now
            if error.code == "E_PRINCIPAL_BUSY" and now - self._busy_since < BUSY_PATIENCE_S:
                return None  # tick says hello again
            if error.code == "E_TOKEN_INVALID" and self._renews and self._token_refusals < TOKEN_REFUSALS:
                self._token_refusals += 1
                return None
            self.phase = "closed"
            return LinkRefused(error)
        if frame.type != "welcome":
            return None
        welcome = from_raw(frame.payload, frames.Welcome)
        if welcome.version != frames.PROTOCOL_VERSION:
            self.phase = "closed"
            return LinkRefused(error_payload("E_VERSION", f"the broker speaks version {welcome.version}"))
        self._busy_since = None
        self._token_refusals = 0
        self.welcome = welcome
        self.window = max(1, welcome.credit)
        for entry in self._outbox.values():  # the broker says again which clocks stand still
            entry.go_on(now)
        self.phase = "ready"
        return Welcomed(welcome)

    def _admit(self, entry: OutboxEntry) -> bool:
        if entry.costs_credit:
            if self.in_use >= self.window:
                return False
            self.in_use += 1
            entry.holds_credit = True
        entry.refused = False
        return True

    def _release(self, entry: OutboxEntry) -> None:
        """Give the entry's credit back, if it holds any."""
        if entry.holds_credit:
            entry.holds_credit = False
            self.in_use -= 1

    def _hold(self, entry: OutboxEntry, until: float) -> None:
        self._release(entry)
        entry.refused = True
        self._held[entry.target] = max(until, self._held.get(entry.target, 0.0))
        self.waiting.append(entry)
        self._free_waits = self._free_waits or not entry.costs_credit
        self._restore_order()

    def _restore_order(self) -> None:
        """Sort the waiting entries by the order in which they came into the outbox (a dict keeps it)."""
        waiting = {entry.id for entry in self.waiting}
        self.waiting = deque(entry for key, entry in self._outbox.items() if key in waiting)

    def _remember_overdue(self, entry: OutboxEntry) -> None:
        if entry.kind == "ask" and entry.correlation is not None:
            self._overdue[entry.correlation] = None
            if len(self._overdue) > MAX_OVERDUE:
                del self._overdue[next(iter(self._overdue))]

    def _drop_index(self, entry: OutboxEntry) -> None:
        if entry.kind == "call" and entry.call_id is not None:
            self._by_call.pop(entry.call_id, None)
        elif entry.correlation is not None:
            self._by_correlation.pop(entry.correlation, None)


def _with_deadline(data: bytes, left_s: float) -> bytes:
    """An encoded frame that says what is left of its deadline, which runs from the moment of `submit`."""
    frame = decode(data)
    frame.deadline_ms = max(1, int(left_s * 1000))
    return encode_value(frame)


def encode_reference(frame: frames.Frame, blob: frames.Blob) -> bytes:
    """The frame with a reference in place of its payload. `frame` itself does not change."""
    return encode(structs.replace(frame, payload=frames.NO_PAYLOAD, blob=blob))
