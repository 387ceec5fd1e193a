"""Calls of one turn that run in the agent's process: of tools that extensions registered, and of bundled tools.

The bundled tools whose handlers run here, over the agent's own link, are `agents`, `handoff` and `self-restart`. Their
rules are those of calls over the bus: a call is checked against the step's catalog and the tool's schema, runs inside
the same middleware and ends with exactly one result. A call has as much time as its turn, because it waits for another
turn. Most turns have no such call and ask no other agent. So the parts for both are made at their first use.

Source: docs/decisions/051; requirements CALL-01 to CALL-04, AGENTS-05.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

from goondan.agentproc.base.agents import agents
from goondan.agentproc.base.handoff import handoff
from goondan.agentproc.calls.caller import CallContext, OpenCalls, failed_result
from goondan.agentproc.calls.swarm import Handler, Swarm
from goondan.agentproc.extensions.api import Asking
from goondan.agentproc.extensions.local_calls import LocalCalls
from goondan.agentproc.extensions.points.results import output_of, tool_error_of
from goondan.agentproc.machine.catalog import Allowed, StepCatalog
from goondan.agentproc.machine.messages import error_result
from goondan.agentproc.machine.questions import Asker
from goondan.agentproc.machine.turn import RunTool
from goondan.agentproc.turn.instance import Instance
from goondan.features import parts
from goondan.schemas.bundle.address import build_tool_name
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ToolResult
from goondan.schemas.wire.questions import HANDOFF_PREFIX


class OwnCalls:
    """The calls of the turn `turn_id` that run here, in the instance's `workdir`. `deadline` is the turn's, in the
    loop's time; None: there is no end. `stepped` is called before the result of a bundled tool is given. `lost` is
    called when the lease is gone. `end_of` says what became of handed-over work (completions.py), by its handle.
    """

    def __init__(
        self,
        instance: Instance,
        turn_id: str,
        workdir: str,
        deadline: float | None,
        *,
        stepped: Callable[[], None],
        lost: Callable[[], None],
        end_of: Callable[[str], ToolResult],
    ) -> None:
        self._instance = instance
        self._turn_id = turn_id
        self._workdir = workdir
        self._deadline = deadline
        self._stepped = stepped
        self._lost = lost
        self._end_of = end_of

    @cached_property
    def asking(self) -> Asking:
        """Through it the turn's extensions ask other agents."""
        return Asking(self._swarm)

    @cached_property
    def _swarm(self) -> Swarm:
        instance = self._instance
        asker = Asker(instance.spec.name, instance.instance_key, self._turn_id)
        swarm = Swarm(instance.link, asker, self._deadline, instance.clock, instance.events)
        swarm.patience_ms, swarm.end_of = instance.spec.request_timeout_ms, self._end_of
        return swarm

    def heard(self) -> None:
        """Work that was handed over has ended."""
        if "_swarm" in self.__dict__:
            self._swarm.news.set()

    @cached_property
    def _local(self) -> LocalCalls:
        instance = self._instance
        place = instance.spec.name, instance.instance_key, self._workdir, instance.store
        return LocalCalls(*place, self.asking.in_call, self._lost)

    @cached_property
    def _base(self) -> BaseCalls:
        return BaseCalls(self._swarm)

    @property
    def restarts(self) -> bool:
        """Whether one of the calls has asked for a restart of the kernel."""
        return "_swarm" in self.__dict__ and self._swarm.restarts

    def move_deadline(self, deadline: float | None) -> None:
        """Set the end of the turn."""
        self._deadline = deadline
        if "_swarm" in self.__dict__:
            self._swarm.deadline = deadline

    def runs(self, name: str, args: Any) -> bool:
        """Whether this call runs here."""
        if name == GET_RESULT and isinstance(args, dict) and str(args.get("handle")).startswith(HANDOFF_PREFIX):
            return True
        return self._instance.tools.get(name) is not None or self._instance.catalog.runs_here(name)

    def start(
        self,
        action: RunTool,
        args: Any,
        catalog: StepCatalog,
        context: CallContext,
        then: Callable[[ToolResult], None],
    ) -> None:
        """Make this call with these arguments. `then` gets its result."""
        part = action.part
        local = self._instance.tools.get(part.tool_name)
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
        """Forget this call: its result is not wanted any more."""
        for calls in self._begun():
            calls.drop(tool_call_id)

    def close(self) -> None:
        """Forget all calls: the turn is left."""
        if "asking" in self.__dict__:
            self.asking.close()
        for calls in self._begun():
            calls.close()

    def _begun(self) -> list[LocalCalls | BaseCalls]:
        return [self.__dict__[name] for name in ("_local", "_base") if name in self.__dict__]


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
