"""The turn machine: inputs in, actions out. No model, no sockets, no storage, no clock.

States: `new` -> `thinking` (a model call is out) <-> `acting` (tool calls are out) -> `over`. Where middleware is
registered, there are four more: `opening` and `closing` (turn middleware before and after its next()), `entering` and
`leaving` (step middleware). Without middleware these four do not exist, and the rest is the same.

Rules.
- A step is one model call and the tool calls of its answer, which run concurrently. The next step begins only when
  every call has its result. Results are stored in call order, whatever order they come in.
- Every message has a position in its turn. An answer with N calls takes one position and reserves the N behind it, so a
  result that is stored early still has its place.
- Actions are performed in their order. Every `Store` is done before the actions that follow it.
- Tool call ids are unique within a turn. An empty, repeated or unusable id is replaced by one of ours. So a callId
  names one call for ever, and a resumed turn repeats its open calls under the same ids.
- A late, repeated or unknown input is ignored.
- What an operator asks is a turn without a model call. A call is one made-up assistant message with one tool call, in
  one step if steps have middleware. A list of the tools is a step in which nothing is called and nothing is stored.
- A cancelled turn ends at once: open calls are dropped and get results, so that the next turn finds a valid history.
- A turn whose middleware was entered is left through it, whatever ends the core. When middleware fails or returns
  before the core is done, the turn ends as failed.

Source: docs/design/turns.md section 1; docs/design/delivery.md section 6; requirements CALL-04, CALL-15, ERROR-08.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Raw, Struct, structs

from goondan.agentproc.machine import messages
from goondan.agentproc.machine.verdicts import REPAIR, Judge
from goondan.schemas.wire.errors import error_payload, row_of
from goondan.schemas.wire.frames import ErrorPayload, FilePart, ToolResult

#: The key in an assistant message's metadata for a turn that resumes: tool call id -> why its arguments are unreadable.
UNREADABLE: Final = "unreadableArguments"

#: The error of a failure that came without one.
_MOOT: Final = error_payload("E_MIDDLEWARE", "the middleware ended too early")


class AskedCall(Struct, frozen=True):
    """A tool call as a model wrote it."""

    #: The id that the model gave it.
    id: str
    #: The name of the tool.
    name: str
    #: The arguments. Not used when `broken` is set.
    args: Any
    #: Why the arguments could not be read; None: they could.
    broken: str | None = None


# --- inputs ---------------------------------------------------------------------------------------------------------


class Begin(Struct, frozen=True):
    """A new event."""

    #: The text of the user message.
    text: str
    #: The author of the text.
    source: messages.MessageSource = messages.MessageSource("user")
    #: The metadata of the message.
    metadata: dict[str, Any] = {}
    #: Of the end of pending work: the turn that the work was begun in.
    work_of: str | None = None
    #: The pictures and PDFs beside the text.
    files: list[FilePart] = []


class BeginCall(Struct, frozen=True):
    """A new operator call."""

    #: The name of the tool.
    tool: str
    #: The arguments.
    args: Any
    #: What the conversation says about it, for models that read it later; None: nothing.
    told: str | None = None


class BeginList(Struct, frozen=True):
    """An operator asks for the tools that a step could call."""


class Resume(Struct, frozen=True):
    """The messages that an earlier incarnation stored of this turn."""

    #: (position, message) in the order of positions: only messages that the machine itself had asked to be stored.
    stored: list[tuple[int, messages.Message]]
    #: Whether it is the turn of an operator call.
    operator: bool = False
    #: The call that the operator asked for, which is made if it is not among the messages.
    asked: BeginCall | None = None
    #: Positions below this one are taken by others.
    next_position: int = 0
    #: The answer to an earlier question was stored behind the last message, and no model has read it yet.
    told: bool = False


#: What a turn begins with.
First = Begin | BeginCall | BeginList


class ModelAnswered(Struct, frozen=True):
    """The model's answer to the open `AskModel`."""

    #: The text of the answer.
    text: str
    #: The tool calls, in order.
    calls: list[AskedCall] = []
    #: Why the model stopped, in the vendor's word.
    finish_reason: str | None = None
    #: It goes into the metadata of the stored message.
    metadata: dict[str, Any] | None = None


