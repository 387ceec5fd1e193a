"""Asynchronous handlers: one event loop on a thread of its own, made when the first coroutine turns up.

Importing asyncio takes some 40 ms, which a tool without coroutines never pays.
"""

from __future__ import annotations

import asyncio
import contextvars
from _thread import start_new_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable
    from typing import Any

    from .running import Running, Serving

_call_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("call", default=None)


class AsyncCalls:
    """The event loop and the calls in it."""

    def __init__(self, worker: Serving) -> None:
        self._worker = worker
        self._loop = asyncio.new_event_loop()
        start_new_thread(self._run, ())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, call: Running, awaitable: Awaitable[Any]) -> None:
        """Run a handler's awaitable to its result. Called from any thread."""
        self._loop.call_soon_threadsafe(self._begin, call, awaitable)

    def cancel(self, call: Running) -> None:
        """Cancel the call's task. Called from any thread."""
        self._loop.call_soon_threadsafe(call.task.cancel)

    def current(self) -> str | None:
        """The call of the running task."""
        return _call_id.get()

    def _begin(self, call: Running, awaitable: Awaitable[Any]) -> None:
        context = contextvars.copy_context()
        context.run(_call_id.set, call.id)
        call.task = self._loop.create_task(_result(awaitable), context=context)
        call.task.add_done_callback(lambda task: self._done(call, task))
        if call.cancelled:
            call.task.cancel()

    def _done(self, call: Running, task: asyncio.Task[Any]) -> None:
        def result() -> Any:
            if task.cancelled():
                raise asyncio.CancelledError("the call was cancelled")
            return task.result()

        self._worker.conclude(call, result, awaits=False)


async def _result(awaitable: Awaitable[Any]) -> Any:
    """Turns SystemExit and its like, which would end the loop, into an ordinary failure of the call."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise HandlerExit(error) from None


class HandlerExit(Exception):
    """A coroutine called sys.exit or was interrupted."""

    def __init__(self, error: BaseException) -> None:
        code = getattr(error, "code", None)
        super().__init__(f"sys.exit({code!r}) was called" if isinstance(error, SystemExit) else "interrupted")
