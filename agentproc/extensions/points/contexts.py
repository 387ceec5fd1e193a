"""The contexts of handlers, and the state behind them that the layers of a turn, a step or a tool call share. Pure.

A context is a table: a field, and where the scope has it. Views are such tables as well: `ctx.turn`, `ctx.step`,
`ctx.tool_call`. Names are the specification's in snake_case. Times are RFC 3339 in UTC.

- The context of middleware (`api.pipeline`) shows the scope itself. Its changeable fields (`args`, `tool_catalog`,
  `metadata`) are shared by all layers. Every other field is read-only: assigning to it raises AttributeError.
- The context of a handler at a point (`api.pipelines`) is a copy of its own. It changes a field with
  `ctx.replace(blocks=…)`, as `dataclasses.replace` would, or with `{**ctx, "blocks": …}`, and returns the context. What
  it returns is stored in the scope, so both spellings see the same catalog, arguments and metadata. A tool that an
  extension registered with a dot (`skills.list`) has the dot in its name here. The model may see another name.

Source: docs/design/turns.md section 8; requirements CALL-10 to CALL-13, CALL-16, PIPELINE-02, PIPELINE-08 to
PIPELINE-12, PIPELINE-17 to PIPELINE-23, PIPELINE-26, CATALOG-05, CATALOG-07, CONTEXT-10, EXT-03, EXT-10, EXT-13,
DYNAMIC-10.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import cache
from operator import attrgetter, is_
from typing import Any, Final, NoReturn, Self

import msgspec
from msgspec import Struct

from goondan.agentproc.extensions.points import results
from goondan.agentproc.extensions.points.pipeline import POINTS, Layer, MiddlewareError
from goondan.agentproc.machine.catalog import Catalog, StepCatalog
from goondan.agentproc.machine.estimate import NO_WISHES, RESULT, Summarise, Wishes
from goondan.agentproc.machine.messages import Message, MessageEvent
from goondan.agentproc.providers.base import ModelAnswer
from goondan.schemas.bundle.address import shown_tool_name
from goondan.schemas.bundle.launch import CatalogItem, ForcedTool, ToolChoice
from goondan.schemas.wire import errors, frames

#: The most blocks of one step. An extension that adds blocks in every step by mistake is found early.
MAX_BLOCKS: Final = 256

_CHOICE: Final[Any] = ToolChoice | None


# --- documents ---


class Resource(dict[str, Any]):
    """A document as it was written, by key or by attribute: `api.extension.spec.config`. Read-only.

    A missing field is None as an attribute, and KeyError as a key. An attribute may be written in snake_case:
    `spec.model_config` is `modelConfig`. An object inside is a Resource as well. The exception is `config`: it belongs
    to the extension and is a plain dict.

    It is a dict, so that `json.dumps` and everything else that wants one takes it. A copy of it is a plain dict.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self.get(camel(name), self.get(name))
        return Resource(value) if isinstance(value, dict) and name != "config" else value

    def _read_only(self, *args: Any, **fields: Any) -> NoReturn:
        raise AttributeError("a resource is read-only")

    __setattr__ = __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _read_only

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[list[tuple[str, Any]]]]:
        return dict, (list(self.items()),)

    def __repr__(self) -> str:
        name = (self.get("metadata") or {}).get("name")
        return f"Resource({self.get('kind')}/{name})" if name else f"Resource({sorted(self)})"


