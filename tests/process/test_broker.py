"""The real broker against peers that lie, flood and break the rules."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from msgspec import structs

import goondan.schemas.transport.link
from goondan.schemas.bundle.launch import KernelPlan
from goondan.schemas.transport.link import Link, boottime_ms
from goondan.schemas.wire.codec import MAX_FRAME_BYTES, FrameError, decode, encode, encode_value, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import ErrorPayload, Frame, Hello, Lease, ReplyTo
from tests.process.bare_broker import ANSWER_MS, TOOL, Broker, Raw, bare_broker, call_tool, plan

#: Frames that wait for the broker when others ask.
FLOOD = 20_000


@pytest.fixture
def broker() -> Iterator[Broker]:
    with bare_broker() as made:
        yield made


def code(frame: Frame) -> str:
    assert frame.type == "error", frame
    error = from_raw(frame.payload, ErrorPayload)
    assert error.message
    assert error.suggestion
    assert error.help_url == "https://docs.goondan.ai/errors/" + error.code
    return error.code


def leased(broker: Broker, key: str = "k", event_id: str = "e1", **event: object) -> tuple[Raw, Frame, Raw]:
    """An agent that holds an event: the agent's connection, the event, the client's connection."""
    client = broker.hello("client", operator=True)
    frame = Frame("event", id="1", event_id=event_id, to="coder", instance_key=key, **event)  # type: ignore[arg-type]
    frame.reply_to = ReplyTo("client", "corr")
    frame.payload = to_raw({"id": event_id, "type": "user", "createdAt": "2026-01-01T00:00:00Z"})
    assert client.ask(frame).stage == "accepted"
    agent = broker.hello("agent", agent="coder", instance_key=key)
    return agent, agent.receive(), client


def call(event: Frame, call_id: str = "t/1", **more: object) -> Frame:
    frame = Frame("tool.call", id="c" + call_id, call_id=call_id, tool=TOOL, event_id=event.event_id, epoch=event.epoch)
    frame.payload = to_raw({"args": {}, "turnId": "t", "toolCallId": "1"})
    for name, value in more.items():
        setattr(frame, name, value)
    return frame


def test_nobody_is_heard_before_hello(broker: Broker) -> None:
    for cls in ("agent", "toolhost", "client", "control"):
        assert code(broker.raw(cls).ask(Frame("event", id="1", to="coder"))) == "E_HELLO_REQUIRED"


@pytest.mark.parametrize("late_s", [0.0, 3600.0])
async def test_a_frame_that_nobody_waits_for_leaves_with_the_next_one_or_soon(
    late_s: float, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goondan.schemas.transport.link, "LATE_S", late_s)
    link = Link(broker.endpoint("client"), broker.token("client"), on_frame=lambda _: None)
    await link.start()
    written: asyncio.Queue[list[str]] = asyncio.Queue()
    send = link._transport.send

    def look(messages: deque[bytes]) -> None:
        written.put_nowait([decode(message).id for message in messages])
        send(messages)

    link._transport.send = look  # type: ignore[method-assign]
    for name in ("1", "2"):
        assert link.send(Frame("ping", id=name), with_next=True)
    if late_s:
        for _ in range(5):
            await asyncio.sleep(0)
        assert written.empty()
        link.send(Frame("ping", id="3"))
    assert await written.get() == (["1", "2", "3"] if late_s else ["1", "2"])
    await link.close()


async def test_before_it_has_a_token_a_link_says_nothing(broker: Broker) -> None:
    asked = asyncio.Event()
    link = Link(broker.endpoint("agent"), "", on_frame=lambda _: None)
    link.connect(asked.set)
    await asyncio.wait_for(asked.wait(), ANSWER_MS / 1000)
    assert not link.ready
    welcome = await link.start(token=broker.token("agent", agent="coder", instance_key="later"))
    assert welcome.instance_key == "later"
    await link.close()


def test_the_token_is_the_authority_not_the_socket(broker: Broker) -> None:
    client_token = broker.token("client", operator=True)
    for cls in ("agent", "toolhost", "control"):
        peer = broker.raw(cls)
        hello = Frame("hello", id="h", payload=to_raw(Hello(client_token, "i")))
        assert code(peer.ask(hello)) == "E_CLASS_MISMATCH"
    forged = broker.raw("client")
    assert code(forged.ask(Frame("hello", id="h", payload=to_raw(Hello("a.b", "i"))))) == "E_TOKEN_INVALID"


def test_a_second_process_for_a_principal_waits_for_the_end_of_the_first(broker: Broker) -> None:
    first = broker.hello("agent", agent="coder", instance_key="k")
    second = broker.raw("agent")
    hello = Frame("hello", id="h", payload=to_raw(Hello(broker.token("agent", agent="coder", instance_key="k"), "2")))
    assert code(second.ask(hello)) == "E_PRINCIPAL_BUSY"
    first.close()
    broker.peers.remove(first)
    until = time.monotonic() + 5
    while (answer := second.ask(hello)).type == "error" and time.monotonic() < until:
        time.sleep(0.02)  # the close is noticed by the send that the refusal causes
    assert answer.type == "welcome"


def test_a_sender_cannot_say_who_it_is(broker: Broker) -> None:
    agent, event, _ = leased(broker)
    host = broker.hello("toolhost")
    agent.send(call(event, from_="reviewer", instance_key="other", chain=["x"]))
    forwarded = host.receive()
    assert (forwarded.from_, forwarded.instance_key, forwarded.chain) == ("coder", "k", None)
    assert forwarded.workdir == f"{broker.plan.state_dir}/instances/coder/k/workspace"


def test_an_agent_reaches_only_what_it_holds_and_declares(broker: Broker) -> None:
    agent, event, _ = leased(broker)
    broker.hello("toolhost")
    assert code(agent.ask(call(event, tool="secret__tool"))) == "E_FORBIDDEN"
    assert code(agent.ask(call(event, workdir="/etc"))) == "E_FORBIDDEN"
    assert code(agent.ask(call(event, epoch=(event.epoch or 0) - 1))) == "E_LEASE_LOST"
    assert code(agent.ask(call(event, event_id="other"))) == "E_LEASE_LOST"
    assert code(agent.ask(call(event, call_id=""))) == "E_FRAME_INVALID"
    assert code(agent.ask(Frame("tool.result", id="r", call_id="t/1"))) == "E_FRAME_TYPE"


def test_a_foreign_call_id_is_of_no_use(broker: Broker) -> None:
    one, event, _ = leased(broker, "one", "e1")
    two, other, _ = leased(broker, "two", "e2")
    host = broker.hello("toolhost")
    one.send(call(event))
    assert host.receive().call_id == "t/1"
    assert code(two.ask(call(other))) == "E_FORBIDDEN"
    two.send(Frame("tool.cancel", id="x", call_id="t/1"))
    host.send(Frame("tool.result", id="r", call_id="t/1", payload=to_raw({"status": "ok"})))
    assert one.receive().type == "tool.result"


def test_a_result_counts_once_and_only_from_the_host_that_runs_the_call(broker: Broker) -> None:
    agent, event, _ = leased(broker)
    host = broker.hello("toolhost", agent="1")
    agent.send(call(event))
    host.receive()
    liar = broker.hello("toolhost", agent="2")
    liar.send(Frame("tool.result", id="r", call_id="t/1", payload=to_raw("lie")))
    host.send(Frame("tool.result", id="r", call_id="t/1", payload=to_raw("truth")))
    host.send(Frame("tool.result", id="r", call_id="t/1", payload=to_raw("again")))
    assert from_raw(agent.receive().payload, str) == "truth"
    assert agent.ask(Frame("ping", id="p")).type == "pong", "nothing else came"


def test_a_clients_event_is_accepted_once_and_answered_to_whoever_repeats_it(broker: Broker) -> None:
    agent, event, client = leased(broker)
    done = Frame("ack", id="d", stage="done", event_id="e1", epoch=event.epoch, payload=to_raw("answer"))
    assert agent.ask(done).stage == "accepted"
    assert from_raw(client.receive().payload, str) == "answer"
    assert agent.ask(done).stage == "accepted", "a repeat is heard again"
    other = broker.hello("client", operator=True)
    repeat = Frame("event", id="9", event_id="e1", to="coder", instance_key="k", reply_to=ReplyTo("client", "corr"))
    assert code(other.ask(repeat)) == "E_FRAME_INVALID", "another content"
    repeat.payload = to_raw({"id": "e1", "type": "user", "createdAt": "2026-01-01T00:00:00Z"})
    assert other.ask(repeat).stage == "accepted"
    assert from_raw(other.receive().payload, str) == "answer"


def test_an_event_id_means_one_event(broker: Broker) -> None:
    _, _, client = leased(broker)
    assert code(client.ask(Frame("event", id="2", event_id="e1", to="reviewer", instance_key="k"))) == "E_FRAME_INVALID"
    stranger = broker.hello("client")
    assert stranger.ask(Frame("event", id="2", event_id="e2", to="coder", instance_key="k")).stage == "accepted"


def test_clients_that_are_no_operators_name_no_workdir_and_no_operator_agent(broker: Broker) -> None:
    client = broker.hello("client")
    frame = Frame("event", id="1", event_id="e", to="coder", instance_key="k", workdir="/")
    assert code(client.ask(frame)) == "E_FORBIDDEN"
    assert (
        code(client.ask(Frame("event", id="2", event_id="e", to="_operator", instance_key="k"))) == "E_AGENT_NOT_FOUND"
    )
    assert code(client.ask(Frame("event", id="3", event_id="e", to="coder", instance_key="a\nb"))) == "E_FRAME_INVALID"


def test_what_is_stamped_on_other_frames_is_of_bounded_size(broker: Broker) -> None:
    client = broker.hello("client", operator=True)
    long = Frame("event", id="1", event_id="e", to="coder", instance_key="k", workdir="/" * 4097)
    assert code(client.ask(long)) == "E_FRAME_INVALID"
    for number, workdir in enumerate(("", "relative", "/a\0b", "/" + "\U0001f600" * 1024)):
        strange = Frame("event", id=f"w{number}", event_id="e", to="coder", instance_key="k", workdir=workdir)
        assert code(client.ask(strange)) == "E_FRAME_INVALID"
    much = Frame("event", id="2", event_id="e", to="coder", instance_key="k", auth=to_raw("x" * (16 << 10)))
    assert code(client.ask(much)) == "E_FRAME_INVALID"


BAD = {
    "not msgpack": b"\xc1\xff\xff",
    "truncated": encode(Frame("event", id="1"))[:-2],
    "an array": msgspec.msgpack.encode([1, 2]),
    "wrong types": msgspec.msgpack.encode({"type": 7}),
    "no type": msgspec.msgpack.encode({"id": "x"}),
    "bad UTF-8": b"\x82\xa4type\xa2\xff\xfe\xa2id\xa1x",
    "deep payload": b"\x82\xa4type\xa5event\xa7payload" + b"\x91" * 200_000 + b"\xc0",
    "deep header": b"\x82\xa4type\xa5event\xa1x" + b"\x81\xa1a" * 200_000 + b"\xc0",
    "huge claim": b"\x82\xa4type\xa5event\xa7payload\xdb\xff\xff\xff\xff",
}


def test_bytes_that_are_no_frame_get_one_error_and_the_broker_goes_on(broker: Broker) -> None:
    for name, data in BAD.items():
        for peer in (broker.raw("client"), broker.hello("client", operator=True)):
            peer.socket.send(data)
            assert code(peer.receive()) in ("E_FRAME_INVALID", "E_HELLO_REQUIRED"), name
        assert broker.hello("client").ask(Frame("ping", id="p")).type == "pong", name


def test_an_oversized_message_costs_its_sender_the_connection(broker: Broker) -> None:
    flooder = broker.hello("client", operator=True)
    before = broker.memory()
    flooder.socket.send(b"x" * (64 << 20))
    assert broker.hello("client").ask(Frame("ping", id="p")).type == "pong"
    assert broker.memory() - before < 16 << 20


def test_an_unknown_type_is_answered_and_the_link_stays(broker: Broker) -> None:
    client = broker.hello("client")
    assert code(client.ask(Frame("teleport", id="1"))) == "E_FRAME_TYPE"
    assert client.ask(Frame("ping", id="p")).type == "pong"


def test_what_a_client_may_ask_the_broker_is_what_the_document_says(broker: Broker) -> None:
    text = (Path(__file__).parents[2] / "schemas" / "PROTOCOL-OPERATORS.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(stats|peers)` \| (.*) \|$", text, re.MULTILINE))
    agent = broker.hello("agent", agent="coder", instance_key="k")
    operator, client = broker.hello("client", operator=True), broker.hello("client")
    stats = client.ask(Frame("admin", id="1", payload=to_raw({"op": "stats"})))
    assert (stats.type, stats.in_reply_to) == ("reply", "1")
    body = from_raw(stats.payload, dict)
    assert all(f"`{name}`" in rows["stats"] for name in [*body, *body["connections"]])
    assert body["connections"] == {"control": 0, "agent": 1, "toolhost": 0, "client": 2}
    peers = from_raw(operator.ask(Frame("admin", id="2", payload=to_raw({"op": "peers"}))).payload, dict)["peers"]
    assert [(peer["role"], peer["name"], peer["instanceKey"]) for peer in peers] == [("agent", "coder", "k")]
    assert all(f"`{name}`" in rows["peers"] for name in peers[0])
    assert code(client.ask(Frame("admin", id="3", payload=to_raw({"op": "peers"})))) == "E_FRAME_INVALID"
    assert code(operator.ask(Frame("admin", id="4", payload=to_raw({"op": "stop"})))) == "E_FRAME_INVALID"
    assert agent.ask(Frame("ping", id="p")).type == "pong"


def test_parts_of_a_longer_message_are_nobody_elses_words(broker: Broker) -> None:
    victim = broker.hello("client")
    attacker = broker.hello("client")
    ping = encode(Frame("ping", id="p"))
    for parts in ([ping, ping], [ping, ping, ping], [ping, os.urandom(16), ping], [b"", b"", b"", b"", ping]):
        attacker.socket.send_multipart(parts)
        assert victim.ask(Frame("ping", id="v")).in_reply_to == "v"
    until = time.monotonic() + 5
    attacker.send(Frame("ping", id="end"))
    while attacker.receive().in_reply_to != "end":
        assert time.monotonic() < until
    stats = victim.ask(Frame("admin", id="s", payload=to_raw({"op": "stats"})))
    assert from_raw(stats.payload, dict)["counters"]["frames_multipart"] >= 4


def test_one_class_cannot_starve_another(broker: Broker) -> None:
    """docs/design/wire.md section 6: a flood on one socket delays the others by its quota, not by its length."""
    flooder = broker.hello("agent", agent="coder", instance_key="k")
    others = [broker.hello("control"), broker.hello("client", operator=True)]
    flooder.socket.setsockopt(zmq.SNDHWM, 0)
    os.kill(broker.process.pid, signal.SIGSTOP)  # all of it is there before the others ask
    try:
        for _ in range(FLOOD):
            flooder.socket.send(b"no frame")
        others[0].send(Frame("ping", id="p"))
        others[1].send(Frame("admin", id="s", payload=to_raw({"op": "stats"})))
    finally:
        os.kill(broker.process.pid, signal.SIGCONT)
    stats = others[1].receive()
    assert from_raw(stats.payload, dict)["counters"].get("frames_bad", 0) < FLOOD / 4
    while others[0].receive().in_reply_to != "p":
        pass  # news of peers


async def test_links_outlive_the_broker(broker: Broker) -> None:
    """A turn with the broker killed twice in it: one result, one answer."""
    events: asyncio.Queue[Frame] = asyncio.Queue()
    held: list[Lease] = []

    def serve(frame: Frame) -> None:
        if frame.type == "tool.call":
            host.send(Frame("tool.result", call_id=frame.call_id, payload=to_raw({"status": "ok"})))

    host = Link(broker.endpoint("toolhost"), broker.token("toolhost"), on_frame=serve)
    agent = Link(
        broker.endpoint("agent"),
        broker.token("agent", agent="coder", instance_key="k"),
        on_frame=events.put_nowait,
        held=lambda: {"leases": held},
    )
    client = Link(broker.endpoint("client"), broker.token("client", operator=True), on_frame=print)
    links = (host, agent, client)
    try:
        for link in links:
            await link.start()
        ask = Frame("event", event_id="e1", to="coder", instance_key="k", reply_to=ReplyTo("client", "c1"))
        answer = client.ask(ask)
        event = await asyncio.wait_for(events.get(), 20)
        held.append(Lease(event.event_id or "", event.epoch or 0, "k"))
        broker.restart()
        result = await asyncio.wait_for(call_tool(agent, call(event)), 20)
        assert from_raw(result.payload, dict) == {"status": "ok"}
        broker.restart()
        done = Frame("ack", stage="done", event_id="e1", epoch=event.epoch, payload=to_raw("the answer"))
        assert (await asyncio.wait_for(agent.post(done), 20)).stage == "accepted"
        assert from_raw((await asyncio.wait_for(answer, 20)).payload, str) == "the answer"
    finally:
        for link in links:
            await link.close()


def filled(frame: Frame, size: int, **fields: object) -> Frame:
    """The frame with a payload that makes it `size` bytes long, as it leaves its sender."""
    text = "x" * (size // 2)  # long enough for the same length field
    frame.payload = to_raw({**fields, "text": text})
    frame.payload = to_raw({**fields, "text": text + "x" * (size - len(encode_value(frame)))})
    assert len(encode_value(frame)) == size
    return frame


async def test_the_largest_frames_pass_although_the_broker_adds_to_them(broker: Broker) -> None:
    """A sender's limit is a receiver's limit less what the broker adds: sender, instance, workdir, chain.

    Between peers that have no folder in common; others send a large payload by reference (test_blobs.py).
    """
    whole: Any = {"by_reference": False}
    events: asyncio.Queue[Frame] = asyncio.Queue()
    calls: asyncio.Queue[Frame] = asyncio.Queue()
    agent_token = broker.token("agent", agent="coder", instance_key="k")
    host = Link(
        broker.endpoint("toolhost"), broker.token("toolhost"), on_frame=calls.put_nowait, incarnation="h" * 12, **whole
    )
    agent = Link(broker.endpoint("agent"), agent_token, on_frame=events.put_nowait, incarnation="a" * 12, **whole)
    client = Link(broker.endpoint("client"), broker.token("client", operator=True), on_frame=print, **whole)
    try:
        for link in (host, agent, client):
            await link.start()
        asked = Frame("event", id="q", event_id="e1", to="coder", instance_key="k", reply_to=ReplyTo("client", "c1"))
        with pytest.raises(FrameError) as too_large:
            client.ask(filled(asked, MAX_FRAME_BYTES + 1))
        assert too_large.value.info.code == "E_FRAME_TOO_LARGE"
        answer = client.ask(filled(asked, MAX_FRAME_BYTES))
        event = await asyncio.wait_for(events.get(), 20)
        assert bytes(event.payload) == bytes(asked.payload)
        assert len(encode_value(event)) > MAX_FRAME_BYTES

        made = call(event)
        made.first_sent_ms = boottime_ms()
        filled(made, MAX_FRAME_BYTES + 1, args={}, turnId="t", toolCallId="1")
        with pytest.raises(FrameError) as too_large:
            call_tool(agent, made)
        assert too_large.value.info.code == "E_FRAME_TOO_LARGE"
        result = call_tool(agent, filled(made, MAX_FRAME_BYTES, args={}, turnId="t", toolCallId="1"))
        arrived = await asyncio.wait_for(calls.get(), 20)
        assert bytes(arrived.payload) == bytes(made.payload)
        assert len(encode_value(arrived)) > MAX_FRAME_BYTES

        given = Frame("tool.result", id="r", call_id=arrived.call_id)
        with pytest.raises(FrameError) as too_large:
            host.send(filled(given, MAX_FRAME_BYTES + 1, status="ok"))
        assert too_large.value.info.code == "E_FRAME_TOO_LARGE"
        assert host.send(filled(given, MAX_FRAME_BYTES, status="ok"))
        assert bytes((await asyncio.wait_for(result, 20)).payload) == bytes(given.payload)

        done = Frame("ack", id="d", stage="done", event_id="e1", epoch=event.epoch)
        assert (await asyncio.wait_for(agent.post(filled(done, MAX_FRAME_BYTES)), 20)).stage == "accepted"
        answered = await asyncio.wait_for(answer, 20)
        assert bytes(answered.payload) == bytes(done.payload)
        assert len(encode_value(answered)) > MAX_FRAME_BYTES
        assert [link.bad_frames for link in (host, agent, client)] == [0, 0, 0]
    finally:
        for link in (host, agent, client):
            await link.close()


async def test_a_link_says_why_it_was_refused(broker: Broker) -> None:
    from goondan.schemas.wire.errors import GoondanError

    link = Link(broker.endpoint("agent"), broker.token("client"), on_frame=print)
    with pytest.raises(GoondanError) as refused:
        await link.start()
    assert refused.value.info.code == "E_CLASS_MISMATCH"
    nobody = Link(f"ipc://{broker.run_dir}/nobody.sock", "t.t", on_frame=print)
    with pytest.raises(GoondanError) as absent:
        await nobody.start(timeout_s=0.3)
    assert absent.value.info.code == "E_KERNEL_NOT_RUNNING"


async def test_no_wake_up_is_lost(broker: Broker) -> None:
    """The descriptor is edge-triggered: bursts of every size, from both sides, must all come through."""
    links = [Link(broker.endpoint("client"), broker.token("client"), on_frame=print) for _ in range(2)]
    try:
        for link in links:
            await link.start()
        for size in (1, 2, 3, 7, 63, 64, 65, 127, 128, 129, 500):
            asked = [links[n % 2].post(Frame("admin", payload=to_raw({"op": "stats"}))) for n in range(size)]
            replies = await asyncio.wait_for(asyncio.gather(*asked), 20)
            assert len({reply.in_reply_to for reply in replies}) == size
    finally:
        for link in links:
            await link.close()


def test_news_for_a_client_that_does_not_read_cost_nobody_anything(broker: Broker) -> None:
    """A hostile agent: it floods its asker, and speaks of events that are not its own."""
    agent, event, client = leased(broker, live=True)
    assert event.live
    before = broker.memory()
    text = to_raw({"kind": "text", "step": 1, "text": "x" * 12_000})
    foreign = Frame("runtime.event", event_id="e2", epoch=event.epoch, payload=text)
    for number in range(6_000):
        agent.send(Frame("runtime.event", event_id="e1", epoch=event.epoch, payload=text) if number % 3 else foreign)
    assert agent.ask(Frame("ping", id="p")).type == "pong"
    answer = to_raw({"id": "a", "type": "agent.response", "createdAt": "2026-01-01T00:00:00Z"})
    done = Frame("ack", id="d", stage="done", event_id="e1", epoch=event.epoch, payload=answer)
    assert agent.ask(done).stage == "accepted"
    assert broker.memory() - before < 64 << 20
    heard = 0
    while (frame := client.receive()).type == "runtime.event":
        assert (frame.event_id, frame.in_reply_to, frame.from_) == ("e1", "corr", "coder")
        heard += 1
    assert frame.in_reply_to == "corr"
    stats = from_raw(client.ask(Frame("admin", id="s", payload=to_raw({"op": "stats"}))).payload, dict)["counters"]
    assert stats["live_refused"] == 2_000
    assert stats["live"] + stats["live_dropped"] >= 4_000
    assert heard <= stats["live"] < 4_000


def test_a_link_that_waits_for_nothing_seldom_looks_and_one_that_waits_is_in_time(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("goondan.schemas.transport.link.TICK_S", 0.02)

    class Counted(Link):
        def _tick(self) -> None:
            super()._tick()
            pauses.append(self._tick_s)

    pauses: list[float] = []

    async def live() -> None:
        token = broker.token("agent", agent="coder", instance_key="k")
        link = Counted(broker.endpoint("agent"), token, on_frame=print)
        await link.start()
        while len(pauses) < 2 or pauses[-1] < 0.2:
            await asyncio.sleep(0.005)
        assert pauses[-2:] == [0.08, 0.32]
        os.kill(broker.process.pid, signal.SIGSTOP)  # nobody else says that it is late
        asked = Frame("event", event_id="late", to="reviewer", instance_key="r", reply_to=ReplyTo("coder", "c"))
        asked.deadline_ms, asked.payload = 100, to_raw(None)
        try:
            answer = link.ask(asked)
            assert link._ticker is not None
            assert link._ticker.when() <= asyncio.get_running_loop().time() + 0.02, "it looks when it rested"
            with pytest.raises(GoondanError) as late:
                await answer
        finally:
            os.kill(broker.process.pid, signal.SIGCONT)
        assert late.value.info.code == "E_AGENT_TIMEOUT"
        await link.close(0)

    asyncio.run(live())


def quick(state_dir: str) -> KernelPlan:
    return structs.replace(plan(state_dir), durability="process")


def accepted(broker: Broker, event_id: str) -> Frame:
    """An event that nobody has taken yet."""
    client = broker.hello("client", operator=True)
    frame = Frame("event", id="1", event_id=event_id, to="coder", instance_key="k", reply_to=ReplyTo("client", "c"))
    frame.payload = to_raw({"id": event_id, "type": "user", "createdAt": "2026-01-01T00:00:00Z"})
    assert client.ask(frame).stage == "accepted"
    return frame


def test_what_was_promised_comes_into_the_tables_when_nothing_waits() -> None:
    with bare_broker(quick) as broker:
        for event_id in ("e1", "e2"):  # a broker's first look for files brings everything there as well
            accepted(broker, event_id)
            until = time.monotonic() + ANSWER_MS / 1000
            found = 0
            while not found and time.monotonic() < until:
                time.sleep(0.05)
                with closing(sqlite3.connect(f"{broker.plan.state_dir}/kernel.db")) as db:
                    query = "SELECT count(*) FROM records WHERE subject = ?"
                    found = db.execute(query, (f"event:{event_id}",)).fetchone()[0]
            assert found


def test_an_event_that_has_just_been_accepted_survives_a_kill() -> None:
    with bare_broker(quick) as broker:
        sent = accepted(broker, "e1")
        broker.restart()
        received = broker.hello("agent", agent="coder", instance_key="k").receive()
        assert (received.event_id, received.payload) == (sent.event_id, sent.payload)
