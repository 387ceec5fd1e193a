"""Calls of one turn that run in the agent's process: of tools that extensions registered, and of bundled ones.

What stands before them is the same for both: a person, if a rule asks for one, and then the turn's budget. The broker
does both for calls that go to a tool host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from agentproc.approvals import Approvals
from agentproc.base_calls import BaseCalls
from agentproc.budget import TurnBudget
from agentproc.calls import CallContext
from agentproc.catalog import Allowed, Catalog, StepCatalog
from agentproc.extensions.dynamic_tools import DynamicTools
from agentproc.extensions.local_calls import LocalCalls
from agentproc.turn import RunTool
from schemas.frames import ToolResult


class OwnCalls:
    """Those of the turn `turn_id`. `stepped` is called before the result of a bundled one is given."""

    def __init__(
        self,
        turn_id: str,
        tools: DynamicTools,
        catalog: Catalog,
        local: LocalCalls,
        base: BaseCalls,
        approvals: Approvals,
        budget: TurnBudget | None,
        stepped: Callable[[], None],
    ) -> None:
        self._turn_id = turn_id
        self._tools = tools
        self._agent = catalog
        self._local = local
        self._base = base
        self._approvals = approvals
        self._budget = budget
        self._stepped = stepped

    def runs(self, name: str) -> bool:
        """Whether calls of this tool run here."""
        return self._tools.find(name) is not None or self._agent.runs_here(name)

    def start(
        self, action: RunTool, args: Any, catalog: StepCatalog, context: CallContext, then: Callable[[ToolResult], None]
    ) -> None:
        """Make this call with these arguments, when it may run; `then` gets its result."""
        part = action.part
        run = partial(self._count, action, args, catalog, context, then)
        self._approvals.admit(catalog, part.tool_name, args, part.tool_call_id, context, run=run, done=then)

    def _count(
        self, action: RunTool, args: Any, catalog: StepCatalog, context: CallContext, then: Callable[[ToolResult], None]
    ) -> None:
        part, run = action.part, partial(self._run, action, args, catalog, context, then)
        if self._budget is not None and isinstance(catalog.check(part.tool_name, args), Allowed):
            self._budget.count(part.tool_call_id, f"{self._turn_id}/{part.tool_call_id}", run, then)
        else:
            run()

    def _run(
        self, action: RunTool, args: Any, catalog: StepCatalog, context: CallContext, then: Callable[[ToolResult], None]
    ) -> None:
        part = action.part
        local = self._tools.get(part.tool_name)
        if local is not None:
            self._local.start(
                local,
                catalog,
                args,
                tool_call_id=part.tool_call_id,
                context=context,
                message=action.message,
                again=action.again,
                done=then,
            )
            return

        def ended(result: ToolResult) -> None:
            self._stepped()
            then(result)

        self._base.start(catalog, part.tool_name, args, tool_call_id=part.tool_call_id, done=ended)

    def drop(self, tool_call_id: str) -> None:
        """Nobody waits for this call any more."""
        self._approvals.drop(tool_call_id)
        if self._budget is not None:
            self._budget.drop(tool_call_id)
        self._local.drop(tool_call_id)
        self._base.drop(tool_call_id)

    def close(self) -> None:
        """The turn is left."""
        self._local.close()
        self._base.close()
        self._approvals.close()
