"""The state that the layers of a turn, a step or a tool call share, and what handlers see of it as a whole: `ctx.turn`,
`ctx.step`, `ctx.tool_call`, and documents. Pure.

A view is a table: a field, and where the scope has it. Names are the specification's in snake_case. Times are RFC 3339
in UTC.

Source: docs/design/turns.md section 8; requirements CALL-16, PIPELINE-10, PIPELINE-11, PIPELINE-19, PIPELINE-23,
PIPELINE-26, EXT-03, EXT-10, DYNAMIC-10.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from operator import attrgetter
from typing import Any, Final, NoReturn, Protocol

from msgspec import Struct

from goondan.agentproc.context.estimate import NO_WISHES, Wishes
from goondan.agentproc.extensions.pipeline import MiddlewareError
from goondan.agentproc.extensions.results import (
    LlmResult,
    StepResult,
    ToolCallResult,
    TurnResult,
)
from goondan.agentproc.extensions.step_changes import read_items
from goondan.agentproc.machine.catalog import Catalog, StepCatalog
from goondan.agentproc.machine.messages import Message, MessageEvent
from goondan.schemas.bundle.address import shown_tool_name
from goondan.schemas.bundle.launch import CatalogItem, ToolChoice
from goondan.schemas.wire.frames import AgentEvent, ErrorPayload

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


class TurnScope(Struct, eq=False):
    """The state that the layers of one turn share."""

    #: The agent, the instance and the turn.
    execution: Execution
    #: The event that began the turn.
    input_event: AgentEvent
    #: The messages.
    state: ConversationState
    #: Stores a message event of an extension.
    emit: Callable[[str, Any], None]
    #: Makes the `ctx.agents` of a layer from a place, an extension, and a context manager in which the layer's clock
    #: stands still.
    agents: Callable[[str, str, Callable[[], AbstractContextManager[None]]], Any]
    #: Asks the model a question, with a system prompt, in a step.
    ask_model: Callable[[str, str | None, int], Awaitable[str]]
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
    result: TurnResult | None = None
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


#: Gets the messages that the model would see, and returns the messages that it will see (views.py).
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
    llm_error: ErrorPayload | None = None
    #: The answer of the last try.
    llm_result: LlmResult | None = None
    #: How the step ended; None before its end.
    result: StepResult | None = None
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
            self.tool_catalog = read_items(self.tool_catalog, self.bound)
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
    result: ToolCallResult | None = None
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
