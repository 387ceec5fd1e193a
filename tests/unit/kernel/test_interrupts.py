"""What a signal does to a command that waits: it cancels, then it leaves."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

from goondan.kernel.cli import starting
from goondan.kernel.cli.commands import run
from goondan.kernel.cli.session import Cancelling, Interrupts
from goondan.kernel.cli.state import BundleTarget
from goondan.schemas.wire.errors import GoondanError, fail


class Session:
    """Hears what is cancelled; `known` are the events that there are."""

    def __init__(self, *known: str) -> None:
        self.known = known
        self.cancelled: list[str] = []

    async def cancel(self, event_id: str, timeout_s: float | None = None) -> str:
        self.cancelled.append(event_id)
        if event_id not in self.known:
            raise fail("E_EVENT_NOT_FOUND", "no such event")
        return "cancelled"


async def test_the_first_signal_cancels_and_the_answer_is_still_waited_for() -> None:
    session, told = Session("e1"), [0]
    answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    cancelling = Cancelling(session.cancel, lambda: ["e0", "e1"], on_first=lambda: told.append(1))
    with Interrupts(cancelling.came, signal.SIGTERM) as interrupts:
        waiting = asyncio.create_task(cancelling.wait(answer))
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            while len(session.cancelled) < 2:
                await asyncio.sleep(0)
        answer.set_result("cancelled it was")
        assert await waiting == "cancelled it was"
    assert (session.cancelled, told, cancelling.left, interrupts.status) == (["e0", "e1"], [0, 1], False, 143)


@pytest.mark.parametrize("again", [True, False])
async def test_the_second_one_or_too_long_a_wait_gives_it_up(again: bool) -> None:
    answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    cancelling = Cancelling(Session("e1").cancel, lambda: ["e1"], patience_s=None if again else 0.0)
    waiting = asyncio.create_task(cancelling.wait(answer))
    await asyncio.sleep(0)
    cancelling.came()
    if again:
        cancelling.came()
    async with asyncio.timeout(5):
        assert await waiting is None
    assert cancelling.left
    assert answer.cancelled()


async def test_what_nobody_interrupts_ends_as_it_does() -> None:
    async def fails() -> str:
        raise fail("E_KERNEL_LOST", "gone")

    cancelling = Cancelling(Session().cancel, lambda: ["e1"])
    with pytest.raises(GoondanError):
        await cancelling.wait(asyncio.ensure_future(fails()))
    stopped = asyncio.ensure_future(Cancelling(Session().cancel, list).wait(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    stopped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped


def test_one_before_what_runs_beside_a_detached_kernel_is_ready_stops_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    done: list[str] = []
    started = SimpleNamespace(wait_end=lambda: done.append("gone"))
    monkeypatch.setattr(starting, "start_supervisor", lambda *_, **__: started)
    monkeypatch.setattr(run, "_start_beside", interrupted)
    monkeypatch.setattr(run, "ask_supervisor", lambda _, op: done.append(op))
    with pytest.raises(KeyboardInterrupt):
        run._detach(BundleTarget("", ""), [["serve"]])
    assert done == ["stop", "gone"]