class ModelFailed(Struct, frozen=True):
    """The model call failed for good."""

    #: Why.
    error: ErrorPayload


class ToolFinished(Struct, frozen=True):
    """The one result of a call."""

    #: The id of the call.
    tool_call_id: str
    #: Its result.
    result: ToolResult
    #: The pictures and PDFs of the result.
    files: list[FilePart] = []


class Listed(Struct, frozen=True):
    """The answer to `ListTools`."""

    #: The result.
    result: ToolResult


class TurnEntered(Struct, frozen=True):
    """The innermost turn middleware has called next()."""


class TurnLeft(Struct, frozen=True):
    """The turn middleware has returned. Before `LeaveTurn` it means that the middleware failed."""

    #: Its change of the turn's end, or how it failed; None: there is no change.
    end: End | None = None


class StepEntered(Struct, frozen=True):
    """The innermost step middleware has called next()."""


class StepLeft(Struct, frozen=True):
    """The step middleware has returned. Before `LeaveStep` it means that the middleware failed."""

    #: Whether another step follows.
    should_continue: bool = False
    #: The error of the step, or how the middleware failed; None: there is none.
    error: ErrorPayload | None = None


class Pause(Struct, frozen=True):
    """Give the turn back at the next step boundary."""


class Cancel(Struct, frozen=True):
    """End the turn now."""

    #: The error of the turn.
    error: ErrorPayload
    #: The reason that the results of open calls give.
    reason: str = "the turn ended"
    #: The text that the model reads about it in later turns. Without it, a question that was taken back would look like
    #: one that still needs an answer.
    told: str | None = None


Input = (
    Begin | BeginCall | BeginList | Resume | TurnEntered | TurnLeft | StepEntered | StepLeft | ModelAnswered
    | ModelFailed | ToolFinished | Listed | Pause | Cancel
)  # fmt: skip

# --- actions --------------------------------------------------------------------------------------------------------


class Store(Struct, frozen=True):
    """Append this message to the conversation, at this position of the turn."""

    #: The position in the turn.
    position: int
    #: The message.
    message: messages.Message


class EnterTurn(Struct, frozen=True):
    """Run the turn middleware, up to its next()."""


class LeaveTurn(Struct, frozen=True):
    """The core of the turn is done. The turn middleware goes on behind its next()."""

    #: The end of the turn so far.
    end: End


class EnterStep(Struct, frozen=True):
    """Run the step middleware, up to its next(). `again`: an earlier incarnation has entered this step."""

    #: The number of the step, from 1.
    step: int
    #: An earlier incarnation has entered it.
    again: bool = False


class LeaveStep(Struct, frozen=True):
    """The core of the step is done. The step middleware goes on behind its next()."""

    #: The step, from 1.
    step: int
    #: The model has asked for tools, so another step follows unless the middleware decides otherwise.
    should_continue: bool
    #: The calls of the step and their results, in call order.
    calls: list[tuple[messages.ToolCallPart, ToolResult]] = []
    #: The error of a failed step.
    error: ErrorPayload | None = None


class AskModel(Struct, frozen=True):
    """Call the model with the conversation as it is now; `step` counts from 1."""

    #: The number of the step, from 1.
    step: int


class RunTool(Struct, frozen=True):
    """Make this call."""

    #: The call.
    part: messages.ToolCallPart
    #: The assistant message that contains it.
    message: messages.Message
    #: Why its arguments could not be read; None: they could.
    broken: str | None = None
    #: It may have been made before.
    again: bool = False
    #: Of a call that a script makes (code mode): the tool call id of the script. None: the model makes it.
    within: str | None = None
    #: The id of the frame in which the script asks for it, if the tool host may answer that with the call's output.
    question: str | None = None


class ListTools(Struct, frozen=True):
    """Say which tools the running step could call. `Listed` follows."""


class DropCalls(Struct, frozen=True):
    """Give these calls up: their results are not wanted any more."""

    #: The ids of the calls.
    tool_call_ids: list[str]


