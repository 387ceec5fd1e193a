"""Pending work that has ended, in the broker: events of a tool host, and news for the instance whose host it is."""

from __future__ import annotations

import pytest

from goondan.kernel.broker.state.entities import AGENTS, TOOLS
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame, Source
from tests.checks import there
from tests.unit.kernel.broker.world import World, host, outgoing, working


def from_host(world: World, kind: str, *, to: str = "coder", key: str = "k", **header: object) -> list[Frame]:
    """What leaves the broker because of a frame of the tool host."""
    event = AgentEvent(id="e~completed", type="tool.completed", created_at="2026-01-01T00:00:00Z")
    frame = Frame(kind, id="h1", to=to, instance_key=key, event_id=event.id, payload=to_raw(event), **header)  # type: ignore[arg-type]
    return [sent for cls, _, sent in outgoing(world, host(world), frame) if cls in (AGENTS, TOOLS)]


@pytest.mark.requirement("RESULT-04")
def test_an_event_of_a_tool_host_is_accepted_and_waits_its_turn_with_its_true_source() -> None:
    world = working()
    (ack,) = from_host(world, "event", source=Source("client", "operator"), auth=to_raw({"admin": True}))
    assert (ack.type, ack.stage) == ("ack", "accepted")
    event = world.router.bus.mailbox.events["e~completed"]
    assert there(event.source).kind == "tool"
    assert (event.content.auth, event.content.chain, event.state) == (None, None, "accepted")


def test_a_repeat_is_the_same_event() -> None:
    world = working()
    from_host(world, "event")
    before = len(world.router.bus.mailbox.events)
    (ack,) = from_host(world, "event")
    assert (ack.stage, len(world.router.bus.mailbox.events)) == ("accepted", before)


@pytest.mark.parametrize("to", ["_operator", "nobody"])
def test_a_tool_host_reaches_agents_of_the_bundle_only(to: str) -> None:
    world = working()
    (error,) = from_host(world, "event", to=to)
    assert error.type == "error"


def test_a_tool_host_names_no_workdir() -> None:
    world = working()
    (error,) = from_host(world, "event", workdir="/")
    assert error.type == "error"


def test_news_reach_the_instance_whose_host_it_is() -> None:
    world = working()
    (news,) = from_host(world, "tool.completed", source=Source("client", "x"), workdir="/", chain=["a"])
    assert (news.type, news.event_id) == ("tool.completed", "e~completed")
    assert (there(news.source).kind, news.workdir, news.chain) == ("tool", None, None)
    assert from_host(world, "tool.completed", key="other") == []
    assert from_host(world, "tool.completed", to="_operator") == []
    world.router.bus.mailbox.instances["coder", "k"].host = None
    assert from_host(world, "tool.completed") == []
    assert world.router.bus.counters["completions_unheard"] == 3
