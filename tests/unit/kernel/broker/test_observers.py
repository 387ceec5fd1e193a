"""Observers: what they hear, in which window, and that they cost nobody else anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goondan.kernel.broker.routing import observers
from goondan.kernel.broker.routing.observers import Subscription
from goondan.kernel.broker.state.entities import AGENTS, CLIENTS, Connection
from goondan.schemas.wire.codec import decode, encode, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ErrorPayload, Frame
from goondan.schemas.wire.runtime_events import MAX_WINDOW_BYTES, MIN_WINDOW_BYTES, Gap, Observe, RuntimeEvent
from tests.checks import there
from tests.unit.kernel.broker.actors import Agent
from tests.unit.kernel.broker.test_live import news
from tests.unit.kernel.broker.world import World, run

# --- the window


@given(
    st.integers(1, 8),
    st.integers(4, 40),
    st.lists(st.one_of(st.tuples(st.just("news"), st.integers(1, 3)), st.tuples(st.just("reads"), st.integers(0, 9)))),
)
def test_a_window_is_kept_and_every_number_is_told_once(events: int, size: int, steps: list[tuple[str, int]]) -> None:
    """Sizes are at most three quarters of the window, as the protocol has it."""
    window = Subscription(Observe(events=events, bytes=size))
    sent: list[tuple[int, int]] = []  # numbers and sizes, not read
    told: list[tuple[int, int]] = []  # ranges of numbers, in order
    number = 0

    def read(upto: int) -> None:
        sent[:] = [one for one in sent if one[0] > upto]
        window.read(upto)
        held = sum(amount for _, amount in sent)
        assert window.ready == (bool(window.missed) and 2 * len(sent) <= events and 2 * held <= size)
        if window.ready:
            gap = window.tell()
            told.append((gap.first, gap.last))
            assert (window.missed, gap.last) == (0, number)

    for what, amount in steps:
        if what == "news":
            number += 1
            fits = not window.missed and len(sent) < events and sum(one for _, one in sent) + amount <= size
            assert window.take(amount) == fits
            if fits:
                sent.append((number, amount))
                told.append((number, number))
        else:
            read(sent[min(amount, len(sent)) - 1][0] if sent and amount else window.told)
        assert len(window.sent) <= events and window.held <= size
        assert not window.missed or window.sent, "it would never be told"
    read(window.told)
    assert [first for first, _ in told] == [1, *(last + 1 for _, last in told)][: len(told)]
    assert (told[-1][1] if told else 0) == number and not window.sent


@given(st.integers(1, 5), st.lists(st.integers(-3, 12), max_size=20))
def test_a_number_that_was_not_told_changes_nothing(events: int, numbers: list[int]) -> None:
    window = Subscription(Observe(events=events, bytes=100))
    for number in numbers:
        window.take(1)
        before = repr(window)
        if number < 0 or number > window.told:
            with pytest.raises(GoondanError, match="E_FRAME_INVALID"):
                window.read(number)
            assert repr(window) == before
        else:
            window.read(number)


# --- the broker


class Observing:
    """A connection of an operator's client, or of another one, and what it is sent."""

    def __init__(self, world: World, client: int = 1, *, operator: bool = True) -> None:
        self.world = world
        self.bus = world.router.bus
        run(world)
        self.connection: Connection = self.bus.presence.connections[CLIENTS][world.clients[client].wire.ident]
        if not operator:
            self.connection.claims = type(self.connection.claims)("client", operator=False)
        self.heard: list[Frame] = []
        self.asked = 0

    def say(self, frame: Frame) -> list[Frame]:
        """The frames to it that this brings, and those to agents."""
        self.world.router.receive(self.connection, encode(frame), self.world.now)
        return self.took()

    def took(self) -> list[Frame]:
        """What left the broker since."""
        self.world.commit()
        mine = [decode(data) for cls, ident, data in self.bus.out if (cls, ident) == (CLIENTS, self.connection.ident)]
        self.to_agents = [decode(data) for cls, _, data in self.bus.out if cls == AGENTS]
        self.bus.out.clear()
        self.heard += [frame for frame in mine if frame.type == "observed"]
        return mine

    def observe(self, events: Any = 100, size: Any = 1 << 20, **wish: Any) -> Frame:
        self.asked += 1
        asked = {"op": "observe", "events": events, "bytes": size, **wish}
        (answer,) = self.say(Frame("admin", id=f"o{self.asked}", payload=to_raw(asked)))
        return answer

    def reads(self, number: int, name: str = "o1") -> list[Frame]:
        """What comes at once, and with the next tick."""
        return [*self.say(Frame("observed", in_reply_to=name, position=number)), *self.tick()]

    def tick(self) -> list[Frame]:
        self.world.now += 0.2
        self.world.router.tick(self.world.now)
        return self.took()

    @property
    def numbers(self) -> list[int | None]:
        return [frame.position for frame in self.heard]


