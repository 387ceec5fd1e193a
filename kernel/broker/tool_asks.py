"""What a running call asks of the agent that made it, and the agent's answer. Pure. This is a hot path.

Rules.
- A tool host asks in the name of a call that is open on its connection and whose tool may ask: a server, or a tool
  whose calls make others (the permission `tools`). The question goes to the process that holds the call's event, and
  to nobody else.
- An agent answers for calls of the event that it holds. The answer goes to the tool host that has the call. Which
  question it answers is checked there.
- Payloads are passed on unchanged.
- The first question of a call tells its host whether the call's time stands still because a person is asked. From then
  on the host is told when that changes.
- While the call is not open here, or its agent is away, the tool host is told to ask again: after a reconnect and after
  a restart of the broker, the agent sends its calls again. The tool host stops asking when the call has ended there.

Source: docs/design/wire.md section 4; docs/design/tools.md section 12.
"""

from __future__ import annotations

from goondan.kernel.broker.bus import RETRY_AFTER_MS, Bus
from goondan.kernel.broker.clocks import Clocks
from goondan.kernel.broker.entities import AGENTS, TOOLS, Connection
from goondan.kernel.broker.parts import Part, Take
from goondan.schemas.bundle.address import SEPARATOR
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import encode_value
from goondan.schemas.wire.errors import GoondanError, error_payload
from goondan.schemas.wire.frames import Frame


class ToolAsks(Part):
    """Passes on `tool.ask` and `tool.answer`."""

    def __init__(self, bus: Bus, clocks: Clocks) -> None:
        self._bus = bus
        self._clocks = clocks
        self._may: frozenset[str] = frozenset()
        self.revise(bus.plan)
        self._get = bus.calls.get
        self._out = bus.out
        self.takes = (Take((TOOLS,), "tool.ask", self.ask), Take((AGENTS,), "tool.answer", self.answer))

    def revise(self, plan: KernelPlan) -> None:
        """The tools are those of `plan` from now on."""
        tools = plan.toolhost.tools
        makers = frozenset(tool.name for tool in tools if "tools" in tool.sandbox.permissions)
        self._bus.calls.makers = makers
        self._may = makers.union(tool.name for tool in tools if tool.server is not None or tool.servers)

    def ask(self, connection: Connection, frame: Frame, now: float) -> None:
        """`tool.ask` from a tool host."""
        call = self._get(frame.call_id)
        if call is None or call.host is None:
            raise _later("no such call is open here")
        if call.host is not connection:
            raise GoondanError(error_payload("E_FORBIDDEN", "the call runs in another tool host"))
        if (call.tool or "").partition(SEPARATOR)[0] not in self._may:
            message = f"{str(call.tool)[:100]!r} may ask nothing of the agent that calls it"
            raise GoondanError(error_payload("E_FORBIDDEN", message))
        event = call.event
        instance = event.instance
        if instance.leased is not event or instance.conn is None:
            raise _later("the agent of the call is away")
        if not call.asks:
            call.asks = True
            self._out.append((TOOLS, connection.ident, encode_value(self._clocks.of_call(call))))
        frame.from_ = connection.address
        frame.to = instance.agent
        frame.instance_key = instance.key
        frame.event_id = event.id
        frame.epoch = instance.epoch
        frame.tool = call.tool
        _without_claims(frame)
        self._out.append((AGENTS, instance.conn.ident, encode_value(frame)))

    def answer(self, connection: Connection, frame: Frame, now: float) -> None:
        """`tool.answer` from an agent. An answer for a call that is not its own, or is over, goes nowhere."""
        call, instance = self._get(frame.call_id), connection.instance
        if call is None or call.host is None or instance is None or instance.leased is not call.event:
            self._bus.counters["tool_answers_stray"] += 1
            return
        frame.from_ = instance.agent
        frame.to = None
        frame.instance_key = instance.key
        frame.event_id = frame.epoch = frame.tool = None
        _without_claims(frame)
        self._out.append((TOOLS, call.host.ident, encode_value(frame)))


def _without_claims(frame: Frame) -> None:
    """Remove what the sender may not say."""
    frame.workdir = frame.workdir_base = frame.chain = frame.source = frame.auth = frame.root_event = None


def _later(message: str) -> GoondanError:
    return GoondanError(error_payload("E_OVERLOADED", message, retry_after_ms=RETRY_AFTER_MS))
