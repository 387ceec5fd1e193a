"""The tool calls of one turn: those of the model, and those that other calls make (inner calls).

A call goes through the middleware around it, then to a handler in this process or over the bus. Both kinds of call go
the same way. What differs is where the result goes: into the conversation, or to the call that made it.

Source: docs/design/turns.md section 2; docs/design/delivery.md section 6; docs/design/tools.md section 12.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import structs

from goondan.agentproc.calls.asks import ToolAsks
from goondan.agentproc.calls.caller import CallContext
from goondan.agentproc.calls.here import OwnCalls
from goondan.agentproc.context import reading
from goondan.agentproc.extensions.stages import Stages
from goondan.agentproc.machine.catalog import StepCatalog
from goondan.agentproc.machine.messages import REASONING, Message, ToolCallPart, encode_message, error_result
from goondan.agentproc.machine.turn import DropCalls, Input, Listed, ListTools, RunTool, ToolFinished, Turn
from goondan.agentproc.model.context import TurnContext
from goondan.agentproc.providers.history import KEPT
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.notes import TurnNotes, results_of
from goondan.agentproc.turn.parts import Call, TurnParts, starting
from goondan.schemas.bundle.address import SEPARATOR
from goondan.schemas.bundle.arguments import invalid_arguments
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import OperatorTool, ToolResult
from goondan.schemas.wire.spans import call_span, step_span
from goondan.schemas.worker import servers
from goondan.schemas.worker.servers import CONNECT_S

log = logging.getLogger("agentproc")


class TurnCalls:
    """The calls of the turn `machine`. `push` gives it an input. `lost` is called when the lease is gone. `noted` is
    called when notes wait to be stored. `shown` has what the model is shown of the conversation. `parts` are those of
    features.
    """

    def __init__(
        self,
        instance: Instance,
        machine: Turn,
        context: CallContext,
        notes: TurnNotes,
        own_calls: OwnCalls,
        shown: TurnContext,
        parts: TurnParts,
        *,
        push: Callable[[Input], None],
        lost: Callable[[], None],
        noted: Callable[[], None],
    ) -> None:
        self._instance = instance
        self._machine = machine
        self._notes = notes
        self._own_calls = own_calls
        self._shown = shown
        self._parts = parts
        self._push = push
        self._lost = lost
        self._noted = noted
        #: The turn that the calls belong to, with its deadline.
        self.context = context
        #: The middleware of the turn, if it has any.
        self.stages: Stages | None = None
        #: The tools of the step.
        self.catalog: StepCatalog = instance.catalog.for_step()
        #: When the messages of an earlier incarnation were stored (CLOCK_BOOTTIME, milliseconds), by their ids.
        self.first_sent: dict[str, int] = {}
        #: What calls of this turn ask of it.
        self.asks = ToolAsks(instance.link, instance.caller.is_open)
        #: Tool call id -> callId under which the tool host gave the result.
        self._answered: dict[str, str] = {}
        self._shown_message = ""

    @property
    def turn_id(self) -> str:
        """The id of the turn."""
        return self._machine.turn_id

    def list_tools(self, _: ListTools) -> None:
        """Tell the turn which tools an operator could call now."""
        listed = [
            OperatorTool(
                name=item.name,
                description=item.description,
                parameters=item.parameters,
                idempotent=item.idempotent,
                deferred=item.deferred,
            )
            for item in self.catalog.items
            if self._instance.catalog.can_run(item.name)
        ]
        self._push(Listed(ToolResult(status="ok", output=to_raw(listed))))

    # --- the model's calls

    def run(self, action: RunTool) -> None:
        """Make a call of the model. Its result becomes an input of the turn."""
        tool_call_id = action.part.tool_call_id

        def done(result: ToolResult) -> None:
            self._push(ToolFinished(tool_call_id, *self._instance.files.lift(result)))

        self.make_call(action, done)

    def make_call(self, action: RunTool, done: Callable[[ToolResult], None]) -> None:
        """Make a call inside its middleware. `done` gets its result, without the secrets of the agent."""
        part, secrets = action.part, self._instance.secrets

        def ended(result: ToolResult) -> None:
            done(secrets.out_of(result))

        start = self._start_inside if self._parts.hooks.call else self._make
        if self.stages is None or not self._instance.pipeline.has("toolCall"):
            start(action, part.args, ended)
            return
        self.stages.run_call(
            part,
            self._machine.steps,
            start=lambda args, then: start(action, args, then),
            drop=lambda: self._drop(part.tool_call_id),
            done=ended,
            limit=self.catalog.error_limit(part.tool_name),
        )

    def _start_inside(self, action: RunTool, args: Any, then: Callable[[ToolResult], None]) -> None:
        """Make one call inside the parts that wrap calls."""
        part = action.part
        broken = action.broken is not None and args == part.args
        here = not broken and self._own_calls.runs(part.tool_name, args)
        call = Call(action, args, self._machine.steps, here)
        starting(self._parts.hooks, lambda call, done: self._make(call.action, call.args, done))(call, then)

    def _make(self, action: RunTool, args: Any, then: Callable[[ToolResult], None]) -> None:
        """Make one call with these arguments. `then` gets its result."""
        part = action.part
        if action.broken is not None and args == part.args:
            error = invalid_arguments(
                part.tool_name, [f"args: {action.broken}"], self.catalog.parameters(part.tool_name)
            )
            then(error_result(error))
            return
        within = None if action.within is None else f"{self.turn_id}/{action.within}"
        if part.tool_name == reading.NAME and part.tool_name not in self.catalog:
            then(self._shown.read(args))
        elif self._own_calls.runs(part.tool_name, args):
            self._own_calls.start(action, args, self.catalog, self.context, then)
        elif (gone := self._of_lost_server(action)) is not None:
            then(gone)
        else:
            self._send(action, args, then, within)

    def _of_lost_server(self, action: RunTool) -> ToolResult | None:
        """The result of a new call to an MCP server that has ended; None when the call is to be made."""
        name = action.part.tool_name
        error = None if action.again or name not in self.catalog else self._instance.tools.served.refusal(name)
        return None if error is None else error_result(error)

    def may_repeat(self, call_id: str) -> None:
        """The server has not begun with this call: if it is lost, the agent attaches again and makes the call again."""
        server = (self._instance.caller.tool_of(call_id) or "").partition(SEPARATOR)[0]
        self._instance.caller.may_repeat(call_id, lambda: self._instance.servers.ask(servers.ATTACH, server, CONNECT_S))

    def _send(self, action: RunTool, args: Any, then: Callable[[ToolResult], None], within: str | None) -> None:
        """Make one call over the bus. `within` is the callId of the call that makes it."""
        part, message, instance = action.part, action.message, self._instance
        encoded = None
        if message.id != self._shown_message:
            encoded, self._shown_message = encode_message(_for_tools(message)), message.id

        def done(result: ToolResult | GoondanError, answered_id: str | None) -> None:
            if isinstance(result, GoondanError):
                log.warning("turn %s: %s", self.turn_id, result)
                self._lost()
                return
            self.asks.drop(f"{self.turn_id}/{part.tool_call_id}")
            if answered_id is not None and within is None:
                self._answered[part.tool_call_id] = answered_id
            elif answered_id is not None:
                instance.acks.add([answered_id])  # nobody stores it
            if result.receipt is not None:
                self._notes.received(part.tool_call_id, result.receipt)
            then(result)

        refused = instance.caller.start(
            self.catalog,
            part.tool_name,
            args,
            call_id=f"{self.turn_id}/{part.tool_call_id}",
            context=self.context,
            done=done,
            message_id=message.id,
            message=encoded,
            first_sent_ms=self.first_sent.get(message.id) if action.again else None,
            parent_span_id=step_span(self.turn_id, self._machine.steps) if within is None else call_span(within),
            waits=lambda call_id: self._parts.wait(part.tool_call_id, within, partial(instance.caller.go_on, call_id)),
            within=within,
            step=self._machine.steps,
        )
        if refused is not None:
            if encoded is not None:
                self._shown_message = ""  # nobody has seen it yet
            then(refused)

    def drop(self, action: DropCalls) -> None:
        """Give calls up, with all that they have asked."""
        self.drop_calls(list(action.tool_call_ids))

    def drop_calls(self, tool_call_ids: list[str]) -> None:
        """The same, by their tool call ids."""
        for tool_call_id in tool_call_ids:
            self._drop(tool_call_id)
        if self.stages is not None:
            self.stages.drop_calls(tool_call_ids)

    def _drop(self, tool_call_id: str) -> None:
        self.asks.drop(f"{self.turn_id}/{tool_call_id}")
        self._instance.caller.cancel([f"{self.turn_id}/{tool_call_id}"])
        for drop in self._parts.hooks.drop:
            drop(tool_call_id)
        self._own_calls.drop(tool_call_id)

    def use(self, catalog: StepCatalog) -> None:
        """The tools of the step that begins."""
        self.catalog = catalog

    def stored(self, message: Message) -> list[str]:
        """callIds of the results in a stored message that came from the tool host."""
        return [
            call_id
            for part in results_of(message)
            if (call_id := self._answered.pop(part.tool_call_id, None)) is not None
        ]

    def close(self) -> None:
        """Forget all calls: the turn is left."""
        self._own_calls.close()
        self.asks.close()

    # --- inner calls

    def inner_began(self, outer: str, part: ToolCallPart) -> None:
        """The call `outer` makes a call."""
        self._notes.inner_began(outer, part, self._instance.clock(), self.catalog)
        self._noted()

    def inner_ended(self, outer: str, part: ToolCallPart, result: ToolResult) -> None:
        """That call has its result."""
        self._notes.inner_ended(outer, part, result, self._instance.clock())
        self._noted()

    def cancel_unseen(self, call_ids: Sequence[str]) -> None:
        """Cancel calls that an earlier incarnation has made. Nobody waits for their results."""
        self._instance.caller.cancel_unseen(call_ids, self.context.event_id)


def _for_tools(message: Message) -> Message:
    """The message of a call as handlers get it: without the model's reasoning, and without what is for its vendor."""
    metadata = {key: value for key, value in message.metadata.items() if key not in (KEPT, REASONING)}
    return message if metadata == message.metadata else structs.replace(message, metadata=metadata)
