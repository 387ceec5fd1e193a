"""Tool calls: from an agent to its tool host and back, and what a running call asks of its agent. Pure. The hot path.

Everything in `call` and `result` is a dictionary look-up or a comparison. Payloads are passed on unchanged.

Rules.
- A call needs the lease of its event, under the current epoch, and a tool that the agent's declaration allows.
- The broker sets the workdir, from the event or the instance. An agent that names one is refused.
- A repeated callId goes to the tool host that has the call. The host attaches it to the call, or repeats the result. A
  call never runs twice.
- The outcome is unknown only if the host that had the call is gone. A call that no host ever got may run.
- A tool host asks in the name of a call that is open on its connection and whose tool may ask: a server, or a tool
  whose calls make others (the permission `tools`). The question goes to the process that holds the call's event, and to
  nobody else. An agent answers for calls of the event that it holds. Which question it answers is checked by the tool
  host.
- The first question of a call tells its host whether the call's time stands still because a person is asked. From then
  on the host is told when that changes.
- While the call is not open here, or its agent is away, the tool host is told to ask again: after a reconnect and after
  a restart of the broker, the agent sends its calls again. The tool host stops asking when the call has ended there.

Source: docs/design/delivery.md section 6; docs/design/wire.md section 4; docs/design/sandbox.md section 1.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

import msgspec

from goondan.kernel.broker.state.bus import (
    CREDIT,
    CREDIT_SLACK,
    MAX_ID,
    RETURN_S,
    Bus,
    Clocks,
    outer_call,
    overloaded,
)
from goondan.kernel.broker.state.entities import AGENTS, TOOLS, Call, Connection, Event, Instance, Work
from goondan.kernel.broker.state.parts import Hooks, OfCalls, OfHosts, Part, Take
from goondan.kernel.broker.state.workdirs import Workdir, check_opened
from goondan.schemas.bundle.address import SEPARATOR, is_name
from goondan.schemas.bundle.effective_config import server_of
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import encode_value, to_raw
from goondan.schemas.wire.errors import error_payload, fail
from goondan.schemas.wire.frames import Blob, ErrorPayload, Frame, Source


def refuse_call(bus: Bus, connection: Connection, frame: Frame, info: ErrorPayload) -> None:
    """Answer a call that is not made with an error result."""
    refused = _failed(frame.call_id, connection.claims.agent, info)
    refused.in_reply_to = frame.id
    bus.send(connection, refused)


def _failed(call_id: str | None, agent: str | None, info: ErrorPayload) -> Frame:
    """The result of a call that is not made, or has failed outside of its tool host."""
    error = {"name": "ToolHostError", **msgspec.to_builtins(info)}
    error.pop("retryAfterMs", None)
    return Frame("tool.result", call_id=call_id, to=agent, payload=to_raw({"status": "error", "error": error}))


#: Calls of one event that may be open: the agent's credit, and frames that may have crossed a change of it.
_MAX_OPEN: Final = CREDIT + CREDIT_SLACK
#: Calls of one event that are remembered after their end. Agents say which results they have stored, and these calls
#: are forgotten. So this bound is for agents that do not say it: the oldest calls are forgotten first.
MAX_REMEMBERED: Final = 4096
#: The part of them that is forgotten at a time. A dictionary finds its first key behind the places of all keys that
#: were deleted before, so forgetting them one by one takes longer each time.
FORGOTTEN_PART: Final = 1 / 16
#: Cancelled calls unknown to a new broker: so many are remembered for tool hosts that are not back yet.
MAX_EARLY: Final = 4096
#: Stands for the tool host of a call whose outcome is unknown. No incarnation is empty.
_LOST: Final = ""


class ToolCalls(Part, OfHosts):
    """The part of the broker that passes on tool calls."""

    def __init__(self, bus: Bus, clocks: Clocks, call_ended: Callable[[Event, str], None], hooks: Hooks) -> None:
        self._bus = bus
        self._admits = hooks.of(OfCalls, OfCalls.admits)
        self._opens = hooks.of(OfCalls, OfCalls.opens)
        self._stored = hooks.of(OfCalls, OfCalls.stored)
        self._overs = hooks.of(OfCalls, OfCalls.over)
        self._keeps = hooks.of(OfCalls, OfCalls.keeps)
        self._call_ended = call_ended
        self._clocks = clocks
        self._calls = bus.calls
        self._get = bus.calls.get
        self._out = bus.out
        self._hosts = bus.presence.connections[TOOLS]
        self._assigned = bus.mailbox.hosts
        self.takes = (
            Take((AGENTS,), "tool.call", self.call, confined="no"),
            Take((AGENTS,), "tool.cancel", self.cancel),
            Take((TOOLS,), "tool.result", self.result),
            Take((TOOLS,), "tool.progress", self.progress),
            Take((TOOLS,), "tool.completed", self.completed),
            Take((TOOLS,), "tool.ask", self.ask),
            Take((AGENTS,), "tool.answer", self.answer),
        )
        #: The tools whose calls may ask their agent.
        self._may: frozenset[str] = frozenset()
        self.revise(bus.plan)
        #: Cancelled calls that are not known here, for tool hosts that come back in this broker's first seconds.
        self._early: list[tuple[Instance, str]] = []

    # --- frames

    def call(self, connection: Connection, frame: Frame, now: float) -> None:
        """`tool.call` from an agent."""
        instance = connection.instance
        event = instance.leased if instance is not None else None
        if event is None or instance is None or event.id != frame.event_id or instance.epoch != frame.epoch:
            raise fail("E_LEASE_LOST", "a call needs the lease of its event")
        work = event.work
        work.moved(frame.position)
        if frame.tool not in connection.allowed and server_of(frame.tool, connection.servers) is None:
            message = f"the declaration of {instance.agent!r} does not allow {str(frame.tool)[:100]!r}"
            raise fail("E_FORBIDDEN", message)
        if frame.workdir is not None:
            raise fail("E_FORBIDDEN", "an agent may not name a workdir")
        content = event.content
        place = instance.workdir if content.workdir is None else Workdir(content.workdir)
        if place.beneath is not None:
            check_opened(place, self._bus.plan.spawn_workdirs)
        frame.attach = False
        if frame.within is not None:
            outer_call(self._bus, event, frame.within)
        for admits in self._admits:
            if not admits(connection, event, frame, place, now):
                return
        call_id = frame.call_id
        call = self._get(call_id)
        if call is None:
            call = self._open(event, work, call_id, frame, now)
        elif call.event is not event:
            raise fail("E_FORBIDDEN", "the callId is in use")
        else:
            call.frame_id = frame.id  # the process that waits now may be another one than the first
        frame.from_ = instance.agent
        frame.to = None
        frame.instance_key = instance.key
        frame.workdir = place.path
        frame.workdir_base = None if place.beneath is None else place.beneath.base
        frame.chain = content.chain
        frame.root_event = event.root
        frame.trace_id = content.trace_id
        frame.source = frame.auth = frame.step = frame.position = None
        host = instance.host or self._assigned.host_for(instance, self._hosts.values())
        if host is None:
            self._calls.wait(call, encode_value(frame))
            return
        given_to = work.calls
        had = given_to[call.id]
        if (had is not None or call.sent_before is not None) and self._may_have_run(call, had, host):
            self._outcome_unknown(call)
            return
        given_to[call.id] = host.incarnation
        call.host = host
        self._out.append((TOOLS, host.ident, encode_value(frame)))

    def _open(self, event: Event, work: Work, call_id: str | None, frame: Frame, now: float) -> Call:
        """Open a call: a new one, or one whose result was sent and lost on the way."""
        if not call_id or not is_name(call_id, MAX_ID):
            raise fail("E_FRAME_INVALID", f"a call needs a callId of 1 to {MAX_ID} visible characters")
        if work.open_calls > _MAX_OPEN:
            self._bus.counters["overloaded"] += 1
            raise overloaded("too many calls are open")
        call = Call(call_id, event, frame.id, frame.tool, frame.deadline_ms, now)
        for opens in self._opens:
            opens(call, frame, now)
        call.deadline_ms = frame.deadline_ms  # a part may have shortened it
        if frame.blob is not None:
            self._take_large(call, frame.blob)
        if len(work.calls) >= MAX_REMEMBERED + work.open_calls:
            self._forget_oldest(event)
        work.calls.setdefault(call_id, None)
        work.step = frame.step or work.step
        first_sent = frame.first_sent_ms
        if first_sent is not None and first_sent < self._bus.started_ms:
            # The call is older than this broker: it is not known here which host got it, if any.
            call.sent_before = first_sent
        self._calls.open[call_id] = call
        work.open_calls += 1
        return call

    def _over(self, event: Event, call_id: str) -> None:
        for over in self._overs if event.standing is not None else ():
            over(event, call_id)

    def _may_forget(self, event: Event, call_id: str) -> bool:
        """Whether an ended call may be forgotten."""
        if self._get(call_id) is not None:
            return False
        return event.standing is None or not any(keeps(event, call_id) for keeps in self._keeps)

    def _forget_oldest(self, event: Event) -> None:
        known = event.work.calls
        ended = (call_id for call_id in known if self._may_forget(event, call_id))
        for call_id in list(islice(ended, max(1, int(MAX_REMEMBERED * FORGOTTEN_PART)))):
            del known[call_id]

    def _take_large(self, call: Call, blob: Blob) -> None:
        """Count arguments by reference. Their sum is bounded, because a tool host reads them into its memory."""
        event = call.event
        refusal = self._bus.shortage(self._calls.large, event, blob.size, "bytes of large arguments")
        if refusal is not None:
            self._bus.counters["overloaded"] += 1
            raise overloaded(refusal)
        call.large = blob.size
        self._calls.large.take(event.session, event.root, blob.size)

    def _may_have_run(self, call: Call, had: str | None, host: Connection) -> bool:
        """Whether a host other than `host` could have had the call. `had` is the host that is known to have had it."""
        if had is not None:
            return had != host.incarnation
        if call.id in host.calls:  # it has waited for this one, and the broker that gave it to it is gone
            return False
        return call.sent_before is not None and call.sent_before < host.started_ms

    def result(self, connection: Connection, frame: Frame, now: float) -> None:
        """`tool.result` from a tool host."""
        call = self._get(frame.call_id)
        if call is None or call.host is not connection:
            self._bus.counters["results_stray"] += 1
            return  # late (the caller gave up, the event ended) or foreign: nobody waits for it
        event = call.event
        work = event.work
        del self._calls.open[call.id]
        work.open_calls -= 1
        if call.large:
            self._calls.forget_large(call)
        if work.requests:
            self._call_ended(event, call.id)
        if call.asks:
            self._over(event, call.id)
        instance = event.instance
        target = instance.conn
        if target is None:
            return  # the host keeps the result until the agent is back and asks again
        frame.from_ = connection.address
        frame.to = instance.agent
        frame.instance_key = instance.key
        frame.workdir = frame.workdir_base = frame.chain = frame.source = frame.auth = frame.root_event = None
        frame.passed_us = [int(call.began * 1e6), int(now * 1e6)]
        self._out.append((AGENTS, target.ident, encode_value(frame)))

    def progress(self, connection: Connection, frame: Frame, now: float) -> None:
        """`tool.progress` from a tool host. It may be lost, and is only for a call that runs there."""
        call = self._calls.get(frame.call_id or "")
        if call is not None and call.host is connection and call.event.instance.conn is not None:
            frame.from_ = connection.address
            frame.to = call.event.instance.agent
            frame.instance_key = call.event.instance.key
            frame.root_event = None
            if frame.stage is not None:  # it waits for its jail, or no longer does
                call.jail_since = now if frame.stage == "waits" else None
                return
            self._bus.send(call.event.instance.conn, frame)

    def completed(self, connection: Connection, frame: Frame, now: float) -> None:
        """`tool.completed` from a tool host: news for a running turn, before the event that says the same. It may be
        lost, and goes only to an instance that this host serves.
        """
        instance = self._bus.mailbox.instances.get((frame.to or "", frame.instance_key or ""))
        if instance is None or instance.conn is None or instance.host is not connection:
            self._bus.counters["completions_unheard"] += 1
            return
        frame.from_ = connection.address
        frame.source = Source("tool", connection.address)
        frame.workdir = frame.workdir_base = frame.chain = frame.auth = None
        self._bus.send(instance.conn, frame)

    def cancel(self, connection: Connection, frame: Frame, now: float) -> None:
        """`tool.cancel` from an agent. The call's result tells whether the cancel came in time."""
        instance, call_id = connection.instance, frame.call_id or ""
        call = self._calls.get(call_id)
        if instance is not None and instance.leased is not None:
            self._over(instance.leased, call_id)
        if call is None and instance is not None and len(call_id) <= MAX_ID:
            self._cancel_unknown(instance, call_id)
        if call is None or call.event.instance is not instance:
            return
        if call.host is None:
            if call.sent_before is not None:  # a host that is not back yet may run it
                self._cancel_unknown(call.event.instance, call_id)
            self.fail(call, "E_CANCELLED", "the call was cancelled before it started")
        else:
            self._bus.send(call.host, _cancel(instance, call_id))

    def _cancel_unknown(self, instance: Instance, call_id: str) -> None:
        """Cancel a call that is older than this broker and that its agent has not sent again. Its host knows whose call
        it is.
        """
        for host in [instance.host] if instance.host is not None else self._hosts.values():
            self._bus.send(host, _cancel(instance, call_id))
        if self._bus.now - self._bus.started_ms / 1000 < RETURN_S and len(self._early) < MAX_EARLY:
            self._early.append((instance, call_id))  # for hosts that are not back yet

    def stored(self, instance: Instance, frame: Frame) -> None:
        """The agent has stored results: its host need not keep them."""
        event = instance.leased
        if event is not None and frame.calls:
            for stored in self._stored:
                stored(event, frame.calls)
            for call_id in frame.calls:
                if self._may_forget(event, call_id):
                    event.work.calls.pop(call_id, None)
        if instance.host is not None and frame.calls:
            self._bus.send(instance.host, Frame("ack", stage="result", calls=frame.calls))

    # --- what a running call asks of its agent

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
            raise overloaded("no such call is open here")
        if call.host is not connection:
            raise fail("E_FORBIDDEN", "the call runs in another tool host")
        if (call.tool or "").partition(SEPARATOR)[0] not in self._may:
            raise fail("E_FORBIDDEN", f"{str(call.tool)[:100]!r} may ask nothing of the agent that calls it")
        event = call.event
        instance = event.instance
        if instance.leased is not event or instance.conn is None:
            raise overloaded("the agent of the call is away")
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

    # --- hosts

    def host_here(self, connection: Connection) -> None:
        """A tool host was welcomed: with its first connection, with another one, or as the successor of a lost host."""
        for call in self._calls.given_to(connection.address, lambda host: host is not connection):
            if call.host is not None and call.host.incarnation == connection.incarnation:
                self._ask_again(call)
            else:
                self._outcome_unknown(call)
        self._assigned.release_all(connection.address)
        for instance, call_id in self._early:
            self._bus.send(connection, _cancel(instance, call_id))
        for call in self._calls.take_waiting():
            data, call.data = call.data, b""
            if self._may_have_run(call, call.event.work.calls[call.id], connection):
                self._outcome_unknown(call)
                continue
            call.host = connection
            self._assigned.assign(call.event.instance, connection)
            call.event.work.calls[call.id] = connection.incarnation
            self._out.append((TOOLS, connection.ident, data))

    def _ask_again(self, call: Call) -> None:
        """Have the agent send a call again: the call or its result may be lost with the host's old connection."""
        self._calls.remove(call)
        self._calls.back_by = self._bus.now + RETURN_S
        target = call.event.instance.conn
        if target is not None:
            info = error_payload("E_OVERLOADED", "the tool host's connection broke", retry_after_ms=1)
            frame = Frame("error", in_reply_to=call.frame_id, call_id=call.id, payload=to_raw(info))
            self._bus.send(target, frame)

    def host_unreachable(self, host: Connection) -> None:
        """A tool host's connection broke: new calls wait until the host or its successor is back."""
        self._bus.presence.drop(host)
        self._assigned.release_all(host.address, lambda served_by: served_by is host)

    def host_lost(self, host: Connection, now: float) -> None:
        """A tool host is gone: the outcome of its calls is unknown."""
        self.host_unreachable(host)
        for call in self._calls.given_to(host.address, lambda one: one is host):
            self._outcome_unknown(call)

    def host_ended(self, address: str, launch: int, now: float) -> None:
        """The supervisor saw a tool host end. Its connection may be unknown here."""
        for call in self._calls.given_to(address, lambda host: host.claims.launch <= launch):
            self._outcome_unknown(call)
        self._assigned.release_all(address, lambda host: host.claims.launch <= launch)

    def no_host(self, reason: str) -> None:
        """No tool host can be started: waiting calls have not run and will not run."""
        for call in self._calls.take_waiting():
            self.fail(call, "E_SANDBOX_UNAVAILABLE", f"no tool host could be started: {reason}")

    # --- ends

    def _outcome_unknown(self, call: Call) -> None:
        """The host that had the call is gone. The outcome stays unknown: the callId never runs in another host."""
        call.event.work.calls[call.id] = _LOST
        self.fail(call, "E_TOOL_OUTCOME_UNKNOWN", "the tool host ended during the call")

    def fail(self, call: Call, code: str, message: str) -> None:
        """End a call with an error result of the broker. An agent that is away is told when it asks again."""
        self._calls.remove(call)
        self._call_ended(call.event, call.id)
        if call.asks:
            self._over(call.event, call.id)
        target = call.event.instance.conn
        if target is not None:
            info = error_payload(code, f"{call.tool}: {message}")
            self._bus.send(target, _failed(call.id, call.event.instance.agent, info))

    def drop(self, event: Event) -> None:
        """The event has ended: cancel its open calls."""
        work = event.work
        for call_id in work.calls if work.open_calls else ():
            call = self._calls.get(call_id)
            if call is not None:
                self._calls.remove(call)
                self._call_ended(event, call_id)
                if call.host is not None:
                    self._bus.send(call.host, _cancel(event.instance, call_id))
                elif call.sent_before is not None:
                    self._cancel_unknown(event.instance, call_id)

    def tick(self, now: float) -> None:
        """End calls that have waited for a tool host past their deadline."""
        if self._early and now - self._bus.started_ms / 1000 >= RETURN_S:
            self._early.clear()
        for call in self._calls.expired(now):
            self.fail(call, "E_TOOL_TIMEOUT", "no tool host took the call before its deadline")


def _cancel(instance: Instance, call_id: str) -> Frame:
    """A cancel for a tool host. The host ends the call only if it belongs to this instance."""
    return Frame("tool.cancel", call_id=call_id, from_=instance.agent, instance_key=instance.key)


def _without_claims(frame: Frame) -> None:
    """Remove what the sender may not say."""
    frame.workdir = frame.workdir_base = frame.chain = frame.source = frame.auth = frame.root_event = None
