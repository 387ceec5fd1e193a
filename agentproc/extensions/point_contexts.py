"""The contexts that handlers at points get, in the v0.9 spelling. They are built on the state that the layers of a turn
share (contexts.py).

Each handler gets a new context. The context that it returns is read into the scope, so both spellings see the same
catalog, arguments and metadata. A handler changes a field with `ctx.replace(blocks=…)`, as `dataclasses.replace` would,
or with `{**ctx, "blocks": …}`.

A tool that an extension registered with a dot (`skills.list`) has the dot in its name here. The model may see another
name.

Source: requirements PIPELINE-08 to PIPELINE-12, PIPELINE-17 to PIPELINE-23, PIPELINE-26, EXT-13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter, is_
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

import msgspec
from msgspec import Struct, structs

from goondan.agentproc.conversation import Message
from goondan.agentproc.extensions.contexts import (
    CallScope,
    StepResult,
    StepScope,
    ToolCall,
    ToolCallResult,
    TurnResult,
    TurnScope,
)
from goondan.agentproc.extensions.pipeline import MiddlewareError
from goondan.agentproc.extensions.resource import Resource
from goondan.agentproc.extensions.step_changes import read_items
from goondan.agentproc.extensions.values import output_of
from goondan.agentproc.providers.base import ModelAnswer, Usage
from goondan.agentproc.turn import AskedCall
from goondan.schemas.address import shown_tool_name
from goondan.schemas.frames import AgentEvent, ErrorPayload
from goondan.schemas.launch import CatalogItem

#: The most blocks of one step. An extension that adds blocks in every step by mistake is found early.
MAX_BLOCKS: Final = 256

T = TypeVar("T", TurnScope, StepScope, CallScope)


# --- what stands in a context -----------------------------------------------------------------------------------------


class TurnView:
    """`ctx.turn`. A handler may change or replace `metadata`; it is the metadata of the turn's middleware.

    `result` exists in `turn.post`. A handler may change its `response`, `finish_reason` and `error`.
    """

    __slots__ = ("_turn", "result")

    def __init__(self, turn: TurnScope, result: TurnResult | None = None) -> None:
        self._turn = turn
        self.result = result

    @property
    def id(self) -> str:
        """The turn's id."""
        return self._turn.execution.turn_id

    @property
    def agent_name(self) -> str:
        """The agent."""
        return self._turn.execution.agent_name

    @property
    def instance_key(self) -> str:
        """Its instance."""
        return self._turn.execution.instance_key

    @property
    def trace_id(self) -> str:
        """The id by which the turn's work is found, across agents."""
        return self._turn.execution.trace_id

    @property
    def input_event(self) -> AgentEvent:
        """The event that began the turn."""
        return self._turn.input_event

    @property
    def auth(self) -> Any:
        """The asker, from the event (`auth.actor`); None when the event has none."""
        auth = self._turn.input_event.auth
        return Resource(auth) if isinstance(auth, dict) else auth

    @property
    def messages(self) -> list[Message]:
        """The current messages of the conversation."""
        return self._turn.state.next_messages

    @property
    def metadata(self) -> dict[str, Any]:
        """Shared by the whole turn, from `turn.pre` to `turn.post`."""
        return self._turn.metadata

    @metadata.setter
    def metadata(self, value: dict[str, Any]) -> None:
        self._turn.metadata = _object(value, "turn.metadata")


class StepView:
    """`ctx.step`. A handler may change or replace `metadata`; it is the metadata of the step's middleware.

    `result` exists in `step.post`. A handler may change its `should_continue`.
    """

    __slots__ = ("_step", "result")

    def __init__(self, step: StepScope, result: StepResult | None = None) -> None:
        self._step = step
        self.result = result

    @property
    def index(self) -> int:
        """Counts from 0 in each turn."""
        return self._step.index

    @property
    def metadata(self) -> dict[str, Any]:
        """Shared by the whole step."""
        return self._step.metadata

    @metadata.setter
    def metadata(self, value: dict[str, Any]) -> None:
        self._step.metadata = _object(value, "step.metadata")


class ToolCallView:
    """`ctx.tool_call`. A handler may change or replace `args` before the call is made. They are checked after that."""

    __slots__ = ("_call", "name")

    def __init__(self, call: CallScope, dotted: Mapping[str, str]) -> None:
        self._call = call
        self.name = dotted.get(call.tool_name, call.tool_name)

    @property
    def id(self) -> str:
        """The model's id of the call."""
        return self._call.tool_call_id

    @property
    def args(self) -> Any:
        """The arguments."""
        return self._call.args

    @args.setter
    def args(self, value: Any) -> None:
        self._call.args = value

    @property
    def metadata(self) -> dict[str, Any]:
        """Shared by the whole call."""
        return self._call.metadata


