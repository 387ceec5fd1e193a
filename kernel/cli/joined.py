"""The kernel of a program that outlives kernels: found when it is needed, and found again when it was stopped,
restarted or replaced.

Source: docs/design/commands.md section 4.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Coroutine
from typing import Any

from goondan.kernel.cli.attach import Kernel
from goondan.kernel.cli.session import Session


class Joined:
    """A kernel, and the session with it. `find` finds or starts one, in a thread. `follow` is called with each new
    session, and cancelled when that is left.
    """

    def __init__(
        self, find: Callable[[], Kernel], follow: Callable[[Session], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        self._find = find
        self._follow = follow
        self._following: asyncio.Task[None] | None = None
        self._open: tuple[Kernel, Session] | None = None
        self._end = select.poll()  # of the kernel
        self._opening: asyncio.Task[Session] | None = None

    @property
    def kernel(self) -> Kernel | None:
        """The kernel of the open session."""
        return None if self._open is None else self._open[0]

    def at_hand(self) -> Session | None:
        """The open session, if there is one and its kernel lives: of its end the session hears a moment later."""
        if self._open is None or self._open[1].over or self._end.poll(0):
            return None
        return self._open[1]

    async def session(self) -> Session:
        """The open session, or a new one. Those who need one at once wait for the same. Raises GoondanError with the
        reason why there is none.
        """
        if (session := self.at_hand()) is not None:
            return session
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._join())
        return await asyncio.shield(self._opening)

    async def leave(self) -> None:
        """Let the kernel go, also one that is just being found."""
        if self._opening is not None:
            await asyncio.wait({self._opening})
        await self._leave()

    async def _join(self) -> Session:
        await self._leave()
        kernel = await asyncio.to_thread(self._find)
        session = Session(kernel)
        try:
            await session.__aenter__()
        except BaseException:
            await asyncio.to_thread(kernel.finish)
            raise
        self._open, self._end = (kernel, session), select.poll()
        self._end.register(kernel.pidfd, select.POLLIN)
        if self._follow is not None:
            self._following = asyncio.ensure_future(self._follow(session))
        return session

    async def _leave(self) -> None:
        if self._following is not None:
            self._following.cancel()
        if self._open is not None:
            (kernel, session), self._open = self._open, None
            await session.__aexit__()
            await asyncio.to_thread(kernel.finish)