def camel(name: str) -> str:
    """`tool_catalog` as the documents write it: `toolCatalog`."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


# --- the state that layers share ---


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


class TurnScope(Struct, eq=False):
    """The state that the layers of one turn share."""

    #: The agent, the instance and the turn.
    execution: Execution
    #: The event that began the turn.
    input_event: frames.AgentEvent
    #: The messages (transcript.py): `next_messages` are `base_messages` with the turn's `events` applied. Each is a new
    #: list.
    state: Any
    #: Stores a message event of an extension.
    emit: Callable[[str, Any], None]
    #: Makes the `ctx.agents` of a layer from a place, an extension, and a context manager in which the layer's clock
    #: stands still.
    agents: Callable[[str, str, Callable[[], AbstractContextManager[None]]], Any]
    #: Asks the model a question, with a system prompt, in a step.
    ask_model: Callable[[str, str | None, int], Awaitable[ModelAnswer]]
    #: The configuration in force, as a copy that handlers may change.
    new_config: Callable[[], dict[str, Any]]
    #: The names with a dot that extensions gave to tools, by the names that models are shown.
    dotted: Callable[[], Mapping[str, str]]
    #: The document of the Swarm.
    swarm: Resource
    #: The document of the agent.
    agent: Resource
    #: Shared by the turn's handlers.
    metadata: dict[str, Any] = {}
    #: How the turn ended; None before its end.
    result: results.TurnResult | None = None
    #: What handlers see of it.
    view: Any = None

    def __post_init__(self) -> None:
        self.view = TurnView(self)

    @property
    def effective_config(self) -> dict[str, Any]:
        """What handlers around the turn see of its configuration."""
        return self.new_config()


class Unchanged(Enum):
    """Marks a value that nobody has changed."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED


#: Gets the messages that the model would see, and returns the messages that it will see (stages.py).
Change = Callable[[list[Message]], Any]


class View(Struct, frozen=True):
    """One change of the messages that the model sees, and the extension that asked for it."""

    #: The extension.
    extension: str
    #: The change.
    change: Change


class StepScope(Struct, eq=False):
    """The state that the layers of one step share. `index` counts from 0. The model sees `blocks` in this step only."""

    #: Its turn.
    turn: TurnScope
    #: Counts from 0 in each turn.
    index: int
    #: Says which tools may be in the catalog.
    bound: Catalog
    #: The configuration of the step, a copy that handlers may change.
    effective_config: dict[str, Any]
    #: The tools that the model sees and may call.
    tool_catalog: Any = None
    #: The catalog as it was checked last, so each tool in it is allowed.
    settled: StepCatalog = None  # type: ignore[assignment]  # __post_init__ has it
    #: Which tools the model has to call; None: what the agent says.
    tool_choice: ToolChoice | None = None
    #: What the model sees besides the conversation.
    blocks: list[dict[str, Any]] = []
    #: The step's system prompt, unless it is the agent's own.
    system: str | Unchanged | None = UNCHANGED
    #: Shared by the step's handlers.
    metadata: dict[str, Any] = {}
    #: What the model is shown of the conversation.
    views: list[View] = []
    #: What extensions wish of the context.
    wishes: Wishes = NO_WISHES
    #: Why the last try of the model call failed.
    llm_error: frames.ErrorPayload | None = None
    #: The answer of the last try.
    llm_result: results.LlmResult | None = None
    #: How the step ended; None before its end.
    result: results.StepResult | None = None
    #: What handlers see of it.
    view: Any = None

    def __post_init__(self) -> None:
        self.settled = self.bound.for_step()
        self.tool_catalog = list(self.settled.items)
        self.view = StepView(self)

    def settle_catalog(self) -> StepCatalog:
        """The catalog as the layers so far have made it. Raises MiddlewareError when the last of them has added an
        object that is no item, or a tool that cannot be called.
        """
        if self.tool_catalog != self.settled.items:  # Otherwise every layer would pay for a check of every tool.
            self.tool_catalog = results.read_items(self.tool_catalog, self.bound)
            self.settled = self.bound.of_items(self.tool_catalog)
        return self.settled

    @property
    def shown_catalog(self) -> Any:
        """The catalog with the names that extensions gave."""
        if not isinstance(self.tool_catalog, list | tuple):
            return self.tool_catalog  # middleware has spoiled it, and is told so when the step begins
        dotted = self.turn.dotted()
        if not dotted:
            return list(self.tool_catalog)
        return [
            item.replace(name=dotted[item.name]) if isinstance(item, CatalogItem) and item.name in dotted else item
            for item in self.tool_catalog
        ]

    @shown_catalog.setter
    def shown_catalog(self, items: list[CatalogItem]) -> None:
        if items != self.tool_catalog:
            self.tool_catalog = [
                item.replace(name=shown_tool_name(item.name)) if "." in item.name else item for item in items
            ]


