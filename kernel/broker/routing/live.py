"""Live news: passes news of a running turn from the agent that holds the event to the asking client. Pure.

Rules.
- News come only from the holder of an event's lease. They go only to a client that asked for them, over the connection
  that waits for the answer. All other news are dropped and counted, never answered.
- News are best effort: they are not journaled, use no credit and are not kept. News that the client's socket cannot
  take now are dropped (loop.py, `Lossy`). So a slow or absent client costs an agent nothing, and other frames never
  wait behind news.
- The number of frames per second for one client is limited, whatever agents send. This limit, the size of a frame and
  the socket's HWM bound the memory that one client can occupy.
- What a turn waits for is kept with its event as well, whoever listens, until the turn says that it goes on.

Source: docs/design/wire.md section 8; PROTOCOL.md "Live events".
"""

from __future__ import annotations

from typing import Final

from goondan.kernel.broker.state.bus import Bus, Lossy
from goondan.kernel.broker.state.entities import AGENTS, CLIENTS, Allowance, Connection
from goondan.kernel.broker.state.parts import Part, Take
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.spans import is_span_id

#: The largest payload that is passed on (bytes). Agents send at most 12 KiB of text in one piece.
MAX_LIVE_BYTES: Final = 16 << 10


class Live(Part):
    """Passes on live news."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._clients = bus.presence.connections[CLIENTS]
        self.takes = (Take((AGENTS,), "runtime.event", self.relay),)

    def relay(self, connection: Connection, frame: Frame, now: float) -> None:
        """`runtime.event` from an agent."""
        counters = self._bus.counters
        instance = connection.instance
        event = instance.leased if instance is not None else None
        if (
            instance is None
            or event is None
            or event.id != frame.event_id
            or instance.epoch != frame.epoch
            or len(memoryview(frame.payload)) > MAX_LIVE_BYTES
        ):
            counters["live_refused"] += 1
            return
        if frame.stage is not None:  # it waits, or goes on: for waits.py
            event.work.wait = (now, frame.payload) if frame.stage == "waits" else None
        asker = event.asker
        reply_to = event.content.reply_to
        if not event.live or reply_to is None or asker is None or self._clients.get(asker.ident) is not asker:
            counters["live_unheard"] += 1
            return
        if asker.allowance is None:
            asker.allowance = Allowance(now)
        if not asker.allowance.take(now):
            counters["live_dropped"] += 1
            return
        counters["live"] += 1
        relayed = Frame(
            "runtime.event",
            id=self._bus.next_id(),
            from_=instance.agent,
            instance_key=instance.key,
            event_id=event.id,
            in_reply_to=reply_to.correlation_id,
            trace_id=event.content.trace_id,
            span_id=_span(frame.span_id),
            parent_span_id=_span(frame.parent_span_id),
            payload=frame.payload,
        )
        self._bus.out.append((CLIENTS, asker.ident, Lossy(encode_value(relayed))))


def _span(text: str | None) -> str | None:
    """The span that the agent names; None when it is not a valid span id."""
    return text if text is not None and is_span_id(text) else None
