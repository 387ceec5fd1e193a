"""The kernel behind a door."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from goondan.kernel.cli.attach import Kernel, hold
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.session import GONE, Listener, Session
from goondan.kernel.cli.state import BundleTarget
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Answer


class Swarm:
    """The kernel of a place: found at the first use, and found again when it was lost. Use it with `async with`."""

    def __init__(self, place: BundleTarget) -> None:
        self.place = place
        self.state_dir = place.state_dir
        self._kernel: Kernel | None = None
        self._session: Session | None = None
        self._finding = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._let_go()

    async def ask(
        self, message: Message, *, listener: Listener | None = None, timeout_s: float | None = None
    ) -> Answer:
        """Send a message and wait for its answer. Raises GoondanError."""
        return await (await self._found()).ask(message, listener=listener, timeout_s=timeout_s)

    async def admin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask the broker itself. Raises GoondanError."""
        return await (await self._found()).admin(request)

    async def _found(self) -> Session:
        async with self._finding:
            if self._session is not None and not self._session.lost.done():
                return self._session
            await self._let_go()
            kernel = await asyncio.to_thread(hold, self.place)
            if kernel is None:
                raise fail("E_KERNEL_NOT_RUNNING", f"no kernel runs {self.place.bundle}")
            self._kernel = kernel
            session = Session(kernel)
            try:
                await session.__aenter__()
            except GoondanError as error:
                await self._let_go()
                if error.info.code in GONE:
                    raise fail("E_KERNEL_NOT_RUNNING", error.info.message) from None
                raise
            self._session = session
            return session

    async def _let_go(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.__aexit__(None, None, None)
        if self._kernel is not None:
            kernel, self._kernel = self._kernel, None
            await asyncio.to_thread(kernel.finish)
