"""What only some handlers need: questions to the bus, and an event loop for coroutines. It is imported at the first of
them.

Questions go through `ctx.runtime`, for tools that were granted `permissions: [agents]`, and through `ctx.tools`, for
the tool that was granted `permissions: [tools]`. In a plain handler a question waits for its answer. Where an event
loop runs, it returns something to await. A question that fails raises AgentError.

Source: requirements CONTEXT-09, AGENTS-12 to AGENTS-30; schemas/WORKER.md "ask".
"""

from __future__ import annotations

import sys
from _contextvars import ContextVar, copy_context  # without the module around them
from _thread import allocate_lock, start_new_thread

from . import wire
from .api import AgentError

TYPE_CHECKING = False  # importing typing would cost a cold jail 5 ms
if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable
    from typing import Any

    from .running import Running, Serving

#: One question as it travels (bytes). The host refuses more, and frames that are larger still end the jail.
MAX_ASK = 256 << 10

#: Longer waits are cut to this (milliseconds): no call lasts that long.
MAX_TIMEOUT_MS = 1 << 31
_NUMBER = (int, float)
_KINDS: dict[str, Any] = {
    "target": str, "instanceKey": str, "eventType": str, "cwd": str, "timeoutMs": _NUMBER, "metadata": dict,
}  # fmt: skip


class Questions:
    """All questions of this process that wait for an answer."""

    def __init__(self, worker: Serving) -> None:
        self._worker = worker
        self._next_number = iter(range(1, 1 << 62)).__next__  # no two threads get the same
        self._waiting: dict[int, Callable[[dict[str, Any]], None]] = {}

    def ask(self, call: Running, op: str, fields: dict[str, Any]) -> Any:
        """Ask, and wait for the answer; where an event loop runs in this thread, return something to await."""
        self._check(call)
        given = {name: _checked(name, value) for name, value in fields.items() if value is not None}
        number = self._next_number()
        body = _packed({"type": "ask", "callId": call.id, "askId": number, "op": op, **given}, "ctx.runtime")
        loop = _running_loop()
        return self._block(number, body) if loop is None else self._future(number, body, loop)

    def send(self, call: Running, questions: list[tuple[str, Any, Callable[[dict[str, Any]], None]]]) -> None:
        """Ask each (operation, value, who gets the `answer` frame) and return. All of them are written together.

        Who gets an answer is called on the thread that reads, and must not wait. Raises AgentError and TypeError
        before anything is sent.
        """
        self._check(call)
        head, handles, bodies = _ASK + wire.pack_str(call.id) + _OP, {}, []
        for op, value, handle in questions:
            number = self._next_number()
            handles[number] = handle
            value = _packed(value, "the arguments")
            bodies.append(head + wire.pack_str(op) + _ASK_ID + wire.pack(number) + _VALUE + value)
        self._waiting.update(handles)
        self._worker.send_all(bodies)

    def _check(self, call: Running) -> None:
        worker = self._worker
        if worker.forked:
            raise AgentError("a copy of the tool's process asks nothing", code="E_CALL_ENDED")
        if call.pending or worker.running.get(call.id) is not call:
            raise AgentError("the call has ended, and what it may ask with it", code="E_CALL_ENDED")

    def answered(self, frame: dict[str, Any]) -> None:
        """Handle an `answer` frame, on the thread that reads. An answer that nobody waits for is dropped."""
        handle = self._waiting.pop(frame["askId"], None)
        if handle is not None:
            handle(frame)

    def _block(self, number: int, body: bytes) -> Any:
        done = allocate_lock()
        done.acquire()
        answers: list[dict[str, Any]] = []

        def handle(frame: dict[str, Any]) -> None:
            answers.append(frame)
            done.release()

        self._waiting[number] = handle
        self._worker.send(body)
        self._worker.wait(done)
        return value_of(answers[0])

    def _future(self, number: int, body: bytes, loop: Any) -> Any:
        future = loop.create_future()

        def settle(frame: dict[str, Any]) -> None:
            if future.done():
                return  # cancelled meanwhile
            try:
                future.set_result(value_of(frame))
            except AgentError as error:
                future.set_exception(error)

        def handle(frame: dict[str, Any]) -> None:
            try:  # noqa: SIM105 # contextlib is not imported here
                loop.call_soon_threadsafe(settle, frame)
            except RuntimeError:
                pass  # the handler has closed its loop

        self._waiting[number] = handle
        self._worker.send(body)
        return future


#: The beginning of an `ask` of a value, up to its callId, and what stands before its other fields.
_ASK, _OP, _ASK_ID, _VALUE = b"\x85\xa4type\xa3ask\xa6callId", b"\xa2op", b"\xa5askId", b"\xa5value"


def _packed(asked: Any, what: str) -> bytes:
    """What is asked as it travels; `what` it is called in an error. Raises TypeError, AgentError."""
    try:
        body = wire.pack(asked)
    except wire.BadValue as error:
        raise TypeError(str(error).replace("output", what, 1)) from None
    if len(body) > MAX_ASK:
        message = f"what is asked has {len(body)} bytes, limit {MAX_ASK}"
        raise AgentError(message, code="E_TOOL_LIMIT", suggestion="Write it to a file, and say where.")
    return body


def _checked(name: str, value: Any) -> Any:
    """An argument as the host takes it: what is of another type there ends the jail. Raises TypeError."""
    kind = _KINDS.get(name)
    if kind is None:
        return value
    if not isinstance(value, kind) or (kind is _NUMBER and isinstance(value, bool)):
        raise TypeError(f"ctx.runtime: {name} is no {'number' if kind is _NUMBER else kind.__name__}")
    return max(0, min(int(value), MAX_TIMEOUT_MS)) if kind is _NUMBER else value


def value_of(frame: dict[str, Any]) -> Any:
    """The value of an `answer` frame. Raises AgentError for an error."""
    error = frame.get("error")
    if error is None:
        return frame.get("value")
    raise AgentError(
        error["message"], code=error.get("code"), suggestion=error.get("suggestion"), help_url=error.get("helpUrl")
    )


def _running_loop() -> Any:
    asyncio = sys.modules.get("asyncio")  # without it no loop runs
    return None if asyncio is None else asyncio._get_running_loop()


# --- coroutines -------------------------------------------------------------------------------------------------------

_call_id: ContextVar[str | None] = ContextVar("call", default=None)


class AsyncCalls:
    """Asynchronous handlers: one event loop on a thread of its own, made when the first coroutine turns up."""

    def __init__(self, worker: Serving) -> None:
        import asyncio  # takes some 40 ms, which a tool without coroutines never pays

        self._worker = worker
        self._asyncio = asyncio
        self._loop = asyncio.new_event_loop()
        start_new_thread(self._run, ())

    def _run(self) -> None:
        self._asyncio.set_event_loop(self._loop)
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
        context = copy_context()
        context.run(_call_id.set, call.id)
        call.task = self._loop.create_task(_result(awaitable), context=context)
        call.task.add_done_callback(lambda task: self._done(call, task))
        if call.cancelled:
            call.task.cancel()

    def _done(self, call: Running, task: asyncio.Task[Any]) -> None:
        def result() -> Any:
            if task.cancelled():
                raise self._asyncio.CancelledError("the call was cancelled")
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
