"""The events of one agent instance: the subscriptions, and the delivery of each event.

Rules.
- An instance has one bus. Every subscriber of the instance gets each event of an extension, the emitter included, in
  the order of subscription. Events of the kernel come the same way.
- A pattern is a type in which `*` stands for one dot-separated segment or a part of one, and `**` for any number of
  segments, none included.
- A payload is a JSON object. Each subscriber gets its own copy. The event's `type` is added to it unless the payload
  has a `type`.
- When a handler raises, the log names its extension, and the other subscribers are not affected. A coroutine runs as a
  task of its own; `emit` waits for no handler.

Source: requirements EVENTS-01 to EVENTS-13, RECONCILE-05.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from inspect import isawaitable
from typing import Any, Final

from msgspec import Struct

from goondan.agentproc.extensions.engine import is_ending
from goondan.agentproc.extensions.points.results import output_of, trace_of
from goondan.schemas.text.visible import visible_line
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.errors import fail

Handler = Callable[[dict[str, Any]], Any]

#: Sent to an extension before it is unloaded. The kernel waits for its handlers (RECONCILE-05).
CLEANUP: Final = "extension.cleanup"
#: How long all handlers of `extension.cleanup` may take together (seconds).
CLEANUP_S: Final = 5.0
#: The longest event type or pattern (characters).
MAX_TYPE: Final = 200
#: The most subscriptions of one instance. An extension that subscribes at each event by mistake is found before the
#: memory is full.
MAX_SUBSCRIPTIONS: Final = 10_000
#: How deep handlers may emit from inside handlers. A circle of two handlers ends instead of using up the stack.
MAX_DEPTH: Final = 32

log = logging.getLogger("agentproc")


class _Subscription(Struct, eq=False):
    #: The name of the extension.
    extension: str
    #: Applied to a type with a dot put before it.
    pattern: re.Pattern[str]
    #: Gets the payload.
    handler: Handler
    #: It gets one event only.
    once: bool
    #: It gets no more events.
    spent: bool = False

    def matches(self, kind: str) -> bool:
        """Whether the handler gets events of this type."""
        return self.pattern.fullmatch("." + kind) is not None


class EventBus:
    """The events of one agent instance."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._subscriptions: list[_Subscription] = []
        self._running: set[asyncio.Task[None]] = set()
        self._depth = 0

    def subscribe(self, pattern: Any, handler: Any, *, extension: str, once: bool = False) -> Callable[[], None]:
        """Call `handler` with each event that `pattern` matches. The returned function ends that.

        Raises GoondanError E_USAGE.
        """
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_TYPE:
            raise fail("E_USAGE", f"an event type is a text of 1 to {MAX_TYPE} characters")
        if not callable(handler):
            raise fail("E_USAGE", f"the handler of {visible_line(pattern)} of extension {extension} is no function")
        if len(self._subscriptions) >= MAX_SUBSCRIPTIONS:
            raise fail("E_USAGE", f"there are {MAX_SUBSCRIPTIONS} subscriptions already; end those that are not needed")
        made = _Subscription(extension, compiled(pattern), handler, once)
        self._subscriptions.append(made)
        return lambda: self._end(made)

    def emit(self, kind: Any, payload: Any = None, *, emitter: str) -> None:
        """Send an event to every subscriber. Raises GoondanError E_USAGE for an invalid event."""
        if not isinstance(kind, str) or not 0 < len(kind) <= MAX_TYPE:
            raise fail("E_USAGE", f"an event type is a text of 1 to {MAX_TYPE} characters")
        data = _encoded(kind, payload)
        if threading.get_ident() != self._thread:  # a handler that is no coroutine function runs in a thread
            self._loop.call_soon_threadsafe(self._emit, kind, data, emitter)
            return
        self._emit(kind, data, emitter)

    def _emit(self, kind: str, data: Any, emitter: str) -> None:
        if self._depth >= MAX_DEPTH:
            what = visible_line(kind)
            log.warning("event %s of %s: %d events inside each other; it was dropped", what, emitter, self._depth)
            return
        self._depth += 1
        try:
            for subscription in [found for found in self._subscriptions if found.matches(kind)]:
                self._deliver(subscription, kind, data)
        finally:
            self._depth -= 1

    async def clean_up(self, extension: str, limit_s: float = CLEANUP_S) -> None:
        """Tell one extension that it is being unloaded, wait for its handlers, and end its subscriptions."""
        data = _encoded(CLEANUP, {"name": extension})
        tasks: list[asyncio.Task[None]] = []
        for subscription in [found for found in self._subscriptions if found.extension == extension]:
            if subscription.matches(CLEANUP):
                task = self._deliver(subscription, CLEANUP, data)
                if task is not None:
                    tasks.append(task)
            self._end(subscription)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=limit_s)
            if late:
                log.warning("extension %s: cleaning up took longer than %g s, and was given up", extension, limit_s)
            for task in late:
                task.cancel()

    def unsubscribe_all(self, extension: str) -> None:
        """End the subscriptions of one extension without telling it."""
        for subscription in [found for found in self._subscriptions if found.extension == extension]:
            self._end(subscription)

    def wants(self, kind: str) -> bool:
        """Whether any subscriber gets events of this type."""
        return any(subscription.matches(kind) for subscription in self._subscriptions)

    @property
    def empty(self) -> bool:
        """Whether there are no subscriptions."""
        return not self._subscriptions

    def close(self) -> None:
        """End every subscription."""
        self._subscriptions.clear()
        for task in self._running:
            task.cancel()

    # --- inside

    def _end(self, subscription: _Subscription) -> None:
        subscription.spent = True
        with suppress(ValueError):
            self._subscriptions.remove(subscription)

    def _deliver(self, subscription: _Subscription, kind: str, data: Any) -> asyncio.Task[None] | None:
        """Call one handler. Returns the task in which it goes on, if there is one."""
        if subscription.spent:
            return None
        if subscription.once:
            self._end(subscription)
        try:
            returned = subscription.handler(from_raw(data, dict))
        except BaseException as error:
            _tell(subscription.extension, kind, error)
            return None
        if not isawaitable(returned):
            return None
        task = self._loop.create_task(_watched(subscription.extension, kind, returned))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


async def _watched(extension: str, kind: str, returned: Awaitable[Any]) -> None:
    try:
        await returned
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError | GeneratorExit) and is_ending():
            raise
        _tell(extension, kind, error)


def _tell(extension: str, kind: str, error: BaseException) -> None:
    log.warning("the %s handler of extension %s failed\n%s", visible_line(kind), extension, trace_of(error))


def _encoded(kind: str, payload: Any) -> Any:
    """The payload as subscribers get it. Raises GoondanError E_USAGE."""
    if payload is not None and not isinstance(payload, Mapping):
        what = type(payload).__name__
        raise fail("E_USAGE", f"the payload of event {visible_line(kind)} is {what}, not an object")
    try:
        return output_of({"type": kind, **(payload or {})})
    except (ValueError, TypeError) as error:
        raise fail("E_USAGE", f"the payload of event {visible_line(kind)}: {error}") from None


@lru_cache(256)
def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern. It is applied to a type with a dot put before it."""
    parts: list[str] = []
    for segment in pattern.split("."):
        if segment == "**":
            parts.append(r"(?:\.[^.]+)*")
        elif segment == "*":
            parts.append(r"\.[^.]+")
        else:
            parts.append(r"\." + re.escape(segment).replace(r"\*", r"[^.]*"))
    return re.compile("".join(parts))
