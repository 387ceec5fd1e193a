"""The `admin` frames of clients: one table of the ops that parts answer, and answers about the broker itself. Pure.

Some ops are for everybody, the others for operators.

Source: PROTOCOL.md "Ask".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from goondan.kernel.broker.state.bus import Bus
from goondan.kernel.broker.state.entities import AGENTS, CLASSES, CLIENTS, TOOLS, Connection
from goondan.kernel.broker.state.parts import Op, Part, Take
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import fail
from goondan.schemas.wire.frames import Frame

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
        asked = from_raw(frame.payload, dict)
        name = asked.get("op")
        if not isinstance(name, str):
            raise fail("E_FRAME_INVALID", "admin names its `op`, a text")
        op = self._ops.get(name)
        if op is None or not (op.for_all or connection.claims.operator):
            for_all, of_operators = (
                _named(op for op in self._ops.values() if op.for_all is everybody) for everybody in (True, False)
            )
            raise fail("E_FRAME_INVALID", f"admin knows the ops {for_all} and, for operators, {of_operators}")
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
            "mailboxBytes": mailbox.bytes,
            "openCalls": len(self._bus.calls),
            "openEvents": mailbox.open.held,
            "places": {
                "all": places.pool.capacity,
                "held": places.pool.held,
                "lent": places.lent,
                "waiting": places.waiting,
            },
        }
        self._bus.send(connection, Frame("reply", in_reply_to=frame.id, payload=to_raw(body)))

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
        self._bus.send(connection, Frame("reply", in_reply_to=frame.id, payload=to_raw({"peers": peers})))


def _named(ops: Iterable[Op]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(op.name for op in ops))
