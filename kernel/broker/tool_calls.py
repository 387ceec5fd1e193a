"""Tool calls: from an agent to its tool host and back. Pure. This is the hot path.

Everything in `call` and `result` is a dictionary look-up or a comparison; the payload passes as it came.

Rules.
- A call needs the lease of its event, under the current epoch, and a tool that the agent's declaration allows.
- The workdir is the broker's word, from the event or the instance; an agent that names one is refused.
- A repeated callId goes to the host that has it, which attaches or repeats the result; it never runs twice.
- The outcome is unknown only if the host that had the call is gone; a call that no host ever got may run.

Source: delivery.md section 5; sandbox.md section 1.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from kernel.broker.bus import CREDIT, CREDIT_SLACK, MAX_ID, RETRY_AFTER_MS, Bus
from kernel.broker.calls import Call
from kernel.broker.mailbox import Event, Instance
from kernel.broker.presence import AGENTS, TOOLS, Connection
from schemas.codec import encode_value, to_raw
from schemas.errors import GoondanError, error_payload
from schemas.frames import ErrorPayload, Frame


class ToolCalls:
    """The tool-call side of the broker."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._calls = bus.calls
        self._out = bus.out
        self._hosts = bus.presence.connections[TOOLS]

    # --- frames

    def call(self, connection: Connection, frame: Frame, now: float) -> None:
        """`tool.call` from an agent."""
        instance = connection.instance
        call_id = frame.call_id
        event = instance.leased if instance is not None else None
        if event is None or instance is None or event.id != frame.event_id or instance.epoch != frame.epoch:
            raise GoondanError(error_payload("E_LEASE_LOST", "a call needs the lease of its event"))
        if frame.tool not in connection.allowed or frame.workdir is not None:
            raise _forbidden(instance, frame)
        calls = event.calls
        if call_id in calls:
            call = self._repeat(event, call_id, frame, now)
        else:
            call = self._new_call(connection, event, call_id, frame, now)
        frame.from_ = instance.agent
        frame.to = None
        frame.instance_key = instance.key
        frame.workdir = event.workdir or instance.workdir
        frame.chain = event.chain
        frame.source = frame.auth = None
        host = call.host or instance.host or self._host_for(instance)
        if host is None:
            self._calls.wait(call, encode_value(frame))
            return
        if call.lost or self._may_have_run(call, frame, host):
            self.fail(call, "E_TOOL_OUTCOME_UNKNOWN", "the tool host ended during the call")
            return
        call.host = host
        self._out.append((TOOLS, host.ident, encode_value(frame)))

    def _new_call(self, connection: Connection, event: Event, call_id: str | None, frame: Frame, now: float) -> Call:
        if not call_id or len(call_id) > MAX_ID:
            raise GoondanError(error_payload("E_FRAME_INVALID", f"a call needs a callId of 1 to {MAX_ID} characters"))
        if event.open_calls > CREDIT + CREDIT_SLACK:
            self._bus.counters["overloaded"] += 1
            info = error_payload("E_OVERLOADED", "too many calls are open", retry_after_ms=RETRY_AFTER_MS)
            raise GoondanError(info)
        if self._calls.get(call_id) is not None:
            raise GoondanError(error_payload("E_FORBIDDEN", "the callId is in use"))
        event.progressed = True
        call = Call(call_id, event, frame.tool, frame.deadline_ms, now)
        self._calls.add(call)
        return call

    def _repeat(self, event: Event, call_id: str | None, frame: Frame, now: float) -> Call:
        """The same call again: after a reconnect, or by the agent's next process."""
        call = self._calls.get(call_id or "")
        if call is None:  # its result was passed on, and lost on the way: the host has kept it
            call = Call(call_id or "", event, frame.tool, frame.deadline_ms, now)
            self._calls.add(call)
        return call

    def _may_have_run(self, call: Call, frame: Frame, host: Connection) -> bool:
        """Whether an earlier tool host could have had the call: it is older than this broker and this host."""
        sent = frame.first_sent_ms
        return call.host is None and sent is not None and sent < self._bus.started_ms and sent < host.started_ms

    def result(self, connection: Connection, frame: Frame, now: float) -> None:
        """`tool.result` from a tool host."""
        call = self._calls.get(frame.call_id)
        if call is None or call.host is not connection:
            self._bus.counters["results_stray"] += 1
            return  # late (the caller gave up, the event ended) or foreign: nobody waits for it
        self._calls.remove(call)
        instance = call.event.instance
        target = instance.conn
        if target is None:
            return  # the host keeps the result until the agent is back and asks again
        frame.from_ = connection.address
        frame.to = instance.agent
        frame.instance_key = instance.key
        frame.workdir = frame.chain = frame.source = frame.auth = None
        self._out.append((AGENTS, target.ident, encode_value(frame)))

    def progress(self, connection: Connection, frame: Frame, now: float) -> None:
        """`tool.progress` from a tool host: lossy, only for a call that runs there."""
        call = self._calls.get(frame.call_id or "")
        if call is not None and call.host is connection and call.event.instance.conn is not None:
            frame.from_ = connection.address
            frame.to = call.event.instance.agent
            frame.instance_key = call.event.instance.key
            self._bus.send(call.event.instance.conn, frame)

    def cancel(self, connection: Connection, frame: Frame, now: float) -> None:
        """`tool.cancel` from an agent; the result says whether it came in time."""
        call = self._calls.get(frame.call_id or "")
        if call is None or call.event.instance is not connection.instance:
            return
        if call.host is None:
            self.fail(call, "E_CANCELLED", "the call was cancelled before it started")
        else:
            self._bus.send(call.host, Frame("tool.cancel", call_id=call.id))

    def stored(self, instance: Instance, frame: Frame) -> None:
        """The agent has stored results: its host need not keep them."""
        if instance.host is not None and frame.calls:
            self._bus.send(instance.host, Frame("ack", stage="result", calls=frame.calls))

    # --- hosts

    def host_here(self, connection: Connection, old: Connection | None) -> None:
        """A tool host was welcomed; `old` is the connection it replaces."""
        if old is not None and old.incarnation == connection.incarnation:
            for call in self._calls.of_host(old):
                call.host = connection
        elif old is not None:
            self.host_lost(old)
        if old is not None:
            self._unbind(old)
        for call in self._calls.take_waiting():
            call.host = call.event.instance.host = connection
            self._out.append((TOOLS, connection.ident, call.data))
            call.data = b""

    def host_lost(self, host: Connection) -> None:
        """A tool host is gone: what it ran has an unknown outcome."""
        self._bus.presence.drop(host)
        self._unbind(host)
        for call in self._calls.of_host(host):
            call.host = None
            if call.event.instance.conn is None:
                call.lost = True  # its agent is told when it asks again
            else:
                self.fail(call, "E_TOOL_OUTCOME_UNKNOWN", "the tool host ended during the call")

    def no_host(self, reason: str) -> None:
        """No tool host can be started: what waits for one has not run and will not."""
        for call in self._calls.take_waiting():
            self.fail(call, "E_SANDBOX_UNAVAILABLE", f"no tool host could be started: {reason}")

    def _host_for(self, instance: Instance) -> Connection | None:
        """The tool host of an instance: the same one while it lives, so that the instance's jails stay warm."""
        if instance.host is None and self._hosts:
            load = Counter(i.host.address for i in self._bus.mailbox.instances.values() if i.host is not None)
            instance.host = min(self._hosts.values(), key=lambda host: (load[host.address], host.address))
        return instance.host

    def _unbind(self, host: Connection) -> None:
        for instance in self._bus.mailbox.instances.values():
            if instance.host is host:
                instance.host = None

    # --- ends

    def fail(self, call: Call, code: str, message: str) -> None:
        """End a call with an error result of the broker's own."""
        self._calls.remove(call)
        target = call.event.instance.conn
        if target is not None:
            error = _tool_error(error_payload(code, f"{call.tool}: {message}"))
            frame = Frame("tool.result", call_id=call.id, to=call.event.instance.agent)
            frame.payload = to_raw({"status": "error", "error": error})
            self._bus.send(target, frame)

    def drop(self, event: Event) -> None:
        """The event has ended: what it still has open is cancelled."""
        for call_id in event.calls if event.open_calls else ():
            call = self._calls.get(call_id)
            if call is not None:
                self._calls.remove(call)
                if call.host is not None:
                    self._bus.send(call.host, Frame("tool.cancel", call_id=call_id))

    def tick(self, now: float) -> None:
        """Calls that wait for a tool host end at their deadline."""
        for call in self._calls.expired(now):
            self.fail(call, "E_TOOL_TIMEOUT", "no tool host took the call before its deadline")


def _forbidden(instance: Instance, frame: Frame) -> GoondanError:
    if frame.workdir is not None:
        return GoondanError(error_payload("E_FORBIDDEN", "an agent may not name a workdir"))
    message = f"the declaration of {instance.agent!r} does not allow {str(frame.tool)[:100]!r}"
    return GoondanError(error_payload("E_FORBIDDEN", message))


def _tool_error(info: ErrorPayload) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(info)
    fields.pop("retryAfterMs", None)
    return {"name": "ToolHostError", **fields}
