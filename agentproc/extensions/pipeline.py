"""The middleware engine: which handlers are registered, in which order, and how a chain of them runs.

It has two spellings. `mutate` and `wrap` put handlers at points (v0.9). `register` puts middleware of a kind around a
turn, a step or a tool call: a wrap around everything of that kind, whose next() is in its context.

Rules.
- Three kinds: `turn`, `step`, `toolCall`. The first registered middleware is outermost. A lower priority comes further
  out; equal priorities keep the order of registration. The order is the same on every run.
- Middleware takes one context and calls `await ctx.next()` exactly once. Its return value goes to the layer around it,
  as the value of that layer's next(). The kernel takes the value of the outermost layer.
- A layer fails when it raises, never calls next(), calls it twice, does not await it, returns something else, or takes
  longer than LAYER_S outside its next(). The layer around it gets a failed result, not the exception: only the turn,
  step or call in question ends.
- Cancellation passes through every layer.
- Both spellings have one order. Middleware of `register` and the mutators of `turn.pre`, `step.pre` and `toolCall.pre`
  are layers of one onion, in the order above. The other points lie inside of it, in the order of POINTS, each with its
  handlers in the order above. So every `.post` runs before the code behind a next(), and sees the result of the core.

Source: requirements CALL-09, CALL-11 to CALL-14, COMPAT-03, PIPELINE-01 to PIPELINE-03, PIPELINE-05 to PIPELINE-09,
PIPELINE-13 to PIPELINE-16, PIPELINE-20 to PIPELINE-22, PIPELINE-25.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import isawaitable
from types import CoroutineType
from typing import Any, Final, Generic, Literal, NoReturn, Protocol, TypeVar, cast, get_args

from msgspec import Struct

from goondan.schemas.wire.errors import fail

Kind = Literal["turn", "step", "toolCall"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


class Point(Struct, frozen=True):
    """One point."""

    #: Whether its handlers are mutators or wraps.
    form: Literal["mutate", "wrap"]
    #: The kind of middleware that it belongs to.
    kind: Literal["turn", "step", "toolCall", "workspace"]
    #: The fields of its context that a handler may replace with other objects. All other fields must come back
    #: unchanged.
    changes: tuple[str, ...] = ()
    #: The field that its handlers must not leave empty; "": there is none, and a wrap need not call next().
    keeps: str = ""


_SHOWN: Final = ("blocks", "tool_catalog")

#: Every point, in the order in which a turn reaches them (PIPELINE-07, PIPELINE-25).
POINTS: Final[Mapping[str, Point]] = {
    "turn.pre": Point("mutate", "turn"),
    "step.pre": Point("mutate", "step", _SHOWN),
    "step.config": Point("mutate", "step", ("effective_config",)),
    "step.tools": Point("mutate", "step", _SHOWN),
    "step.blocks": Point("mutate", "step", _SHOWN),
    "step.llmCall": Point("wrap", "step", (*_SHOWN, "llm_result"), "llm_result"),
    "step.llmError": Point("wrap", "step", (*_SHOWN, "llm_result")),
    "toolCall.pre": Point("mutate", "toolCall"),
    "toolCall.exec": Point("wrap", "toolCall", ("tool_result",), "tool_result"),
    "toolCall.post": Point("mutate", "toolCall", ("tool_result",), "tool_result"),
    "step.post": Point("mutate", "step"),
    "turn.post": Point("mutate", "turn"),
    "workspace.repoAvailable": Point("mutate", "workspace", ("metadata",)),
    "workspace.worktreeMounted": Point("mutate", "workspace", ("metadata",)),
}

#: Points whose mutators stand in the onion of their kind.
_BEFORE: Final = frozenset(("turn.pre", "step.pre", "toolCall.pre"))

#: Takes a context (a wrap also takes next). Returns a result, or an awaitable of one.
Middleware = Callable[..., Any]

R = TypeVar("R")


#: How long a layer may take outside next() (seconds). A person waits for it. Longer work belongs into a tool or another
#: agent, which can be seen and cancelled.
LAYER_S: Final = 60.0


class Patience(Protocol):
    """The clock of one layer (patience.py)."""

    def stand(self) -> None:
        """It stands still."""

    def go_on(self) -> None:
        """It runs again."""

    def standing(self) -> AbstractContextManager[None]:
        """The clock stands still inside."""

    def is_late(self) -> bool:
        """Whether the clock cancelled the layer."""

    def is_ending(self) -> bool:
        """Whether the layer's task is to end. If not, the exception is the layer's own."""


class Watch(Protocol):
    """Checks layers while they run (patience.py)."""

    def enter(self, layer: Layer) -> Patience:
        """A layer begins, in the task that runs now."""

    def leave(self, patience: Any) -> None:
        """It has ended."""


class MiddlewareError(Exception):
    """Middleware broke a rule. Becomes an error with the code E_MIDDLEWARE."""


def too_slow() -> MiddlewareError:
    """The error of a layer whose time was over (patience.py)."""
    return MiddlewareError(f"it took longer than {LAYER_S:g} s outside next()")


class Layer(Struct, frozen=True):
    """One registered handler."""

    #: The name of the Extension that registered it.
    extension: str
    #: The function.
    handler: Middleware
    #: A lower priority is further out.
    priority: int = 0
    #: The point that it is for; None: it is middleware of a kind.
    point: str | None = None
    #: That kind; "" for a point.
    kind: str = ""

    @property
    def of(self) -> Point | None:
        """The point that it is for; None: it is middleware of a kind."""
        return None if self.point is None else POINTS[self.point]


class Pipeline:
    """The middleware of one agent.

    The lists that a turn reads are made at each registration, as tuples that do not change. So a running chain keeps
    the layers that it began with.
    """

    def __init__(self) -> None:
        self._layers: dict[str, tuple[Layer, ...]] = {}
        self._wrapped: frozenset[str] = frozenset()
        #: Whether any handler is registered in the older spelling.
        self.uses_points = False

    def register(self, kind: str, handler: Middleware, *, extension: str, priority: Any = 0) -> None:
        """Add middleware. Raises GoondanError E_USAGE for an unknown kind, a handler that cannot be called or a
        priority that is no integer.
        """
        if kind not in KINDS:
            raise fail("E_USAGE", f"no middleware kind {str(kind)[:80]!r}; there are: {', '.join(KINDS)}")
        self._add(kind, Layer(extension, handler, priority, kind=kind), f"{kind} middleware")

    def mutate(self, point: str, handler: Middleware, *, extension: str, priority: Any = 0) -> None:
        """Add a mutator. Raises GoondanError E_USAGE, as `register` does."""
        self._add_to_point("mutate", point, handler, extension, priority)

    def wrap(self, point: str, handler: Middleware, *, extension: str, priority: Any = 0) -> None:
        """Add a wrap. Raises GoondanError E_USAGE, as `register` does."""
        self._add_to_point("wrap", point, handler, extension, priority)

    def unregister(self, extension: str) -> None:
        """Remove every handler that an extension has registered."""
        for place, layers in self._layers.items():
            self._layers[place] = tuple(layer for layer in layers if layer.extension != extension)
        self._look_over()

    def at(self, place: str) -> Sequence[Layer]:
        """The layers of a kind, with the mutators that stand among them, or the handlers of another point: the
        outermost first.
        """
        return self._layers.get(place, ())

    @property
    def empty(self) -> bool:
        """Whether there is no middleware at all."""
        return not self._wrapped

    def has(self, kind: Kind) -> bool:
        """Whether any handler runs around a turn, a step or a tool call.

        A handler at a point of tool calls also sees the step, so the step counts as well.
        """
        return kind in self._wrapped

    def _add_to_point(self, form: str, name: str, handler: Middleware, extension: str, priority: Any) -> None:
        given: Any = name  # an extension may give anything
        point = POINTS.get(given) if isinstance(given, str) else None
        if point is None or point.form != form:
            known = [known for known, found in POINTS.items() if found.form == form]
            other = "" if point is None else f"; {name} is for api.pipelines.{point.form}"
            message = f"no point {str(name)[:80]!r} for {form}{other}"
            raise fail("E_USAGE", message, suggestion=f"Use one of {', '.join(known)}.")
        place = point.kind if name in _BEFORE else name
        self._add(place, Layer(extension, handler, priority, name), f"{name} handler")

    def _add(self, place: str, layer: Layer, what: str) -> None:
        if not callable(layer.handler):
            raise fail("E_USAGE", f"the {what} of extension {layer.extension} is no function")
        priority: Any = layer.priority
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise fail("E_USAGE", f"the priority of a {what} is an integer, not {type(priority).__name__}")
        layers = self._layers.get(place, ())
        self._layers[place] = tuple(sorted((*layers, layer), key=lambda layer: layer.priority))  # stable
        self._look_over()

    def _look_over(self) -> None:
        """After a change, find out which kinds have handlers."""
        layers = [layer for found in self._layers.values() for layer in found]
        kinds = {layer.kind or POINTS[layer.point or ""].kind for layer in layers}
        if any(layer.point is not None and POINTS[layer.point].kind == "toolCall" for layer in layers):
            kinds.add("step")
        self._wrapped, self.uses_points = frozenset(kinds), any(layer.point is not None for layer in layers)


class LayerFailed(Exception):
    """A handler of a point failed. `layer` is the handler's layer, `error` its exception."""

    def __init__(self, layer: Layer, error: BaseException) -> None:
        super().__init__(str(error))
        self.layer = layer
        self.error = error


