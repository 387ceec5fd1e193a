"""The frames about gates: whose gate it is, what a death frees, and what another broker knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from goondan.features.gates.broker import MAX_REQUESTS, RETURN_S, Gates, gate_name
from goondan.features.gates.broker.gate import TAKE_OVER_S
from goondan.features.gates.wire import (
    GateChanged,
    HeldPermit,
    KeptState,
    PermitAsk,
    PermitGranted,
    PermitOver,
    PlaceInLine,
    Refused,
)
from goondan.kernel.broker.state.bus import Bus
from goondan.kernel.broker.state.entities import AGENTS, Connection
from goondan.schemas.bundle.launch import ModelSpec
from goondan.schemas.models.model_providers import ModelLimits
from goondan.schemas.models.server_answers import RateLimits
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ErrorPayload, Frame, Hello

HERE = "http://127.0.0.1:1/v1"


def model(name: str = "main", **changes: Any) -> ModelSpec:
    fields = {"provider": "openai", "model": "m", "endpoint": HERE, "api_key": "k", "document": name, **changes}
    return ModelSpec(**fields)


def hello_of(permits: Sequence[HeldPermit], *states: KeptState, incarnation: str = "i") -> Hello:
    """What a process says that has these requests out and keeps these states."""
    said = Hello(token="t", incarnation=incarnation, permits=list(permits), gates=list(states))
    return from_raw(to_raw(said), Hello)


class World:
    """A broker with nothing but gates, and agents that work on one event each."""

    def __init__(self, **models: list[ModelSpec]) -> None:
        """The models of each agent, the own one first."""
        specs = {name: SimpleNamespace(name=name, models=listed) for name, listed in models.items()}
        self.now = 1000.0
        self.sent: list[tuple[str, Frame]] = []
        self.principals: dict[str, Any] = {}
        self.bus: Any = SimpleNamespace(
            plan=SimpleNamespace(agents=specs),
            secret=b"secret",
            now=self.now,
            counters=Counter(),
            notices=[],
            presence=SimpleNamespace(principals=self.principals, connections=({}, {}, {}, {})),
            send=lambda connection, frame: self.sent.append((connection.address, frame)),
            reply=self._reply,
            error=self._error,
        )
        self.gates = Gates(cast(Bus, self.bus))

    def _reply(self, connection: Any, frame_id: str, body: object) -> None:
        self.sent.append((connection.address, Frame("reply", in_reply_to=frame_id, payload=to_raw(body))))

    def _error(self, cls: int, ident: bytes, info: ErrorPayload, frame: Frame) -> None:
        self.sent.append((ident.decode(), Frame("error", in_reply_to=frame.id, payload=to_raw(info))))

    def agent(self, name: str, key: str = "k", tree: str = "", *, live: bool = False) -> Any:
        address = f"agent/{name}/{key}"
        instance = SimpleNamespace(epoch=1, leased=None)
        instance.leased = SimpleNamespace(
            id=f"e-{key}", root=tree or f"e-{key}", work=SimpleNamespace(tells=live), instance=instance
        )
        claims = SimpleNamespace(agent=name, instance_key=key)
        fields = {"address": address, "claims": claims, "incarnation": f"i-{key}", "instance": instance}
        connection = SimpleNamespace(**fields, cls=AGENTS, ident=address.encode())
        self.principals[address] = connection
        self.bus.presence.connections[AGENTS][connection.ident] = connection
        return connection

    def limited(self, name: str) -> list[str]:
        """The models of an agent for which it has to ask, as `welcome` tells it."""
        peer: Any = SimpleNamespace(cls=AGENTS, claims=SimpleNamespace(agent=name))
        told: list[str] = self.gates.welcome(peer)["limited"]
        return told

    def gone(self, connection: Any) -> None:
        del self.principals[connection.address]
        del self.bus.presence.connections[AGENTS][connection.ident]

    def say(self, connection: Connection, kind: str, payload: Any, frame_id: str = "f") -> list[tuple[str, Frame]]:
        """A frame of the agent, and what anybody is told because of it."""
        leased = cast(Any, connection.instance).leased
        frame = Frame(kind, id=frame_id, event_id=leased.id, epoch=1, payload=to_raw(payload))
        {"model.permit": self.gates.ask, "model.over": self.gates.over, "model.out": self.gates.out}[kind](
            connection, frame, self.now
        )
        return self.told()

    def ask(self, connection: Any, name: str, **more: Any) -> list[str]:
        """Who is granted a permit because of this ask: the ids of their frames."""
        return granted(self.say(connection, "model.permit", PermitAsk(name, **more), name))

    def over(self, connection: Any, name: str, *, accepted: bool = True, limits: RateLimits | None = None) -> list[str]:
        return granted(self.say(connection, "model.over", PermitOver(name, accepted=accepted, limits=limits)))

    def tick(self, seconds: float) -> list[tuple[str, Frame]]:
        self.now += seconds
        self.bus.now = self.now
        self.gates.tick(self.now)
        return self.told()

    def told(self) -> list[tuple[str, Frame]]:
        told, self.sent = self.sent, []
        return told

    def another_broker(self) -> None:
        self.now += 0.5
        self.bus.now = self.now
        self.gates = Gates(cast(Bus, self.bus))


def granted(told: list[tuple[str, Frame]]) -> list[str]:
    return [frame.in_reply_to or "" for _, frame in told if frame.type == "reply"]


def state_of(told: list[tuple[str, Frame]]) -> str:
    return next(from_raw(frame.payload, PermitGranted).state for _, frame in told if frame.type == "reply")


ONE = ModelLimits(max_concurrent=1)


def test_nobody_asks_at_an_open_gate_and_the_first_refusal_closes_it() -> None:
    world = World(a=[model()], b=[model("other")], c=[model(api_key="another")])
    one, two, three = world.agent("a"), world.agent("b", "k2"), world.agent("c", "k3")
    assert [world.limited(name) for name in "abc"] == [[], [], []]
    (told,) = world.say(one, "model.permit", PermitAsk("x"), "f")
    assert from_raw(told[1].payload, PermitGranted) == PermitGranted(open=True)
    told_all = world.say(one, "model.permit", PermitAsk("x", refused=Refused(2000)), "f2")
    news = [(to, from_raw(frame.payload, GateChanged)) for to, frame in told_all if frame.type == "model.gate"]
    assert (two.address, GateChanged("other", True)) in news
    assert (one.address, GateChanged("main", True)) in news
    assert three.address not in [to for to, _ in news]  # another key is another gate
    assert sorted(world.limited("b")) == ["", "other"]
    assert granted(world.tick(1.9)) == []
    assert granted(world.tick(0.2)) == ["f2"]


def test_whose_gate_it_is_follows_from_the_endpoint_and_the_key() -> None:
    assert gate_name(model()) == gate_name(model("b", model="n", endpoint=HERE + "/"))
    others = [model(api_key="x"), model(endpoint="http://127.0.0.1:2/v1"), model(headers={"x-api-key": "y"})]
    assert len({gate_name(other) for other in [model(), *others]}) == 4


def test_an_agent_can_name_no_gate_but_those_of_its_own_models() -> None:
    world = World(a=[model(limits=ONE)], b=[model("secret", api_key="other", limits=ONE)])
    agent = world.agent("a")
    for kind, payload in (
        ("model.permit", PermitAsk("x", "secret")),
        ("model.over", PermitOver("x", "secret")),
        ("model.out", HeldPermit("x", "secret")),
    ):
        with pytest.raises(GoondanError, match="E_FORBIDDEN"):
            world.say(agent, kind, payload)


def test_a_model_without_a_server_has_no_gate() -> None:
    world = World(a=[ModelSpec(provider="embedded", document="console")])
    with pytest.raises(GoondanError, match="E_FORBIDDEN"):
        world.ask(world.agent("a"), "x")


def test_permits_need_the_lease_of_an_event() -> None:
    world = World(a=[model(limits=ONE)])
    agent = world.agent("a")
    frame = Frame("model.permit", id="f", event_id="another", epoch=1, payload=to_raw(PermitAsk("x")))
    with pytest.raises(GoondanError, match="E_LEASE_LOST"):
        world.gates.ask(agent, frame, world.now)


@pytest.mark.parametrize("how", ["gone", "replaced", "event over"])
def test_every_death_frees_what_was_held_and_what_waited(how: str) -> None:
    world = World(a=[model(limits=ONE)])
    first, second, third = world.agent("a"), world.agent("a", "k2"), world.agent("a", "k3")
    assert world.ask(first, "1") == ["1"]
    assert world.ask(second, "2") == world.ask(third, "3") == []
    for dead in (first, second):
        if how == "gone":
            world.gone(dead)
        elif how == "replaced":
            dead.incarnation = "another life"
        else:
            dead.instance.leased = None
    assert granted(world.tick(0.2)) == ["3"]


def test_a_process_has_only_so_many_requests() -> None:
    world = World(a=[model(limits=ONE)])
    agent, other = world.agent("a"), world.agent("a", "k2")
    for number in range(MAX_REQUESTS):
        world.ask(agent, f"x{number}")
    with pytest.raises(GoondanError, match="E_OVERLOADED"):
        world.ask(agent, "one more")
    world.now += 0.1
    world.ask(other, "other")
    world.now += 0.1
    assert world.over(agent, "x0") == ["x1"]
    assert world.over(agent, "x1") == ["other"]  # one turn for each tree


def test_a_request_that_is_given_up_leaves_the_line() -> None:
    world = World(a=[model(limits=ONE)])
    agent, other = world.agent("a"), world.agent("a", "k2")
    world.ask(agent, "1")
    world.ask(other, "2")
    assert world.over(other, "2", accepted=False) == []
    assert world.over(agent, "1") == []
    assert world.ask(agent, "3") == ["3"]


def test_two_models_of_one_server_have_the_lower_limits() -> None:
    world = World(a=[model(limits=ModelLimits(max_concurrent=5))], b=[model("other", limits=ONE)])
    assert world.ask(world.agent("a"), "1") == ["1"]
    assert world.ask(world.agent("b", "k2"), "2") == []


def test_who_listens_is_told_its_place() -> None:
    world = World(a=[model(limits=ONE)])
    agents = [world.agent("a", f"k{number}", live=number == 2) for number in range(3)]
    for number, agent in enumerate(agents):
        world.ask(agent, str(number))
        world.now += 0.01
    told = [(to, from_raw(frame.payload, PlaceInLine)) for to, frame in world.tick(1.0) if frame.type == "model.line"]
    assert told == [(agents[2].address, PlaceInLine("2", 1, 0))]
    (row,) = [row for row in world.gates.waiting(world.now) if row.event is agents[2].instance.leased]
    assert (row.kind, row.since < world.now, row.more["before"]) == ("model", True, 1)
    assert row.more["text"] == "waits for its model: 1 before it"


def test_what_was_learned_is_told_and_forgotten_when_an_operator_says_so() -> None:
    world = World(a=[model()], b=[model("other", api_key="x")])
    agent, operator = world.agent("a"), world.agent("b", "k2")
    world.ask(agent, "1", refused=Refused(50_000))
    world.tick(2.0)

    def told(forget: bool) -> list[dict[str, Any]]:
        world.gates.tell(operator, Frame("admin", id="q"), {"forget": forget}, world.now)
        answers = world.told()
        rows: list[dict[str, Any]] = next(
            from_raw(frame.payload, dict)["gates"] for _, frame in answers if frame.in_reply_to == "q"
        )
        assert forget is ((agent.address, "1") in [(to, frame.in_reply_to) for to, frame in answers])
        return rows

    (waiting,) = world.gates.waiting(world.now)
    assert waiting.more["text"] == "waits for its model: held back for 48s by the limit of its server"
    (row,) = told(forget=False)
    assert row == {"models": ["main"], "concurrent": None, "perMinute": None, "refusals": 1} | {
        "learnedMs": 2000, "lastMs": 2000, "heldMs": 48_000, "refusingMs": 2000
    }  # fmt: skip
    assert told(forget=True) == [row]
    assert told(forget=False) == []
    assert world.limited("a") == []
    assert world.over(agent, "1") == []  # its permit is gone with it
    assert world.ask(agent, "2", refused=Refused(100)) == []
    assert granted(world.tick(0.6)) == ["2"]


def test_a_server_that_refuses_everybody_is_given_up_after_the_patience() -> None:
    world = World(a=[model()])
    agent = world.agent("a")
    world.ask(agent, "1", refused=Refused(50_000), patience_ms=30_000)
    told = world.tick(30.1)
    (error,) = [from_raw(frame.payload, ErrorPayload) for _, frame in told if frame.type == "error"]
    assert (error.code, "refused every request for 30 s" in error.message) == ("E_MODEL_FAILED", True)


def test_an_answer_that_says_that_little_is_left_closes_the_gate() -> None:
    world = World(a=[model()])
    agent = world.agent("a")
    told = world.say(agent, "model.over", PermitOver("x", accepted=True, limits=RateLimits(0, 5000)))
    assert [frame.type for _, frame in told] == ["model.gate", "model.gate"]  # by both of its names
    assert world.ask(agent, "y") == []
    assert granted(world.tick(5.1)) == ["y"]


def test_another_broker_knows_what_is_out_what_was_learned_and_who_came_first() -> None:
    world = World(a=[model(limits=ONE)])
    first, second, third = world.agent("a"), world.agent("a", "k2"), world.agent("a", "k3")
    state = state_of(world.say(first, "model.permit", PermitAsk("1"), "1"))
    asked_ms = [round(world.now * 1000) + number for number in range(2)]
    world.another_broker()
    for agent in (first, second, third):
        permits = [HeldPermit("1", "main", 500)] if agent is first else []
        hello = hello_of(permits, KeptState("main", state), incarnation=agent.incarnation)
        world.gates.here(agent, hello, world.now)
    world.told()
    assert world.ask(third, "3", asked_ms=asked_ms[1]) == world.ask(second, "2", asked_ms=asked_ms[0]) == []
    assert world.over(first, "1") == []
    assert granted(world.tick(TAKE_OVER_S)) == ["2"]
    world.now += RETURN_S
    world.over(second, "2")
    world.over(third, "3")
    fourth, fifth = world.agent("a", "k4"), world.agent("a", "k5")
    assert world.ask(first, "5") == ["5"]
    assert world.ask(fourth, "6") == []
    world.now += 0.1
    assert world.ask(fifth, "7", asked_ms=1) == []  # it is too late to say so
    assert world.over(first, "5") == ["6"]


@pytest.mark.parametrize("spoilt", ["", "AAAA", "no base64!", "x" * 400])
def test_a_state_without_the_brokers_signature_is_nothing(spoilt: str) -> None:
    world = World(a=[model()])
    agent = world.agent("a")
    hello = hello_of([], KeptState("main", spoilt), incarnation=agent.incarnation)
    world.gates.here(agent, hello, world.now)
    assert world.limited("a") == []


def test_a_state_of_another_gate_or_of_this_broker_is_nothing() -> None:
    world = World(a=[model(limits=ONE)], b=[model("b", api_key="other")])
    one, other = world.agent("a"), world.agent("b", "k2")
    state = state_of(world.say(one, "model.permit", PermitAsk("1"), "1"))
    world.gates.here(one, hello_of([], KeptState("main", state)), world.now)
    world.another_broker()
    world.gates.here(other, hello_of([], KeptState("b", state)), world.now)
    assert world.limited("b") == []


@pytest.mark.parametrize(("secret", "believed"), [(b"secret", True), (b"another", False)])
def test_only_a_state_that_a_broker_of_this_kernel_has_signed_is_believed(secret: bytes, believed: bool) -> None:
    world = World(a=[model()])
    agent = world.agent("a")
    world.ask(agent, "1", refused=Refused(100))
    state = state_of(world.tick(0.6))
    world.bus.secret = secret
    world.another_broker()
    hello = hello_of([], KeptState("main", state), incarnation=agent.incarnation)
    world.gates.here(agent, hello, world.now)
    assert sorted(world.limited("a")) == (["", "main"] if believed else [])
