"""The interface between the core of an agent's process and features: the hooks, and what the core gives a part.

`FEATURE` of a feature's `agent.py` is its class here. One object of it is made for each agent instance. A turn asks it
whether it applies, and has a part of it only if it does. The parts of a turn are in the order of the table of features,
and the first is outermost: its `model` and `call` wrap those of the others. All of them are inside the layers of
extensions, so no extension stands between a rule and what it is about.

Source: docs/design/features.md section 8; docs/decisions/162.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple, Protocol

from msgspec import Struct

from goondan.agentproc.calls.asks import Handler, ToolAsks
from goondan.agentproc.calls.caller import CallContext
from goondan.agentproc.machine.catalog import StepCatalog
from goondan.agentproc.machine.turn import End, First, Input, RunTool
from goondan.agentproc.providers.base import ModelAnswer, ModelNews, ModelRequest
from goondan.agentproc.turn.instance import Instance
from goondan.agentproc.turn.live import LiveFeed
from goondan.agentproc.turn.notes import TurnNotes
from goondan.features import parts
from goondan.schemas.bundle.launch import AgentSpec, ModelSpec
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import AgentEvent, Frame, ToolResult, Welcome

#: Hears the provider's news of a request.
OnNews = Callable[[ModelNews], None]
#: Makes a request to a model. Raises GoondanError.
Ask = Callable[[ModelRequest, OnNews], Awaitable[ModelAnswer]]
#: Gets the result of a call. It is called once, or never for a call that is given up.
Done = Callable[[ToolResult], None]
#: Handles a frame. Raises GoondanError for one that cannot be read; it is ignored then.
TakeFrame = Callable[[Frame], None]
#: Answers an event without a turn: returns the frame that ends it. Raises GoondanError; the event has failed then.
AnswerEvent = Callable[[Frame, AgentEvent], Frame]


class Call(NamedTuple):
    """A tool call that is about to be made."""

    #: The call as the turn wants it.
    action: RunTool
    #: Its arguments. Layers of extensions can have changed them.
    args: Any
    #: The number of its step (from 1); 0 outside of steps.
    step: int
    #: Tells whether it will run in this process. False: the tool host will run it, or its arguments cannot be read.
    runs_here: Callable[[], bool]

    @property
    def id(self) -> str:
        """Its tool call id."""
        return self.action.part.tool_call_id

    @property
    def tool(self) -> str:
        """The full name of its tool."""
        return self.action.part.tool_name


#: Makes a call.
Start = Callable[[Call, Done], None]


class MakesCalls(Protocol):
    """Makes calls inside of all parts (calls/handlers.py)."""

    def make(self, action: RunTool, args: Any, then: Done) -> None:
        """Make a call with these arguments."""

    def runs_here(self, name: str, args: Any) -> bool:
        """Whether a call runs in this process."""


class CallsOfTurn(Protocol):
    """What a part may use of the calls of its turn (calls/of_turn.py)."""

    #: The turn's event, epoch and deadline.
    context: CallContext
    #: The tools of the step.
    catalog: StepCatalog
    #: What calls ask of the turn.
    asks: ToolAsks

    def make_call(self, action: RunTool, done: Done) -> None:
        """Make a call inside the layers of extensions and all parts."""

    def drop_calls(self, tool_call_ids: list[str]) -> None:
        """Give calls up."""

    def may_repeat(self, call_id: str) -> None:
        """The server of this call has not begun with it: if the server is lost, the call is made again."""

    def cancel_unseen(self, call_ids: Sequence[str]) -> None:
        """Cancel calls that an earlier incarnation has made."""


class TurnCore(Protocol):
    """What the core gives a part of a turn."""

    @property
    def instance(self) -> Instance:
        """The agent instance, with its link, store, loop, clock and redaction."""

    @property
    def spec(self) -> AgentSpec:
        """The agent's specification, as the step that runs has it."""

    @property
    def step(self) -> int:
        """The number of the step that runs (from 1), or of the first one."""

    @property
    def model(self) -> ModelSpec:
        """The model of that step."""

    @property
    def event(self) -> Frame:
        """The event of the turn, as it was delivered."""

    @property
    def first(self) -> First:
        """What the turn begins with."""

    @property
    def turn_id(self) -> str:
        """The id of the turn."""

    @property
    def workdir(self) -> str:
        """The working directory of the instance."""

    @property
    def notes(self) -> TurnNotes:
        """The notes of the turn for the trace."""

    @property
    def live(self) -> LiveFeed:
        """Tells who listens what the turn does."""

    @property
    def calls(self) -> CallsOfTurn:
        """The calls of the turn."""

    def noted(self) -> None:
        """Notes wait to be stored. They are soon, if nothing else is stored before."""

    def time_left(self) -> float | None:
        """The turn's remaining time (seconds). None: there is no limit."""

    def ask_aside(self, text: str, system: str | None, step: int) -> Awaitable[ModelAnswer]:
        """Ask the agent's model outside of the conversation."""

    def push(self, event: Input) -> None:
        """Give the turn an input."""

    def rouse(self) -> None:
        """Let the turn ask its parts again whether it parks."""

    def abandon(self) -> None:
        """The lease is lost: another process has the event."""


