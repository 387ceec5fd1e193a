"""Process 1 of a process namespace, where it is ours: it waits, and reaps whatever its namespace leaves behind."""

from __future__ import annotations

import posix

from .confine import FAILED
from .system import call

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    from typing import NoReturn

_ALL = 0xFFFFFFFF


def wait(child: int) -> NoReturn:
    """Reap until that child has ended, and end like it, in bubblewrap's words. The kernel then ends what is left."""
    try:
        call("close_range", 0, _ALL, 0)  # or else the host would not see the worker close its channel
        while True:
            pid, status = posix.waitpid(-1, 0)
            if pid == child:
                code = posix.waitstatus_to_exitcode(status)
                posix._exit(128 - code if code < 0 else code)
    finally:
        posix._exit(FAILED)
