"""What happens in the swarm, as it happens, for the page's readers.

A reader that looks closely hears everything, as soon as it happens. The others hear the first few events of each
moment, and that something was missed: then they ask how things are. So an open page costs a busy kernel next to
nothing, and text still streams to those who watch a run.

A reader hears of its agents. What it has not read waits, up to a bound; then all of it goes, and the reader is told
that something was missed. So a reader that never reads costs as much as any other.

Source: PROTOCOL-OPERATORS.md "Observing"; the HTML standard, "Server-sent events"; docs/decisions/176.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final

import msgspec
from msgspec import Struct
from starlette.responses import Response, StreamingResponse

from goondan.features.serve.api.routing import Asked
from goondan.kernel.cli.observing import Missed, Seen
from goondan.kernel.cli.onlookers import Onlookers
from goondan.schemas.wire.errors import fail

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
_GAP: Final = b"event: gap\ndata: {}\n\n"


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

    def __init__(self, shown: Callable[[str], bool], encode: Callable[[Seen], bytes]) -> None:
        self._shown, self._encode = shown, encode
        #: Something waits.
        self.woken = asyncio.Event()
        self._forget()

    def _forget(self, gap: bytes = b"") -> None:
        self._gap, self._waiting, self._size = gap, list[bytes](), 0

    def hear(self, heard: Seen | Missed) -> None:
        """Something has happened, or was missed; then what waits is worth nothing."""
        if isinstance(heard, Missed):
            self._forget(_GAP)
        elif heard.event is not None and self._shown(heard.frame.from_ or ""):
            data = self._encode(heard)
            if self._size + len(data) > MAX_WAITING:
                self._forget(_GAP)
            self._waiting.append(data)
            self._size += len(data)
        else:
            return
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

    def __init__(self, onlookers: Onlookers) -> None:
        self._onlookers = onlookers
        self._names: Counter[str] = Counter()
        self._last: tuple[Seen | None, bytes] = None, b""

    async def stream(self, asked: Asked) -> Response:
        """The stream of a reader. What happens after its head has come is in it, or a gap. Raises GoondanError
        E_OVERLOADED.
        """
        if self._names[asked.caller.name] >= MAX_OF_ONE or self._names.total() >= MAX_READERS:
            raise fail("E_OVERLOADED", f"{self._names.total()} pages look on already, and no more may")
        reading = self._read(asked)
        await anext(reading)
        return StreamingResponse(reading, media_type="text/event-stream")

    async def _read(self, asked: Asked) -> AsyncIterator[bytes]:
        """What a reader hears. First nothing, when it hears."""
        reader, name = Reader(asked.caller.may_speak_to, self._encode), asked.caller.name
        self._names[name] += 1
        try:
            await self._onlookers.add(reader.hear, asked.query.closely)
            yield b""
            while True:
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.woken.wait(), HEARTBEAT_S)
                yield reader.take() or b":\n\n"
                await asyncio.sleep(BATCH_S)
        finally:
            self._names[name] -= 1
            self._onlookers.remove(reader.hear)

    def _encode(self, heard: Seen) -> bytes:
        """An event as JSON, once for all readers."""
        if heard is not self._last[0]:
            self._last = heard, encoded(heard, int(time.time() * 1000))
        return self._last[1]
