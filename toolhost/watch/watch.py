"""The thread that looks at jails while they run calls, and at the file systems that they write to, and says when one
has reached a limit.

Of the file systems that jails write to it finds out how much they lose, which jails may have taken it, and which one
did. A jail that may have reached a limit is frozen, where it has a group for that. Then its folders are walked, and it
is ended or goes on. So meanwhile it writes only what system calls already under way write. Looks at free space go on.

The watch's thread uses `Disks`; other threads may call `enter`, `start` and `close`. Walks run in another thread.

A walk goes over a tree that the jail may be changing at this moment. It counts what is newer than the jail or was
changed since, by the times that Linux keeps and no program can set. A file that was appended to counts whole;
decide.DiskMeter bounds that by what the file system has lost. It opens every folder relative to its parent, without
following links, down to MAX_DEPTH. A changed folder below that counts as `deep`: no tool needs such a tree, and one
that builds it hides something.

It is a thread because a look at a jail with many processes takes milliseconds of system calls, and other agents' calls
must go on. When a jail is over a limit of the whole jail, its processes are killed at once. The loop is told, and does
the rest.

How often. The file systems that jails write to are asked for their free space every DISK_S in any case; processor
time, processes and memory are looked at every LOOK_S. No more than a quarter of the time goes into looks,
no more than a quarter of a processor into walks over one jail's folders, and half of one into walks over all of them.
While no jail runs anything the thread sleeps. A call of a jail wakes it at once, unless the jail's last call was
quicker than DISK_S: most calls end before that, and would wake it for nothing. Then it wakes up when jails have run for
DISK_S since it fell asleep, in one call or in several. That is told by the loop, so the first look at a jail that was
quick comes as late as the loop is busy.

It must not be late while many programs want the processor. So it runs before all others where root's launcher can do
it.

Source: docs/design/sandbox.md section 4; docs/decisions/029.
"""

from __future__ import annotations

import asyncio
import os
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread
from typing import Final, NamedTuple

from goondan.toolhost.policy import limits
from goondan.toolhost.watch import procfs
from goondan.toolhost.watch.jail_usage import JailUsage

# --- file systems -----------------------------------------------------------------------------------------------------

#: Between two looks at free space (seconds): at 1 GB/s that is 5 MB.
DISK_S: Final = 0.005
#: The part of a processor that walks over the folders of all jails may take, and how much at once (seconds).
WALKS_PART: Final = 0.5
WALKS_S: Final = 0.1
#: How long a walk is waited for before the jail is urged on, because it may hold a folder's lock (seconds). Most walks
#: take a tenth of it.
PATIENCE_S: Final = 0.02
#: Between two looks at what a jail has in flight (seconds).
FLIGHT_S: Final = 0.01
#: Between two walks over folders of a file system that does not count its entries (seconds).
WALK_S: Final = 1.0
#: Folders of which it is remembered when a jail was ended for their growth.
MAX_CHARGED: Final = 1024
#: Folders in folders; each holds one of our descriptors while it is walked.
MAX_DEPTH: Final = 128
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Device:
    """A file system, and how much it has lost since we look at it.

    A file system that counts no entries (btrfs) also does not count what waits to be written, for up to half a minute.
    There every such page of this machine counts as lost, and counts again when it is written. So the sum may be too
    large and is never too small.
    """

    def __init__(self) -> None:
        self.lost = limits.Lost(0, 0)
        self.walked_at = 0.0
        self.counts_entries = True
        self._free = self._entries = -1

    def look(self, place: str) -> None:
        """Add up only falls of free space: what others give back must not hide what a jail takes. Raises OSError."""
        at = os.statvfs(place)
        free, entries = at.f_bfree * at.f_frsize, at.f_ffree
        self.counts_entries = at.f_files > 0
        if not self.counts_entries:
            free -= procfs.unwritten()
        if self._free >= 0:
            fallen, taken = self.lost
            self.lost = limits.Lost(fallen + max(0, self._free - free), taken + max(0, self._entries - entries))
        self._free, self._entries = free, entries


class _Suspect(NamedTuple):
    """A jail that may have reached a limit on a file system."""

    #: The jail.
    jail: JailUsage
    #: The number of the file system.
    number: int
    #: Whether its processes stand still.
    frozen: bool
    #: Since when that is known (monotonic seconds).
    since: float


