"""What middleware gets and returns: contexts, results, and its view of the conversation.

Each layer gets a context object of its own. The changeable fields (`args`, `tool_catalog`, `metadata`) are shared by
all layers of the chain. Every other field is read-only: assigning to it raises AttributeError.

Names are the specification's in snake_case. Times are RFC 3339 in UTC.

Source: docs/design/turns.md section 8; requirements CALL-10 to CALL-13, CALL-16, PIPELINE-02, CATALOG-05, CATALOG-07,
CONTEXT-10.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Final, Literal, Protocol

import msgspec
from msgspec import Struct

from goondan.agentproc.catalog import Catalog, StepCatalog
from goondan.agentproc.context.estimate import RESULT
from goondan.agentproc.context.wishes import NO_WISHES, Summarise, Wishes
from goondan.agentproc.conversation import Message, MessageEvent
from goondan.agentproc.extensions.pipeline import Layer, Next
from goondan.agentproc.extensions.step_changes import read_items
from goondan.schemas.codec import from_raw
from goondan.schemas.errors import fail
from goondan.schemas.frames import AgentEvent, ErrorPayload, ToolError, ToolResult
from goondan.schemas.launch import CatalogItem
from goondan.schemas.questions import TIMEOUT_MS
from goondan.schemas.structured import ForcedTool, ToolChoice


class ConversationState(Protocol):
    """The messages of a turn: `next_messages` are `base_messages` with `events` applied. Each is a new list."""

    @property
    def base_messages(self) -> list[Message]:
        """The messages that earlier turns left."""

    @property
    def events(self) -> list[MessageEvent]:
        """The message events of this turn so far, in order."""

    @property
    def next_messages(self) -> list[Message]:
        """The current messages of the conversation."""


# --- results --------------------------------------------------------------------------------------------------------


class TurnResult(Struct, kw_only=True):
    """How a turn ended. Middleware may change `response`, `finish_reason` and `error`, or return another result."""

    #: The id of the turn.
    turn_id: str
    #: The answer. A change of it changes the answer, not the conversation.
    response: str | None = None
    #: The assistant message that the answer came from.
    response_message: Message | None = None
    #: Why the turn ended.
    finish_reason: str | None = None
    #: The error of a failed turn. A result with an error is a failed turn.
    error: ErrorPayload | None = None

    @property
    def status(self) -> Literal["completed", "failed"]:
        """`failed` when there is an error."""
        return "completed" if self.error is None else "failed"


class ToolCall(Struct, frozen=True):
    """A tool call of the model (CALL-08)."""

    #: The model's id of the call.
    id: str
    #: The tool as the model named it.
    name: str
    #: The arguments.
    args: dict[str, Any]


class ToolCallResult:
    """The result of one call. `output`, `error` and `status` may be changed, or another result returned.

    `output` is a JSON value; it is decoded at the first access. `error` has message, name, code, suggestion, help_url.
    """

    __slots__ = ("_output", "_wire", "error", "handle", "status", "tool_call_id", "tool_name")

    def __init__(
        self,
        tool_call_id: str,
        tool_name: str,
        *,
        status: Literal["ok", "error", "pending"] = "ok",
        output: Any = None,
        error: ToolError | None = None,
        handle: str | None = None,
    ) -> None:
        self.tool_call_id = tool_call_id
        self.tool_name = tool_name
        self.status = status
        self.error = error
        self.handle = handle
        self._output = output
        self._wire: ToolResult | None = None

    @classmethod
    def of(cls, tool_call_id: str, tool_name: str, result: ToolResult) -> ToolCallResult:
        """A result as it arrived. Its output is decoded at the first access."""
        made = cls.__new__(cls)  # each call has one, and most are never looked into
        made.tool_call_id, made.tool_name = tool_call_id, tool_name
        made.status, made.error, made.handle = result.status, result.error, result.handle
        made._output, made._wire = None, result
        return made

    @property
    def output(self) -> Any:
        """The handler's value; None unless `status` is `ok`."""
        if self._wire is not None:
            wire, self._wire = self._wire, None
            self._output = None if wire.output is None else from_raw(wire.output, object)
        return self._output

    @output.setter
    def output(self, value: Any) -> None:
        self._wire, self._output = None, value

    @property
    def untouched(self) -> ToolResult | None:
        """The result as it arrived; None when somebody has read the output or changed anything."""
        wire = self._wire
        if wire is None or (wire.status, wire.error, wire.handle) != (self.status, self.error, self.handle):
            return None
        return wire

    def __repr__(self) -> str:
        return (
            f"ToolCallResult({self.tool_name!r}, {self.tool_call_id!r}, status={self.status!r}, error={self.error!r})"
        )


