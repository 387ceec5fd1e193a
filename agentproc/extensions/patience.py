"""How long one layer may take outside its next(), in however many pieces.

A layer's clock runs while its own code runs or waits. It stands still inside next(), and while the layer waits for
another agent (`ctx.agents`): both have limits of their own. One timer checks all layers of the process now and then. A
timer for each layer would cost more than most layers do.

Source: docs/extensions.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final

from goondan.agentproc.extensions.pipeline import LAYER_S, Layer

#: How often the layers are checked while any runs (seconds). A layer may exceed its time by as much.
LOOK_S: Final = 1.0
#: A layer whose clock runs for so long (seconds) is told as one that hangs.
HANGS_S: Final = 2.0


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
                self._watch.look_later()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """The clock stands still inside. Several tasks may enter it at once, and it may be nested."""
        self.stand()
        try:
            yield
        finally:
            self.go_on()

    def look(self, now: float) -> None:
        """Cancel the layer if its time is over."""
        if self.stands == 0 and not self.expired and now - self._since > self._left:
            self.expired = True
            self._task.cancel()

    def hangs_s(self, now: float) -> float:
        """For how long the clock has run without a pause (seconds)."""
        return 0.0 if self.stands else now - self._since

    def is_late(self) -> bool:
        """Whether a CancelledError of the layer came from `look`, and only from there. To be asked when it
        was caught.
        """
        return self.expired and self._task.uncancel() <= self._cancelling

    @staticmethod
    def is_ending() -> bool:
        """See the function of this name."""
        return is_ending()


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
            self.look_later()
        return patience

    def leave(self, patience: Patience) -> None:
        """The layer has ended."""
        self.running.pop(patience, None)
        if self.hanging is patience:
            self.go_on()

    def look_later(self) -> None:
        """A clock runs, and no check is planned: plan one for all layers."""
        self.timer = asyncio.get_running_loop().call_later(min(LOOK_S, LAYER_S / 4), self._look)

    def close(self) -> None:
        """Stop checking layers."""
        self.running.clear()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _look(self) -> None:
        self.timer = None
        now = monotonic()
        for patience in list(self.running):
            patience.look(now)
        self._tell(now)
        if any(patience.stands == 0 for patience in self.running):
            self.look_later()

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
