"""Mutated frames at every socket of the broker: it answers or drops each, stays up, and does not grow.

At the clients' socket 50 clients work meanwhile, and get their own answers. `make chaos` sends 100,000 to each socket,
`make test` a part of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import AsyncExitStack

import pytest
import zmq

from goondan.schemas.transport import VARIABLE
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import encode, from_raw, to_raw
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame, Hello, ReplyTo, Source
from goondan.schemas.wire.tokens import TokenClass
from scripts.export_schemas import frame_types
from tests.process.bare_broker import TOOL, Broker, Raw, bare_broker

FRAMES = 100_000 if "GOONDAN_CHAOS_KILLS" in os.environ else 30_000
#: Frames of a connection before another one takes its place: fuzz may end a connection (an accepted `bye`).
PER_CONNECTION = FRAMES // 20
#: Clients that work meanwhile, the instances that they ask, and how long each rests after an answer (seconds).
CLIENTS, INSTANCES, PAUSE_S = 50, 10, 0.03
#: What the broker may grow by: bounded tables (finished events, counters) and the allocator's slack.
GROWTH_BYTES = 24 << 20


def corpus(broker: Broker, cls: TokenClass) -> list[bytes]:
    """Well-formed frames of every type, with every field set in some of them."""
    frames = []
    for kind in sorted(frame_types()):
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


def storm(broker: Broker, cls: TokenClass) -> tuple[int, dict[str, int]]:
    """Send them. Returns by how many bytes the broker grew after the first connections, and its counters."""
    dice = random.Random(f"goondan {cls}")
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
    return broker.memory() - memory, from_raw(stats.payload, dict)["counters"]


def check(grown: int, counters: dict[str, int]) -> None:
    assert counters["frames_bad"] > FRAMES / 20, counters
    assert not counters.get("internal_errors"), counters
    assert grown < GROWTH_BYTES


@pytest.mark.parametrize("cls", ["agent", "toolhost", "control"])
def test_mutated_frames(cls: TokenClass) -> None:
    with bare_broker() as broker:
        check(*storm(broker, cls))


class Echo:
    """An agent's instance that answers with what it was asked."""

    def __init__(self, broker: Broker, key: str) -> None:
        token = broker.token("agent", agent="coder", instance_key=key)
        self.link = Link(broker.endpoint("agent"), token, on_frame=self.take)

    def take(self, frame: Frame) -> None:
        if frame.type == "event":
            asked = from_raw(frame.payload, AgentEvent)
            done = AgentEvent(id=f"{asked.id}:answer", type="agent.response", created_at="2026-01-01T00:00:00Z")
            done.answer = Answer(turn_id=asked.id, status="completed", response=str(asked.input))
            self.link.post(Frame("ack", stage="done", event_id=frame.event_id, epoch=frame.epoch, payload=to_raw(done)))


async def test_mutated_frames_while_fifty_clients_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "libzmq")
    with bare_broker() as broker:
        async with AsyncExitStack() as links:
            for number in range(INSTANCES):
                echo = Echo(broker, f"w{number}")
                links.push_async_callback(echo.link.close, 0)
                await echo.link.start()
            clients = [
                Link(broker.endpoint("client"), broker.token("client"), on_frame=lambda _: None) for _ in range(CLIENTS)
            ]
            for client in clients:
                links.push_async_callback(client.close, 0)
                await client.start()
            raging = asyncio.ensure_future(asyncio.to_thread(storm, broker, "client"))
            started = time.monotonic()

            async def work(number: int) -> int:
                count = 0
                while not raging.done():
                    count += 1
                    text = f"{number}-{count}"
                    event = AgentEvent(id=text, type="user.message", created_at="2026-01-01T00:00:00Z", input=text)
                    asks = Frame("event", to="coder", instance_key=f"w{number % INSTANCES}", event_id=text)
                    asks.reply_to, asks.payload = ReplyTo("client", text), to_raw(event)
                    answer = from_raw((await clients[number].ask(asks)).payload, AgentEvent).answer
                    assert answer is not None and answer.response == text
                    await asyncio.sleep(PAUSE_S)
                return count

            answered = await asyncio.gather(*(work(number) for number in range(CLIENTS)))
            grown, counters = await raging
            print(
                f"{FRAMES} mutated frames in {time.monotonic() - started:.0f} s, {counters['frames_bad']} of them no"
                f" frames; {sum(answered)} answers to {CLIENTS} clients, the slowest {min(answered)};"
                f" the broker grew by {grown >> 10} KiB"
            )
            assert min(answered) > 2, "a client was held up"
            check(grown, counters)