class StepResult(Struct, kw_only=True):
    """How a step ended: one model call and its tool calls.

    Middleware may change `should_continue`. The results are stored already; to change the messages that the model sees,
    emit a message event.
    """

    #: `failed` for a step with an error.
    status: Literal["completed", "failed"] = "completed"
    #: False ends the turn with this step's text. True asks the model again; after a failed model call that is a retry.
    should_continue: bool = False
    #: The tool calls, in call order.
    tool_calls: list[ToolCall] = []
    #: The results, in call order.
    tool_results: list[ToolCallResult] = []
    #: The metadata of the step, shared by its middleware.
    metadata: dict[str, Any] = {}
    #: The error of a failed step.
    error: ErrorPayload | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises AttributeError for fields that report a fact and cannot be changed."""
        if name in ("status", "tool_calls", "tool_results"):
            raise AttributeError(f"StepResult.{name} is read-only; should_continue is yours to change")
        super().__setattr__(name, value)


# --- contexts -------------------------------------------------------------------------------------------------------


class Execution(Struct, frozen=True):
    """The agent, the instance and the turn that middleware runs in."""

    #: The name of the agent.
    agent_name: str
    #: The instance key.
    instance_key: str
    #: The id of the turn.
    turn_id: str
    #: The id by which the turn's work is found, across agents.
    trace_id: str


class TurnInfo(Struct, frozen=True):
    """The turn that a step belongs to. `metadata` is that of the turn's middleware."""

    #: The id of the turn.
    id: str
    #: The event that began the turn.
    input_event: AgentEvent
    #: The metadata of the turn's middleware.
    metadata: dict[str, Any]


