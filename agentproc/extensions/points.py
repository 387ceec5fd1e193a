"""How the handlers of one point of the v0.9 spelling run (pipeline.py has the points). Pure.

Rules.
- A mutator takes one context and returns it, changed or not, or another one of the same kind. Mutators run one after
  another in the order of the agent's middleware (priority, then registration). Each gets the context that the one
  before returned.
- A wrap takes (context, next). `await next(ctx)` returns the context with the result of the inner part. The first
  registered wrap is outermost. Unlike the next() of `api.pipeline`, it raises the exceptions of the inner part.
- A handler that raises or breaks a rule ends the point with LayerFailed, which names its extension. An exception of the
  core passes through every wrap that does not catch it, and no extension is blamed for it.

Source: requirements PIPELINE-05 to PIPELINE-09, PIPELINE-13 to PIPELINE-16, PIPELINE-20 to PIPELINE-22.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any, Literal, Protocol, TypeVar

from goondan.agentproc.extensions.pipeline import Layer, MiddlewareError, Patience, Watch, too_slow


class LayerFailed(Exception):
    """A handler of a point failed. `layer` is the handler's layer, `error` its exception."""

    def __init__(self, layer: Layer, error: BaseException) -> None:
        super().__init__(str(error))
        self.layer = layer
        self.error = error


class Accepting(Protocol):
    """The part of a context that is needed here (point_contexts.py)."""

    def copied(self) -> Any:
        """A copy of the context for one handler. The handler's assignments count only when it returns the copy."""

    def accept(self, returned: Any, changes: Sequence[str]) -> Any:
        """Check and return the context that a handler returned. Raises MiddlewareError."""


C = TypeVar("C", bound=Accepting)


async def mutate(layer: Layer, context: C, changes: Sequence[str], watch: Watch) -> C:
    """Run one mutator and return the context for the next one. Raises LayerFailed, and cancellation."""
    return await run_mutators((layer,), context, changes, watch)


async def run_mutators(
    layers: Sequence[Layer], context: C, changes: Sequence[str], watch: Watch, *, keeps: str = ""
) -> C:
    """Run the mutators of one point and return the context of the last one. `keeps` is a field that none of them may
    empty; "": there is no such field.

    Raises LayerFailed, and cancellation.
    """
    for layer in layers:
        # Only what is awaited can be cancelled, so only that has a clock: most mutators are plain functions.
        patience: Patience | None = None
        try:
            given = context.copied()
            returned = layer.handler(given)
            if returned is not given and isawaitable(returned):
                patience = watch.enter(layer)
                returned = await returned
            accepted: C = context.accept(returned, changes)
            _require(accepted, keeps)
            context = accepted
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise LayerFailed(layer, error) from error
        except BaseException as error:  # cancellation, or what a handler raises that looks like it
            patience = patience or watch.enter(layer)
            if patience.is_late():
                raise LayerFailed(layer, too_slow()) from None
            if patience.is_ending():
                raise
            raise LayerFailed(layer, error) from error
        finally:
            if patience is not None:
                watch.leave(patience)
    return context


def _require(context: Accepting, field: str) -> None:
    """Raises MiddlewareError when this field of a context is empty; "" is no field."""
    if field and getattr(context, field) is None:
        raise MiddlewareError(f"it returned a context without {field}")


class _Inside:
    """The `next` of one wrap."""

    __slots__ = ("_changes", "_context", "_inner", "_patience", "raised", "state")

    def __init__(
        self,
        inner: Callable[[Any], Awaitable[Any]],
        context: Accepting,
        changes: Sequence[str],
        patience: Patience,
    ) -> None:
        self._patience = patience
        self._inner = inner
        self._context = context
        self._changes = changes
        self.raised: BaseException | None = None
        self.state: Literal["unused", "called", "done", "closed"] = "unused"

    def __call__(self, context: Any) -> Awaitable[Any]:
        """Run the inner part with this context. Raises MiddlewareError for the second call and after the end."""
        if self.state == "closed":
            raise MiddlewareError("next() was called after the handler had returned")
        if self.state != "unused":
            raise MiddlewareError("next() was called twice")
        given = self._context.accept(context, self._changes)
        self.state = "called"
        return self._run(given)

    async def _run(self, context: Any) -> Any:
        self._patience.stand()
        try:
            return await self._inner(context)
        except BaseException as error:
            self.raised = error
            raise
        finally:
            self._patience.go_on()
            self._finish()

    def _finish(self) -> None:
        if self.state == "called":
            self.state = "done"

    def close(self, *, optional: bool) -> None:
        """The handler has ended. Raises MiddlewareError unless next() was called, and awaited to its end."""
        state, self.state = self.state, "closed"
        if state == "unused" and not optional:
            raise MiddlewareError("next() was not called")
        if state == "called":
            raise MiddlewareError("next() was called and not awaited")


async def run_wraps(
    layers: Sequence[Layer],
    context: C,
    changes: Sequence[str],
    core: Callable[[C], Awaitable[C]],
    watch: Watch,
    *,
    makes: str = "",
) -> C:
    """Run `core` inside the wraps of one point and return the context of the outermost wrap.

    `makes` is the field that every wrap's context must have filled in; "": a wrap need not call next(). Raises
    LayerFailed, an exception of `core` that no wrap caught, and cancellation.
    """
    blamed: list[LayerFailed] = []

    async def enter(index: int, given: C) -> C:
        if index == len(layers):
            return await core(given)
        layer = layers[index]
        patience = watch.enter(layer)
        inside = _Inside(lambda changed: enter(index + 1, changed), given, changes, patience)
        try:
            returned = layer.handler(given.copied(), inside)
            if isawaitable(returned):
                returned = await returned
            inside.close(optional=not makes)
            accepted: C = given.accept(returned, changes)
            _require(accepted, makes)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if error is not inside.raised:
                blamed[:] = [LayerFailed(layer, error)]
            raise
        except BaseException as error:  # cancellation, or what a handler raises that looks like it
            if patience.is_late():
                own = too_slow()
            elif patience.is_ending():
                raise
            else:
                own = MiddlewareError(f"it raised {type(error).__name__}")
            blamed[:] = [LayerFailed(layer, own)]
            raise own from error
        finally:
            watch.leave(patience)
            inside.state = "closed"
        return accepted

    try:
        return await enter(0, context)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if blamed and blamed[0].error is error:
            raise blamed[0] from error
        raise
