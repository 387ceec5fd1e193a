"""The kernel behind `gdn acp`: the one that runs, or one that is started as `gdn call` does, found again when it has
gone; and what there is in it.

The bundle is looked at once for each kernel, without a module of it being loaded.
"""

from __future__ import annotations

import asyncio
import select
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.kernel.bundle.loader import inspect_bundle
from goondan.kernel.cli.attach import Kernel, attach_or_start
from goondan.kernel.cli.session import Session
from goondan.kernel.cli.state import BundleTarget
from goondan.kernel.traces.conversations import place_of, read_file
from goondan.schemas.wire import codec
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import OPERATOR_AGENT

#: The messages of one turn, while it runs and afterwards. The digits of a position stand between `.` and `.:`.
_OF_TURN: Final = (
    "SELECT message FROM base WHERE id > ?1 || '.' AND id < ?1 || '.:' "
    "UNION ALL SELECT message FROM (SELECT message FROM events WHERE turn_id = ?1 AND message IS NOT NULL "
    "ORDER BY position)"
)


class Swarm:
    """The swarm of a bundle. `opened` is called with each new connection, and told when the connection ends."""

    def __init__(self, place: BundleTarget, agent: str | None, opened: Callable[[Session], Awaitable[None]]) -> None:
        self.place = place
        self._agent = agent
        self._opened = opened
        self._kernel: Kernel | None = None
        self._session: Session | None = None
        self._following: asyncio.Task[None] | None = None
        self._finding = asyncio.Lock()
        self._found: tuple[list[str], list[str]] | None = None

    async def session(self) -> Session:
        """The connection to the kernel that runs. Raises GoondanError with the reason why there is none."""
        async with self._finding:
            if self._session is None or self._session.lost.done() or self._is_gone():
                await self._leave()
                self._kernel = await _in_thread(lambda: attach_or_start(self.place, ()))
                session = Session(self._kernel)
                await session.__aenter__()
                self._session = session
                self._following = asyncio.ensure_future(self._opened(session))
            return self._session

    async def agents(self) -> list[str]:
        """The agents that may answer, the one that answers first at the beginning. Raises GoondanError."""
        await self.session()
        return (await self._look())[0]

    async def servers(self) -> list[str]:
        """The names of the Extensions of the bundle that are MCP servers. Raises GoondanError."""
        await self.session()
        return (await self._look())[1]

    async def messages(self, agent: str, key: str, event_id: str) -> list[Any]:
        """The messages of an event's turn, in order, as they are stored so far. Raises GoondanError E_STATE."""
        return await asyncio.to_thread(_messages, self.place.state_dir, agent, key, event_id)

    async def close(self) -> None:
        """Let the kernel go. One that nobody else uses ends."""
        async with self._finding:
            await self._leave()

    # --- inside

    def _is_gone(self) -> bool:
        """Whether the kernel has gone just now: its connection may hear of it after the client's next request."""
        return self._kernel is None or bool(select.select([self._kernel.pidfd], [], [], 0)[0])

    async def _leave(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        session, kernel = self._session, self._kernel
        self._session = self._kernel = self._following = self._found = None
        if session is not None:
            await session.__aexit__()
        if kernel is not None:
            await _in_thread(kernel.finish)

    async def _look(self) -> tuple[list[str], list[str]]:
        if self._found is None:
            self._found = await asyncio.to_thread(self._inspect, self._kernel)
        return self._found

    def _inspect(self, kernel: Kernel | None) -> tuple[list[str], list[str]]:
        found = inspect_bundle(
            self.place.bundle, state_dir=self.place.state_dir, handlers=False, policy=self.place.policy
        ).checked
        names = sorted(name for name in found.agents if name != OPERATOR_AGENT)
        entry = kernel.entry_agent if kernel is not None else None
        if self._agent is not None and self._agent not in names:
            raise fail("E_AGENT_NOT_FOUND", f"the bundle has no agent {self._agent!r}; it has {', '.join(names)}")
        if self._agent is None and entry is None:
            raise fail("E_AGENT_NOT_FOUND", "the bundle has no entry agent to talk to")
        first = self._agent or entry or ""
        servers = [server.spec.extension for server in found.servers.values()]
        return [first, *(name for name in names if name != first and self._agent is None)], servers


async def _in_thread(work: Callable[[], Any]) -> Any:
    """Do blocking work to its end, also when nobody waits for it any more: a kernel that was found must be let go."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):
            if isinstance(found := await task, Kernel):
                await asyncio.to_thread(found.finish)
        raise


def _messages(state_dir: str, agent: str, key: str, event_id: str) -> list[Any]:
    def query(db: sqlite3.Connection) -> list[bytes]:
        row = db.execute("SELECT turn_id FROM turns WHERE event_key = ?", (event_id,)).fetchone()
        return [] if row is None else [data for (data,) in db.execute(_OF_TURN, row)]

    place = place_of(state_dir, agent, key)
    try:
        return [msgspec.msgpack.decode(row) for row in read_file(place, query) or []]
    except codec.DECODE_ERRORS as error:
        raise fail("E_STATE", f"{place.path}: a message cannot be read: {error}") from None
