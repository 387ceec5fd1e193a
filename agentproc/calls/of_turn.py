"""The tool calls of one turn: those of the model, and those that other calls make (inner calls).

A call goes down through the middleware of extensions, the parts of features and the handlers (handlers.py), and its
result comes back the same way. Both kinds of call go the same way. What differs is where the result goes: into the
conversation, or to the call that made it.

Source: docs/design/turns.md section 2; docs/design/delivery.md section 6; docs/design/tools.md section 12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import convert
from msgspec.structs import replace

from goondan.agentproc.calls import handlers
from goondan.agentproc.extensions.stages import Stages
from goondan.agentproc.machine.messages import ToolResultPart
from goondan.agentproc.machine.turn import DropCalls, Listed, ListTools, RunTool, ToolFinished
from goondan.agentproc.turn.parts import Done
from goondan.schemas.bundle.address import SEPARATOR
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import OperatorTool, ToolResult
from goondan.schemas.worker import servers
from goondan.schemas.worker.servers import CONNECT_S


class TurnCalls(handlers.CallHandlers):
    """The calls of one turn."""

    #: The middleware of the turn, if it has any.
    stages: Stages | None = None

    def list_tools(self, _: ListTools) -> None:
        """Tell the turn which tools an operator could call now."""
        items = [item for item in self.catalog.items if self._instance.catalog.can_run(item.name)]
        listed = convert(items, list[OperatorTool], from_attributes=True)
        self._turn.push(Listed(ToolResult(status="ok", output=to_raw(listed))))

    def make_call(self, action: RunTool, done: Done | None = None) -> None:
        """Make a call inside its middleware. `done` gets its result, without the secrets of the agent. None: it is a
        call of the model, and its result becomes an input of the turn.
        """
        part = action.part
        layers = self.stages is not None and self._instance.pipeline.has("toolCall")
        if layers and action.question is not None:
            action = replace(action, question=None)  # its script gets what they make of its result

        def ended(result: ToolResult) -> None:
            result = self._instance.secrets.out_of(result)
            if done is None:
                self._turn.push(ToolFinished(part.tool_call_id, *self._instance.files.lift(result)))
            else:
                done(result)

        start: Callable[[Any, Done], None] = partial(self.make, action)
        if self._parts.hooks.call:
            start = partial(self._parts.start_call, self, action, self._machine.steps)
        if self.stages is None or not layers:
            start(part.args, ended)
            return
        self.stages.run_call(
            part,
            self._machine.steps,
            start=start,
            drop=partial(self.give_up, part.tool_call_id),
            done=ended,
            limit=self.catalog.error_limit(part.tool_name),
        )

    def drop(self, action: DropCalls) -> None:
        """Give calls up."""
        self.drop_calls(action.tool_call_ids)

    def drop_calls(self, tool_call_ids: list[str]) -> None:
        """Give calls up, with all that they have asked, by their tool call ids."""
        for tool_call_id in tool_call_ids:
            self.give_up(tool_call_id)
        if self.stages is not None:
            self.stages.drop_calls(tool_call_ids)

    def stored(self, results: Sequence[ToolResultPart]) -> list[str]:
        """callIds of the stored results that came from the tool host."""
        return [call_id for part in results if (call_id := self._answered.pop(part.tool_call_id, None)) is not None]

    # --- what parts of features ask for

    def may_repeat(self, call_id: str) -> None:
        """The server has not begun with this call: if it is lost, the agent attaches again and makes the call again."""
        server = (self._instance.caller.tool_of(call_id) or "").partition(SEPARATOR)[0]
        self._instance.caller.may_repeat(call_id, lambda: self._instance.servers.ask(servers.ATTACH, server, CONNECT_S))

    def cancel_unseen(self, call_ids: Sequence[str]) -> None:
        """Cancel calls that an earlier incarnation has made. Nobody waits for their results."""
        self._instance.caller.cancel_unseen(call_ids, self.context.event_id)