def blame(layer: Layer, error: BaseException) -> NoReturn:
    """What becomes of a layer that failed, where there is no result for it. Raises LayerFailed."""
    raise LayerFailed(layer, error) from error


class Passed(Protocol):
    """The part of a point's context that the engine needs (contexts.py)."""

    def copied(self) -> Any:
        """A copy of the context for one handler. The handler's assignments count only when it returns the copy."""

    def accept(self, returned: Any, keeps: str = "") -> Any:
        """Check and return the context that a handler returned, with a value in the field `keeps`. Raises
        MiddlewareError.
        """

    def store(self) -> None:
        """Put its changes into the state that all layers share."""


class Next(Generic[R]):
    """One layer that runs, and its `next`: it is called and awaited once. A wrap gives it a context; middleware of a
    kind calls it without one. A mutator is not given it.
    """

    __slots__ = ("_context", "_index", "_inner", "_state", "layer", "patience", "raised")

    def __init__(
        self,
        inner: Callable[[int, Next[R], Any], Coroutine[Any, Any, R]],
        index: int,
        layer: Layer,
        patience: Patience | None,
        context: Passed | None,
    ) -> None:
        """`inner` runs the chain from the layer with this index on, and calls the `end` of the Next that it gets.
        `patience` is the clock of the layer, `context` what a handler of a point is given.
        """
        self._inner = inner
        self._index = index
        self._context = context
        self._state: Literal["unused", "called", "done", "closed"] = "unused"
        self.layer = layer
        self.patience = patience
        #: What the inner part raised.
        self.raised: BaseException | None = None

    def __call__(self, context: Any = None) -> Awaitable[R]:
        """Run the rest of the chain. Raises MiddlewareError for the second call and after the layer's end."""
        if self._state != "unused":
            if self._state == "closed":
                raise MiddlewareError("next() was called after the middleware had returned")
            raise MiddlewareError("next() was called twice")
        given = None if self._context is None else self._context.accept(context)
        self._state = "called"
        return self._inner(self._index, self, given)

    def begin(self) -> None:
        """The inner part begins. It has a limit of its own, so the clock of the layer stands still."""
        if self.patience is not None:
            self.patience.stand()

    def end(self, done: bool, raised: BaseException | None) -> None:
        """The inner part has ended; `done`: with a result. A wrap may also go on behind what was raised."""
        if self.patience is not None:
            self.patience.go_on()
        self.raised = raised
        if (done or self._context is not None) and self._state == "called":
            self._state = "done"

    def standing(self) -> AbstractContextManager[None]:
        """The layer waits for an operation that has a limit of its own (patience.py)."""
        return nullcontext() if self.patience is None else self.patience.standing()

    def close(self) -> None:
        """The layer has ended, however: next() cannot be called any more."""
        self._state = "closed"

    def result(self, returned: Any, accept: Callable[[Any], R] | None) -> Any:
        """What the layer returned. Raises MiddlewareError when that is wrong, or next() was not called and awaited."""
        point = self.layer.of
        state = "done" if point is not None and point.form == "mutate" else self._state
        self.close()
        if state == "unused" and (point is None or point.keeps):
            raise MiddlewareError("next() was not called")
        if state == "called":
            raise MiddlewareError("next() was called and not awaited")
        if point is not None and self._context is not None:
            return self._context.accept(returned, point.keeps)
        return returned if accept is None else accept(returned)