class TurnPart:
    """The hooks of a feature in one turn. A part has a hook if its class defines it; what is absent is not called."""

    #: Questions of running calls that it answers, by their kinds (schemas/wire/questions.py).
    asks: Mapping[str, Handler] = {}
    #: Frames about this turn that it takes, by their types.
    takes: Mapping[str, TakeFrame] = {}

    def model(self, request: ModelRequest, on_news: OnNews, ask: Ask) -> Awaitable[ModelAnswer]:
        """A request to a model, also one aside, or to a model in another's place. `ask` goes on with it. Raises
        GoondanError: the request has failed then. E_LEASE_LOST leaves the turn.
        """
        return ask(request, on_news)

    def call(self, call: Call, done: Done, start: Start) -> None:
        """A call of the model, or an inner call. Call `start` now or later, or `done` with the result. A part does not
        change the output of a call that the tool host has run: the script that asked for it may have it already.
        """
        start(call, done)

    def waits(self, tool_call_id: str, within: str | None, again: Callable[[], None]) -> None:
        """The broker lets a call wait. `again` makes it again. `within` is the callId of the call that makes it."""

    def drop(self, tool_call_id: str) -> None:
        """A call is given up: nobody wants its result any more."""

    def parks(self, open_calls: Collection[str]) -> bool:
        """Whether the turn is given back now, because all these calls wait. It goes on later, perhaps elsewhere."""
        return False

    def storing(self, end: End | None) -> None:
        """Messages of the turn are stored, and its end if it ends: inside the transaction of the store."""

    def close(self) -> None:
        """The turn is over, or goes on elsewhere."""


class AgentFeature:
    """A feature in the process of an agent instance. It has a hook if its class defines it."""

    #: Its name, which is that of its folder. It claims the part of this name in a specification.
    name: str
    #: The types of frames, and CALL_WAITS, at which a part of it begins in a turn to which it does not apply: the
    #: broker knows of a change before the agent does.
    begins_at: Collection[str] = ()

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    @property
    def takes(self) -> Mapping[str, TakeFrame]:
        """Frames that it takes whether a turn runs or not, by their types. Asked once."""
        return {}

    @property
    def events(self) -> Mapping[str, AnswerEvent]:
        """Events of operators that it answers without a turn, by their types. Asked once."""
        return {}

    @property
    def api(self) -> Mapping[str, Callable[[str], object]]:
        """What makes the members of the `api` of an extension that it brings, by their names; it gets the name of the
        extension. `API` of its `bundle.py` has what each has itself. Asked once.
        """
        return {}

    def welcomed(self, welcome: Welcome) -> None:
        """A broker has welcomed the process, perhaps again."""

    def held(self) -> Mapping[str, Any]:
        """Fields of `hello`: what the process holds, for a broker that may be a new one."""
        return {}

    def applies(self, spec: AgentSpec, event: Frame) -> bool:
        """Whether a turn of this event needs a part of it. Asked when the turn begins or is taken up again, and at each
        step whose configuration is another than that of the step before.
        """
        return False

    def begin(self, turn: TurnCore) -> TurnPart:
        """Its part of a turn, whose row is stored. The part stays until the turn is over here. Raises GoondanError to
        fail the turn.
        """
        raise NotImplementedError

    def close(self) -> None:
        """The process ends."""


#: In `begins_at`: the broker lets a call wait.
CALL_WAITS: Final = "a call waits"


class Hooks(NamedTuple):
    """What the parts of a turn have, the outermost part first."""

    #: The parts that wrap requests to models.
    model: tuple[TurnPart, ...] = ()
    #: The parts that wrap calls.
    call: tuple[TurnPart, ...] = ()
    waits: tuple[Callable[[str, str | None, Callable[[], None]], None], ...] = ()
    drop: tuple[Callable[[str], None], ...] = ()
    parks: tuple[Callable[[Collection[str]], bool], ...] = ()
    storing: tuple[Callable[[End | None], None], ...] = ()


NO_HOOKS: Final = Hooks()


