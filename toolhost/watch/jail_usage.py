"""What one jail uses and what keeps its limits: what Linux counts, and what was seen of it. The watch's thread and the
loop read it.

There are two ways to keep a jail's limits behind one interface. `Keeper` is what Linux does for a jail without control
groups. `Group` adds what control groups do, made in the part of the tree that is ours (privileges/powers.py). The watch
(toolhost/watch/) looks for what a keeper does not count: it asks `counts_…` and needs to know no more. Which hosts have
which is in docs/design/sandbox.md section 4.

Source: docs/design/sandbox.md section 4; the kernel's cgroup-v1 and cgroup-v2 documents.
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
from goondan.toolhost.launcher.operations import FREEZER_STATE
from goondan.toolhost.launcher.places import write_text
from goondan.toolhost.limits import (
    MIB,
    NEAR,
    ORDINARY,
    CpuMeter,
    DiskMeter,
    GroupPlan,
    Growth,
    HiddenMemory,
    InFlight,
    KeptDescriptors,
    Pace,
    Tree,
    Usage,
    exceeded,
    weight_of,
)
from goondan.toolhost.privileges.powers import Powers, beside, read_text
from goondan.toolhost.watch import procfs
from goondan.toolhost.watch.procfs import signal_all

#: A counter of Linux gives one number of eight bytes.
_COUNTED_BYTES = 8
#: Bytes that are read of a group's file, which has one line or a few.
_MAX_FILE: Final = 4096


class Keeper:
    """The limits of one jail, from before its start until its last process is gone.

    `joins` are files to which the jail's first process writes "0". `session` is the number of that process here, 0
    before it has begun. `lists_processes`: `processes` has all of them. Methods raise OSError when the jail cannot be
    asked.
    """

    counts_memory = False
    counts_processes = False
    lists_processes = False

    def __init__(self, powers: Powers) -> None:
        self.session = 0
        self._powers = powers
        self._counter = -1

    def began(self, session: int, counter: int | None) -> None:
        """The jail has been started. `counter` becomes ours and counts its processor time where nothing else does."""
        self.session = session
        self._counter = -1 if counter is None else counter

    @property
    def joins(self) -> list[str]:
        return []

    @property
    def counts_cpu(self) -> bool:
        """Whether `cpu_s` knows the processor time."""
        return self._counter >= 0

    def cpu_s(self) -> float | None:
        """Processor time of everything that was ever in it (seconds); None when it is not counted."""
        if self._counter < 0:
            return None
        return float(struct.unpack("=Q", os.read(self._counter, _COUNTED_BYTES))[0]) / 1e9

    def stand(self, niceness: int) -> None:
        """Give the jail the weight of a process of that niceness while processors are short."""
        if self.session:
            self._powers.set_niceness(self.session, niceness)

    def freeze(self) -> bool:
        """Stop all its processes before their next instruction. Returns whether that is possible."""
        return False

    def thaw(self) -> None:
        """Let the processes go on."""

    def processes(self) -> list[int]:
        """The processes in it, with bubblewrap's own outside of the jail; where `lists_processes`."""
        return []

    def refused(self) -> bool:
        """Whether Linux refused a process because there were too many, where `counts_processes`."""
        return False

    def out_of_memory(self) -> bool:
        """Whether the limit of memory was met and no memory could be freed, where `counts_memory`."""
        return False

    def peak_memory(self) -> int | None:
        """The most memory that was in use at one time (bytes); None when it is not counted."""
        return None

    def close(self) -> None:
        """Nobody asks it anything from now on."""
        if self._counter >= 0:
            os.close(self._counter)
            self._counter = -1

    def remove(self) -> None:
        """Its last process is gone. Can take milliseconds."""
        self.close()


