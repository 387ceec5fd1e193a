"""One observation of the broker for all in a program who look on, while there are any, whatever kernels come and go.

Who looks closely hears everything, as soon as it happens. While nobody does, all hear the first few events of each
moment, and that something was missed: then they ask how things are. So who only wants to know that something happens
costs a busy kernel next to nothing, since agents do not tell what nobody reads.

Source: PROTOCOL-OPERATORS.md "Observing"; docs/decisions/176.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from typing import Final

from goondan.kernel.cli.observing import Missed, Observation, Observer, Seen
from goondan.kernel.cli.session import Session
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.runtime_events import MIN_WINDOW_BYTES, Observe

#: How long a new onlooker waits until the broker is observed (seconds). Later it is told that it has missed something.
READY_S: Final = 2.0
#: How often a kernel is looked for (seconds).
LOOK_S: Final = 0.25
#: How often it is said what was read, when nobody looks closely (seconds): as often as a page asks how things are. More
#: than a short turn is heard in it.
CALM_S: Final = 2.0
#: What may be on its way: while somebody looks closely, and else in CALM_S.
_WINDOW: Final = Observe(events=4096, bytes=1 << 20)
_CALM: Final = Observe(events=16, bytes=MIN_WINDOW_BYTES)


class Onlookers:
    """Those of one program. `session` gives the session with the kernel that runs, or raises GoondanError."""

    def __init__(self, session: Callable[[], Awaitable[Session]]) -> None:
        self._session = session
        self._listeners: dict[Observer, bool] = {}  # each with whether it looks closely
        self._closely = False
        self._observing: asyncio.Task[None] | None = None
        self._observation: Observation | None = None
        self._heard = 0  # the last number that is not said to be read
        self._tried = asyncio.Event()

    async def add(self, listener: Observer, closely: bool = True) -> None:
        """From now on it hears what happens. Returns when the broker is observed, after a moment in any case."""
        self._listeners[listener] = closely
        if self._observing is None:
            self._tried.clear()
        self._look()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._tried.wait(), READY_S)

    def remove(self, listener: Observer) -> None:
        """It hears nothing more, if it did."""
        self._listeners.pop(listener, None)
        self._look()

    def _look(self) -> None:
        """Observe as closely as those who are there. Who looks on already is told of a gap."""
        closely = any(self._listeners.values())
        if self._observing is not None and (closely != self._closely or not self._listeners):
            self._observing.cancel()
            self._observing = None
        self._closely = closely
        if self._listeners and self._observing is None:
            self._observing = asyncio.ensure_future(self._observe())

    async def _observe(self) -> None:
        """Observe the kernel that runs, and the next one, until cancelled."""
        while True:
            with suppress(GoondanError, OSError):  # no kernel runs, it has just gone, or there are too many files
                session = await self._session()
                self._heard = 0
                wish = _WINDOW if self._closely else _CALM
                with closing(await session.observe(wish, self._hear)) as self._observation:
                    if self._tried.is_set():
                        self._hear(Missed(0, None))
                    self._tried.set()
                    while not session.over:
                        await asyncio.sleep(LOOK_S if self._closely else CALM_S)
                        self._have_read()
                self._hear(Missed(0, 0))
            self._tried.set()
            await asyncio.sleep(LOOK_S)

    def _hear(self, heard: Seen | Missed) -> None:
        for listener in self._listeners:
            listener(heard)
        self._heard = heard.number if isinstance(heard, Seen) else heard.last or 0
        if self._closely:
            self._have_read()

    def _have_read(self) -> None:
        if self._observation is not None and self._heard:
            self._observation.read(self._heard)
            self._heard = 0
