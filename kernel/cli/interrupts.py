"""Ctrl-C while a person types and waits: it ends what goes on, not the program.

asyncio's own way is to cancel the main task, whenever it comes; between two messages that would end the conversation.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Self


class Interrupts:
    """SIGINT calls `target` as long as this is entered. Inside a running loop of the main thread."""

    def __init__(self, target: Callable[[], object]) -> None:
        self.target = target
        #: How often it came; whoever was cancelled can tell by whom.
        self.count = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._before = signal.getsignal(signal.SIGINT)
        self._loop.add_signal_handler(signal.SIGINT, self._came)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, self._before)

    def _came(self) -> None:
        self.count += 1
        self.target()
