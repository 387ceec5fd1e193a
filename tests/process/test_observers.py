"""An observer of a real kernel: of a turn that already runs, of one that begins, with a slow reader, and with a broker
that is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from goondan.kernel.cli.observing import Missed, Observation, Seen
from goondan.kernel.cli.one_message import Message
from goondan.kernel.cli.session import Session
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.codec import from_raw, to_raw
from goondan.schemas.wire.errors import GoondanError
from goondan.schemas.wire.frames import AgentEvent, Answer, Frame
from goondan.schemas.wire.runtime_events import Observe, RuntimeEvent
from tests.kernel_fixture import PATIENCE_S, Sandbox
from tests.process.bare_broker import bare_broker
from tests.process.model_servers import server
from tests.process.test_live import Model, swarm


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with server("gated_llm") as url:
        yield url


@pytest.fixture
def model(base: str) -> Model:
    return Model(base)


@pytest.fixture(scope="module")
def running(base: str) -> Iterator[Sandbox]:
    with swarm(base) as made:
        made.detach()
        yield made


@asynccontextmanager
async def session(kernel: Sandbox) -> AsyncIterator[Session]:
    place: Any = SimpleNamespace(state_dir=str(kernel.state_dirs[0]))
    pidfd = os.pidfd_open(kernel.pid("supervisor"))
    try:
        found: Any = SimpleNamespace(place=place, pidfd=pidfd)
        async with Session(found) as made:
            yield made
    finally:
        os.close(pidfd)


class Reader:
    """What an observer has heard."""

    def __init__(self) -> None:
        self.heard: list[Seen | Missed] = []
        self.observation: Observation | None = None
        self._news = asyncio.Event()

    def __call__(self, heard: Seen | Missed) -> None:
        self.heard.append(heard)
        self._news.set()
        if self.observation is not None:
            self.observation.read(heard.number if isinstance(heard, Seen) else heard.last or 0)

    async def until(self, holds: Callable[[list[Seen | Missed]], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds(self.heard):
                self._news.clear()
                await self._news.wait()

    def kinds(self, event_id: str) -> list[str]:
        """What was heard of one event, without repetitions."""
        told = [one.event.kind for one in self.heard if isinstance(one, Seen) and one.event and _of(one, event_id)]
        return [kind for at, kind in enumerate(told) if told[at - 1 : at] != [kind]]

    def text(self, event_id: str) -> str:
        """The text of the event's last step; it must have no holes."""
        text = ""
        for one in self.heard:
            if isinstance(one, Seen) and one.event and _of(one, event_id):
                if one.event.kind == "step.started":
                    text = ""
                elif one.event.kind == "text":
                    assert one.event.at == len(text)
                    text += one.event.text or ""
        return text

    def ended(self, event_id: str) -> list[str | None]:
        return [one.event.state for one in self.heard if isinstance(one, Seen) and one.event and _of(one, event_id)][
            -1:
        ]


def _of(one: Seen, event_id: str) -> bool:
    return one.frame.event_id == event_id