class _Chain(Generic[R]):
    """A chain of layers that runs (see `run`)."""

    __slots__ = ("accept", "bind", "blamed", "core", "failed", "layers", "watch")

    def __init__(
        self,
        layers: Sequence[Layer],
        bind: Callable[[Layer, Next[R]], Any],
        core: Callable[[Any], Coroutine[Any, Any, R]],
        watch: Watch,
        accept: Callable[[Any], R] | None,
        failed: Callable[[Layer, BaseException], R],
    ) -> None:
        self.layers = layers
        self.bind = bind
        self.core = core
        self.watch = watch
        self.accept = accept
        self.failed = failed
        #: The wrap whose exception goes through those around it.
        self.blamed: LayerFailed | None = None

    async def enter(self, index: int, outer: Next[R] | None, given: Any) -> R:
        """Run the layers from `index` on, inside `outer`, whose clock stands still meanwhile.

        One coroutine for each layer: another one would add to the cost of every layer.
        """
        if outer is not None:
            outer.begin()
        done, raised = False, None
        try:
            while index < len(self.layers):
                layer = self.layers[index]
                index += 1
                running, arguments = self._begin(index, layer, given)
                try:
                    returned = layer.handler(*arguments)
                    # Nearly always it is the context itself, or a coroutine.
                    if returned is not arguments[0] and (type(returned) is CoroutineType or isawaitable(returned)):
                        # Only what is awaited can be cancelled, so of mutators only that has a clock: most are plain
                        # functions.
                        running.patience = running.patience or self.watch.enter(layer)
                        returned = await returned
                    result = running.result(returned, self.accept)
                    if layer.of is not None and layer.of.form == "mutate":
                        result.store()
                        continue
                except BaseException as error:
                    result = self._lost(running, error)
                finally:
                    running.close()
                    if running.patience is not None:
                        self.watch.leave(running.patience)
                done = True
                return cast("R", result)
            result = await self.core(given)
            done = True
            return result
        except BaseException as error:
            raised = error
            raise
        finally:
            if outer is not None:
                outer.end(done, raised)
            del raised  # it has this frame

    def _begin(self, index: int, layer: Layer, given: Any) -> tuple[Next[R], tuple[Any, ...]]:
        """A layer, and the arguments of its handler."""
        point = layer.of
        if point is None:
            running = Next(self.enter, index, layer, self.watch.enter(layer), None)
            return running, (self.bind(layer, running),)
        if point.form == "wrap":
            running = Next(self.enter, index, layer, self.watch.enter(layer), given)
            return running, (given.copied(), running)
        running = Next(self.enter, index, layer, None, given)
        context = self.bind(layer, running)
        return Next(self.enter, index, layer, None, context), (context.copied(),)

    def _lost(self, running: Next[R], error: BaseException) -> R:
        """A layer has failed. Raises what goes through the layers around it."""
        layer, point = running.layer, running.layer.of
        if not isinstance(error, Exception | SystemExit | KeyboardInterrupt):
            # Cancellation, or what a handler raises that looks like it.
            patience = running.patience or self.watch.enter(layer)
            running.patience = patience
            if patience.is_late():
                error = too_slow()
            elif patience.is_ending():
                raise error
            elif point is not None and point.form == "wrap":
                error, cause = MiddlewareError(f"it raised {type(error).__name__}"), error
                error.__cause__ = cause
        if point is None or point.form == "mutate":
            return self.failed(layer, error)
        if error is not running.raised:
            self.blamed = LayerFailed(layer, error)
        raise error