class Agents:
    """`ctx.agents`, `ctx.runtime`. A failure raises GoondanError with one of these codes: E_AGENT_NOT_FOUND,
    E_AGENT_TIMEOUT, E_AGENT_FAILED, E_AGENT_CYCLE, E_AGENT_SPAWN_FAILED, E_TOOL_INVALID_ARGS, E_FRAME_TOO_LARGE.
    """

    __slots__ = ("_ask",)

    def __init__(self, ask: Callable[[Literal["request", "send"], dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
        self._ask = ask

    async def request(
        self,
        target: str,
        input: Any = None,
        *,
        instance_key: str | None = None,
        event_type: str | None = None,
        timeout_ms: int | None = None,
        async_: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Have another agent run a turn. Returns {target, eventId, correlationId, accepted, async, response};
        `response` is its answer.

        `instance_key` is the caller's own by default. `timeout_ms` is 60,000 by default and never more than the turn
        has left. With `async_` the call returns at once and `response` is None. The answer becomes a message of this
        conversation, and there is no time limit unless `timeout_ms` gives one.
        """
        patience = None if async_ else TIMEOUT_MS
        return await self._ask(
            "request",
            {
                "target": target,
                "input": input,
                "instance_key": instance_key,
                "event_type": event_type,
                "timeout_ms": patience if timeout_ms is None else int(timeout_ms),
                "metadata": metadata,
                "asynchronous": async_,
            },
        )

    async def send(
        self,
        target: str,
        input: Any = None,
        *,
        instance_key: str | None = None,
        event_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Have another agent run a turn and do not wait for it. Returns {target, eventId, accepted, sent}."""
        given = {"target": target, "input": input, "instance_key": instance_key, "event_type": event_type}
        return await self._ask("send", {**given, "metadata": metadata})


class TurnScope:
    """The state that the layers of one turn share. `agents` makes the `ctx.agents` of a layer from a place, an
    extension, and a context manager in which the layer's clock stands still. `ask_model` asks the model a question,
    with a system prompt, in a step.
    """

    __slots__ = ("agents", "ask_model", "emit", "execution", "input_event", "metadata", "state")

    def __init__(
        self,
        execution: Execution,
        input_event: AgentEvent,
        state: ConversationState,
        emit: Callable[[str, Any], None],
        agents: Callable[[str, str, Callable[[], AbstractContextManager[None]]], Agents],
        ask_model: Callable[[str, str | None, int], Awaitable[str]],
    ) -> None:
        self.execution = execution
        self.input_event = input_event
        self.state = state
        self.emit = emit
        self.agents = agents
        self.ask_model = ask_model
        self.metadata: dict[str, Any] = {}


class Unchanged(Enum):
    """Marks a value that nobody has changed."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED


#: Gets the messages that the model would see, and returns the messages that it will see (views.py).
Change = Callable[[list[Message]], Any]


class View(Struct, frozen=True):
    """One change of the messages that the model sees, and the extension that asked for it."""

    #: The extension.
    extension: str
    #: The change.
    change: Change


_CHOICE: Final[Any] = ToolChoice | None


class StepScope:
    """The state that the layers of one step share. `index` counts from 0. The model sees `blocks` in this step only.

    `system` is the step's system prompt, unless it is the agent's own. `bound` says which tools may be in the catalog.
    `settled` is the catalog as it was checked last, so each tool in it is allowed.
    """

    __slots__ = (
        "blocks",
        "bound",
        "effective_config",
        "index",
        "metadata",
        "settled",
        "system",
        "tool_catalog",
        "tool_choice",
        "turn",
        "views",
        "wishes",
    )

    def __init__(self, turn: TurnScope, index: int, bound: Catalog, effective_config: dict[str, Any]) -> None:
        self.turn = turn
        self.index = index
        self.bound = bound
        self.settled = bound.for_step()
        self.tool_catalog: Any = list(self.settled.items)
        self.tool_choice: ToolChoice | None = None
        self.effective_config = effective_config
        self.blocks: list[dict[str, Any]] = []
        self.system: str | Unchanged | None = UNCHANGED
        self.metadata: dict[str, Any] = {}
        self.views: list[View] = []
        self.wishes: Wishes = NO_WISHES

    def settle_catalog(self) -> StepCatalog:
        """The catalog as the layers so far have made it. Raises MiddlewareError when the last of them has added an
        object that is no item, or a tool that cannot be called.
        """
        if self.tool_catalog != self.settled.items:  # Otherwise every layer would pay for a check of every tool.
            self.tool_catalog = read_items(self.tool_catalog, self.bound)
            self.settled = self.bound.of_items(self.tool_catalog)
        return self.settled


class CallScope:
    """The state that the layers of one tool call share."""

    __slots__ = ("args", "metadata", "step_index", "tool_call_id", "tool_name", "turn")

    def __init__(self, turn: TurnScope, step_index: int, tool_name: str, tool_call_id: str, args: Any) -> None:
        self.turn = turn
        self.step_index = step_index
        self.tool_name = tool_name
        self.tool_call_id = tool_call_id
        self.args = args
        self.metadata: dict[str, Any] = {}


class _Context:
    """The part that all contexts have in common."""

    __slots__ = ("_layer", "_next", "_turn")

    def __init__(self, turn: TurnScope, proceed: Next[Any], layer: Layer) -> None:
        self._turn = turn
        self._next = proceed
        self._layer = layer

    @property
    def _extension(self) -> str:
        """The extension that this layer belongs to."""
        return self._layer.extension

    @property
    def agent_name(self) -> str:
        """The name of the agent."""
        return self._turn.execution.agent_name

    @property
    def instance_key(self) -> str:
        """The instance key."""
        return self._turn.execution.instance_key

    @property
    def turn_id(self) -> str:
        """The id of the turn."""
        return self._turn.execution.turn_id

    @property
    def trace_id(self) -> str:
        """The id by which the turn's work is found, across agents."""
        return self._turn.execution.trace_id


class _Messages(_Context):
    __slots__ = ()

    @property
    def conversation_state(self) -> ConversationState:
        """The current conversation."""
        return self._turn.state

    def emit_message_event(self, event: MessageEvent | dict[str, Any]) -> None:
        """Change the conversation: `{"type": "append", "message": {…}}`, `replace`, `remove` (with `targetId`) or
        `truncate`. The change is stored before this returns.

        A message needs `data` ({role, content}); id, createdAt and source are filled in. Raises MiddlewareError for an
        invalid message event, and after the turn's end.
        """
        self._turn.emit(self._extension, event)

    @property
    def _place(self) -> str:
        """The name of this place in the ids of the questions that the layer asks."""
        return "turn"

    @property
    def agents(self) -> Agents:
        """Asks other agents of the swarm."""
        return self._turn.agents(self._place, self._extension, self._next.standing)


class TurnContext(_Messages):
    """The context of turn middleware, from the event that began the turn to its answer."""

    __slots__ = ()

    @property
    def input_event(self) -> AgentEvent:
        """The event that began the turn. Its user message is in the conversation already."""
        return self._turn.input_event

    @property
    def metadata(self) -> dict[str, Any]:
        """Shared by the turn's middleware. Its steps can read it as `ctx.turn.metadata`."""
        return self._turn.metadata

    def next(self) -> Awaitable[TurnResult]:
        """Run the next middleware, or at the end the turn itself. A turn that fails is a result with an error."""
        return self._next()


class StepContext(_Messages):
    """The context of step middleware: one model call and its tool calls."""

    __slots__ = ("_step",)

    def __init__(self, step: StepScope, proceed: Next[Any], layer: Layer) -> None:
        self._turn, self._next, self._layer = step.turn, proceed, layer
        self._step = step

    @property
    def _place(self) -> str:
        return f"step{self._step.index + 1}"

    @property
    def turn(self) -> TurnInfo:
        """The turn that the step belongs to."""
        turn = self._turn
        return TurnInfo(turn.execution.turn_id, turn.input_event, turn.metadata)

    @property
    def step_index(self) -> int:
        """Counts from 0 in each turn."""
        return self._step.index

    @property
    def tool_catalog(self) -> list[CatalogItem]:
        """The tools that the model sees in this step and may call. Change the list, or assign another one.

        Items have name, description, parameters and source; a dict with these keys is accepted. The change holds for
        this step only.
        """
        catalog: list[CatalogItem] = self._step.tool_catalog
        return catalog

    @tool_catalog.setter
    def tool_catalog(self, items: list[CatalogItem]) -> None:
        self._step.tool_catalog = items

    @property
    def metadata(self) -> dict[str, Any]:
        """Shared by this step's middleware."""
        return self._step.metadata

    @property
    def tool_choice(self) -> str | dict[str, str] | None:
        """Which tools the model has to call in this step: `auto`, `none`, `required` or `{"tool": NAME}`. None: what
        the agent's `toolChoice` says. Raises GoondanError E_USAGE for any other value.
        """
        choice = self._step.tool_choice
        return {"tool": choice.tool} if isinstance(choice, ForcedTool) else choice

    @tool_choice.setter
    def tool_choice(self, choice: str | dict[str, str] | None) -> None:
        try:
            self._step.tool_choice = msgspec.convert(choice, _CHOICE)
        except msgspec.ValidationError:
            message = f"extension {self._extension}: tool_choice is auto, none, required, {{tool: NAME}} or None"
            raise fail("E_USAGE", message) from None

    def view_messages(self, change: Change) -> None:
        """In this step only, show the model the messages that `change(messages)` returns. Nothing is stored.

        When the model is asked, `change` gets the whole conversation as the earlier changes have made it. It returns a
        list of these messages and of new ones in the form that `emit_message_event` takes. The model always gets a
        result behind every call. Raises GoondanError E_USAGE when `change` is no function.
        """
        if not callable(change):
            raise fail("E_USAGE", f"extension {self._extension}: view_messages takes a function")
        self._step.views.append(View(self._extension, change))

    def limit_context(
        self,
        *,
        max_messages: int | None = None,
        max_tokens: int | None = None,
        keep_tokens: int | None = None,
        result_share: float = RESULT,
        summarise: Summarise | None = None,
    ) -> None:
        """In this step, show the model less of the conversation than fits. What is left out is left out in jumps, and
        stays left out in later steps and turns. Nothing of the stored conversation changes.

        - `max_messages`: a conversation of more messages is cut, to two thirds of them.
        - `max_tokens`: a longer conversation is cut, to `keep_tokens` (two thirds unless given).
        - `result_share`: the part of the model's context that one tool's result may have (default 0.25).
        - `summarise`: an async function (ask, summary so far, messages, most). It returns a summary of the messages
          that
          are to be left out now. `await ask(text, system)` asks the agent's model; both texts may have `most` bytes
          together. It is also called when the context itself is too small.

        Where several extensions limit the same, the smallest number counts. Raises GoondanError E_USAGE for other
        values.
        """
        wishes = Wishes(
            max_messages=max_messages,
            max_tokens=max_tokens,
            keep_tokens=keep_tokens,
            result_share=result_share,
            summarise=summarise,
        )
        if (fault := wishes.fault) is not None:
            raise fail("E_USAGE", f"extension {self._extension}: limit_context: {fault}")
        self._step.wishes = self._step.wishes.both(wishes)

    async def ask_model(self, text: str, *, system: str | None = None) -> str:
        """Ask the agent's own model a question outside of the conversation, and return the answer.

        The model gets no tools. The call is in the trace of the step, and counts for budgets like every model call.
        Raises GoondanError when the model does not answer, E_USAGE when `text` or `system` is no text.
        """
        given: tuple[Any, Any] = (text, system)  # an extension may give anything
        if not isinstance(given[0], str) or not text or not isinstance(given[1], str | None):
            raise fail("E_USAGE", f"extension {self._extension}: ask_model takes a text, and system a text")
        with self._next.standing():
            return await self._step.turn.ask_model(text, system, self._step.index + 1)

    def next(self) -> Awaitable[StepResult]:
        """Run the next middleware, or at the end the step itself. A failed model call is a result with an error.

        Raises MiddlewareError when `tool_catalog` contains an item that cannot be called.
        """
        self._step.settle_catalog()
        return self._next()


class ToolCallContext(_Context):
    """The context of tool call middleware."""

    __slots__ = ("_call",)

    def __init__(self, call: CallScope, proceed: Next[Any], layer: Layer) -> None:
        self._turn, self._next, self._layer = call.turn, proceed, layer
        self._call = call

    @property
    def step_index(self) -> int:
        """The index of the step, from 0."""
        return self._call.step_index

    @property
    def tool_name(self) -> str:
        """The tool as the model named it."""
        return self._call.tool_name

    @property
    def tool_call_id(self) -> str:
        """The model's id of the call."""
        return self._call.tool_call_id

    @property
    def args(self) -> Any:
        """The arguments. They are checked after the middleware, and may be changed or replaced before next()."""
        return self._call.args

    @args.setter
    def args(self, value: Any) -> None:
        self._call.args = value

    @property
    def metadata(self) -> dict[str, Any]:
        """Shared by this call's middleware."""
        return self._call.metadata

    def next(self) -> Awaitable[ToolCallResult]:
        """Run the next middleware, or at the end the call itself. A call that fails is a result with an error."""
        return self._next()