class _Walk:
    """A walk over the folders of a suspect, with the time and the loss when it was asked for (monotonic seconds).
    `charged` are the folders whose growth another jail was ended for, with the times of that (seconds since 1970).

    `named` is what an earlier walk found, if only files without a name are to be looked at. `cost_s` is the processor
    time that the walk took. `in_flight` are sockets of the jail with descriptors under way; None if that is not known.
    """

    def __init__(self, suspect: _Suspect, lost: limits.Lost, charged: dict[str, float]) -> None:
        self.suspect = suspect
        self.lost = lost
        self.charged = charged
        self.asked_at = self.done_at = time.monotonic()
        self.cost_s = 0.0
        self.named = suspect.jail.undecided.get(suspect.number)
        self.in_flight: limits.InFlight | None = limits.InFlight()
        self.found: limits.Growth | None = None  # or the jail was gone
        self.error: Exception | None = None

    def go(self) -> None:
        jail, number, frozen, _ = self.suspect
        began = time.thread_time()
        enough = limits.Growth(
            int(jail.limits.disk_mb * limits.MIB * limits.DISK_PART), int(jail.limits.files * limits.DISK_PART)
        )
        size = entries = 0
        try:
            if self.named is None:
                for place in jail.devices[number]:
                    grown = walk(place, max(jail.since, self.charged.get(place, 0.0)), enough)
                    size, entries = size + grown.size, entries + grown.entries
                self.named = limits.Growth(size, entries)
            size, entries = self.named.size, self.named.entries
            if jail.view is not None and size < enough.size:
                size += sum(file.size for file in procfs.nameless(jail.view) if file.device == number)
                if size < enough.size and frozen:
                    found = procfs.in_flight(jail.view, procfs.processes(jail.view))
                    self.in_flight = limits.InFlight(found, found)
                elif size < enough.size:
                    self.in_flight = procfs.still_in_flight(jail.view, jail.counted_s)
            self.found = limits.Growth(size, entries)
        except (OSError, ValueError, IndexError, struct.error):
            pass  # it may end at any moment, and what we read of it with it
        except Exception as error:  # a bug of ours: `Disks.step` raises it
            self.error = error
        self.cost_s = time.thread_time() - began
        self.done_at = time.monotonic()


