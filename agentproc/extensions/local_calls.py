"""Calls of tools whose handlers run in the agent's process: those that extensions registered.

The rules are those of calls over the bus: a call is checked against the step's catalog and the tool's schema, is
limited by the turn's time and ends with exactly one result. A call that is given up has no result.

The begin of a call is recorded before its handler runs. A turn that another process takes up runs such a call again
only if the tool is idempotent. Otherwise its outcome is unknown, and its result says so.

Source: requirements DYNAMIC-07, CALL-01 to CALL-04; docs/design/tools.md section 8.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from goondan.agentproc.calls import CallContext, call_time_left, failed_result
from goondan.agentproc.catalog import Allowed, StepCatalog
from goondan.agentproc.conversation import Message
from goondan.agentproc.extensions.bundle_changes import current_call
from goondan.agentproc.extensions.contexts import Agents
from goondan.agentproc.extensions.dynamic_tools import DynamicTool, call_context, run_handler
from goondan.agentproc.extensions.values import tool_error_of
from goondan.agentproc.open_calls import OpenCalls
from goondan.agentproc.store import ConversationStore
from goondan.schemas.errors import GoondanError, tool_error
from goondan.schemas.frames import ToolError, ToolResult


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
        ask: Callable[[str], Agents],
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
        tool: DynamicTool,
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
        ctx = call_context(
            tool,
            agent=self._agent,
            instance_key=self._instance_key,
            turn_id=context.turn_id,
            call_id=tool_call_id,
            message=message,
            workdir=self._workdir,
            agents=self._ask(tool_call_id),
        )
        timeout_s = max(0.0, call_time_left(context, self._loop.time()))

        async def call() -> None:
            current_call.set(f"{context.turn_id}/{tool_call_id}")
            # A copy: a handler may change its arguments, and the conversation keeps the arguments that the model wrote.
            result = await run_handler(tool, copy.deepcopy(allowed.args), ctx, timeout_s)
            self._open.pop(tool_call_id, None)
            if result.error is not None:
                result = failed_result(result.error, allowed.item.error_message_limit)
            done(result)

        self._open[tool_call_id] = self._loop.create_task(call())

    def _begin(self, name: str, turn_id: str, tool_call_id: str, again: bool) -> ToolError | None:
        """Record that the call begins. Returns the error of a call that has begun before. Raises GoondanError."""
        if again and self._store.was_started(turn_id, tool_call_id):
            text = f"Tool '{name}' was running when the agent's process ended; what came of it is not known."
            return tool_error("E_TOOL_OUTCOME_UNKNOWN", text, name="AgentLost")
        with self._store.write(reserve=True):
            self._store.record_start(turn_id, tool_call_id)
        return None
