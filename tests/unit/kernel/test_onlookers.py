"""Those who look on: one observation for all, as close as the closest of them wants, over all kernels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from goondan.kernel.cli import onlookers
from goondan.kernel.cli.observing import Missed, Observer, Seen
from goondan.kernel.cli.onlookers import Onlookers
from goondan.schemas.wire.errors import GoondanError, fail
from goondan.schemas.wire.frames import Frame
from goondan.schemas.wire.runtime_events import Observe, RuntimeEvent


def seen(number: int) -> Seen:
    return Seen(number, Frame("observed", from_="main"), RuntimeEvent(kind="text", text="x"))


class Kernel:
    """A session that a test gives news, and ends."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.over = False
        self.read_to = 0
        self.wishes: list[int] = []
        self.open: list[Observer] = []

    async def session(self) -> Any:
        if self.failure is not None:
            raise self.failure
        self.over = False
        return self

    async def observe(self, wish: Observe, listener: Observer) -> Any:
        self.wishes.append(wish.events)
        self.open.append(listener)

        def read(number: int) -> None:
            self.read_to = number

        return SimpleNamespace(read=read, close=lambda: self.open.remove(listener))

    def tell(self, heard: Seen | Missed) -> None:
        (listener,) = self.open
        listener(heard)

    def end(self) -> None:
        self.over, self.failure = True, fail("E_KERNEL_NOT_RUNNING", "none")


class Listener:
    """What one has heard: numbers, and the word gap."""

    def __init__(self) -> None:
        self.heard: list[int | str] = []

    def hear(self, heard: Seen | Missed) -> None:
        self.heard.append(heard.number if isinstance(heard, Seen) else "gap")


async def until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_S", "CALM_S"):
        monkeypatch.setattr(onlookers, name, 0.001)


async def test_all_share_one_observation_which_ends_with_the_last() -> None:
    kernel, one, other = Kernel(), Listener(), Listener()
    looking = Onlookers(kernel.session)
    await looking.add(one.hear)
    await looking.add(other.hear)
    kernel.tell(seen(1))
    assert kernel.read_to == 1
    looking.remove(one.hear)
    await asyncio.sleep(0.01)
    kernel.tell(seen(2))
    assert (one.heard, other.heard, kernel.wishes) == ([1], [1, 2], [4096])
    looking.remove(other.hear)
    looking.remove(other.hear)
    await until(lambda: not kernel.open)
    await looking.add(one.hear)
    kernel.tell(seen(1))
    assert one.heard == [1, 1], "it was no gap that nobody looked on before"
    looking.remove(one.hear)


async def test_while_nobody_looks_closely_a_few_events_of_each_moment_are_heard() -> None:
    kernel, calm, close = Kernel(), Listener(), Listener()
    looking = Onlookers(kernel.session)
    await looking.add(calm.hear, closely=False)
    kernel.tell(seen(1))
    assert kernel.read_to == 0, "it is said to be read with the next look"
    await until(lambda: kernel.read_to)
    await looking.add(close.hear)
    await until(lambda: close.heard == ["gap"])  # observed anew
    assert calm.heard == [1, "gap"] and len(kernel.open) == 1
    kernel.read_to = 0
    kernel.tell(seen(1))
    assert kernel.read_to == 1
    looking.remove(close.hear)
    await until(lambda: calm.heard == [1, "gap", 1, "gap"])
    assert kernel.wishes == [16, 4096, 16]
    looking.remove(calm.hear)


async def test_a_kernel_that_goes_is_a_gap_and_the_next_one_another() -> None:
    kernel, one = Kernel(), Listener()
    looking = Onlookers(kernel.session)
    await looking.add(one.hear)
    kernel.tell(Missed(2, 40))
    assert kernel.read_to == 40 and one.heard == ["gap"]
    kernel.end()
    await until(lambda: one.heard == ["gap", "gap"])
    kernel.failure = None
    await until(lambda: one.heard == ["gap", "gap", "gap"])
    kernel.tell(seen(1))
    assert one.heard[3:] == [1]
    looking.remove(one.hear)


@pytest.mark.parametrize(
    "failure", [fail("E_KERNEL_NOT_RUNNING", "none"), OSError(24, "Too many open files")], ids=["no kernel", "no file"]
)
async def test_without_a_kernel_nobody_waits_and_all_hear_later(failure: Exception) -> None:
    kernel, one = Kernel(), Listener()
    kernel.failure = failure
    looking = Onlookers(kernel.session)
    async with asyncio.timeout(1):
        await looking.add(one.hear)
    kernel.failure = None
    await until(lambda: one.heard == ["gap"])
    looking.remove(one.hear)


async def test_what_the_broker_refuses_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, one = Kernel(), Listener()
    refused: list[GoondanError] = [fail("E_OVERLOADED", "too many")]
    observe = kernel.observe

    async def refuses(wish: Any, listener: Observer) -> Any:
        if refused:
            raise refused.pop()
        return await observe(wish, listener)

    monkeypatch.setattr(kernel, "observe", refuses)
    looking = Onlookers(kernel.session)
    await looking.add(one.hear)
    await until(lambda: one.heard == ["gap"])
    kernel.tell(seen(1))
    assert one.heard == ["gap", 1]
    looking.remove(one.hear)
