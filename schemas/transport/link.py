"""The asyncio shell around peer.py: the kernel's own link to the bus, for agents, tool hosts and the CLI. Programs of
users take `goondan_client` (clients/python): this one is internal, and changes with the kernel.

The connection is a transport's (`transport/`). What one turn of the loop wants to send leaves together; what was read
together is handled together.

Large payloads. They go through files (blobs.py), which threads write and read. An entry waits in the peer until its
file is written. While a file is being read, nothing more is received. So frames keep their order, and only one payload
at a time is in memory.

Silence. A broker that says nothing while something is unanswered is pinged; after that the connection is made anew.

A new broker. The socket probes on every connection (an empty message), the broker answers E_HELLO_REQUIRED, and the
peer says hello. While there is no broker, nothing is sent.

The identity of the broker. On each new connection the link checks the place of the socket and the user of the process
that listens there (broker_identity.py), before it sends a byte.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Raw

from goondan.schemas.system import blob_files, broker_identity
from goondan.schemas.transport import TRANSPORTS, Transport, chosen, path_of
from goondan.schemas.wire import peer
from goondan.schemas.wire.blobs import INLINE_FRAME_BYTES, REFERENCES, check_reference, is_reference
from goondan.schemas.wire.codec import DECODE_ERRORS, MAX_RELAYED_BYTES, decode, encode_value
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Blob, ErrorPayload, Frame, Welcome

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


#: The most messages that wait for a broker that does not read. Credit keeps us far below it.
MAX_UNSENT: Final = 4096
#: The most frames of one wake-up, so that timers and other descriptors get their turn.
FRAMES_PER_WAKEUP: Final = 128
#: So many frames leave before the turn of the loop ends: their receivers need not wait for the end of a long turn.
BURST: Final = 24
#: How often deadlines and unanswered hellos are checked (seconds).
TICK_S: Final = 0.2
#: The same for a link that has waited for nothing for some time (seconds). A thousand idle agents that checked every
#: 0.2 s took half of a processor.
REST_TICK_S: Final = 5.0
#: How late a frame leaves that waits for the next one, when none comes (seconds): much sooner than traces are stored.
LATE_S: Final = 0.02


def boottime_ms() -> int:
    """CLOCK_BOOTTIME in milliseconds: the clock of `firstSentMs` and `startedMs`, the same for every process."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def boottime_us() -> int:
    """The same in microseconds: when a call passed where."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def transport_class(default: str = TRANSPORTS[0]) -> Callable[..., Transport]:
    """The chosen transport, imported: `default` where GOONDAN_TRANSPORT names none. Raises GoondanError E_USAGE."""
    if chosen(default) == "native":
        from goondan.schemas.transport.native import NativeTransport

        return NativeTransport
    from goondan.schemas.transport.libzmq import LibzmqTransport

    return LibzmqTransport


#: The callback of `start_call`: it gets the answering frame, or the error.
Done = Callable[[Frame | None, GoondanError | None], None]


class Link:
    """One connection to the broker. It survives a restart of the broker.

    - `on_frame` is called in the loop for every frame that is not an answer to a frame of ours. It must neither block
      nor raise. A frame whose large payload is not available has `blob` still set, and an ErrorPayload as its payload.
    - `held` gives at every hello what this process holds: fields of Hello by their names.
    - `on_unsent` gets frames that `send` took and whose large payloads could not be written.
    - `by_reference` False: this process has no access to the kernel's files, so its frames have at most 1 MiB.
    - `broker_uid` is the user of the broker. None: our own user.
    - `renew_token` is called before each hello but the first, because tokens end with a kernel that restarts.
    - `transport` is what connects it where GOONDAN_TRANSPORT says nothing; a class connects it in any case.
    - `token` may come later, with `start`: until then the link only connects.

    `closed` is done when the link is over. It has an exception when the broker refused the link or could not be
    trusted, otherwise None after `close`.
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        *,
        on_frame: Callable[[Frame], None],
        on_welcome: Callable[[Welcome], None] | None = None,
        on_unsent: Callable[[Frame, GoondanError], None] | None = None,
        on_late: Callable[[Frame], None] | None = None,
        incarnation: str | None = None,
        by_reference: bool = True,
        broker_uid: int | None = None,
        renew_token: Callable[[], str] | None = None,
        held: Callable[[], Mapping[str, Any]] = dict,
        transport: str | Callable[..., Transport] = TRANSPORTS[0],
    ) -> None:
        self.endpoint = endpoint
        self._transport_class = transport_class(transport) if isinstance(transport, str) else transport
        self._broker = broker_identity.BrokerIdentity(endpoint, broker_uid)
        self._on_frame = on_frame
        self._held = held
        self._on_welcome = on_welcome
        self._on_unsent = on_unsent
        self._on_late = on_late
        self._peer = peer.Peer(
            token,
            incarnation or os.urandom(6).hex(),
            pid=os.getpid(),
            started_ms=boottime_ms(),
            by_reference=by_reference,
            renews=renew_token is not None,
        )
        self._renew_token = renew_token
        self._blobs = BlobWork()
        self._paused = False
        self._transport = self._new_transport()
        self._open = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self._confirms = False  # an answer, in this turn
        self._outgoing: deque[bytes] = deque()
        self._ticker: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._tick_s = TICK_S
        self._welcomed: asyncio.Future[Welcome] | None = None
        #: What `connect` was given, and whether the broker has asked for hello before there was a token.
        self._on_asked: Callable[[], None] | None = None
        self._asked = False
        self.closed: asyncio.Future[None]
        self.bad_frames = 0
        #: When the last frame of the broker came, in the loop's time. 0.0: none came yet.
        self.heard_at = 0.0

    def _new_transport(self) -> Transport:
        return self._transport_class(
            path_of(self.endpoint),
            MAX_RELAYED_BYTES,
            admits=self._admits,
            on_messages=self._turn,
            on_writable=self._write,
            on_lost=self._lost,
        )

    # --- life

    def connect(self, on_asked: Callable[[], None] | None = None) -> asyncio.Future[Welcome]:
        """Connect. Without a token, `on_asked` is called when the broker asks for hello, which `start` says then.
        Returns the welcome that will come.

        Raises GoondanError E_BROKER_UNTRUSTED.
        """
        self._broker.is_there()
        loop = self._loop = asyncio.get_running_loop()
        self._on_asked = on_asked
        self.closed = loop.create_future()
        self._welcomed = loop.create_future()
        self._open = True
        self._transport.open(loop)
        return self._welcomed

    async def start(self, timeout_s: float = 10.0, token: str = "") -> Welcome:
        """Connect, if that has not happened yet, and say hello.

        Raises GoondanError: the broker's refusal, E_BROKER_UNTRUSTED, or E_KERNEL_NOT_RUNNING in time.
        """
        loop = asyncio.get_running_loop()
        if token:
            self._peer.token, self._peer.started_ms = token, boottime_ms()
        if (welcomed := self._welcomed) is None:
            welcomed = self.connect()
        elif self._asked:
            self._greet(loop)
        self._ticker = loop.call_later(TICK_S, self._tick)
        try:
            # Not wait_for: in Python 3.11 it forgets to be cancelled when the welcome comes that very moment.
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(welcomed)
        except TimeoutError:
            await self.close(0)
            raise fail("E_KERNEL_NOT_RUNNING", f"no welcome from {self.endpoint} within {timeout_s:g} s") from None
        except GoondanError:
            await self.close(0)
            raise

    async def close(self, linger_s: float = 1.0) -> None:
        """End the link. Queued bytes get `linger_s` seconds to leave. Unanswered frames raise E_LINK_CLOSED."""
        if not self._open:
            return
        self._open = False
        self._blobs.close()
        if self._ticker is not None:
            self._ticker.cancel()
        self._fail_all(self._peer.close())
        if linger_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(linger_s):
                    await self._transport.drain(self._outgoing)
        self._transport.close()
        if not self.closed.done():
            self.closed.set_result(None)
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.cancel()

    @property
    def welcome(self) -> Welcome:
        """The newest welcome."""
        if self._peer.welcome is None:
            raise fail("E_LINK_CLOSED", "the link has not been welcomed yet")
        return self._peer.welcome

    @property
    def ready(self) -> bool:
        """Whether the broker has welcomed us and the connection is there."""
        return self._peer.phase == "ready"

    @property
    def incarnation(self) -> str:
        """The random name of this process on the bus."""
        return self._peer.incarnation

    def accepted(self) -> frozenset[str]:
        """The ids of frames that the broker has accepted and not answered."""
        return self._peer.accepted()

    # --- sending

    def send(self, frame: Frame, *, with_next: bool = False) -> bool:
        """Send without keeping a copy. False when the broker is not there, or takes no frames. True is no receipt.
        `with_next`: nobody waits for it, so it wakes nobody on its way: it leaves with the next frame, or LATE_S later.

        Raises FrameError E_FRAME_TOO_LARGE.
        """
        if self._peer.phase != "ready" or len(self._outgoing) >= MAX_UNSENT:
            return False
        if not frame.id:
            frame.id = self._peer.next_id()
        data = encode_value(frame)
        if len(data) > INLINE_FRAME_BYTES and self._peer.goes_by_reference(frame, len(data)):
            self._send_reference(frame)
            return True
        if with_next and self._loop is not None:
            self._outgoing.append(data)
            self._late = self._late or self._loop.call_later(LATE_S, self._send_late)
        else:
            self._queue(data)
        return True

    def _send_late(self) -> None:
        self._late = None
        self._schedule()

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        """Send until it is answered by an `ack`, a `reply` or an `error` (which raises GoondanError)."""
        return self._submit_for_future("post", frame)

    def start_call(self, frame: Frame, done: Done) -> None:
        """Send a `tool.call` until its `tool.result` is here. `done` is called once, with the result or the error.

        A callback costs one object and one turn of the loop less than a future. Set `first_sent_ms` when the call
        repeats an older one. `done` must neither block nor raise. It is not called after `forget`.
        """
        if frame.first_sent_ms is None:
            frame.first_sent_ms = boottime_ms()
        self._submit("call", frame, done)

    def ask(
        self, frame: Frame, patience_s: float | None = None, on_accepted: Callable[[Frame], None] | None = None
    ) -> asyncio.Future[Frame]:
        """Send an `event` with `reply_to` until its answering event is here. The answer is acknowledged at once.
        `on_accepted` gets the first `ack` of the broker; it must neither block nor raise.

        After `patience_s` seconds (None: the frame's deadline) the asker waits no more: the future gets an `ack` that
        is `asynchronous`, and the answer comes as an event. An answer that was on its way is still the result.
        """
        return self._submit_for_future("ask", frame, patience_s, on_accepted)

    def ask_caller(self, frame: Frame, done: Done) -> None:
        """Send a `tool.ask` until its `tool.answer` is here, or an `error`. `done` is called as in `start_call`."""
        self._submit("tool ask", frame, done)

    def forget(self, frame_id: str) -> None:
        """Stop sending a frame, and cancel its future."""
        entry = self._peer.forget(frame_id)
        if entry is not None and entry.kind not in ("call", "tool ask"):
            entry.waiter(None, None)

    def _submit_for_future(
        self,
        kind: peer.Kind,
        frame: Frame,
        patience_s: float | None = None,
        on_accepted: Callable[[Frame], None] | None = None,
    ) -> asyncio.Future[Frame]:
        waiter: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._submit(kind, frame, partial(_settle_future, waiter), patience_s, on_accepted)
        return waiter

    def _submit(
        self,
        kind: peer.Kind,
        frame: Frame,
        done: Done,
        patience_s: float | None = None,
        on_accepted: Callable[[Frame], None] | None = None,
    ) -> None:
        loop = self._loop
        if loop is None:
            raise fail("E_LINK_CLOSED", "the link has not been started")
        if self._tick_s != TICK_S:
            self._stir(loop)
        data = self._peer.submit(kind, frame, done, loop.time(), patience_s, on_accepted)
        if data is not None:
            self._queue(data)
            return
        for entry in self._peer.take_unwritten():
            self._write_payload(entry)
        if self._peer.phase == "ready":
            self._queue_waiting()

    # --- large payloads

    def _write_payload(self, entry: peer.OutboxEntry) -> None:
        frame = entry.unwritten
        if frame is None:
            return
        # Accepted events must be as durable as the kernel promises. Calls and results end with the processes anyway.
        durable = frame.type in ("event", "ack") and self.welcome.durability == "power"

        def done(blob: Blob | None, error: GoondanError | None) -> None:
            if blob is not None and self._peer.written(entry, blob):
                self._queue_waiting()
            elif blob is not None:
                self._remove_file(blob)
            elif self._peer.forget(entry.id) is not None and error is not None:
                self._settle(peer.Settled(entry, None, error.info))

        self._write_file(frame, durable, done)

    def _send_reference(self, frame: Frame) -> None:
        def done(blob: Blob | None, error: GoondanError | None) -> None:
            if blob is None:
                if self._on_unsent is not None and error is not None:
                    self._on_unsent(frame, error)
            elif self._peer.phase == "ready":
                self._queue(peer.encode_reference(frame, blob))

        self._write_file(frame, False, done)

    def _write_file(
        self, frame: Frame, durable: bool, done: Callable[[Blob | None, GoondanError | None], None]
    ) -> None:
        payload, folder = memoryview(frame.payload), self._peer.blobs
        self._blobs.run(lambda: _at(folder).write(payload, sync=durable), done)

    def _remove_file(self, blob: Blob) -> None:
        folder = self._peer.blobs
        self._blobs.run(lambda: _at(folder).remove([blob.file]), _ignore)

    def _take_reference(self, frame: Frame, blob: Blob) -> bool:
        """Deliver a frame when its payload is here, and nothing else before it. False when nobody waits for the
        frame.
        """
        if not self._peer.awaits(frame):
            if REFERENCES.get(frame.type) and is_reference(blob):
                self._remove_file(blob)
            return False
        self._paused = True
        self._transport.pause()

        def done(payload: bytes | None, error: GoondanError | None) -> None:
            loop = self._loop
            if not self._open or loop is None:
                return
            self._paused = False
            self._transport.resume()
            if payload is not None:
                frame.payload, frame.blob = Raw(payload), None
                outcome = self._peer.receive(frame, loop.time())
            else:
                info = (error or fail("E_BLOB_MISSING", "the payload cannot be had")).info
                outcome = self._peer.unreadable(frame, info, loop.time())
            if outcome is not None:
                self._perform(outcome, loop)
            self._turn()

        folder = self._peer.blobs

        def read() -> bytes:
            check_reference(frame)
            return _at(folder).read(blob, remove=REFERENCES[frame.type])

        self._blobs.run(read, done)
        return True

    def _queue(self, data: bytes) -> None:
        """Send in this turn of the loop, in bursts with the other frames of the turn. Frames that leave one by one wake
        the broker each time (docs/design/wire.md section 6).
        """
        self._outgoing.append(data)
        if len(self._outgoing) >= BURST:
            self._write()
        if not self._scheduled:
            self._schedule()

    def _queue_waiting(self) -> None:
        """Queue entries that waited for credit, for an overloaded target or for the broker, and may be sent now."""
        loop = self._loop
        if loop is None:
            return
        now = loop.time()
        while (entry := self._peer.sendable(now)) is not None:
            if (blob := entry.blob) is not None:
                self._blobs.run(partial(_touch, self._peer.blobs, blob), _ignore)
            self._queue(entry.data)

    def _write(self) -> None:
        """Send the queue, as far as the broker takes it now. The rest goes out when it takes more."""
        self._transport.send(self._outgoing)

    # --- receiving

    def _schedule(self) -> None:
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Write the queue, handle the frames that were read, and write the frames that they caused. That an answer has
        come is confirmed in the next turn: who waited for it goes on first, before the broker's work on that takes the
        core.
        """
        self._scheduled = True  # what is queued from here on leaves with this turn
        outgoing, transport = self._outgoing, self._transport
        more = False
        try:
            if outgoing:
                transport.send(outgoing)
            more = True  # also when a handler raises: what was read and what is queued wait for a turn
            more = self._receive(transport)
            if self._peer.waiting and self._peer.phase == "ready":
                self._queue_waiting()
            more = more or self._confirms
            if outgoing and not self._confirms:
                transport.send(outgoing)
        finally:
            self._scheduled = self._confirms = False
            if more:
                self._schedule()

    def _receive(self, transport: Transport) -> bool:
        """Handle the frames that were read. Whether there may be more of them than one turn takes."""
        handle = self._handle
        for _ in range(FRAMES_PER_WAKEUP):
            if self._paused or not self._open:  # a payload is being read, or the link is closed
                return False
            data = transport.take()
            if data is None:
                return False
            handle(data)
        return True

    def _admits(self, fd: int) -> bool:
        """Whether the broker is at the other end of a new connection. When somebody else is, the link is over."""
        try:
            return self._broker.is_there() and self._broker.speaks(fd)
        except GoondanError as error:
            self._refuse(error.info)
            return False

    def _lost(self) -> None:
        """The connection is over. What must arrive is sent again after the next welcome."""
        self._outgoing.clear()
        self._asked = False
        self._peer.lost()

    def _greet(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say hello to the broker at the other end of this connection."""
        if not self._peer.token:
            self._asked = True
            if self._on_asked is not None:
                self._on_asked()
            return
        if self._tick_s != TICK_S:
            self._stir(loop)
        self._outgoing.clear()  # frames that must arrive are in the outbox
        try:
            if self._renew_token is not None and self._peer.welcome is not None:
                self._peer.token = self._renew_token()
            self._queue(self._peer.hello(loop.time(), **self._held()))
        except GoondanError as error:
            self._refuse(error.info)

    def _handle(self, data: bytes) -> None:
        loop = self._loop
        if loop is None or not data:
            return
        try:
            now = self.heard_at = loop.time()
            frame = decode(data, MAX_RELAYED_BYTES)
            if frame.blob is not None and self._take_reference(frame, frame.blob):
                return
            outcome = self._peer.receive(frame, now)
        except (GoondanError, *DECODE_ERRORS):
            self.bad_frames += 1
            return
        if outcome is not None:
            self._perform(outcome, loop)

    def _perform(self, outcome: peer.Outcome, loop: asyncio.AbstractEventLoop) -> None:
        if isinstance(outcome, peer.Settled):
            self._settle(outcome)
        elif isinstance(outcome, peer.Deliver):
            self._on_frame(outcome.frame)
        elif isinstance(outcome, peer.Accepted):
            outcome.entry.on_accepted(outcome.frame)
        elif isinstance(outcome, peer.Reply):
            self._queue(outcome.data)
            if outcome.late is not None and self._on_late is not None:
                self._on_late(outcome.late)
        elif isinstance(outcome, peer.Greet):
            self._greet(loop)
        elif isinstance(outcome, peer.Welcomed):
            self._welcome(outcome.welcome)
        elif isinstance(outcome, peer.LinkRefused):
            self._refuse(outcome.error)

    def _settle(self, settled: peer.Settled) -> None:
        entry: peer.OutboxEntry = settled.entry
        if settled.reply is not None:
            self._queue(settled.reply)
            self._confirms = True
        if settled.error is not None and entry.blob is not None and not entry.accepted:
            self._remove_file(entry.blob)  # refused or given up: nobody else removes the file
        entry.waiter(settled.frame, None if settled.error is None else GoondanError(settled.error))

    def _welcome(self, welcome: Welcome) -> None:
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_result(welcome)
        if self._on_welcome is not None:
            self._on_welcome(welcome)
        self._queue_waiting()

    def _refuse(self, info: ErrorPayload) -> None:
        error = GoondanError(info)
        self._transport.close()
        self._fail_all(self._peer.close())
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(error)
            self.closed.set_result(None)
        elif not self.closed.done():
            self.closed.set_exception(error)

    def _tick(self) -> None:
        loop = self._loop
        if loop is None or not self._open:
            return
        # At rest, each check makes the pause before the next one longer. So news after a short rest is found soon.
        self._tick_s = min(4 * self._tick_s, REST_TICK_S) if self._peer.rests else TICK_S
        self._ticker = loop.call_later(self._tick_s, self._tick)
        settled, greet = self._peer.tick(loop.time())
        for item in settled:
            self._settle(item)
        if greet:
            self._greet(loop)
        self._turn()
        self._probe(loop)

    def _probe(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look whether the broker was silent for too long. A link that reads a payload hears nothing."""
        if self._paused or not self._open:
            return
        silence = self._peer.silence(self.heard_at, loop.time())
        if silence == "ping" and self._peer.phase == "ready":
            # Without an id: a broker that does not know this connection asks for hello.
            self._queue(encode_value(Frame("ping")))
        elif silence == "connect":
            self._transport.close()
            self._lost()
            self._transport = self._new_transport()
            self._transport.open(loop)

    def _stir(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check often again: there is something to wait for."""
        self._tick_s = TICK_S
        if self._ticker is not None:
            self._ticker.cancel()
        self._ticker = loop.call_later(TICK_S, self._tick)

    def _fail_all(self, entries: list[peer.OutboxEntry]) -> None:
        for entry in entries:
            entry.waiter(None, fail("E_LINK_CLOSED", "the link was closed before the answer came"))


def _settle_future(waiter: asyncio.Future[Frame], answer: Frame | None, error: GoondanError | None) -> None:
    """What came for a future. Neither an answer nor an error: nobody waits any more."""
    if waiter.done():
        return
    if answer is not None:
        waiter.set_result(answer)
    elif error is None:
        waiter.cancel()
    else:
        waiter.set_exception(error)
        if error.info.code == "E_LINK_CLOSED":
            with suppress(BaseException):
                waiter.exception()  # marks it as seen: when nobody waits any more, the loop must not log it


#: Payloads that one link reads or writes at once: the disk is the limit, and each is in memory.
_THREADS: Final = 2

T = TypeVar("T")


class BlobWork:
    """The file work of one link. Callbacks come in the loop that was running when the work was asked for."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def close(self) -> None:
        """Begin nothing more; what runs ends by itself, and nobody is told."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def run(self, work: Callable[[], T], done: Callable[[T | None, GoondanError | None], None]) -> None:
        """Do file work in a thread; `done` gets its result or its error."""
        if self._closed:
            return
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor  # most processes never need one

            self._pool = ThreadPoolExecutor(_THREADS, "blobs")
        loop = asyncio.get_running_loop()

        def finished(future: asyncio.Future[T]) -> None:
            if self._closed or future.cancelled():
                return
            error = future.exception()
            if error is None:
                done(future.result(), None)
            elif isinstance(error, GoondanError):
                done(None, error)
            else:
                done(None, fail("E_INTERNAL", f"the payload's file met an unexpected {type(error).__name__}"))

        loop.run_in_executor(self._pool, work).add_done_callback(finished)


def _at(folder: str | None) -> blob_files.BlobFolder:
    if folder is None:
        raise fail("E_BLOB_UNAVAILABLE", "this process has no access to the folder of large payloads")
    return blob_files.BlobFolder(folder)


def _touch(folder: str | None, blob: Blob) -> None:
    _at(folder).touch(blob)


def _ignore(result: object, error: GoondanError | None) -> None:
    """Best effort: the sweep finds what is left."""
