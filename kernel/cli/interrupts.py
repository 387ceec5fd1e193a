"""Signals while a person or a script waits for an answer. The first cancels the turn or call, the second ends the
command.

By default, asyncio cancels the main task at every SIGINT. Then the turn or call would go on although nobody waits for
it, and between two messages the conversation would end.

Source: docs/design/delivery.md section 2.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Protocol, Self, TypeVar

from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ErrorPayload

_T = TypeVar("_T")

#: How long a command that was told to end waits for the end of the work that it has cancelled (seconds). A tool host
#: kills a jail that does not stop within 2 s.
CANCEL_S: Final = 10.0
#: Added to a signal's number: the exit status that a shell reports.
EXIT_SIGNAL: Final = 128


class CancelSession(Protocol):
    """The method of a session that is used here (goondan.kernel.cli.session.Session)."""

    async def cancel(self, event_id: str, timeout_s: float | None = None) -> str: ...


class Interrupts:
    """A context in which signals (SIGINT if none is named) call `target`. Enter it in a running loop of the main
    thread.
    """

    def __init__(self, target: Callable[[], object], *signals: signal.Signals) -> None:
        self.target = target
        self._signals = signals or (signal.SIGINT,)
        #: The last signal that came. 0: none.
        self.number = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in self._signals}
        for number in self._signals:
            self._loop.add_signal_handler(number, self._came, number)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            self._loop.remove_signal_handler(number)
            signal.signal(number, before)

    @property
    def status(self) -> int:
        """The exit status of a command that such a signal has ended. 0: no signal came."""
        return EXIT_SIGNAL + self.number if self.number else 0

    def _came(self, number: signal.Signals) -> None:
        self.number = number
        self.target()


class Cancelling:
    """Waits for answers while `came` may be called. The first call cancels `events()`, the second ends the waiting.

    The first call also calls `on_first`. When no second call follows, the waiting ends after `patience_s` seconds.
    """

    def __init__(
        self,
        session: CancelSession,
        events: Callable[[], Iterable[str]],
        *,
        on_first: Callable[[], object] | None = None,
        patience_s: float | None = CANCEL_S,
    ) -> None:
        self._session = session
        self._events = events
        self._on_first = on_first
        self._patience_s = patience_s
        self._waiting: asyncio.Future[Any] | None = None
        self._asked: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        #: Whether `came` was called at all, and whether the waiting was given up.
        self.came_first = False
        self.left = False

    async def wait(self, waiting: asyncio.Future[_T]) -> _T | None:
        """Wait for `waiting`, and return its result. None when the waiting was given up (`left`). Raises what `waiting`
        raises.
        """
        self._waiting = waiting
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self.left:
                raise  # another caller has cancelled
            return None
        finally:
            waiting.cancel()
            if self._timer is not None:
                self._timer.cancel()
            for task in self._asked:
                task.cancel()

    def came(self) -> None:
        """Handle a signal: somebody wants the work to end."""
        if self.came_first:
            self._leave()
            return
        self.came_first = True
        loop = asyncio.get_running_loop()
        self._asked = [loop.create_task(self._cancel(event_id)) for event_id in self._events()]
        if self._patience_s is not None:
            self._timer = loop.call_later(self._patience_s, self._leave)
        if self._on_first is not None:
            self._on_first()

    def _leave(self) -> None:
        self.left = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def _cancel(self, event_id: str) -> None:
        # It has just ended, or the command that waits for the answer gets the error.
        with suppress(GoondanError):
            await self._session.cancel(event_id)


def was_cancelled(info: ErrorPayload | None) -> bool:
    """Whether this error is the end of cancelled work."""
    return info is not None and info.code == "E_CANCELLED"