def code(frame: Frame) -> str:
    return from_raw(frame.payload, ErrorPayload).code


def working(*, live: bool = False) -> tuple[World, Agent]:
    """An agent in the middle of its first tool call."""
    world = World()
    world.clients[0].ask("c0e0", live=live)
    run(world)
    (agent,) = world.agents.values()
    return world, agent


def tell(observing: Observing, agent: Agent, text: str = "t", times: int = 1) -> None:
    world = observing.world
    for number in range(times):
        frame = news(agent, text)
        frame.id = f"n{number}"
        (connection,) = [c for c in observing.bus.presence.connections[AGENTS].values() if c.ident == agent.wire.ident]
        world.router.receive(connection, encode(frame), world.now)
    observing.took()


def test_an_observer_hears_numbered_news_of_the_turns_that_it_asked_for() -> None:
    world, agent = working()
    observing = Observing(world)
    assert from_raw(observing.observe().payload, dict) == {"events": 100, "bytes": 1 << 20}
    observing.observe(agent="reviewer")
    observing.observe(agent="coder", rootEvent="c0e0", instanceKey="k")
    observing.observe(rootEvent="c0e1")
    tell(observing, agent, "a")
    tell(observing, agent, "b")
    heard = [
        (frame.in_reply_to, frame.position, from_raw(frame.payload, RuntimeEvent).text) for frame in observing.heard
    ]
    assert heard == [("o1", 1, "a"), ("o3", 1, "a"), ("o1", 2, "b"), ("o3", 2, "b")]
    frame = observing.heard[0]
    event = world.router.bus.mailbox.events["c0e0"]
    assert (frame.from_, frame.instance_key, frame.event_id, frame.root_event) == ("coder", "k", "c0e0", "c0e0")
    assert frame.trace_id == event.content.trace_id


def test_a_turn_that_runs_begins_to_tell_and_stops_with_the_last_observer() -> None:
    world, agent = working()
    assert agent.held is not None
    observing = Observing(world)
    observing.observe(agent="reviewer")
    assert observing.to_agents == []
    observing.observe(agent="coder")
    (told,) = observing.to_agents
    assert (told.type, told.event_id, told.epoch, told.live) == ("listen", "c0e0", agent.held.epoch, True)
    observing.observe()
    assert observing.to_agents == []
    observing.say(Frame("admin", id="u1", payload=to_raw({"op": "unobserve", "subscription": "o2"})))
    assert observing.to_agents == []
    world.router.unreachable(CLIENTS, observing.connection.ident, world.now)
    observing.tick()
    (told,) = observing.to_agents
    assert (told.type, told.event_id, told.live) == ("listen", "c0e0", False)
    assert observing.bus.presence.connections[CLIENTS].get(observing.connection.ident) is None


def test_an_agent_whose_asker_listens_is_told_nothing_and_the_asker_hears_as_before() -> None:
    world, agent = working(live=True)
    observing = Observing(world)
    observing.observe()
    assert observing.to_agents == []
    tell(observing, agent)
    assert len(observing.heard) == 1
    assert world.router.bus.counters["live"] == 2


def test_an_asker_who_wants_to_hear_in_mid_turn_does_not_keep_an_observer_from_it() -> None:
    world, agent = working()
    world.clients[0].ask("c0e0", live=True)
    run(world)
    assert world.router.bus.mailbox.events["c0e0"].live and not there(agent.held).live
    observing = Observing(world)
    observing.observe()
    assert [(frame.type, frame.live) for frame in observing.to_agents] == [("listen", True)]


def test_what_agents_ask_each_other_has_the_root_of_the_message() -> None:
    world = World()
    world.patience_s = 60.0
    observing = Observing(world)
    observing.observe(rootEvent="c0e0")
    observing.observe(rootEvent="c0e0", agent="reviewer")
    observing.observe(rootEvent="c0e0~q")
    world.clients[0].ask("c0e0")
    world.clients[0].ask("c0e1", key="other")
    world.settle()
    world.settle()
    told = {(frame.in_reply_to, frame.from_, frame.event_id) for frame in world.clients[1].observed}
    assert told == {("o1", "coder", "c0e0"), ("o1", "reviewer", "c0e0~q"), ("o2", "reviewer", "c0e0~q")}
    assert world.clients[0].answers.keys() == {"c0e0", "c0e1"}


