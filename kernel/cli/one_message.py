"""A message to a running kernel: its event, the token that it is sent with, and an answer without an event loop.

To import asyncio takes a quarter of a `gdn call`. `ask` needs none, and knows only the way on which nothing happens:
connection, hello, event, answer, acknowledgement. When anything else comes, or no answer within PATIENCE_S, it lets the
connection go. The command then asks under the same event id over a Session, and the broker takes that for a repeat.
What the Session has to know is noted (Attempt): a signal that came behind the event, and whether the event is accepted.

Source: docs/design/commands.md section 4; docs/design/wire.md section 5.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple, Self

from goondan.kernel import lock, rundir
from goondan.kernel.paths import sha256
from goondan.schemas.system import broker_identity, secrecy
from goondan.schemas.text.times import rfc3339
from goondan.schemas.transport import SOCKETS, chosen
from goondan.schemas.wire import peer
from goondan.schemas.wire.codec import DECODE_ERRORS, MAX_RELAYED_BYTES, decode, encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import AgentEvent, Answer, FilePart, Frame, ReplyTo
from goondan.schemas.wire.zmtp import GREETING, Handshake, Messages, ZmtpError, head, ready

#: To import libzmq and to start its threads takes an eighth of a command's processor time.
TRANSPORT: Final = "native"
#: The AgentEvent.type of a message that a person sends.
USER_MESSAGE: Final = "user.message"
#: How long `ask` waits (seconds). A call that starts a jail takes a tenth; what takes longer has time for a Session.
PATIENCE_S: Final = 1.0
#: The most bytes that are read at once.
READ_BYTES: Final = 64 << 10


class Message(NamedTuple):
    """A message to an instance of an agent."""

    #: The agent.
    agent: str
    #: The instance.
    instance: str
    #: What it says: a text of a person, or the payload of its kind.
    input: Any
    #: The AgentEvent.type.
    kind: str = USER_MESSAGE
    #: The id of its event. None: a new one.
    event_id: str | None = None
    #: Where tools work. None: in the instance's own directory.
    workdir: str | None = None
    #: The trace that it belongs to. None: a new one.
    trace_id: str | None = None
    #: The span of that trace that it comes from. None: nobody has said it.
    parent_span_id: str | None = None
    #: The pictures and PDFs beside it, as `Session.lay_down` returned them.
    files: Sequence[FilePart] = ()


def event_frame(message: Message, event_id: str, timeout_s: float | None) -> Frame:
    """The event of a message; the broker gives up after `timeout_s` seconds. Raises GoondanError E_USAGE for what
    no frame can hold: a text that is not UTF-8, an integer of more than 64 bits.
    """
    agent, key, kind, files = message.agent, message.instance, message.kind, [*message.files]
    try:
        said = encode_value([kind, message.input, [file.blob.digest for file in files]])
    except (UnicodeEncodeError, OverflowError):
        raise fail("E_USAGE", "what was given is not UTF-8, or has an integer of more than 64 bits") from None
    event = AgentEvent(id=event_id, type=kind, created_at=rfc3339(time.time()), input=message.input, instance_key=key)
    return Frame(
        "event",
        to=agent,
        instance_key=key,
        event_id=event_id,
        trace_id=message.trace_id,
        parent_span_id=message.parent_span_id,
        workdir=message.workdir,
        deadline_ms=None if timeout_s is None else max(1, int(timeout_s * 1000)),
        files=files or None,
        digest=sha256(said),  # without the time: --event-id may be given once more
        payload=to_raw(event),
    )


def client_token(state_dir: str) -> tuple[str, str] | None:
    """The kernel's runtime directory, and the token that it keeps there for clients. None when no kernel runs.

    Raises GoondanError E_KERNEL_LOST.
    """
    record = lock.read_record(state_dir)
    if record is None:
        return None
    try:
        with rundir.open_existing(record.run_dir) as directory:
            return directory.path, rundir.read_private(directory, rundir.CLIENT_TOKEN)
    except OSError as error:
        raise fail("E_KERNEL_LOST", f"the kernel's token cannot be read: {error.strerror}") from None


class _SomethingElse(Exception):
    """It did not go the usual way."""


class Attempt:
    """A context for `ask`, and what it leaves to whoever goes on. From `note` on, the first SIGINT or SIGTERM is noted:
    the event has to be cancelled. The next one does what it does without this.
    """

    def __init__(self) -> None:
        #: The signal that was noted.
        self.number: signal.Signals | None = None
        #: Whether the broker has accepted the event.
        self.accepted = False
        #: `ask` waits, and gives up at the signal.
        self.waits = False
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> Self:
        return self

    def note(self) -> None:
        """The event is about to be sent."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(before := signal.getsignal(number)):  # not one that is ignored
                self._before[number] = before
                signal.signal(number, self._came)

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            self._before[number](number, frame)
            return
        self.number = signal.Signals(number)
        if self.waits:
            raise _SomethingElse


