"""What one agent instance asks of its MCP servers outside of calls, and the news that it gets of them.

Source: docs/design/tools.md section 11; requirements MCP-11, MCP-12, MCP-20.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final, Protocol

from goondan.agentproc.calls.caller import AgentLink, until_answered
from goondan.schemas.wire import codec, errors
from goondan.schemas.wire.frames import Frame
from goondan.schemas.worker.servers import ATTACH, DETACH, NOT_CONNECTED, Listed, NamedServer, ServerListing, ServerNews

#: How much longer than the broker an agent waits (seconds), so that the broker's error comes first.
MARGIN_S: Final = 1.0
#: How long the broker may take to answer that it was told of a detachment (seconds). A process that ends waits for it.
DETACH_S: Final = 2.0

log = logging.getLogger("agentproc")


class Around(Protocol):
    """Stands between an agent instance and its servers."""

    @property
    def answers_alone(self) -> bool:
        """Whether it asks no server at all."""

    async def listing(self, server: str, ask: Callable[[], Awaitable[ServerListing]]) -> ServerListing:
        """What a server offers; `ask` asks it. Raises GoondanError."""


class Servers:
    """The MCP servers of one agent instance, by their prefixes."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._listeners: dict[str, Callable[[ServerNews], None]] = {}
        #: Attachments that were begun before their extensions are registered.
        self._begun: dict[str, asyncio.Task[ServerListing]] = {}
        #: What a feature puts around the questions; None for most.
        self.around: Around | None = None

    def begin(self, servers: Iterable[str], timeout_s: float) -> None:
        """Attach to servers at the same time. Extensions are registered one after another, and each would wait for its
        own server to start. The next `ask` for such a server gets what comes of this.
        """
        for server in servers:
            if server not in self._begun:
                self._begun[server] = asyncio.ensure_future(self._ask(ATTACH, server, timeout_s))

    async def leave_begun(self) -> None:
        """Leave the servers that were attached to early, and that nobody has asked for since."""
        left, self._begun = self._begun, {}
        for task in left.values():
            task.cancel()
        if left:
            await asyncio.wait(left.values())
        await asyncio.gather(
            *(self.detach(server) for server, task in left.items() if task.cancelled() or task.exception() is None)
        )

    async def ask(self, kind: Listed, server: str, timeout_s: float) -> ServerListing:
        """Attach to a server, or ask what it offers now. Raises GoondanError."""
        begun = self._begun.pop(server, None) if kind == ATTACH else None
        return await (self._ask(kind, server, timeout_s) if begun is None else begun)

    async def _ask(self, kind: Listed, server: str, timeout_s: float) -> ServerListing:
        ask = partial(self._ask_broker, kind, server, timeout_s)
        return await (ask() if self.around is None else self.around.listing(server, ask))

    async def _ask_broker(self, kind: Listed, server: str, timeout_s: float) -> ServerListing:
        frame = Frame(kind, payload=codec.to_raw(NamedServer(server)), deadline_ms=int(timeout_s * 1000))
        reply = await self._post(frame, timeout_s + MARGIN_S)
        return codec.from_raw(reply.payload, ServerListing)

    async def detach(self, server: str) -> None:
        """Leave a server. That nobody answers is only logged: the broker sees the end of this process."""
        if self.around is not None and self.around.answers_alone:
            return  # it was never attached to
        try:
            await self._post(Frame(DETACH, payload=codec.to_raw(NamedServer(server))), DETACH_S)
        except errors.GoondanError as error:
            log.warning("MCP server %s: %s", server, error.info.message)

    def listen(self, server: str, listener: Callable[[ServerNews], None]) -> None:
        """`listener` gets the news of this server, and nobody else does."""
        self._listeners[server] = listener

    def news(self, frame: Frame) -> None:
        """Handle `mcp.news`. Raises GoondanError E_FRAME_INVALID."""
        news = codec.from_raw(frame.payload, ServerNews)
        begun = self._begun.pop(news.server, None) if news.kind == "gone" else None
        if begun is not None:  # it ended before its extension was registered, which attaches anew
            begun.cancel()
        listener = self._listeners.get(news.server)
        if listener is not None:
            listener(news)

    async def _post(self, frame: Frame, timeout_s: float) -> Frame:
        try:
            async with asyncio.timeout(timeout_s):
                return await until_answered(self._link, frame, self._link.post(frame))
        except TimeoutError:
            raise errors.fail(NOT_CONNECTED, f"no answer within {timeout_s:g} s") from None
