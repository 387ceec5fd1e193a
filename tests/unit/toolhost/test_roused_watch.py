"""When the watch of limits wakes up: at once for a jail that nobody knows as quick, else after jails have run for
DISK_S, however many calls that are.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from goondan.schemas.bundle.launch import Limits
from goondan.toolhost.watch.jail_usage import JailUsage
from goondan.toolhost.watch.keeper import Keeper
from goondan.toolhost.watch.watch import DISK_S, Watch
from tests.toolhost_fixture import POWERS, until


class Watched:
    """A watch of one jail, whose looks at free space are counted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        self.calls: list[str] = []
        ask = os.statvfs

        def counted(place: str) -> os.statvfs_result:
            self.looks += place == str(folder)
            return ask(place)

        monkeypatch.setattr(os, "statvfs", counted)
        self.jail = JailUsage(Limits(), [str(folder)], Keeper(POWERS), 0, POWERS)
        self.jail.running = lambda: self.calls or None
        self.watch = Watch(asyncio.get_running_loop(), lambda jail, limit, calls: None)

    def begin(self) -> None:
        """The jail gets a call."""
        self.calls.append("1")
        self.watch.wake(self.jail)

    def end(self) -> None:
        """Its call ends."""
        self.calls.clear()
        self.watch.rest(self.jail)

    async def is_quick(self) -> None:
        """Have the jail end a call at once, and the watch sleep again."""
        self.begin()
        self.end()
        await until(lambda: self.looks and self.watch._asleep)
        self.looks = 0


@asynccontextmanager
async def watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    """The watch sleeps, and its jail has run nothing."""
    made = Watched(folder, monkeypatch)
    made.watch.add(made.jail)
    try:
        await until(lambda: made.watch._asleep and made.looks)
        made.looks = 0
        yield made
    finally:
        made.watch.close()
        made.jail.close()


def test_the_first_call_of_a_jail_is_looked_at_however_busy_the_loop_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with watched(tmp_path, monkeypatch) as made:
            for _ in range(2):
                made.begin()
                time.sleep(0.2)  # the loop does nothing meanwhile
                assert made.looks > 0
                made.end()  # this call was slow, so the next one is looked at like the first
                await until(lambda: made.watch._asleep)
                made.looks = 0

    asyncio.run(scenario())


def test_calls_that_end_at_once_wake_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with watched(tmp_path, monkeypatch) as made:
            await made.is_quick()
            for _ in range(20):
                made.begin()
                made.end()
            await asyncio.sleep(3 * DISK_S)
            assert made.looks == 0

    asyncio.run(scenario())


def test_a_call_that_goes_on_is_looked_at_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with watched(tmp_path, monkeypatch) as made:
            made.begin()
            await until(lambda: made.looks >= 3)
            made.end()
            await until(lambda: made.watch._asleep)

    asyncio.run(scenario())


def test_short_calls_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A jail that writes in many short calls is looked at as often for the time that it runs."""

    async def scenario() -> None:
        async with watched(tmp_path, monkeypatch) as made:
            await made.is_quick()
            for _ in range(5):
                made.begin()
                time.sleep(DISK_S / 4)  # the loop does nothing meanwhile, so no timer can be due in a call
                made.end()
            made.begin()
            await asyncio.sleep(0.001)  # what is due is done
            made.end()
            await until(lambda: made.looks)

    asyncio.run(scenario())


def test_the_watch_goes_on_while_another_jail_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with watched(tmp_path, monkeypatch) as made:
            other = JailUsage(Limits(), [], Keeper(POWERS), 0, POWERS)
            made.begin()
            made.watch.wake(other)
            made.watch.rest(other)
            await until(lambda: made.looks)
            made.end()
            other.close()

    asyncio.run(scenario())