class LlmResult(Struct):
    """`ctx.llm_result`: the model's answer. A handler may change every field but `usage`."""

    #: The text of the answer.
    text: str
    #: The tool calls of the answer, in order.
    tool_calls: list[ToolCall] = []
    #: Why the model stopped, in the vendor's word.
    finish_reason: str | None = None
    #: The tokens as the vendor counted them; None when it did not.
    usage: Usage | None = None


class Surroundings(Struct, frozen=True):
    """What an agent's contexts hold besides the turn: the documents of its Swarm and of the agent itself."""

    #: The document of the Swarm.
    swarm: Resource
    #: The document of the agent.
    agent: Resource


# --- contexts ---------------------------------------------------------------------------------------------------------


class PointContext(Generic[T]):
    """The part that all contexts have in common."""

    fields: ClassVar[tuple[str, ...]] = ()

    def copied(self) -> Self:
        """A copy of the context for one handler."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)  # copy.copy does the same at ten times the price
        return made

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields. Raises MiddlewareError for an unknown field."""
        made = self.copied()
        for name, value in changes.items():
            if name not in self.fields:
                raise MiddlewareError(f"a context has no {name!r}; it has {', '.join(self.fields)}")
            setattr(made, name, value)
        return made

    def keys(self) -> Sequence[str]:
        """The names of its fields, so that `{**ctx}` is possible."""
        return self.fields

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            raise KeyError(name)
        return getattr(self, name)

    def accept(self, returned: Any, changes: Sequence[str]) -> Self:
        """Check the context that a handler returned, and return it. Raises MiddlewareError when it is no context, or
        when the handler changed a field that it must not change.
        """
        if type(returned) is not type(self):
            if not isinstance(returned, Mapping):
                raise MiddlewareError(f"it returned {type(returned).__name__}, not a context")
            returned = self.replace(**{_snake(str(name)): value for name, value in returned.items()})
        kind: Any = type(self)
        fixed, values_of = _fixed_fields(kind, tuple(changes))
        if not all(map(is_, values_of(returned), values_of(self))):
            name = next(name for name in fixed if getattr(returned, name) is not getattr(self, name))
            raise MiddlewareError(f"it changed {name}, which it may not")
        returned.check(changes)
        accepted: Self = returned
        return accepted

    def check(self, changes: Sequence[str]) -> None:
        """Check the fields that may be changed. Raises MiddlewareError."""


@cache
def _fixed_fields(
    kind: type[PointContext[Any]], changes: tuple[str, ...]
) -> tuple[Sequence[str], Callable[[Any], tuple[Any, ...]]]:
    """The fields of such a context that must not be changed, and a function that reads all of them at once."""
    fixed = [name for name in kind.fields if name not in changes]
    return fixed, attrgetter(fixed[0], *fixed)  # the first one twice: of a single field it would not make a tuple


C = TypeVar("C", bound=PointContext[Any])


class TurnPointContext(PointContext[TurnScope]):
    """`turn.pre`, `turn.post`."""

    fields: ClassVar[tuple[str, ...]] = ("turn", "swarm", "agent", "effective_config")

    def __init__(self, turn: TurnView, around: Surroundings, effective_config: dict[str, Any]) -> None:
        self.turn = turn
        self.swarm = around.swarm
        self.agent = around.agent
        self.effective_config = effective_config

    def check(self, changes: Sequence[str]) -> None:
        """See PointContext."""
        if "effective_config" in changes:
            _object(self.effective_config, "effective_config")


class StepPointContext(TurnPointContext):
    """`step.*`. `blocks` are objects with a `type`: the model reads them in this step only.

    `llm_error` is there in `step.llmError`, `llm_result` behind the next() of both wraps.
    """

    fields: ClassVar[tuple[str, ...]] = (
        *TurnPointContext.fields,
        "step",
        "blocks",
        "tool_catalog",
        "llm_result",
        "llm_error",
    )

    def __init__(
        self, turn: TurnView, step: StepView, scope: StepScope, around: Surroundings, dotted: Mapping[str, str]
    ) -> None:
        super().__init__(turn, around, scope.effective_config)
        self.step = step
        self.blocks: list[dict[str, Any]] = scope.blocks
        self.tool_catalog: list[CatalogItem] = _with_dots(scope.tool_catalog, dotted)
        self._bound = scope.bound
        #: The items of the catalog as it was checked last; each of them can be called. None: these items were not
        #: checked yet.
        self._checked: list[CatalogItem] | None = None if dotted else scope.settled.items
        self.llm_result: LlmResult | None = None
        self.llm_error: ErrorPayload | None = None

    def check(self, changes: Sequence[str]) -> None:
        """See PointContext."""
        super().check(changes)
        if "blocks" in changes:
            check_blocks(self.blocks)
        if "tool_catalog" in changes and self.tool_catalog != self._checked:
            # Most handlers leave the catalog as it is, and a check of every tool takes long.
            self.tool_catalog = read_items(self.tool_catalog, self._bound)
            self._checked = list(self.tool_catalog)
        if "llm_result" in changes and self.llm_result is not None:
            if not isinstance(self.llm_result, LlmResult):
                raise MiddlewareError(f"llm_result is {type(self.llm_result).__name__}, not an LlmResult")
            answer_of(self.llm_result, None)

    def read_into(self, scope: StepScope) -> None:
        """Take the handlers' changes over into the scope."""
        scope.effective_config = self.effective_config
        scope.blocks = self.blocks
        if self.tool_catalog != scope.tool_catalog:
            scope.tool_catalog = [_without_dot(item) for item in self.tool_catalog]


