"""The turn machine: inputs in, actions out. No model, no sockets, no storage, no clock.

States: `new` -> `thinking` (a model call is out) <-> `acting` (tool calls are out) -> `over`.

Rules.
- A step is one model call and the tool calls of its answer, which run concurrently. The next step begins only when
  every call has its result; results are stored in call order whatever order they come in.
- Every message has a position in its turn. An answer with N calls takes one position and reserves the N behind it,
  so a result that is stored early still stands in its place.
- Actions are to be performed in their order, and every `Store` before what follows it.
- Tool call ids are unique within a turn: empty, repeated or unusable ones get one of ours. So a callId names one call
  for ever, and a resumed turn repeats its open calls under the ids they had.
- A late, repeated or unknown input is ignored.
- An operator call is a turn of one made-up assistant message with one tool call and no model call.

Source: design sections 3 and 8; delivery.md section 5; pitfalls 4; requirements CALL-04, CALL-15, ERROR-08.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from agentproc.conversation import (
    AssistantData,
    Message,
    MessageSource,
    TextPart,
    ToolCallPart,
    ToolData,
    ToolResultPart,
    UserData,
    cancelled,
    result_message,
)
from schemas.errors import error_payload
from schemas.frames import ErrorPayload, ToolResult

#: Longer ids from a model are replaced; they become part of a callId, of a header and of a database key.
MAX_TOOL_CALL_ID: Final = 128
#: In an assistant message's metadata: tool call id -> why its arguments could not be read, for a turn that resumes.
UNREADABLE: Final = "unreadableArguments"


class AskedCall(Struct, frozen=True):
    """A tool call as a model wrote it. `broken` says why its arguments could not be read (then `args` is moot)."""

    id: str
    name: str
    args: Any
    broken: str | None = None


# --- inputs ---------------------------------------------------------------------------------------------------------


class Begin(Struct, frozen=True):
    """A new event with this text."""

    text: str


class BeginCall(Struct, frozen=True):
    """A new operator call."""

    tool: str
    args: Any


class Resume(Struct, frozen=True):
    """What an earlier incarnation stored of this turn: (position, message) in the order of positions."""

    stored: list[tuple[int, Message]]
    operator: bool = False


class ModelAnswered(Struct, frozen=True):
    """The model's answer to the `AskModel` that is out. `metadata` goes into the stored message's."""

    text: str
    calls: list[AskedCall] = []
    finish_reason: str | None = None
    metadata: dict[str, Any] | None = None


class ModelFailed(Struct, frozen=True):
    """The model call failed for good."""

    error: ErrorPayload


class ToolFinished(Struct, frozen=True):
    """The one result of a call."""

    tool_call_id: str
    result: ToolResult


class Pause(Struct, frozen=True):
    """Give the turn back at the next step boundary."""


class Cancel(Struct, frozen=True):
    """End the turn now with this error; open calls get a result that says so."""

    error: ErrorPayload


Input = Begin | BeginCall | Resume | ModelAnswered | ModelFailed | ToolFinished | Pause | Cancel

# --- actions --------------------------------------------------------------------------------------------------------


class Store(Struct, frozen=True):
    """Append this message to the conversation, at this position of the turn."""

    position: int
    message: Message


class AskModel(Struct, frozen=True):
    """Call the model with the conversation as it is now; `step` counts from 1."""

    step: int


class RunTool(Struct, frozen=True):
    """Make this call. `message` is the assistant message it stands in; `again`: it may have been made before."""

    part: ToolCallPart
    message: Message
    broken: str | None = None
    again: bool = False


class DropCalls(Struct, frozen=True):
    """Nobody waits for these calls any more."""

    tool_call_ids: list[str]


class End(Struct, frozen=True, kw_only=True):
    """The turn is over. `output` is the result of an operator call."""

    status: Literal["completed", "failed"]
    steps: int
    response: str | None = None
    finish_reason: str | None = None
    error: ErrorPayload | None = None
    output: ToolResult | None = None


class Yield(Struct, frozen=True):
    """The turn stands at a step boundary and is to be given back unfinished."""


Action = Store | AskModel | RunTool | DropCalls | End | Yield
Phase = Literal["new", "thinking", "acting", "over"]


class Turn:
    """One turn. `handle` is its only entry; `at` is the time of the input, RFC 3339 in UTC."""

    def __init__(self, turn_id: str, *, max_steps: int) -> None:
        self.turn_id = turn_id
        self.phase: Phase = "new"
        self.steps = 0
        self._max_steps = max_steps
        self._next = 0
        self._pausing = False
        self._operator = False
        self._used_ids: set[str] = set()
        # the calls of the step that is running
        self._places: dict[str, tuple[int, ToolCallPart]] = {}
        self._last_result: ToolResult | None = None

    @property
    def open_calls(self) -> list[str]:
        """Tool call ids without a result yet, in call order."""
        return list(self._places)

    def handle(self, event: Input, at: str) -> list[Action]:
        """What to do about `event`, in order; an event that does not fit the state has no consequence."""
        match self.phase, event:
            case "new", Begin(text):
                return [self._store(UserData(text), MessageSource("user"), at), *self._boundary()]
            case "new", BeginCall(tool, args):
                self._operator = True
                return self._answer(ModelAnswered("", [AskedCall("", tool, args)]), at)
            case "new", Resume():
                return self._resume(event)
            case "thinking", ModelAnswered():
                return self._answer(event, at)
            case "thinking", ModelFailed(error):
                return [self._end(End(status="failed", steps=self.steps, finish_reason="error", error=error))]
            case "acting", ToolFinished(tool_call_id, result):
                return self._finish_call(tool_call_id, result, at)
            case "over", _:
                return []
            case _, Pause():
                self._pausing = True
                return []
            case _, Cancel(error):
                return self._cancel(error, at)
            case _:
                return []

    # --- transitions

    def _boundary(self) -> list[Action]:
        """Every call has its result: the next step, or the end."""
        if self._operator:
            output = self._last_result
            return [self._end(End(status="completed", steps=0, finish_reason="stop", output=output))]
        if self.steps >= self._max_steps:
            message = f"the turn took {self.steps} steps, limit {self._max_steps}, and was not finished"
            error = error_payload("E_MAX_STEPS", message)
            return [self._end(End(status="failed", steps=self.steps, finish_reason="max_steps", error=error))]
        if self._pausing:
            self.phase = "over"
            return [Yield()]
        self.phase = "thinking"
        self.steps += 1
        return [AskModel(self.steps)]

    def _answer(self, answer: ModelAnswered, at: str) -> list[Action]:
        parts = [self._name_call(call, index) for index, call in enumerate(answer.calls)]
        content: list[TextPart | ToolCallPart] = [TextPart(answer.text)] if answer.text or not parts else []
        broken = {
            part.tool_call_id: reason
            for part, call in zip(parts, answer.calls, strict=True)
            if (reason := _unreadable(call)) is not None
        }
        metadata = dict(answer.metadata or {}) | ({UNREADABLE: broken} if broken else {})
        stored = self._store(AssistantData([*content, *parts]), MessageSource("assistant"), at, metadata)
        if not parts:
            return [stored, self._complete(answer.text, answer.finish_reason)]
        self._open(stored.position, parts)
        return [stored, *(RunTool(part, stored.message, broken.get(part.tool_call_id)) for part in parts)]

    def _complete(self, text: str, finish_reason: str | None) -> End:
        return self._end(
            End(status="completed", steps=self.steps, response=text, finish_reason=finish_reason or "stop")
        )

    def _finish_call(self, tool_call_id: str, result: ToolResult, at: str) -> list[Action]:
        place = self._places.pop(tool_call_id, None)
        if place is None:
            return []
        position, part = place
        self._last_result = result
        actions: list[Action] = [self._store_result(position, part, result, at)]
        return actions if self._places else actions + self._boundary()

    def _cancel(self, error: ErrorPayload, at: str) -> list[Action]:
        actions: list[Action] = []
        if self._places:
            actions.append(DropCalls(list(self._places)))
            reason = "the turn ran out of time" if error.code == "E_AGENT_TIMEOUT" else "the turn ended"
            for position, part in self._places.values():
                actions.append(self._store_result(position, part, cancelled(reason), at))
            self._places.clear()
        return [*actions, self._end(End(status="failed", steps=self.steps, finish_reason="error", error=error))]

    def _resume(self, resume: Resume) -> list[Action]:
        self._operator = resume.operator
        last: tuple[int, Message, AssistantData] | None = None
        results: dict[str, ToolResult] = {}
        for position, message in resume.stored:
            self._next = max(self._next, position + 1)
            if isinstance(message.data, AssistantData):
                self.steps += not self._operator
                calls = message.data.calls
                self._used_ids.update(call.tool_call_id for call in calls)
                self._next = max(self._next, position + 1 + len(calls))
                last, results = (position, message, message.data), {}
            elif isinstance(message.data, ToolData):
                results.update({part.tool_call_id: part.result for part in message.data.content})
        if last is None:
            return self._boundary()
        position, message, data = last
        calls = data.calls
        if not calls:
            return [self._complete(data.text, None)]
        self._open(position, calls)
        for call in calls:
            if call.tool_call_id in results:
                self._last_result = results[call.tool_call_id]
                del self._places[call.tool_call_id]
        if not self._places:
            return self._boundary()
        broken = message.metadata.get(UNREADABLE, {})
        return [RunTool(part, message, broken.get(part.tool_call_id), again=True) for _, part in self._places.values()]

    # --- pieces

    def _store(
        self,
        data: UserData | AssistantData,
        source: MessageSource,
        at: str,
        metadata: dict[str, Any] | None = None,
    ) -> Store:
        position = self._next
        self._next += 1
        return Store(position, Message(self._message_id(position), data, at, source, metadata or {}))

    def _store_result(self, position: int, part: ToolCallPart, result: ToolResult, at: str) -> Store:
        shown = ToolResultPart(part.tool_call_id, part.tool_name, result)
        return Store(position, result_message(self._message_id(position), shown, at))

    def _open(self, position: int, parts: Sequence[ToolCallPart]) -> None:
        self.phase = "acting"
        self._places = {part.tool_call_id: (position + 1 + index, part) for index, part in enumerate(parts)}
        self._next = max(self._next, position + 1 + len(parts))

    def _end(self, end: End) -> End:
        self.phase = "over"
        return end

    def _message_id(self, position: int) -> str:
        return f"{self.turn_id}.{position}"

    def _name_call(self, call: AskedCall, index: int) -> ToolCallPart:
        """The call with an id that no other call of this turn has."""
        usable = 0 < len(call.id) <= MAX_TOOL_CALL_ID and call.id.isprintable()
        wanted = call.id if usable else f"call_{max(self.steps, 1)}_{index + 1}"
        tool_call_id, copy = wanted, 1
        while tool_call_id in self._used_ids:
            copy += 1
            tool_call_id = f"{wanted}_{copy}"
        self._used_ids.add(tool_call_id)
        return ToolCallPart(tool_call_id, call.name, call.args if isinstance(call.args, dict) else {})


def _unreadable(call: AskedCall) -> str | None:
    """Why a call's arguments cannot be sent at all, or None."""
    if call.broken is not None:
        return call.broken
    return None if isinstance(call.args, dict) else "they are no JSON object"
