"""The middleware engine: which middleware is registered, in which order, and how a chain of it runs.

Rules.
- Three kinds: `turn`, `step`, `toolCall`. What is registered first is outermost; a lower priority comes further out,
  and equal priorities keep the order of registration. The order is the same on every run.
- Middleware takes one context and calls `await ctx.next()` exactly once. What it returns is what the layer around it
  gets from its next(), and in the end what the kernel takes.
- A layer that raises, never calls next(), calls it twice, does not await it or returns something else has failed. What
  is around it gets a failed result, not the exception: only the turn, step or call in question ends.
- Cancellation passes through every layer.

Source: design section 9; requirements CALL-09, CALL-11 to CALL-14, PIPELINE-01 to PIPELINE-03, PIPELINE-14 to
PIPELINE-16.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from inspect import isawaitable
from typing import Any, Final, Generic, Literal, TypeVar, get_args

from msgspec import Struct

from schemas.errors import fail

Kind = Literal["turn", "step", "toolCall"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

#: Takes a context; returns a result or something to await that gives one.
Middleware = Callable[[Any], Any]

R = TypeVar("R")


class MiddlewareError(Exception):
    """Middleware did not keep to the rules. Becomes an error with the code E_MIDDLEWARE."""


class Layer(Struct, frozen=True):
    """One registered middleware. `extension` is the name of the Extension that registered it."""

    extension: str
    handler: Middleware
    priority: int = 0


class Pipeline:
    """The middleware of one agent."""

    def __init__(self) -> None:
        self._layers: dict[Kind, list[Layer]] = {kind: [] for kind in KINDS}

    def register(self, kind: str, handler: Middleware, *, extension: str, priority: Any = 0) -> None:
        """Add middleware. Raises GoondanError E_USAGE for an unknown kind, a handler that cannot be called or a
        priority that is no integer.
        """
        if kind not in KINDS:
            raise fail("E_USAGE", f"no middleware kind {str(kind)[:80]!r}; there are: {', '.join(KINDS)}")
        if not callable(handler):
            raise fail("E_USAGE", f"the {kind} middleware of extension {extension} is no function")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise fail("E_USAGE", f"the priority of {kind} middleware is an integer, not {type(priority).__name__}")
        layers = self._layers[kind]
        layers.append(Layer(extension, handler, priority))
        layers.sort(key=lambda layer: layer.priority)  # stable

    def layers(self, kind: Kind) -> Sequence[Layer]:
        """Outermost first. The list that a chain runs with does not change when middleware is registered meanwhile."""
        return tuple(self._layers[kind])

    @property
    def empty(self) -> bool:
        """Whether there is no middleware at all."""
        return not any(self._layers.values())

    def has(self, kind: Kind) -> bool:
        """Whether there is any middleware of this kind."""
        return bool(self._layers[kind])


class Next(Generic[R]):
    """What a layer's context has as `next`: it takes no arguments and is awaited once."""

    __slots__ = ("_inner", "_state")

    def __init__(self, inner: Callable[[], Coroutine[Any, Any, R]]) -> None:
        self._inner = inner
        self._state: Literal["unused", "called", "done", "closed"] = "unused"

    def __call__(self) -> Awaitable[R]:
        """Run the rest of the chain. Raises MiddlewareError for the second call and after the layer's end."""
        if self._state == "closed":
            raise MiddlewareError("next() was called after the middleware had returned")
        if self._state != "unused":
            raise MiddlewareError("next() was called twice")
        self._state = "called"
        return self._run()

    async def _run(self) -> R:
        result = await self._inner()
        if self._state == "called":
            self._state = "done"
        return result

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
) -> R:
    """Run `core` inside `layers`.

    `bind` makes the context of a layer from its next(); `accept` checks what a layer returned (raises MiddlewareError);
    `failed` makes the result of a layer that failed. Raises only what `core` raises, and cancellation.
    """

    async def enter(index: int) -> R:
        if index == len(layers):
            return await core()
        layer = layers[index]
        proceed: Next[R] = Next(lambda: enter(index + 1))
        try:
            returned = layer.handler(bind(proceed, layer))
            if isawaitable(returned):
                returned = await returned
            proceed.close()
            return accept(returned)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return failed(layer, error)

    return await enter(0)