class End(Struct, frozen=True, kw_only=True):
    """The turn is over."""

    #: How it ended.
    status: Literal["completed", "failed"]
    #: How many steps it took.
    steps: int
    #: The text of the answer.
    response: str | None = None
    #: Why the turn ended.
    finish_reason: str | None = None
    #: The error of a failed turn.
    error: ErrorPayload | None = None
    #: The result of an operator call, or the list of tools that an operator asked for.
    output: ToolResult | None = None
    #: Whether the response ends where the model reached its limit of tokens.
    cut_off: bool = False
    #: The reasoning of the model's last message.
    reasoning: str | None = None
    #: The value that the response is, encoded as msgpack. None: the agent has no output schema.
    value: Raw | None = None


class Yield(Struct, frozen=True):
    """The turn is at a step boundary and is to be given back unfinished."""


Action = (
    Store | EnterTurn | LeaveTurn | EnterStep | LeaveStep | AskModel | RunTool | ListTools | DropCalls | End | Yield
)  # fmt: skip
Phase = Literal["new", "opening", "entering", "thinking", "acting", "listing", "leaving", "closing", "over"]


class Turn:
    """One turn. `handle` takes its inputs; `at` is the time of the input, RFC 3339 in UTC.

    `wraps_turn`, `wraps_steps`: there is middleware around the turn, around its steps. `judge` says whether an answer
    fits the agent's output schema, if it has one.
    """

    def __init__(
        self,
        turn_id: str,
        *,
        max_steps: int,
        wraps_turn: bool = False,
        wraps_steps: bool = False,
        judge: Judge | None = None,
    ) -> None:
        self.turn_id = turn_id
        self.phase: Phase = "new"
        self.steps = 0
        self._wraps_turn = wraps_turn
        self._wraps_steps = wraps_steps
        self._entered = False  # the turn middleware has called next() and has not returned
        self._resumed: Resume | None = None
        self._end_as_is: End | None = None  # how the turn ends unless middleware says otherwise
        #: How many steps it may take. The number can change between two inputs.
        self.max_steps = max_steps
        self._next = 0
        self._pausing = False
        self._told = False  # something came that the next model call is to read
        self._judge = judge
        self._repaired = False  # the model was asked for its answer again
        self._operator = False
        self._asked: BeginCall | BeginList | None = None  # what an operator asked for, until it is begun
        self._at = ""  # the time of the input that is handled
        self._used_ids: set[str] = set()
        # the calls of the step that is running
        self._places: dict[str, tuple[int, messages.ToolCallPart]] = {}
        self._results: dict[str, tuple[messages.ToolCallPart, ToolResult]] = {}
        self._last_result: ToolResult | None = None
        self._rerun: list[RunTool] = []

    @property
    def open_calls(self) -> list[str]:
        """Tool call ids without a result yet, in call order."""
        return list(self._places)

    def handle(self, event: Input, at: str) -> list[Action]:
        """The actions for `event`, in order. An event that does not fit the state causes no action."""
        if self.phase == "over":
            return []
        kind, self._at = type(event), at
        take = _TAKES.get((self.phase, kind)) or _TAKES_ALWAYS.get(kind)
        return [] if take is None else take(self, event, at)

    def hear(self) -> None:
        """The next model call has something new to read: the turn gets one more step, if it has steps left."""
        self._told = True

    def take_position(self) -> int:
        """The next free position, for a message event that another part adds to the turn."""
        position = self._next
        self._next += 1
        return position

    # --- inputs (see _TAKES)

    def _on_begin(self, begin: Begin, at: str) -> list[Action]:
        return [
            self._store(messages.UserData(begin.text, begin.files), begin.source, at, begin.metadata),
            *self._open_turn(),
        ]

    def _on_begin_call(self, begin: BeginCall, at: str) -> list[Action]:
        self._operator, self._asked = True, begin
        stored: list[Action] = []
        if begin.told is not None:
            stored.append(self._store(messages.UserData(begin.told), messages.MessageSource("system"), at))
        return [*stored, *self._open_turn()]

    def _on_begin_list(self, begin: BeginList, at: str) -> list[Action]:
        self._operator, self._asked = True, begin
        return self._open_turn()

    def _on_resume(self, resume: Resume, at: str) -> list[Action]:
        self._next = resume.next_position
        self._resumed = resume
        return self._open_turn()

    def _on_model_failed(self, failed: ModelFailed, at: str) -> list[Action]:
        return self._step_done(False, self._failure(failed.error), failed.error)

    def _on_turn_entered(self, entered: TurnEntered, at: str) -> list[Action]:
        self._entered = True
        return self._go_on()

    def _on_turn_left(self, left: TurnLeft, at: str) -> list[Action]:
        """The turn middleware has returned behind the turn's core."""
        return [self._over(left.end or self._end_as_is or self._failure(_MOOT))]

    def _on_turn_left_early(self, left: TurnLeft, at: str) -> list[Action]:
        self._entered = False
        return self._break_off(left.end or self._failure(_MOOT), "the turn ended", at)

    def _on_step_left_early(self, left: StepLeft, at: str) -> list[Action]:
        return self._break_off(self._failure(left.error or _MOOT), "the step ended", at)

    def _on_pause(self, pause: Pause, at: str) -> list[Action]:
        self._pausing = True
        return []

    def _on_cancel(self, cancel: Cancel, at: str) -> list[Action]:
        return self._break_off(self._failure(cancel.error), cancel.reason, at, cancel.told)

    # --- transitions

    def _open_turn(self) -> list[Action]:
        if self._wraps_turn:
            self.phase = "opening"
            return [EnterTurn()]
        return self._go_on()

    def _go_on(self) -> list[Action]:
        """The core of the turn begins, or continues the work of an earlier incarnation."""
        resumed, self._resumed = self._resumed, None
        return self._boundary() if resumed is None else self._resume(resumed)

    def _boundary(self) -> list[Action]:
        """Every call has its result: the next step, or the end."""
        if self._operator and self._asked is None:
            output = self._last_result
            return self._end(End(status="completed", steps=self.steps, finish_reason="stop", output=output))
        if self._operator and not self._wraps_steps:
            return self._do_asked()
        if self.steps >= self.max_steps:
            message = f"the turn took {self.steps} steps, limit {self.max_steps}, and was not finished"
            error = error_payload("E_MAX_STEPS", message)
            return self._end(End(status="failed", steps=self.steps, finish_reason="max_steps", error=error))
        if self._pausing:
            self.phase = "over"
            return [Yield()]
        self.steps += 1
        if self._wraps_steps:
            self.phase = "entering"
            return [EnterStep(self.steps)]
        return self._ask()

    def _do_asked(self) -> list[Action]:
        """Do what the operator asked for."""
        asked, self._asked = self._asked, None
        if isinstance(asked, BeginCall):
            return self._on_answer(ModelAnswered("", [AskedCall("", asked.tool, asked.args)]), self._at)
        self.phase = "listing"
        return [ListTools()]

    def _ask(self) -> list[Action]:
        if self._operator:
            return self._do_asked()
        self.phase, self._told = "thinking", False
        return [AskModel(self.steps)]

    def _on_step_entered(self, entered: StepEntered, at: str) -> list[Action]:
        if self._rerun:
            self.phase = "acting"
            rerun, self._rerun = self._rerun, []
            return list(rerun)
        return self._ask()

    def _on_answer(self, answer: ModelAnswered, at: str) -> list[Action]:
        parts = [self._name_call(call, index) for index, call in enumerate(answer.calls)]
        content: list[messages.TextPart | messages.ToolCallPart] = (
            [messages.TextPart(answer.text)] if answer.text or not parts else []
        )
        broken: dict[str, str] = {}
        for part, call in zip(parts, answer.calls, strict=True):
            if call.broken is not None or not isinstance(call.args, dict):
                broken[part.tool_call_id] = call.broken or "they are no JSON object"
        metadata = dict(answer.metadata or {}) | ({UNREADABLE: broken} if broken else {})
        stored = self._store(
            messages.AssistantData([*content, *parts]), messages.MessageSource("assistant"), at, metadata
        )
        self._end_as_is = self._completion(answer.text, answer.finish_reason, metadata)
        if not parts:
            return [stored, *self._judged(answer.text, at)]
        self._open(stored.position, parts)
        return [stored, *[RunTool(part, stored.message, broken.get(part.tool_call_id)) for part in parts]]

    def _judged(self, text: str, at: str) -> list[Action]:
        """The model has answered. An answer that does not fit is asked for again, once."""
        if self._judge is None or self._operator or self._end_as_is is None:
            return self._step_done(False, self._end_as_is)
        verdict = self._judge(text)
        if verdict.value is not None:
            self._end_as_is = structs.replace(self._end_as_is, response=verdict.text, value=verdict.value)
            return self._step_done(False, self._end_as_is)
        self._end_as_is = self._failure(verdict.error)
        if self._repaired or self.steps >= self.max_steps:
            return self._step_done(False, self._end_as_is)
        self._repaired = True
        asked = self._store(messages.UserData(verdict.repair), messages.MessageSource("system"), at, {REPAIR: True})
        return [asked, *self._step_done(True, self._end_as_is)]

    def _completion(self, text: str, finish_reason: str | None, metadata: Mapping[str, Any]) -> End:
        """The end with this last message. What its metadata says of it is there after a restart, too."""
        reasoning = metadata.get(messages.REASONING)
        return End(
            status="completed",
            steps=self.steps,
            response=text,
            finish_reason=finish_reason or "stop",
            cut_off=metadata.get(messages.CUT_OFF) is True,
            reasoning=reasoning if isinstance(reasoning, str) else None,
        )

    def _on_result(self, finished: ToolFinished, at: str) -> list[Action]:
        tool_call_id, result = finished.tool_call_id, finished.result
        place = self._places.pop(tool_call_id, None)
        if place is None:
            return []
        position, part = place
        self._last_result = result
        self._results[tool_call_id] = part, result
        stored = self._store_result(position, part, result, at, finished.files)
        return [stored] if self._places else [stored, *self._step_done(True, self._end_as_is)]

    def _on_listed(self, listed: Listed, at: str) -> list[Action]:
        self._last_result = listed.result
        return self._step_done(True, None)

    def _step_done(self, should_continue: bool, end: End | None, error: ErrorPayload | None = None) -> list[Action]:
        """The core of the step is done. `end` is how the turn ends if no other step follows."""
        results, self._results = list(self._results.values()), {}
        if self._told and end is not None and end.status == "completed":
            should_continue = should_continue or (self.steps < self.max_steps and not self._pausing)
        if self._wraps_steps:
            self.phase = "leaving"
            self._end_as_is = end
            return [LeaveStep(self.steps, should_continue, results, error)]
        return self._boundary() if should_continue or end is None else self._end(end)

    def _on_step_left(self, left: StepLeft, at: str) -> list[Action]:
        """The step middleware has returned behind the step's core."""
        if left.error is not None:
            return self._end(self._failure(left.error))
        if left.should_continue or self._operator:
            return self._boundary()
        return self._end(self._end_as_is or self._completion("", None, {}))

    def _break_off(self, end: End, reason: str, at: str, told: str | None = None) -> list[Action]:
        """Give up everything that is open. Every call gets a result, and the model gets the text `told` if there is
        one.
        """
        if self.phase == "closing":
            return [self._over(self._end_as_is or end)]  # the core had ended already
        actions: list[Action] = []
        if self._places:
            actions.append(DropCalls(list(self._places)))
            for position, part in self._places.values():
                actions.append(self._store_result(position, part, messages.cancelled(reason), at))
            self._places.clear()
        if told is not None and not self._operator:
            actions.append(self._store(messages.UserData(told), messages.MessageSource("system"), at))
        return [*actions, *self._end(end)]

    def _resume(self, resume: Resume) -> list[Action]:
        self._operator, self._asked = resume.operator, resume.asked
        last: tuple[int, messages.Message, messages.AssistantData] | None = None
        asked_again = False  # the last message asks for the answer again
        results: dict[str, ToolResult] = {}
        for position, message in resume.stored:
            self._next = max(self._next, position + 1)
            asked_again = message.metadata.get(REPAIR) is True
            self._repaired = self._repaired or asked_again
            if isinstance(message.data, messages.AssistantData):
                self.steps += self._wraps_steps or not self._operator
                self._asked = None
                calls = message.data.calls
                self._used_ids.update(call.tool_call_id for call in calls)
                self._next = max(self._next, position + 1 + len(calls))
                last, results = (position, message, message.data), {}
            elif isinstance(message.data, messages.ToolData):
                results.update({part.tool_call_id: part.result for part in message.data.content})
        if last is None:
            return self._boundary()
        position, message, data = last
        calls = data.calls
        self._end_as_is = self._completion(data.text, None, message.metadata)
        if not calls:
            return self._boundary() if resume.told or asked_again else self._judged(data.text, self._at)
        self._open(position, calls)
        for call in calls:
            if call.tool_call_id in results:
                self._last_result = results[call.tool_call_id]
                self._results[call.tool_call_id] = call, self._last_result
                del self._places[call.tool_call_id]
        if not self._places:
            self._results.clear()
            return self._boundary()
        broken = message.metadata.get(UNREADABLE, {})
        runs = [RunTool(part, message, broken.get(part.tool_call_id), again=True) for _, part in self._places.values()]
        if self._wraps_steps:
            self._rerun, self.phase = runs, "entering"
            return [EnterStep(self.steps, again=True)]
        return list(runs)

    # --- pieces

    def _store(
        self,
        data: messages.UserData | messages.AssistantData,
        source: messages.MessageSource,
        at: str,
        metadata: dict[str, Any] | None = None,
    ) -> Store:
        position = self._next
        self._next += 1
        return Store(position, messages.Message(f"{self.turn_id}.{position}", data, at, source, metadata or {}))

    def _store_result(
        self, position: int, part: messages.ToolCallPart, result: ToolResult, at: str, files: Sequence[FilePart] = ()
    ) -> Store:
        if result.receipt is not None:
            result = structs.replace(result, receipt=None)  # for operators; a model reads what is stored
        shown = messages.ToolResultPart(part.tool_call_id, part.tool_name, result, list(files))
        return Store(position, messages.result_message(f"{self.turn_id}.{position}", shown, at))

    def _open(self, position: int, parts: Sequence[messages.ToolCallPart]) -> None:
        self.phase = "acting"
        self._places = {part.tool_call_id: (position + 1 + index, part) for index, part in enumerate(parts)}
        self._next = max(self._next, position + 1 + len(parts))

    def _end(self, end: End) -> list[Action]:
        """The core of the turn is done."""
        if self._entered:
            self.phase, self._end_as_is = "closing", end
            return [LeaveTurn(end)]
        return [self._over(end)]

    def _over(self, end: End) -> End:
        self.phase = "over"
        return end

    def _failure(self, error: ErrorPayload) -> End:
        reason = "cancelled" if error.code == "E_CANCELLED" else row_of(error.code).finish_reason
        return End(status="failed", steps=self.steps, finish_reason=reason, error=error)

    def _name_call(self, call: AskedCall, index: int) -> messages.ToolCallPart:
        """The call with an id that is unique in this turn."""
        tool_call_id = messages.unique_id(call.id, f"call_{max(self.steps, 1)}_{index + 1}", self._used_ids)
        return messages.ToolCallPart(tool_call_id, call.name, call.args if isinstance(call.args, dict) else {})


