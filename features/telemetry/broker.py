"""Has the exporter started when the plan asks for it, and knows how it does. Pure.

The exporter reads what agents store, so nothing of a turn passes here. It says how it does in a `runtime.event` when
that changes, once a second at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from goondan.features.telemetry.wire import TELEMETRY, Exporting
from goondan.kernel.broker.state.bus import Bus, Core
from goondan.kernel.broker.state.entities import CONTROL, Connection
from goondan.kernel.broker.state.parts import SHORT_BYTES, Op, Part, Take
from goondan.schemas.bundle.launch import KernelPlan
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
        self._wanted = TELEMETRY in bus.plan.parts
        #: The exporter, if it is connected, and what it said last.
        self._peer: Connection | None = None
        self._said: Exporting | None = None
        self.takes = (Take((TELEMETRY,), "runtime.event", self.said, SHORT_BYTES),)
        self.ops = (Op(TELEMETRY, self.tell),)

    def revise(self, plan: KernelPlan) -> None:
        """The environment of a kernel stays, and so does its wish to export."""
        self._wanted = TELEMETRY in plan.parts
        self._ask_for_it()

    def here(self, peer: Connection, hello: Hello, now: float) -> None:
        """The supervisor has connected: ask it for the exporter. Or that has connected."""
        if peer.cls == CONTROL and peer.claims.agent == TELEMETRY:
            self._peer = peer
        elif peer is self._bus.control:
            self._ask_for_it()

    def gone(self, peer: Connection, now: float) -> None:
        """The exporter may be gone: the supervisor starts it again. What it had said stays."""
        if peer is self._peer:
            self._peer = None

    def said(self, connection: Connection, frame: Frame, now: float) -> None:
        """`runtime.event` from the exporter."""
        self._said = from_raw(frame.payload, Exporting)

    def tell(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "telemetry"}`: a list of one row, Exporting with `connected`, or of none."""
        rows = []
        if self._wanted:
            said = {} if self._said is None else msgspec.to_builtins(self._said)
            rows.append({**said, "connected": self._peer is not None})
        self._bus.reply(connection, frame.id, {TELEMETRY: rows})

    def _ask_for_it(self) -> None:
        if self._wanted and self._peer is None and self._bus.control is not None:
            self._bus.tell_supervisor(ProgramWanted(TELEMETRY))
