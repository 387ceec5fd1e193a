"""Agents and clients that mean harm: each frame of theirs gets one error, and costs nobody else anything."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import Raw, structs

from goondan.kernel.broker.state.bus import Bus
from goondan.schemas.bundle.effective_config import digest_of
from goondan.schemas.bundle.launch import CatalogItem, ToolSource
from goondan.schemas.wire.codec import MAX_FRAME_BYTES, encode_value, from_raw, to_raw
from goondan.schemas.wire.frames import Frame
from tests.checks import there
from tests.process.hostile_payloads import ASKED_BY_AGENTS, ASKED_BY_OPERATORS, payload
from tests.unit.kernel.broker.approving import ASK, Bench, Peer, code_of
from tests.unit.kernel.broker.swarm import EXTENSIONS, TOOLS
from tests.unit.kernel.broker.world import part_of

#: Frames of one run; each seed takes another way.
FRAMES = 1500
#: Ops that end what the others are about.
_ENDS = ("cancel", "instance.delete")
SCHEMA = {"type": "object", "properties": {"level": {"type": "integer"}}}


class Attacked:
    """A broker whose agents `coder` and `reviewer` have everything that can be asked about, and hold an event each."""

    def __init__(self) -> None:
        bench = self.bench = Bench(ASK)
        registry = [CatalogItem(name=name, source=ToolSource("config", name.partition("__")[0])) for name in TOOLS]
        first = structs.replace(EXTENSIONS[0], config_schema=SCHEMA)
        agents = {
            name: structs.replace(
                bench.plan.agents[name],
                registry=registry,
                catalog=["bash__exec"],
                extensions=[first, *EXTENSIONS[1:]],
                parts={**bench.plan.agents[name].parts, "budgets": to_raw({"tokens": 10**9})},
            )
            for name in ("coder", "reviewer")
        }
        apps = {"app": {"name": "app", "scopes": ["read"]}}
        bench.plan = structs.replace(bench.plan, agents={**bench.plan.agents, **agents}, parts={"oauth": to_raw(apps)})
        bench.router = bench._router()
        bench.now += 100  # the broker is not new any more
        self.operator, self.host = bench.client(), bench.host()
        bench.ask(self.operator, "e1", "coder")
        bench.ask(self.operator, "e2", "reviewer")
        self.coder, self.reviewer = bench.agent("coder"), bench.agent("reviewer")
        self.coder.take()
        self.reviewer.take()
        self.stranger = bench.client(operator=False)
        self.count = 0

    @property
    def bus(self) -> Bus:
        return self.bench.router.bus

    def frame(self, peer: Peer, kind: str, data: bytes, **fields: Any) -> Frame:
        """A frame of an agent about its own event, unless `fields` say something else."""
        self.count += 1
        event = "e1" if peer is self.coder else "e2"
        frame = Frame(kind, id=f"h{self.count}", event_id=event, payload=Raw(data))
        frame.epoch = self.bench.instance(*peer.who).epoch
        for name, value in fields.items():
            setattr(frame, name, value)
        return frame

    def send(self, peer: Peer, frame: Frame) -> list[Frame]:
        """What it is answered: by name, or without one when its bytes were no frame at all."""
        bench = self.bench
        known = bench.router.bus.presence.connections[peer.cls][peer.ident]
        bench.router.receive(known, encode_value(frame), bench.now)
        bench.flush()  # it asserts that nothing went wrong inside the broker
        answers = [one for one in peer.take() if one.type in ("reply", "error")]
        return [one for one in answers if one.in_reply_to in (frame.id, None)]

    def asks(self, kind: str, body: Any, peer: Peer | None = None, **fields: Any) -> list[Frame]:
        """What `coder`, or another agent, is answered."""
        data = body if isinstance(body, bytes) else bytes(to_raw(body))
        return self.send(peer or self.coder, self.frame(peer or self.coder, kind, data, **fields))


def sound_ops(bus: Bus) -> list[dict[str, Any]]:
    return [asked for asked in ASKED_BY_OPERATORS if asked["op"] not in _ENDS]


@pytest.mark.parametrize("seed", range(4))
def test_each_hostile_frame_gets_one_answer_and_the_broker_goes_on(seed: int) -> None:
    dice = random.Random(f"payloads {seed}")
    world = Attacked()
    bench, bus = world.bench, world.bus
    for number in range(FRAMES):
        if dice.random() < 0.6:
            peer = dice.choice((world.coder, world.reviewer))
            kind = dice.choice(list(ASKED_BY_AGENTS))
            sound = dict(ASKED_BY_AGENTS[kind])
            if kind == "config.propose":
                sound |= {"id": f"p{number}", "base": digest_of(bench.plan.agents[peer.who[0]])}
            elif kind.startswith("budget."):
                sound["id"] = f"m{dice.randrange(30)}"
            frame = world.frame(
                peer,
                kind,
                payload(dice, sound),
                call_id=dice.choice((f"t1/{dice.randrange(500)}", "t1/c1", None, "", "x" * 1025, "\0")),
                tool=dice.choice(("bash__exec", "agents__request", "agents__request", None, "", "x" * 400)),
            )
            if dice.random() < 0.2:
                frame.event_id = dice.choice(("e1", "e2", "nothing", None, "\0", "x" * 300))
                frame.epoch = dice.choice((0, -1, 2**62, None, frame.epoch))
        else:
            peer = world.operator if dice.random() < 0.9 else world.stranger
            sound = dict(dice.choice(sound_ops(bus)))
            if sound["op"].startswith("approve.") and bench.items:
                sound["id"] = dice.choice(list(bench.items.values())).code
            world.count += 1
            frame = Frame("admin", id=f"h{world.count}", payload=Raw(payload(dice, sound)))
        (answer,) = world.send(peer, frame)
        if answer.type == "error":
            assert from_raw(answer.payload, dict)["code"] != "E_INTERNAL"
        if number % 250 == 0:
            for asked in sound_ops(bus):  # whatever came before, operators can look
                assert "E_INTERNAL" not in str(world.operator.admin(**asked))
    bench.restart()  # what was written down can be read
    operator = bench.client()
    for asked in sound_ops(bench.router.bus):
        assert "E_INTERNAL" not in str(operator.admin(**asked))


@pytest.mark.parametrize("op", [[], {}, [["x"]], 7, None, b"x"])
def test_an_op_that_is_no_text_is_named(op: Any) -> None:
    world = Attacked()
    assert world.operator.admin(op=op)["code"] == "E_FRAME_INVALID"
    assert world.operator.admin(op="events", agent=op, instanceKey="k")["code"] == "E_AGENT_NOT_FOUND"


@pytest.mark.feature("approvals")
@pytest.mark.parametrize("seconds", [1e308, 2.0**63, float(2**64 - 1), 1e12])
def test_a_question_that_never_expires_blinds_no_operator(seconds: float) -> None:
    from goondan.features.approvals.wire import MAX_EXPIRY_S

    world = Attacked()
    asked = {"kind": "question", "args": {}, "message": "m", "expiresS": seconds}
    (answer,) = world.asks("approval.ask", asked, call_id="q", tool="t")
    assert from_raw(answer.payload, dict)["state"] == "waits"
    (item,) = world.operator.admin(op="approve.list")["items"]
    assert item["expiresMs"] - item["askedMs"] <= MAX_EXPIRY_S * 1000


@pytest.mark.feature("approvals")
@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), float("-inf")])
def test_a_question_expires_after_a_number_of_seconds(seconds: float) -> None:
    world = Attacked()
    asked = {"kind": "question", "args": {}, "message": "m", "expiresS": seconds}
    assert code_of(world.asks("approval.ask", asked, call_id="q", tool="t")) == "E_FRAME_INVALID"


@pytest.mark.feature("approvals")
def test_a_list_of_what_waits_fits_a_frame_whatever_agents_ask() -> None:
    from goondan.features.approvals.wire import MAX_ARGS_BYTES

    world = Attacked()
    schema = {"type": "object", "description": "x" * (MAX_ARGS_BYTES - 1000)}
    asked = {"kind": "question", "args": {}, "message": "é" * 4000}
    for number in range(8):
        (told,) = world.asks("approval.ask", {**asked, "schema": schema}, call_id=f"q{number}", tool="t")
        assert from_raw(told.payload, dict)["state"] == "waits"
    for number in range(300):
        world.asks("approval.ask", asked, call_id=f"r{number}", tool="t")
    listed = world.operator.admin(op="approve.list")
    assert len(encode_value(listed)) < MAX_FRAME_BYTES
    assert listed["more"] == 308 - len(listed["items"])
    assert world.operator.admin(op="approve.show", id=listed["items"][0]["code"])["schema"] == schema


@pytest.mark.feature("approvals")
def test_questions_that_expire_at_once_are_bounded_as_long_as_their_turn_lasts() -> None:
    """What was decided stays in the journal until the event ends, so it counts."""
    from goondan.features.approvals.broker.items import MAX_BYTES_OF_EVENT, MAX_OF_EVENT

    world = Attacked()
    asked = bytes(to_raw({"kind": "question", "args": {}, "message": "m", "expiresS": 1}))
    refused = 0
    for number in range(MAX_OF_EVENT + 40):
        refused += code_of(world.asks("approval.ask", asked, call_id=f"q{number}", tool="t")) == "E_TOOL_LIMIT"
        if number % 200 == 199:
            for peer in (world.coder, world.reviewer, world.operator, world.host):
                peer.say(Frame("pong"))
            world.bench.later(1.5)
            world.coder.take()
    assert len(world.bench.items) <= MAX_OF_EVENT
    assert refused == 40
    world.bench.restart()
    agent = world.bench.agent("coder")
    agent.take()
    assert len(world.bench.items) == MAX_OF_EVENT
    standing = there(world.bus.mailbox.events["e1"].standing)
    assert standing.asked == MAX_OF_EVENT, "the next broker counts the same"
    assert standing.asked_bytes <= MAX_BYTES_OF_EVENT


@pytest.mark.feature("budgets")
def test_calls_that_an_agent_only_counts_are_bounded() -> None:
    """Each of them is a part of every record of its tree, whatever the limits of the budget are."""
    from goondan.features.budgets.broker.accounts import MAX_CHARGED

    world = Attacked()
    codes = []
    for number in range(MAX_CHARGED + 10):
        asked = {"id": f"x{number}", "kind": "tool"}
        answers = world.asks("budget.reserve", asked)
        if answers[0].type == "error" and code_of(answers) == "E_OVERLOADED":  # the journal first
            answers = world.asks("budget.reserve", asked)
        codes.append(code_of(answers) if answers[0].type == "error" else None)
    assert codes.count("E_TOOL_LIMIT") == 10
    assert set(codes) == {None, "E_TOOL_LIMIT"}
    world.coder.ack("result", calls=["x0", "x1"])
    assert world.asks("budget.reserve", {"id": "after", "kind": "tool"})[0].type == "reply"


@pytest.mark.feature("changesets")
def test_one_instance_takes_no_place_of_all_questions_about_changesets(monkeypatch: pytest.MonkeyPatch) -> None:
    from goondan.features.changesets.broker import MAX_WAITING_EACH

    world = Attacked()
    supervisor = object()
    monkeypatch.setattr(world.bus, "control", supervisor)
    monkeypatch.setattr(world.bus, "tell_supervisor", lambda message: None)
    asked = bytes(to_raw({"reason": "why"}))
    codes = [
        code_of(world.asks("changeset.open", asked, call_id=f"c{number}")) for number in range(MAX_WAITING_EACH + 5)
    ]
    assert codes == [None] * MAX_WAITING_EACH + ["E_OVERLOADED"] * 5
    assert world.asks("changeset.open", asked, world.reviewer, call_id="c") == [], "it waits for the supervisor"


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("config.propose", marks=pytest.mark.feature("live_config")),
        pytest.param("approval.ask", marks=pytest.mark.feature("approvals")),
        pytest.param("budget.reserve", marks=pytest.mark.feature("budgets")),
        pytest.param("budget.settle", marks=pytest.mark.feature("budgets")),
        pytest.param("model.permit", marks=pytest.mark.feature("gates")),
        pytest.param("model.over", marks=pytest.mark.feature("gates")),
        pytest.param("model.out", marks=pytest.mark.feature("gates")),
        pytest.param("oauth.token", marks=pytest.mark.feature("oauth")),
        pytest.param("changeset.open", marks=pytest.mark.feature("changesets")),
        pytest.param("changeset.commit", marks=pytest.mark.feature("changesets")),
        "agents.list",
        "agents.spawn",
        pytest.param("restart", marks=pytest.mark.feature("restart")),
        "admin",
    ],
)
def test_what_the_broker_opens_is_not_looked_through_when_it_is_too_long(kind: str) -> None:
    """To check how deep a MiB of small lists nests takes the loop 0.4 s."""
    world = Attacked()
    small_lists = b"\xdd" + (900_000).to_bytes(4, "big") + b"\x90" * 900_000
    peer = world.stranger if kind == "admin" else world.coder
    frame = Frame("admin", id="long") if kind == "admin" else world.frame(peer, kind, b"", call_id="c", tool="t")
    frame.payload = Raw(small_lists)
    (answer,) = world.send(peer, frame)
    assert from_raw(answer.payload, dict)["code"] == "E_FRAME_TOO_LARGE"
    (most_bytes,) = {
        take.most_bytes for part in world.bench.router.parts for take in part.takes if take.frame_type == kind
    }
    assert there(most_bytes) < 300_000


@pytest.mark.feature("approvals", "budgets")
def test_nobody_reaches_what_another_instance_has_asked_or_reserved() -> None:
    from goondan.features.approvals.wire import ApprovalAsk
    from goondan.features.budgets.broker import Budgets

    world = Attacked()
    asked = bytes(to_raw(ApprovalAsk(kind="question", args=to_raw({}), message="whose?")))
    reserve = bytes(to_raw({"id": "m", "kind": "model", "inputTokens": 5, "outputTokens": 5}))
    world.asks("approval.ask", asked, world.reviewer, call_id="q", tool="t")
    world.asks("budget.reserve", reserve, world.reviewer)
    held = dict(part_of(world.bench.router, Budgets).accounts.trees["e2"].holds)
    assert len(held) == 1
    world.operator.admin(op="approve.answer", id="q", decision="answer", answer={"secret": 1})
    epoch = world.bench.instance("reviewer").epoch
    for event, number in (("e2", epoch), ("e1", world.bench.instance("coder").epoch)):
        for kind, body in (("approval.ask", asked), ("budget.settle", reserve), ("budget.reserve", reserve)):
            for answer in world.asks(kind, body, call_id="q", tool="t", event_id=event, epoch=number):
                assert b"secret" not in bytes(answer.payload)
    assert part_of(world.bench.router, Budgets).accounts.trees["e2"].holds == held
    assert {item.event.instance.agent for item in world.bench.items.values() if item.id == "q" and not item.open} == {
        "reviewer"
    }