#: The function that takes an input in a phase, and the functions for inputs in all other phases. A turn that is over
#: takes no input.
_TAKES: Final[Mapping[tuple[Phase, type[Input]], Callable[[Turn, Any, str], list[Action]]]] = {
    ("new", Begin): Turn._on_begin,
    ("new", BeginCall): Turn._on_begin_call,
    ("new", BeginList): Turn._on_begin_list,
    ("new", Resume): Turn._on_resume,
    ("opening", TurnEntered): Turn._on_turn_entered,
    ("entering", StepEntered): Turn._on_step_entered,
    ("entering", StepLeft): Turn._on_step_left_early,
    ("thinking", ModelAnswered): Turn._on_answer,
    ("thinking", ModelFailed): Turn._on_model_failed,
    ("thinking", StepLeft): Turn._on_step_left_early,
    ("acting", ToolFinished): Turn._on_result,
    ("acting", StepLeft): Turn._on_step_left_early,
    ("listing", Listed): Turn._on_listed,
    ("listing", StepLeft): Turn._on_step_left_early,
    ("leaving", StepLeft): Turn._on_step_left,
    ("closing", TurnLeft): Turn._on_turn_left,
}
_TAKES_ALWAYS: Final[Mapping[type[Input], Callable[[Turn, Any, str], list[Action]]]] = {
    TurnLeft: Turn._on_turn_left_early,
    Pause: Turn._on_pause,
    Cancel: Turn._on_cancel,
}
