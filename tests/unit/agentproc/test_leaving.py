"""How long an agent process that is to leave waits for the step that runs."""

from __future__ import annotations

import asyncio

from goondan.agentproc.start.app import AgentApp
from goondan.schemas.wire.codec import to_raw
from goondan.schemas.wire.frames import Frame, Shutdown
from tests.unit.agentproc.turns import settle


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
