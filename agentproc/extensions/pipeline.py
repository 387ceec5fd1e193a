"""The middleware engine: which middleware is registered, in which order, and how a chain of it runs.

It has two spellings. `register` puts middleware of a kind around a turn, a step or a tool call. `mutate` and `wrap` are
the spelling of v0.9: handlers at points (points.py runs them).

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

Source: requirements CALL-09, CALL-11 to CALL-14, COMPAT-03, PIPELINE-01 to PIPELINE-03, PIPELINE-05 to PIPELINE-07,
PIPELINE-13 to PIPELINE-16, PIPELINE-25.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import isawaitable
from types import CoroutineType
from typing import Any, Final, Generic, Literal, Protocol, TypeVar, get_args

from msgspec import Struct

from goondan.schemas.errors import fail

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


_SHOWN: Final = ("blocks", "tool_catalog")

#: Every point, in the order in which a turn reaches them (PIPELINE-07, PIPELINE-25).
POINTS: Final[Mapping[str, Point]] = {
    "turn.pre": Point("mutate", "turn"),
    "step.pre": Point("mutate", "step", _SHOWN),
    "step.config": Point("mutate", "step", ("effective_config",)),
    "step.tools": Point("mutate", "step", _SHOWN),
    "step.blocks": Point("mutate", "step", _SHOWN),
    "step.llmCall": Point("wrap", "step", (*_SHOWN, "llm_result")),
    "step.llmError": Point("wrap", "step", (*_SHOWN, "llm_result")),
    "toolCall.pre": Point("mutate", "toolCall"),
    "toolCall.exec": Point("wrap", "toolCall", ("tool_result",)),
    "toolCall.post": Point("mutate", "toolCall", ("tool_result",)),
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


class Pipeline:
    """The middleware of one agent.

    The lists that a turn reads are made at each registration, as tuples that do not change. So a running chain keeps
    the layers that it began with.
    """

    def __init__(self) -> None:
        self._layers: dict[Kind, tuple[Layer, ...]] = dict.fromkeys(KINDS, ())
        self._points: dict[str, tuple[Layer, ...]] = {}
        self._wrapped: frozenset[str] = frozenset()
        #: Whether any handler is registered in the older spelling.
        self.uses_points = False

    def register(self, kind: str, handler: Middleware, *, extension: str, priority: Any = 0) -> None:
        """Add middleware. Raises GoondanError E_USAGE for an unknown kind, a handler that cannot be called or a
        priority that is no integer.
        """
        if kind not in KINDS:
            raise fail("E_USAGE", f"no middleware kind {str(kind)[:80]!r}; there are: {', '.join(KINDS)}")
        self._layers[kind] = _with(
            self._layers[kind], Layer(extension, handler, priority, kind=kind), f"{kind} middleware"
        )
        self._look_over()

    def mutate(self, point: str, handler: Middleware, *, extension: str, priority: Any = 0) -> None:
        """Add a mutator. Raises GoondanError E_USAGE, as `register` does."""
        self._add_to_point("mutate", point, handler, extension, priority)

    def wrap(self, point: str, handler: Middleware, *, extension: str, priority: Any = 0) -> None:
        """Add a wrap. Raises GoondanError E_USAGE, as `register` does."""
        self._add_to_point("wrap", point, handler, extension, priority)

    def unregister(self, extension: str) -> None:
        """Remove every handler that an extension has registered."""
        self._layers = {kind: _without(layers, extension) for kind, layers in self._layers.items()}
        self._points = {point: _without(layers, extension) for point, layers in self._points.items()}
        self._look_over()

    def layers(self, kind: Kind) -> Sequence[Layer]:
        """The layers of a kind, the outermost first."""
        return self._layers[kind]

    def at(self, point: str) -> Sequence[Layer]:
        """The handlers of a point outside of the onions, in their order."""
        return self._points.get(point, ())

    @property
    def empty(self) -> bool:
        """Whether there is no middleware at all."""
        return not self._wrapped

    def has(self, kind: Kind) -> bool:
        """Whether any handler runs around a turn, a step or a tool call.

        A handler at a point of tool calls also sees the step, so the step counts as well.
        """
        return kind in self._wrapped

    def _look_over(self) -> None:
        """After a change, find out which kinds have handlers."""
        points = [point for point, layers in self._points.items() if layers]
        points += [layer.point for layers in self._layers.values() for layer in layers if layer.point is not None]
        kinds = {kind for kind, layers in self._layers.items() if layers} | {POINTS[point].kind for point in points}
        if any(POINTS[point].kind == "toolCall" for point in points):
            kinds.add("step")
        self._wrapped, self.uses_points = frozenset(kinds), bool(points)

    def _add_to_point(self, form: str, name: str, handler: Middleware, extension: str, priority: Any) -> None:
        given: Any = name  # an extension may give anything
        point = POINTS.get(given) if isinstance(given, str) else None
        if point is None or point.form != form:
            known = [known for known, found in POINTS.items() if found.form == form]
            other = "" if point is None else f"; {name} is for api.pipelines.{point.form}"
            message = f"no point {str(name)[:80]!r} for {form}{other}"
            raise fail("E_USAGE", message, suggestion=f"Use one of {', '.join(known)}.")
        layer = Layer(extension, handler, priority, name)
        if name in _BEFORE:
            kind: Any = point.kind  # no workspace point is
            self._layers[kind] = _with(self._layers[kind], layer, f"{name} handler")
        else:
            self._points[name] = _with(self._points.get(name, ()), layer, f"{name} handler")
        self._look_over()


def _with(layers: tuple[Layer, ...], layer: Layer, what: str) -> tuple[Layer, ...]:
    if not callable(layer.handler):
        raise fail("E_USAGE", f"the {what} of extension {layer.extension} is no function")
    priority: Any = layer.priority
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise fail("E_USAGE", f"the priority of a {what} is an integer, not {type(priority).__name__}")
    return tuple(sorted((*layers, layer), key=lambda layer: layer.priority))  # stable


def _without(layers: tuple[Layer, ...], extension: str) -> tuple[Layer, ...]:
    return tuple(layer for layer in layers if layer.extension != extension)


class Next(Generic[R]):
    """The `next` of a layer's context: it takes no arguments and is awaited once."""

    __slots__ = ("_index", "_inner", "_state", "patience")

    def __init__(self, inner: Callable[[int, Next[R]], Coroutine[Any, Any, R]], index: int, patience: Patience) -> None:
        """`inner` runs the chain from the layer with this index on, and calls the `end` of the Next that it gets.
        `patience` is the clock of the layer that has this next().
        """
        self._inner = inner
        self._index = index
        self._state: Literal["unused", "called", "done", "closed"] = "unused"
        self.patience = patience

    def __call__(self) -> Awaitable[R]:
        """Run the rest of the chain. Raises MiddlewareError for the second call and after the layer's end."""
        if self._state != "unused":
            if self._state == "closed":
                raise MiddlewareError("next() was called after the middleware had returned")
            raise MiddlewareError("next() was called twice")
        self._state = "called"
        return self._inner(self._index, self)

    def end(self, done: bool) -> None:
        """The inner part has ended; `done`: with a result."""
        self.patience.go_on()
        if done and self._state == "called":
            self._state = "done"

    @property
    def standing(self) -> Callable[[], AbstractContextManager[None]]:
        """The layer waits for an operation that has a limit of its own (patience.py)."""
        return self.patience.standing

    def close(self) -> None:
        """The layer has ended: raises MiddlewareError unless next() was called, and awaited to its end."""
        state, self._state = self._state, "closed"
        if state == "unused":
            raise MiddlewareError("next() was not called")
        if state == "called":
            raise MiddlewareError("next() was called and not awaited")


