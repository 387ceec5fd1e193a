"""The restart of a kernel from the first word to the moment in which its processes are ended.

Whoever asks (a person, or an agent by way of the broker), the bundle is read first; what may not run stops nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

from kernel.bundle.opening import Opened
from kernel.restarting.looks import Looks
from kernel.restarting.revision import Revision
from schemas.control import RestartAsked, RestartChecked, RestartDue, RestartUndone
from schemas.errors import GoondanError, fail
from schemas.visible import visible_line

_log = logging.getLogger("supervisor")


class Restartable(Protocol):
    """What a restart needs of the supervisor."""

    @property
    def ending(self) -> bool:
        """Whether the kernel ends."""

    @property
    def stopping(self) -> bool:
        """Whether its processes are being ended."""

    @property
    def is_ready(self) -> bool:
        """Whether it has started."""

    def begin_restart(self, revision: Revision, reason: str) -> None:
        """End every process, then go on as the program that comes after, with `revision` if it cannot read another."""

    def answer(self, message: RestartChecked | RestartUndone) -> None:
        """Tell the broker."""


class Conductor:
    """`opened` is the bundle that runs."""

    def __init__(self, kernel: Restartable, looks: Looks, opened: Opened) -> None:
        self._kernel = kernel
        self._looks = looks
        self._opened = opened
        self._checked: Revision | None = None  # for the wish that is due next
        self._tasks: set[asyncio.Task[None]] = set()

    async def restart(self, reason: str) -> None:
        """Begin to restart, if the bundle may run. Raises GoondanError: E_RESTART_REFUSED, E_KERNEL_NOT_RUNNING, and
        what is wrong with the bundle.
        """
        self._begin(await self._look(), reason)

    def asked(self, message: RestartAsked) -> None:
        """An agent wishes a restart: look at the bundle, and say what is to be said against it."""
        self._soon(self._check(message.wish))

    def due(self, message: RestartDue) -> None:
        """The step of the agent that wished has ended."""
        self._soon(self._carry_out(message.reason))

    def close(self) -> None:
        """Nothing more begins here."""
        self._looks.close()
        for task in self._tasks:
            task.cancel()

    async def _check(self, wish: str) -> None:
        try:
            self._checked = await self._look()
        except GoondanError as error:
            _log.warning("an agent wished a restart, and there is none: %s", visible_line(str(error)))
            self._kernel.answer(RestartChecked(wish, error.info))
        else:
            self._kernel.answer(RestartChecked(wish))

    async def _carry_out(self, reason: str) -> None:
        if self._kernel.stopping:
            return  # it restarts, or ends, already
        revision, self._checked = self._checked, None
        try:
            # A wish of before the broker was replaced was checked by a word that is lost.
            self._begin(revision or await self._look(), f"an agent wishes it: {reason}")
        except GoondanError as error:
            _log.error("the restart that an agent wished is not done: %s", visible_line(str(error)))
            self._kernel.answer(RestartUndone(error.info))

    async def _look(self) -> Revision:
        """The bundle as it is now, if it may run in the place of what does."""
        self._may_restart()
        return await self._looks.look(self._opened.powers)

    def _begin(self, revision: Revision, reason: str) -> None:
        self._may_restart()
        self._kernel.begin_restart(revision, visible_line(reason))

    def _may_restart(self) -> None:
        kernel = self._kernel
        if kernel.ending:
            raise fail("E_KERNEL_NOT_RUNNING", "the kernel is stopping")
        if kernel.stopping:
            raise fail("E_RESTART_REFUSED", "a restart is under way already")
        if not kernel.is_ready:
            raise fail("E_RESTART_REFUSED", "the kernel is still starting")

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
