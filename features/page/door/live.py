"""What happens in the swarm, as it happens: one observation of the broker for all readers of a door, while there are
any.

A reader that looks closely hears everything, as soon as it happens. The others hear the first few events of each
moment, and that something was missed: then they ask how things are. So an open page costs a busy kernel next to
nothing, since agents do not tell what nobody reads, and text still streams to those who watch a run.

A reader hears of its agents. What it has not read waits, up to a bound; then all of it goes, and the reader is told
that something was missed. So a reader that never reads costs as much as any other.

Source: PROTOCOL-OPERATORS.md "Observing"; the HTML standard, "Server-sent events"; docs/decisions/176.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from typing import Final

import msgspec
from msgspec import Struct
from starlette.responses import Response, StreamingResponse

from goondan.features.serve.api.routing import Asked
from goondan.features.serve.api.swarm import LOOK_S, Swarm
from goondan.kernel.cli.observing import Missed, Observation, Seen
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.runtime_events import MIN_WINDOW_BYTES, Observe

#: Between two batches (seconds): a person sees no difference, and a browser is woken seldom.
BATCH_S: Final = 0.03
#: What waits for one reader (bytes).
MAX_WAITING: Final = 1 << 20
#: Readers at once: a browser is one, however many tabs it has.
MAX_READERS: Final = 64
#: Those of one caller's name, which the passes of a token share: others look on, too.
MAX_OF_ONE: Final = 32
#: Nothing is said for so long, then a comment (seconds): less than proxies wait for.
HEARTBEAT_S: Final = 15.0
#: How long a new reader waits until the broker is observed (seconds). Later it is told that it has missed something.
READY_S: Final = 2.0
#: How often a door says what it has read, when nobody looks closely (seconds): so often pages ask how things are. More
#: than a short turn is heard in it.
CALM_S: Final = 2.0
#: What may be on its way to a door: while somebody looks closely, and else in CALM_S.
_WINDOW: Final = Observe(events=4096, bytes=1 << 20)
_CALM: Final = Observe(events=16, bytes=MIN_WINDOW_BYTES)


class Wish(Struct, forbid_unknown_fields=True):
    """How a reader looks on."""

    #: It wants all of it, and at once.
    closely: bool = False


def encoded(heard: Seen, at: int) -> bytes:
    """An event as JSON, heard `at` (milliseconds since 1970); of a piece of text, where it stands is `place` (pure)."""
    frame, event = heard.frame, msgspec.to_builtins(heard.event)
    if "at" in event:
        event["place"] = event.pop("at")
    whose = {"agent": frame.from_, "instance": frame.instance_key, "eventId": frame.event_id}
    where = {"rootEvent": frame.root_event, "traceId": frame.trace_id, "spanId": frame.span_id}
    return msgspec.json.encode({"n": heard.number, "at": at, **whose, **where, **event})


class Reader:
    """One reader, and what waits for it."""

    def __init__(self, shown: Callable[[str], bool], closely: bool = False, name: str = "") -> None:
        self.shown, self.name = shown, name
        self.closely = closely
        #: Something waits.
        self.woken = asyncio.Event()
        self._forget()

    def _forget(self, gap: bytes = b"") -> None:
        self._gap, self._waiting, self._size = gap, list[bytes](), 0

    def add(self, data: bytes) -> None:
        """One more event."""
        if self._size + len(data) > MAX_WAITING:
            self.miss()
        self._waiting.append(data)
        self._size += len(data)
        self.woken.set()

    def miss(self) -> None:
        """Something was missed; then what waits is worth nothing."""
        self._forget(b"event: gap\ndata: {}\n\n")
        self.woken.set()

    def take(self) -> bytes:
        """What waits, as events of a stream."""
        batch = b"event: batch\ndata: [" + b",".join(self._waiting) + b"]\n\n" if self._waiting else b""
        told = self._gap + batch
        self._forget()
        self.woken.clear()
        return told


class Live:
    """All readers of one door."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._readers: set[Reader] = set()
        self._observing: asyncio.Task[None] | None = None
        self._observation: Observation | None = None
        self._closely = False
        self._heard = 0  # the last number that is not said to be read
        self._tried = asyncio.Event()

    async def stream(self, asked: Asked) -> Response:
        """The stream of a reader. What happens after its head has come is in it, or a gap. Raises GoondanError
        E_OVERLOADED.
        """
        of_one = sum(one.name == asked.caller.name for one in self._readers)
        if of_one >= MAX_OF_ONE or len(self._readers) >= MAX_READERS:
            raise fail("E_OVERLOADED", f"{len(self._readers)} pages look on already, and no more may")
        reading = self._read(Reader(asked.caller.may_speak_to, asked.query.closely, asked.caller.name))
        await anext(reading)
        return StreamingResponse(reading, media_type="text/event-stream")

    async def _read(self, reader: Reader) -> AsyncIterator[bytes]:
        """What a reader hears. First nothing, when it hears."""
        self._readers.add(reader)
        try:
            if self._observing is None:
                self._tried.clear()
            self._look()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._tried.wait(), READY_S)
            yield b""
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.woken.wait(), HEARTBEAT_S)
                yield reader.take() or b":\n\n"
                await asyncio.sleep(BATCH_S)
        finally:
            self._readers.discard(reader)
            self._look()

    def _look(self) -> None:
        """Observe as closely as the readers that there are. Who looks on already is told of a gap."""
        closely = any(reader.closely for reader in self._readers)
        if self._observing is not None and (closely != self._closely or not self._readers):
            self._observing.cancel()
            self._observing = None
        self._closely = closely
        if self._readers and self._observing is None:
            self._observing = asyncio.ensure_future(self._observe())

    async def _observe(self) -> None:
        """Observe the kernel that runs, and the next one, until cancelled."""
        while True:
            with suppress(GoondanError, OSError):  # no kernel runs, it has just gone, or there are too many files
                session = await self._swarm.session()
                self._heard = 0
                with closing(
                    await session.observe(_WINDOW if self._closely else _CALM, self._hear)
                ) as self._observation:
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
        if isinstance(heard, Missed):
            for reader in self._readers:
                reader.miss()
        elif heard.event is not None:
            data = encoded(heard, int(time.time() * 1000))
            for reader in self._readers:
                if reader.shown(heard.frame.from_ or ""):
                    reader.add(data)
        self._heard = heard.number if isinstance(heard, Seen) else heard.last or 0
        if self._closely:
            self._have_read()

    def _have_read(self) -> None:
        if self._observation is not None and self._heard:
            self._observation.read(self._heard)
            self._heard = 0