class CallScope(Struct, eq=False):
    """The state that the layers of one tool call share. `step` is None where no handler runs around steps."""

    #: Its turn.
    turn: TurnScope
    #: Its step.
    step: StepScope | None
    #: The index of the step.
    step_index: int
    #: The tool as the model named it.
    tool_name: str
    #: The model's id of the call.
    tool_call_id: str
    #: The arguments. They are checked after the handlers.
    args: Any
    #: Shared by the call's handlers.
    metadata: dict[str, Any] = {}
    #: Its result; None before it is there.
    result: results.ToolCallResult | None = None
    #: What handlers see of it.
    view: Any = None

    def __post_init__(self) -> None:
        self.view = ToolCallView(self)


class WorkspaceScope(Struct, eq=False):
    """A repository or a worktree that extensions are told about (`repo`, `worktree`)."""

    #: Where it is.
    path: str
    #: `repo` or `worktree`.
    type: str
    #: What is known of it.
    metadata: dict[str, Any] | None = None


# --- views: `ctx.turn`, `ctx.step`, `ctx.tool_call` ---


def as_object(what: str, value: Any) -> dict[str, Any]:
    """A value that must be an object. Raises MiddlewareError."""
    if not isinstance(value, dict):
        raise MiddlewareError(f"{what} is {type(value).__name__}, not an object")
    return value


def shown(path: str) -> Any:
    """A field that handlers may read: what the scope has at `path`."""
    return property(attrgetter(f"_scope.{path}"))


def changeable(name: str, check: Callable[[Any], Any] = lambda value: value) -> Any:
    """A field that handlers may read and set: the scope's field of this name. `check` raises for a wrong value."""

    def put(view: Any, value: Any) -> None:
        setattr(view._scope, name, check(value))

    return property(attrgetter(f"_scope.{name}"), put)


class _Shown:
    """What handlers see of a scope."""

    __slots__ = ("_scope",)

    def __init__(self, scope: Any) -> None:
        self._scope = scope


class TurnView(_Shown):
    """`ctx.turn`. A handler may change or replace `metadata`; it is the metadata of the turn's middleware.

    `messages` are the current ones of the conversation. `result` exists in `turn.post`. A handler may change its
    `response`, `finish_reason` and `error`.
    """

    __slots__ = ()
    id = shown("execution.turn_id")
    agent_name = shown("execution.agent_name")
    instance_key = shown("execution.instance_key")
    trace_id = shown("execution.trace_id")
    input_event = shown("input_event")
    messages = shown("state.next_messages")
    metadata = changeable("metadata", lambda value: as_object("turn.metadata", value))
    result = changeable("result")

    @property
    def auth(self) -> Any:
        """The asker, from the event (`auth.actor`); None when the event has none."""
        auth = self._scope.input_event.auth
        return Resource(auth) if isinstance(auth, dict) else auth


class StepView(_Shown):
    """`ctx.step`. A handler may change or replace `metadata`; it is the metadata of the step's middleware.

    `result` exists in `step.post`. A handler may change its `should_continue`.
    """

    __slots__ = ()
    index = shown("index")
    metadata = changeable("metadata", lambda value: as_object("step.metadata", value))
    result = changeable("result")


