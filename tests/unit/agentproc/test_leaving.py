"""When an agent process begins with an event, and how it leaves: what it says last, and how long a step may take."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from goondan.agentproc.start.app import AgentApp
from goondan.schemas.bundle.launch import AgentSpec
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame, Shutdown
from tests.unit.agentproc.fakes import FakeLink, FakeModel, event_frame, make_spec, says
from tests.unit.agentproc.turns import Make, settle, the_answer


def told(app: AgentApp, grace_ms: int | None) -> None:
    app._on_frame(Frame("shutdown", payload=to_raw(Shutdown(grace_ms, "config_change"))))


async def test_without_a_limit_a_step_takes_its_time_until_a_limit_is_set() -> None:
    app = AgentApp("ipc:///nowhere")
    app.link.closed = asyncio.get_running_loop().create_future()
    step: asyncio.Task[None] = asyncio.ensure_future(asyncio.Event().wait())  # type: ignore[arg-type]
    told(app, None)
    waiting = asyncio.ensure_future(app._until_released(step))
    await settle()
    assert not waiting.done()
    told(app, 40)  # the kernel stops
    await asyncio.wait_for(waiting, 2)
    assert not step.done()
    step.cancel()


async def test_a_step_that_ends_is_not_waited_for() -> None:
    app = AgentApp("ipc:///nowhere")
    app.link.closed = asyncio.get_running_loop().create_future()
    end = asyncio.Event()
    step: asyncio.Task[None] = asyncio.ensure_future(end.wait())  # type: ignore[arg-type]
    step.add_done_callback(app._nudge)
    told(app, None)
    waiting = asyncio.ensure_future(app._until_released(step))
    await settle()
    end.set()
    await asyncio.wait_for(waiting, 2)
    assert step.done()


#: What an extension has left in the context in which it was loaded.
LEFT: ContextVar[str] = ContextVar("LEFT", default="nothing")


class Life:
    """The life of an agent process between its welcome and its end: the link and the runner write down what they do."""

    def __init__(self, spec: AgentSpec) -> None:
        loop = asyncio.get_running_loop()
        self.did: list[str] = []
        self.ends = asyncio.Event()
        self.app = AgentApp("ipc:///nowhere")
        link: Any = SimpleNamespace(closed=loop.create_future(), ready=True, post=self.post, send=self.send)
        link.start, link.close = self.start, self.nothing
        self.spec, self.app.link = spec, link
        self.runner: Any = SimpleNamespace(run=self.run, pause=lambda: None, abandon=self.ends.set, close=self.nothing)
        self.runner.load_extensions, self.runner.leases = self.load, list
        self.runner.holds = lambda frame: False
        self.runner.take = lambda frame: self.did.append(f"{frame.type} of {frame.event_id}")
        acks = SimpleNamespace(flush=lambda: self.did.append("acks"))
        extensions = SimpleNamespace(close=self.clean_up)
        self.runner.instance = SimpleNamespace(loop=loop, spec=spec, instance_key="k", acks=acks, extensions=extensions)
        self.app.make_runner = lambda *_: self.runner  # type: ignore[method-assign]

    async def start(self, *, token: str) -> Any:
        return SimpleNamespace(spec=to_raw(self.spec))

    async def nothing(self, *_: Any) -> None:
        pass

    async def load(self) -> None:
        LEFT.set("this")

    async def clean_up(self) -> None:
        self.app._on_frame(event_frame("late", "go"))
        await settle()

    async def run(self, frame: Frame) -> None:
        self.did.append(f"{frame.event_id} with {LEFT.get()}")
        LEFT.set(frame.event_id or "")
        await self.ends.wait()

    def post(self, frame: Frame) -> asyncio.Future[Frame]:
        self.did.append(frame.stage or frame.type)
        said: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        said.set_result(Frame("reply"))
        return said

    def send(self, frame: Frame) -> bool:
        self.did.append(frame.type)
        return True


@pytest.fixture
async def life(tmp_path: Any) -> Life:
    return Life(make_spec(str(tmp_path), idle_s=60.0))


async def test_a_turn_begins_in_the_context_of_the_extensions_whatever_the_broker_interrupts(life: Life) -> None:
    link = copy_context()  # in which a link reads
    lives = asyncio.ensure_future(life.app.live("token"))
    await settle()
    life.ends.set()
    for event_id in ("e1", "e2"):
        link.run(life.app._on_frame, event_frame(event_id, "go"))
        await settle()
    assert life.did == ["e1 with this", "e2 with this"]
    told(life.app, None)
    assert await lives == 0


async def test_what_comes_with_the_welcome_is_taken_when_there_is_a_runner(life: Life) -> None:
    """A message that was cancelled while its agent started would run to its end."""
    life.app._on_frame(event_frame("e1", "go"))
    life.app._on_frame(Frame("tool.cancel", event_id="e1", epoch=1))
    life.ends.set()
    lives = asyncio.ensure_future(life.app.live("token"))
    await settle()
    assert life.did == ["tool.cancel of e1", "e1 with this"]
    told(life.app, None)
    assert await lives == 0


async def test_who_listens_to_an_event_that_waits_for_its_turn_is_kept_with_it(life: Life) -> None:
    life.app._on_frame(frame := event_frame("e1", "go"))
    life.app._on_frame(Frame("listen", event_id="e1", epoch=7, live=True))
    assert not frame.live
    life.app._on_frame(Frame("listen", event_id="e1", epoch=1, live=True))
    assert frame.live and life.app._early == [Frame("listen", event_id="e1", epoch=7, live=True)]


async def test_an_event_is_not_begun_with_when_the_process_has_said_goodbye(life: Life) -> None:
    life.spec = structs.replace(life.spec, idle_s=0.0)
    assert await life.app.live("token") == 0
    assert life.did == ["acks", "bye"]


async def test_a_step_that_is_cut_off_has_told_what_it_stored_before_its_event_is_released(life: Life) -> None:
    lives = asyncio.ensure_future(life.app.live("token"))
    await settle()
    life.app._on_frame(event_frame("e1", "go"))
    life.app._on_frame(event_frame("e2", "go"))
    await settle()
    told(life.app, 20)
    assert await lives == 0
    assert life.did == ["e1 with this", "acks", "release", "shutdown_ack"]


async def test_an_event_is_held_from_the_moment_in_which_it_came(make: Make, link: FakeLink) -> None:
    """What the broker's next frame is about, such as its question who holds what, may have been read with it."""
    app, runner = AgentApp("ipc:///nowhere"), make(link, FakeModel(says("done")))
    app._runner, app._context = runner, copy_context()
    frame = event_frame("e1", "go")
    app._on_frame(frame)
    assert [lease.event_id for lease in app._held()["leases"]] == ["e1"]
    app._on_frame(frame)
    assert not app._inbox, "it is being worked on"
    assert app._working is not None
    await app._working
    assert app._held()["leases"] == []
    assert the_answer(link).response == "done"
