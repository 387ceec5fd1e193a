"""What one jail uses: its control groups, its counter, what was seen of it. Read by the watch's thread and by the loop.

Source: sandbox.md section 4.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from schemas.launch import Limits
from toolhost.limits import look
from toolhost.limits.decide import MIB, NEAR, CpuMeter, DiskMeter, Usage, exceeded
from toolhost.limits.groups import Group

#: The scheduler's niceness of a jail's session, and of one that uses much: 0 is what everybody else has.
JAIL_NICENESS: Final = 10
_LOW: Final = 19
#: File times are those of the last clock tick (seconds).
_TICK_S: Final = 0.02


def _nothing() -> None:
    return None


class Account:
    """One jail's. `tenant` is the owner's. `running` says what is to be watched: the names of the calls that it runs,
    pending work included; None when nothing needs to be looked at.
    """

    def __init__(
        self, limits: Limits, places: Sequence[str], group: Group | None, counter: int | None, trusted: int = 0
    ) -> None:
        """`places` are the folders that it may write to; `counter` a descriptor that counts its processor time.

        `trusted`: so many of its processes are ours, and count for nothing.
        """
        self.limits = limits
        self._trusted = trusted
        self.tenant: Any = None
        self.running: Callable[[], Sequence[str] | None] = _nothing
        self.cells: Callable[[], Mapping[str, int]] = dict  # first processes of calls that have some of their own
        self.cpu = CpuMeter()
        self.peak = 0  # bytes
        self.view: look.View | None = None  # None until it is known
        self.since = time.time() - _TICK_S
        self.devices: dict[int, list[str]] = {}
        self.disks: dict[int, DiskMeter] = {}
        self.walk_again_at = 0.0  # on the monotonic clock (seconds)
        self.lock = threading.Lock()  # nothing is closed while it is read
        self.closed = False
        self.met: str | None = None  # the limit that the kernel had met when the jail ended
        self.session = 0  # a process of its session here, whose group for the scheduler can be asked to yield
        self._yields = False
        self._last: tuple[float | None, int | None] = (None, None)
        self._group = group
        self._counter = counter
        for place in places:
            with suppress(OSError):
                self.devices.setdefault(os.stat(place).st_dev, []).append(place)

    def processes(self) -> list[look.Process]:
        """Its processes, if they must be looked at one by one."""
        tree = None if self._group is None else self._group.tree
        counted = self._counter is not None or (tree is not None and tree.cpuacct is not None)
        uncounted = tree is None or tree.memory is None or tree.pids is None or not counted
        if self.view is not None and (uncounted or len(self.cells()) > 1):
            return look.processes(self.view)
        return []

    def cpu_s(self, there: Sequence[look.Process]) -> float:
        """Processor time so far (seconds): by its group, its counter, or its processes."""
        if self._group is not None and (counted := self._group.cpu_s()) is not None:
            return counted
        if self._counter is not None:
            return float(struct.unpack("=Q", os.read(self._counter, 8))[0]) / 1e9
        return sum(process.cpu_s for process in there)

    def charge(self, there: Sequence[look.Process]) -> None:
        """Share its processor time out among the calls that run."""
        trees = look.trees(list(there), self.cells())
        seen = {call: sum(process.cpu_s for process in tree) for call, tree in trees.items()}
        self.cpu.charge(self.cpu_s(there), self.running() or (), seen)

    def usage(self, there: Sequence[look.Process]) -> Usage:
        """What is to be held against its limits."""
        group = self._group
        memory = None
        if there and self.view is not None and (group is None or group.tree.memory is None):
            memory = look.memory(self.view, self.limits.memory_mb * MIB, list(there), self.cells().values())
            self.peak = max(self.peak, memory)
        counts = group is None or group.tree.pids is None
        return Usage(
            memory=memory,
            tasks=max(0, sum(process.threads for process in there) - self._trusted) if counts else 0,
            refused=group is not None and group.refused(),
            out_of_memory=group is not None and group.out_of_memory(),
        )

    def yield_to_others(self, yields: bool) -> None:
        """Whether other jails, and whoever else wants them, come first while processors are short."""
        if yields == self._yields:
            return
        self._yields = yields
        with suppress(OSError):  # the kernel takes ten changes a second from a user; the next look tries again
            if self._group is not None and self._group.tree.cpu is not None:
                self._group.yield_to_others(yields)
            elif self.session:
                with open(f"/proc/{self.session}/autogroup", "w", encoding="ascii") as niceness:
                    niceness.write(str(_LOW if yields else JAIL_NICENESS))
            return
        self._yields = not yields

    @property
    def counts_processes(self) -> bool:
        """Whether the kernel knows when it has refused one."""
        return self._group is not None and self._group.tree.pids is not None

    def refused(self) -> bool:
        """Whether it has, or had, as many processes and threads as it may."""
        with self.lock, suppress(OSError):
            if self.closed:
                return self.met == "processes"
            if self._group is not None and self.counts_processes:
                return self._group.refused()
            there = [] if self.view is None else look.processes(self.view)
            return sum(process.threads for process in there) - self._trusted >= self.limits.processes * NEAR
        return False

    def seen(self) -> tuple[float | None, int | None]:
        """Processor time (seconds) and the peak of memory (bytes) of all its life, where the kernel counts them."""
        with self.lock, suppress(OSError, ValueError, struct.error):
            if not self.closed:
                self._last = self._seen()
        return self._last

    def _seen(self) -> tuple[float | None, int | None]:
        group = self._group
        counted = self._counter is not None or (group is not None and group.counts_cpu)
        return self.cpu_s(()) if counted else None, None if group is None else group.peak_memory()

    def close(self) -> None:
        """The last process is gone: nothing of it is read from now on."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            with suppress(OSError, ValueError, struct.error):
                self.met = exceeded(self.usage(()), self.limits)
                self._last = self._seen()
            if self._group is not None:
                self._group.remove()
            if self._counter is not None:
                os.close(self._counter)