class ToolCallView(_Shown):
    """`ctx.tool_call`. A handler may change or replace `args` before the call is made. They are checked after that."""

    __slots__ = ()
    id = shown("tool_call_id")
    args = changeable("args")
    metadata = shown("metadata")

    @property
    def name(self) -> str:
        """The tool, with the name that its extension gave it."""
        name: str = self._scope.tool_name
        return self._scope.turn.dotted().get(name, name)  # type: ignore[no-any-return]


# --- contexts of middleware ---


class _Context:
    """The part that the contexts of all kinds have in common."""

    __slots__ = ("_layer", "_next", "_scope")

    def __init__(self, scope: Any, layer: Layer, proceed: Any) -> None:
        self._scope, self._layer, self._next = scope, layer, proceed

    metadata = shown("metadata")

    def next(self) -> Any:
        """Run the next middleware, or at the end the turn, the step or the call itself. One that fails is a result with
        an error.
        """
        return self._next()


class ToolCallContext(_Context):
    """The context of tool call middleware. The arguments are checked after the middleware, and may be changed or
    replaced before next().
    """

    __slots__ = ()
    agent_name = shown("turn.execution.agent_name")
    instance_key = shown("turn.execution.instance_key")
    turn_id = shown("turn.execution.turn_id")
    trace_id = shown("turn.execution.trace_id")
    step_index = shown("step_index")
    tool_name = shown("tool_name")
    tool_call_id = shown("tool_call_id")
    args = changeable("args")


class TurnContext(_Context):
    """The context of turn middleware, from the event that began the turn to its answer. The user message of the event
    is in the conversation already. The steps of the turn can read `metadata` as `ctx.turn.metadata`.
    """

    __slots__ = ()
    agent_name = shown("execution.agent_name")
    instance_key = shown("execution.instance_key")
    turn_id = shown("execution.turn_id")
    trace_id = shown("execution.trace_id")
    input_event = shown("input_event")
    conversation_state = shown("state")

    @property
    def _turn(self) -> TurnScope:
        scope: TurnScope = self._scope
        return scope

    @property
    def _place(self) -> str:
        """The name of this place in the ids of the questions that the layer asks."""
        return "turn"

    @property
    def agents(self) -> Any:
        """Asks other agents of the swarm."""
        return self._turn.agents(self._place, self._layer.extension, self._next.standing)

    def emit_message_event(self, event: MessageEvent | dict[str, Any]) -> None:
        """Change the conversation: `{"type": "append", "message": {…}}`, `replace`, `remove` (with `targetId`) or
        `truncate`. The change is stored before this returns.

        A message needs `data` ({role, content}); id, createdAt and source are filled in. Raises MiddlewareError for an
        invalid message event, and after the turn's end.
        """
        self._turn.emit(self._layer.extension, event)


