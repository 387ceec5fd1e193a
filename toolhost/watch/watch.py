"""The thread that looks at jails while they run calls, and says when one has reached a limit.

It is a thread because a look at a jail with many processes takes milliseconds of system calls, and other agents' calls
must go on. When a jail is over a limit of the whole jail, its processes are killed at once. The loop is told, and does
the rest.

How often. The file systems that jails write to are asked for their free space every disks.DISK_S in any case; processor
time, processes and memory are looked at every LOOK_S. No more than a quarter of the time goes into looks,
no more than a quarter of a processor into walks over one jail's folders, and half of one into walks over all of them.
While no jail runs anything the thread sleeps.

It must not be late while many programs want the processor. So it runs before all others where root's launcher can do
it.

Source: docs/design/sandbox.md section 4; docs/decisions/029.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from goondan.toolhost.limits.decide import exceeded, niceness_of_slow
from goondan.toolhost.watch.disks import Disks
from goondan.toolhost.watch.jail_usage import JailUsage

#: Between two looks at processor time, processes and memory (seconds).
LOOK_S: Final = 0.05
#: The part of the time that looks may take.
_PART: Final = 0.25


#: Reports that a jail has reached a limit: the limit, and the calls that did; None means the whole jail.
Report = Callable[[JailUsage, str, list[str] | None], None]


class Watch:
    """All watched jails of one tool host. Use from the loop's thread; `wake` whenever a jail gets a call."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, report: Report, put_first: Callable[[int], None] = lambda thread: None
    ) -> None:
        """Both functions are called in the loop. `put_first` gets the numbers of our threads, which should not wait."""
        self._put_first = put_first
        self._loop = loop
        self._report = report
        self._jails: list[JailUsage] = []
        self._disks = Disks()
        self._awake = threading.Event()
        self._asleep = True
        self._thread: threading.Thread | None = None
        self._closing = False
        self._slow: set[JailUsage] = set()  # of the jails that ran calls at the last look, those that are not quick
        # State of a look at all of them that is under way: jails to come, jails done, slow jails, and the time it has
        # taken.
        self._to_look_at: list[JailUsage] = []
        self._looked_at: list[JailUsage] = []
        self._found_slow: set[JailUsage] = set()
        self._cost_s = self._look_again_at = 0.0
        self._look_next = False  # walks and looks take turns

    def add(self, jail: JailUsage) -> None:
        """Watch this jail from now on."""
        self._disks.enter(jail)
        self._jails = [*self._jails, jail]
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="limits", daemon=True)
            self._thread.start()
            for number in (self._thread.native_id, self._disks.start()):
                # Not where memory is looked at process by process: that takes long, and the loop would wait for it.
                if number is not None and jail.keeper.counts_memory:
                    self._put_first(number)

    def remove(self, jail: JailUsage) -> None:
        """Its last process is gone."""
        self._jails = [other for other in self._jails if other is not jail]

    def niceness_of_next(self, launching: int) -> int:
        """The niceness that a jail should be started with, while `launching` more are being started."""
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
            self._disks.close()

    # --- in the thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._step()
            except Exception as error:  # a bug of ours must be seen, and must not end the watch
                self._disks.let_go()
                with suppress(RuntimeError):
                    told = {"message": "the watch of limits failed", "exception": error}
                    self._loop.call_soon_threadsafe(self._loop.call_exception_handler, told)
                time.sleep(LOOK_S)
        self._disks.let_go()

    def _step(self) -> None:
        """Look at free space if it is due, and do one walk, one look at a jail, or a pause. None of these waits for
        many.
        """
        if self._disks.due_in() <= 0:
            busy = [jail for jail in self._jails if jail.running() is not None]
            if not busy:
                self._sleep()
                return
            self._disks.look(busy)
            if not self._to_look_at and time.monotonic() >= self._look_again_at:
                self._to_look_at, self._looked_at, self._found_slow, self._cost_s = busy, [], set(), 0.0
        if self._disks.suspects and not (self._look_next and self._to_look_at):
            self._look_next = True
            found = self._disks.step(lambda jail: jail not in self._slow)
            if found is not None:
                self._tell(*found, None)
        elif self._to_look_at:
            self._look_next = False
            self._look_at_one()
        else:
            time.sleep(max(0.0, self._disks.due_in()))

    def _look_at_one(self) -> None:
        began = time.monotonic()
        jail, *self._to_look_at = self._to_look_at
        self._looked_at.append(jail)
        with suppress(OSError, ValueError, IndexError, struct.error):  # it may end at any moment
            if not jail.closed:
                self._look_at(jail)
        done = time.monotonic()
        self._cost_s += done - began
        if not self._to_look_at:  # that was the last of them
            self._slow = self._found_slow
            niceness = niceness_of_slow(len(self._slow))
            for each in self._looked_at:
                each.stand(niceness if each in self._slow else 0)
            self._look_again_at = done + max(LOOK_S - self._cost_s, self._cost_s * (1 / _PART - 1))

    def _sleep(self) -> None:
        self._disks.let_go()
        self._to_look_at = []
        self._awake.clear()
        self._asleep = True
        if not self._closing and all(jail.running() is None for jail in self._jails):
            self._awake.wait()
        self._asleep = False

    def _look_at(self, jail: JailUsage) -> None:
        there = jail.processes()
        total_s = jail.charge(there)
        if not jail.is_quick(total_s, time.monotonic()):
            self._found_slow.add(jail)
        over = jail.cpu.over(jail.limits.cpu_seconds)
        if over:
            self._tell(jail, "cpuSeconds", over)
        limit = exceeded(jail.usage(there), jail.limits)
        if limit is not None and not jail.ending:
            jail.end(limit)
            self._tell(jail, limit, None)

    def _tell(self, jail: JailUsage, limit: str, calls: list[str] | None) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._report, jail, limit, calls)
