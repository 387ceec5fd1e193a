"""A turn with what it asked for, for the tests of the turn machine."""

from __future__ import annotations

from goondan.agentproc.machine.messages import Message, ToolData
from goondan.agentproc.machine.turn import Action, AskedCall, End, Input, ModelAnswered, Store, Turn
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import tool_error
from goondan.schemas.wire.frames import ToolResult

AT = "2026-01-01T00:00:00.000Z"
OK = ToolResult(status="ok", output=to_raw(1))
FAILED = ToolResult(status="error", error=tool_error("E_TOOL", "no", name="Error"))


class Driver:
    """A turn with what it asked to be stored, and everything it asked for."""

    def __init__(self, turn_id: str = "t1", max_steps: int = 8, *, wrapped: bool = False) -> None:
        self.turn = Turn(turn_id, max_steps=max_steps, wraps_turn=wrapped, wraps_steps=wrapped)
        self.stored: dict[int, Message] = {}
        self.actions: list[Action] = []

    def give(self, *events: Input) -> list[Action]:
        new: list[Action] = []
        for event in events:
            new += self.turn.handle(event, AT)
        for action in new:
            if isinstance(action, Store):
                assert action.position not in self.stored, "a position is written once"
                self.stored[action.position] = action.message
        self.actions += new
        return new

    @property
    def messages(self) -> list[Message]:
        return [self.stored[position] for position in sorted(self.stored)]

    @property
    def ends(self) -> list[End]:
        return [action for action in self.actions if isinstance(action, End)]

    def results(self) -> list[tuple[str, str]]:
        """(tool call id, status) of every result, in the order of the conversation."""
        return [
            (part.tool_call_id, part.result.status)
            for message in self.messages
            if isinstance(message.data, ToolData)
            for part in message.data.content
        ]


def calls(*ids: str) -> ModelAnswered:
    return ModelAnswered("", [AskedCall(call_id, "x__y", {}) for call_id in ids])