async def run_chain(
    layers: Sequence[Layer],
    bind: Callable[[Next[R], Layer], Any],
    core: Callable[[], Coroutine[Any, Any, R]],
    accept: Callable[[Any], R],
    failed: Callable[[Layer, BaseException], R],
    watch: Watch,
    before: Callable[[Layer], Awaitable[None]] | None = None,
) -> R:
    """Run `core` inside `layers`.

    `bind` makes the context of a layer from its next(). `accept` checks the value that a layer returned (raises
    MiddlewareError). `failed` makes the result of a layer that failed. `watch` ends a layer that takes too long.
    `before` runs a mutator that is one of the layers (None: there are none). Raises only the exceptions of `core`, and
    cancellation.
    """

    async def enter(index: int, outer: Next[R] | None) -> R:
        """Run the layers from `index` on, inside `outer`, whose clock stands still meanwhile.

        One coroutine for each layer: another one would add to the cost of every layer.
        """
        if outer is not None:
            outer.patience.stand()
        done = False
        try:
            while index < len(layers) and layers[index].point is not None and before is not None:
                try:
                    await before(layers[index])
                except (Exception, SystemExit, KeyboardInterrupt) as error:
                    done = True
                    return failed(layers[index], error)
                index += 1
            if index == len(layers):
                result = await core()
                done = True
                return result
            layer = layers[index]
            patience = watch.enter(layer)
            proceed: Next[R] = Next(enter, index + 1, patience)
            try:
                returned = layer.handler(bind(proceed, layer))
                if type(returned) is CoroutineType or isawaitable(returned):  # nearly always the former
                    returned = await returned
                proceed.close()
                result = accept(returned)
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                result = failed(layer, error)
            except BaseException as error:  # cancellation, or what a layer raises that looks like it
                if patience.is_late():
                    result = failed(layer, too_slow())
                elif patience.is_ending():
                    raise
                else:
                    result = failed(layer, error)
            finally:
                watch.leave(patience)
            done = True
            return result
        finally:
            if outer is not None:
                outer.end(done)

    return await enter(0, None)
