"""Calls of tools whose handlers run in the agent's process: those that extensions registered.

The rules are those of calls over the bus: a call is checked against the step's catalog and the tool's schema, is
limited by the turn's time and ends with exactly one result. A call that is given up has no result.

A call ends with its handler's return value, or its exception. A handler that is no coroutine function runs in a thread,
because it may block.

The begin of a call is recorded before its handler runs. A turn that another process takes up runs such a call again
only if the tool is idempotent. Otherwise its outcome is unknown, and its result says so.

Source: docs/design/tools.md section 8; requirements DYNAMIC-07, CALL-01 to CALL-04, HANDLER-02,
CONTEXT-01 to CONTEXT-08.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from contextvars import ContextVar
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Final

from msgspec import Struct

from goondan.agentproc.calls.caller import CallContext, OpenCalls, call_time_left, failed_result
from goondan.agentproc.conversation.store import ConversationStore
from goondan.agentproc.extensions import api, dynamic_tools, engine
from goondan.agentproc.extensions.points.results import bad_output, output_of, tool_error_of, trace_of
from goondan.agentproc.machine.catalog import REFUSED, Allowed, StepCatalog
from goondan.agentproc.machine.messages import Message, error_result
from goondan.schemas.bundle.launch import Limits
from goondan.schemas.wire.errors import GoondanError, tool_error
from goondan.schemas.wire.frames import ToolError, ToolResult

#: The largest output of a call (bytes of its encoding): the default of tools in jails. The whole output goes into the
#: conversation, and to the model with every later request.
MAX_OUTPUT: Final = Limits().output_mb << 20

#: The tool call in which a handler runs: `<turnId>/<toolCallId>`.
current_call: ContextVar[str] = ContextVar("current_call", default="")

log = logging.getLogger("agentproc")


class LocalContext:
    """The `ctx` that a handler gets: as in a tool host, read-only (CONTEXT-01 to CONTEXT-08)."""

    __slots__ = ("_values",)

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"ctx has no {name}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"ctx.{name} is read-only")

    def __dir__(self) -> list[str]:
        return sorted(self._values)


class LocalCalls(OpenCalls):
    """The calls of one turn that run here. `workdir` is the instance's. `ask` makes the `ctx.runtime` of a call. `lost`
    is called when the lease is gone.
    """

    def __init__(
        self,
        agent: str,
        instance_key: str,
        workdir: str,
        store: ConversationStore,
        ask: Callable[[str], api.Agents],
        lost: Callable[[], None],
    ) -> None:
        self._agent = agent
        self._instance_key = instance_key
        self._workdir = workdir
        self._store = store
        self._ask = ask
        self._lost = lost
        super().__init__()

    def start(
        self,
        tool: dynamic_tools.DynamicTool,
        catalog: StepCatalog,
        args: Any,
        *,
        tool_call_id: str,
        context: CallContext,
        message: Message,
        again: bool,
        done: Callable[[ToolResult], None],
    ) -> None:
        """Check the call and run it. `done` gets its result, never from inside this function.

        `again`: an earlier incarnation may have run the call.
        """
        allowed = catalog.check(tool.item.name, args)
        if not isinstance(allowed, Allowed):
            self._loop.call_soon(done, failed_result(allowed, tool.item.error_message_limit))
            return
        if not tool.item.idempotent:
            try:
                unknown = self._begin(tool.item.name, context.turn_id, tool_call_id, again)
            except GoondanError as error:
                if error.info.code == "E_LEASE_LOST":
                    self._lost()
                    return
                unknown = tool_error_of(error, error.info.code)
            if unknown is not None:
                self._loop.call_soon(done, failed_result(unknown, tool.item.error_message_limit))
                return
        ctx = LocalContext(
            agent_name=self._agent,
            instance_key=self._instance_key,
            turn_id=context.turn_id,
            tool_call_id=tool_call_id,
            message=message,
            workdir=self._workdir,
            runtime=self._ask(tool_call_id) if iscoroutinefunction(tool.handler) else None,  # a thread cannot await
            logger=api.ConsoleLogger(f"{tool.extension} {tool.item.name} {tool_call_id}"),
        )
        timeout_s = max(0.0, call_time_left(context, self._loop.time()))

        async def call() -> None:
            current_call.set(f"{context.turn_id}/{tool_call_id}")
            # A copy: a handler may change its arguments, and the conversation keeps the arguments that the model wrote.
            result = await run_handler(tool, copy.deepcopy(allowed.args), ctx, timeout_s)
            self.open.pop(tool_call_id, None)
            if result.error is not None:
                result = failed_result(result.error, allowed.item.error_message_limit)
            done(result)

        self.open[tool_call_id] = self._loop.create_task(call())

    def _begin(self, name: str, turn_id: str, tool_call_id: str, again: bool) -> ToolError | None:
        """Record that the call begins. Returns the error of a call that has begun before. Raises GoondanError."""
        if again and self._store.was_started(turn_id, tool_call_id):
            text = f"Tool '{name}' was running when the agent's process ended; what came of it is not known."
            return tool_error("E_TOOL_OUTCOME_UNKNOWN", text, name="AgentLost")
        with self._store.write(reserve=True):
            self._store.record_start(turn_id, tool_call_id)
        return None


async def run_handler(
    tool: dynamic_tools.DynamicTool, args: dict[str, Any], context: LocalContext, timeout_s: float | None
) -> ToolResult:
    """Run one call of a registered tool. Raises only cancellation."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            if iscoroutinefunction(tool.handler):
                value = await tool.handler(context, args)
            else:
                value = await asyncio.to_thread(_in_thread, tool.handler, context, args)
                if isinstance(value, _Raised):
                    return _failed(tool, value.error)
                if isawaitable(value):
                    value = await value
    except BaseException as error:
        if isinstance(error, TimeoutError) and limit.expired():
            text = f"Tool '{tool.item.name}' did not finish within {timeout_s or 0:.3g} s."
            return error_result(tool_error("E_TOOL_TIMEOUT", text, name="TimeoutError"))
        if isinstance(error, asyncio.CancelledError | GeneratorExit) and engine.is_ending():
            raise
        return _failed(tool, error)
    try:
        output = output_of(value)
    except ValueError as error:
        return bad_output(str(error))
    size = memoryview(output).nbytes
    if size > MAX_OUTPUT:
        text = f"The output of tool '{tool.item.name}' has {size} bytes, limit {MAX_OUTPUT}."
        return error_result(tool_error("E_TOOL_LIMIT", text, name="ToolLimitError"))
    return ToolResult(status="ok", output=output)


class _Raised(Struct):
    """The exception of a handler that ran in a thread."""

    #: The exception.
    error: BaseException


def _in_thread(handler: dynamic_tools.Handler, context: LocalContext, args: dict[str, Any]) -> Any:
    """The handler's value, or a _Raised: a future cannot carry a StopIteration, so the exception would be lost."""
    try:
        return handler(context, args)
    except BaseException as error:
        return _Raised(error)


def _failed(tool: dynamic_tools.DynamicTool, error: BaseException) -> ToolResult:
    if isinstance(error, GoondanError) and error.code == REFUSED:
        return error_result(tool_error_of(error, REFUSED))
    log.warning("tool %s of extension %s failed\n%s", tool.item.name, tool.extension, trace_of(error))
    return error_result(tool_error_of(error, "E_TOOL"))
