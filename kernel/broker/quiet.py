"""Pings peers that were silent for a while. Pure.

Rules.
- Pinged are clients and tool hosts, agents that hold something (an event, or answers that they have not acknowledged),
  and agents that no supervisor watches.
- An idle agent under a supervisor costs nothing here. It is watched again when it gets something.
"""

from __future__ import annotations

from typing import Final

from goondan.kernel.broker.bus import Bus
from goondan.kernel.broker.due import Due
from goondan.kernel.broker.entities import CONTROL, Connection
from goondan.kernel.broker.parts import Part
from goondan.schemas.wire.frames import Frame

#: A peer that was silent this long is pinged; an unreachable one is dropped then (seconds).
PING_AFTER_S: Final = 2.0


class QuietPeers(Part):
    """Pings silent peers."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._due: Due[Connection] = Due(lambda connection: True)  # each knows by itself whether it is in here

    def watch(self, connection: Connection) -> None:
        """Watch a peer that was welcomed or got something."""
        if not connection.watched and connection.cls != CONTROL:
            connection.watched = True
            self._due.add(connection.last_seen + PING_AFTER_S, connection)

    def tick(self, now: float) -> None:
        """Ping the peers that are due."""
        for connection in list(self._due.take(now)):  # what is added again is for later
            if not self._matters(connection):
                connection.watched = False
                continue
            if now - connection.last_seen > PING_AFTER_S:
                connection.last_seen = now
                self._bus.send(connection, Frame("ping"))
            self._due.add(max(now, connection.last_seen + PING_AFTER_S), connection)

    def _matters(self, connection: Connection) -> bool:
        """Whether the peer is still connected and must be pinged to find out whether it lives."""
        if self._bus.presence.connections[connection.cls].get(connection.ident) is not connection:
            return False
        instance = connection.instance
        return instance is None or connection.claims.launch == 0 or instance.wanted
