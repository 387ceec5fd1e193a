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
from goondan_client.frames import MAX_RECEIVED, Frame, Welcome, check_reference, decode
from goondan_client.machine import GRACE_S, Effect, Entry, Machine

#: How often deadlines, hellos and silence are looked at (seconds).
TICK_S: Final = 0.1
#: So many frames are handled before timers and other descriptors get their turn.
FRAMES: Final = 128
#: So many frames leave before the turn of the loop ends.
BURST: Final = 24
#: How long acknowledgements may take to leave at the end (milliseconds).
LINGER_MS: Final = 300
_OPTIONS = {zmq.LINGER: 0, zmq.IMMEDIATE: 1, zmq.PROBE_ROUTER: 1, zmq.RECONNECT_IVL: 20, zmq.MAXMSGSIZE: MAX_RECEIVED}
# Plain integers: pyzmq's enums cost a look-up on every call.
_NOBLOCK, _EVENTS, _POLLIN, _RCVMORE = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)

T = TypeVar("T")


class Link:
    """One connection to a kernel, which survives the kernel. Use it in the loop that was running at `open` only."""

    def __init__(self, place: Place) -> None:
        self.machine = Machine(os.urandom(6).hex(), os.getpid())
        self.machine.phase = "closed"  # until `open`
        #: Frames that were dropped because they were none, or had several parts.
        self.bad_frames = 0
        self._place = place
        self._socket: zmq.Socket[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._scheduled = False

    # --- life

    async def open(self, timeout: float) -> None:
        """Connect and be welcomed. Raises GoondanError: E_KERNEL_NOT_RUNNING, E_BROKER_UNTRUSTED, or a refusal."""
        self._loop = asyncio.get_running_loop()
        self._run_dir = self._place.run_dir()
        self._welcomed: asyncio.Future[None] = self._loop.create_future()
        self._context = zmq.Context(io_threads=1)
        self.machine.phase = "absent"
        self._connect()
        self._tick()
        try:
            async with asyncio.timeout(timeout):
                await self._welcomed
        except TimeoutError:
            message = f"no welcome from the kernel in {self._run_dir} within {timeout:g} s"
            raise GoondanError("E_KERNEL_NOT_RUNNING", message, "`gdn ps` shows what runs.") from None
        finally:
            if not self.machine.rests:
                await self.close()

    async def close(self) -> None:
        """Leave. What is unanswered raises E_LINK_CLOSED; what was accepted goes on in the kernel."""
        self._flush()
        self._end(GoondanError("E_LINK_CLOSED", "the connection was closed before the answer came", "Connect again."))
        await self.in_thread(self._context.term)

    def _end(self, error: GoondanError) -> None:
        """It is over: every request raises this error."""
        for waiter in (self._welcomed, *(entry.waiter for entry in self.machine.close())):
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # seen: when nobody waits any more, the loop must not log it
        self._disconnect(LINGER_MS)

    # --- requests

    @property
    def welcome(self) -> Welcome:
        """The newest welcome. Raises GoondanError E_LINK_CLOSED before the first one."""
        if self.machine.welcome is None:
            raise GoondanError("E_LINK_CLOSED", "there is no connection to a kernel", "Use `async with connect()`.")
        return self.machine.welcome

    def submit(
        self, frame: dict[str, Any], deadline: float | None, listener: Callable[[Frame], None] | None = None
    ) -> tuple[Entry, asyncio.Future[Frame]]:
        """Send a request until it is answered. The future gets the answering frame, or raises GoondanError."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Frame] = loop.create_future()
        now = loop.time()
        entry = Entry(frame, waiter, None if deadline is None else now + deadline + GRACE_S, listener)
        try:
            self.machine.submit(entry, now)
        except GoondanError as error:
            self._settle(entry, None, error)
        else:
            self._flush_soon()
        return entry, waiter

    def in_thread(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Have a thread do what blocks."""
        return self._loop.run_in_executor(None, work, *arguments)

    # --- the socket

    def _connect(self) -> None:
        socket = self._socket = self._context.socket(zmq.DEALER)
        for option, value in _OPTIONS.items():
            socket.setsockopt(option, value)
        # The class of pyzmq below its Python layer: the layer costs twice as much as the call.
        self._send = zmq.backend.Socket.send.__get__(socket)
        self._receive = zmq.backend.Socket.recv.__get__(socket)
        self._option = zmq.backend.Socket.get.__get__(socket)
        socket.connect(f"ipc://{self._run_dir}/clients.sock")
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._turn)
        self.machine.connected(self._loop.time())
        self._flush_soon()

    def _disconnect(self, linger: int) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            self._loop.remove_reader(self._fd)
            socket.close(linger=linger)

    def _flush_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Send what is to be sent, handle what has come, and send what that has caused."""
        self._scheduled = False
        self._flush()
        option, receive, outgoing = self._option, self._receive, self.machine.outgoing
        for _ in range(FRAMES):
            if self._socket is None or self._reading or not option(_EVENTS) & _POLLIN:
                break
            data = receive(_NOBLOCK)
            if option(_RCVMORE):
                while option(_RCVMORE):
                    receive(_NOBLOCK)
                self.bad_frames += 1
            elif data:
                self._handle(data)
                if len(outgoing) >= BURST:
                    self._flush()
        else:
            self._flush_soon()
        self._flush()

    def _flush(self) -> None:
        """Hand over what is to be sent. What libzmq does not take goes with the next turn: at the latest the tick's."""
        outgoing = self.machine.outgoing
        with suppress(zmq.Again):
            while outgoing and self._socket is not None:
                self._send(outgoing[0], _NOBLOCK)
                outgoing.popleft()
                self._flush_soon()  # a send may have used the signal up

    # --- what comes

    def _handle(self, data: bytes) -> None:
        try:
            frame = decode(data)
            if frame.blob is not None and self.machine.awaits(frame):
                self._reading = self._loop.create_task(self._read(frame))  # meanwhile nothing else is received
            elif (effect := self.machine.receive(frame, self._loop.time())) is not None:
                self._perform(effect)
        except GoondanError:
            self.bad_frames += 1

    async def _read(self, frame: Frame) -> None:
        """Read the payload of an answer. What goes wrong is the answer then."""
        failed: GoondanError | None = None
        try:
            check_reference(frame)
            frame.payload = Raw(await self.in_thread(read_blob, self.welcome.blobs, frame.blob))
        except GoondanError as error:
            failed = error
        except Exception as error:  # no memory, for example
            failed = GoondanError("E_BLOB_UNAVAILABLE", f"the payload cannot be read: {type(error).__name__}")
        finally:
            self._reading = None
        effect = self.machine.receive(frame, self._loop.time())
        if effect is not None:
            self._perform(Effect(effect.what, effect.entry, effect.frame, failed))
        self._flush_soon()

    def _perform(self, effect: Effect) -> None:
        what, entry, error = effect.what, effect.entry, effect.error
        if entry is not None:
            if what == "done":
                self._settle(entry, effect.frame, error)
            elif entry.listener is not None:
                entry.listener(effect.frame)
        elif what == "greet":
            self._greet(error)
        elif what == "ready":
            for file in [file for frame in self.machine.repeated for file in _files_of(frame)]:
                touch_blob(self.welcome.blobs, file)
            self.machine.repeated.clear()
            if not self._welcomed.done():
                self._welcomed.set_result(None)
        elif what == "connect":
            self._disconnect(0)
            with suppress(GoondanError):  # none runs now; one may be started in the same place
                self._run_dir = self._place.run_dir()
            self._connect()
        elif error is not None:
            self._end(error)

    def _settle(self, entry: Entry, frame: Frame | None, error: GoondanError | None) -> None:
        # Refused: nobody else deletes its files. What is over for want of an answer may have been accepted.
        if error is not None and frame is None and error.code != "E_AGENT_TIMEOUT":
            for file in _files_of(entry.frame):
                remove_blob(self.welcome.blobs, file)
        if not entry.waiter.done():
            entry.waiter.set_result(frame) if error is None else entry.waiter.set_exception(error)

    def _greet(self, refused: GoondanError | None) -> None:
        try:
            token = self._place.token(self._run_dir)
            if refused is not None and token == self.machine.token:
                raise refused
            self.machine.hello(token, self._loop.time())
        except GoondanError as error:
            self._end(error)

    def _tick(self) -> None:
        for effect in self.machine.tick(self._loop.time()):
            self._perform(effect)
        if self._socket is not None:
            self._loop.call_later(TICK_S, self._tick)
            self._turn()


def _files_of(frame: dict[str, Any]) -> list[str]:
    """The files that a request has laid down."""
    parts = (*frame.get("files", ()), frame)
    return [part["blob"].file for part in parts if "blob" in part]
