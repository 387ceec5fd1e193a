"""Calls of bundled tools whose handlers run in the agent's process, over its own link: `agents`, `handoff`, and those
of features.

The rules are those of calls over the bus: a call is checked against the step's catalog and the tool's schema, runs
inside the same middleware and ends with exactly one result. A call has as much time as its turn, because it waits for
another turn.

Source: docs/decisions/051; requirements CALL-01 to CALL-04, AGENTS-05.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from goondan.agentproc.base.agents import agents
from goondan.agentproc.base.handoff import handoff
from goondan.agentproc.calls import failed_result
from goondan.agentproc.catalog import Allowed, StepCatalog
from goondan.agentproc.conversation import error_result
from goondan.agentproc.extensions.results import output_of, tool_error_of
from goondan.agentproc.open_calls import OpenCalls
from goondan.agentproc.swarm import Handler, Swarm
from goondan.features import parts
from goondan.schemas.bundle.address import build_tool_name
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ToolResult

#: The tool that asks for the end of pending work. The tool host answers it for every handle but those of handoffs.
GET_RESULT: Final = "tool-result__get"
#: The handlers by their full names. A feature has `HANDLERS` in its `base`.
HANDLERS: Final[dict[str, Handler]] = {
    build_tool_name(tool, export): handler
    for tool, handlers in (
        ("agents", agents.handlers),
        ("handoff", handoff.handlers),
        *((tool, found) for module in parts("base") for tool, found in getattr(module, "HANDLERS", {}).items()),
    )
    for export, handler in handlers.items()
} | {GET_RESULT: handoff.get}

log = logging.getLogger("agentproc")


class BaseCalls(OpenCalls):
    """The calls of one turn."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        super().__init__()

    def start(
        self, catalog: StepCatalog, name: str, args: Any, *, tool_call_id: str, done: Callable[[ToolResult], None]
    ) -> None:
        """Check the call and make it; `done` gets its result, never from inside this function."""
        allowed = catalog.check(name, args)
        if not isinstance(allowed, Allowed):
            self._loop.call_soon(done, failed_result(allowed, catalog.error_limit(name)))
            return
        limit = allowed.item.error_message_limit

        async def call() -> None:
            result = await self._run(name, tool_call_id, allowed.args)
            self._open.pop(tool_call_id, None)
            done(result if result.error is None else failed_result(result.error, limit))

        self._open[tool_call_id] = self._loop.create_task(call())

    async def _run(self, name: str, tool_call_id: str, args: dict[str, Any]) -> ToolResult:
        try:
            value = await HANDLERS[name](self._swarm, tool_call_id, args)
            return value if isinstance(value, ToolResult) else ToolResult(status="ok", output=output_of(value))
        except GoondanError as error:
            return error_result(tool_error_of(error, "E_AGENT_FAILED"))
        except Exception as error:
            log.exception("bundled tool %s", name)
            return error_result(tool_error_of(error, "E_INTERNAL"))