def test_later_turns_tell_while_somebody_observes_their_agent() -> None:
    world = World()
    observing = Observing(world)
    observing.observe(agent="coder")
    world.clients[0].ask("c0e0")
    run(world)
    (agent,) = world.agents.values()
    assert agent.held is not None and agent.held.live
    observing.say(Frame("admin", id="u1", payload=to_raw({"op": "unobserve", "subscription": "o1"})))
    world.settle()
    world.clients[0].ask("c0e1")
    run(world)
    assert (agent.held.event_id, agent.held.live) == ("c0e1", False)


def test_a_process_that_comes_back_with_its_turn_is_told_again() -> None:
    world, agent = working()
    observing = Observing(world)
    observing.observe()
    assert world.router.bus.mailbox.events["c0e0"].work.tells
    agent.wire.cut(reconnect=True)
    while agent.wire.up:
        data = agent.wire.up.popleft()
        known = observing.bus.presence.connections[AGENTS].get(agent.wire.ident)
        if known is None:
            world.router.stranger(AGENTS, agent.wire.ident, data, world.now)
        else:
            world.router.receive(known, data, world.now)
        for cls, ident, sent in list(observing.bus.out):
            if (cls, ident) == (AGENTS, agent.wire.ident) and decode(sent).type != "listen":
                agent.receive(sent)
        observing.took()
        if any(frame.type == "listen" for frame in observing.to_agents):
            return
    raise AssertionError("it does not hear that somebody listens")


def test_the_broker_tells_what_was_accepted_and_how_it_has_ended() -> None:
    world = World()
    world.clients[0].ask("c0e0")
    run(world)
    observing = Observing(world)
    observing.observe()
    world.clients[0].ask("c0e1")
    world.clients[0].cancel("c0e1")
    told: list[tuple[str | None, str, str | None]] = []
    world.settle()
    told = [
        (frame.event_id, event.kind, event.state)
        for data in world.clients[1].observed
        for frame in [data]
        for event in [from_raw(frame.payload, RuntimeEvent)]
        if event.kind.startswith("event.")
    ]
    assert told == [
        ("c0e1", "event.accepted", None),
        ("c0e1", "event.ended", "cancelled"),
        ("c0e0", "event.ended", "done"),
    ]


def test_who_does_not_read_has_one_gap_and_then_the_news_go_on() -> None:
    world, agent = working()
    observing = Observing(world)
    observing.observe(events=4)
    tell(observing, agent, times=50)
    assert observing.numbers == [1, 2, 3, 4]
    assert observing.reads(1) == []
    (frame,) = observing.reads(2)
    assert (frame.stage, frame.position, from_raw(frame.payload, Gap)) == ("gap", 50, Gap(5, 50))
    tell(observing, agent, times=3)
    assert observing.numbers[5:] == [51, 52]


def test_while_all_its_observers_miss_its_news_an_agent_need_not_tell_them() -> None:
    world, agent = working()
    slow, quick = Observing(world), Observing(world, client=0)
    slow.observe(events=2)
    tell(slow, agent, times=2)
    tell(slow, agent, times=1)
    assert [(frame.type, frame.live) for frame in slow.to_agents] == [("listen", False)]
    quick.observe(agent="coder")
    assert [(frame.type, frame.live) for frame in quick.to_agents] == [("listen", True)]
    tell(slow, agent, times=2)
    quick.say(Frame("admin", id="u1", payload=to_raw({"op": "unobserve", "subscription": "o1"})))
    assert [(frame.type, frame.live) for frame in quick.to_agents] == [("listen", False)]
    assert slow.numbers == [1, 2]
    (gap,) = slow.reads(2)
    assert from_raw(gap.payload, Gap) == Gap(3, 5)
    assert [(frame.type, frame.live) for frame in slow.to_agents] == [("listen", True)]


def test_a_turn_that_begins_while_all_observers_are_behind_does_not_tell() -> None:
    world, agent = working()
    observing = Observing(world)
    observing.observe(events=1)
    tell(observing, agent, times=2)
    world.settle()
    world.clients[0].ask("c0e1")
    run(world)
    assert (there(agent.held).event_id, there(agent.held).live) == ("c0e1", False)


