"""The tools of one agent, asked for through a kernel: what there is, and one call. Knows nothing of the wire of MCP.

Each call is an operator's event for the agent, so that what the agent's own calls pass is passed: its catalog, its
middleware, approvals, budget, and the broker's places. An instance works on one event at a time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from goondan.kernel.cli.batch import parse_arguments
from goondan.kernel.cli.commands.call import tool_result
from goondan.kernel.cli.interrupts import CANCEL_S
from goondan.kernel.cli.session import Session
from goondan.kernel.mcp.offering import call_result, failure, named, offered
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import OPERATOR_CALL, OPERATOR_TOOLS, OperatorCall, OperatorTool
from goondan.schemas.wire.runtime_events import RuntimeEvent

#: How long a list of tools is good (seconds). A client may ask often, and each look is a turn of the agent.
LIST_S: Final = 1.0
#: How long the agent may take to tell its tools (seconds): it may have to be started, and its extensions loaded.
LIST_PATIENCE_S: Final = 60.0
#: Calls that wait or run at once. An instance does one after another; more would only wait longer.
MAX_OPEN: Final = 64

#: How long the client may take to read the progress that came just before the result (seconds).
LAST_NEWS_S: Final = 1.0

#: Told how far a call is: done, total, words.
Progress = Callable[[float, float | None, str | None], Awaitable[None]]


class Offer:
    """The tools of `agent` that fit `patterns`, called in its instance `instance`. `short`: under short names."""

    def __init__(
        self,
        session: Session,
        agent: str,
        instance: str,
        patterns: Sequence[str],
        workdir: str | None = None,
        *,
        short: bool = False,
    ) -> None:
        self._session = session
        self._agent = agent
        self._instance = instance
        self._patterns = patterns
        self._workdir = workdir
        self._short = short
        self._known: list[OperatorTool] = []
        self._until = 0.0
        self._looking: asyncio.Task[list[OperatorTool]] | None = None
        self._open = 0
        self._cancelling: set[asyncio.Task[None]] = set()

    async def tools(self) -> dict[str, OperatorTool]:
        """What is offered now, by the names that clients get. Raises GoondanError when the agent cannot tell."""
        if not self._patterns:
            return {}
        return self._named(await self.everything())

    async def everything(self) -> list[OperatorTool]:
        """All that the agent could call now. Those who ask at once get one answer. Raises GoondanError."""
        if time.monotonic() < self._until:
            return self._known
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())
        return await asyncio.shield(self._looking)

    async def full_name(self, name: str) -> str | None:
        """The full name of a tool that is offered under this name; None: there is none. One that was offered before
        needs no new look: the agent itself refuses a call of what it no longer has. Raises GoondanError.
        """
        found = self._named(self._known).get(name) or (await self.tools()).get(name)
        return None if found is None else found.name

    def schema_of(self, name: str) -> Mapping[str, Any] | None:
        """The schema of a tool that was listed last; None when nothing is known of it."""
        found = self._named(self._known).get(name)
        return None if found is None else found.parameters

    async def call(self, name: str, arguments: Any, progress: Progress) -> dict[str, Any]:
        """Call one tool; the answer in the protocol's form. Everything that goes wrong is in the answer.

        When the waiting is cancelled, the turn is cancelled with its call.
        """
        if self._open >= MAX_OPEN:
            return failure(_plain(fail("E_OVERLOADED", f"{MAX_OPEN} calls are under way, and no more may")))
        self._open += 1
        try:
            return await self._call(name, arguments, progress)
        except GoondanError as error:
            return failure(_plain(error))
        finally:
            self._open -= 1

    async def close(self) -> None:
        """Wait until cancelled calls have ended, for some time."""
        if self._looking is not None:
            self._looking.cancel()
        if self._cancelling:
            await asyncio.wait(self._cancelling, timeout=CANCEL_S)

    # --- inside

    def _named(self, tools: Sequence[OperatorTool]) -> dict[str, OperatorTool]:
        return named(offered(tools, self._patterns), short=self._short)

    async def _look(self) -> list[OperatorTool]:
        answer = await self._session.ask(
            self._agent,
            self._instance,
            OPERATOR_TOOLS,
            None,
            event_id=self._session.new_id(),
            workdir=self._workdir,
            timeout_s=LIST_PATIENCE_S,
        )
        self._known = msgspec.convert(tool_result(answer).get("output") or [], list[OperatorTool])
        self._until = time.monotonic() + LIST_S
        return self._known

    async def _call(self, name: str, arguments: Any, progress: Progress) -> dict[str, Any]:
        # As everything that comes in as JSON: within 64 bits, without what no frame can hold.
        args = parse_arguments(json.dumps(arguments if arguments is not None else {}))
        event_id = self._session.new_id()
        news: asyncio.Queue[RuntimeEvent | None] = asyncio.Queue()
        telling = asyncio.ensure_future(_tell(news, progress))
        try:
            answer = await self._session.ask(
                self._agent,
                self._instance,
                OPERATOR_CALL,
                OperatorCall(name, args),
                event_id=event_id,
                workdir=self._workdir,
                listener=news.put_nowait,
            )
            news.put_nowait(None)
            await asyncio.wait({telling}, timeout=LAST_NEWS_S)  # the protocol wants it before the answer
        except asyncio.CancelledError:
            task = asyncio.ensure_future(self._cancel(event_id))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)
            raise
        finally:
            telling.cancel()
        return call_result(tool_result(answer), {"turnId": answer.turn_id, "traceId": answer.trace_id})

    async def _cancel(self, event_id: str) -> None:
        with suppress(GoondanError):  # it has just ended
            await self._session.cancel(event_id, CANCEL_S)


async def _tell(news: asyncio.Queue[RuntimeEvent | None], progress: Progress) -> None:
    """Tell the client how far a call is. The protocol wants each number to be larger than the one before."""
    last = -1.0
    while (event := await news.get()) is not None:
        if event.kind == "tool.waits":
            last += 0.001
            await progress(max(last, 0.0), None, "a person is asked whether this call may be made")
        elif event.kind == "tool.progress" and event.done is not None and event.done > last:
            last = event.done
            await progress(event.done, event.total, event.message)


def _plain(error: GoondanError) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(error.info)
    return plain