class StepContext(TurnContext):
    """The context of step middleware: one model call and its tool calls. `step_index` counts from 0 in each turn.

    `tool_catalog` has the tools that the model sees in this step and may call. Change the list, or assign another one.
    Items have name, description, parameters and source; a dict with these keys is accepted.
    """

    __slots__ = ()
    agent_name = ToolCallContext.agent_name
    instance_key = ToolCallContext.instance_key
    turn_id = ToolCallContext.turn_id
    trace_id = ToolCallContext.trace_id
    conversation_state = shown("turn.state")
    turn = shown("turn.view")
    step_index = shown("index")
    tool_catalog = changeable("tool_catalog")

    @property
    def input_event(self) -> NoReturn:
        """A step has it in `ctx.turn`."""
        raise AttributeError("ctx has no input_event; ctx.turn has it")

    @property
    def _turn(self) -> TurnScope:
        turn: TurnScope = self._scope.turn
        return turn

    @property
    def _place(self) -> str:
        return f"step{self._scope.index + 1}"

    def _wrong(self, what: str) -> Exception:
        return errors.fail("E_USAGE", f"extension {self._layer.extension}: {what}")

    @property
    def tool_choice(self) -> str | dict[str, str] | None:
        """Which tools the model has to call in this step: `auto`, `none`, `required` or `{"tool": NAME}`. None: what
        the agent's `toolChoice` says. Raises GoondanError E_USAGE for any other value.
        """
        choice: ToolChoice | None = self._scope.tool_choice
        return {"tool": choice.tool} if isinstance(choice, ForcedTool) else choice

    @tool_choice.setter
    def tool_choice(self, choice: str | dict[str, str] | None) -> None:
        try:
            self._scope.tool_choice = msgspec.convert(choice, _CHOICE)
        except msgspec.ValidationError:
            raise self._wrong("tool_choice is auto, none, required, {tool: NAME} or None") from None

    def view_messages(self, change: Change) -> None:
        """In this step only, show the model the messages that `change(messages)` returns. Nothing is stored.

        When the model is asked, `change` gets the whole conversation as the earlier changes have made it. It returns a
        list of these messages and of new ones in the form that `emit_message_event` takes. The model always gets a
        result behind every call. Raises GoondanError E_USAGE when `change` is no function.
        """
        if not callable(change):
            raise self._wrong("view_messages takes a function")
        self._scope.views.append(View(self._layer.extension, change))

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
          that are
          to be left out now. `await ask(text, system)` asks the agent's model; both texts may have `most` bytes
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
            raise self._wrong(f"limit_context: {fault}")
        self._scope.wishes = self._scope.wishes.both(wishes)

    async def ask_model(self, text: str, *, system: str | None = None) -> str:
        """Ask the agent's own model a question outside of the conversation, and return the answer.

        The model gets no tools. The call is in the trace of the step, and counts for budgets like every model call.
        Raises GoondanError when the model does not answer, E_USAGE when `text` or `system` is no text.
        """
        given: tuple[Any, Any] = (text, system)  # an extension may give anything
        if not isinstance(given[0], str) or not text or not isinstance(given[1], str | None):
            raise self._wrong("ask_model takes a text, and system a text")
        with self._next.standing():
            return (await self._turn.ask_model(text, system, self._scope.index + 1)).text

    def next(self) -> Any:
        """See _Context. Raises MiddlewareError when `tool_catalog` contains an item that cannot be called."""
        self._scope.settle_catalog()
        return self._next()


_CONTEXTS: Final[Mapping[str, type[_Context]]] = {"turn": TurnContext, "step": StepContext, "toolCall": ToolCallContext}


def binding(scope: Any) -> Callable[[Layer, Any], Any]:
    """The function that makes the context of a layer which shares this scope."""
    return lambda layer, proceed: (
        _CONTEXTS[layer.kind](scope, layer, proceed) if layer.point is None else PointContext(scope, layer.point)
    )


# --- contexts of points ---

_OF_TURN: Final = {"turn": "turn.view", "swarm": "turn.swarm", "agent": "turn.agent"}
_OF_STEP: Final = {
    "effective_config": "effective_config",
    "step": "view",
    "blocks": "blocks",
    "tool_catalog": "shown_catalog",
    "llm_result": "llm_result",
    "llm_error": "llm_error",
}
#: What a context of a point has, by the point's kind: its field, and where the scope has it. A field that a handler may
#: change is stored there.
FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "turn": {"turn": "view", "swarm": "swarm", "agent": "agent", "effective_config": "effective_config"},
    "step": {**_OF_TURN, **_OF_STEP},
    "toolCall": {
        **_OF_TURN,
        **{field: f"step.{place}" for field, place in _OF_STEP.items()},
        "tool_call": "view",
        "tool_result": "result",
    },
    "workspace": {"path": "path", "type": "type", "metadata": "metadata"},
}
_READ: Final = {kind: attrgetter(*fields.values()) for kind, fields in FIELDS.items()}


