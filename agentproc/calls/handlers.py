"""The end of a call's way: it is made over the bus, or by a handler in this process, and its result comes back here.

In this process run the tools that extensions registered, the reader of shortened results, and the bundled tools that
speak over the agent's own link (`agents`, `handoff`). Their rules are those of calls over the bus: a call is checked
against the step's catalog and the tool's schema, runs inside the same middleware and ends with exactly one result. A
call of a bundled tool has as much time as its turn, because it waits for another turn. Most turns have no such call and
ask no other agent, so what these need is made at its first use.

Source: docs/design/delivery.md section 6; docs/decisions/051; requirements CALL-01 to CALL-04, AGENTS-05.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Final

from msgspec import structs

from goondan.agentproc.base.agents import agents
from goondan.agentproc.base.handoff import handoff
from goondan.agentproc.calls.asks import ToolAsks
from goondan.agentproc.calls.caller import Answered, CallContext, OpenCalls, failed_result
from goondan.agentproc.calls.swarm import Handler, Swarm
from goondan.agentproc.extensions import api, local_calls
from goondan.agentproc.extensions.points.results import output_of, tool_error_of
from goondan.agentproc.machine import catalog, context_shape, questions
from goondan.agentproc.machine.messages import REASONING, Message, encode_message, error_result
from goondan.agentproc.machine.turn import Pause, RunTool, Turn
from goondan.agentproc.model.context import TurnContext
from goondan.agentproc.providers.history import KEPT
from goondan.agentproc.turn.parts import Done, TurnCore, TurnParts
from goondan.features import parts as files_of_features
from goondan.schemas.bundle import address, arguments
from goondan.schemas.wire import errors, frames, spans
from goondan.schemas.wire.questions import HANDOFF_PREFIX

#: The tool that asks for the end of pending work. The tool host answers it for every handle but those of handoffs.
GET_RESULT: Final = "tool-result__get"
#: The handlers of bundled tools by their full names. A feature has `HANDLERS` in its `base`.
HANDLERS: Final[dict[str, Handler]] = {
    address.build_tool_name(tool, export): handler
    for tool, handlers in (
        ("agents", agents.handlers),
        ("handoff", handoff.handlers),
        *(
            (tool, found)
            for module in files_of_features("base")
            for tool, found in getattr(module, "HANDLERS", {}).items()
        ),
    )
    for export, handler in handlers.items()
} | {GET_RESULT: handoff.get}

log = logging.getLogger("agentproc")


class CallHandlers:
    """Makes the calls of one turn, whose decisions are those of `machine`. `shown` has what the model is shown of the
    conversation. `end_of` says what became of handed-over work, by its handle.
    """

    def __init__(
        self,
        turn: TurnCore,
        machine: Turn,
        context: CallContext,
        shown: TurnContext,
        parts: TurnParts,
        end_of: Callable[[str], frames.ToolResult],
    ) -> None:
        self._turn = turn
        self._instance = instance = turn.instance
        self._machine = machine
        self._shown = shown
        self._parts = parts
        self._end_of = end_of
        #: The turn that the calls belong to, with its deadline.
        self.context = context
        #: The tools of the step.
        self.catalog: catalog.StepCatalog = instance.catalog.for_step()
        #: When the messages of an earlier incarnation were stored (CLOCK_BOOTTIME, milliseconds), by their ids.
        self.first_sent: dict[str, int] = {}
        #: What calls of this turn ask of it.
        self.asks = ToolAsks(instance.link, instance.caller.is_open)
        #: Tool call id -> callId under which the tool host gave the result.
        self._answered: dict[str, str] = {}
        self._shown_message = ""
        #: How many messages of the turn are stored, as long as no frame has told the broker so.
        self.untold: int | None = None

    def make(self, action: RunTool, args: Any, then: Done) -> None:
        """Make one call with these arguments. `then` gets its result."""
        part, tools = action.part, self._instance.tools
        name = part.tool_name
        if action.broken is not None and args == part.args:
            error = arguments.invalid_arguments(name, [f"args: {action.broken}"], self.catalog.parameters(name))
            then(error_result(error))
        elif name == context_shape.NAME and name not in self.catalog:
            then(self._shown.read(args))
        elif (local := tools.get(name)) is not None:
            self._local.start(
                local,
                self.catalog,
                args,
                tool_call_id=part.tool_call_id,
                context=self.context,
                message=action.message,
                again=action.again,
                done=then,
            )
        elif self._is_bundled(name, args):
            self._run_bundled(name, part.tool_call_id, args, then)
        elif not action.again and (gone := tools.refusal(name)) is not None and name in self.catalog:
            then(error_result(gone))  # its server has ended
        else:
            self._send(action, args, then)

    def runs_here(self, name: str, args: Any) -> bool:
        """Whether this call runs in this process."""
        return self._instance.tools.get(name) is not None or self._is_bundled(name, args)

    def _is_bundled(self, name: str, args: Any) -> bool:
        if name == GET_RESULT and isinstance(args, dict) and str(args.get("handle")).startswith(HANDOFF_PREFIX):
            return True
        return name in self._instance.catalog.run_here

    # --- over the bus

    def _send(self, action: RunTool, args: Any, then: Done) -> None:
        part, message, instance = action.part, action.message, self._instance
        turn_id, step = self.context.turn_id, self._machine.steps
        within = None if action.within is None else f"{turn_id}/{action.within}"
        encoded, position = None, self.untold
        if message.id != self._shown_message:
            encoded, self._shown_message = encode_message(_for_tools(message)), message.id

        def done(result: frames.ToolResult | errors.GoondanError, answered: Answered | None) -> None:
            if isinstance(result, errors.GoondanError):
                log.warning("turn %s: %s", turn_id, result)
                self._turn.abandon()
                return
            if self.asks.calls:
                self.asks.drop(f"{turn_id}/{part.tool_call_id}")
            if answered is not None:
                if within is None:
                    self._answered[part.tool_call_id] = answered.call_id
                else:
                    instance.acks.add([answered.call_id])  # nobody stores it
                    if answered.passed_on and action.question is not None:
                        self.asks.answered(within, action.question)
                self._turn.notes.received(part.tool_call_id, result.receipt, answered.way)
            elif position is not None:
                self.untold = position  # perhaps no frame has left
            then(result)

        refused = instance.caller.start(
            self.catalog,
            part.tool_name,
            args,
            call_id=f"{turn_id}/{part.tool_call_id}",
            context=self.context,
            done=done,
            message_id=message.id,
            message=encoded,
            first_sent_ms=self.first_sent.get(message.id) if action.again else None,
            parent_span_id=spans.step_span(turn_id, step) if within is None else spans.call_span(within),
            waits=lambda call_id: self._parts.wait(part.tool_call_id, within, partial(instance.caller.go_on, call_id)),
            within=within,
            question=action.question,
            step=step,
            position=position,
        )
        if refused is None:
            self.untold = None
            return
        if encoded is not None:
            self._shown_message = ""  # nobody has seen it yet
        then(refused)

    # --- in this process

    @cached_property
    def asking(self) -> api.Asking:
        """Through it the turn's extensions ask other agents."""
        return api.Asking(self._swarm)

    @cached_property
    def _swarm(self) -> Swarm:
        instance = self._instance
        asker = questions.Asker(instance.spec.name, instance.instance_key, self.context.turn_id)
        swarm = Swarm(instance.link, asker, self.context.deadline, instance.clock, instance.events)
        swarm.patience_ms, swarm.end_of = instance.spec.request_timeout_ms, self._end_of
        return swarm

    @cached_property
    def _local(self) -> local_calls.LocalCalls:
        instance = self._instance
        place = instance.spec.name, instance.instance_key, self._turn.workdir, instance.store
        return local_calls.LocalCalls(*place, self.asking.in_call, self._turn.abandon)

    @cached_property
    def _bundled(self) -> OpenCalls:
        return OpenCalls()

    def _run_bundled(self, name: str, tool_call_id: str, args: Any, then: Done) -> None:
        """Check the call of a bundled tool and make it. `then` gets its result, never from inside this function."""
        allowed = self.catalog.check(name, args)
        if not isinstance(allowed, catalog.Allowed):
            self._instance.loop.call_soon(then, failed_result(allowed, self.catalog.error_limit(name)))
            return
        limit, given = allowed.item.error_message_limit, allowed.args

        async def run() -> None:
            try:
                result = await HANDLERS[name](self._swarm, tool_call_id, given)
                if not isinstance(result, frames.ToolResult):
                    result = frames.ToolResult(status="ok", output=output_of(result))
            except errors.GoondanError as error:
                result = error_result(tool_error_of(error, "E_AGENT_FAILED"))
            except Exception as error:
                log.exception("bundled tool %s", name)
                result = error_result(tool_error_of(error, "E_INTERNAL"))
            if result.error is not None:
                result = failed_result(result.error, limit)
            self._bundled.open.pop(tool_call_id, None)
            if self._swarm.restarts:  # the next step is for after the restart
                self._turn.push(Pause())
            then(result)

        self._bundled.open[tool_call_id] = self._instance.loop.create_task(run())

    def set_deadline(self, deadline: float | None) -> None:
        """Set the end of the turn (the loop's time). None: there is no end."""
        self.context = structs.replace(self.context, deadline=deadline)
        if "_swarm" in self.__dict__:
            self._swarm.deadline = deadline

    def heard(self) -> None:
        """Work that was handed over has ended."""
        if "_swarm" in self.__dict__:
            self._swarm.news.set()

    # --- calls that nobody wants any more

    def give_up(self, tool_call_id: str) -> None:
        """Give a call up, with all that it has asked."""
        self.asks.drop(f"{self.context.turn_id}/{tool_call_id}")
        self._instance.caller.cancel([f"{self.context.turn_id}/{tool_call_id}"])
        for drop in self._parts.hooks.drop:
            drop(tool_call_id)
        for calls in self._begun():
            calls.drop(tool_call_id)

    def close(self) -> None:
        """Forget all calls: the turn is left."""
        if "asking" in self.__dict__:
            self.asking.close()
        for calls in self._begun():
            calls.close()
        self.asks.close()

    def _begun(self) -> list[OpenCalls]:
        return [self.__dict__[name] for name in ("_local", "_bundled") if name in self.__dict__]


def _for_tools(message: Message) -> Message:
    """The message of a call as handlers get it: without the model's reasoning, and without what is for its vendor."""
    if message.metadata.keys().isdisjoint((KEPT, REASONING)):
        return message
    metadata = {key: value for key, value in message.metadata.items() if key not in (KEPT, REASONING)}
    return structs.replace(message, metadata=metadata)
