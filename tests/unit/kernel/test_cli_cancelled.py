"""A command that is interrupted in the very moment in which what it waits for comes is interrupted all the same.

`asyncio.wait_for` of Python 3.11 returns the result then: `gdn run` went on after Ctrl-C, and waited for its input.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from goondan.kernel.cli.session import Session
from goondan.schemas.transport.link import Link
from goondan.schemas.wire.frames import Frame


async def test_of_an_answer() -> None:
    session: Any = Session.__new__(Session)
    session._link = None
    answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(session._wait(answer, Frame("ping"), 5.0))
    await asyncio.sleep(0)
    answer.set_result(Frame("pong"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_of_a_welcome() -> None:
    link: Any = Link("ipc:///proc/nobody", "", on_frame=lambda frame: None)
    starting = asyncio.ensure_future(link.start(5.0))
    await asyncio.sleep(0)
    link._welcomed.set_result(None)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await link.close(0)


@pytest.mark.feature("approvals")
async def test_of_news() -> None:
    from goondan.features.approvals.console import Asked

    class Waiting:
        def on(self, frame_type: str, call: Callable[[], None]) -> None:
            self.news = call

        async def admin(self, question: Any, timeout_s: float) -> Any:
            return {"items": []}

    session: Any = Waiting()
    watching = asyncio.ensure_future(Asked(session).watch())
    await asyncio.sleep(0)
    session.news()
    watching.cancel()
    await asyncio.wait({watching}, timeout=1)
    assert watching.cancelled()
