"""Signals to processes that are known by their numbers, which the kernel gives to others when they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress


def signal_all(find: Callable[[], Collection[int]], number: int) -> int:
    """Send a signal to every process that `find` finds, and to none that took the number of one: how many it found.

    It is asked twice. Who is found again while we hold it by a descriptor is the one that we hold, or that has ended.
    """
    held: dict[int, int] = {}
    first = find()
    try:
        for pid in first:
            with suppress(OSError):  # it has ended, or we have no descriptor left: the next round's, or the kernel's
                held[pid] = os.pidfd_open(pid)
        found = set(find()) if held else set()
        for pid, pidfd in held.items():
            if pid in found:
                with suppress(OSError):
                    signal.pidfd_send_signal(pidfd, number)
    finally:
        for pidfd in held.values():
            os.close(pidfd)
    return len(first)
