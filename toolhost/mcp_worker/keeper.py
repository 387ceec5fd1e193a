"""The process that holds tokens, as an MCP worker reaches it: over its channel to the tool host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from goondan.schemas.oauth import ServerOp, ServerReply
from goondan.schemas.worker_frames import LoginAnswer, LoginAsk, WorkerFrame
from goondan.toolhost.mcp_worker.failures import Failure


class TokenKeeper:
    """Asks, and gets answers. Use from the loop's thread only."""

    def __init__(self, send: Callable[[WorkerFrame], None], loop: asyncio.AbstractEventLoop) -> None:
        self._send = send
        self._loop = loop
        self._numbers = 0
        self._open: dict[int, asyncio.Future[ServerReply]] = {}

    async def ask(self, op: ServerOp, *, document: str | None = None, url: str | None = None) -> ServerReply:
        """Ask, and wait for the answer. Raises Failure."""
        self._numbers += 1
        number = self._numbers
        waits = self._open[number] = self._loop.create_future()
        self._send(LoginAsk(login_id=number, op=op, document=document, url=url))
        try:
            reply: ServerReply = await waits
            return reply
        finally:
            del self._open[number]

    def answered(self, answer: LoginAnswer) -> None:
        """An answer has come. One that nobody waits for is skipped."""
        waits = self._open.get(answer.login_id)
        if waits is None or waits.done():
            return
        if answer.reply is not None:
            waits.set_result(answer.reply)
        elif answer.error is not None:
            code = answer.error.code or "E_OAUTH_UNAVAILABLE"
            waits.set_exception(Failure(code, answer.error.message, name=answer.error.name))
        else:
            waits.set_exception(Failure("E_OAUTH_UNAVAILABLE", "the process that holds tokens said nothing"))
