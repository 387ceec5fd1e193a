"""The event bus of an agent instance, and what the kernel tells on it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.agentproc.extensions import events as events_module
from goondan.agentproc.extensions.api import EventsApi
from goondan.agentproc.extensions.events import CLEANUP, MAX_DEPTH, EventBus, compiled
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, says, wants
from tests.unit.agentproc.turns import Make, api_of, settle


@pytest.mark.requirement("EVENTS-01", "EVENTS-02", "EVENTS-12", "EVENTS-13")
async def test_who_subscribes_gets_what_others_emit_until_it_ends_that() -> None:
    bus, seen = EventBus(), list[Any]()
    end = bus.subscribe("myExtension.initialized", seen.append, extension="two")
    assert bus.emit("myExtension.initialized", {"name": "one", "timestamp": 5}, emitter="one") is None  # type: ignore[func-returns-value]
    bus.emit("another.type", {"name": "one"}, emitter="one")
    bus.emit("myExtension.initialized", emitter="one")
    assert seen == [
        {"type": "myExtension.initialized", "name": "one", "timestamp": 5},
        {"type": "myExtension.initialized"},
    ]
    assert end() is None
    end()  # twice does no harm
    bus.emit("myExtension.initialized", emitter="one")
    assert len(seen) == 2


@pytest.mark.requirement("EVENTS-13")
async def test_a_type_in_the_payload_stays() -> None:
    bus, seen = EventBus(), list[Any]()
    bus.subscribe("a.b", seen.append, extension="x")
    bus.emit("a.b", {"type": "own"}, emitter="x")
    assert seen == [{"type": "own"}]


@pytest.mark.requirement("EVENTS-03")
@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        (
            "workspace.*",
            ["workspace.repoAvailable", "workspace.worktreeMounted"],
            ["workspace", "workspace.a.b", "a.b"],
        ),
        ("*", ["one"], ["one.two"]),
        ("**", ["one", "one.two", "a.b.c"], []),
        ("a.**", ["a", "a.b", "a.b.c"], ["ab", "b.a"]),
        ("**.end", ["end", "a.end", "a.b.end"], ["a.end.b", "trend"]),
        ("a.**.z", ["a.z", "a.b.z", "a.b.c.z"], ["a.b", "az"]),
        ("work*.repo*", ["workspace.repoAvailable", "work.repo"], ["workspace.available"]),
        ("a+b", ["a+b"], ["aab", "ab"]),
    ],
)
async def test_what_a_pattern_matches(pattern: str, matches: list[str], others: list[str]) -> None:
    bus, seen = EventBus(), list[str]()
    bus.subscribe(pattern, lambda payload: seen.append(payload["type"]), extension="x")
    for kind in (*matches, *others):
        bus.emit(kind, emitter="x")
    assert seen == matches


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=5))
def test_every_type_matches_itself_and_with_any_segment_as_a_star(segments: list[str]) -> None:
    kind = "." + ".".join(segments)
    assert compiled(kind[1:]).fullmatch(kind)
    for index in range(len(segments)):
        starred = [*segments[:index], "*", *segments[index + 1 :]]
        assert compiled(".".join(starred)).fullmatch(kind)
        assert not compiled(".".join([*starred, "*"])).fullmatch(kind)
        assert compiled(".".join([*segments[:index], "**", *segments[index:]])).fullmatch(kind)


@pytest.mark.requirement("EVENTS-04")
async def test_once_is_once_even_when_the_handler_emits_it_again() -> None:
    bus, seen = EventBus(), list[Any]()

    def handler(payload: Any) -> None:
        seen.append(payload)
        bus.emit("auth.granted", emitter="x")

    bus.subscribe("auth.*", handler, extension="x", once=True)
    bus.emit("auth.granted", {"scopes": ["a"]}, emitter="x")
    bus.emit("auth.granted", emitter="x")
    assert seen == [{"type": "auth.granted", "scopes": ["a"]}]


@pytest.mark.requirement("EVENTS-05")
async def test_handlers_may_be_coroutines_and_one_that_fails_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    bus, seen = EventBus(), list[str]()

    async def later(payload: Any) -> None:
        await asyncio.sleep(0)
        seen.append("async")

    async def fails_later(payload: Any) -> None:
        raise ValueError("later nope")

    def fails(payload: Any) -> None:
        raise SystemExit("nope")

    for handler in (fails, later, fails_later, lambda payload: seen.append("sync")):
        bus.subscribe("a.b", handler, extension="culprit")
    bus.emit("a.b", emitter="x")
    assert seen == ["sync"]
    await settle()
    assert seen == ["sync", "async"]
    assert caplog.text.count("the a.b handler of extension culprit failed") == 2
    assert "nope" in caplog.text
    assert "later nope" in caplog.text


async def test_each_subscriber_has_a_payload_of_its_own() -> None:
    bus, seen = EventBus(), list[Any]()
    given = {"list": [1]}
    bus.subscribe("a", lambda payload: payload["list"].append(2), extension="x")
    bus.subscribe("a", seen.append, extension="x")
    bus.emit("a", given, emitter="x")
    assert seen == [{"type": "a", "list": [1]}]
    assert given == {"list": [1]}


@pytest.mark.parametrize("payload", [5, "text", [], [1], {"a": object()}, {"a": float("nan")}, {1: 2}])
async def test_what_is_no_json_object_is_refused(payload: Any) -> None:
    with pytest.raises(GoondanError) as caught:
        EventBus().emit("a.b", payload, emitter="x")
    assert caught.value.info.code == "E_USAGE"


@pytest.mark.parametrize("kind", ["", None, 5, "x" * 201])
async def test_what_is_no_type_is_refused(kind: Any) -> None:
    for call in (
        lambda: EventBus().emit(kind, emitter="x"),
        lambda: EventBus().subscribe(kind, print, extension="x"),
    ):
        with pytest.raises(GoondanError) as caught:
            call()
        assert caught.value.info.code == "E_USAGE"
    with pytest.raises(GoondanError):
        EventBus().subscribe("a", "no function", extension="x")


async def test_subscriptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_SUBSCRIPTIONS", 2)
    bus = EventBus()
    ends = [bus.subscribe("a", print, extension="x") for _ in range(2)]
    with pytest.raises(GoondanError, match="2 subscriptions"):
        bus.subscribe("a", print, extension="x")
    ends[0]()
    bus.subscribe("a", print, extension="x")


async def test_a_circle_of_handlers_ends(caplog: pytest.LogCaptureFixture) -> None:
    bus, counted = EventBus(), [0]

    def again(payload: Any) -> None:
        counted[0] += 1
        bus.emit("a", emitter="x")

    bus.subscribe("a", again, extension="x")
    bus.emit("a", emitter="x")
    assert counted == [MAX_DEPTH]
    assert "events inside each other" in caplog.text


async def test_a_thread_may_emit() -> None:
    bus, seen = EventBus(), list[bool]()
    bus.subscribe(
        "a", lambda payload: seen.append(threading.current_thread() is threading.main_thread()), extension="x"
    )
    await asyncio.to_thread(bus.emit, "a", emitter="x")
    await settle()
    assert seen == [True]


@pytest.mark.requirement("RECONCILE-05")
async def test_cleaning_up_is_one_extensions_and_is_awaited() -> None:
    bus, seen = EventBus(), list[str]()

    async def close(payload: Any) -> None:
        await asyncio.sleep(0.01)
        seen.append(payload["name"])

    for name in ("one", "two"):
        bus.subscribe("extension.*", close, extension=name)
        bus.subscribe("other", seen.append, extension=name)
    await bus.clean_up("one")
    assert seen == ["one"]
    bus.emit("other", emitter="x")
    assert len(seen) == 2  # the other extension's subscription is there
    await bus.clean_up("one")
    assert len(seen) == 2


@pytest.mark.requirement("RECONCILE-05")
async def test_cleaning_up_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    bus = EventBus()

    async def hangs(payload: Any) -> None:
        await asyncio.sleep(60)

    bus.subscribe(CLEANUP, hangs, extension="slow")
    async with asyncio.timeout(5):
        await bus.clean_up("slow", 0.02)
    assert "extension slow: cleaning up took longer" in caplog.text


@pytest.mark.requirement("EVENTS-06")
def test_every_member_is_there() -> None:
    """Callers that look before use find all of them."""
    for member in ("emit", "on", "once"):
        assert callable(getattr(EventsApi, member))


# --- what the kernel tells --------------------------------------------------------------------------------------------


@pytest.mark.requirement("EVENTS-10", "EVENTS-11")
async def test_what_goes_to_another_agent_and_its_answer_are_told(make: Make, link: FakeLink) -> None:
    runner = make(link, FakeModel(says("done")))
    api, seen = api_of(runner), list[Any]()
    api.events.on("agent.*", seen.append)

    async def asks(ctx: Any) -> Any:
        await ctx.agents.send("writer", {"topic": "x"}, metadata={"k": 1})
        return await ctx.next()

    api.pipeline.register("turn", asks)
    await runner.run(event_frame("e1", "go"))
    assert seen == [
        {"type": "agent.delegate", "targetAgent": "writer", "input": '{"topic":"x"}', "metadata": {"k": 1}},
    ]


@pytest.mark.requirement("EVENTS-11")
async def test_the_answer_that_a_turn_waits_for_is_told(make: Make, link: FakeLink) -> None:
    runner = make(link, FakeModel(says("done")))
    api, seen = api_of(runner), list[Any]()
    api.events.on("agent.delegationResult", seen.append)

    async def asks(ctx: Any) -> Any:
        await ctx.agents.request("writer", "write")
        return await ctx.next()

    api.pipeline.register("turn", asks)
    running = asyncio.create_task(runner.run(event_frame("e1", "go")))
    await settle()
    asked, future = link.asked[0]
    answer = Answer(turn_id="t", status="completed", steps=1, response="the text")
    event = AgentEvent(id="x", type="agent.response", created_at="2026-01-01T00:00:00.000Z", answer=answer)
    future.set_result(Frame("event", event_id="x", in_reply_to=asked.event_id, payload=to_raw(event)))
    await running
    assert seen == [{"type": "agent.delegationResult", "sourceAgent": "writer", "result": "the text"}]


async def test_nothing_is_told_of_ordinary_turns(make: Make) -> None:
    runner = make(FakeLink(), FakeModel(wants(("a", "notes__add", {})), says("done")))
    seen: list[Any] = []
    api_of(runner).events.on("**", seen.append)
    await runner.run(event_frame("e1", "go"))
    assert seen == []
