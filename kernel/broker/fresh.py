"""Lets conversations begin again: `gdn restart --fresh`. Pure.

An agent's generation is a number that grows with each fresh start of its conversations. `welcome` has it. An instance
whose file has an earlier generation puts its conversation aside when the file is opened next
(agentproc/conversation_format.py). So the broker need not find and change instances without a process, however many
there are.

The number is the wall clock's milliseconds, or one more than the last. So it grows also after a journal was lost.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from goondan.kernel.broker.bus import Bus
from goondan.kernel.broker.entities import AGENTS, Connection
from goondan.kernel.broker.parts import Op, Part, Record
from goondan.kernel.broker.restart_wishes import FreshStart, fresh_written
from goondan.schemas.codec import to_raw
from goondan.schemas.control import BeginAnew, BegunAnew
from goondan.schemas.errors import fail
from goondan.schemas.frames import Frame

#: Stands for all agents.
EVERY: Final = ""


class FreshStarts(Part):
    """The generations of all agents."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.ops = (Op("generation", self.tell),)
        self.records = (Record(FreshStart, self._restore),)
        self.hears = {BeginAnew: self.begin}

    def begin(self, message: BeginAnew, now: float) -> None:
        """The supervisor's request: conversations of an agent, or of all, begin again with their next process."""
        bus = self._bus
        number = max(int((bus.booted_at + now) * 1000), self.of(message.agent) + 1)
        bus.generations[message.agent] = number
        bus.stage(fresh_written(message.agent, number), partial(self._journaled, message.agent))

    def tell(self, connection: Connection, frame: Frame, asked: dict[str, Any], now: float) -> None:
        """`{op: "generation", agent}`: the generation of the agent's conversations, 0 before the first fresh start."""
        agent = asked.get("agent")
        if not isinstance(agent, str):
            raise fail("E_FRAME_INVALID", "admin generation needs an agent")
        body = {"generation": self.of(agent)}
        self._bus.send(connection, Frame("reply", in_reply_to=frame.id, payload=to_raw(body)))

    def _restore(self, subject: str, record: FreshStart) -> None:
        self._bus.generations[record.agent] = record.generation

    def welcome(self, peer: Connection) -> dict[str, Any]:
        """The generation of the agent's conversations."""
        return {"generation": self.of(peer.claims.agent or "")} if peer.cls == AGENTS else {}

    def _journaled(self, agent: str, kept: bool) -> None:
        """The journal has the new generation."""
        self._bus.tell_supervisor(BegunAnew(agent))

    def of(self, agent: str) -> int:
        """The generation of an agent's conversations."""
        known = self._bus.generations
        return max(known.get(agent, 0), known.get(EVERY, 0))
