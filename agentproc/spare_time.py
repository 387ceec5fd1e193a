"""Whether the machine has processors to spare: for work that nobody waits for.

The system adds up for how long its processors had nothing to do. What is done at the same time as a turn slows the turn
down, because two processors rarely are worth two. So such work waits until a turn could begin and still find one free.

Source: docs/design/processes.md section 3.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

#: A processor counts as free when it had nothing to do for this part of the time.
FREE_PART: Final = 0.75
#: How many processors have to be free, where there are so many: one for the work, and one for a turn that begins.
FREE_PROCESSORS: Final = 2
#: Uptime, and the time without work of all processors together (both in seconds, with two digits).
_UPTIME: Final = Path("/proc/uptime")


def is_spare(idle_s: float, elapsed_s: float, processors: int) -> bool:
    """Whether so many processors, which together had nothing to do for `idle_s` of the last `elapsed_s` seconds, leave
    room for more work.
    """
    return idle_s >= FREE_PART * min(processors, FREE_PROCESSORS) * elapsed_s


def idle_time() -> float | None:
    """For how long the processors had nothing to do since the machine's start, added up (seconds). None where the
    system does not tell.
    """
    try:
        idle = float(_UPTIME.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return idle or None  # systems that do not count say 0


class SpareTime:
    """Looks at the time from its making on."""

    def __init__(
        self,
        idle: Callable[[], float | None] = idle_time,
        clock: Callable[[], float] = time.monotonic,
        processors: int | None = None,
    ) -> None:
        self._idle = idle
        self._clock = clock
        self._processors = processors or os.cpu_count() or 1
        self._began = clock()
        self._idle_before = idle()

    def found(self) -> bool:
        """Whether there were processors to spare since this was made. True where the system does not tell."""
        idle = self._idle()
        if idle is None or self._idle_before is None:
            return True
        return is_spare(idle - self._idle_before, self._clock() - self._began, self._processors)
