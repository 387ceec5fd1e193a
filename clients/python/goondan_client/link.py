"""The connection of a client: machine.py with a socket, a clock and files, in an event loop of asyncio.

libzmq's descriptor. It signals only once, and each send or receive may use the signal up. So whoever was woken receives
until nothing is left, and the socket is asked again after each send.

What one turn of the loop wants to send leaves together: frames that leave one by one wake the broker each time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import zmq
import zmq.backend
from msgspec import Raw

from goondan_client.errors import GoondanError
from goondan_client.files import Place, read_blob, remove_blob, touch_blob
from goondan_client.frames import INLINE, MAX_EVENT, MAX_RECEIVED, Frame, Welcome, check_reference, decode
from goondan_client.machine import Done, Effect, Entry, Greet, Machine, News, Reconnect, Refused, Welcomed

#: How often deadlines, hellos and silence are looked at (seconds); and when there is nothing to wait for.
TICK_S: Final = 0.1
REST_TICK_S: Final = 2.0
#: So many frames are handled before timers and other descriptors get their turn.
FRAMES: Final = 128
#: So many frames leave before the turn of the loop ends.
BURST: Final = 24
#: How soon a send is tried again that libzmq did not take (seconds).
AGAIN_S: Final = 0.005
#: How long acknowledgements may take to leave at the end (milliseconds).
LINGER_MS: Final = 300
_OPTIONS: Final = (
    (zmq.LINGER, 0),
    (zmq.IMMEDIATE, 1),
    (zmq.PROBE_ROUTER, 1),
    (zmq.RECONNECT_IVL, 20),
    (zmq.SNDHWM, 8192),
    (zmq.RCVHWM, 8192),
    (zmq.MAXMSGSIZE, MAX_RECEIVED),
)
# Plain integers: pyzmq's enums cost a look-up on every call.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_RCVMORE: Final = int(zmq.RCVMORE)

T = TypeVar("T")


class Link:
    """One connection to a kernel, which survives the kernel. Use it in the loop that was running at `open` only."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._run_dir = ""
        self.machine = Machine(os.urandom(6).hex(), os.getpid())
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._socket: zmq.Socket[bytes] | None = None
        self._fd = -1
        self._reading = False
        self._scheduled = False
        self._retry: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._welcomed: asyncio.Future[Welcome] | None = None
        #: Frames that were dropped because they were none, or had several parts.
        self.bad_frames = 0

    # --- life

    async def open(self, timeout: float) -> Welcome:
        """Connect and be welcomed. Raises GoondanError: E_KERNEL_NOT_RUNNING, E_BROKER_UNTRUSTED, or a refusal."""
        self._loop = asyncio.get_running_loop()
        self._run_dir = self._place.run_dir()
        self._context = zmq.Context(io_threads=1)
        self._welcomed = self._loop.create_future()
        self._connect()
        self._tick()
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._welcomed)
        except TimeoutError:
            message = f"no welcome from the kernel in {self._run_dir} within {timeout:g} s"
            raise GoondanError("E_KERNEL_NOT_RUNNING", message, "`gdn ps` shows what runs.") from None
        finally:
            if self.machine.phase != "ready":
                self._end(0)

    async def close(self) -> None:
        """Leave. What is unanswered raises E_LINK_CLOSED; what was accepted goes on in the kernel."""
        if self._socket is None:
            return
        self._flush()
        self._fail(GoondanError("E_LINK_CLOSED", "the connection was closed before the answer came", "Connect again."))
        self._end(LINGER_MS)
        await self._loop.run_in_executor(None, self._context.term)

    def _end(self, linger: int) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._disconnect(linger)
        if not linger:
            self._context.term()

    # --- requests

    @property
    def welcome(self) -> Welcome:
        """The newest welcome. Raises GoondanError E_LINK_CLOSED before the first one."""
        if self.machine.welcome is None:
            raise GoondanError("E_LINK_CLOSED", "the kernel was not connected to yet")
        return self.machine.welcome

    def submit(
        self, frame: Frame, deadline: float | None, listener: Callable[[Frame], None] | None = None
    ) -> tuple[Entry, asyncio.Future[Frame]]:
        """Send a request until it is answered. The future gets the answering frame, or raises GoondanError."""
        loop = self._loop
        waiter: asyncio.Future[Frame] = loop.create_future()
        now = loop.time()
        entry = Entry(frame, waiter, None if deadline is None else now + deadline + 1.0, listener)
        rested = self.machine.rests
        self.machine.submit(entry, now)
        if rested:
            self._tick_soon(TICK_S)
        self._flush_soon()
        return entry, waiter

    def forget(self, entry: Entry) -> bool:
        """Nobody waits for a request any more. Whether the kernel may have it."""
        return self.machine.forget(entry) and entry.sent

    def in_thread(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Have a thread do file work."""
        return self._loop.run_in_executor(None, work, *arguments)

    # --- the socket

    def _connect(self) -> None:
        self.machine.connected(self._loop.time())
        socket = self._socket = self._context.socket(zmq.DEALER)
        for option, value in _OPTIONS:
            socket.setsockopt(option, value)
        # The class of pyzmq below its Python layer: the layer costs twice as much as the call.
        self._send = zmq.backend.Socket.send.__get__(socket)
        self._receive = zmq.backend.Socket.recv.__get__(socket)
        self._option = zmq.backend.Socket.get.__get__(socket)
        socket.connect(f"ipc://{self._run_dir}/clients.sock")
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._turn)
        self._flush_soon()

    def _disconnect(self, linger: int) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        self._loop.remove_reader(self._fd)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        socket.close(linger=linger)

    def _flush_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn_once)

    def _turn_once(self) -> None:
        self._scheduled = False
        self._turn()

    def _turn(self) -> None:
        """Send what is to be sent, handle what has come, and send what that has caused."""
        self._flush()
        if self._stopped():
            return
        option, receive, machine = self._option, self._receive, self.machine
        for _ in range(FRAMES):
            if not option(_EVENTS) & _POLLIN:
                break
            data = receive(_NOBLOCK)
            if option(_RCVMORE):
                while option(_RCVMORE):
                    receive(_NOBLOCK)
                self.bad_frames += 1
                continue
            if data:
                self._handle(data)
            if self._stopped():
                return
            if len(machine.outgoing) >= BURST:
                self._flush()
        else:
            self._flush_soon()
        if machine.outgoing:
            self._flush()
            self._flush_soon()  # a send may have used the signal up

    def _stopped(self) -> bool:
        """Whether nothing may be received now."""
        return self._socket is None or self._reading

    def _flush(self) -> None:
        outgoing = self.machine.outgoing
        if not outgoing or self._socket is None or self._retry is not None:
            return
        send = self._send
        try:
            while outgoing:
                send(outgoing[0], _NOBLOCK)
                outgoing.popleft()
        except zmq.Again:
            self._retry = self._loop.call_later(AGAIN_S, self._try_again)
        self._flush_soon()

    def _try_again(self) -> None:
        self._retry = None
        self._turn()

    # --- what comes

    def _handle(self, data: bytes) -> None:
        try:
            frame = decode(data)
            if frame.blob is not None and self.machine.awaits(frame):
                self._reading = True
                self._loop.create_task(self._read(frame))
                return
            effect = self.machine.receive(frame, self._loop.time())
        except GoondanError:
            self.bad_frames += 1
            return
        if effect is not None:
            self._perform(effect)

    async def _read(self, frame: Frame) -> None:
        """Read the payload of an answer. Meanwhile nothing else is received, so frames keep their order."""
        error: GoondanError | None = None
        try:
            check_reference(frame)
            if frame.blob is not None:
                frame.payload = Raw(await self.in_thread(read_blob, self.welcome.blobs, frame.blob))
        except GoondanError as refused:
            error = refused
        self._reading = False
        effect = self.machine.receive(frame, self._loop.time())
        if isinstance(effect, Done) and error is not None:
            effect = Done(effect.entry, None, error)
        if effect is not None:
            self._perform(effect)
        self._turn()

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Done):
            self._settle(effect)
        elif isinstance(effect, News):
            effect.entry.listener(effect.frame)
        elif isinstance(effect, Greet):
            self._greet(effect)
        elif isinstance(effect, Welcomed):
            if self._welcomed is not None and not self._welcomed.done():
                self._welcomed.set_result(effect.welcome)
            self._touch()
        elif isinstance(effect, Reconnect):
            self._disconnect(0)
            with suppress(GoondanError):  # none runs now; one may be started in the same place
                self._run_dir = self._place.run_dir()
            self._connect()
        elif isinstance(effect, Refused):
            self._refuse(effect.error)

    def _settle(self, done: Done) -> None:
        entry: Entry = done.entry
        waiter: asyncio.Future[Frame] = entry.waiter
        if done.error is not None and self.machine.welcome is not None and self.machine.welcome.blobs is not None:
            for blob in (entry.frame.blob, *(part.blob for part in entry.frame.files or ())):
                if blob is not None:  # refused: nobody else deletes it
                    remove_blob(self.machine.welcome.blobs, blob.file)
        if waiter.done():
            return
        if done.error is not None:
            waiter.set_exception(done.error)
        elif done.frame is not None:
            waiter.set_result(done.frame)

    def _touch(self) -> None:
        repeated, self.machine.repeated = self.machine.repeated, []
        folder = self.welcome.blobs
        if folder is not None:
            for frame in repeated:
                for blob in (frame.blob, *(part.blob for part in frame.files or ())):
                    if blob is not None:
                        touch_blob(folder, blob.file)

    def _greet(self, greet: Greet) -> None:
        try:
            token = self._place.token(self._run_dir)
        except GoondanError as error:
            self._refuse(error)
            return
        if greet.refused is not None and token == self.machine.token:
            self._refuse(greet.refused)
            return
        self.machine.hello(token, self._loop.time())
        self._flush()

    def _refuse(self, error: GoondanError) -> None:
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(error)
        self._fail(error)
        self._disconnect(0)

    def _fail(self, error: GoondanError) -> None:
        for entry in self.machine.close():
            if not entry.waiter.done():
                entry.waiter.set_exception(error)
                entry.waiter.exception()  # seen: when nobody waits any more, the loop must not log it

    # --- time

    def _tick(self) -> None:
        if self._socket is None:
            return
        for effect in self.machine.tick(self._loop.time()):
            self._perform(effect)
        self._tick_soon(REST_TICK_S if self.machine.rests else TICK_S)
        if self.machine.outgoing:
            self._turn()

    def _tick_soon(self, seconds: float) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._ticker = self._loop.call_later(seconds, self._tick)


def goes_by_file(payload: memoryview, welcome: Welcome) -> bool:
    """Whether the payload of an event is too large for its frame. Raises GoondanError E_FRAME_TOO_LARGE."""
    limit = MAX_EVENT if welcome.blobs is not None else 2 * INLINE - (64 << 10)
    if len(payload) > limit:
        raise GoondanError("E_FRAME_TOO_LARGE", f"a message of {len(payload)} bytes, limit {limit}")
    return len(payload) > INLINE and welcome.blobs is not None
