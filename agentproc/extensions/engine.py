"""The middleware engine: how a chain of layers runs, and how long one layer may take.

Rules.
- Middleware takes one context and calls `await ctx.next()` exactly once. Its return value goes to the layer around it,
  as the value of that layer's next(). The kernel takes the value of the outermost layer.
- A layer fails when it raises, never calls next(), calls it twice, does not await it, returns something else, or takes
  longer than LAYER_S outside its next(). The layer around it gets a failed result, not the exception: only the turn,
  step or call in question ends.
- Cancellation passes through every layer.

A layer's clock runs while its own code runs or waits. It stands still inside next(), and while the layer waits for
another agent (`ctx.agents`): both have limits of their own. One timer checks all layers of the process now and then. A
timer for each layer would cost more than most layers do.

Source: docs/extensions.md; requirements CALL-09, CALL-11 to CALL-14, PIPELINE-02, PIPELINE-08, PIPELINE-09,
PIPELINE-13 to PIPELINE-16, PIPELINE-20 to PIPELINE-22.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import isawaitable
from time import monotonic
from types import CoroutineType
from typing import Any, Final, Generic, Literal, NoReturn, TypeVar, cast

from msgspec import Struct

from goondan.agentproc.extensions.points.pipeline import Layer, MiddlewareError

#: How long a layer may take outside next() (seconds). A person waits for it. Longer work belongs into a tool or another
#: agent, which can be seen and cancelled.
LAYER_S: Final = 60.0
#: How often the layers are checked while any runs (seconds). A layer may exceed its time by as much.
CHECK_S: Final = 1.0
#: A layer whose clock runs for so long (seconds) is told as one that hangs.
HANGS_S: Final = 2.0

R = TypeVar("R")


# --- clocks -----------------------------------------------------------------------------------------------------------


def is_ending() -> bool:
    """Whether the running task is to end. To be asked after a CancelledError or a GeneratorExit was caught.

    Code of extensions can raise both as well: awaiting a task that somebody cancelled raises a CancelledError. That is
    a failure like any other.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # the coroutine is closed from outside of any loop
        return True
    return task is None or task.cancelling() > 0


class Patience:
    """The clock of one layer, from `Watch.enter` to `Watch.leave`."""

    __slots__ = ("_cancelling", "_left", "_since", "_task", "_watch", "expired", "layer", "stands")

    def __init__(self, watch: Watch, task: asyncio.Task[Any], layer: Layer) -> None:
        self._watch = watch
        self.layer = layer
        self._task = task
        self._cancelling = task.cancelling()
        self._left = LAYER_S
        self._since = monotonic()
        #: How many waits of the layer are open. The clock runs when it is 0.
        self.stands = 0
        #: True when the layer's time was over before the layer was.
        self.expired = False

    def stand(self) -> None:
        """Stop the clock until `go_on` was called as often as `stand`."""
        if self.stands == 0:
            self._left -= monotonic() - self._since
            if self._watch.hanging is self:
                self._watch.go_on()
        self.stands += 1

    def go_on(self) -> None:
        """See `stand`."""
        self.stands -= 1
        if self.stands == 0:
            self._since = monotonic()
            if self._watch.timer is None:
                self._watch.check_later()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """The clock stands still inside. Several tasks may enter it at once, and it may be nested."""
        self.stand()
        try:
            yield
        finally:
            self.go_on()

    def check(self, now: float) -> None:
        """Cancel the layer if its time is over."""
        if self.stands == 0 and not self.expired and now - self._since > self._left:
            self.expired = True
            self._task.cancel()

    def hangs_s(self, now: float) -> float:
        """For how long the clock has run without a pause (seconds)."""
        return 0.0 if self.stands else now - self._since

    def is_late(self) -> bool:
        """Whether a CancelledError of the layer came from `check`, and only from there. To be asked when it
        was caught.
        """
        return self.expired and self._task.uncancel() <= self._cancelling


class Watch:
    """The layers of one process. Layers whose clock stands still are in it, too: checking them costs less than taking
    them out.
    """

    def __init__(self) -> None:
        self.running: dict[Patience, None] = {}
        self.timer: asyncio.TimerHandle | None = None
        #: Hears of a layer that hangs, and for how long it does (seconds); None: it does not any more.
        self.told: Callable[[Layer, float | None], None] | None = None
        #: The layer that hangs, if that was told.
        self.hanging: Patience | None = None

    def enter(self, layer: Layer) -> Patience:
        """A layer begins, in the task that runs now."""
        task = asyncio.current_task()
        if task is None:
            raise AssertionError("layers run in tasks")
        patience = Patience(self, task, layer)
        self.running[patience] = None
        if self.timer is None:
            self.check_later()
        return patience

    def leave(self, patience: Patience) -> None:
        """The layer has ended."""
        self.running.pop(patience, None)
        if self.hanging is patience:
            self.go_on()

    def check_later(self) -> None:
        """A clock runs, and no check is planned: plan one for all layers."""
        self.timer = asyncio.get_running_loop().call_later(min(CHECK_S, LAYER_S / 4), self._check)

    def close(self) -> None:
        """Stop checking layers."""
        self.running.clear()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _check(self) -> None:
        self.timer = None
        now = monotonic()
        for patience in list(self.running):
            patience.check(now)
        self._tell(now)
        if any(patience.stands == 0 for patience in self.running):
            self.check_later()

    def _tell(self, now: float) -> None:
        """Tell of the layer that hangs longest, again and again: news may be lost."""
        longest = max(self.running, key=lambda patience: patience.hangs_s(now), default=None)
        if self.told is None or longest is None or (hangs_s := longest.hangs_s(now)) < HANGS_S:
            return
        if self.hanging is not None and self.hanging is not longest:
            self.go_on()
        self.hanging = longest
        self.told(longest.layer, hangs_s)

    def go_on(self) -> None:
        """The layer that hangs goes on, or has ended."""
        hanging, self.hanging = self.hanging, None
        if self.told is not None and hanging is not None:
            self.told(hanging.layer, None)


