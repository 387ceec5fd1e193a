"""The two ways to keep a jail's limits behind one interface: what the kernel counts, and what must be looked for.

`Keeper` is what the kernel does for a jail without control groups; `Group` (groups.py) adds what control groups do.
What a keeper does not count the watch looks for (toolhost/watch/): it asks `counts_…` and needs to know no more. Which
hosts have which is in docs/design/sandbox.md section 4.
"""

from __future__ import annotations

import os
import struct

from toolhost.privileges.powers import Powers

#: A counter of the kernel says one number of eight bytes.
_COUNTED_BYTES = 8


class Keeper:
    """One jail's, from before it starts until its last process is gone. Methods raise OSError when it cannot be asked.

    `joins` are files that the jail's first process writes "0" to, `session` is that process's number here, 0 before it
    has begun. `lists_processes`: `processes` knows all of them.
    """

    counts_memory = False
    counts_processes = False
    lists_processes = False

    def __init__(self, powers: Powers) -> None:
        self.session = 0
        self._powers = powers
        self._counter = -1

    def began(self, session: int, counter: int | None) -> None:
        """The jail has been started. `counter`, ours from now on, counts its processor time where nothing else does."""
        self.session = session
        self._counter = -1 if counter is None else counter

    @property
    def joins(self) -> list[str]:
        return []

    @property
    def counts_cpu(self) -> bool:
        """Whether `cpu_s` knows."""
        return self._counter >= 0

    def cpu_s(self) -> float | None:
        """Processor time of everything that was ever in it (seconds); None when it is not counted."""
        if self._counter < 0:
            return None
        return float(struct.unpack("=Q", os.read(self._counter, _COUNTED_BYTES))[0]) / 1e9

    def stand(self, niceness: int) -> None:
        """Have the weight of a process of that niceness while processors are short."""
        if self.session:
            self._powers.set_niceness(self.session, niceness)

    def freeze(self) -> bool:
        """Have all of its processes stop before they run another instruction of theirs: whether that can be done."""
        return False

    def thaw(self) -> None:
        """Let them go on."""

    def processes(self) -> list[int]:
        """Those that are in it, bubblewrap's own outside of the jail among them, where `lists_processes`."""
        return []

    def refused(self) -> bool:
        """Whether a process was refused for their number, where `counts_processes`."""
        return False

    def out_of_memory(self) -> bool:
        """Whether the limit of memory was met and nothing could be given back, where `counts_memory`."""
        return False

    def peak_memory(self) -> int | None:
        """The most memory that was ever in use at once (bytes); None when it is not counted."""
        return None

    def close(self) -> None:
        """Nothing is asked of it from now on."""
        if self._counter >= 0:
            os.close(self._counter)
            self._counter = -1

    def remove(self) -> None:
        """Its last process is gone. Can take milliseconds."""
        self.close()
