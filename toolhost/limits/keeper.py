"""The two ways to keep a jail's limits behind one interface: what the kernel counts, and what must be looked for.

`Keeper` is what Linux does for a jail without control groups. `Group` (groups.py) adds what control groups do. The
watch (toolhost/watch/) looks for what a keeper does not count: it asks `counts_…` and needs to know no more. Which
hosts have which is in docs/design/sandbox.md section 4.
"""

from __future__ import annotations

import os
import struct

from goondan.toolhost.privileges.powers import Powers

#: A counter of Linux gives one number of eight bytes.
_COUNTED_BYTES = 8


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