async def run(
    layers: Sequence[Layer],
    bind: Callable[[Layer, Next[R]], Any],
    core: Callable[[Any], Coroutine[Any, Any, R]],
    watch: Watch,
    *,
    accept: Callable[[Any], R] | None = None,
    failed: Callable[[Layer, BaseException], R] = blame,
    given: Any = None,
) -> R:
    """Run `core` inside `layers`. Each is one of three:

    - a mutator takes a context and returns it, changed or not; its changes are stored before the next layer runs;
    - a wrap takes (context, next). Its next() takes a context, returns the context with the result of the inner part,
      and raises what the inner part raises;
    - middleware of a kind takes a context with the next() inside. A layer further in that failed is a result for it.

    `bind` makes the context of a mutator, and that of middleware from its next(). `accept` checks what middleware
    returned (raises MiddlewareError). `failed` makes the result of a mutator or of middleware that failed, or raises.
    `watch` ends a layer that takes too long. Between wraps a context goes from one to the next: `given` is the first,
    and `core` gets the last.

    A wrap that fails raises its own exception through those around it. If none catches it, this function raises
    LayerFailed, which names that wrap. An exception of `core` passes, and nobody is blamed for it.
    """
    chain = _Chain(layers, bind, core, watch, accept, failed)
    try:
        return await chain.enter(0, None, given)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if chain.blamed is not None and chain.blamed.error is error:
            raise chain.blamed from error
        raise
