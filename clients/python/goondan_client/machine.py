"""The rules of a client as a state machine: no socket, no clock, no file, no randomness.

States: `absent` (not greeted, or the broker was lost), `greeting` (hello was sent), `ready`, `closed`. `now` is in
seconds, on any steady clock. What is to be sent lies in `outgoing`, encoded: whoever owns the socket takes it there.

Source: PROTOCOL.md "Hello", "Sending until answered", "Silence", "Credit and overload", "Deadlines".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final, Literal

from msgspec import Struct

from goondan_client.errors import GoondanError
from goondan_client.frames import (
    VERSION,
    Credit,
    ErrorPayload,
    Frame,
    Hello,
    Welcome,
    encode,
    opened,
    to_raw,
)

#: How much longer than its deadline a request waits before it gives the error itself (seconds).
GRACE_S: Final = 1.0
#: How soon hello is said again (seconds).
HELLO_AGAIN_S: Final = 0.5
#: For how long hello is said again to a broker that is busy with an earlier connection of ours (seconds).
BUSY_S: Final = 10.0
#: After so long without a frame, while something is unanswered, the broker is asked for a sign of life; after as much
#: again the connection is given up (seconds).
SILENCE_S: Final = 5.0
#: How long an overloaded instance gets nothing when the error names no time (seconds).
HOLD_S: Final = 0.1


class Entry:
    """A request that must be answered. `waiter` and `listener` belong to the shell."""

    __slots__ = ("costs", "expires", "frame", "held_since", "listener", "queued", "sent", "target", "waiter")

    def __init__(self, frame: Frame, waiter: Any, expires: float | None, listener: Any = None) -> None:
        self.frame = frame
        self.waiter = waiter
        self.listener = listener
        self.expires = expires
        #: Since when its time stands still.
        self.held_since: float | None = None
        #: It holds one unit of credit.
        self.costs = False
        #: It waits to go out, for the first time or again.
        self.queued = False
        #: It has gone out at least once.
        self.sent = False
        #: What waits behind it when it meets overload: the same instance, or nothing.
        self.target = f"{frame.to}\0{frame.instance_key}" if frame.type == "event" else frame.id


class Done(Struct, frozen=True):
    """A request is over: with the frame that answers it, or with an error."""

    #: The request.
    entry: Any
    #: The answer.
    frame: Frame | None
    #: The error in its place.
    error: GoondanError | None = None


class News(Struct, frozen=True):
    """A live event of a request."""

    #: The request.
    entry: Any
    #: The `runtime.event`.
    frame: Frame


class Greet(Struct, frozen=True):
    """Read the token and call `hello`; but not with a token that was refused."""

    #: The token of the last hello was refused with this error: only another one helps.
    refused: GoondanError | None = None


class Reconnect(Struct, frozen=True):
    """The connection was silent for too long: close the socket and connect anew with another one."""


class Welcomed(Struct, frozen=True):
    """The connection is ready."""

    #: The broker's welcome.
    welcome: Welcome


class Refused(Struct, frozen=True):
    """The kernel does not want this client. It is over."""

    #: Why.
    error: GoondanError


Effect = Done | News | Greet | Reconnect | Welcomed | Refused


class Machine:
    """The state of one client."""

    def __init__(self, incarnation: str, pid: int | None = None) -> None:
        self.phase: Literal["absent", "greeting", "ready", "closed"] = "absent"
        self.incarnation = incarnation
        #: The newest welcome.
        self.welcome: Welcome | None = None
        #: What is to be sent, in order.
        self.outgoing: deque[bytes] = deque()
        #: Frames with files that went out once more. Their files are to be kept from the sweep.
        self.repeated: list[Frame] = []
        #: The token of the last hello.
        self.token = ""
        self._pid = pid
        self._count = 0
        self._window = 0
        self._in_use = 0
        self._outbox: dict[str, Entry] = {}
        self._asked: dict[str, Entry] = {}
        self._waiting: deque[Entry] = deque()
        self._held: dict[str | None, float] = {}
        self._hello_id = ""
        self._hello_at = 0.0
        self._busy_since: float | None = None
        self._heard = 0.0
        self._pinged = False

    # --- what is asked for

    def next_id(self) -> str:
        """An id of a frame."""
        self._count += 1
        return f"{self.incarnation}.{self._count}"

    def submit(self, entry: Entry, now: float) -> None:
        """Take a request. It goes out as soon as it may. Raises GoondanError E_LINK_CLOSED."""
        if self.phase == "closed":
            raise GoondanError("E_LINK_CLOSED", "the connection to the kernel is closed", "Connect again.")
        if not self._outbox:
            self._heard, self._pinged = max(now, self._heard), False  # until now a silent broker was no fault
        frame = entry.frame
        if frame.id is None:
            frame.id = self.next_id()
            entry.target = entry.target or frame.id
        self._outbox[frame.id] = entry
        if frame.reply_to is not None:
            self._asked[frame.reply_to.correlation_id] = entry
        entry.queued = True
        if frame.type == "event":
            self._waiting.append(entry)
        else:
            self._waiting.appendleft(entry)  # control is never limited, and waits for no event
        self.flush(now)

    def flush(self, now: float) -> None:
        """Let out what may go out now."""
        if self.phase != "ready" or not self._waiting:
            return
        if self._held:
            self._held = {target: until for target, until in self._held.items() if until > now}
        kept: list[Entry] = []
        while self._waiting:
            entry = self._waiting.popleft()
            frame = entry.frame
            if entry.target in self._held:
                kept.append(entry)
                continue
            if frame.type == "event":
                if self._in_use >= self._window:
                    kept.append(entry)
                    break
                self._in_use += 1
                entry.costs = True
            if entry.expires is not None:
                left = entry.expires - GRACE_S - (entry.held_since or now)
                frame.deadline_ms = max(1, round(left * 1000))
            if entry.sent and frame.blob is not None:
                self.repeated.append(frame)
            entry.queued, entry.sent = False, True
            self.outgoing.append(encode(frame))
        self._waiting.extendleft(reversed(kept))

    def forget(self, entry: Entry) -> bool:
        """Nobody waits for this request any more. Whether it was still open."""
        frame = entry.frame
        if self._outbox.get(frame.id or "") is not entry:
            return False
        del self._outbox[frame.id or ""]
        if frame.reply_to is not None:
            self._asked.pop(frame.reply_to.correlation_id, None)
        if entry.queued:
            self._waiting.remove(entry)
        self._release(entry)
        return True

    def hello(self, token: str, now: float) -> None:
        """Say hello with the token as it stands in the file now."""
        self.phase = "greeting"
        self.token = token
        self._hello_at = now
        self._hello_id = self.next_id()
        hello = Hello(token, self.incarnation, [VERSION], list(self._asked), self._pid)
        self.outgoing.append(encode(Frame(type="hello", id=self._hello_id, payload=to_raw(hello))))

    def lost(self) -> None:
        """The connection is another one: everything unanswered goes out again after the next welcome."""
        if self.phase == "closed":
            return
        self.phase = "absent"
        self.outgoing.clear()
        self._held.clear()
        self._in_use = 0
        for entry in self._outbox.values():
            entry.costs, entry.queued = False, True
        self._queue(self._outbox.values())

    def close(self) -> list[Entry]:
        """It is over. Returns the requests that get no answer."""
        self.phase = "closed"
        left = list(self._outbox.values())
        self._outbox.clear()
        self._asked.clear()
        self._waiting.clear()
        return left

    @property
    def rests(self) -> bool:
        """Whether nothing is due: ready, and nothing unanswered."""
        return self.phase == "ready" and not self._outbox

    # --- what comes

    def connected(self, now: float) -> None:
        """There is a new connection, or an attempt at one."""
        self._heard, self._pinged = now, False

    def awaits(self, frame: Frame) -> bool:
        """Whether the payload of this frame is needed, so that its file must be read."""
        return frame.type == "event" and frame.in_reply_to in self._asked

    def receive(self, frame: Frame, now: float) -> Effect | None:
        """Handle a frame. Raises GoondanError E_FRAME_INVALID for a payload that is none; nothing has changed then."""
        self._heard, self._pinged = now, False
        kind, answers = frame.type, frame.in_reply_to
        if self.phase == "closed":
            return None
        if kind == "event":
            return None if answers is None else self._answered(frame, answers, now)
        if kind == "runtime.event":
            entry = self._asked.get(answers or "")
            return None if entry is None or entry.listener is None else News(entry, frame)
        if kind == "error":
            return self._failed(opened(frame.payload, ErrorPayload), answers, now)
        if kind == "ack" or kind == "reply":
            return self._acknowledged(frame, answers or "", now)
        if kind == "welcome":
            return self._welcomed(frame, now)
        if kind == "ping":
            self.outgoing.append(encode(Frame(type="pong", id=self.next_id(), in_reply_to=frame.id)))
        elif kind == "credit":
            self._window = max(1, opened(frame.payload, Credit).window)
            self.flush(now)
        elif kind == "clock":
            self._set_clock(frame, now)
        return None

    def tick(self, now: float) -> list[Effect]:
        """What is due. Call it a few times a second while something is unanswered."""
        effects: list[Effect] = []
        if self.phase == "closed":
            return effects
        for entry in [one for one in self._outbox.values() if one.expires is not None and one.held_since is None]:
            if (entry.expires or 0.0) <= now:
                self.forget(entry)
                error = GoondanError("E_AGENT_TIMEOUT", "no answer within the deadline", "Give it more time.")
                effects.append(Done(entry, None, error))
        if self._waiting:
            self.flush(now)
        if self.rests:
            return effects
        if now - self._heard >= (2 if self._pinged else 1) * SILENCE_S:
            if self._pinged:
                self.lost()
                self.connected(now)
                effects.append(Reconnect())
                return effects
            self._pinged = True
            # Without an id: a broker that does not know the connection asks for hello then.
            self.outgoing.append(encode(Frame(type="ping")))
        if self.phase == "greeting" and now - self._hello_at >= HELLO_AGAIN_S:
            effects.append(Greet())
        return effects

    # --- inside

    def _answered(self, frame: Frame, correlation: str, now: float) -> Effect | None:
        # Acknowledged in any case, also when nobody waits for it: the broker keeps it otherwise.
        ack = Frame(type="ack", id=self.next_id(), stage="done", event_id=frame.event_id, in_reply_to=frame.id)
        self.outgoing.append(encode(ack))
        entry = self._asked.get(correlation)
        if entry is None:
            return None
        self.forget(entry)
        self.flush(now)
        return Done(entry, frame)

    def _acknowledged(self, frame: Frame, answers: str, now: float) -> Effect | None:
        entry = self._outbox.get(answers)
        if entry is None:
            return None
        if entry.frame.reply_to is not None:  # it stays until its answer comes
            self._release(entry)
            self.flush(now)
            return None
        self.forget(entry)
        self.flush(now)
        return Done(entry, frame)

    def _failed(self, said: ErrorPayload, answers: str | None, now: float) -> Effect | None:
        code = said.code
        if answers is None:
            if code != "E_HELLO_REQUIRED":
                return None
            self.lost()
            return Greet()
        if answers == self._hello_id:
            return self._not_welcome(said, now)
        entry = self._outbox.get(answers)
        if entry is None or code == "E_HELLO_REQUIRED":
            return None
        if code == "E_OVERLOADED":
            self._release(entry)
            after = HOLD_S if said.retry_after_ms is None else said.retry_after_ms / 1000
            self._held[entry.target] = max(now + after, self._held.get(entry.target, 0.0))
            entry.queued = True
            self._queue(one for one in self._outbox.values() if one.queued)
            self.flush(now)
            return None
        self.forget(entry)
        self.flush(now)
        return Done(entry, None, said.as_exception())

    def _not_welcome(self, said: ErrorPayload, now: float) -> Effect | None:
        if said.code == "E_PRINCIPAL_BUSY":
            self._busy_since = now if self._busy_since is None else self._busy_since
            if now - self._busy_since < BUSY_S:
                return None  # `tick` says hello again
        if said.code == "E_HELLO_REQUIRED":
            return None
        if said.code == "E_TOKEN_INVALID":
            return Greet(said.as_exception())  # a kernel that was started again has made another token
        self.phase = "closed"
        return Refused(said.as_exception())

    def _welcomed(self, frame: Frame, now: float) -> Effect | None:
        if frame.in_reply_to != self._hello_id or self.phase != "greeting":
            return None
        welcome = opened(frame.payload, Welcome)
        if welcome.version != VERSION:
            self.phase = "closed"
            return Refused(GoondanError("E_VERSION", f"the kernel speaks version {welcome.version}, not {VERSION}"))
        self.welcome = welcome
        self._window = max(1, welcome.credit)
        self._busy_since = None
        for entry in self._outbox.values():  # the broker says anew what stands still
            self._run_on(entry, now)
        self.phase = "ready"
        self.flush(now)
        return Welcomed(welcome)

    def _set_clock(self, frame: Frame, now: float) -> None:
        entry = self._asked.get(frame.in_reply_to or "")
        if entry is None:
            return
        if frame.stage == "held" and entry.held_since is None:
            entry.held_since = now
        elif frame.stage == "runs":
            self._run_on(entry, now)

    def _run_on(self, entry: Entry, now: float) -> None:
        if entry.held_since is not None:
            if entry.expires is not None:
                entry.expires += now - entry.held_since
            entry.held_since = None

    def _queue(self, entries: Iterable[Entry]) -> None:
        """Line up what waits to go out: events in the order in which they were asked for, behind all control."""
        self._waiting = deque(sorted(entries, key=lambda entry: entry.frame.type == "event"))

    def _release(self, entry: Entry) -> None:
        if entry.costs:
            entry.costs = False
            self._in_use -= 1