def test_the_window_is_one_of_bytes_too() -> None:
    world, agent = working()
    observing = Observing(world)
    observing.observe(size=MIN_WINDOW_BYTES)
    tell(observing, agent, "x" * 12_000, times=4)
    assert observing.numbers == [1, 2]
    (frame,) = observing.reads(2)
    assert from_raw(frame.payload, Gap) == Gap(3, 4)


@pytest.mark.parametrize(
    "wish",
    [
        {"events": 0}, {"events": -1}, {"events": 1 << 63}, {"events": None}, {"events": "9"}, {"events": 2.5},
        {"size": 0}, {"size": -5}, {"size": MIN_WINDOW_BYTES - 1}, {"size": MAX_WINDOW_BYTES + 1}, {"size": [1]},
        {"agent": ""}, {"agent": 7}, {"agent": "a" * 300}, {"instanceKey": {}}, {"rootEvent": False},
    ],
)  # fmt: skip
def test_a_bad_wish_is_refused(wish: dict[str, Any]) -> None:
    world, _ = working()
    observing = Observing(world)
    assert code(observing.observe(**wish)) == "E_FRAME_INVALID"
    assert observing.to_agents == []


def test_unknown_fields_are_skipped_and_a_repeat_is_the_same_subscription() -> None:
    world, agent = working()
    observing = Observing(world)
    asked = Frame("admin", id="o1", payload=to_raw({"op": "observe", "events": 9, "bytes": 1 << 20, "later": [1]}))
    assert [answer.type for _ in range(3) for answer in observing.say(asked)] == ["reply"] * 3
    tell(observing, agent)
    assert observing.numbers == [1]


def test_who_is_no_operator_is_refused() -> None:
    world, agent = working()
    observing = Observing(world, operator=False)
    assert code(observing.observe()) == "E_FRAME_INVALID"
    assert observing.reads(3) == []
    tell(observing, agent)
    assert observing.heard == []


def test_numbers_that_nobody_was_told_are_refused_and_other_names_are_ignored() -> None:
    world, agent = working()
    observing = Observing(world)
    observing.observe(events=2)
    tell(observing, agent, times=5)
    for number in (3, 5, 1 << 60, -1):
        assert [code(frame) for frame in observing.reads(number)] == ["E_FRAME_INVALID"]
    assert observing.reads(2, "another") == [] and observing.reads(1) != []


def test_a_thousand_subscriptions_are_too_many() -> None:
    world, agent = working()
    observing = Observing(world)
    answers = [observing.observe(size=MIN_WINDOW_BYTES) for _ in range(1000)]
    assert [answer.type for answer in answers] == ["reply"] * 16 + ["error"] * 984
    tell(observing, agent)
    assert len(observing.heard) == 16


def test_all_connections_together_have_few_subscriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one is asked about each live event: a client with many connections would keep the broker busy."""
    monkeypatch.setattr(observers, "MAX_ALL_SUBSCRIPTIONS", 3)
    world, _ = working()
    one, other = Observing(world, client=0), Observing(world)
    assert [one.observe().type, one.observe().type, other.observe().type] == ["reply"] * 3
    assert [code(client.observe()) for client in (one, other)] == ["E_OVERLOADED"] * 2
    one.say(Frame("admin", id="u1", payload=to_raw({"op": "unobserve", "subscription": "o1"})))
    assert other.observe().type == "reply"


def test_all_windows_together_have_a_bound_and_who_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "MAX_ALL_WINDOWS", 2 * MAX_WINDOW_BYTES)
    world, _ = working()
    one, other = Observing(world, client=0), Observing(world)
    assert [observing.observe(size=MAX_WINDOW_BYTES).type for observing in (one, other)] == ["reply"] * 2
    assert code(other.observe(size=MIN_WINDOW_BYTES)) == "E_OVERLOADED"
    world.router.unreachable(CLIENTS, one.connection.ident, world.now)
    other.tick()
    assert other.observe(size=MIN_WINDOW_BYTES).type == "reply"


def test_who_said_goodbye_hears_nothing_and_leaves_nothing() -> None:
    world, agent = working()
    observing = Observing(world)
    observing.observe()
    assert [frame.type for frame in observing.say(Frame("bye", id="x"))] == ["reply"]
    observing.tick()
    tell(observing, agent)
    assert observing.heard == []
