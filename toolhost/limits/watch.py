"""The thread that looks at jails while they run calls, and says when one has reached a limit.

Why a thread: a look at a jail with many processes takes milliseconds of system calls, during which other agents' calls
must go on. It only reads; what it finds is handed to the loop, which ends jails.

How often. The file systems that jails write to are asked for their free space every DISK_S; processor time, processes
and memory are looked at every LOOK_S. No more than a quarter of the time goes into looks, nor into walks over a jail's
folders. While no jail runs anything the thread sleeps.

Source: sandbox.md section 4; docs/decisions/028 and 029.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from toolhost.limits import look
from toolhost.limits.account import Account
from toolhost.limits.decide import DISK_PART, MIB, DiskMeter, Growth, exceeded, niceness_of_slow
from toolhost.limits.growth import walk

#: Between two looks at free space (seconds): at 1 GB/s that is 5 MB.
DISK_S: Final = 0.005
#: Between two looks at processor time, processes and memory (seconds).
LOOK_S: Final = 0.05
#: The part of the time that looks may take.
_PART: Final = 0.25
#: Between two walks over folders of a file system that does not count its entries (seconds).
WALK_S: Final = 1.0

#: Says that a jail has reached a limit: the limit, and the calls that did, None for all of the jail's.
Report = Callable[[Account, str, list[str] | None], None]


class _Device:
    """A file system, and what it has lost since we look at it."""

    __slots__ = ("_entries", "_free", "counts_entries", "fallen", "taken", "walked_at")

    def __init__(self) -> None:
        self.fallen = self.taken = 0
        self.walked_at = 0.0
        self.counts_entries = True
        self._free = self._entries = -1

    def look(self, place: str) -> None:
        """Add up falls only: what others give back must not hide what a jail takes. Raises OSError."""
        at = os.statvfs(place)
        free, entries = at.f_bfree * at.f_frsize, at.f_ffree
        self.counts_entries = at.f_files > 0
        if self._free >= 0:
            self.fallen += max(0, self._free - free)
            self.taken += max(0, self._entries - entries)
        self._free, self._entries = free, entries


class Watch:
    """All watched jails of one tool host. Use from the loop's thread; `wake` whenever a jail gets a call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Report) -> None:
        """`report` is called in the loop."""
        self._loop = loop
        self._report = report
        self._jails: list[Account] = []
        self._devices: dict[int, _Device] = {}
        self._awake = threading.Event()
        self._asleep = True
        self._thread: threading.Thread | None = None
        self._closing = False
        self._slow: set[Account] = set()  # of the jails that ran calls at the last look, those that are not quick
        self._looked_at = self._cost_s = 0.0  # when all were looked at, and how long that took (seconds)

    def add(self, jail: Account) -> None:
        """Watch this jail from now on."""
        for number, places in jail.devices.items():
            device = self._devices.setdefault(number, _Device())
            with suppress(OSError):
                device.look(places[0])
            jail.disks[number] = DiskMeter(device.fallen, device.taken)
        self._jails = [*self._jails, jail]
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="limits", daemon=True)
            self._thread.start()

    def remove(self, jail: Account) -> None:
        """Its last process is gone."""
        self._jails = [other for other in self._jails if other is not jail]

    def niceness_of_next(self, launching: int) -> int:
        """What a jail should be started with, that many more being started at the moment."""
        return niceness_of_slow(1 + launching + (0 if self._asleep else len(self._slow)))

    def wake(self) -> None:
        """A jail has got a call."""
        if self._asleep:
            self._asleep = False
            self._awake.set()

    def close(self) -> None:
        """End the thread and wait for its end."""
        self._closing = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join()

    # --- in the thread

    def _run(self) -> None:
        while not self._closing:
            time.sleep(DISK_S)
            try:
                self._round()
            except Exception as error:  # a bug of ours must be seen, and must not end the watch
                with suppress(RuntimeError):
                    told = {"message": "the watch of limits failed", "exception": error}
                    self._loop.call_soon_threadsafe(self._loop.call_exception_handler, told)
                time.sleep(LOOK_S)

    def _round(self) -> None:
        busy = [jail for jail in self._jails if jail.running() is not None]
        if not busy:
            self._sleep()
            return
        self._look_at_disks(busy)
        now = time.monotonic()
        if now - self._looked_at >= max(LOOK_S, self._cost_s / _PART):
            self._slow.clear()
            for jail in busy:
                self._guarded(jail, self._look_at)
            niceness = niceness_of_slow(len(self._slow))
            for jail in busy:
                jail.stand(niceness if jail in self._slow else 0)
            self._looked_at = time.monotonic()
            self._cost_s = self._looked_at - now

    def _sleep(self) -> None:
        self._awake.clear()
        self._asleep = True
        if not self._closing and all(jail.running() is None for jail in self._jails):
            self._awake.wait()
        self._asleep = False

    def _guarded(self, jail: Account, action: Callable[[Account], None]) -> None:
        """A jail may end at any moment, and what we read of it with it."""
        with suppress(OSError, ValueError, IndexError, struct.error):
            if not jail.closed:
                action(jail)

    def _look_at(self, jail: Account) -> None:
        there = jail.processes()
        total_s = jail.charge(there)
        if not jail.is_quick(total_s, time.monotonic()):
            self._slow.add(jail)
        over = jail.cpu.over(jail.limits.cpu_seconds)
        if over:
            self._tell(jail, "cpuSeconds", over)
        limit = exceeded(jail.usage(there), jail.limits)
        if limit is not None:
            self._tell(jail, limit, None)

    def _look_at_disks(self, busy: list[Account]) -> None:
        for number in {number for jail in busy for number in jail.devices}:
            device = self._devices[number]
            for place in (place for jail in busy for place in jail.devices.get(number, ())):
                with suppress(OSError):  # that folder is gone; another one may be there
                    device.look(place)
                    break
            now = time.monotonic()
            blind = not device.counts_entries and now - device.walked_at >= WALK_S
            for jail in busy:
                meter = jail.disks.get(number)
                if meter is None or now < jail.walk_again_at:
                    continue
                if blind or meter.suspects(device.fallen, device.taken, jail.limits):
                    self._guarded(jail, lambda jail, number=number: self._walk(jail, number))  # type: ignore[misc]

    def _walk(self, jail: Account, number: int) -> None:
        device, meter = self._devices[number], jail.disks[number]
        fallen, taken = device.fallen, device.taken
        device.walked_at = time.monotonic()
        enough = Growth(int(jail.limits.disk_mb * MIB * DISK_PART), int(jail.limits.files * DISK_PART))
        size = entries = 0
        for place in jail.devices[number]:
            found = walk(place, jail.since, enough)
            size, entries = size + found.size, entries + found.entries
        if jail.view is not None:
            size += sum(file.size for file in look.nameless(jail.view) if file.device == number)
        done = time.monotonic()
        jail.walk_again_at = done + (done - device.walked_at) / _PART
        limit = meter.walked(Growth(size, entries), fallen, taken, jail.limits)
        if limit is not None:
            self._tell(jail, limit, None)

    def _tell(self, jail: Account, limit: str, calls: list[str] | None) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._report, jail, limit, calls)