def ask(state_dir: str, pidfd: int, message: Message, event_id: str, attempt: Attempt) -> Answer | None:
    """Send a message to the kernel of this state, which is gone when `pidfd` is readable. Returns the answer; None when
    it must be asked for over a Session, under the same id.
    """
    if chosen(TRANSPORT) != TRANSPORT:
        return None
    secrecy.close_memory()
    frame = event_frame(message, event_id, None)
    frame.reply_to = ReplyTo("client", event_id)
    try:
        found = client_token(state_dir)
        if found is None:
            return None
        run_dir, token = found
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            return _Exchange(connection, pidfd, f"{run_dir}/{SOCKETS['client']}", token, attempt).ask(frame)
    except (_SomethingElse, OSError, ZmtpError, GoondanError, *DECODE_ERRORS):
        return None


class _Exchange:
    """One event and its answer over a connection."""

    def __init__(self, connection: socket.socket, pidfd: int, path: str, token: str, attempt: Attempt) -> None:
        self._connection = connection
        self._attempt = attempt
        self._pidfd = pidfd
        self._until = time.monotonic() + PATIENCE_S
        identity = broker_identity.BrokerIdentity(f"ipc://{path}")
        connection.settimeout(PATIENCE_S)
        connection.connect(path)
        if not (identity.is_there() and identity.speaks(connection.fileno())):
            raise _SomethingElse
        started_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        self._peer = peer.Peer(token, os.urandom(6).hex(), pid=os.getpid(), started_ms=started_ms)
        self._messages = Messages(MAX_RELAYED_BYTES)
        self._sent = False

    def ask(self, frame: Frame) -> Answer | None:
        """Raises _SomethingElse, OSError, ZmtpError, GoondanError, DECODE_ERRORS."""
        self._greet()
        self._peer.submit("ask", frame, None, time.monotonic())
        answered = None
        try:
            while answered is None:
                answered = self._handle(self._next())
        finally:
            self._attempt.accepted = bool(self._peer.accepted())
        return from_raw(answered.payload, AgentEvent).answer

    def _greet(self) -> None:
        handshake = Handshake({b"ROUTER", b"DEALER"})
        self._connection.sendall(GREETING + ready(b"DEALER"))
        while not handshake.feed(self._read()):
            pass
        self._messages.feed(handshake.rest)
        self._send(b"")  # the probe: the broker asks for hello

    def _handle(self, frame: Frame) -> Frame | None:
        """Do what a frame asks for. Returns the answer."""
        now = time.monotonic()
        match self._peer.receive(frame, now):
            case peer.Greet() if not self._sent:
                self._send(self._peer.hello(now))
            case peer.Welcomed():
                entry = self._peer.sendable(now)
                if entry is None or not entry.data:
                    raise _SomethingElse
                self._sent = True
                self._attempt.note()
                self._send(entry.data)
            case peer.Settled(frame=answered, error=None, reply=reply) if answered is not None:
                if reply is not None:
                    self._send(reply)
                return answered
            case peer.Reply(data=data, late=None):
                self._send(data)
            case None:
                pass
            case _:
                raise _SomethingElse
        return None

    def _next(self) -> Frame:
        """The next frame that the broker sends."""
        while True:
            found = self._messages.take(1)
            if self._messages.answers:
                self._connection.sendall(b"".join(self._messages.answers))
                self._messages.answers.clear()
            if not found:
                self._messages.feed(self._read())
            elif found[0]:  # an empty one is no frame
                frame = decode(found[0], MAX_RELAYED_BYTES)
                if frame.blob is not None:
                    raise _SomethingElse
                return frame

    def _send(self, data: bytes) -> None:
        self._connection.sendall(head(len(data)) + data)

    def _read(self) -> bytes:
        attempt, left = self._attempt, max(0.0, self._until - time.monotonic())
        attempt.waits = True  # first, or a signal that comes now would wait, too
        try:
            if attempt.number is not None:
                raise _SomethingElse
            readable = select.select([self._connection.fileno(), self._pidfd], [], [], left)[0]
        finally:
            attempt.waits = False
        data = self._connection.recv(READ_BYTES) if self._connection.fileno() in readable else b""
        if not data:
            raise _SomethingElse
        return data
