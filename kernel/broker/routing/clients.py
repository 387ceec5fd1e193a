"""What clients get besides answers: live events of running turns, and answers to their `admin` frames. Pure.

Rules.
- Live events come only from the holder of an event's lease. They go only to a client that asked for them, over the
  connection that waits for the answer, and to observers (observers.py). All others are dropped and counted, never
  answered.
- They are best effort: they are not journaled, use no credit and are not kept. Those that the client's socket cannot
  take now are dropped (loop.py, `Lossy`). So a slow or absent client costs an agent nothing, and other frames never
  wait behind them.
- The number of frames per second for one client is limited, whatever agents send. This limit, the size of a frame and
  the socket's HWM bound the memory that one client can occupy.
- What a turn waits for is kept with its event as well, whoever listens, until the turn says that it goes on.
- An `admin` frame names an op. Parts have the ops. Some are for everybody, the others for operators.

Source: docs/design/wire.md section 8; PROTOCOL.md "Live events" and "Ask".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from goondan.kernel.broker.state.bus import Bus, Lossy
from goondan.kernel.broker.state.entities import AGENTS, CLASSES, CLIENTS, TOOLS, Allowance, Connection, Event
from goondan.kernel.broker.state.parts import Op, Part, Take
from goondan.schemas.wire import codec, errors, spans
from goondan.schemas.wire.frames import Frame

#: The largest payload that is passed on (bytes). Agents send at most 12 KiB of text in one piece.
MAX_LIVE_BYTES: Final = 16 << 10


class Live(Part):
    """Passes on live events."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._clients = bus.presence.connections[CLIENTS]
        #: Gets the news of all turns for observers (observers.py); None: there are none.
        self.observed: Callable[[Event, Frame], None] | None = None
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
        if self.observed is not None:
            self.observed(event, frame)
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
        told = relayed("runtime.event", event, frame)
        told.id, told.in_reply_to = self._bus.next_id(), reply_to.correlation_id
        self._bus.out.append((CLIENTS, asker.ident, Lossy(codec.encode_value(told))))


def relayed(frame_type: str, event: Event, news: Frame) -> Frame:
    """What is told of the news of an event. Spans are those that its agent names, as far as they are valid."""
    span, parent, content = news.span_id, news.parent_span_id, event.content_here
    return Frame(
        frame_type,
        from_=event.instance.agent,
        instance_key=event.instance.key,
        event_id=event.id,
        trace_id=None if content is None else content.trace_id,
        span_id=span if span is not None and spans.is_span_id(span) else None,
        parent_span_id=parent if parent is not None and spans.is_span_id(parent) else None,
        payload=news.payload,
    )


#: At most so many peers of one class are in one answer, because it must fit in one frame.
MAX_PEERS: Final = 4096


class Administration(Part):
    """Passes each `admin` frame to its handler."""

    def __init__(self, bus: Bus, parts: Iterable[Part]) -> None:
        """`parts` have the ops."""
        self._bus = bus
        own = (Op("stats", self._stats, for_all=True), Op("peers", self._peers))
        self._ops = {op.name: op for op in (*own, *(op for part in parts for op in part.ops))}
        most_bytes = max(op.most_bytes for op in self._ops.values())
        self.takes = (Take((CLIENTS,), "admin", self.ask, most_bytes),)

    def ask(self, connection: Connection, frame: Frame, now: float) -> None:
        """`admin` with `{op, …}`. Raises GoondanError E_FRAME_INVALID for an op that this client cannot ask for."""
        asked = codec.from_raw(frame.payload, dict)
        name = asked.get("op")
        if not isinstance(name, str):
            raise errors.fail("E_FRAME_INVALID", "admin names its `op`, a text")
        op = self._ops.get(name)
        if op is None or not (op.for_all or connection.claims.operator):
            for_all, of_operators = (
                _named(op for op in self._ops.values() if op.for_all is everybody) for everybody in (True, False)
            )
            raise errors.fail("E_FRAME_INVALID", f"admin knows the ops {for_all} and, for operators, {of_operators}")
        op.handler(connection, frame, asked, now)

    def _stats(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "stats"}`: counters and sizes."""
        mailbox, connections = self._bus.mailbox, self._bus.presence.connections
        places = mailbox.places
        body = {
            "broker": self._bus.broker_id,
            "counters": dict(self._bus.counters),
            "connections": {name: len(connections[cls]) for cls, name in enumerate(CLASSES)},
            "instances": len(mailbox.instances),
            "events": len(mailbox.events),
            "mailboxBytes": mailbox.held.held,
            "openCalls": len(self._bus.calls),
            "openEvents": mailbox.open.held,
            "places": {
                "all": places.pool.capacity,
                "held": places.pool.held,
                "lent": places.lent,
                "waiting": places.waiting,
            },
        }
        self._bus.reply(connection, frame.id, body)

    def _peers(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "peers"}`: agents and tool hosts. `gdn ps` shows them for a kernel without a supervisor."""
        connections = self._bus.presence.connections
        peers = [
            {
                "role": CLASSES[cls],
                "name": peer.claims.agent or "1",
                "instanceKey": peer.claims.instance_key,
                "pid": peer.pid,
                "startedMs": peer.started_ms,
            }
            for cls in (AGENTS, TOOLS)
            for peer in list(connections[cls].values())[:MAX_PEERS]
        ]
        self._bus.reply(connection, frame.id, {"peers": peers})


def _named(ops: Iterable[Op]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(op.name for op in ops))
