"""The broker's sockets: receive, let the router decide, send. Nothing is decided here.

A plain wait-and-drain loop (docs/design/wire.md section 6). A wake-up serves up to a quota of frames of every class.
`transport/` has the connections.

Rules.
- Every class gets at most QUOTA frames a round, control first, so that no class starves another. Within a class,
  whoever was served goes to the end.
- Sends never block. A peer over its limit is given up and has to say hello again.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Container, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from goondan.kernel.broker.instance_folders import WorkerThread
from goondan.kernel.broker.routing.router import Router
from goondan.kernel.broker.state.bus import Staged
from goondan.kernel.broker.state.entities import AGENTS, CLASSES, CLIENTS, CONTROL, TOOLS
from goondan.kernel.broker.state.records import Journal
from goondan.kernel.broker.transport import Transport
from goondan.schemas.system import blob_files, startup
from goondan.schemas.system.users import TOOLHOST_UID
from goondan.schemas.text.visible import visible_line
from goondan.schemas.transport import SOCKETS, chosen
from goondan.schemas.wire.blobs import KEEP_S
from goondan.schemas.wire.tokens import TokenClass

#: How often the keeper looks for files that nobody refers to (seconds).
SWEEP_S: Final = 300.0


#: Root of this machine, or of this user namespace. It can become any user, so refusing it would keep nobody out.
_ROOT: Final = 0


def users_of(cls: TokenClass) -> frozenset[int]:
    """The users that may connect to the socket of a class: our own user and root. For tool hosts also the user that
    they become.
    """
    users = {_ROOT, os.geteuid()}
    return frozenset(users | {TOOLHOST_UID} if cls == "toolhost" else users)


#: Frames that one class may bring in one round. With this quota a control ping waits 10 ms at worst.
QUOTA: Final = 64
#: Frames that leave together. One by one each wakes its receiver anew; all at the end leave it nothing to do meanwhile.
BURST: Final = 24
#: How often the router looks at its clocks (seconds).
TICK_S: Final = 0.2
#: How often refusals for lack of room are logged (seconds), and for how many roots: a flood must not fill the log.
REFUSALS_S: Final = 10.0
REFUSALS_SHOWN: Final = 5
#: How long queued bytes may take to leave at the end (seconds).
LINGER_S: Final = 0.5
#: Messages that may wait for a peer, and of a peer, where the transport counts messages: times their size and the
#: peers of a class it is the worst case. Credit keeps honest peers far below.
HIGH_WATER: Final = {CONTROL: 4096, AGENTS: 1024, TOOLS: 8192, CLIENTS: 512}


class BrokerLoop:
    """Owns the four sockets. Use it only in the thread that made it."""

    def __init__(self, router: Router, journal: Journal, run_dir: str) -> None:
        self._router = router
        self._bus = router.bus
        self._known = router.bus.presence.connections
        self._journal = journal
        self._run_dir = run_dir
        self._epoll = select.epoll()
        self._transport = _transport(chosen(), self._epoll, self._bus.counters, self._known)
        self._blobs = None if self._bus.blobs is None else blob_files.BlobFolder(self._bus.blobs)
        self._deletes = WorkerThread("blobs")
        self._next_sweep = clock()  # the first one finds what an earlier kernel left
        self._next_report = 0.0
        #: Batches that the journal has not settled yet, in order.
        self._unsettled: deque[list[Staged]] = deque()
        self._oldest: list[Staged] | None = None  # of them, at the last tick
        #: Whether the journal would use a pause. Asked after what lets it fall behind.
        self._behind = False
        self._stop = False
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def bind(self) -> None:
        """Bind all sockets. The caller holds the kernel's lock: a second bind would steal the paths silently."""
        for cls, name in enumerate(CLASSES):
            path = f"{self._run_dir}/{SOCKETS[name]}"
            self._transport.listen(path, users_of(name), HIGH_WATER[cls])
            if name == "toolhost":
                startup.admit_toolhost(path)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        self._make_ready()
        for fd in (self._wake_r, self._journal.wake_fd()):
            if fd is not None:
                self._epoll.register(fd, select.EPOLLIN)
        self._tick(now := clock())  # what a part loads beforehand is there before anybody is served
        next_tick = now + TICK_S
        bus, due = self._bus, self._transport.due
        while not self._stop:
            self._wait(now, next_tick)
            now = clock()
            for cls, waits in enumerate(due):
                if waits:
                    self._drain(cls, now)
            if bus.staged or self._unsettled:
                self._commit(now)
            if now >= next_tick:
                next_tick = now + TICK_S
                self._tick(now)

    def _make_ready(self) -> None:
        """Signals wake the loop, and the garbage collector seldom stops it."""
        signal.set_wakeup_fd(self._wake_w)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # The router's own structures live long; a full collection in the middle of a round costs milliseconds.
        gc.freeze()
        gc.set_threshold(100_000, 50, 50)
        gc.enable()  # kernel/start.py turned it off

    def _wait(self, now: float, next_tick: float) -> None:
        """Sleep until there is something to do. `now`: when this round began."""
        transport = self._transport
        # Acting on settled decisions may stage new ones. Those must not wait until something else happens.
        wait = 0.0 if self._bus.staged or now >= next_tick or any(transport.due) else next_tick - now
        if self._behind:
            if transport.wait(0, now):
                return
            if wait:
                self._journal.catch_up()
                self._behind = self._journal.is_behind()
        transport.wait(wait, now)

    def _tick(self, now: float) -> None:
        """The work that is done a few times a second, whatever else happens."""
        self._transport.tick(now)
        self._router.tick(now)
        self._flush(now)
        self._look_at_disk(now)
        self._journal.catch_up()
        self._report_faults()
        for notice in self._bus.notices:
            print(visible_line(notice), file=sys.stderr, flush=True)
        self._bus.notices.clear()
        self._report_refusals(now)
        if self._blobs is not None:
            self._tidy(self._blobs, now)

    def _look_at_disk(self, now: float) -> None:
        """Note since when the oldest decision waits for the disk."""
        oldest = self._unsettled[0] if self._unsettled else None
        if oldest is not self._oldest:
            self._oldest, self._bus.disk_since = oldest, None if oldest is None else now

    def close(self) -> None:
        """Tell the peers, let what is queued leave, free the paths."""
        self._router.shut_down(round(LINGER_S * 1000))
        self._flush(clock())
        self._journal.close()
        self._transport.close(LINGER_S)
        self._epoll.close()
        for name in SOCKETS.values():
            with suppress(FileNotFoundError):
                os.unlink(f"{self._run_dir}/{name}")

    # --- one round

    def _drain(self, cls: int, now: float) -> None:
        """Handle up to QUOTA messages of one class. The frames to send are sent in bursts."""
        messages = self._transport.receive(cls, QUOTA)
        handle, known, out = self._router.receive, self._known[cls].get, self._bus.out
        for ident, data in messages:
            connection = known(ident)
            if connection is None:
                self._router.stranger(cls, ident, data, now)
            else:
                handle(connection, data, now)
            if len(out) >= BURST:
                self._flush(now)
        self._flush(now)

    def _commit(self, now: float) -> None:
        """Journal the staged decisions, and act on those that are durable."""
        bus = self._bus
        if bus.staged:
            batch, bus.staged = bus.staged, []
            self._journal.append([staged.item for staged in batch])
            self._unsettled.append(batch)
        for refused in self._journal.settled():
            self._router.settle(self._unsettled.popleft(), now, refused)
        self._behind = self._journal.is_behind()
        self._flush(now)

    def _tidy(self, folder: blob_files.BlobFolder, now: float) -> None:
        """Remove large payloads that nobody needs any more. Now and then, look for files that their owners left."""
        blobs = self._bus.mailbox.blobs
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            self._deletes.do(partial(folder.sweep, blobs.referenced() | self._journal.files(), KEEP_S))
        if blobs.removable:
            files, blobs.removable = blobs.removable, []
            self._deletes.do(partial(folder.remove, files))

    def _report_faults(self) -> None:
        """Write exceptions that are bugs of ours to the log of the process, with their places in the code."""
        faults, self._bus.faults = self._bus.faults, []
        if not faults:
            return
        import traceback  # not imported by a broker without bugs

        for fault in faults[:10]:
            self._bus.counters["internal_errors"] += 1
            traceback.print_exception(fault)

    def _report_refusals(self, now: float) -> None:
        """Now and then, write refusals for lack of room to the log of the process."""
        if self._bus.refusals and now >= self._next_report:
            self._next_report = now + REFUSALS_S
            for (root, quota, what), times in self._bus.refusals.most_common(REFUSALS_SHOWN):
                line = f"E_OVERLOADED: root {root[:100]!r} was refused {what} {times} times (quota: {quota})"
                print(line, file=sys.stderr, flush=True)
            self._bus.refusals.clear()

    # --- sending

    def _flush(self, now: float) -> None:
        out = self._bus.out
        while True:
            gone = self._transport.send(out)
            out.clear()  # in place: the parts of the router hold this very list
            if not gone:
                return
            for cls, ident in gone:  # what the router says of it is sent as well
                self._router.unreachable(cls, ident, now)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop = True


def _transport(name: str, epoll: select.epoll, counters: Counter[str], known: Sequence[Container[bytes]]) -> Transport:
    """The transport of that name. `known`: for each class the routing ids of the connections that have said hello."""
    if name == "native":
        from goondan.kernel.broker.transport.native import NativeTransport

        return NativeTransport(epoll, counters)
    from goondan.kernel.broker.transport.libzmq import LibzmqTransport

    return LibzmqTransport(epoll, counters, known)


#: The broker's clock: CLOCK_BOOTTIME in seconds, comparable between processes and across suspend.
clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
