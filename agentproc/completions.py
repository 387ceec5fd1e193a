"""What pending work came to, as the conversation has it (pure).

A tool that answered `pending` has ended. Its agent hears of it twice at most: by a frame while a turn runs, whose
content goes into the conversation before the next model call, and by an event in its mailbox, which begins a turn of
its own unless the first way has told it already. The message's id is the event's, so the second one is recognised.

Source: requirement RESULT-04; PROTOCOL.md "Pending results".
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from agentproc.conversation import MessageSource
from schemas.codec import check_json, from_raw
from schemas.errors import fail
from schemas.frames import TOOL_COMPLETED, AgentEvent, Completion, Frame, ToolResult


class Ended(Struct, frozen=True):
    """The end of one piece of pending work: what a user message says of it, and who said it."""

    event_id: str
    text: str
    source: MessageSource


def read_completion(frame: Frame, event: AgentEvent) -> Ended:
    """A `tool.completed` event or frame. Raises GoondanError E_FORBIDDEN when no tool host sent it, E_FRAME_INVALID."""
    if frame.source is None or frame.source.kind != "tool":
        raise fail("E_FORBIDDEN", f"only tool hosts send {TOOL_COMPLETED} events")
    told = from_raw(msgspec.msgpack.encode(event.input), Completion)
    result = from_raw(told.result, ToolResult)
    shown: dict[str, object] = {"status": result.status}
    if result.output is not None:
        shown["output"] = from_raw(result.output, object)
        check_json(shown["output"], "output")
    if result.error is not None:
        shown["error"] = msgspec.to_builtins(result.error)
    text = (
        f"The pending result {told.handle} of {told.tool_name} (call {told.tool_call_id}) is here:\n"
        f"{msgspec.json.encode(shown).decode()}"
    )
    return Ended(event.id, text, MessageSource("tool", told.tool_name))