class Disks:
    """All file systems that watched jails may write to. `start` before the first walk, `close` in the end."""

    def __init__(self) -> None:
        self._devices: dict[int, _Device] = {}
        self._suspects: list[_Suspect] = []
        self._busy: list[JailUsage] = []
        self._looked_at = 0.0
        # Jails that work in one folder all see its growth. It ends one of them, and does not count for the others then.
        self._charged: dict[str, float] = {}
        self._walks = limits.Allowance(WALKS_PART, WALKS_S)
        # Walks have a thread of their own: a walk waits while a process of the jail makes a file in the folder, and
        # such a process can wait for the processor for seconds.
        self._walking: _Walk | None = None
        self._asked: SimpleQueue[_Walk | None] = SimpleQueue()
        self._done = Event()
        self._thread = Thread(target=self._walk_all, name="walks", daemon=True)

    def start(self) -> int | None:
        """Start the thread of walks. Returns its number."""
        self._thread.start()
        return self._thread.native_id

    def close(self) -> None:
        """End the thread after the walk that is under way."""
        self._asked.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _walk_all(self) -> None:
        while (asked := self._asked.get()) is not None:
            asked.go()
            self._done.set()

    def enter(self, jail: JailUsage) -> None:
        """Watch this one's folders from now on."""
        for number, places in jail.devices.items():
            device = self._devices.setdefault(number, _Device())
            with suppress(OSError):
                device.look(places[0])
            jail.disks[number] = limits.DiskMeter(device.lost)
            jail.kept[number] = limits.KeptDescriptors()

    def due_in(self) -> float:
        """After how many seconds `look` has something to do; 0 or less: now."""
        return self._looked_at + DISK_S - time.monotonic()

    def look(self, busy: list[JailUsage]) -> None:
        """Look at free space if it is time. A jail that may have reached a limit becomes a suspect, and is frozen."""
        self._busy = busy
        if self.due_in() <= 0:
            self._look()

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        for number in {number for jail in self._busy for number in jail.devices}:
            device = self._devices[number]
            for place in (place for jail in self._busy for place in jail.devices.get(number, ())):
                with suppress(OSError):  # that folder is gone; another one may be there
                    device.look(place)
                    break
            blind = not device.counts_entries and self._looked_at - device.walked_at >= WALK_S
            if blind:
                device.walked_at = self._looked_at
            for jail in self._busy:
                meter = jail.disks.get(number)
                if meter is None or self._looked_at < jail.walk_again_at or jail.ending:
                    continue
                if any(suspect.jail is jail and suspect.number == number for suspect in self._suspects):
                    continue
                if number in jail.undecided:  # it goes on: what it passes on is received meanwhile
                    self._suspects.append(_Suspect(jail, number, False, self._looked_at))
                elif meter.suspects(device.lost, jail.limits):
                    self._suspects.append(_Suspect(jail, number, jail.freeze(), self._looked_at))
                elif blind:
                    self._suspects.append(_Suspect(jail, number, False, self._looked_at))

    @property
    def suspects(self) -> bool:
        """Whether `step` has something to do: a jail is being walked, or waits for it and there is time."""
        return self._walking is not None or (bool(self._suspects) and self._walks.allowed(time.monotonic()))

    def step(self, is_quick: Callable[[JailUsage], bool]) -> tuple[JailUsage, str] | None:
        """Begin a walk over the folders of a suspect, or wait for its end until the next look at free space.

        Returns a jail that has reached a limit, and the limit: its processes have been killed. Any other jail goes on.
        """
        if self._walking is None:
            suspect = min(self._suspects, key=lambda each: limits.walked_before(each.frozen, is_quick(each.jail)))
            self._walking = _Walk(suspect, self._devices[suspect.number].lost, self._charged)
            self._done.clear()
            self._asked.put(self._walking)
        if self._done.wait(max(0.0, self.due_in())):
            asked, self._walking = self._walking, None
            return self._walked(asked)
        if time.monotonic() - self._walking.asked_at > PATIENCE_S:
            self._walking.suspect.jail.urge()
        return None

    def _walked(self, asked: _Walk) -> tuple[JailUsage, str] | None:
        suspect, (jail, number, frozen, since) = asked.suspect, asked.suspect
        limit = None
        try:
            self._walks.spend(asked.done_at - asked.cost_s, asked.done_at)
            if asked.error is not None:
                raise asked.error
            if asked.found is not None and not jail.closed:
                self._look()
                limit = self._decide(asked, asked.found)
                if limit is not None:
                    jail.end(limit)
                    if len(self._charged) >= MAX_CHARGED:
                        self._charged.clear()
                    self._charged |= dict.fromkeys(jail.devices[number], time.time())
        finally:
            self._suspects = [other for other in self._suspects if other is not suspect]
            if frozen and not any(other.jail is jail and other.frozen for other in self._suspects):
                jail.thaw()
            now = time.monotonic()
            jail.walk_again_at = limits.walk_again_at(now, asked.cost_s, now - since if frozen else 0.0)
            if number in jail.undecided:
                jail.walk_again_at = max(jail.walk_again_at, now + FLIGHT_S)
        return None if limit is None else (jail, limit)

    def _decide(self, asked: _Walk, found: limits.Growth) -> str | None:
        """The limit that the jail has reached; None when it has not, or when looks go on because that is not known
        yet.
        """
        jail, number, _, _ = asked.suspect
        lost, meter = self._devices[number].lost, jail.disks[number]
        before = jail.undecided.pop(number, None)
        hides = meter.hides(found, lost, jail.limits)
        seen = asked.in_flight if hides else limits.InFlight()
        kept = seen is not None and jail.kept[number].look(asked.done_at, seen)
        if hides and not kept:
            if asked.named is not None and (seen is None or seen.last):
                jail.undecided[number] = asked.named
                return None
            if before is not None:  # it may have received them, and given them names since
                return None
        return meter.walked(found, asked.lost, lost, jail.limits, kept_in_flight=kept)

    def let_go(self) -> None:
        """Let all suspects go on."""
        suspects, self._suspects = self._suspects, []
        for suspect in suspects:
            if suspect.frozen:
                suspect.jail.thaw()


def walk(root: str, since: float, enough: limits.Growth) -> limits.Growth:
    """How much was added to the folder (or file) `root` since then (seconds since 1970). Stops at `enough` of either.

    A tree that is too deep counts as `enough`.
    """
    try:
        status = os.lstat(root)
        if stat.S_ISREG(status.st_mode):
            return limits.Growth(status.st_blocks * 512, 1) if status.st_ctime >= since else limits.Growth(0, 0)
        top = os.open(root, _FLAGS)
    except OSError:
        return limits.Growth(0, 0)
    found = _Found(status.st_dev, since)
    stack: list[tuple[int, list[str]]] = [(top, [""])]
    try:
        while stack:
            above, names = stack[-1]
            if not names:
                os.close(above)
                stack.pop()
                continue
            name = names.pop()
            try:
                fd = os.open(name or ".", _FLAGS, dir_fd=above)
            except OSError:
                continue  # gone, or not a folder any more
            folders: list[str] = []
            stack.append((fd, folders))
            if not found.look(fd, folders, deepest=len(stack) >= MAX_DEPTH):
                return enough
            if found.size >= enough.size or found.entries >= enough.entries:
                break
        return limits.Growth(found.size, found.entries)
    finally:
        for fd, _ in stack:
            os.close(fd)


