"""News about a bundle that is watched: for the log, and for `gdn run`."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from goondan.schemas.errors import fail
from goondan.schemas.visible import visible_line

#: Lines that are kept for a command that asks late.
KEPT: Final = 200

_log = logging.getLogger("supervisor")


class News:
    """Lines, numbered from the first."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._told = 0
        self._more = asyncio.Event()
        self._over = False

    def close(self) -> None:
        """The kernel ends: who waits for more is told so."""
        self._over = True
        self._more.set()

    def say(self, line: str) -> None:
        """Tell everybody."""
        shown = visible_line(line)
        _log.info("%s", shown)
        self._lines = [*self._lines, shown][-KEPT:]
        self._told += 1
        self._more.set()
        self._more = asyncio.Event()

    async def after(self, known: int) -> tuple[list[str], int]:
        """The lines after the first `known`, as soon as there is one, and how many there are. A command that knows more
        lines than there are has asked the program before this one.

        Raises GoondanError E_KERNEL_NOT_RUNNING when there will be no more.
        """
        known = known if known <= self._told else 0
        while known >= self._told:
            if self._over:
                raise fail("E_KERNEL_NOT_RUNNING", "the kernel is stopping")
            await self._more.wait()
        return self._lines[max(0, len(self._lines) - (self._told - known)) :], self._told
