"""The rules of a client as a state machine: no socket, no clock, no file, no randomness.

States: `absent` (not greeted, or the broker was lost), `greeting` (hello was sent), `ready`, `closed`. `now` is in
seconds, on any steady clock. What is to be sent lies in `outgoing`, encoded: whoever owns the socket takes it there.

Source: PROTOCOL.md "Hello", "Sending until answered", "Silence", "Credit and overload", "Deadlines".
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Literal

from msgspec import Struct

from goondan_client.errors import GoondanError
from goondan_client.frames import VERSION, Credit, ErrorPayload, Frame, Welcome, encode, opened

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
HOLD_S: Final = 1.0


class Entry(Struct, eq=False):
    """A request that must be answered."""

    #: What is sent: a frame's fields.
    frame: dict[str, Any]
    #: Whoever waits for the answer: the shell's.
    waiter: Any
    #: When it is over without an answer. None: never.
    expires: float | None = None
    #: Whoever hears of the turn: the shell's. None: nobody.
    listener: Any = None
    #: Since when its time stands still. None: it runs.
    held_since: float | None = None
    #: What else waits when it meets overload: all of the same target.
    target: str = ""
    #: It holds one unit of credit.
    costs: bool = False
    #: It waits to go out, for the first time or again.
    queued: bool = False
    #: It has gone out at least once.
    sent: bool = False
    #: Nobody waits for it any more: when it is refused, it is over.
    given_up: bool = False


class Effect(Struct, frozen=True):
    """What the shell is to do."""

    #: `done`: an entry has its answer, or an error. `news`: a live event of an entry. `greet`: read the token and call
    #: `hello`; with an error, only if the token is another one than that of the last hello. `connect`: close the socket
    #: and make another one. `ready`: there is a welcome. `over`: the kernel does not want this client.
    what: Literal["done", "news", "greet", "connect", "ready", "over"]
    #: Of `done` and `news`.
    entry: Entry | None = None
    #: Of `done` and `news`.
    frame: Frame | None = None
    #: Of `done`, `greet` and `over`.
    error: GoondanError | None = None


class Machine:
    """The state of one client."""

    def __init__(self, incarnation: str, pid: int | None = None) -> None:
        self.phase: Literal["absent", "greeting", "ready", "closed"] = "absent"
        #: The newest welcome.
        self.welcome: Welcome | None = None
        #: The token of the last hello.
        self.token = ""
        #: What is to be sent, in order.
        self.outgoing: deque[bytes] = deque()
        #: Frames with files that went out once more: their files are to be kept from the sweep.
        self.repeated: list[dict[str, Any]] = []
        self._incarnation, self._pid = incarnation, pid
        self._count = self._window = self._in_use = self._control = 0
        #: What is unanswered, by the id of its frame, oldest first; and by the correlation id of its answer.
        self._outbox: dict[str, Entry] = {}
        self._asked: dict[str, Entry] = {}
        #: What waits to go out, oldest first, `_control` of it no events; and targets that get nothing until then: what
        #: is queued for them is lined up after that.
        self._waiting: deque[Entry] = deque()
        self._held: dict[str, float] = {}
        self._hello_id, self._hello_at = "", 0.0
        self._busy_since: float | None = None
        #: When the broker was heard, or became due to be; and that it was asked for a sign of life since.
        self._heard, self._pinged = 0.0, False

    @property
    def rests(self) -> bool:
        """Whether nothing is due: ready, and nothing unanswered."""
        return self.phase == "ready" and not self._outbox

    # --- what is asked for

    def submit(self, entry: Entry, now: float) -> None:
        """Take a request. It goes out as soon as it may. Raises GoondanError E_LINK_CLOSED, or E_FRAME_INVALID when its
        answer is awaited already.
        """
        if self.phase == "closed":
            raise GoondanError("E_LINK_CLOSED", "the connection to the kernel is closed", "Connect again.")
        if self.rests:
            self.connected(now)  # until now a silent broker was no fault
        frame = entry.frame
        if "replyTo" in frame and self._asked.setdefault(frame["replyTo"]["correlationId"], entry) is not entry:
            raise GoondanError("E_FRAME_INVALID", f"{frame['eventId']} is being asked already", "Wait for its answer.")
        frame["id"] = entry.target = self._next_id()
        self._outbox[entry.target] = entry
        entry.queued = True
        if frame["type"] == "event":
            entry.target = f"{frame['to']}\0{frame['instanceKey']}"
        else:
            self._control += 1
        self._waiting.append(entry)
        self.flush(now)

    def flush(self, now: float) -> None:
        """Let out what may go out now."""
        if self.phase != "ready":
            return
        kept: list[Entry] = []
        while self._waiting and (self._control or self._in_use < self._window):  # control is never limited
            entry = self._waiting.popleft()
            frame = entry.frame
            is_event = frame["type"] == "event"
            self._control -= not is_event
            held = entry.target in self._held
            if not entry.queued or held or (is_event and self._in_use >= self._window):
                if entry.given_up:
                    self._forget(entry)  # the wish to cancel it does not wait, and would come before it
                elif entry.queued and not held:  # what is held is lined up after that
                    kept.append(entry)
                continue
            if is_event:
                self._in_use += 1
                entry.costs = True
            if entry.expires is not None:
                left = entry.expires - GRACE_S - (entry.held_since or now)
                frame["deadlineMs"] = max(1, round(left * 1000))
            if entry.sent and ("blob" in frame or "files" in frame):
                self.repeated.append(frame)
            entry.queued, entry.sent = False, True
            self.outgoing.append(encode(frame))
        self._waiting.extendleft(reversed(kept))

    def give_up(self, entry: Entry) -> bool:
        """Nobody waits for this request any more. Whether the broker may have it: then it stays until it is over."""
        entry.given_up = True
        # Refused before, or without credit after a welcome: sent after the wish to cancel it, it would be worked on.
        waits = entry.queued and (self.phase == "ready" or not entry.sent)
        return (self._forget(entry) if waits else entry.frame.get("id") in self._outbox) and entry.sent

    def _forget(self, entry: Entry) -> bool:
        """It is over. Whether it was still open."""
        frame = entry.frame
        if self._outbox.pop(frame["id"], None) is None:
            return False
        if "replyTo" in frame:
            self._asked.pop(frame["replyTo"]["correlationId"], None)
        entry.queued = False  # `flush` drops it where it waits
        self._release(entry)
        return True

    def hello(self, token: str, now: float) -> None:
        """Say hello with the token as it stands in the file now. Empty: there is none yet, and a little later `tick`
        greets again.
        """
        self.phase, self.token, self._hello_at = "greeting", token, now
        if not token:
            return
        self._hello_id = self._hello_id or self._next_id()
        hello = {"token": token, "incarnation": self._incarnation, "versions": [VERSION], "pid": self._pid}
        self._send(type="hello", id=self._hello_id, payload={**hello, "awaiting": list(self._asked)})

    def connected(self, now: float) -> None:
        """There is a new connection, or an attempt at one: silence begins anew."""
        self._heard, self._pinged = now, False

    def lost(self) -> None:
        """The broker does not know us any more: everything unanswered goes out again after the next welcome."""
        if self.phase == "closed":
            return
        self.phase, self._in_use, self._hello_id = "absent", 0, ""
        self.outgoing.clear()
        self._held.clear()
        for entry in self._outbox.values():
            entry.costs, entry.queued = False, True
        self._line_up()

    def close(self) -> list[Entry]:
        """It is over. Returns the requests that get no answer."""
        self.phase = "closed"
        left = list(self._outbox.values())
        for each in (self._outbox, self._asked, self._waiting):
            each.clear()
        return left

    # --- what comes

    def awaits(self, frame: Frame) -> bool:
        """Whether the payload of this frame is needed, so that its file must be read."""
        return frame.type == "event" and frame.in_reply_to in self._asked

    def receive(self, frame: Frame, now: float) -> Effect | None:
        """Handle a frame. Raises GoondanError E_FRAME_INVALID for a payload that is none; nothing has changed then."""
        self.connected(now)
        kind, answers = frame.type, frame.in_reply_to or ""
        effect: Effect | None = None
        if self.phase == "closed":
            return None
        if kind == "event" and answers:
            effect = self._answered(frame, answers)
        elif kind == "ack" or kind == "reply":
            effect = self._acknowledged(frame, answers)
        elif kind == "runtime.event" and answers in self._asked:
            effect = Effect("news", self._asked[answers], frame)
        elif kind == "error":
            effect = self._failed(opened(frame.payload, ErrorPayload), frame.in_reply_to, now)
        elif kind == "welcome" and answers == self._hello_id and self.phase == "greeting":
            effect = self._welcomed(opened(frame.payload, Welcome), now)
        elif kind == "ping":
            self._send(type="pong", id=self._next_id(), inReplyTo=frame.id)
        elif kind == "credit":
            self._window = max(1, opened(frame.payload, Credit).window)
        elif kind == "clock" and answers in self._asked:
            _set_clock(self._asked[answers], frame.stage == "held", now)
            if frame.stage == "runs" and frame.deadline_ms is not None:
                self._asked[answers].expires = now + frame.deadline_ms / 1000 + GRACE_S
        if self._waiting:
            self.flush(now)
        return effect

    def tick(self, now: float) -> list[Effect]:
        """What is due. Call it a few times a second while something is unanswered."""
        effects: list[Effect] = []
        for entry in [one for one in self._outbox.values() if one.expires and one.expires <= now]:
            if entry.held_since is None and self._forget(entry):
                error = GoondanError("E_AGENT_TIMEOUT", "no answer within the deadline", "Give it more time.")
                effects.append(Effect("done", entry, None, error))
        held, self._held = self._held, {target: until for target, until in self._held.items() if until > now}
        if len(self._held) < len(held):
            self._line_up()
        self.flush(now)
        if self.rests or self.phase == "closed":
            return effects
        if now - self._heard >= (2 if self._pinged else 1) * SILENCE_S:
            if self._pinged:
                self.lost()
                self.connected(now)
                return [*effects, Effect("connect")]
            self._pinged = True
            self._send(type="ping")  # without an id: a broker that does not know the connection asks for hello then
        if self.phase == "greeting" and now - self._hello_at >= HELLO_AGAIN_S:
            effects.append(Effect("greet"))
        return effects

    # --- inside

    def _next_id(self) -> str:
        self._count += 1
        return f"{self._incarnation}.{self._count}"

    def _send(self, **frame: Any) -> None:
        self.outgoing.append(encode(frame))

    def _answered(self, frame: Frame, answers: str) -> Effect | None:
        # Acknowledged in any case, also when nobody waits for it: the broker keeps it otherwise.
        self._send(type="ack", id=self._next_id(), stage="done", eventId=frame.event_id, inReplyTo=frame.id)
        return self._done(self._asked.get(answers), frame)

    def _acknowledged(self, frame: Frame, answers: str) -> Effect | None:
        entry = self._outbox.get(answers)
        if entry is not None and "replyTo" in entry.frame:
            self._release(entry)  # it stays until its answer comes
            return None
        return self._done(entry, frame)

    def _done(self, entry: Entry | None, frame: Frame | None, error: GoondanError | None = None) -> Effect | None:
        """The entry has its answer, or an error."""
        return Effect("done", entry, frame, error) if entry is not None and self._forget(entry) else None

    def _failed(self, said: ErrorPayload, answers: str | None, now: float) -> Effect | None:
        if said.code == "E_HELLO_REQUIRED":
            if answers is not None:
                return None  # it was sent too early, and goes out after the welcome
            self.lost()
            return Effect("greet")
        if answers == self._hello_id:
            return self._not_welcome(said, now)
        entry = self._outbox.get(answers or "")
        if entry is None:
            return None
        if said.code == "E_OVERLOADED" and not entry.given_up:
            self._release(entry)
            until = now + (HOLD_S if said.retry_after_ms is None else said.retry_after_ms / 1000)
            self._held[entry.target] = max(until, self._held.get(entry.target, 0.0))
            entry.queued = True  # `tick` lines it up when the time is over
            return None
        return self._done(entry, None, said.as_exception())

    def _not_welcome(self, said: ErrorPayload, now: float) -> Effect | None:
        if said.code == "E_TOKEN_INVALID":  # a kernel that was started again has made another one
            return Effect("greet", error=said.as_exception())
        if said.code == "E_PRINCIPAL_BUSY":
            self._busy_since = self._busy_since or now
            if now - self._busy_since < BUSY_S:
                return None  # `tick` says hello again
        self.phase = "closed"
        return Effect("over", error=said.as_exception())

    def _welcomed(self, welcome: Welcome, now: float) -> Effect:
        if welcome.version != VERSION:
            self.phase = "closed"
            return Effect("over", error=GoondanError("E_VERSION", f"the kernel speaks version {welcome.version}"))
        self.phase, self.welcome, self._busy_since = "ready", welcome, None
        self._window = max(1, welcome.credit)
        for entry in self._outbox.values():  # the broker says anew what stands still
            _set_clock(entry, False, now)
        return Effect("ready")

    def _line_up(self) -> None:
        self._waiting = deque(entry for entry in self._outbox.values() if entry.queued)
        self._control = sum(entry.frame["type"] != "event" for entry in self._waiting)

    def _release(self, entry: Entry) -> None:
        if entry.costs:
            entry.costs = False
            self._in_use -= 1


def _set_clock(entry: Entry, held: bool, now: float) -> None:
    """Let its time stand still, or run again."""
    if entry.held_since is not None and entry.expires is not None:
        entry.expires += now - entry.held_since
    entry.held_since = now if held else None