# --- chains -----------------------------------------------------------------------------------------------------------


class LayerFailed(Exception):
    """A handler of a point failed. `layer` is the handler's layer, `error` its exception."""

    def __init__(self, layer: Layer, error: BaseException) -> None:
        super().__init__(str(error))
        self.layer = layer
        self.error = error


def blame(layer: Layer, error: BaseException) -> NoReturn:
    """What becomes of a layer that failed, where there is no result for it. Raises LayerFailed."""
    raise LayerFailed(layer, error) from error


class Next(Struct, Generic[R], eq=False):
    """One layer that runs, and its `next`: it is called and awaited once. A wrap gives it a context; middleware of a
    kind calls it without one. A mutator is not given it.
    """

    #: Runs the chain from the layer with this index on, and calls `inner_ended` of the Next that it gets.
    inner: Callable[[int, Next[R], Any], Coroutine[Any, Any, R]]
    #: See `inner`.
    index: int
    #: The layer.
    layer: Layer
    #: The clock of the layer. A mutator has none until it awaits something.
    patience: Patience | None
    #: What a handler of a point is given (PointContext); None for middleware of a kind.
    context: Any
    #: What became of next().
    state: Literal["unused", "called", "done", "closed"] = "unused"
    #: What the inner part raised.
    raised: BaseException | None = None

    def __call__(self, context: Any = None) -> Awaitable[R]:
        """Run the rest of the chain. Raises MiddlewareError for the second call and after the layer's end."""
        if self.state != "unused":
            if self.state == "closed":
                raise MiddlewareError("next() was called after the middleware had returned")
            raise MiddlewareError("next() was called twice")
        given = None if self.context is None else self.context.accept(context)
        self.state = "called"
        return self.inner(self.index, self, given)

    def inner_ended(self, done: bool, raised: BaseException | None) -> None:
        """The inner part has ended; `done`: with a result. A wrap may also go on behind what was raised."""
        if self.patience is not None:
            self.patience.go_on()
        self.raised = raised
        if (done or self.context is not None) and self.state == "called":
            self.state = "done"

    def standing(self) -> AbstractContextManager[None]:
        """The layer waits for an operation that has a limit of its own."""
        return nullcontext() if self.patience is None else self.patience.standing()

    def result(self, returned: Any, accept: Callable[[Any], R] | None) -> Any:
        """What the layer returned. Raises MiddlewareError when that is wrong, or next() was not called and awaited."""
        point = self.layer.of
        state = "done" if point is not None and point.form == "mutate" else self.state
        self.state = "closed"
        if state == "unused" and (point is None or point.keeps):
            raise MiddlewareError("next() was not called")
        if state == "called":
            raise MiddlewareError("next() was called and not awaited")
        if point is not None and self.context is not None:
            return self.context.accept(returned, point.keeps)
        return returned if accept is None else accept(returned)


class _Chain(Struct, Generic[R], eq=False):
    """A chain of layers that runs (see `run`)."""

    #: The layers, the outermost first.
    layers: Sequence[Layer]
    #: Makes the context of a layer.
    bind: Callable[[Layer, Next[R]], Any]
    #: What the layers surround.
    core: Callable[[Any], Coroutine[Any, Any, R]]
    #: Ends layers that take too long.
    watch: Watch
    #: Checks what middleware returned.
    accept: Callable[[Any], R] | None
    #: Makes the result of a layer that failed.
    failed: Callable[[Layer, BaseException], R]
    #: The wrap that failed last, whose exception goes through those around it.
    blamed: LayerFailed | None = None

    async def enter(self, index: int, outer: Next[R] | None, given: Any) -> R:
        """Run the layers from `index` on, inside `outer`, whose clock stands still meanwhile.

        One coroutine for each layer: another one would add to the cost of every layer.
        """
        if outer is not None and outer.patience is not None:
            outer.patience.stand()  # the inner part has a limit of its own
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
                    running.state = "closed"  # next() cannot be called any more
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
                outer.inner_ended(done, raised)
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
                error = MiddlewareError(f"it took longer than {LAYER_S:g} s outside next()")
            elif is_ending():
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