class ToolCallPointContext(StepPointContext):
    """`toolCall.*`. `tool_result` exists behind the next() of `toolCall.exec`, and in `toolCall.post`."""

    fields: ClassVar[tuple[str, ...]] = (*StepPointContext.fields, "tool_call", "tool_result")

    def __init__(
        self,
        turn: TurnView,
        step: StepView,
        scope: StepScope,
        around: Surroundings,
        dotted: Mapping[str, str],
        call: CallScope,
        result: ToolCallResult | None = None,
    ) -> None:
        super().__init__(turn, step, scope, around, dotted)
        self.tool_call = ToolCallView(call, dotted)
        self.tool_result = result

    def check(self, changes: Sequence[str]) -> None:
        """See PointContext."""
        if self.tool_result is not None and not isinstance(self.tool_result, ToolCallResult):
            raise MiddlewareError(f"tool_result is {type(self.tool_result).__name__}, not a ToolCallResult")


class WorkspacePointContext(PointContext[TurnScope]):
    """`workspace.*`: the path of the repository or the worktree, and its metadata."""

    fields: ClassVar[tuple[str, ...]] = ("path", "type", "metadata")

    def __init__(self, path: str, kind: str, metadata: dict[str, Any] | None = None) -> None:
        self.path = path
        self.type = kind
        self.metadata = metadata

    def check(self, changes: Sequence[str]) -> None:
        """See PointContext."""
        if self.metadata is not None:
            _object(self.metadata, "metadata")


# --- between the contexts and the kernel ------------------------------------------------------------------------------


def told(answer: ModelAnswer) -> LlmResult:
    """The model's answer as handlers see it."""
    calls = [ToolCall(call.id, call.name, call.args) for call in answer.calls]
    return LlmResult(answer.text, calls, answer.finish_reason, answer.usage)


def answer_of(result: LlmResult, known: ModelAnswer | None) -> ModelAnswer:
    """The answer with which the turn goes on: the model's own when no handler changed it. Raises MiddlewareError."""
    if known is not None and told(known) == result:
        return known
    try:
        text = msgspec.convert(result.text, str)
        reason = msgspec.convert(result.finish_reason, str | None)
        calls = [_asked(call, known) for call in result.tool_calls]
    except (msgspec.ValidationError, TypeError, AttributeError) as error:
        raise MiddlewareError(f"llm_result is no answer: {error}") from None
    changed = ModelAnswer(text=text, calls=calls, finish_reason=reason, usage=result.usage)
    # Not the reasoning: it may have what a handler takes out of the text.
    return changed if known is None else structs.replace(changed, cut_off=known.cut_off, model=known.model)


def _asked(call: ToolCall, known: ModelAnswer | None) -> AskedCall:
    for asked in () if known is None else known.calls:
        if (asked.id, asked.name) == (call.id, call.name) and asked.args == call.args:
            return asked  # with the reason why its arguments could not be read
    return AskedCall(msgspec.convert(call.id, str), msgspec.convert(call.name, str), msgspec.convert(call.args, dict))


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
            output_of(block)
        except ValueError as error:
            raise MiddlewareError(f"the block {block['type'][:80]!r}: {error}") from None


def _with_dots(items: Any, dotted: Mapping[str, str]) -> Any:
    if not isinstance(items, list | tuple):
        return items  # middleware has spoiled it, and is told so when the step begins
    if not dotted:
        return list(items)
    return [
        msgspec.structs.replace(item, name=dotted[item.name])
        if isinstance(item, CatalogItem) and item.name in dotted
        else item
        for item in items
    ]


def _without_dot(item: CatalogItem) -> CatalogItem:
    return msgspec.structs.replace(item, name=shown_tool_name(item.name)) if "." in item.name else item


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MiddlewareError(f"{what} is {type(value).__name__}, not an object")
    return value


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
