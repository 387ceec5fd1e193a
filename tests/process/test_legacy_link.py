"""The older message form over a real broker: with itself, and with programs that speak frames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import MAX_FRAME_BYTES, from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame, ReplyTo, Shutdown
from tests.legacy.link import LegacyPort
from tests.legacy.messages import LegacyMessage, unparse
from tests.process.bare_broker import Broker, bare_broker

PATIENCE_S = 30.0


@pytest.fixture
def broker() -> Iterator[Broker]:
    with bare_broker() as made:
        yield made


class Program:
    """A port, and what came to it. Its handler fails at the payload `break`."""

    def __init__(self, broker: Broker, agent: str | None = None, key: str = "k") -> None:
        cls = "client" if agent is None else "agent"
        claims = {"operator": True} if agent is None else {"agent": agent, "instance_key": key}
        self.came: asyncio.Queue[LegacyMessage] = asyncio.Queue()
        self.port = LegacyPort(
            broker.endpoint(cls),  # type: ignore[arg-type]
            broker.token(cls, **claims),  # type: ignore[arg-type]
            self.handle,
        )

    async def handle(self, message: LegacyMessage) -> None:
        self.came.put_nowait(message)
        if message.payload == "break":
            raise ValueError("broken")

    async def next(self) -> LegacyMessage:
        return await asyncio.wait_for(self.came.get(), PATIENCE_S)

    async def send(self, kind: str, to: str, payload: object, correlation: str | None = None) -> str | None:
        message = {"type": kind, "from": self.port.name, "to": to, "payload": payload}
        if correlation is not None:
            message["correlationId"] = correlation
        return await asyncio.wait_for(self.port.send(message, instance_key="k"), PATIENCE_S)


@asynccontextmanager
async def programs(*made: Program) -> AsyncIterator[None]:
    try:
        for program in made:
            await program.port.start()
        yield
    finally:
        for program in made:
            await program.port.close()


@pytest.mark.requirement("IPC-06", "IPC-08")
async def test_a_delegate_goes_through_the_kernel_and_its_result_comes_back(broker: Broker) -> None:
    client, coder, reviewer = Program(broker), Program(broker, "coder"), Program(broker, "reviewer")
    async with programs(client, coder, reviewer):
        assert await client.send("delegate", "coder", {"do": ["it"]}, "c-1") == "c-1"
        asked = await coder.next()
        assert asked == LegacyMessage("delegate", "client/1", "coder", {"do": ["it"]}, "c-1")
        inner = await coder.send("delegate", "reviewer", "look")
        passed = await reviewer.next()
        assert passed == LegacyMessage("delegate", "coder", "reviewer", "look", inner)
        await reviewer.send("delegate_result", "coder", None, inner)
        assert await coder.next() == LegacyMessage("delegate_result", "reviewer", "coder", None, inner)
        large = "x" * (3 * MAX_FRAME_BYTES)
        await coder.send("delegate_result", asked.from_, large, "c-1")
        assert await client.next() == LegacyMessage("delegate_result", "coder", "client", large, "c-1")
        for to, correlation in ((asked.from_, "c-1"), ("reviewer", None)):
            with pytest.raises(GoondanError) as nothing:
                await coder.send("delegate_result", to, "again", correlation)
            assert nothing.value.info.code == "E_FRAME_INVALID"


@pytest.mark.requirement("IPC-05", "IPC-08")
async def test_an_event_is_answered_by_nobody_and_ends_with_its_handler(broker: Broker) -> None:
    client, coder = Program(broker), Program(broker, "coder")
    async with programs(client, coder):
        for payload in ("one", "break", "two"):
            assert await client.send("event", "coder", payload) is None
        for payload in ("one", "break", "two"):  # each is handed over when the one before has ended
            message = await coder.next()
            assert (message.type, message.payload, message.correlation_id) == ("event", payload, None)
        assert client.came.empty()


async def test_what_goes_wrong_comes_back_as_a_result_or_is_raised(broker: Broker) -> None:
    client, coder = Program(broker), Program(broker, "coder")
    async with programs(client, coder):
        await client.send("delegate", "coder", "break", "b-1")
        failed = await client.next()
        assert (failed.correlation_id, failed.payload["error"]["code"]) == ("b-1", "E_AGENT_FAILED")
        await client.send("delegate", "nobody", "hello", "b-2")
        unknown = await client.next()
        assert (unknown.from_, unknown.payload["error"]["code"]) == ("nobody", "E_AGENT_NOT_FOUND")
        await client.send("delegate", "reviewer", "wait", "b-3")
        for kind, to, correlation, code in (
            ("delegate", "reviewer", "b-3", "E_FRAME_INVALID"),
            ("event", "nobody", None, "E_AGENT_NOT_FOUND"),
            ("shutdown", "coder", None, "E_FORBIDDEN"),
            ("teleport", "coder", None, "E_FRAME_INVALID"),
        ):
            with pytest.raises(GoondanError) as refused:
                await client.send(kind, to, {}, correlation)
            assert refused.value.info.code == code


@pytest.mark.requirement("IPC-08")
async def test_an_old_agent_answers_a_program_that_speaks_frames(broker: Broker) -> None:
    coder = Program(broker, "coder", "plain")
    client = Link(broker.endpoint("client"), broker.token("client", operator=True), on_frame=print)
    async with programs(coder):
        await client.start()
        try:
            ask = Frame("event", event_id="p1", to="coder", instance_key="plain", reply_to=ReplyTo("client", "q"))
            ask.payload = to_raw(AgentEvent(id="p1", type="user.message", created_at="", input="hi"))
            waiting = client.ask(ask)
            asked = await coder.next()
            assert (asked.type, asked.payload, asked.correlation_id) == ("delegate", "hi", "q")
            await coder.send("delegate_result", asked.from_, {"a": 1})
            event = from_raw((await asyncio.wait_for(waiting, PATIENCE_S)).payload, AgentEvent)
            assert event.answer is not None
            assert (event.answer.status, json.loads(event.answer.response or "")) == ("completed", {"a": 1})
            assert event.metadata == {"inReplyTo": "p1"}
            bad = Frame("event", event_id="p2", to="coder", instance_key="plain", reply_to=ReplyTo("client", "q2"))
            bad.payload = to_raw([1])
            answer = from_raw((await asyncio.wait_for(client.ask(bad), PATIENCE_S)).payload, AgentEvent).answer
            assert answer is not None and answer.error is not None
            assert (answer.status, answer.error.code) == ("failed", "E_FRAME_INVALID")
        finally:
            await client.close()


@pytest.mark.requirement("IPC-08")
async def test_an_old_program_asks_an_agent_that_speaks_frames(broker: Broker) -> None:
    events: asyncio.Queue[Frame] = asyncio.Queue()
    token = broker.token("agent", agent="coder", instance_key="new")
    agent = Link(broker.endpoint("agent"), token, on_frame=events.put_nowait)
    client = Program(broker)
    async with programs(client):
        await agent.start()
        try:
            message = LegacyMessage("delegate", "client", "coder", "hi", "n-1")
            await client.port.send(message, instance_key="new")
            event = await asyncio.wait_for(events.get(), PATIENCE_S)
            assert event.reply_to == ReplyTo("client", "n-1")
            assert from_raw(event.payload, AgentEvent).input == "hi"
            answer = Answer(turn_id="t", status="completed", response="hello")
            done = AgentEvent(id="a", type="agent.response", created_at="", answer=answer)
            ack = Frame("ack", stage="done", event_id=event.event_id, epoch=event.epoch, payload=to_raw(done))
            await asyncio.wait_for(agent.post(ack), PATIENCE_S)
            assert (await client.next()).payload == "hello"
        finally:
            await agent.close()


async def test_what_is_held_outlives_the_broker_and_is_released_at_the_end(broker: Broker) -> None:
    client, coder = Program(broker), Program(broker, "coder", "k")
    async with programs(client):
        async with programs(coder):
            await client.send("delegate", "coder", "later", "l-1")
            asked = await coder.next()
            broker.restart()
        second = Program(broker, "coder", "k")
        async with programs(second):
            again = await second.next()
            assert (again.payload, again.correlation_id) == (asked.payload, "l-1")
            broker.restart()
            await second.send("delegate_result", again.from_, "done", "l-1")
            assert (await client.next()).payload == "done"
            assert second.came.empty()


@pytest.mark.requirement("IPC-08")
async def test_a_shutdown_is_a_message_and_is_acknowledged_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with bare_broker() as own:
        coder = Program(own, "coder")
        seen: list[str] = []
        async with programs(coder):
            send = coder.port.link.send

            def watched(frame: Frame) -> bool:
                seen.append(frame.type)
                return send(frame)

            monkeypatch.setattr(coder.port.link, "send", watched)
            coder.port._on_frame(Frame("shutdown", id="s", payload=to_raw(Shutdown(500, "restart"))))
            told = unparse(await coder.next())
            assert told["payload"] == {"gracePeriodMs": 500, "reason": "restart"}
            assert (told["type"], told["from"], told["to"]) == ("shutdown", "orchestrator", "coder")
            assert seen == []
        assert seen == ["shutdown_ack"]
