"""Tells operators that the list of waiting items has changed, and that their decisions are journaled. Pure."""

from __future__ import annotations

from goondan.kernel.broker.approvals.items import Item
from goondan.kernel.broker.bus import Bus, Lossy
from goondan.kernel.broker.entities import CLIENTS, Connection
from goondan.kernel.broker.parts import Part
from goondan.schemas.wire.codec import encode_value, to_raw
from goondan.schemas.wire.frames import Frame


class OperatorNews(Part):
    """The connections of operators that watch the list."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._watchers: dict[bytes, Connection] = {}

    def watch(self, connection: Connection) -> None:
        """Tell this connection of every change from now on."""
        self._watchers[connection.ident] = connection

    def changed(self) -> None:
        """Tell watchers that the list has changed. This may be lost: they ask for the list at every connect."""
        for connection in self._watchers.values():
            if self._is_here(connection):
                data = encode_value(Frame("approval.news", id=self._bus.next_id()))
                self._bus.out.append((CLIENTS, connection.ident, Lossy(data)))

    def tell_decision(self, connection: Connection, frame_id: str, item: Item) -> None:
        """Tell an operator the state of the item that he or she has decided about."""
        decided = item.decided
        body = {"id": item.id, "code": item.code, "state": item.state if decided is None else decided.how}
        self._bus.send(connection, Frame("reply", in_reply_to=frame_id, payload=to_raw(body)))

    def tick(self, now: float) -> None:
        """Forget connections that are gone."""
        for ident, connection in list(self._watchers.items()):
            if not self._is_here(connection):
                del self._watchers[ident]

    def _is_here(self, connection: Connection) -> bool:
        return self._bus.presence.connections[CLIENTS].get(connection.ident) is connection
