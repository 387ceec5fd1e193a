"""The broker is killed at random moments under load, and nobody who has sent anything ever comes back.

Every event that was acknowledged is handed out by a later broker, and ends once: none is lost, and none whose end was
acknowledged comes again.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import msgspec
import pytest
import zmq

from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Frame
from tests.process import bare_broker as bare_broker_module
from tests.process.bare_broker import Broker, Raw, bare_broker

KEYS = 4
#: Events of one sender, in one go: within the credit of a connection.
BURST = 200
ROUNDS = 3
#: How long agents wait for a next event before there is none (milliseconds).
QUIET_MS = 500


def send_and_be_killed(broker: Broker, chance: random.Random, names: list[str]) -> set[str]:
    """A client sends `names`, and the broker is killed meanwhile. Returns what was acknowledged; the client is gone."""
    client = broker.hello("client", operator=True)
    for name in names:
        event = AgentEvent(id=name, type="user", created_at="2026-01-01T00:00:00Z", input="x" * chance.randrange(2000))
        key = f"k{chance.randrange(KEYS)}"
        client.send(Frame("event", id=name, to="coder", instance_key=key, event_id=name, payload=to_raw(event)))
    acknowledged: set[str] = set()
    for_now = chance.randrange(
        1, BURST
    )  # by what was done, not by the clock: a busy machine would have done nothing yet
    while len(acknowledged) < for_now:
        frame = client.receive()
        if frame.type == "ack":
            acknowledged.add(frame.event_id or "")
    broker.restart()
    client.socket.setsockopt(zmq.RCVTIMEO, 200)
    try:
        while True:
            frame = client.receive()
            if frame.type == "ack":
                acknowledged.add(frame.event_id or "")
    except zmq.Again:
        pass
    client.close()
    broker.peers.remove(client)
    return acknowledged


def work(broker: Broker, limit: float, ended: Counter[str], handed: Counter[str]) -> None:
    """Agents end what they are handed, until nothing comes any more or for `limit` seconds; then they are gone."""
    agents = [broker.hello("agent", agent="coder", instance_key=f"k{number}") for number in range(KEYS)]
    poller = zmq.Poller()
    for agent in agents:
        poller.register(agent.socket, zmq.POLLIN)
    by_socket: dict[object, Raw] = {agent.socket: agent for agent in agents}
    until = time.monotonic() + limit
    while time.monotonic() < until and (ready := poller.poll(QUIET_MS)):
        for socket, _ in ready:
            agent = by_socket[socket]
            frame = agent.receive()
            if frame.type == "event":
                handed[frame.event_id or ""] += 1
                agent.send(
                    Frame("ack", id=f"done:{frame.event_id}", event_id=frame.event_id, epoch=frame.epoch, stage="done")
                )
            elif frame.type == "ack":
                assert (frame.in_reply_to or "").startswith("done:")
                ended[frame.event_id or ""] += 1
                assert handed[frame.event_id or ""] >= 1
    for agent in agents:
        agent.close()
        broker.peers.remove(agent)


def ends_of(broker: Broker, names: set[str]) -> dict[str, str]:
    """How these events ended, as the broker says who is asked to cancel them."""
    client = broker.hello("client", operator=True)
    states = {}
    for name in sorted(names):
        reply = client.ask(Frame("admin", id=name, payload=to_raw({"op": "cancel", "eventId": name})))
        states[name] = str(from_raw(reply.payload, dict).get("state"))
    return states


@pytest.mark.timeout(240)
@pytest.mark.parametrize("durability", ["power", "process"])
def test_what_was_acknowledged_ends_once_though_no_sender_returns(
    durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bare_broker_module.plan
    monkeypatch.setattr(
        bare_broker_module, "plan", lambda state: msgspec.structs.replace(made(state), durability=durability)
    )
    chance = random.Random(durability)
    acknowledged: set[str] = set()
    ended: Counter[str] = Counter()
    with bare_broker() as broker:
        for number in range(ROUNDS):
            names = [f"e{number}.{count}.{os.urandom(4).hex()}" for count in range(BURST)]
            acknowledged |= send_and_be_killed(broker, chance, names)
            before = set(ended)
            handed: Counter[str] = Counter()
            work(broker, chance.uniform(0.01, 0.2), ended, handed)
            assert not before & set(handed), "what had ended was handed out again"
            broker.restart()
        before, handed = set(ended), Counter()
        work(broker, 60, ended, handed)
        assert not before & set(handed)
        # An agent that went may not have heard of the last ends, so the journal is asked.
        states = ends_of(broker, acknowledged | set(ended))
    assert set(states.values()) == {"done"}, {name: state for name, state in states.items() if state != "done"}
    assert set(ended.values()) == {1}
