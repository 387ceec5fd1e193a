"""Hostile payloads at a real broker: it answers each of them once, serves on, and does not grow."""

from __future__ import annotations

import random

import pytest
from msgspec import Raw, structs

from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.wire.codec import encode_value, from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame
from tests.process import bare_broker as bare
from tests.process.bare_broker import Broker, bare_broker
from tests.process.hostile_payloads import ASKED_BY_AGENTS, ASKED_BY_OPERATORS, payload
from tests.unit.kernel.broker.approving import ASK, rules
from tests.unit.kernel.broker.swarm import EXTENSIONS

FRAMES = 1200
#: What the broker may grow by: items, patches and the allocator's slack.
GROWTH_BYTES = 24 << 20
#: A frame that libzmq must not take into memory.
HUGE_BYTES = 16 << 20


def plan(state_dir: str) -> KernelPlan:
    """Agents with extensions, approvals and budgets, and an OAuthApp."""
    base = bare.plan(state_dir)
    agents = {
        name: structs.replace(
            spec,
            extensions=EXTENSIONS,
            parts={**rules(ASK), "budgets": to_raw({"tokens": 10**9, "wallSeconds": 999})},
        )
        for name, spec in base.agents.items()
    }
    return structs.replace(base, agents=agents, parts={"oauth": to_raw({"app": {"name": "app", "scopes": ["read"]}})})


def own_frame(broker: Broker) -> tuple[bare.Raw, Frame]:
    """An agent that holds an event, and a frame about it."""
    client, agent = broker.hello("client"), broker.hello("agent", agent="coder", instance_key="k")
    event = AgentEvent(id="e1", type="user.message", created_at="now", input="x")
    client.ask(Frame("event", id="1", to="coder", instance_key="k", event_id="e1", payload=to_raw(event)))
    delivered = agent.receive()
    assert delivered.type == "event"
    return agent, Frame("budget.settle", event_id="e1", epoch=delivered.epoch)


@pytest.mark.feature("approvals", "budgets", "live_config", "oauth")
def test_hostile_payloads_get_one_answer_each() -> None:
    dice = random.Random("a real broker")
    with bare_broker(plan) as broker:
        operator = broker.hello("client", operator=True)
        agent, own = own_frame(broker)
        before = broker.memory()
        asked = [one for one in ASKED_BY_OPERATORS if one["op"] not in ("cancel", "instance.delete")]
        for number in range(FRAMES):
            operators = dice.random() < 0.4
            sound = dict(dice.choice(asked)) if operators else {}
            kind = "admin" if operators else dice.choice(list(ASKED_BY_AGENTS))
            frame = structs.replace(own, type=kind, id=f"h{number}", call_id=f"t/{number}", tool="agents__request")
            frame.payload = Raw(payload(dice, sound or ASKED_BY_AGENTS[kind]))
            peer = operator if operators else agent
            peer.socket.send(encode_value(frame))
            answer = peer.receive()
            while answer.type not in ("reply", "error"):  # news about what has changed
                answer = peer.receive()
            assert answer.in_reply_to in (frame.id, None)
            if answer.type == "error":
                assert from_raw(answer.payload, dict)["code"] != "E_INTERNAL"
        stats = operator.ask(Frame("admin", id="s", payload=to_raw({"op": "stats"})))
        while stats.in_reply_to != "s":
            stats = operator.receive()
        assert not from_raw(stats.payload, dict)["counters"].get("internal_errors")

        huge = broker.hello("agent", agent="reviewer", instance_key="k")
        text = Frame("config.propose", id="huge", payload=to_raw({"id": "p", "reason": "x" * HUGE_BYTES}))
        huge.socket.send(encode_value(text))  # libzmq hangs up on whoever sends more than a frame can have
        assert operator.ask(Frame("ping", id="p")).in_reply_to == "p"
        assert broker.memory() - before < GROWTH_BYTES
