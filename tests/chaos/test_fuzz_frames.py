"""Mutated frames at every socket of the broker: it answers or drops each, stays up, and does not grow.

`make chaos` sends 100,000 to each socket, `make test` a part of them.
"""

from __future__ import annotations

import os
import random

import pytest
import zmq

from schemas.codec import encode, from_raw, to_raw
from schemas.frames import FRAME_TYPES, Frame, Hello, ReplyTo, Source
from schemas.tokens import TokenClass
from tests.process.bare_broker import TOOL, Broker, Raw, bare_broker

FRAMES = 100_000 if "GOONDAN_CHAOS_KILLS" in os.environ else 30_000
#: Frames of a connection before another one takes its place: fuzz may end a connection (an accepted `bye`).
PER_CONNECTION = FRAMES // 20
#: What the broker may grow by: bounded tables (finished events, counters) and the allocator's slack.
GROWTH_BYTES = 24 << 20


def corpus(broker: Broker, cls: TokenClass) -> list[bytes]:
    """Well-formed frames of every type, with every field set in some of them."""
    frames = []
    for kind in sorted(FRAME_TYPES):
        frames.append(Frame(kind, id="1"))
        full = Frame(kind, id="2", from_="reviewer", to="coder", instance_key="k", event_id="e1", tool=TOOL)
        full.call_id, full.in_reply_to, full.epoch, full.stage = "t/1", "h", 1, "done"
        full.reply_to, full.source, full.chain = ReplyTo("client", "c"), Source("agent", "x"), ["a", "b"]
        full.deadline_ms, full.first_sent_ms, full.calls, full.workdir = 5, 5, ["t/1"], "/etc"
        full.payload = to_raw({"op": "stats", "kind": "exited", "principal": {"role": "agent", "name": "coder"}})
        frames.append(full)
    token = broker.token(cls, agent="coder", instance_key="k")
    frames.append(Frame("hello", id="h", payload=to_raw(Hello(token, "inc"))))
    return [encode(frame) for frame in frames]


def mutate(dice: random.Random, data: bytes, others: list[bytes]) -> bytes:
    body = bytearray(data)
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(body) + 1)
        match dice.randrange(7):
            case 0 if at < len(body):
                body[at] = dice.randrange(256)
            case 1 if at < len(body):
                body[at] ^= 1 << dice.randrange(8)
            case 2:
                del body[at : at + dice.randrange(1, 9)]
            case 3:
                body[at:at] = dice.randbytes(dice.randrange(1, 9))
            case 4:
                body[at:at] = dice.choice(others)[: dice.randrange(1, 200)]
            case 5:
                body[at:at] = dice.choice((b"\x91", b"\x81\xa1a")) * dice.randrange(1, 300)
            case 6:
                del body[at:]
    return bytes(body)


def drain(peer: Raw) -> None:
    while True:
        try:
            peer.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return


@pytest.mark.parametrize("cls", ["agent", "toolhost", "client", "control"])
def test_mutated_frames(cls: TokenClass) -> None:
    dice = random.Random(f"goondan {cls}")
    with bare_broker() as broker:
        frames = corpus(broker, cls)
        watcher = broker.hello("client", operator=True)
        memory = 0
        for sent in range(0, FRAMES, PER_CONNECTION):
            # every other connection has said hello; the rest fuzz the door
            number = sent // PER_CONNECTION
            name = "coder" if cls == "agent" else f"h{number}"
            claims = {"agent": name, "instance_key": f"k{number}"}
            peer = broker.hello(cls, **claims) if number % 2 else broker.raw(cls)
            for index in range(PER_CONNECTION):
                peer.socket.send(mutate(dice, dice.choice(frames), frames) or b"\xc1")
                if index % 64 == 0:
                    drain(peer)
            peer.send(Frame("ping", id="end"))
            while peer.receive().in_reply_to != "end":
                pass  # it has heard everything before that
            peer.close()
            broker.peers.remove(peer)
            assert watcher.ask(Frame("ping", id=f"p{sent}")).in_reply_to == f"p{sent}", "the broker hangs"
            if number == 3:
                memory = broker.memory()
        stats = watcher.ask(Frame("admin", id="s", payload=to_raw({"op": "stats"})))
        counters = from_raw(stats.payload, dict)["counters"]
        assert counters["frames_bad"] > FRAMES / 20, counters
        assert not counters.get("internal_errors"), counters
        assert broker.memory() - memory < GROWTH_BYTES