class _Found:
    """What a walk has counted on one file system."""

    def __init__(self, device: int, since: float) -> None:
        self.size = self.entries = 0
        self._device = device
        self._since = since
        self._seen: set[tuple[int, int]] = set()

    def look(self, fd: int, folders: list[str], *, deepest: bool) -> bool:
        """Count what is in a folder, and name the folders in it; False for a changed folder in the `deepest` one."""
        with suppress(OSError), os.scandir(fd) as listing:
            for entry in listing:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev != self._device:
                        continue  # something else is mounted there
                    is_folder = stat.S_ISDIR(status.st_mode)
                    if self._count(status, is_folder) and is_folder and deepest:
                        return False
                    if is_folder and not deepest:
                        folders.append(entry.name)
        return True

    def _count(self, status: os.stat_result, is_folder: bool) -> bool:
        """Whether it is newer, and was not counted under another name."""
        file = (status.st_dev, status.st_ino)
        if status.st_ctime < self._since or file in self._seen:
            return False
        if status.st_nlink > 1 and not is_folder:
            self._seen.add(file)
        self.size += status.st_blocks * 512
        self.entries += 1
        return True


# --- the thread -------------------------------------------------------------------------------------------------------

#: Between two looks at processor time, processes and memory (seconds).
LOOK_S: Final = 0.05
#: The part of the time that looks may take.
_PART: Final = 0.25


#: Reports that a jail has reached a limit: the limit, and the calls that did; None means the whole jail.
Report = Callable[[JailUsage, str, list[str] | None], None]


class Watch:
    """All watched jails of one tool host. Use from the loop's thread: `wake` when a jail gets a call, `rest` when one
    has ended.
    """

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
        #: Jails that have got a call and may still run it, and since when (monotonic).
        self._busy: dict[JailUsage, float] = {}
        #: Jails whose last call was quicker than DISK_S.
        self._quick: set[JailUsage] = set()
        #: Wakes the thread. It is there while the thread sleeps and a jail is busy.
        self._rousing: asyncio.TimerHandle | None = None
        #: Since when jails are busy, how long they were before, since the thread fell asleep (seconds), and which ones.
        self._busy_since = self._ran_s = 0.0
        self._have_run: set[JailUsage] = set()
        #: Those that the thread was woken for. It looks at their free space in any case.
        self._roused: frozenset[JailUsage] = frozenset()
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
        self._ended(jail, time.monotonic())
        self._quick.discard(jail)
        self._have_run.discard(jail)

    def niceness_of_next(self, launching: int) -> int:
        """The niceness that a jail should be started with, while `launching` more are being started."""
        return limits.niceness_of_slow(1 + launching + (0 if self._asleep else len(self._slow)))

    def wake(self, jail: JailUsage) -> None:
        """This jail has got a call."""
        now = time.monotonic()
        self._busy.setdefault(jail, now)
        if not self._asleep:
            return
        self._have_run.add(jail)
        if jail not in self._quick:
            self._rouse()
        elif self._rousing is None:
            self._busy_since = now
            self._rousing = self._loop.call_later(max(0.0, DISK_S - self._ran_s), self._rouse)

    def rest(self, jail: JailUsage) -> None:
        """A call of this jail has ended."""
        if jail.running() is not None:
            return
        now = time.monotonic()
        if now - self._ended(jail, now) < DISK_S:
            self._quick.add(jail)
        else:
            self._quick.discard(jail)

    def _ended(self, jail: JailUsage, now: float) -> float:
        """It is not busy any more. Returns since when it was (monotonic); 0 if it was not."""
        since = self._busy.pop(jail, 0.0)
        if self._rousing is not None and not self._busy:
            self._rousing.cancel()
            self._rousing = None
            self._ran_s += now - self._busy_since
        return since

    def _rouse(self) -> None:
        if self._rousing is not None:
            self._rousing.cancel()
            self._rousing = None
        self._ran_s = 0.0
        self._roused = frozenset(self._have_run)
        self._have_run.clear()
        if self._asleep:
            self._asleep = False
            self._awake.set()

    def close(self) -> None:
        """End the thread and wait for its end."""
        self._closing = True
        if self._rousing is not None:
            self._rousing.cancel()
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
            roused, self._roused = self._roused, frozenset()
            busy = [jail for jail in self._jails if jail in roused or jail.running() is not None]
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
            niceness = limits.niceness_of_slow(len(self._slow))
            for each in self._looked_at:
                each.stand(niceness if each in self._slow else 0)
            self._look_again_at = done + max(LOOK_S - self._cost_s, self._cost_s * (1 / _PART - 1))

    def _sleep(self) -> None:
        self._disks.let_go()
        self._to_look_at = []
        self._awake.clear()
        self._asleep = True
        if not self._closing and not self._roused and all(jail.running() is None for jail in self._jails):
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
        limit = limits.exceeded(jail.usage(there), jail.limits)
        if limit is not None and not jail.ending:
            jail.end(limit)
            self._tell(jail, limit, None)

    def _tell(self, jail: JailUsage, limit: str, calls: list[str] | None) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._report, jail, limit, calls)
