"""What one jail uses: what Linux counts, and what was seen of it. The watch's thread and the loop read it.

Source: docs/design/sandbox.md section 4.
"""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from goondan.schemas.bundle.launch import Limits
from goondan.toolhost.policy import limits
from goondan.toolhost.privileges.powers import Powers
from goondan.toolhost.watch import procfs
from goondan.toolhost.watch.keeper import Keeper

#: File times are those of the last clock tick (seconds).
_TICK_S: Final = 0.02


class JailUsage:
    """What one jail uses."""

    def __init__(
        self, granted: Limits, places: Sequence[str], keeper: Keeper, niceness: int, powers: Powers, trusted: int = 0
    ) -> None:
        """`places` are the folders that it may write to. `keeper` is what Linux does for its limits. `niceness` is what
        it was started with.

        `trusted`: so many of its processes are ours, and do not count.
        """
        self.limits = granted
        self.keeper = keeper
        #: The names of the calls that it runs, pending work included; None when nothing needs to be looked at.
        self.running: Callable[[], Sequence[str] | None] = lambda: None
        #: The first processes of calls that have processes of their own.
        self.sandboxes: Callable[[], Mapping[str, int]] = dict
        self.cpu = limits.CpuMeter()
        #: The most memory that was seen (bytes).
        self.peak = 0
        #: Where its processes show; None until that is known.
        self.view: procfs.View | None = None
        #: When it began, as file times have it (seconds since 1970).
        self.since = time.time() - _TICK_S
        #: The folders that it may write to, by file system; then a meter of what it has written there at most.
        self.devices: dict[int, list[str]] = {}
        self.disks: dict[int, limits.DiskMeter] = {}
        #: Whether it keeps descriptors in flight, by file system that is looked at.
        self.kept: dict[int, limits.KeptDescriptors] = {}
        #: What names showed of a jail that may keep descriptors in flight, by file system.
        self.undecided: dict[int, limits.Growth] = {}
        #: When it may be walked again, on the monotonic clock (seconds).
        self.walk_again_at = 0.0
        #: Whether its last process is gone.
        self.closed = False
        #: The limit that Linux or the watch ended it for; None so far.
        self.met: str | None = None
        #: Whether it is being ended.
        self.ending = False
        #: Whether one of its calls has ended.
        self.answered = False
        self._trusted = trusted
        self._powers = powers
        self._frozen = False
        self._pace = limits.Pace()
        self._niceness = niceness
        self._last: tuple[float | None, int | None] = (None, None)
        # It protects descriptors from being closed while they are read. It is held for single reads and never for a
        # look or a walk, because the loop waits for it.
        self._lock = threading.Lock()
        self._hidden = limits.HiddenMemory(0 if keeper.counts_memory else procfs.shared())
        self._kept_memory = limits.KeptDescriptors()
        for place in places:
            with suppress(OSError):
                self.devices.setdefault(os.stat(place).st_dev, []).append(place)

    def processes(self) -> list[procfs.Process]:
        """Its processes, if they must be looked at one by one; else none."""
        keeper = self.keeper
        uncounted = not (keeper.counts_memory and keeper.counts_processes and keeper.counts_cpu)
        if self.view is not None and (uncounted or len(self.sandboxes()) > 1):
            return procfs.processes(self.view)
        return []

    def cpu_s(self, there: Sequence[procfs.Process]) -> float:
        """Processor time so far (seconds): as the kernel counts it, or by its processes."""
        counted = self.counted_s()
        return sum(process.cpu_s for process in there) if counted is None else counted

    def counted_s(self) -> float | None:
        """The same as Linux alone counts it, None where it does not count. Raises OSError when the jail has ended."""
        with self._lock:
            if self.closed:
                raise OSError("the jail has ended")
            return self.keeper.cpu_s()

    def charge(self, there: Sequence[procfs.Process]) -> float:
        """Divide its processor time among the calls that run. Returns how much it is in all (seconds)."""
        trees = procfs.trees(list(there), self.sandboxes())
        seen = {call: sum(process.cpu_s for process in tree) for call, tree in trees.items()}
        total_s = self.cpu_s(there)
        self.cpu.charge(total_s, self.running() or (), seen)
        return total_s

    def usage(self, there: Sequence[procfs.Process]) -> limits.Usage:
        """What counts against its limits."""
        keeper = self.keeper
        memory, tasks = None, 0
        if there and self.view is not None and not keeper.counts_memory:
            memory = self._memory(self.view, list(there))
            self.peak = max(self.peak, memory)
        if not keeper.counts_processes:
            tasks = self._tasks(there)
        with self._lock:
            refused = keeper.refused()
        return limits.Usage(memory=memory, tasks=tasks, refused=refused, out_of_memory=keeper.out_of_memory())

    def _tasks(self, there: Sequence[procfs.Process]) -> int:
        return max(0, sum(process.threads for process in there) - self._trusted)

    def _memory(self, view: procfs.View, there: list[procfs.Process]) -> int:
        """Its memory as it is seen, and what it may hide in sockets if it keeps descriptors there (bytes)."""
        limit, sandboxes = self.limits.memory_mb * limits.MIB, list(self.sandboxes().values())
        found = procfs.memory(view, limit, there, self._powers.held_by, sandboxes)
        shared = procfs.shared()
        sockets: limits.InFlight | None = limits.InFlight()
        if found.size <= limit < found.size + self._hidden.most(shared, found.shared):
            found = procfs.memory(view, limit, there, self._powers.held_by, sandboxes, every_thread=True)
            sockets = procfs.still_in_flight(view, self.counted_s)
            if sockets is not None and not sockets.last:
                self._hidden.clear(shared, found.shared)
        if sockets is not None and self._kept_memory.look(time.monotonic(), sockets):
            found = procfs.memory(view, 0, there, self._powers.held_by, sandboxes, every_thread=True)
            # Each page once: what is seen is not hidden.
            return found.size + self._hidden.most(procfs.shared(), found.shared)
        return found.size

    def is_quick(self, total_s: float, now: float) -> bool:
        """Whether it holds nobody up, so that others need not be protected. `total_s`: processor time that it has
        used.
        """
        return self._pace.is_quick(total_s, now, answered=self.answered)

    def stand(self, niceness: int) -> None:
        """Give it the weight of a process of that niceness while processors are short. A change of one step is left
        out.
        """
        if self.ending or niceness == self._niceness or (niceness and abs(niceness - self._niceness) < 2):
            return
        if self._frozen:
            self._niceness = niceness  # from `thaw` on
        else:
            self._stand(niceness)

    def _stand(self, niceness: int) -> None:
        with suppress(OSError):  # the kernel takes ten changes a second from a user; the next look tries again
            self.keeper.stand(niceness)
            self._niceness = niceness

    def freeze(self) -> bool:
        """Stop all its processes until `thaw`. Returns whether that is possible.

        A process in a system call ends that call first, and gets the processor for it: it may hold a lock that the walk
        waits for, for instance a folder's.
        """
        if self.closed or not self.keeper.freeze():
            return False
        self._frozen = True
        if self._niceness:
            with suppress(OSError):
                self.keeper.stand(0)
        return True

    def urge(self) -> None:
        """Let it run like any program until the next look: something of ours waits for it."""
        if self._niceness and not self._frozen:
            self._stand(0)

    def thaw(self) -> None:
        """Let its processes go on."""
        self._frozen = False
        if self._niceness and not self.ending:
            with suppress(OSError):
                self.keeper.stand(self._niceness)
        self.keeper.thaw()

    def hasten(self) -> None:
        """It is being ended. Kill its processes one by one where they are quickly found, and give them the processor to
        die.

        Its first process is killed as well, and Linux then kills the others. But that waits until the first one gets a
        processor, which took a second among many jails that yield, and the others go on meanwhile.
        """
        if self.ending:
            return
        self.ending = True
        if self._niceness:
            self._stand(0)
        if self.keeper.lists_processes:
            self._kill(self.keeper.processes)
            self.keeper.thaw()

    def end(self, limit: str) -> None:
        """It has reached that limit: end all its processes, in the watch's thread."""
        self.met = limit
        self.hasten()
        if not self.keeper.lists_processes and (view := self.view) is not None:
            self._kill(view.members or (lambda: procfs.outer_processes(view)))

    def _kill(self, find: Callable[[], list[int]]) -> None:
        # bubblewrap's own outside of the jail ends with it, and says how
        procfs.signal_all(lambda: [pid for pid in find() if pid != self.keeper.session], signal.SIGKILL)

    def refused(self) -> bool:
        """Whether it has, or had, as many processes and threads as its limit allows."""
        with suppress(OSError):
            if self.closed or self.met is not None:  # who is being ended has fewer of them at each look
                return self.met == "processes"
            if self.keeper.counts_processes:
                with self._lock:
                    return self.keeper.refused()
            there = [] if self.view is None else procfs.processes(self.view)
            return self._tasks(there) >= self.limits.processes * limits.NEAR
        return False

    def limit_met(self) -> str | None:
        """The limit of the whole jail that was met according to its groups; None where nothing says so."""
        if self.closed:
            return self.met
        with suppress(OSError, ValueError, struct.error):
            return limits.exceeded(self.usage(()), self.limits)
        return None

    def seen(self) -> tuple[float | None, int | None]:
        """Processor time (seconds) and the peak of memory (bytes) of all its life, where the kernel counts them."""
        with suppress(OSError, ValueError, struct.error):
            self._last = self.counted_s(), self.keeper.peak_memory()
        return self._last

    def close(self) -> None:
        """The last process is gone: nothing is read from now on."""
        if self.closed:
            return
        self.met = self.met or self.limit_met()
        self.seen()
        with self._lock:
            self.closed = True
            self.keeper.close()
        self._powers.offload.remove(self.keeper.remove)