async def until(holds: Callable[[], Any]) -> None:
    """Look again and again; what is waited for happens in another process."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.02)


def asked(link: Session, event_id: str, text: str, instance: str) -> asyncio.Future[Answer]:
    return asyncio.ensure_future(link.ask(Message("main", instance, text, event_id=event_id)))


async def test_a_turn_that_runs_and_one_that_begins_are_heard_from_their_steps_beginning(
    running: Sandbox, model: Model
) -> None:
    async with session(running) as asker, session(running) as observer:
        old = asked(asker, "old-1", "one |two |wait|three|wait| four", "old")
        await until(lambda: model.waits() == 1)
        reader, other = Reader(), Reader()
        reader.observation = await observer.observe(Observe(events=1000, bytes=1 << 20), reader)
        await observer.observe(Observe(root_event="new-1", events=1000, bytes=1 << 20), other)
        await reader.until(lambda heard: len(heard) == 2)
        assert reader.kinds("old-1") == ["turn.started", "step.started"]
        new = asked(asker, "new-1", 'call bash__exec {"command":"true"}|done', "new")
        assert (await new).response == "done"
        await reader.until(lambda _: reader.ended("new-1") == ["done"])
        model.go()
        await until(lambda: model.waits() == 2)
        await reader.until(lambda _: reader.text("old-1"))
        assert reader.text("old-1") == "one two three"
        model.go()
        assert (await old).response == "one two three four"
        await reader.until(lambda _: reader.ended("old-1") == ["done"])
        assert reader.text("old-1") == "one two three four"
        assert reader.kinds("old-1")[-3:] == ["step.completed", "turn.completed", "event.ended"]
        assert reader.kinds("new-1") == [
            "event.accepted", "turn.started", "step.started", "tool.called", "tool.completed", "step.completed",
            "step.started", "text", "step.completed", "turn.completed", "event.ended",
        ]  # fmt: skip
        assert [one.number for one in reader.heard if isinstance(one, Seen)] == [*range(1, len(reader.heard) + 1)]
        assert other.kinds("new-1") == reader.kinds("new-1")
        assert other.kinds("old-1") == []


async def test_where_the_asker_listens_an_observer_hears_what_is_new(running: Sandbox, model: Model) -> None:
    told: list[RuntimeEvent] = []
    async with session(running) as asker, session(running) as observer:
        message = Message("main", "heard", "one |two |wait|three", event_id="heard-1")
        answer = asyncio.ensure_future(asker.ask(message, listener=told.append))
        await until(lambda: model.waits() == 1 and "".join(one.text or "" for one in told) == "one two ")
        reader = Reader()
        reader.observation = await observer.observe(Observe(events=1000, bytes=1 << 20), reader)
        model.go()
        assert (await answer).response == "one two three"
        await reader.until(lambda _: reader.ended("heard-1") == ["done"])
        assert reader.kinds("heard-1") == ["text", "step.completed", "turn.completed", "event.ended"]
        (text,) = [one.event for one in reader.heard if isinstance(one, Seen) and one.event and one.event.text]
        assert (text.step, text.at, text.text) == (1, len("one two "), "three")
        assert "".join(one.text or "" for one in told) == "one two three"


async def test_who_does_not_read_gets_one_gap_and_turns_go_on(running: Sandbox) -> None:
    async with session(running) as link:
        reader, slow = Reader(), Reader()
        reader.observation = await link.observe(Observe(agent="main", events=1000, bytes=1 << 20), reader)
        observation = await link.observe(Observe(agent="main", events=3, bytes=1 << 20), slow)
        await asked(link, "slow-1", "a|b|c", "slow")
        await reader.until(lambda _: reader.ended("slow-1") == ["done"])
        all_of_it = len(reader.heard)
        assert [one.number for one in slow.heard if isinstance(one, Seen)] == [1, 2, 3]
        observation.read(3)
        await slow.until(lambda heard: len(heard) == 4)
        assert slow.heard[3] == Missed(4, all_of_it)
        await asked(link, "slow-2", "d", "slow")
        await slow.until(lambda heard: len(heard) == 7)
        assert [one.number for one in slow.heard[4:] if isinstance(one, Seen)] == [all_of_it + at for at in (1, 2, 3)]
        observation.close()
        await asked(link, "slow-3", "e", "slow")
        assert len(slow.heard) == 7


async def test_an_observation_that_was_given_up_or_refused_leaves_nothing(running: Sandbox) -> None:
    wish = Observe(agent="main", events=9, bytes=1 << 20)
    async with session(running) as link:
        kept = [await link.observe(wish, Reader()) for _ in range(15)]
        leaves = asyncio.ensure_future(link.observe(wish, Reader()))
        await asyncio.sleep(0)  # it has asked
        leaves.cancel()
        await asyncio.wait([leaves])
        kept.append(await link.observe(wish, Reader()))  # in its place
        with pytest.raises(GoondanError, match="E_FRAME_INVALID"):
            await link.observe(wish, Reader())
        assert [*link._observations.values()] == kept


async def test_a_hostile_observer_is_refused_and_everybody_else_is_served(running: Sandbox) -> None:
    async with session(running) as link, session(running) as hostile:
        for wish in (
            {"events": 0},
            {"events": -1},
            {"events": 1 << 40},
            {"bytes": 1},
            {"bytes": 1 << 40},
            {"agent": 1},
        ):
            with pytest.raises(GoondanError, match="E_FRAME_INVALID"):
                await hostile.admin({"op": "observe", "events": 9, "bytes": 1 << 20, **wish})
        wishes = [hostile.admin({"op": "observe", "events": 1, "bytes": 32768, "?": [1]}) for _ in range(1000)]
        made = [type(found) for found in await asyncio.gather(*wishes, return_exceptions=True)]
        assert (made.count(dict), made.count(GoondanError)) == (16, 984)
        for number in (5, -3, 1 << 50):
            lie = Frame("observed", in_reply_to="nothing", position=number, payload=to_raw("x" * 5000))
            assert hostile._open.send(lie)
        reader = Reader()
        reader.observation = await link.observe(Observe(events=1000, bytes=1 << 20), reader)
        assert (await asked(link, "served-1", "fine", "served")).response == "fine"
        await reader.until(lambda _: reader.ended("served-1") == ["done"])


async def test_who_does_not_even_read_its_socket_holds_its_window_and_nobody_waits() -> None:
    with bare_broker() as broker:
        got: asyncio.Queue[Frame] = asyncio.Queue()
        token = broker.token("agent", agent="coder", instance_key="k", launch=1)
        agent = Link(broker.endpoint("agent"), token, on_frame=got.put_nowait)
        client = Link(broker.endpoint("client"), broker.token("client", operator=True), on_frame=lambda frame: None)
        await asyncio.gather(agent.start(), client.start())
        event = AgentEvent(id="e1", type="user.message", created_at="2026-11-24T09:30:00Z", input="hi")
        await client.post(Frame("event", to="coder", instance_key="k", event_id="e1", payload=to_raw(event)))
        lease = await got.get()
        dead = broker.hello("client", operator=True)
        dead.ask(Frame("admin", id="o", payload=to_raw({"op": "observe", "events": 4096, "bytes": 1 << 20})))
        before, told = broker.memory(), to_raw(RuntimeEvent(kind="text", text="x" * 12_000))
        for number in range(2000):
            assert agent.send(Frame("runtime.event", event_id="e1", epoch=lease.epoch, payload=told))
            if number % 50 == 0:
                await client.post(Frame("admin", payload=to_raw({"op": "stats"})))
        stats = from_raw((await client.post(Frame("admin", payload=to_raw({"op": "stats"})))).payload, dict)
        assert stats["connections"]["client"] == 2
        assert broker.memory() - before < 8 << 20
        await asyncio.gather(agent.close(0), client.close(0))


async def test_after_a_broker_that_was_killed_an_observer_goes_on(running: Sandbox) -> None:
    async with session(running) as link:
        reader = Reader()
        reader.observation = await link.observe(Observe(events=1000, bytes=1 << 20), reader)
        await asked(link, "before-1", "a", "killed")
        await reader.until(lambda _: reader.ended("before-1") == ["done"])
        count = len(reader.heard)
        os.kill(running.pid("broker"), signal.SIGKILL)
        await reader.until(lambda heard: len(heard) > count)
        assert reader.heard[count] == Missed(count + 1, None)
        await asked(link, "after-1", "b", "killed")
        await reader.until(lambda _: reader.ended("after-1") == ["done"])
        numbers = [one.number for one in reader.heard if isinstance(one, Seen)]
        assert numbers == [*range(1, len(numbers) + 1)]