class Features:
    """The features of one agent instance, in the order of the table. `kinds` are their classes."""

    def __init__(self, instance: Instance, kinds: Sequence[type[AgentFeature]]) -> None:
        found = [kind(instance) for kind in kinds]
        self._names = {feature.name for feature in found}
        self._all = found
        #: Those that turns can have parts of.
        self.of_turns = tuple(feature for feature in found if type(feature).applies is not AgentFeature.applies)
        #: What takes frames whether a turn runs or not, by their types.
        self.takes = {name: take for feature in found for name, take in feature.takes.items()}
        #: What answers events without a turn, by their types.
        self.events = {name: answer for feature in found for name, answer in feature.events.items()}

        #: What makes the members of the `api` of an extension that they bring, by their names.
        self.api = {name: member for feature in found for name, member in feature.api.items()}

    def refuse_unclaimed(self, spec: AgentSpec) -> None:
        """Refuse a specification with a part that no feature claims: a rule of the bundle would be left out in silence.

        Raises GoondanError E_FEATURE_MISSING.
        """
        for name in spec.parts:
            if name not in self._names:
                message = f"agent {spec.name} needs the feature {visible_line(name)}, which this installation has not"
                raise fail("E_FEATURE_MISSING", message)

    def welcomed(self, welcome: Welcome) -> None:
        """A broker has welcomed the process, perhaps again."""
        for feature in self._all:
            feature.welcomed(welcome)

    def held(self) -> dict[str, Any]:
        """Fields of `hello`: what the process holds."""
        return {name: held for feature in self._all for name, held in feature.held().items()}

    def close(self) -> None:
        """The process ends."""
        for feature in reversed(self._all):
            feature.close()


class TurnParts(Struct, eq=False):
    """The parts of one turn. It begins without any."""

    #: The features that may have a part in the turn.
    _features: Features
    #: The turn.
    _turn: TurnCore
    #: The parts that have begun, by the places of their features.
    _begun: dict[int, TurnPart] = {}
    #: The same, the outermost first.
    there: tuple[TurnPart, ...] = ()
    #: Their hooks.
    hooks: Hooks = NO_HOOKS

    def follow(self, spec: AgentSpec) -> None:
        """This specification is in force: begin the parts of the features that apply now. Raises GoondanError as
        `refuse_unclaimed`, and as the features do.
        """
        if spec.parts:
            self._features.refuse_unclaimed(spec)
        event = self._turn.event
        for place, feature in enumerate(self._features.of_turns):
            if place not in self._begun and feature.applies(spec, event):
                self._begin(place, feature)

    def take(self, frame: Frame) -> None:
        """Give a frame about this turn to the parts that take it. Raises GoondanError as they do."""
        self._need(frame.type)
        for part in self.there:
            handle = part.takes.get(frame.type)
            if handle is not None:
                handle(frame)

    def wait(self, tool_call_id: str, within: str | None, again: Callable[[], None]) -> None:
        """The broker lets a call wait (TurnPart.waits)."""
        self._need(CALL_WAITS)
        for waits in self.hooks.waits:
            waits(tool_call_id, within, again)

    def start_call(self, calls: MakesCalls, action: RunTool, step: int, args: Any, done: Done) -> None:
        """Make one call with these arguments inside the parts that wrap calls. The first part is outermost."""

        def start(call: Call, done: Done) -> None:
            calls.make(call.action, call.args, done)

        def runs_here() -> bool:
            broken = action.broken is not None and args == action.part.args
            return not broken and calls.runs_here(action.part.tool_name, args)

        outermost: Start = start
        for part in reversed(self.hooks.call):
            outermost = partial(part.call, start=outermost)
        outermost(Call(action, args, step, runs_here), done)

    def ask_model(self, ask: Ask, request: ModelRequest, on_news: OnNews) -> Awaitable[ModelAnswer]:
        """Make a request to a model inside the parts that wrap requests. The first part is outermost."""
        for part in reversed(self.hooks.model):
            ask = partial(part.model, ask=ask)
        return ask(request, on_news)

    def _need(self, what: str) -> None:
        """Begin the parts that begin at this."""
        for place, feature in enumerate(self._features.of_turns):
            if what in feature.begins_at and place not in self._begun:
                self._begin(place, feature)

    def _begin(self, place: int, feature: AgentFeature) -> None:
        part = self._begun[place] = feature.begin(self._turn)
        self.there = tuple([self._begun[place] for place in sorted(self._begun)])
        self.hooks = hooks_of(self.there)
        for kind, handler in part.asks.items():
            self._turn.calls.asks.handle(kind, handler)


def hooks_of(found: Sequence[TurnPart]) -> Hooks:
    """The hooks that these parts have, in their order."""
    hooks: dict[str, tuple[Any, ...]] = {}
    for part in found:
        kind: Any = type(part)
        for name in _defined(kind):
            hook = part if name in ("model", "call") else getattr(part, name)
            hooks[name] = (*hooks.get(name, ()), hook)
    return Hooks(**hooks)


@cache
def _defined(kind: Any) -> list[str]:
    """The names of the hooks that a class of parts defines."""
    return [name for name in Hooks._fields if getattr(kind, name) is not getattr(TurnPart, name)]


@cache
def kinds() -> tuple[type[AgentFeature], ...]:
    """`FEATURE` of each feature's `agent.py`, in the order of the table. From now on the error codes of all features
    are known. Raises ImportError when a file is missing.
    """
    parts("wire")
    return tuple(module.FEATURE for module in parts("agent"))