class PointContext:
    """The context of a handler at a point: a copy of what the point shows of its scope."""

    def __init__(self, scope: Any, point: str) -> None:
        kind = POINTS[point].kind
        self.__dict__.update(zip(FIELDS[kind], _READ[kind](scope), strict=True))
        self._scope = scope
        self._point = point

    def copied(self) -> Self:
        """A copy of the context for one handler."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)  # copy.copy does the same at ten times the price
        return made

    def at(self, point: str) -> Self:
        """The same context at another point of its kind."""
        made = self.copied()
        made._point = point
        return made

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields. Raises MiddlewareError for an unknown field."""
        made = self.copied()
        for name, value in changes.items():
            if name not in self.keys():
                raise MiddlewareError(f"a context has no {name!r}; it has {', '.join(self.keys())}")
            setattr(made, name, value)
        return made

    def keys(self) -> Sequence[str]:
        """The names of its fields, so that `{**ctx}` is possible."""
        return tuple(FIELDS[POINTS[self._point].kind])

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def accept(self, returned: Any, keeps: str = "") -> Self:
        """Check the context that a handler returned, and return it. Raises MiddlewareError when it is no context, when
        the handler changed a field that it must not change, or emptied the field `keeps`.
        """
        if not isinstance(returned, type(self)) or returned.keys() != self.keys():
            if not isinstance(returned, Mapping):
                raise MiddlewareError(f"it returned {type(returned).__name__}, not a context")
            returned = self.replace(**{_snake(str(name)): value for name, value in returned.items()})
        fixed, values_of = _fixed_fields(self._point)
        if not all(map(is_, values_of(returned), values_of(self))):
            name = next(name for name in fixed if getattr(returned, name, None) is not getattr(self, name))
            raise MiddlewareError(f"it changed {name}, which it may not")
        for name in POINTS[self._point].changes:
            returned._check(name, getattr(returned, name))
        if keeps and getattr(returned, keeps) is None:
            raise MiddlewareError(f"it returned a context without {keeps}")
        accepted: Self = returned
        return accepted

    def _check(self, name: str, value: Any) -> None:
        """Check the value of a field that may be changed. Raises MiddlewareError."""
        if name == "blocks":
            check_blocks(value)
        elif name == "tool_catalog":
            if value != self._scope.settled.items:  # most handlers leave it as it is, and a check of all takes long
                self.tool_catalog = results.read_items(value, self._scope.bound)
        elif name == "effective_config":
            as_object(name, value)
        elif value is None:
            return
        elif name == "metadata":
            as_object(name, value)
        else:
            wanted: type[Any] = results.LlmResult if name == "llm_result" else results.ToolCallResult
            if not isinstance(value, wanted):
                raise MiddlewareError(f"{name} is {type(value).__name__}, not a {wanted.__name__}")
            if name == "llm_result":
                results.changed_answer(value, None)

    def store(self) -> None:
        """Put the changes into the scope."""
        point = POINTS[self._point]
        for name in point.changes:
            setattr(self._scope, FIELDS[point.kind][name], getattr(self, name))


@cache
def _fixed_fields(point: str) -> tuple[Sequence[str], Callable[[Any], tuple[Any, ...]]]:
    """The fields that must not be changed at this point, and a function that reads all of them at once."""
    fixed = [name for name in FIELDS[POINTS[point].kind] if name not in POINTS[point].changes]
    return fixed, attrgetter(*fixed)


def check_blocks(blocks: Any) -> None:
    """Check that a model can be shown the blocks. Raises MiddlewareError."""
    if not isinstance(blocks, list | tuple):
        raise MiddlewareError(f"blocks is {type(blocks).__name__}, not a list")
    if len(blocks) > MAX_BLOCKS:
        raise MiddlewareError(f"there are {len(blocks)} blocks, and at most {MAX_BLOCKS} are possible")
    for block in blocks:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str) or not block["type"]:
            raise MiddlewareError("a block is an object with a type")
        try:
            results.output_of(block)
        except ValueError as error:
            raise MiddlewareError(f"the block {block['type'][:80]!r}: {error}") from None


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
