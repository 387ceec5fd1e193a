"""The broker's sockets: receive, let the router decide, send. Nothing is decided here.

A plain wait-and-drain loop (docs/design/wire.md section 6). A wake-up serves up to a quota of frames from every socket.
The loop waits on libzmq's descriptors itself: `zmq_poll` asks every socket twice per wake-up, about twenty system calls
with four sockets. This has a price: libzmq signals on a descriptor only once, and any call on the socket may use the
signal up. So a socket that was sent on is checked before the loop sleeps.

Rules.
- Every socket gets at most QUOTA frames a round, control first, so that no class starves another.
- Sends never block (ROUTER_MANDATORY, NOBLOCK). Frames that a peer cannot take wait here, in order, within a limit. A
  peer over its limit is dropped and has to say hello again. Live news do not wait, they are dropped.
- A message has exactly two parts, routing id and frame. A peer that sends more parts could make one of them look like
  somebody else's routing id, so the parts are counted (RCVMORE). This costs as much as a receive. It is not done for
  peers with a random routing id of 16 bytes: a further part of a longer message never equals such an id, so it is
  handled as a stranger's. There the parts are counted again, and the next message is read correctly.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import zmq
import zmq.backend

from kernel.broker.blob_keeper import SWEEP_S, BlobKeeper
from kernel.broker.bus import Lossy
from kernel.broker.entities import AGENTS, CLASSES, CLIENTS, CONTROL, TOOLS, Staged
from kernel.broker.journal.interface import Journal
from kernel.broker.peer_users import admit_only, users_of
from kernel.broker.router import Router
from schemas.codec import MAX_FRAME_BYTES
from schemas.system.startup import admit_toolhost
from schemas.tokens import SOCKETS
from schemas.visible import visible_line

#: Frames that one socket may bring in one round. With this quota a control ping waits 10 ms at worst.
QUOTA: Final = 64
#: Messages that are sent together. With 64 open calls, 1 is a fifth slower than this, and 64 no faster (decisions/016).
BURST: Final = 8
#: How often the router looks at its clocks (seconds).
TICK_S: Final = 0.2
#: How soon the loop tries again to send to a peer that could take no more (seconds).
BLOCKED_RETRY_S: Final = 0.002
#: Bytes that may wait for one peer, and for all: an agent or a host that stops reading must not grow the broker.
MAX_BLOCKED_PEER: Final = 32 << 20
MAX_BLOCKED_ALL: Final = 256 << 20
#: How often refusals for lack of room are logged (seconds), and for how many roots: a flood must not fill the log.
REFUSALS_S: Final = 10.0
REFUSALS_SHOWN: Final = 5
#: How long queued bytes may take to leave at the end (milliseconds).
LINGER_MS: Final = 500

#: Messages libzmq may buffer per peer, in each direction: HWM × frame size × peers is the worst case, so the classes
#: with many peers have small ones. Credit keeps honest peers far below.
_HWM: Final = {CONTROL: 4096, AGENTS: 1024, TOOLS: 8192, CLIENTS: 512}

_Receive = Callable[[int], bytes]
_Option = Callable[[int], int]

#: The length of the routing ids that links choose at random.
ROUTING_ID_BYTES: Final = 16
# Plain integers: pyzmq's enums cost a look-up on every call.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_RCVMORE: Final = int(zmq.RCVMORE)
#: Why a socket is due: its descriptor signalled (or its quota was used up), or a send may have used the signal up.
_SIGNALLED: Final = 2
_TOUCHED: Final = 1
_MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)


class BrokerLoop:
    """Owns the four ROUTER sockets. Use it only in the thread that made it."""

    def __init__(self, router: Router, journal: Journal, run_dir: str) -> None:
        self._router = router
        self._bus = router.bus
        self._known = router.bus.presence.connections
        self._journal = journal
        self._run_dir = run_dir
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._senders: list[Callable[[bytes, int], object]] = []
        self._receivers: list[tuple[_Receive, _Option]] = []
        self._blocked: dict[tuple[int, bytes], deque[bytes]] = {}
        self._blocked_bytes = 0
        self._keeper = None if self._bus.blobs is None else BlobKeeper(self._bus.blobs)
        self._next_sweep = clock()  # the first one finds what an earlier kernel left
        self._next_report = 0.0
        #: Batches that the journal has not settled yet, in order.
        self._unsettled: deque[list[Staged]] = deque()
        #: For each class: why its socket must be checked before the loop may sleep, or 0.
        self._due = [_SIGNALLED] * len(CLASSES)
        self._stop = False
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def bind(self) -> None:
        """Bind all sockets. The caller holds the kernel's lock: a second bind would steal the paths silently."""
        for cls, name in enumerate(CLASSES):
            socket = self._context.socket(zmq.ROUTER)
            for option, value in (
                (zmq.ROUTER_MANDATORY, 1),
                (zmq.LINGER, LINGER_MS),
                (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
                (zmq.SNDHWM, _HWM[cls]),
                (zmq.RCVHWM, _HWM[cls]),
            ):
                socket.setsockopt(option, value)
            admit_only(socket, users_of(name))
            path = f"{self._run_dir}/{SOCKETS[name]}"
            with suppress(FileNotFoundError):
                os.unlink(path)
            socket.bind(f"ipc://{path}")
            os.chmod(path, 0o600)
            if name == "toolhost":
                admit_toolhost(path)
            self._sockets.append(socket)
            # pyzmq's own classes below the Python layer: the layer adds options we do not use, at a third of the cost.
            self._senders.append(zmq.backend.Socket.send.__get__(socket))
            self._receivers.append((zmq.backend.Socket.recv.__get__(socket), zmq.backend.Socket.get.__get__(socket)))

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        self._make_ready()
        epoll, classes = self._poller()
        due = self._due
        next_tick = clock() + TICK_S
        while not self._stop:
            for fd, _ in self._wait(epoll, next_tick):
                cls = classes.get(fd)
                if cls is not None:
                    due[cls] = _SIGNALLED
            now = clock()
            for cls, reason in enumerate(due):
                if reason:
                    due[cls] = 0
                    self._drain(cls, reason, now)
            self._commit(now)
            if self._blocked:
                self._retry(now)
            if now >= next_tick:
                next_tick = now + TICK_S
                self._tick(now)

    def _make_ready(self) -> None:
        """Signals wake the loop, and the garbage collector seldom stops it."""
        signal.set_wakeup_fd(self._wake_w)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # The router's own structures live long; a full collection in the middle of a round costs milliseconds.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 50)
        gc.enable()  # kernel/start.py turned it off

    def _poller(self) -> tuple[select.epoll, dict[int, int]]:
        """What the loop sleeps on, and which descriptor is whose: by descriptor of a socket, its class."""
        epoll = select.epoll()
        classes = {int(socket.getsockopt(zmq.FD)): cls for cls, socket in enumerate(self._sockets)}
        for fd in (*classes, self._wake_r, self._journal.wake_fd()):
            if fd is not None:
                epoll.register(fd, select.EPOLLIN)
        return epoll, classes

    def _wait(self, epoll: select.epoll, next_tick: float) -> list[tuple[int, int]]:
        """Sleep until there is something to do. Returns the descriptors that are ready, each with its events."""
        journal = self._journal
        # Acting on settled decisions may stage new ones. Those must not wait until something else happens.
        wait = 0.0 if any(self._due) or self._bus.staged else max(0.0, next_tick - clock())
        ready = epoll.poll(0) if journal.is_behind() else []
        if not ready:
            if wait and journal.is_behind():
                journal.catch_up()
            ready = epoll.poll(min(wait, BLOCKED_RETRY_S) if self._blocked else wait)
        return ready

    def _tick(self, now: float) -> None:
        """The work that is done a few times a second, whatever else happens."""
        self._router.tick(now)
        self._flush(now)
        self._journal.catch_up()
        self._report_faults()
        self._report_notices()
        self._report_refusals(now)
        self._report_decisions()
        if self._keeper is not None:
            self._tidy(self._keeper, now)

    def close(self) -> None:
        """Tell the peers, let what is queued leave, free the paths."""
        self._router.shut_down(LINGER_MS)
        self._flush(clock())
        self._journal.close()
        for socket in self._sockets:
            socket.close(linger=LINGER_MS)
        self._context.term()
        for name in SOCKETS.values():
            with suppress(FileNotFoundError):
                os.unlink(f"{self._run_dir}/{name}")

    # --- one round

    def _drain(self, cls: int, reason: int, now: float) -> None:
        """Handle up to QUOTA messages of one socket. The frames to send are sent in bursts.

        Frames that are sent one by one would wake libzmq's own thread each time (docs/decisions/016).
        """
        receive, option = self._receivers[cls]
        handle, known, out = self._router.receive, self._known[cls].get, self._bus.out
        # An empty receive costs twice as much as this question, and usually there is one message or none.
        if reason == _TOUCHED and not option(_EVENTS) & _POLLIN:
            return
        try:
            for count in range(QUOTA):
                if count == 1 and not option(_EVENTS) & _POLLIN:
                    break
                ident = receive(_NOBLOCK)
                connection = known(ident)
                if connection is None:
                    self._receive_stranger(cls, ident, receive, option, now)
                else:
                    data = receive(_NOBLOCK)
                    if len(ident) != ROUTING_ID_BYTES and option(_RCVMORE):
                        self._discard(receive, option)
                        continue
                    handle(connection, data, now)
                    if len(out) >= BURST:
                        self._flush(now)
            else:
                self._due[cls] = _SIGNALLED  # its quota is used; there may be more
        except zmq.Again:
            pass
        if out:
            self._flush(now)

    def _receive_stranger(self, cls: int, ident: bytes, receive: _Receive, option: _Option, now: float) -> None:
        """A message with an unknown routing id. It may also be a further part of a longer message."""
        if not option(_RCVMORE):
            self._bus.counters["frames_multipart"] += 1
            return
        data = receive(_NOBLOCK)
        if option(_RCVMORE):
            self._discard(receive, option)
            return
        self._router.stranger(cls, ident, data, now)

    def _discard(self, receive: _Receive, option: _Option) -> None:
        self._bus.counters["frames_multipart"] += 1
        while option(_RCVMORE):
            receive(_NOBLOCK)

    def _commit(self, now: float) -> None:
        """Journal the staged decisions, and act on those that are durable."""
        bus = self._bus
        if bus.staged:
            batch, bus.staged = bus.staged, []
            self._journal.append([staged.item for staged in batch])
            self._unsettled.append(batch)
        if self._unsettled:
            for settled in self._journal.settled():
                self._router.settle(self._unsettled.popleft(), now, settled.refused)
            self._flush(now)

    def _tidy(self, keeper: BlobKeeper, now: float) -> None:
        """Remove large payloads that nobody needs any more. Now and then, look for files that their owners left."""
        blobs = self._bus.mailbox.blobs
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            keeper.sweep(blobs.referenced() | self._journal.files())
        if blobs.removable:
            files, blobs.removable = blobs.removable, []
            keeper.remove(files)

    def _report_faults(self) -> None:
        """Write exceptions that are bugs of ours to the log of the process, with their places in the code."""
        faults, self._bus.faults = self._bus.faults, []
        if not faults:
            return
        import traceback  # not imported by a broker without bugs

        for fault in faults[:10]:
            self._bus.counters["internal_errors"] += 1
            traceback.print_exception(fault)

    def _report_notices(self) -> None:
        """Write messages for operators to the log of the process."""
        notices, self._bus.notices = self._bus.notices, []
        for notice in notices:
            print(visible_line(notice), file=sys.stderr, flush=True)

    def _report_refusals(self, now: float) -> None:
        """Now and then, write refusals for lack of room to the log of the process."""
        if self._bus.refusals and now >= self._next_report:
            self._next_report = now + REFUSALS_S
            for (root, quota, what), times in self._bus.refusals.most_common(REFUSALS_SHOWN):
                line = f"E_OVERLOADED: root {root[:100]!r} was refused {what} {times} times (quota: {quota})"
                print(line, file=sys.stderr, flush=True)
            self._bus.refusals.clear()

    def _report_decisions(self) -> None:
        """Write the decisions of people to the log of the process."""
        decisions, self._bus.audit = self._bus.audit, []
        for line in decisions:
            print(visible_line(line), file=sys.stderr, flush=True)

    # --- sending

    def _flush(self, now: float) -> None:
        out = self._bus.out
        senders, blocked, due = self._senders, self._blocked, self._due
        for cls, ident, data in out:
            if blocked and (cls, ident) in blocked:
                self._block(cls, ident, data, now)
                continue
            send = senders[cls]
            if not due[cls]:
                due[cls] = _TOUCHED
            try:
                send(ident, _MORE)
                send(data, _NOBLOCK)
            except zmq.Again:
                self._block(cls, ident, data, now)
            except zmq.ZMQError as error:
                self._failed(error, cls, ident, now)
        # In place: the parts of the router hold this very list. What a failed send added was sent by the same loop.
        out.clear()

    def _failed(self, error: zmq.ZMQError, cls: int, ident: bytes, now: float) -> None:
        if error.errno != errno.EHOSTUNREACH:
            raise error
        self._bus.counters["peers_unreachable"] += 1
        self._unblock(cls, ident)
        self._router.unreachable(cls, ident, now)

    def _block(self, cls: int, ident: bytes, data: bytes, now: float) -> None:
        """A peer takes no more: keep its frames in order, or drop a peer with too many frames."""
        if isinstance(data, Lossy):
            self._bus.counters["live_dropped"] += 1
            return
        queue = self._blocked.setdefault((cls, ident), deque())
        queue.append(data)
        self._blocked_bytes += len(data)
        size = sum(map(len, queue)) if len(queue) % 64 == 0 or len(data) > 65536 else 0
        if size > MAX_BLOCKED_PEER or self._blocked_bytes > MAX_BLOCKED_ALL:
            self._bus.counters["peers_dropped_full"] += 1
            self._unblock(cls, ident)
            self._router.unreachable(cls, ident, now)

    def _unblock(self, cls: int, ident: bytes) -> None:
        queue = self._blocked.pop((cls, ident), None)
        if queue is not None:
            self._blocked_bytes -= sum(map(len, queue))

    def _retry(self, now: float) -> None:
        for (cls, ident), queue in list(self._blocked.items()):
            send = self._senders[cls]
            self._due[cls] = _SIGNALLED
            try:
                while queue:
                    send(ident, _MORE)
                    send(queue[0], _NOBLOCK)
                    self._blocked_bytes -= len(queue.popleft())
                self._blocked.pop((cls, ident), None)
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                self._failed(error, cls, ident, now)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop = True


def clock() -> float:
    """The broker's clock: CLOCK_BOOTTIME in seconds, comparable between processes and across suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
