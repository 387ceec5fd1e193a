"""Has the exporter started when the plan asks for it, and knows how it does. Pure.

The exporter reads what agents store, so nothing of a turn passes here. It says how it does in a `runtime.event` when
that changes, once a second at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from goondan.features.telemetry.wire import TELEMETRY, Exporting
from goondan.kernel.broker.state.bus import Bus, Core
from goondan.kernel.broker.state.entities import Connection
from goondan.kernel.broker.state.parts import SHORT_BYTES, Op, Part, Take
from goondan.schemas.wire.codec import from_raw
from goondan.schemas.wire.control import ProgramWanted
from goondan.schemas.wire.frames import Frame, Hello


def parts(core: Core) -> Sequence[Part]:
    """See parts.MakeParts."""
    return (Exporter(core.bus),)


class Exporter(Part):
    """The exporter, as the broker sees it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        #: What it has said last: nothing, or one row.
        self._said: list[Exporting] = []
        self.takes = (Take((TELEMETRY,), "runtime.event", self.said, SHORT_BYTES),)
        self.ops = (Op(TELEMETRY, self.tell),)

    def here(self, peer: Connection, hello: Hello, now: float) -> None:
        """The supervisor has connected: ask it for the exporter, which may run already."""
        if peer is self._bus.control and TELEMETRY in self._bus.plan.parts:
            self._bus.tell_supervisor(ProgramWanted(TELEMETRY))

    def said(self, connection: Connection, frame: Frame, now: float) -> None:
        """`runtime.event` from the exporter."""
        self._said = [from_raw(frame.payload, Exporting)]

    def tell(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "telemetry"}`: a list of one row, Exporting, or of none."""
        self._bus.reply(connection, frame.id, {TELEMETRY: self._said})
