"""The `admin` frames of clients: one table of the ops, and the broker's answers about itself. Pure.

`stats` and `cancel` are for everybody, the other ops for operators. The module that knows about an op answers it.

Source: PROTOCOL.md "Ask".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from goondan.kernel.broker.approvals.operators import Operators
from goondan.kernel.broker.budgets.desk import Budgets
from goondan.kernel.broker.bus import Bus
from goondan.kernel.broker.cancels import Cancels
from goondan.kernel.broker.dead_letters import DeadLetters
from goondan.kernel.broker.deletions import Deletions
from goondan.kernel.broker.entities import AGENTS, CLASSES, TOOLS, Connection
from goondan.kernel.broker.fresh import FreshStarts
from goondan.kernel.broker.gate.desk import Gates
from goondan.kernel.broker.live_config.service import LiveConfigs
from goondan.kernel.broker.oauth import OPS, TokenOrders
from goondan.kernel.broker.waits import Waits
from goondan.schemas.codec import from_raw, to_raw
from goondan.schemas.errors import GoondanError, error_payload
from goondan.schemas.frames import Frame

#: At most so many peers of one class are in one answer, because it must fit in one frame.
MAX_PEERS: Final = 4096
#: All ops of live configuration. They have one handler, which tells them apart.
_CONFIG: Final = "config."

#: The handler of one op. Its arguments: the asking connection, the frame, its payload, the time.
Op = Callable[[Connection, Frame, dict[str, Any], float], None]


class Administration:
    """Passes each `admin` frame to its handler."""

    def __init__(
        self,
        bus: Bus,
        *,
        approvals: Operators,
        budgets: Budgets,
        cancels: Cancels,
        configs: LiveConfigs,
        dead: DeadLetters,
        deletions: Deletions,
        fresh: FreshStarts,
        gates: Gates,
        tokens: TokenOrders,
    ) -> None:
        self._bus = bus
        self._waits = Waits(bus, budgets, gates)
        self._of_all: dict[str, Op] = {
            "stats": self._stats,
            "cancel": lambda who, frame, asked, now: cancels.ask(who, frame, asked.get("eventId"), now),
        }
        self._of_operators: dict[str, Op] = {
            **self._of_all,
            "peers": self._peers,
            "why": lambda who, frame, asked, now: self._waits.tell(who, frame, asked.get("eventId"), now),
            "gates": lambda who, frame, asked, now: gates.tell(who, frame, asked.get("forget") is True, now),
            "events": lambda who, frame, asked, now: cancels.list_events(
                who, frame, asked.get("agent"), asked.get("instanceKey"), now
            ),
            "budget": _about_event(budgets.tell),
            "dead.list": _about_event(dead.list),
            "dead.show": _about_event(dead.show),
            "dead.requeue": _about_event(dead.requeue),
            "dead.drop": _about_event(dead.drop),
            "approve.list": approvals.listed,
            "approve.show": approvals.show,
            "approve.watch": approvals.watch,
            "approve.answer": approvals.answer,
            "instance.delete": deletions.ask,
            "generation": fresh.tell,
            _CONFIG: configs.ask,
            **dict.fromkeys(OPS, tokens.administer),
        }

    def ask(self, connection: Connection, frame: Frame, now: float) -> None:
        """`admin` with `{op, …}`. Raises GoondanError E_FRAME_INVALID for an op that this client cannot ask for."""
        asked = from_raw(frame.payload, dict)
        op = asked.get("op")
        if not isinstance(op, str):
            raise GoondanError(error_payload("E_FRAME_INVALID", "admin names its `op`, a text"))
        ops = self._of_operators if connection.claims.operator else self._of_all
        answer = ops.get(_CONFIG if op.startswith(_CONFIG) else op)
        if answer is None:
            message = (
                "admin knows the ops `stats` and `cancel` and, for operators, `peers`, `events`, `why`, `gates`, "
                "`budget`, `dead.*`, `auth.*`, `approve.*`, `config.*`, `generation` and `instance.delete`"
            )
            raise GoondanError(error_payload("E_FRAME_INVALID", message))
        answer(connection, frame, asked, now)

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


def _about_event(answer: Callable[[Connection, Frame, Any], None]) -> Op:
    """An op whose only argument is `eventId`."""
    return lambda connection, frame, asked, now: answer(connection, frame, asked.get("eventId"))
