"""Traces in the broker: which one an event belongs to, whatever its sender writes, and what survives with it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from goondan.kernel.broker.state.entities import CLIENTS, TOOLS, Connection
from goondan.schemas.wire.codec import encode, to_raw
from goondan.schemas.wire.frames import TOOL_COMPLETED, AgentEvent, Frame
from goondan.schemas.wire.spans import call_span, is_trace_id
from tests.unit.kernel.broker.swarm import TOOL
from tests.unit.kernel.broker.world import CALL, World, code, out, request, run, said, tell, working

TRACE, OTHER = "4bf92f3577b34da6a3ce929d0e0e4736", "a" * 32
SPAN = "00f067aa0ba902b7"


def client(world: World) -> Connection:
    return next(iter(world.router.bus.presence.connections[CLIENTS].values()))


def connected() -> World:
    """A world whose clients have said hello."""
    world = World()
    run(world)
    return world


def coder(world: World) -> Connection:
    return world.router.bus.presence.principals["agent/coder/k"]


def message(world: World, name: str, **header: Any) -> list[Frame]:
    """A client's event for `coder/k`, which makes one tool call for it."""
    event = AgentEvent(id=name, type="user.message", created_at="2026-01-01T00:00:00Z", input=1)
    frame = Frame("event", id=f"f-{name}", to="coder", instance_key="k", event_id=name, payload=to_raw(event))
    return said(world, client(world), structs.replace(frame, **header))


def of(world: World, name: str) -> tuple[str | None, str | None]:
    event = world.router.bus.mailbox.events[name]
    return event.content.trace_id, event.content.parent_span_id


def test_a_client_names_its_trace_or_gets_a_new_one() -> None:
    world = connected()
    (ack,) = message(world, "named", trace_id=TRACE, parent_span_id=SPAN)
    assert (of(world, "named"), ack.trace_id) == ((TRACE, SPAN), TRACE)
    made = []
    for name in ("one", "two"):
        (ack,) = message(world, name)
        made.append(of(world, name))
        assert ack.trace_id == made[-1][0]
    assert all(is_trace_id(trace or "") and span is None for trace, span in made)
    assert made[0] != made[1]


@pytest.mark.parametrize("trace", ["", "0" * 32, "A" * 32, "a" * 31, "a" * 33, "g" * 32, "a" * 32 + "\n", "../" * 10])
def test_what_is_no_trace_id_is_refused(trace: str) -> None:
    world = connected()
    assert code(message(world, "e", trace_id=trace)) == "E_FRAME_INVALID"
    assert code(message(world, "e", parent_span_id=trace)) == "E_FRAME_INVALID"
    assert "e" not in world.router.bus.mailbox.events


def test_a_handlers_question_belongs_to_the_trace_of_its_call_whatever_it_says() -> None:
    world = working()
    trace, _ = of(world, "c0e0")
    tell(world, request(trace_id=OTHER, parent_span_id=SPAN))
    assert of(world, "r1") == (trace, call_span(CALL))


def test_what_an_agent_asks_belongs_to_its_turns_trace_and_names_the_call_that_asks() -> None:
    world = working()
    trace, _ = of(world, "c0e0")
    for name, asynchronous in (("waits", False), ("goes on", True)):
        asked = request(name, call_id=None, trace_id=OTHER, parent_span_id=SPAN, asynchronous=asynchronous)
        said(world, coder(world), asked)
        assert of(world, name) == (trace, SPAN)
    said(world, coder(world), request("sent", call_id=None, reply_to=None, trace_id=OTHER, parent_span_id=SPAN))
    assert of(world, "sent") == (trace, SPAN)


def test_an_answer_that_nobody_waited_for_stays_in_the_trace_below_the_call_that_asked() -> None:
    world = connected()
    message(world, "e1", trace_id=TRACE)
    run(world)
    said(world, coder(world), request("r1", call_id=None, parent_span_id=SPAN, asynchronous=True))
    run(world)
    assert of(world, "r1:answer") == (TRACE, SPAN)


def test_pending_work_tells_its_end_in_the_trace_of_its_call() -> None:
    world = working()
    event = AgentEvent(id="x~completed", type=TOOL_COMPLETED, created_at="2026-01-01T00:00:00Z")
    frame = Frame("event", id="f", to="coder", instance_key="k", event_id="x~completed", payload=to_raw(event))
    frame.trace_id, frame.parent_span_id, frame.root_event = TRACE, SPAN, "c0e0"
    tell(world, frame)
    assert of(world, "x~completed") == (TRACE, SPAN)
    frame = structs.replace(frame, event_id="y~completed", id="g", trace_id="no", payload=to_raw(event))
    assert code(tell(world, frame)) == "E_FRAME_INVALID"


def test_a_call_carries_its_turns_trace_to_the_tool_host() -> None:
    world = working()
    trace, _ = of(world, "c0e0")
    epoch = world.router.bus.mailbox.instances["coder", "k"].epoch
    frame = Frame("tool.call", id="c", event_id="c0e0", call_id="coder/k/c0e0/9", tool=TOOL, trace_id=OTHER)
    frame.epoch, frame.span_id, frame.parent_span_id = epoch, SPAN, SPAN[::-1]
    world.router.receive(coder(world), encode(frame), world.now)
    (call,) = out(world, TOOLS)
    assert (call.trace_id, call.span_id, call.parent_span_id) == (trace, SPAN, SPAN[::-1])


def test_an_agent_hears_how_long_its_event_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    world = connected()
    message(world, "e1", trace_id=TRACE, parent_span_id=SPAN)
    world.now += 1.5
    world.supervisor.reconcile()
    world.flow(world.supervisor)
    world.supervisor.reconcile()
    (actor,) = world.agents.values()
    handed: list[Frame] = []
    monkeypatch.setattr(actor, "on_frame", handed.append)
    run(world)
    (event,) = [frame for frame in handed if frame.type == "event"]
    assert (event.trace_id, event.parent_span_id, event.waited_ms) == (TRACE, SPAN, 1500)


def test_an_agent_hears_how_long_its_turn_has_waited_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(max_live_agents=1)
    run(world)
    handed: list[Frame] = []
    send = world.router.bus.send

    def heard(to: Connection, frame: Frame) -> None:
        handed.append(frame)
        send(to, frame)

    monkeypatch.setattr(world.router.bus, "send", heard)
    message(world, "e1")
    run(world)
    world.now += 1
    message(world, "e2", instance_key="other")
    run(world)
    world.now += 2
    for _ in range(3):
        world.host.work()
        run(world)
    waits = {frame.event_id: (frame.waited_ms, frame.place_ms) for frame in handed if frame.epoch is not None}
    assert waits == {"e1": (0, None), "e2": (2000, 2000)}


@pytest.mark.parametrize("answered", [False, True])
def test_it_survives_the_broker(answered: bool) -> None:
    world = connected()
    message(world, "e1", trace_id=TRACE, parent_span_id=SPAN)
    if answered:
        run(world)
        said(world, coder(world), request("r1", call_id=None, parent_span_id=SPAN))
    world.kill_broker()
    assert of(world, "e1") == (TRACE, SPAN)
    if answered:
        assert of(world, "r1") == (TRACE, SPAN)