class Group(Keeper):
    """The groups of one jail."""

    lists_processes = True

    def __init__(self, plan: GroupPlan, powers: Powers, niceness: int = 0) -> None:
        """Make the groups. Raises OSError; then none are left. `niceness`: see `stand`."""
        super().__init__(powers)
        self.tree = plan.tree
        self.counts_memory = plan.tree.memory is not None
        self.counts_processes = plan.tree.pids is not None
        self.name = str(next(powers.group_numbers))
        self._events = -1
        self._usage = -1
        try:
            for folder in plan.tree.folders:
                if self._alone(folder):
                    powers.make_group(int(self.name), self._at(folder))
                else:
                    os.mkdir(self._at(folder))
            for folder, name, value in plan.settings:
                try:
                    write_text(f"{self._at(folder)}/{name}", value)
                except OSError:
                    if name not in plan.optional:
                        raise
            self.stand(niceness)
            if plan.tree.pids is not None:
                self._events = os.open(f"{self._at(plan.tree.pids)}/pids.events", os.O_RDONLY | os.O_CLOEXEC)
            if plan.tree.cpuacct is not None:
                usage = "cpuacct.usage" if plan.tree.version == 1 else "cpu.stat"
                self._usage = os.open(f"{self._at(plan.tree.cpuacct)}/{usage}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.remove()
            raise

    def _at(self, folder: str) -> str:
        """Where the jail's group is in that hierarchy.

        Linux shares processors out level by level. Within one group for all jails a quick jail would wait with the
        others whenever these have used up the time of all. So there each jail has a group beside the tool host's.
        """
        if self._alone(folder):
            return f"{beside(self.tree)}{self.name}"
        return f"{folder}/{self.name}"

    def _alone(self, folder: str) -> bool:
        return self.tree.version == 1 and folder == self.tree.cpu

    @property
    def joins(self) -> list[str]:
        """Files to which a process with one thread writes "0", to be in all the groups.

        In version 1 that is the file for threads. The file for processes waits for every thread of the machine (up to
        20 ms a time, measured), and for a process with one thread both mean the same.
        """
        name = "tasks" if self.tree.version == 1 else "cgroup.procs"
        return [f"{self._at(folder)}/{name}" for folder in self.tree.folders]

    @property
    def counts_cpu(self) -> bool:
        return self._usage >= 0 or super().counts_cpu

    def cpu_s(self) -> float | None:
        if self._usage < 0:
            return super().cpu_s()
        said = os.pread(self._usage, _MAX_FILE, 0)
        if self.tree.version == 1:
            return int(said) / 1e9
        return int(said.split()[1]) / 1e6  # usage_usec comes first

    def stand(self, niceness: int) -> None:
        if self.tree.cpu is None:
            super().stand(niceness)
        else:
            name, value = weight(self.tree, niceness)
            write_text(f"{self._at(self.tree.cpu)}/{name}", value)

    def freeze(self) -> bool:
        """See Keeper.

        A process in a system call stops after that call. Processes do not notice it, and cannot end it. In version 1
        processes that are killed meanwhile end after `thaw`.
        """
        return self._set_frozen(("FROZEN", "1"))

    def thaw(self) -> None:
        self._set_frozen(("THAWED", "0"))

    def _set_frozen(self, values: tuple[str, str]) -> bool:
        if self.tree.freezer is None:
            return False
        name, value = (FREEZER_STATE, values[0]) if self.tree.version == 1 else ("cgroup.freeze", values[1])
        try:
            write_text(f"{self._at(self.tree.freezer)}/{name}", value)
        except OSError:  # gone, or a kernel that cannot
            return False
        return True

    def processes(self) -> list[int]:
        return [int(pid) for pid in read_text(f"{self._at(self.tree.folders[-1])}/cgroup.procs").split()]

    def refused(self) -> bool:
        return self._events >= 0 and os.pread(self._events, _MAX_FILE, 0).split()[:2] != [b"max", b"0"]

    def out_of_memory(self) -> bool:
        if self.tree.memory is None:
            return False
        name = "memory.oom_control" if self.tree.version == 1 else "memory.events"
        fields = read_text(f"{self._at(self.tree.memory)}/{name}").split()
        said = dict(zip(fields[::2], fields[1::2], strict=False))
        return any(said.get(field, "0") != "0" for field in ("oom_kill", "under_oom", "oom"))

    def peak_memory(self) -> int | None:
        """It counts pages of files, too."""
        if self.tree.memory is None:
            return None
        name = "memory.max_usage_in_bytes" if self.tree.version == 1 else "memory.peak"
        said = read_text(f"{self._at(self.tree.memory)}/{name}")
        return int(said) if said.isdigit() else None

    def close(self) -> None:
        super().close()
        for fd in (self._events, self._usage):
            if fd >= 0:
                os.close(fd)
        self._events = self._usage = -1

    def remove(self) -> None:
        """Sometimes takes milliseconds: a process that joins a group holds a lock that this needs."""
        self.close()
        for folder in self.tree.folders:
            with suppress(OSError):  # a process that is only just going; the tool host's end takes the rest along
                if self._alone(folder):
                    self._powers.remove_group(int(self.name), self._at(folder))
                else:
                    os.rmdir(self._at(folder))


def weight(tree: Tree, niceness: int) -> tuple[str, str]:
    """The file and the value that give a group the weight of a process of that niceness."""
    shares = weight_of(niceness)
    return ("cpu.shares", str(shares)) if tree.version == 1 else ("cpu.weight", str(max(1, shares * 100 // ORDINARY)))


#: File times are those of the last clock tick (seconds).
_TICK_S: Final = 0.02


class JailUsage:
    """What one jail uses."""

    def __init__(
        self, limits: Limits, places: Sequence[str], keeper: Keeper, niceness: int, powers: Powers, trusted: int = 0
    ) -> None:
        """`places` are the folders that it may write to. `keeper` is what Linux does for its limits. `niceness` is what
        it was started with.

        `trusted`: so many of its processes are ours, and do not count.
        """
        self.limits = limits
        self.keeper = keeper
        #: The names of the calls that it runs, pending work included; None when nothing needs to be looked at.
        self.running: Callable[[], Sequence[str] | None] = lambda: None
        #: The first processes of calls that have processes of their own.
        self.sandboxes: Callable[[], Mapping[str, int]] = dict
        self.cpu = CpuMeter()
        #: The most memory that was seen (bytes).
        self.peak = 0
        #: Where its processes show; None until that is known.
        self.view: procfs.View | None = None
        #: When it began, as file times have it (seconds since 1970).
        self.since = time.time() - _TICK_S
        #: The folders that it may write to, by file system; then a meter of what it has written there at most.
        self.devices: dict[int, list[str]] = {}
        self.disks: dict[int, DiskMeter] = {}
        #: Whether it keeps descriptors in flight, by file system that is looked at.
        self.kept: dict[int, KeptDescriptors] = {}
        #: What names showed of a jail that may keep descriptors in flight, by file system.
        self.undecided: dict[int, Growth] = {}
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
        self._pace = Pace()
        self._niceness = niceness
        self._last: tuple[float | None, int | None] = (None, None)
        # It protects descriptors from being closed while they are read. It is held for single reads and never for a
        # look or a walk, because the loop waits for it.
        self._lock = threading.Lock()
        self._hidden = HiddenMemory(0 if keeper.counts_memory else procfs.shared())
        self._kept_memory = KeptDescriptors()
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

    def usage(self, there: Sequence[procfs.Process]) -> Usage:
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
        return Usage(memory=memory, tasks=tasks, refused=refused, out_of_memory=keeper.out_of_memory())

    def _tasks(self, there: Sequence[procfs.Process]) -> int:
        return max(0, sum(process.threads for process in there) - self._trusted)

    def _memory(self, view: procfs.View, there: list[procfs.Process]) -> int:
        """Its memory as it is seen, and what it may hide in sockets if it keeps descriptors there (bytes)."""
        limit, sandboxes = self.limits.memory_mb * MIB, list(self.sandboxes().values())
        found = procfs.memory(view, limit, there, self._powers.held_by, sandboxes)
        shared = procfs.shared()
        sockets: InFlight | None = InFlight()
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
        signal_all(lambda: [pid for pid in find() if pid != self.keeper.session], signal.SIGKILL)

    def refused(self) -> bool:
        """Whether it has, or had, as many processes and threads as its limit allows."""
        with suppress(OSError):
            if self.closed or self.met is not None:  # who is being ended has fewer of them at each look
                return self.met == "processes"
            if self.keeper.counts_processes:
                with self._lock:
                    return self.keeper.refused()
            there = [] if self.view is None else procfs.processes(self.view)
            return self._tasks(there) >= self.limits.processes * NEAR
        return False

    def limit_met(self) -> str | None:
        """The limit of the whole jail that was met according to its groups; None where nothing says so."""
        if self.closed:
            return self.met
        with suppress(OSError, ValueError, struct.error):
            return exceeded(self.usage(()), self.limits)
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
