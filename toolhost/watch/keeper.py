"""The two ways to keep a jail's limits behind one interface: what the kernel counts, and what must be looked for.

`Keeper` is what Linux does for a jail without control groups. `Group` adds what control groups do, made in the part of
the tree that is ours (privileges/powers.py). The watch (toolhost/watch/) looks for what a keeper does not count: it
asks `counts_…` and needs to know no more. Which hosts have which is in docs/design/sandbox.md section 4.

Source: the kernel's cgroup-v1 and cgroup-v2 documents.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from typing import Final

from goondan.toolhost.launcher import operations, places
from goondan.toolhost.policy.limits import ORDINARY, GroupPlan, Tree, weight_of
from goondan.toolhost.privileges.powers import Powers, beside, read_text

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
                    places.write_text(f"{self._at(folder)}/{name}", value)
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
            places.write_text(f"{self._at(self.tree.cpu)}/{name}", value)

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
        name, value = (operations.FREEZER_STATE, values[0]) if self.tree.version == 1 else ("cgroup.freeze", values[1])
        try:
            places.write_text(f"{self._at(self.tree.freezer)}/{name}", value)
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
